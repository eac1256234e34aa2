"""A host's certificate is renewed by itself, and what keeps a renewed one from its use is tried again."""

from __future__ import annotations

import asyncio
import datetime
import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography import x509
from structlog.testing import capture_logs

from cluster_manager import authority as signing
from cluster_manager.authority import CertificateAuthority
from ebbtide.messages.enrolment import Renewal, RenewalRequest
from ebbtide.rest.errors import AccessError
from hostagent.control import renewal
from hostagent.control.renewal import Renewing, load
from tests.rest.pki import Pki
from tests.waiting import until


async def test_a_renewed_certificate_that_was_refused_once_is_taken_into_use_at_the_next_look(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    own = pki.pair("host-b")
    authority = CertificateAuthority.load(pki.ca, tmp_path / "ca.key")
    came: list[str] = []
    refusals = ["a key that everybody can read", "a typo in the tokens file"]
    in_use = [load(own.certificate).serial_number]

    async def sign(request: web.Request) -> web.Response:
        asked = RenewalRequest.model_validate_json(await request.text())
        came.append(asked.csr)
        signed = Renewal(certificate=authority.answer(asked.csr, "host-b", (asked.address,), 30.0))
        return web.json_response(text=signed.model_dump_json())

    def apply() -> Callable[[], None]:
        if refusals:
            raise AccessError(refusals.pop())
        return lambda: in_use.append(load(own.certificate).serial_number)

    app = web.Application()
    app.router.add_post("/v1/hosts/host-b/certificate", sign)
    late = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=20)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        renewing = Renewing("host-b", "127.0.0.1", own, [url], "a-token", pki.client(), apply, lambda: late)
        for why in ("a typo in the tokens file", "a key that everybody can read"):
            with pytest.raises(AccessError, match=f"the renewed one is there, but not in use: {why}"):
                await renewing.look()
        assert await renewing.look()
        assert in_use[1:] == [load(own.certificate).serial_number]
        assert not await renewing.look(), "it lasts"
    assert len(came) == 1, "one is enough, however often it is tried to use it"


async def test_an_answer_of_a_later_manager_with_more_in_it_is_a_renewal(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    own = pki.pair("host-b")
    authority = CertificateAuthority.load(pki.ca, tmp_path / "ca.key")

    async def sign(request: web.Request) -> web.Response:
        asked = RenewalRequest.model_validate_json(await request.text())
        certificate = authority.answer(asked.csr, "host-b", (asked.address,), 30.0)
        return web.json_response({"certificate": certificate, "not_after": "2030-01-01"})

    app = web.Application()
    app.router.add_post("/v1/hosts/host-b/certificate", sign)
    late = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=20)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        assert await Renewing(
            "host-b", "127.0.0.1", own, [url], "a-token", pki.client(), lambda: lambda: None, lambda: late
        ).look()


@pytest.mark.parametrize("ahead", [datetime.timedelta(days=20), datetime.timedelta(days=-40)])
async def test_a_certificate_that_does_not_count_now_does_not_replace_one_that_does(
    ahead: datetime.timedelta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager with a wrong clock signs such ones; with them the host could never ask again."""
    pki = Pki(tmp_path)
    own = pki.pair("host-b")
    authority, before = CertificateAuthority.load(pki.ca, tmp_path / "ca.key"), own.certificate.read_bytes()
    late = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=20)
    wrong = [True, False]

    ahead_of_us = SimpleNamespace(
        datetime=SimpleNamespace(now=lambda _: late + ahead), timedelta=datetime.timedelta, UTC=datetime.UTC
    )

    async def sign(request: web.Request) -> web.Response:
        asked = RenewalRequest.model_validate_json(await request.text())
        with monkeypatch.context() as here:
            if wrong.pop(0):
                here.setattr(signing, "datetime", ahead_of_us)
            certificate = authority.answer(asked.csr, "host-b", (asked.address,), 30.0)
        return web.json_response(text=Renewal(certificate=certificate).model_dump_json())

    app = web.Application()
    app.router.add_post("/v1/hosts/host-b/certificate", sign)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        renewing = Renewing(
            "host-b", "127.0.0.1", own, [url], "a-token", pki.client(), lambda: lambda: None, lambda: late
        )
        with pytest.raises(AccessError, match="UTC, not now: look at the clocks of its machine and of this one; it is"):
            await renewing.look()
        assert own.certificate.read_bytes() == before
        assert await renewing.look(), "once the clock is right"
    assert own.certificate.read_bytes() != before


@pytest.mark.parametrize("silent", [False, True])
async def test_a_host_whose_clock_is_behind_takes_a_renewed_certificate_once_it_counts_by_that_clock(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new one begins as much later: only one of before ever counts. It is there also where no manager answers."""
    pki = Pki(tmp_path)
    own = pki.pair("host-b")
    authority, before = CertificateAuthority.load(pki.ca, tmp_path / "ca.key"), load(own.certificate)
    start = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=20)
    passed, signed = [datetime.timedelta()], list[x509.Certificate]()
    right = SimpleNamespace(now=lambda _: start + passed[0])
    monkeypatch.setattr(
        signing, "datetime", SimpleNamespace(datetime=right, timedelta=datetime.timedelta, UTC=datetime.UTC)
    )

    async def sign(request: web.Request) -> web.Response:
        if silent and signed:
            return web.json_response(status=503)
        asked = RenewalRequest.model_validate_json(await request.text())
        certificate = authority.answer(asked.csr, "host-b", (asked.address,), 30.0)
        signed.append(x509.load_pem_x509_certificate(certificate.encode()))
        return web.json_response(text=Renewal(certificate=certificate).model_dump_json())

    def behind() -> datetime.datetime:
        return start + passed[0] - datetime.timedelta(minutes=15)

    app = web.Application()
    app.router.add_post("/v1/hosts/host-b/certificate", sign)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        renewing = Renewing("host-b", "127.0.0.1", own, [url], "a-token", pki.client(), lambda: lambda: None, behind)
        for minutes in (0, 2):
            passed[0] = datetime.timedelta(minutes=minutes)
            with pytest.raises(AccessError):
                await renewing.look()
            assert load(own.certificate) == before
        passed[0] = datetime.timedelta(minutes=6)
        assert await renewing.look()
        assert load(own.certificate) == signed[0]
        assert not await renewing.look(), "it lasts"


@pytest.mark.parametrize(("hours", "said"), [(20, "it is valid for 0.2 days more"), (96, "it has ended 3.0 days ago")])
async def test_what_is_not_renewed_says_whether_the_certificate_has_ended(
    hours: int, said: str, tmp_path: Path
) -> None:
    pki = Pki(tmp_path)
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
    own, url = pki.pair("host-b"), "https://127.0.0.1:1"
    renewing = Renewing("host-b", "127.0.0.1", own, [url], "a-token", pki.client(), lambda: lambda: None, lambda: now)
    with pytest.raises(AccessError, match=f"; {said}$"):
        await renewing.look()


async def test_an_address_that_no_certificate_can_have_does_not_end_the_renewal(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    late = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=20)
    own, url = pki.pair("host-b"), "https://127.0.0.1:1"
    renewing = Renewing("host-b", "::1", own, [url], "a-token", pki.client(), lambda: lambda: None, lambda: late)
    with capture_logs() as logs:
        running = asyncio.create_task(renewing.run(), name="renewal")
        await until(lambda: bool(logs) or running.done())
    assert [line["event"] for line in logs] == ["the certificate was not renewed"]
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_certificate_that_could_not_be_kept_is_not_asked_for_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki(tmp_path)
    own, looks, asked = pki.pair("host-b"), [0], [0]
    late = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=20)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def now() -> datetime.datetime:
        looks[0] += 1
        return late

    async def sign(_: web.Request) -> web.Response:
        asked[0] += 1
        return web.json_response(status=503)

    monkeypatch.setattr(renewal, "EVERY_S", 0.01)
    app = web.Application()
    app.router.add_post("/v1/hosts/host-b/certificate", sign)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        renewing = Renewing("host-b", "127.0.0.1", own, [url], "a-token", pki.client(), lambda: lambda: None, now)
        with capture_logs() as logs, monkeypatch.context() as here:
            here.setattr(tempfile, "TemporaryFile", refuse)
            here.setattr(renewal, "replace", refuse)
            running = asyncio.create_task(renewing.run(), name="renewal")
            await until(lambda: looks[0] > 3 or running.done())
            assert [line["event"] for line in logs] == ["the certificate cannot be renewed"]
            assert logs[0]["why"] == f"{own.certificate.parent} cannot be written: Read-only file system"
            assert asked == [0]
            here.undo()
            # Once there is a place for it the managers are asked.
            await until(lambda: asked[0] > 0 or running.done())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert asked[0] > 0
