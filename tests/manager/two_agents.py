"""A manager and two real host agents over a make-believe hypervisor between which VMs move; each can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp.test_utils import TestServer

from ebbtide.rest.credentials import command_token, report_token
from hostagent.api.app import make_app
from hostagent.control.reporter import Reporter
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import DomainSummary
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.fake_moves import FakeMoves
from tests.hostagent.world import World
from tests.manager.cluster import Cluster, cluster_of
from tests.manager.fake_agent import HOSTS_KEY
from tests.waiting import AT_ONCE_S, until

NAMES = ("host-a", "host-b")


class OneOfTwo(FakeHypervisor):
    """Sees the domains of its own host in the world of both."""

    def __init__(self, path: Path, host_id: str) -> None:
        super().__init__(path, host_id)
        self.moves = FakeMoves(self._call)

    async def survey(self) -> dict[str, DomainSummary]:
        return {name: row for name, row in (await super().survey()).items() if name.startswith(f"ebb-{self._host_id}.")}


class OneHost:
    """One host's agent."""

    def __init__(self, name: str, world: World, home: Path, manager: Callable[[], str]) -> None:
        self.name = name
        self._world, self._home, self._manager = world, home, manager
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.agent: Agent | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        part = Slice(self.name, f"http://127.0.0.1:{self._port}", CAPACITY, "qemu", OVERHEAD_MIB)
        host = Host(part, OneOfTwo(self._world.socket, self.name), Journal(self._home / self.name), lambda: 1e6)
        agent = self.agent = Agent(host, usable_boot_mib)
        await agent.start()
        self._stack.push_async_callback(agent.close)
        server = TestServer(make_app(agent, command_token(HOSTS_KEY, self.name)), port=self._port)
        await server.start_server(shutdown_timeout=AT_ONCE_S)
        self._stack.push_async_callback(server.close)
        self._stack.push_async_callback(self._report_no_more)
        await self.report()

    async def report(self) -> None:
        """To the manager that runs now."""
        await self._report_no_more()
        if self.agent is not None:
            reporter = Reporter(self.agent.host, self._manager(), report_token(HOSTS_KEY, self.name))
            self._reporting = asyncio.create_task(reporter.run(), name=f"reporter of {self.name}")

    async def _report_no_more(self) -> None:
        if (reporting := self._reporting) is not None:
            reporting.cancel()
            await asyncio.wait({reporting})

    async def kill(self) -> None:
        """What a kill leaves: its tasks get to do nothing more, and what they asked the hypervisor for goes on."""
        await self._stack.aclose()
        self.agent = None


class TwoHosts:
    """host-a and host-b, and their manager."""

    def __init__(self, cluster: Cluster, world: World, home: Path) -> None:
        self.cluster = cluster
        self.world = world
        self._url = self.url
        self.hosts = {name: OneHost(name, world, home, lambda: self.url) for name in NAMES}

    @property
    def url(self) -> str:
        if self.cluster.server is not None:
            self._url = self.cluster.url
        return self._url

    async def kill(self, who: str) -> None:
        """:param who: a host's name, or ``manager``."""
        if who == "manager":
            await self.cluster.kill_manager()
        else:
            await self.hosts[who].kill()

    async def start(self, who: str) -> None:
        if who == "manager":
            await self.cluster.start_manager()
            for host in self.hosts.values():
                await host.report()
        else:
            await self.hosts[who].start()

    def running(self, vm: str) -> list[str]:
        """The hosts on which a VM's vCPUs run."""
        return [
            name
            for name in NAMES
            if (domain := self.world.domains.get(f"ebb-{name}.{vm}")) is not None and domain.state == "running"
        ]

    async def ready(self) -> None:
        """Until both hosts are."""

        async def are() -> bool:
            hosts = (await self.cluster.get("/v1/hosts"))["hosts"]
            return [host["state"] for host in hosts] == ["ready", "ready"]

        await until(are)


@contextlib.asynccontextmanager
async def two_hosts(path: Path, **changes: Any) -> AsyncIterator[TwoHosts]:
    with TemporaryDirectory(prefix="ebb") as directory:
        world = World(Path(directory))
        await world.start()
        async with cluster_of(path, silent_after_s=60.0, **changes) as cluster:
            made = TwoHosts(cluster, world, path)
            for name in NAMES:
                await made.start(name)
            try:
                await made.ready()
                yield made
            finally:
                world.move_ends.set()
                for name in NAMES:
                    await made.kill(name)
        await world.stop()
