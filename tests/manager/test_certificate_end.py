"""That a certificate of the manager's ends soon is told in time: in its metrics, and in its log when it starts."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import sqlite3
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from cluster_manager.configured import settings_of_all
from cluster_manager.inventory import certificate_end
from cluster_manager.inventory.certificate_end import warn_of_end
from cluster_manager.options import ManagerOptions
from cluster_manager.serving import serve
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
    monkeypatch.setattr(certificate_end, "LOOKED_EVERY_S", 0.01)
    options = options_of(tmp_path, pki)

    def events() -> int:
        with contextlib.closing(sqlite3.connect(options.database)) as store:
            (count,) = store.execute("SELECT count(*) FROM events WHERE kind = 'certificate-ends'").fetchone()
        return int(count)

    running = asyncio.create_task(serve(*settings_of_all(options)))
    with capture_logs() as logs:
        await until(lambda: running.done() or (sum("ends" in line for line in logs) > 2 and events() > 2))
    assert not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.usefixtures("each_store")
async def test_whoever_begins_to_lead_has_an_event_that_its_certificate_ends_at_once(tmp_path: Path, pki: Pki) -> None:
    own = [pki.pair("ebb-manager", days=40).certificate.read_bytes()]
    async with cluster_of(tmp_path, certificates=lambda: own) as cluster:

        async def events() -> list[str]:
            return [row["sentence"] for row in (await cluster.get("/v1/events?kind=certificate-ends"))["events"]]

        assert cluster.manager is not None
        await cluster.manager._certificate_end.tell()
        assert await events() == []
        own[:] = [pki.pair("ebb-manager", days=20).certificate.read_bytes()]
        for terms in (1, 2):
            await cluster.stop_manager()
            await cluster.start_manager()
            async with asyncio.timeout(20.0):
                while len(told := await events()) < terms:
                    await asyncio.sleep(0.01)
            assert len(told) == terms
    ends = end_of(tmp_path / "tls/ebb-manager.pem").isoformat(timespec="seconds")
    assert {f" ends at {ends}: " in sentence for sentence in told} == {True}
