"""A host agent over a make-believe libvirt, as a process of its own, and a manager that only takes its reports.

What an agent costs beyond what one machine has real guests for. Guests and manager answer from the process that asks
for it, so that they do not count; the fake libvirt runs inside the agent's process, in place of libvirt's own client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog
from aiohttp import web

from benchmarks.figures import BenchmarkFailed
from benchmarks.host.slow_libvirt import BOOT_MIB, DEVICE_MIB, VCPUS, SlowDomain, SlowLibvirt, Slowness
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import domain_name
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.operations.agent import Agent
from hostagent.state.intents import Cause, Intent, Phase, to_qualified_element
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice

HOST = "bench-fake"
NOMINAL = ResourceVector(cpu_cores=VCPUS, memory_mib=BOOT_MIB + DEVICE_MIB)
READY_S = 120.0


def settled_intent(name: str) -> Intent:
    """A VM of `NOMINAL` to which nothing is done."""
    spec, size = VMSpec(name=name, nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB), Vector.of(NOMINAL)
    cause = Cause(request_id=f"create-{name}", kind="create", body={}, started_at=0.0, before=Vector())
    return Intent(
        owner=HOST,
        spec=spec,
        boot_mib=BOOT_MIB,
        generation=1,
        phase=Phase.SETTLED,
        target=size,
        committed=size,
        cause=cause,
    )


def agent_over(world: SlowLibvirt, directory: Path, vms: int) -> Agent:
    """An agent of a host that has room for so many; not started yet."""
    settings = LibvirtSettings(HOST, "fake:///", "qemu", directory, directory)
    part = Slice(HOST, "http://127.0.0.1:7101", NOMINAL * vms, "qemu", 0.0)
    host = Host(part, LibvirtHypervisor(settings, world.open), Journal(directory / "state"), lambda: 1e6)
    return Agent(host, usable_boot_mib)


@dataclass
class Served:
    """The agent's process, and what came of it so far."""

    process: psutil.Process
    reports: int = 0


@contextlib.asynccontextmanager
async def served(vms: int) -> AsyncIterator[Served]:
    """An agent with that many settled VMs; their guests and the manager answer from the running event loop.

    Raises BenchmarkFailed where it has not reported all of them in time.
    """
    context = multiprocessing.get_context("spawn")
    # A short path: the name of a unix socket has room for 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as place:
        directory = Path(place)
        servers = [
            await asyncio.start_unix_server(
                SlowDomain(f"vm-{number}", _socket(directory, number), "", Slowness()).guest,
                str(_socket(directory, number)),
            )
            for number in range(vms)
        ]
        ready = asyncio.Event()
        heard: dict[str, bool] = {}

        async def take(request: web.Request) -> web.Response:
            body = json.loads(await request.read())
            if "vms" in body and request.path.endswith("/report"):
                run.reports += 1
                heard.update({row["name"]: row["guest_connected"] for row in body["vms"]})
                if len(heard) == vms and all(heard.values()):
                    ready.set()
                changes = body["core_changes"]
                acknowledged = max((change["sequence"] for change in changes), default=0)
                return web.json_response({"epoch": 1, "acknowledged": acknowledged})
            return web.json_response({"every_s": 120})

        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        child = context.Process(target=_run, args=(directory, vms, url), name="fake agent")
        child.start()
        run = Served(psutil.Process(child.pid))
        try:
            try:
                async with asyncio.timeout(READY_S):
                    await ready.wait()
            except TimeoutError as error:
                raise BenchmarkFailed(f"the agent has not reported {vms} guests within {READY_S:g} s") from error
            yield run
        finally:
            child.terminate()
            await asyncio.to_thread(child.join)
            for server in servers:
                server.close()
            await runner.cleanup()


def _socket(directory: Path, number: int) -> Path:
    return directory / f"{number}.sock"


def _run(directory: Path, vms: int, manager: str) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    asyncio.run(_serve(directory, vms, manager))


async def _serve(directory: Path, vms: int, manager: str) -> None:
    from hostagent.service import serve

    world = SlowLibvirt(Slowness())
    for number in range(vms):
        name, intent = domain_name(HOST, f"vm-{number}"), to_qualified_element(settled_intent(f"vm-{number}"))
        world.domains[name] = SlowDomain(name, _socket(directory, number), intent, world.how)
    tokens = directory / "a.token", directory / "b.token"
    for path in tokens:
        path.write_text(os.urandom(16).hex())
        path.chmod(0o600)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await serve(agent_over(world, directory, vms), "127.0.0.1", 0, tokens[0], manager, tokens[1], stop)
