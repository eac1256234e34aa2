"""Manager and host agent over mutual TLS: the right certificates work, expired, foreign and wrong-name ones do not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from cluster_manager.api.app import make_app as manager_app
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from ebbtide.client import ManagerClient, ManagerUnreachable
from ebbtide.deflation.modes import HostMode
from ebbtide.lab.state import write_private
from ebbtide.messages.operations import OperationState
from ebbtide.rest.access import Certificates
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.tls import KeyPair, client_context
from ebbtide.rest.tokens import principal
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.service import serve
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import World
from tests.manager import cluster
from tests.manager.cluster import QUICK, TOKEN, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.rest.pki import Pki
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")

#: Different libraries and moments tell a broken handshake differently.
BROKEN = (aiohttp.ClientError, OSError)


@dataclass
class Pair:
    """A manager, and host-a, which reports to it."""

    manager: Manager
    manager_url: str
    agent: Agent
    agent_url: str
    pki: Pki
    #: The manager's.
    gate: Gate

    async def call(
        self, method: str, url: str, tls: ssl.SSLContext, token: str | None = None, **options: Any
    ) -> tuple[int, Any]:
        """One request on a connection of its own."""
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        connector = aiohttp.TCPConnector(ssl=tls)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, url, headers=headers, **options) as response,
        ):
            return response.status, await response.json()

    async def report(self, own: KeyPair | None, host: str = "host-a") -> tuple[int, Any]:
        """A report as an agent with this certificate would send it."""
        body = (
            FakeAgent(host, cpu_cores=4.0, memory_mib=1000.0).report().model_copy(update={"url": "https://127.0.0.1:9"})
        )
        url = f"{self.manager_url}/v1/hosts/{host}/report"
        token = report_token(HOSTS_KEY, host)
        return await self.call("POST", url, self.pki.client(own), token, json=body.model_dump(mode="json"))

    async def ask_agent(self, own: KeyPair | None, path: str = "/v1/host") -> tuple[int, Any]:
        return await self.call("GET", self.agent_url + path, self.pki.client(own), command_token(HOSTS_KEY, "host-a"))


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair_of(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def pair_of(path: Path) -> AsyncIterator[Pair]:
    pki = Pki(path / "pki")
    tokens = [principal("people", Role.ADMIN, TOKEN)]
    write_private(path / "tokens.toml", "")
    own = AccessSettings(own=pki.pair("ebb-manager"), client_ca=pki.ca, tokens_file=path / "tokens.toml")
    gate = Gate(own, tokens, Certificates(of_host=True), required=False, hosts_key=HOSTS_KEY)
    settings = Settings(
        cluster.database_in(path), TOKEN, HOSTS_KEY, agents=QUICK, agent_tls=gate.calls, revoked=gate.revoked
    )
    manager = Manager(settings)
    async with gate.serve(manager_app(manager, gate.access), "127.0.0.1", 0, 0.0) as listener:
        url = f"https://127.0.0.1:{listener.port}"
        async with agent_of(path, pki, url) as agent:
            yield Pair(manager, url, agent, agent.host.slice.url, pki, gate)


@contextlib.asynccontextmanager
async def agent_of(path: Path, pki: Pki, manager: str, host_id: str = "host-a") -> AsyncIterator[Agent]:
    """A host, as its daemon serves it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    commands, reports = path / f"{host_id}.command-token", path / f"{host_id}.report-token"
    write_private(commands, command_token(HOSTS_KEY, host_id))
    write_private(reports, report_token(HOSTS_KEY, host_id))
    with TemporaryDirectory(prefix="ebb") as directory:
        world = World(Path(directory))
        await world.start()
        part = Slice(host_id, f"https://127.0.0.1:{port}", CAPACITY, "qemu", OVERHEAD_MIB)
        host = Host(part, FakeHypervisor(world.socket, host_id), Journal(path / host_id), lambda: 1e6)
        agent, stop = Agent(host, usable_boot_mib), asyncio.Event()
        access = AccessSettings(own=pki.pair(host_id), client_ca=pki.ca)
        serving = asyncio.create_task(
            serve(agent, "127.0.0.1", port, commands, manager, reports, stop, access), name="agent"
        )
        try:
            await until(lambda: serving.done() or _listens(port))
            yield agent
        finally:
            stop.set()
            await serving
            await world.stop()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@each_store
async def test_a_vm_is_placed_over_mutual_tls(pair: Pair) -> None:
    await until(lambda: pair.manager.hosts.get("host-a") is not None)
    async with ManagerClient(pair.manager_url, TOKEN, tls=pair.pki.client()) as client:
        body = {"request_id": "c", "vm": vm("low-1"), "deadline_s": 20.0}
        status, answer = await pair.call("POST", f"{pair.manager_url}/v1/vms", pair.pki.client(), TOKEN, json=body)
        assert status == 202, answer
        ended = await client.wait(await client.operation("c"), limit_s=30.0)
        assert ended.state is OperationState.DONE, ended
        assert [found.name for found in await client.vms()] == ["low-1"]
    assert "low-1" in pair.agent.host.vms


@each_store
async def test_a_revoked_host_is_neither_heard_nor_called(pair: Pair, tmp_path: Path) -> None:
    """With the tokens and the certificate that it had."""
    await until(lambda: pair.manager.hosts.get("host-a") is not None)
    own, url = pair.pki.pair("host-a"), f"{pair.manager_url}/v1/hosts/host-a/templates"
    assert (await pair.call("GET", url, pair.pki.client(), TOKEN))[0] == 200
    assert (await pair.report(own))[0] == 200
    assert "host-a" in dict(pair.manager.hosts.availability.offers("place", 10))
    write_private(tmp_path / "tokens.toml", '[[revoked]]\nhost = "host-a"\n')
    pair.gate.read_again()()
    assert (await pair.report(own))[0] == 401
    status, problem = await pair.call("GET", url, pair.pki.client(), TOKEN)
    assert (status, problem["detail"]) == (503, "host-a is revoked")
    assert pair.manager.hosts.state("host-a") == ("silent", "it is revoked")
    assert "host-a" not in dict(pair.manager.hosts.availability.offers("place", 10))


# --- reports ---------------------------------------------------------------------------------------------------------


@each_store
async def test_a_report_needs_the_certificate_of_its_host(pair: Pair) -> None:
    assert (await pair.report(pair.pki.pair("host-b"), "host-b"))[0] == 200
    # A name to listen under is no name to report by.
    named = pair.pki.pair("someone", ("host-d", "127.0.0.1"))
    for own in (None, pair.pki.pair("host-b"), pair.pki.pair("ebb-manager"), named):
        status, problem = await pair.report(own, "host-d")
        assert (status, problem["detail"]) == (403, "the client's certificate must have the common name host-d")
    assert pair.manager.hosts.get("host-d") is None


@each_store
async def test_people_need_no_certificate(pair: Pair) -> None:
    assert (await pair.call("GET", f"{pair.manager_url}/v1/vms", pair.pki.client(), TOKEN))[0] == 200
    assert (await pair.call("GET", f"{pair.manager_url}/v1/vms", pair.pki.client()))[0] == 401
    assert (await pair.call("GET", f"{pair.manager_url}/healthz", pair.pki.client()))[0] == 200


@each_store
async def test_expired_and_foreign_certificates_get_no_connection_with_the_manager(pair: Pair, tmp_path: Path) -> None:
    foreign = Pki(tmp_path / "foreign")
    for own in (pair.pki.pair("host-b", days=0), foreign.pair("host-b")):
        with pytest.raises(BROKEN):
            await pair.report(own, "host-b")
    assert pair.manager.hosts.get("host-b") is None


@each_store
async def test_an_agent_that_cannot_be_reached_by_tls_is_not_registered(pair: Pair) -> None:
    body = FakeAgent("host-b", cpu_cores=4.0, memory_mib=1000.0).report().model_dump(mode="json")
    url, tls = f"{pair.manager_url}/v1/hosts/host-b/report", pair.pki.client(pair.pki.pair("host-b"))
    status, problem = await pair.call("POST", url, tls, report_token(HOSTS_KEY, "host-b"), json=body)
    assert (status, problem["field"]) == (400, "url")
    assert pair.manager.hosts.get("host-b") is None


@each_store
async def test_an_open_connection_counts_no_longer_than_its_certificate_and_its_ca(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = FakeAgent("host-b").report().model_copy(update={"url": "https://127.0.0.1:9"}).model_dump(mode="json")
    url = f"{pair.manager_url}/v1/hosts/host-b/report"
    headers = {"Authorization": f"Bearer {report_token(HOSTS_KEY, 'host-b')}"}
    connector = aiohttp.TCPConnector(ssl=pair.pki.client(pair.pki.pair("host-b")))
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def report() -> tuple[int, str]:
            async with session.post(url, json=body) as answer:
                return answer.status, (await answer.json()).get("detail", "")

        assert (await report())[0] == 200
        with monkeypatch.context() as late:
            late.setattr(pair.gate.access, "_now", lambda: time.time() + 2 * 86_400)
            assert await report() == (503, "the client's certificate has ended; connect again, with one that counts")
        # By another connection.
        assert (await report())[0] == 200
        other = Pki(tmp_path / "other")
        other.pair("unused")
        before = pair.pki.ca.read_bytes()
        pair.pki.ca.write_bytes(before + other.ca.read_bytes())
        pair.gate.read_again()()
        assert (await report())[0] == 200, "a CA that comes ends nothing"
        pair.pki.ca.write_bytes(other.ca.read_bytes())
        pair.gate.read_again()()
        assert await report() == (503, "a CA of before counts no more; connect again, with one that counts")
        with pytest.raises(BROKEN):
            await report()


# --- calls of an agent -----------------------------------------------------------------------------------------------


@each_store
async def test_an_agent_serves_its_manager_only(pair: Pair) -> None:
    assert (await pair.ask_agent(pair.pki.pair("ebb-manager")))[0] == 200
    for name in ("host-a", "host-b", "EBB-MANAGER"):
        status, problem = await pair.ask_agent(pair.pki.pair(name))
        assert (status, problem["detail"]) == (403, "the client's certificate must have the common name ebb-manager")
    # A name to listen under is no name to command by.
    assert (await pair.ask_agent(pair.pki.pair("host-b", ("ebb-manager", "127.0.0.1"))))[0] == 403


@each_store
async def test_without_a_good_certificate_there_is_no_connection_with_an_agent(pair: Pair, tmp_path: Path) -> None:
    foreign = Pki(tmp_path / "foreign")
    for own in (None, pair.pki.pair("ebb-manager", days=0), foreign.pair("ebb-manager")):
        for path in ("/v1/host", "/healthz"):
            with pytest.raises(BROKEN):
                await pair.ask_agent(own, path)


@each_store
async def test_plain_http_gets_no_answer(pair: Pair) -> None:
    for url in (pair.manager_url, pair.agent_url):
        with pytest.raises(BROKEN):
            await pair.call("GET", f"http{url.removeprefix('https')}/healthz", pair.pki.client())


@each_store
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_tls_below_1_2_is_refused(pair: Pair) -> None:
    old = pair.pki.client()
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(BROKEN):
        await pair.call("GET", f"{pair.manager_url}/healthz", old)


# --- what clients make of a server -----------------------------------------------------------------------------------


@each_store
@pytest.mark.parametrize("trouble", ["expired", "foreign", "another host's", "the manager's"])
async def test_a_manager_gives_its_token_to_no_false_agent(pair: Pair, trouble: str, tmp_path: Path) -> None:
    """The agent's server shows a bad certificate; the manager's call fails, and the false one hears nothing."""
    own = {
        "expired": lambda: pair.pki.pair("host-f", days=0),
        "foreign": lambda: Pki(tmp_path / "foreign").pair("host-f"),
        # Each of them names the address.
        "another host's": lambda: pair.pki.pair("host-g", ("host-f", "127.0.0.1")),
        "the manager's": lambda: pair.pki.pair("ebb-manager"),
    }[trouble]()
    heard: list[str] = []

    async def hear(request: web.BaseRequest) -> web.Response:
        heard.append(request.headers.get("Authorization", ""))
        return web.Response()

    server = RawTestServer(hear)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load(context)
    await server.start_server(ssl=context)
    try:
        agent = FakeAgent("host-f", cpu_cores=6.0, memory_mib=4000.0)
        body = agent.report().model_copy(update={"url": f"https://127.0.0.1:{server.port}"}).model_dump(mode="json")
        url, tls = f"{pair.manager_url}/v1/hosts/host-f/report", pair.pki.client(pair.pki.pair("host-f"))
        assert (await pair.call("POST", url, tls, report_token(HOSTS_KEY, "host-f"), json=body))[0] == 200
        command = {"request_id": "m", "mode": "paused", "reason": "test"}
        url = f"{pair.manager_url}/v1/hosts/host-f/mode"
        status, problem = await pair.call("PUT", url, pair.pki.client(), TOKEN, json=command)
        assert status == 503
        assert "certificate" in problem["detail"].lower(), problem
        assert heard == []
    finally:
        await server.close()


@each_store
async def test_a_connection_with_one_host_serves_no_other_at_the_same_address(pair: Pair) -> None:
    """host-b claims the address of host-a, with which the manager has a connection open."""
    await until(lambda: pair.manager.hosts.get("host-a") is not None)
    command = {"request_id": "m", "mode": "active", "reason": "test"}
    url, people = f"{pair.manager_url}/v1/hosts/host-a/mode", pair.pki.client()
    assert (await pair.call("PUT", url, people, TOKEN, json=command))[0] == 202
    body = FakeAgent("host-b").report().model_copy(update={"url": pair.agent_url}).model_dump(mode="json")
    url, tls = f"{pair.manager_url}/v1/hosts/host-b/report", pair.pki.client(pair.pki.pair("host-b"))
    assert (await pair.call("POST", url, tls, report_token(HOSTS_KEY, "host-b"), json=body))[0] == 200
    command |= {"request_id": "p", "mode": "paused"}
    status, problem = await pair.call("PUT", f"{pair.manager_url}/v1/hosts/host-b/mode", people, TOKEN, json=command)
    assert status == 503
    assert "the certificate is of host-a, not of host-b" in problem["detail"]
    assert pair.agent.host.journal.mode.mode is HostMode.ACTIVE


@each_store
async def test_a_host_moves_with_its_certificate(pair: Pair) -> None:
    """The address need not stand in it: the id does."""
    heard: list[str] = []

    async def hear(request: web.BaseRequest) -> web.Response:
        heard.append(request.path)
        return web.Response(status=500)

    server = RawTestServer(hear)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair.pki.pair("host-f", ("elsewhere.example",)).load(context)
    await server.start_server(ssl=context)
    try:
        url = f"https://127.0.0.1:{server.port}"
        body = FakeAgent("host-f").report().model_copy(update={"url": url}).model_dump(mode="json")
        url, tls = f"{pair.manager_url}/v1/hosts/host-f/report", pair.pki.client(pair.pki.pair("host-f"))
        assert (await pair.call("POST", url, tls, report_token(HOSTS_KEY, "host-f"), json=body))[0] == 200
        url = f"{pair.manager_url}/v1/hosts/host-f/templates"
        assert (await pair.call("GET", url, pair.pki.client(), TOKEN))[0] == 503
        assert heard == ["/v1/host"]
    finally:
        await server.close()


@each_store
async def test_a_host_reports_to_no_other_host(pair: Pair, tmp_path: Path) -> None:
    """One that took the manager's address hears nothing."""
    heard: list[str] = []

    async def hear(request: web.BaseRequest) -> web.Response:
        heard.append(request.path)
        return web.Response(status=500)

    gate = Gate(
        AccessSettings(own=pair.pki.pair("host-a"), client_ca=pair.pki.ca), [], Certificates(name="ebb-manager"), True
    )
    for name, hears in (("host-b", []), ("ebb-manager", ["/"])):
        server = RawTestServer(hear)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair.pki.pair(name).load(context)
        await server.start_server(ssl=context)
        try:
            with contextlib.suppress(aiohttp.ClientConnectorCertificateError):
                assert gate.calls is not None
                await pair.call("GET", f"https://127.0.0.1:{server.port}/", gate.calls)
        except (aiohttp.ContentTypeError, ValueError):
            pass
        finally:
            await server.close()
        assert heard == hears


@each_store
async def test_the_client_says_in_one_sentence_what_is_wrong_with_the_connection(pair: Pair, tmp_path: Path) -> None:
    foreign = client_context(Pki(tmp_path / "foreign").ca)
    good = pair.pki.client()
    plain = pair.manager_url.replace("https", "http")
    localhost = pair.agent_url.replace("127.0.0.1", "localhost")
    for url, tls, said in (
        (pair.manager_url, foreign, "its certificate is not accepted"),
        (pair.manager_url, None, "name its CA by --ca"),
        (localhost, good, "want a client's certificate"),
        (plain, good, "no manager answers"),
    ):
        async with ManagerClient(url, TOKEN, tls=tls) as client:
            with pytest.raises(ManagerUnreachable) as failed:
                await client.hosts()
        assert said in str(failed.value)
        assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("days", "name", "said"),
    [
        (0, "127.0.0.1", "its certificate is not accepted (certificate has expired)"),
        (1, "elsewhere.example", "its certificate is not accepted (IP address mismatch, certificate is not valid for "),
    ],
)
async def test_the_client_asks_for_a_ca_only_where_the_issuer_is_unknown(
    tmp_path: Path, days: int, name: str, said: str
) -> None:
    async def hear(_: web.BaseRequest) -> web.Response:
        return web.Response()

    pki, server = Pki(tmp_path), RawTestServer(hear)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pki.pair("ebb-manager", (name,), days=days).load(context)
    await server.start_server(ssl=context)
    try:
        async with ManagerClient(f"https://127.0.0.1:{server.port}", TOKEN, tls=pki.client()) as client:
            with pytest.raises(ManagerUnreachable) as failed:
                await client.hosts()
    finally:
        await server.close()
    assert said in str(failed.value)
    assert "--ca" not in str(failed.value)


# --- files -----------------------------------------------------------------------------------------------------------


@each_store
async def test_new_certificates_and_tokens_come_into_force_without_a_restart(pair: Pair, tmp_path: Path) -> None:
    async def serial() -> str:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", int(pair.manager_url.rsplit(":", 1)[1]), ssl=pair.pki.client()
        )
        number = str(writer.get_extra_info("peercert")["serialNumber"])
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return number

    before = await serial()
    pair.pki.pair("ebb-manager")
    assert await serial() == before
    (await asyncio.to_thread(pair.gate.read_again))()
    assert await serial() != before
    (tmp_path / "pki" / "ebb-manager.key").write_text("nothing")
    with pytest.raises(AccessError, match=r"cannot use the certificate .*ebb-manager\.pem"):
        await asyncio.to_thread(pair.gate.read_again)
    assert (await pair.call("GET", f"{pair.manager_url}/v1/vms", pair.pki.client(), TOKEN))[0] == 200


@pytest.mark.parametrize("which", ["client_ca", "server_ca"])
def test_a_ca_by_which_certificates_are_signed_is_another_one_only_after_a_start(tmp_path: Path, which: str) -> None:
    pki, other = Pki(tmp_path / "pki"), Pki(tmp_path / "other")
    other.pair("unused")
    own = pki.pair("ebb-manager")
    settings = {
        "client_ca": AccessSettings(own=own, client_ca=pki.ca),
        "server_ca": AccessSettings(own=own, server_ca=pki.ca),
    }[which]
    gate = Gate(settings, [], Certificates(), required=False, signs=True)
    gate.read_again()
    pki.ca.write_bytes(other.ca.read_bytes())
    with pytest.raises(AccessError, match=r"the CA .*ca\.pem has changed; start the daemon again to use it"):
        gate.read_again()
    pki.ca.unlink()
    with pytest.raises(AccessError, match="cannot use the CA certificate"):
        gate.read_again()


async def test_another_ca_counts_when_it_is_read_again_and_the_one_before_is_forgotten(tmp_path: Path) -> None:
    old, new, ca = Pki(tmp_path / "old"), Pki(tmp_path / "new"), tmp_path / "ca.pem"
    own = old.pair("host-a")
    ca.write_bytes(old.ca.read_bytes())
    changed: list[str] = []
    gate = Gate(AccessSettings(own=own, client_ca=ca), [], Certificates(name="ebb-manager"), required=True)
    gate.on_change = lambda: changed.append("changed")

    async def answers(url: str, tls: ssl.SSLContext | None) -> bool:
        assert tls is not None
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
                session.get(url) as response,
            ):
                return response.status == 404
        except BROKEN:
            return False

    managers = {
        name: Gate(AccessSettings(own=pki.pair("ebb-manager")), [], Certificates(), required=False)
        for name, pki in (("old", old), ("new", new))
    }
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(gate.serve(web.Application(), "127.0.0.1", 0, 0.0))
        agent = f"https://127.0.0.1:{listener.port}/"
        urls = {}
        for name, manager in managers.items():
            listener = await stack.enter_async_context(manager.serve(web.Application(), "127.0.0.1", 0, 0.0))
            urls[name] = f"https://127.0.0.1:{listener.port}/"
        for trusted, other in (("old", "new"), ("new", "old")):
            for name, pki in (("old", old), ("new", new)):
                client = client_context(old.ca, pki.pair("ebb-manager"))
                assert await answers(agent, client) == (name == trusted)
                assert await answers(urls[name], gate.calls) == (name == trusted)
            if trusted == "old":
                ca.write_bytes(new.ca.read_bytes())
                assert await answers(urls[other], gate.calls) is False
                (await asyncio.to_thread(gate.read_again))()
    assert changed == ["changed"]


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    own = pki.pair("ebb-manager")
    (tmp_path / "junk").write_text("junk")
    for settings, said in (
        (AccessSettings(own=replace(own, certificate=tmp_path / "missing")), "missing"),
        (AccessSettings(own=replace(own, key=pki.pair("host-a").key)), "host-a.key"),
        (AccessSettings(own=own, client_ca=tmp_path / "junk"), "junk"),
    ):
        with pytest.raises(AccessError) as refused:
            Gate(settings, [], Certificates(), required=True)
        assert said in str(refused.value)
