"""Attacks on enrolment: another manager's certificate behind the true one, a manager's address, another host's id."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from cluster_manager.api.enrolment import _has_it_already
from cluster_manager.authority import CertificateAuthority, plain_address
from cluster_manager.errors import LostLeadership, RequestError
from cluster_manager.inventory.enrolment import Enrolments
from cluster_manager.store.store import Store
from ebbtide.messages.enrolment import EnrolmentRequest, InvitationRequest, RenewalRequest
from ebbtide.messages.operations import OperationState
from ebbtide.rest.credentials import report_token
from ebbtide.rest.tls import KeyPair, server_context
from hostagent import joining
from hostagent.control.renewal import request_of
from hostagent.errors import HostAgentError
from tests.manager.api.test_enrolment import request
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.rest.pki import Pki

REPO = Path(__file__).resolve().parents[3]
MANAGER = "192.0.2.1"
URL = f"https://{MANAGER}:7100"


def fingerprint(pem: str) -> str:
    """As an invitation has it."""
    return x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256()).hex()


def padded_ca(directory: Path) -> str:
    """A CA's certificate whose Base64 ends with padding, as two of three do: there a reader of Base64 stops."""
    for number in range(100):
        text = Pki(directory / str(number)).ca.read_text()
        if "=" in text:
            return text
    raise AssertionError("every certificate has a length that three divides")


@contextlib.asynccontextmanager
async def serving(app: web.Application, own: KeyPair) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(own))
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_manager_of_another_ca_whose_certificate_stands_behind_the_true_one_hears_no_invitation(
    tmp_path: Path,
) -> None:
    true = padded_ca(tmp_path)
    rogue = Pki(tmp_path / "rogue")
    heard: list[str] = []

    async def ca(_: web.Request) -> web.Response:
        return web.json_response({"ca": true.rstrip("\n") + "\n" + rogue.ca.read_text()})

    async def enrol(came: web.Request) -> web.Response:
        heard.append(await came.text())
        return web.json_response({}, status=403)

    app = web.Application()
    app.add_routes([web.get("/v1/ca", ca), web.post("/v1/enrolments", enrol)])
    async with serving(app, rogue.pair("ebb-manager")) as url:
        words = [url, f"{'k' * 43}.{fingerprint(true)}", "--id", "host-b", "--no-start"]
        words += ["--config", str(tmp_path / "hostagent.toml"), "--directory", str(tmp_path / "enrolment")]
        with pytest.raises(HostAgentError, match="answers what cannot be"):
            await asyncio.to_thread(joining.join, words)
        assert not heard, "the invitation went to whoever answered"


async def test_of_a_ca_that_is_fetched_only_what_was_compared_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what comes should once be taken as it is."""
    true, rogue = padded_ca(tmp_path), Pki(tmp_path / "rogue").ca.read_text()

    async def ask(*_: Any) -> Any:
        class Said:
            ca = true.rstrip("\n") + "\n" + rogue

        return Said

    monkeypatch.setattr(joining, "_ask", ask)
    trusted = (await joining._trusted(URL, fingerprint(true))).get_ca_certs(binary_form=True)
    assert trusted == [ssl.PEM_cert_to_DER_cert(true)]


def test_a_host_that_purges_the_package_keeps_no_key_and_no_tokens() -> None:
    script = (REPO / "packaging/debian/postrm").read_text()
    assert f"rm -rf {joining.DIRECTORY}\n" in script.partition('"$1" = purge')[2].partition("\nfi")[0]


# --- at the manager --------------------------------------------------------------------------------------------------


class Parts:
    """Enrolments on a store of their own, of a manager at `MANAGER`."""

    def __init__(self, directory: Path) -> None:
        self.pki = Pki(directory / "ca")
        self.database = directory / "manager.sqlite"
        own = self.pki.pair("mgr-1", (MANAGER, "manager.example"))
        self.authority = CertificateAuthority.load(self.pki.ca, directory / "ca/ca.key", own.certificate)
        self.hosts: set[str] = set()
        self.lost: frozenset[str] = frozenset()
        self.now = 1000.0

    async def term(self, url: str = URL) -> Enrolments:
        store = Store(self.database, lambda: self.now)
        await store.open(url)
        made = Enrolments(
            store,
            HOSTS_KEY,
            self.authority,
            url,
            30.0,
            self.hosts.__contains__,
            lambda: self.now,
            lambda: self.lost,
        )
        await made.recall()
        return made


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    made = Parts(tmp_path)
    terms: list[Enrolments] = []
    begin = made.term

    async def term(url: str = URL) -> Enrolments:
        terms.append(await begin(url))
        return terms[-1]

    made.term = term  # type: ignore[method-assign]
    yield made
    for one in terms:
        await one._store.close()


def asking(token: str, host: str, address: str = "192.0.2.11") -> EnrolmentRequest:
    return EnrolmentRequest(token=token, host=host, address=address, csr=request(host))


async def test_a_host_is_told_every_manager_that_has_led_and_that_it_could_reach(parts: Parts) -> None:
    for url in ("https://192.0.2.9:7100", "http://192.0.2.8:7100", "https://127.0.0.1:7100"):
        await parts.term(url)
    manager = await parts.term()
    token = (await manager.invite(InvitationRequest())).token
    assert (await manager.enrol(asking(token, "host-b"))).managers == (URL, "https://192.0.2.9:7100")


async def test_a_host_gets_no_certificate_for_a_managers_address(parts: Parts) -> None:
    """Else it could answer people, who know the manager by its address, and would have their tokens."""
    await (await parts.term("https://192.0.2.9:7100"))._store.close()
    manager = await parts.term()
    token = (await manager.invite(InvitationRequest())).token
    parts.hosts.add("host-c")
    # Its own, by all that is in its certificate; and that of a manager that has led before.
    for address in (MANAGER, "manager.example", "MANAGER.example", "192.0.2.9"):
        with pytest.raises(RequestError, match="is a manager's"):
            await manager.enrol(asking(token, "host-b", address))
        with pytest.raises(RequestError, match="is a manager's"):
            await manager.renew("host-c", RenewalRequest(csr=request("host-c"), address=address))
    assert (await manager.enrol(asking(token, "host-b"))).certificate
    # A host agent may run on the manager's own machine.
    assert (await manager.renew("host-b", RenewalRequest(csr=request("host-b"), address=MANAGER), True)).certificate


async def test_a_host_on_the_machine_of_another_manager_joins_by_its_name_and_renews_from_there(parts: Parts) -> None:
    """Guests behind that machine come from its address, too: an invitation for any host takes none of them there."""
    other = "192.0.2.9"
    await (await parts.term(f"https://{other}:7100"))._store.close()
    manager = await parts.term()
    named = (await manager.invite(InvitationRequest(host="host-b"))).token
    any_host = (await manager.invite(InvitationRequest())).token
    for token, host, remote in ((named, "host-b", "192.0.2.11"), (named, "host-b", None), (any_host, "host-c", other)):
        with pytest.raises(RequestError, match="is a manager's"):
            await manager.enrol(asking(token, host, other), False, remote)
    assert (await manager.enrol(asking(named, "host-b", other), False, f"::ffff:{other}")).certificate
    again = RenewalRequest(csr=request("host-b"), address=other)
    assert (await manager.renew("host-b", again, False, other, True)).certificate


@pytest.mark.parametrize(
    ("remote", "named", "refused"),
    [
        ("::ffff:192.0.2.9", ("192.0.2.9",), ""),
        # A guest behind that machine, which joined by another address.
        ("192.0.2.9", ("192.0.2.11",), ", for which a host has to be invited by its name: `ebb host invite host-b`, "),
        ("192.0.2.11", ("192.0.2.9",), ", and the request came from 192.0.2.11$"),
        (None, ("192.0.2.9",), ", and nobody knows from where the request came$"),
        ("192.0.2.9", (), ", for which a host has to be invited by its name"),
    ],
)
async def test_a_host_keeps_a_managers_address_only_from_there_and_where_it_has_it(
    remote: str | None, named: tuple[str, ...], refused: str, parts: Parts
) -> None:
    other = "192.0.2.9"
    await (await parts.term(f"https://{other}:7100"))._store.close()
    manager = await parts.term()
    parts.hosts.add("host-b")
    asked = RenewalRequest(csr=request("host-b"), address=other)
    renewing = manager.renew("host-b", asked, False, remote, _has_it_already(showing(*named), other))
    if not refused:
        assert (await renewing).certificate
    else:
        with pytest.raises(RequestError, match=f"^address: {other} is a manager's, or once was{refused}"):
            await renewing


async def test_a_host_that_has_the_name_of_a_managers_machine_joins_by_its_name_and_renews_from_there(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request comes from an IP address, of which the name is known to the manager."""
    other, there = "b.example", "192.0.2.9"

    async def look_up(name: str, _: object) -> list[Any]:
        if name != other:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0)) for place in ("192.0.2.8", there)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    await (await parts.term(f"https://{other}:7100"))._store.close()
    manager = await parts.term()
    named = (await manager.invite(InvitationRequest(host="host-b"))).token
    again = RenewalRequest(csr=request("host-b"), address=other)
    parts.hosts.add("host-b")
    elsewhere = f"address: {other} is a manager's, or once was, and the request came from 192.0.2.11; {other} is "
    for asked in (
        manager.enrol(asking(named, "host-b", other), False, "192.0.2.11"),
        manager.renew("host-b", again, False, "192.0.2.11", True),
    ):
        with pytest.raises(RequestError) as refused:
            await asked
        assert str(refused.value) == f"{elsewhere}192.0.2.8, 192.0.2.9"
    assert (await manager.enrol(asking(named, "host-b", other), False, f"::ffff:{there}")).certificate
    assert (await manager.renew("host-b", again, False, there, True)).certificate


async def test_a_dns_that_fails_is_told_as_that_and_not_as_a_host_to_be_invited_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "b.example"
    await (await parts.term(f"https://{other}:7100"))._store.close()
    manager = await parts.term()
    named = (await manager.invite(InvitationRequest(host="host-b"))).token
    parts.hosts.add("host-b")
    errors = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), TimeoutError()]

    async def look_up(*_: object) -> list[Any]:
        raise errors.pop(0)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    said = f"address: {other} is a manager's, or once was, and the request came from 192.0.2.9; {other} could not be"
    with pytest.raises(RequestError) as refused:
        await manager.enrol(asking(named, "host-b", other), False, "192.0.2.9")
    assert str(refused.value) == f"{said} looked up: Temporary failure in name resolution"
    with pytest.raises(RequestError) as refused:
        await manager.renew("host-b", RenewalRequest(csr=request("host-b"), address=other), False, "192.0.2.9", True)
    assert str(refused.value) == f"{said} looked up: no answer in time"


async def test_no_name_is_looked_up_but_a_managers_and_a_revocation_does_not_wait_for_it(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's own name is a stranger's word; and any DNS may be silent."""
    other, looked_up, answered = "b.example", asyncio.Semaphore(0), asyncio.Event()

    async def look_up(name: str, _: object) -> list[Any]:
        assert name == other
        looked_up.release()
        await answered.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.9", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    await (await parts.term(f"https://{other}:7100"))._store.close()
    manager = await parts.term()
    named = (await manager.invite(InvitationRequest(host="host-b"))).token
    for_any = (await manager.invite(InvitationRequest())).token
    for token, status in (("x" * 43, 403), (for_any, 400)):
        with pytest.raises(RequestError) as refused:
            await manager.enrol(asking(token, "host-c", other), False, "192.0.2.9")
        assert refused.value.status == status
    assert looked_up.locked()
    own = asking(named, "host-b", "stranger.example")
    again = RenewalRequest(csr=request("host-b"), address=own.address)
    assert (await manager.enrol(own, False, "192.0.2.9")).certificate
    assert (await manager.renew("host-b", again, False, "192.0.2.9", True)).certificate
    moved = own.model_copy(update={"address": other})
    joins = asyncio.create_task(manager.enrol(moved, False, "192.0.2.9"))
    await looked_up.acquire()
    await asyncio.wait_for(manager.revoke("host-b", "it was stolen"), 10)
    answered.set()
    with pytest.raises(RequestError, match="revoked for good"):
        await joins


def showing(*named: str) -> Any:
    """A request of a host whose certificate has these addresses; none: of one that shows none."""
    shown = {"subjectAltName": tuple(("IP Address", name) for name in named)} if named else None
    return SimpleNamespace(get_extra_info=lambda what: shown if what == "peercert" else None)


async def test_an_expired_ca_is_not_blamed_on_the_request(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = await parts.term()
    token = (await manager.invite(InvitationRequest())).token
    monkeypatch.setattr(CertificateAuthority, "has_ended", lambda authority: True)
    with pytest.raises(RequestError, match=r"^the CA has expired") as refused:
        await manager.enrol(asking(token, "host-b"))
    assert refused.value.status == 409


def test_an_address_is_the_same_however_it_is_written() -> None:
    assert plain_address("::ffff:192.0.2.1") == plain_address("192.0.2.1")
    assert plain_address("2001:DB8::0:1") == "2001:db8::1"
    assert plain_address("Manager.Example") == "manager.example"


async def test_no_host_is_called_as_the_manager_is_in_its_certificate(parts: Parts) -> None:
    manager = await parts.term()
    for name in ("mgr-1", "ebb-manager"):
        with pytest.raises(RequestError, match="no host may be called"):
            await manager.enrol(asking((await manager.invite(InvitationRequest())).token, name))


async def test_an_invitation_for_any_host_takes_no_id_of_a_host_that_is_on_its_way(parts: Parts) -> None:
    """It would have the tokens of that host for as long as there is one."""
    manager = await parts.term()
    named = (await manager.invite(InvitationRequest(host="host-a"))).token
    other = (await manager.invite(InvitationRequest())).token
    thief = (await manager.invite(InvitationRequest())).token
    with pytest.raises(RequestError, match="or it is invited") as refused:
        await manager.enrol(asking(thief, "host-a"))
    assert refused.value.status == 409
    await manager.enrol(asking(named, "host-a"))
    await manager.enrol(asking(other, "host-b"))
    # Neither has reported yet.
    for host in ("host-a", "host-b"):
        with pytest.raises(RequestError, match="or it is invited"):
            await manager.enrol(asking(thief, host))
    await manager.enrol(asking(thief, "host-c"))


async def test_a_host_that_has_joined_and_says_nothing_keeps_its_id_when_its_invitation_is_over(parts: Parts) -> None:
    manager = await parts.term()
    first = (await manager.invite(InvitationRequest(expires_s=10.0))).token
    await manager.enrol(asking(first, "host-b"))
    parts.now += 11.0
    thief = (await manager.invite(InvitationRequest())).token
    with pytest.raises(RequestError, match="or it is invited"):
        await manager.enrol(asking(thief, "host-b"))
    assert manager.has_joined("host-b"), "so it can be revoked"


async def test_a_host_that_the_tokens_file_calls_lost_is_not_taken_in_again(parts: Parts) -> None:
    manager = await parts.term()
    token = (await manager.invite(InvitationRequest())).token
    parts.lost = frozenset({"host-b"})
    with pytest.raises(RequestError, match="revoked for good"):
        await manager.enrol(asking(token, "host-b"))
    with pytest.raises(RequestError, match="revoked for good"):
        await manager.invite(InvitationRequest(host="host-b"))


async def test_a_leader_that_was_deposed_writes_no_invitation_over_a_later_revocation(parts: Parts) -> None:
    early = await parts.term()
    token = (await early.invite(InvitationRequest())).token
    later = await parts.term()
    await later.revoke("host-b", "it was stolen")
    for late in (early.invite(InvitationRequest()), early.enrol(asking(token, "host-b"))):
        with pytest.raises(LostLeadership):
            await late
    assert (await parts.term()).revoked == {"host-b"}


@pytest.mark.parametrize("version", [1, 2, 120])
async def test_a_request_for_a_certificate_of_another_version_is_refused(parts: Parts, version: int) -> None:
    good = request_of(ec.generate_private_key(ec.SECP256R1()), "host-b")
    der = bytearray(x509.load_pem_x509_csr(good.encode()).public_bytes(Encoding.DER))
    at = der.index(b"\x02\x01\x00")
    der[at + 2] = version
    lines = base64.encodebytes(bytes(der)).decode()
    csr = f"-----BEGIN CERTIFICATE REQUEST-----\n{lines}-----END CERTIFICATE REQUEST-----\n"
    parts.hosts.add("host-b")
    manager = await parts.term()
    with pytest.raises(RequestError, match=r"^csr: it cannot be read") as refused:
        await manager.renew("host-b", RenewalRequest(csr=csr, address="192.0.2.11"))
    assert refused.value.status == 400


async def test_strangers_without_an_invitation_do_not_fill_the_log(
    parts: Parts, capfd: pytest.CaptureFixture[str]
) -> None:
    manager = await parts.term()
    for number in range(200):
        with pytest.raises(RequestError):
            await manager.enrol(asking("x" * 43, f"host-{number}"))
    said = capfd.readouterr()
    assert 0 < (said.out + said.err).count("no invitation that counts") < 20


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize("way", ["by request", "by request, and forgotten", "by the tokens file"])
async def test_a_report_that_waits_for_its_turn_while_its_host_is_revoked_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    agent, lost = FakeAgent("host-a", cpu_cores=4.0, memory_mib=4000.0), set[str]()
    async with cluster_of(tmp_path, agent, revoked=lambda: frozenset(lost)) as cluster:
        assert cluster.manager is not None
        assert (await cluster.create(vm("vm-a"))).state is OperationState.DONE
        agent.trouble.mute = True
        token = report_token(HOSTS_KEY, "host-a")
        as_before = agent.report().model_dump(mode="json")
        assert (await cluster.call("POST", "/v1/hosts/host-a/report", token, json=as_before))[0] == 200
        agent.add_change("vm-a", 3.0, 2.0, cause="after its revocation")
        bodies = {"report": [as_before, agent.report().model_dump(mode="json")], "usage": [{"vms": []}]}
        in_turn, waiting, ended = cluster.manager.reporting, asyncio.Semaphore(0), asyncio.Event()

        @contextlib.asynccontextmanager
        async def reporting(host: str, size: int) -> AsyncIterator[None]:
            waiting.release()
            await ended.wait()
            async with in_turn(host, size):
                yield

        monkeypatch.setattr(cluster.manager, "reporting", reporting)
        sent = [
            asyncio.create_task(cluster.call("POST", f"/v1/hosts/host-a/{kind}", token, json=body))
            for kind, all_of_kind in bodies.items()
            for body in all_of_kind
        ]
        for _ in sent:
            await waiting.acquire()
        if way == "by the tokens file":
            lost.add("host-a")
        else:
            status, told = await cluster.call("POST", "/v1/hosts/host-a/revocation", json={"reason": "it was stolen"})
            assert status == 200, told
        if way.endswith("forgotten"):
            status, told = await cluster.call("DELETE", "/v1/hosts/host-a?lost_vms=true")
            assert status == 200, told
        ended.set()
        for status, problem in await asyncio.gather(*sent):
            assert (status, problem.get("detail", "")[:17]) == (403, "host-a is revoked")
        changes = (await cluster.get("/v1/core-changes"))["core_changes"]
        assert not [row for row in changes if row["cause"] == "after its revocation"]
        hosts = (await cluster.get("/v1/hosts"))["hosts"]
        assert [row["state"] for row in hosts] == ([] if way.endswith("forgotten") else ["silent"])
