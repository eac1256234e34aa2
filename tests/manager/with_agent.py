"""A manager and a real host agent over a make-believe hypervisor, all in the test's loop, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp.test_utils import TestServer

from cluster_manager.authority import CertificateAuthority
from cluster_manager.inventory.hosts import Host as ManagedHost
from cluster_manager.settings import AgentLimits
from ebbtide.cli.certificates import begin_rollover
from ebbtide.rest.credentials import command_token, report_token
from hostagent.api.app import make_app
from hostagent.control.reporter import Reporter
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain, World
from tests.manager import fake_engine
from tests.manager.cluster import QUICK, TOKEN, Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY
from tests.manager.plan_events import report_of
from tests.rest.pki import Pki
from tests.waiting import AT_ONCE_S, until


@dataclass
class Lab:
    """host-a with 6 cores and 3600 MiB, and its manager."""

    cluster: Cluster
    agent: Agent
    world: World
    token_file: Path
    #: Where the agent listens; close it, and the agent cannot be reached.
    agent_server: TestServer

    @property
    def url(self) -> str:
        return self.cluster.url

    async def add_old_host(self, name: str = "host-old") -> None:
        """One that has not reported since an earlier manager."""
        assert self.cluster.manager is not None
        report = report_of(name)
        await self.cluster.manager.store.save_hosts([report])
        self.cluster.manager.hosts._hosts[name] = ManagedHost(report, 0.0, None, False)

    async def create(self, name: str, **fields: Any) -> Domain:
        """A VM of 3 cores and 1000 MiB whose guest is connected."""
        operation = await self.cluster.create(vm(name, **fields))
        assert operation.state == "done", operation.sentence
        await until(lambda: self.agent.host.vms[name].link.connected)
        await until(lambda: not self.agent.host.vms[name].lock.locked())
        return self.world.domains[f"ebb-host-a.{name}"]


@contextlib.asynccontextmanager
async def lab_of(path: Path, agents: AgentLimits = QUICK) -> AsyncIterator[Lab]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token_file = path / "client-token"
    token_file.write_text(TOKEN)
    with TemporaryDirectory(prefix="ebb") as directory:
        world = World(Path(directory))
        await world.start()
        part = Slice("host-a", f"http://127.0.0.1:{port}", CAPACITY, "qemu", OVERHEAD_MIB)
        host = Host(part, FakeHypervisor(world.socket), Journal(path / "agent"), lambda: 1e6)
        agent = Agent(host, usable_boot_mib)
        agent.adoptions.window_s = 0.2
        await agent.start()
        server = TestServer(make_app(agent, command_token(HOSTS_KEY, "host-a")), port=port)
        await server.start_server(shutdown_timeout=AT_ONCE_S)
        Pki(ca := path / "ca")
        begin_rollover(ca)
        joins = {
            "url": "http://127.0.0.1:7100",
            "authority": CertificateAuthority.load(ca / "ca.pem", ca / "ca.key", None, ca / "next-ca.key"),
        }
        engine = fake_engine.settings(directory=path / "engine")
        async with cluster_of(path, silent_after_s=60.0, agents=agents, **joins, **engine) as cluster:
            lab = Lab(cluster, agent, world, token_file, server)
            reporting = asyncio.create_task(
                Reporter(host, lab.url, report_token(HOSTS_KEY, "host-a")).run(), name="reporter"
            )
            try:
                await until(lambda: _registered(cluster))
                yield lab
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)
        await server.close()
        await agent.close()
        await world.stop()


async def _registered(cluster: Cluster) -> bool:
    return bool((await cluster.get("/v1/hosts"))["hosts"])
