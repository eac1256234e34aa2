"""An agent with its server: what it has done when it cannot have its port, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import aiohttp
import pytest
import structlog
from aiohttp import web

from ebbtide.lab.state import write_private
from ebbtide.messages.operations import Operation
from ebbtide.rest.access import Access
from ebbtide.rest.gate import Gate
from ebbtide.rest.options import Given
from ebbtide.rest.settings import AccessSettings
from hostagent import access as access_of_agents
from hostagent import service
from hostagent.api import app as app_of
from hostagent.api.metrics import facts_of
from hostagent.control.renewal import load
from hostagent.control.reporter import Reporter
from hostagent.errors import HostAgentError, HypervisorError
from hostagent.libvirt.adopted import AdoptedDomains
from hostagent.libvirt.hypervisor import DomainState
from hostagent.operations.agent import Agent
from hostagent.options import HostAgentOptions
from hostagent.service import serve
from hostagent.vm.host import Host
from tests.hostagent.conftest import make_agent
from tests.hostagent.world import World
from tests.rest.pki import Pki
from tests.waiting import until


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("alone", [False, True], ids=["its own", "that of the metrics"])
async def test_an_agent_whose_port_is_taken_has_done_nothing(
    world: World, tmp_path: Path, taken: int, alone: bool
) -> None:
    token = tmp_path / "token"
    write_private(token, "of-the-manager")
    options = HostAgentOptions(
        id="host-a", capacity="cpu_cores=1,memory_mib=512", token_file=token, metrics_port=taken if alone else None
    )
    agent = make_agent(world, tmp_path)
    with pytest.raises(OSError, match="Address already in use"):
        await serve(agent, "127.0.0.1", 0 if alone else taken, token, None, None, asyncio.Event(), given=Given(options))
    assert not world.calls
    assert not (tmp_path / "state.json").exists()


async def test_an_agent_that_stops_answers_who_waits_for_an_operation_and_reports_until_its_server_is_down(
    world: World, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    begun = asyncio.Event()

    class Reporting:
        def __init__(self, *_: object) -> None:
            pass

        async def run(self) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("reports")

        def reconnect(self) -> None:
            pass

    def make_app(agent: Agent, access: Access) -> web.Application:
        async def down(_: web.Application) -> None:
            ended.append("server")

        app = app_of.make_app(agent, access)
        app.on_cleanup.append(down)
        return app

    async def endless(operation: Operation) -> Operation:
        await asyncio.Event().wait()
        return operation

    monkeypatch.setattr(service, "Reporter", Reporting)
    monkeypatch.setattr(service, "make_app", make_app)
    for name in ("token", "report-token"):
        write_private(tmp_path / name, f"the-{name}")
    agent, stop = make_agent(world, tmp_path), asyncio.Event()
    serving = asyncio.create_task(
        serve(
            agent,
            "127.0.0.1",
            unused_tcp_port,
            tmp_path / "token",
            "http://127.0.0.1:1",
            tmp_path / "report-token",
            stop,
        ),
        name="agent",
    )
    await begun.wait()
    operations = agent.requests.operations
    operations.begin("slow", "target", {}, endless)
    url = f"http://127.0.0.1:{unused_tcp_port}/v1/operations/slow?wait_s=30"
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer the-token"}) as session:
        answer = asyncio.create_task(session.get(url), name="a manager that waits")
        await until(lambda: bool(operations._limits))
        stop.set()
        async with asyncio.timeout(10):
            assert (await (await answer).json())["state"] == "running"
            await serving
    assert ended == ["server", "reports"]


async def test_the_certificate_whose_end_the_metrics_tell_is_the_hosts_own(world: World, tmp_path: Path) -> None:
    pki, stop = Pki(tmp_path / "tls"), asyncio.Event()
    own = pki.pair("host-a")
    write_private(tmp_path / "token", "of-the-manager")
    agent, access = make_agent(world, tmp_path), AccessSettings(own=own, client_ca=pki.ca)
    serving = asyncio.create_task(
        serve(agent, "127.0.0.1", 0, tmp_path / "token", None, None, stop, access), name="agent"
    )
    await until(lambda: bool(agent.certificate()))
    assert agent.certificate() == (own.certificate.read_bytes(),)
    assert facts_of(agent).certificate_end == load(own.certificate).not_valid_after_utc.timestamp()
    stop.set()
    await serving


# --- a hypervisor that does not answer at the start -------------------------------------------------------------------


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Its end of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", found.getsockname())
        yield found


def said(systemd: socket.socket) -> list[str]:
    return systemd.recv(4096).decode().split("\n")


async def test_an_agent_that_starts_while_libvirt_does_not_answer_waits_for_it_and_serves_nothing_meanwhile(
    world: World, tmp_path: Path, systemd: socket.socket, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_PAUSE_S", 0.01)
    write_private(tmp_path / "token", "of-the-manager")
    agent, stop, met = make_agent(world, tmp_path), asyncio.Event(), []
    domains = agent.host.hypervisor.domains

    async def refused_twice() -> list[DomainState]:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", unused_tcp_port), 1.0).close()
            met.append("a server")
        met.append("a look")
        if len(met) <= 2:
            raise HypervisorError("Failed to connect socket:\nConnection refused")
        assert not (tmp_path / "state.json").exists(), "nothing was begun"
        return await domains()

    monkeypatch.setattr(agent.host.hypervisor, "domains", refused_twice)
    serving = asyncio.create_task(
        serve(agent, "127.0.0.1", unused_tcp_port, tmp_path / "token", None, None, stop), name="agent"
    )
    await until(lambda: serving.done() or (tmp_path / "state.json").exists())
    assert met[:3] == ["a look"] * 3
    assert said(systemd) == ["READY=1", "STATUS=waits for libvirt: Failed to connect socket: Connection refused"]
    stop.set()
    await serving
    assert said(systemd) == ["STOPPING=1", "STATUS=stopping"]


async def test_an_agent_that_waits_for_libvirt_ends_at_once_when_it_is_told_to(
    world: World, tmp_path: Path, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_PAUSE_S", 3600.0)
    write_private(tmp_path / "token", "of-the-manager")
    world.failures["domains"] = "Failed to connect socket: Connection refused"
    agent, stop = make_agent(world, tmp_path), asyncio.Event()
    serving = asyncio.create_task(serve(agent, "127.0.0.1", 0, tmp_path / "token", None, None, stop), name="agent")
    await until(lambda: serving.done() or ("domains", "") in [call[:2] for call in world.calls])
    stop.set()
    async with asyncio.timeout(10):
        await serving
    assert [said(systemd)[0] for _ in range(2)] == ["READY=1", "STOPPING=1"]
    assert not (tmp_path / "state.json").exists()


async def test_no_agent_waits_where_it_is_the_names_of_the_adopted_domains_that_cannot_be_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_PAUSE_S", 3600.0)
    write_private(tmp_path / "token", "of-the-manager")
    adopted = tmp_path / "adopted.json"
    adopted.write_text("")
    agent = make_agent(world, tmp_path)

    async def domains() -> list[DomainState]:
        AdoptedDomains(adopted).names()
        return []

    monkeypatch.setattr(agent.host.hypervisor, "domains", domains)
    with pytest.raises(HostAgentError, match=r"adopted\.json, which names the adopted domains, cannot be read"):
        async with asyncio.timeout(10):
            await serve(agent, "127.0.0.1", 0, tmp_path / "token", None, None, asyncio.Event())


@pytest.mark.looptime
async def test_each_reason_for_which_an_agent_waits_is_logged_once() -> None:
    start = service._Start(cast(Agent, None), asyncio.Event())
    with structlog.testing.capture_logs() as logs:
        for why in ("Connection refused", "Connection\nrefused", "Permission denied", "Connection refused"):
            await start.wait(why)
    assert [line["why"] for line in logs] == ["Connection refused", "Permission denied", "Connection refused"]


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken afterwards"])
async def test_what_is_replaced_while_an_agent_waits_for_libvirt_counts_when_it_serves(
    world: World, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    tokens: list[str] = []
    gates: list[Gate] = []

    class Reporting(Reporter):
        def __init__(self, host: Host, manager: str, token: str, tls: ssl.SSLContext | None) -> None:
            super().__init__(host, manager, token, tls)
            tokens.append(token)

    def gate_of(access: AccessSettings, token_file: Path, manager_name: str) -> Gate:
        gates.append(access_of_agents.gate_of(access, token_file, manager_name))
        return gates[0]

    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(service, name, 0.01)
    monkeypatch.setattr(service, "Reporter", Reporting)
    monkeypatch.setattr(service, "gate_of", gate_of)
    monkeypatch.setattr(service, "_renewing", lambda *_: None)
    world.failures["domains"] = "Failed to connect socket: Connection refused"
    token, report_token = tmp_path / "token", tmp_path / "report-token"
    write_private(token, "first-token")
    write_private(report_token, "first-report-token")
    before, after = Pki(tmp_path / "before"), Pki(tmp_path / "after")
    own, fresh = before.pair("host-a"), after.pair("host-a")
    agent, stop = make_agent(world, tmp_path), asyncio.Event()
    serving = asyncio.create_task(
        serve(
            *(agent, "127.0.0.1", unused_tcp_port, token, "https://127.0.0.1:1", report_token, stop),
            access=AccessSettings(own=own, client_ca=before.ca),
        ),
        name="agent",
    )
    # As the command has it: what is not listened to does nothing.
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        await until(lambda: serving.done() or ("domains", "") in [call[:2] for call in world.calls])
        write_private(token, "second-token")
        write_private(report_token, "second-report-token")
        for source, target in ((after.ca, before.ca), (fresh.certificate, own.certificate), (fresh.key, own.key)):
            shutil.copyfile(source, target)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: gates[0].access.principals.of("second-token") is not None, limit_s=5.0)
        if broken:
            write_private(report_token, "two words")
        world.failures.clear()
        await until(lambda: bool(tokens))
        url, headers = f"https://127.0.0.1:{unused_tcp_port}/v1/host", {"Authorization": "Bearer second-token"}
        tls = after.client(after.pair("ebb-manager"))
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url, ssl=tls) as answer:
            assert answer.status == 200
        assert tokens == ["first-report-token" if broken else "second-report-token"]
    finally:
        stop.set()
        await serving
        signal.signal(signal.SIGHUP, was)


@pytest.mark.looptime
async def test_libvirt_is_asked_ever_more_rarely_while_an_agent_waits_for_it() -> None:
    start, loop = service._Start(cast(Agent, None), asyncio.Event()), asyncio.get_running_loop()
    pauses = []
    for _ in range(5):
        before = loop.time()
        await start.wait("Connection refused")
        pauses.append(round(loop.time() - before, 1))
    assert pauses == [2.0, 4.0, 8.0, 15.0, 15.0]
