"""The manager with real host agents, over HTTP and a make-believe hypervisor: they must understand each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web

from deflation.messages import OperationState
from deflation.resources import ResourceVector
from hostagent.api import make_app
from hostagent.host import Host, Slice
from hostagent.journal import Journal
from hostagent.libvirt_hypervisor import usable_boot_mib
from hostagent.reporter import Reporter
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import World
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import AGENT_TOKEN

OVERHEAD_MIB = 320.0


@contextlib.asynccontextmanager
async def agent_of(cluster: Cluster, state_dir: Path, **capacity: float) -> AsyncIterator[Host]:
    """host-a with its REST server and its reporter."""
    assert cluster.server is not None
    # A short path: the name of a unix socket has room for 107 bytes only.
    with TemporaryDirectory(prefix="ebb") as directory:
        world = World(Path(directory))
        await world.start()
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        part = Slice("host-a", f"http://127.0.0.1:{port}", ResourceVector(**capacity), "qemu", OVERHEAD_MIB)
        host = Host(part, FakeHypervisor(world.socket), Journal(state_dir), usable_boot_mib, lambda: 1e6)
        await host.start()
        runner = web.AppRunner(make_app(host, AGENT_TOKEN), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        reporter = Reporter(host, str(cluster.server.make_url("")), AGENT_TOKEN)
        reporting = asyncio.create_task(reporter.run(), name="reporter of host-a")
        try:
            yield host
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await runner.cleanup()
            await host.close()
            await world.stop()


async def test_a_real_agent_is_placed_on_deflated_and_reinflated(tmp_path: Path) -> None:
    async with (
        cluster_of(tmp_path) as cluster,
        agent_of(cluster, tmp_path, cpu_cores=6.0, memory_mib=2900.0) as host,
    ):

        async def registered() -> bool:
            return bool((await cluster.get("/v1/hosts"))["hosts"])

        await cluster.until(registered)
        for name in ("low-1", "low-2"):
            operation = await cluster.create(vm(name), deadline_s=20.0)
            assert operation.state is OperationState.DONE, operation
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 600.0), deadline_s=20.0)
        assert operation.state is OperationState.DONE, operation
        assert {row.name for row in operation.vms} == {"low-1", "low-2"}
        assert all(row.ledger for row in operation.vms)
        # Room for three VMs and their overheads, and nothing more.
        assert host.vms["low-1"].allocation().current.cpu_cores == 1.5
        memory = sum(found.allocation().charge.memory_mib for found in host.vms.values())
        assert 2900.0 - 8.0 <= memory <= 2900.0
        operation = await cluster.delete("high-1")
        assert operation.state is OperationState.DONE, operation
        assert {row["name"]: row["current"]["cpu_cores"] for row in (await cluster.get("/v1/vms"))["vms"]} == {
            "low-1": 3.0,
            "low-2": 3.0,
        }

        async def acknowledged() -> bool:
            changes = (await cluster.get("/v1/core-changes?machine=low-1"))["core_changes"]
            return [row["cores_after"] for row in changes] == [3.0, 1.5, 3.0] and not host.journal.changes

        await cluster.until(acknowledged)


async def test_a_real_agent_preempts_for_the_manager_below_the_minimum(tmp_path: Path) -> None:
    async with (
        cluster_of(tmp_path) as cluster,
        agent_of(cluster, tmp_path, cpu_cores=6.0, memory_mib=2900.0) as host,
    ):

        async def registered() -> bool:
            return bool((await cluster.get("/v1/hosts"))["hosts"])

        await cluster.until(registered)
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name), deadline_s=20.0)
        operation = await cluster.create(vm("high-1", "fixed", 5.3, 600.0), deadline_s=20.0)
        assert operation.state is OperationState.DONE, operation
        assert len(host.vms) == 2
        (event,) = await cluster.events("preempted")
        assert "reason minimum" in event["sentence"]
