"""That a certificate of the manager's ends soon is told in time: in its metrics, and in its log when it starts."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from cluster_manager import serving
from cluster_manager.configured import settings_of_all
from cluster_manager.manager import Manager
from cluster_manager.options import ManagerOptions
from cluster_manager.serving import serve, tell_of_end, warn_of_end
from ebbtide.lab.state import write_private
from ebbtide.rest.gate import Gate
from ebbtide.rest.tls import first_end
from tests.manager.api.test_metrics import values_of
from tests.manager.cluster import cluster_of
from tests.rest.pki import Pki
from tests.waiting import until

EXPIRY = "ebbtide_manager_certificate_expiry_timestamp_seconds"


def end_of(path: Path) -> datetime.datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "tls")


def options_of(directory: Path, pki: Pki) -> ManagerOptions:
    pair = pki.pair("ebb-manager")
    for name in ("token", "hosts.key"):
        write_private(directory / name, f"the-{name}")
    return ManagerOptions(
        listen="127.0.0.1:0",
        database=str(directory / "manager.sqlite"),
        token_file=directory / "token",
        hosts_key_file=directory / "hosts.key",
        tls_certificate=pair.certificate,
        tls_key=pair.key,
        client_ca=pki.ca,
    )


def gate_of(directory: Path, pki: Pki) -> Gate:
    settings, gate = settings_of_all(options_of(directory, pki))
    assert settings.certificates() == gate.certificates()
    return gate


@pytest.mark.usefixtures("each_store")
async def test_the_metrics_say_when_the_first_certificate_ends(tmp_path: Path, pki: Pki) -> None:
    certificates = gate_of(tmp_path, pki).certificates
    async with cluster_of(tmp_path, certificates=certificates) as cluster:
        assert (await values_of(cluster))[EXPIRY] == end_of(tmp_path / "tls/ebb-manager.pem").timestamp()
    async with cluster_of(tmp_path) as cluster:
        assert EXPIRY not in await values_of(cluster), "there is none"


def test_the_ca_counts_where_it_ends_first(tmp_path: Path, pki: Pki) -> None:
    own = pki.pair("ebb-manager").certificate.read_bytes()
    ca = pki.ca.read_bytes()
    assert first_end([own, ca]) == first_end([ca, own]) == end_of(tmp_path / "tls/ebb-manager.pem")
    assert first_end([ca]) == end_of(pki.ca)
    assert first_end([]) is None


def test_a_new_certificate_counts_when_it_is_in_force(tmp_path: Path, pki: Pki) -> None:
    gate = gate_of(tmp_path, pki)
    before = first_end(gate.certificates())
    pki.pair("ebb-manager", days=300)
    assert first_end(gate.certificates()) == before
    gate.read_again()()
    assert first_end(gate.certificates()) == end_of(tmp_path / "tls/ebb-manager.pem") != before


def test_what_was_read_before_a_renewal_takes_nothing_back_that_was_read_after_it(tmp_path: Path, pki: Pki) -> None:
    gate = gate_of(tmp_path, pki)
    first = gate.read_again()
    pki.pair("ebb-manager", days=300)
    second = gate.read_again()
    changes: list[str] = []
    gate.on_change = lambda: changes.append("changed")
    second()
    assert gate.server is not None
    renewed = gate.server.inner
    first()
    assert (gate.server.inner, changes) == (renewed, ["changed"])
    assert first_end(gate.certificates()) == end_of(tmp_path / "tls/ebb-manager.pem")
    # What is read after that counts again.
    gate.read_again()()
    assert gate.server.inner is not renewed


def test_a_manager_whose_certificate_ends_in_less_than_thirty_days_says_so_when_it_starts(pki: Pki) -> None:
    own = pki.pair("ebb-manager", days=40).certificate.read_bytes()
    now = datetime.datetime.now(datetime.UTC)
    with capture_logs() as logs:
        warn_of_end([own], now)
        warn_of_end([], now + datetime.timedelta(days=11))
        assert not logs
        warn_of_end([own], now + datetime.timedelta(days=11))
    (said,) = logs
    assert said["log_level"] == "warning"
    assert said["days"] == pytest.approx(29, abs=0.1)


async def test_a_manager_that_runs_on_says_again_and_again_that_its_certificate_ends(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LOOKED_EVERY_S", 0.01)
    running = asyncio.create_task(serve(*settings_of_all(options_of(tmp_path, pki))))
    with capture_logs() as logs:
        await until(lambda: running.done() or [line["log_level"] for line in logs].count("warning") > 2)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.usefixtures("each_store")
async def test_only_the_manager_that_leads_has_an_event_that_its_certificate_ends(tmp_path: Path, pki: Pki) -> None:
    own = [pki.pair("ebb-manager", days=40).certificate.read_bytes()]
    async with cluster_of(tmp_path, certificates=lambda: own) as cluster:
        assert cluster.manager is not None
        await tell_of_end(cluster.manager)
        assert not (await cluster.get("/v1/events"))["events"]
        own[:] = [pki.pair("ebb-manager", days=20).certificate.read_bytes()]
        await tell_of_end(cluster.manager)
        await tell_of_end(Manager(cluster.manager.settings))
        (event,) = (await cluster.get("/v1/events?kind=certificate-ends"))["events"]
    ends = end_of(tmp_path / "tls/ebb-manager.pem").isoformat(timespec="seconds")
    assert f" ends at {ends}: " in event["sentence"]
