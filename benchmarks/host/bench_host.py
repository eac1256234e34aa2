"""Host for benchmarks with guests: libvirt, image and accelerator as in a lab, on a host id of their own.

The agent runs inside the benchmark's process, so that its steps can be watched; `idle` alone starts real daemons. What
a killed benchmark left is cleared away by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
import types
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import libvirt
import psutil
import structlog

from benchmarks.figures import BenchmarkFailed
from benchmarks.host.alone import lab_of_benchmarks
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab import paths
from ebbtide.lab.cluster import HostSlice, Lab
from ebbtide.lab.guest_link import LabLink, channel_path
from ebbtide.lab.state import LabHost, LabState
from ebbtide.messages.commands import CreateCommand, TargetCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState, VMOutcome
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.operations.agent import Agent
from hostagent.running import OVERHEAD_MIB
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from hostagent.vm.managed_vm import ManagedVM

READY_S = 300.0
#: Lab guests come without it; files in memory and Python's multiprocessing need it.
MOUNT_SHM = "mkdir -p /dev/shm; mountpoint -q /dev/shm || mount -t tmpfs tmpfs /dev/shm"
OPERATION_S = 900.0
#: Host memory that a benchmark leaves alone, MiB.
RESERVE_MIB = 1024.0

T = TypeVar("T")


@dataclass(frozen=True)
class BenchHost:
    """A prepared host. ``image_dir`` holds the guest image."""

    lab: Lab
    state: LabState
    host: LabHost

    @property
    def image_dir(self) -> Path:
        return paths.image_cache() / self.state.image

    def settings(self, cold_first: bool = False) -> LibvirtSettings:
        return LibvirtSettings(
            host_id=self.host.id,
            uri=self.state.uri,
            accelerator=cast(Literal["kvm", "qemu"], self.state.accelerator),
            image_dir=self.image_dir,
            disk_dir=self.host.disk_dir,
            cold_first=cold_first,
        )

    def agent(self, opener: Callable[[str], Any] = libvirt.open, cold_first: bool = False) -> Agent:
        """An agent of this host in the running event loop; not started yet.

        :param opener: opens its connections to libvirt.
        :param cold_first: whether cold pages may go first, which agents have off.
        """
        kind = self.state.accelerator
        part = Slice(self.host.id, self.host.url, self.host.capacity.vector(), kind, OVERHEAD_MIB[kind])
        journal = Journal(self.host.disk_dir.parent / "state")
        return Agent(Host(part, LibvirtHypervisor(self.settings(cold_first), opener), journal), usable_boot_mib)


@contextlib.contextmanager
def bench(capacity: ResourceVector, report: Callable[[str], None], *, daemons: bool = False) -> Iterator[BenchHost]:
    """Prepare a host of that capacity; everything is gone at the end, however it ends.

    :param daemons: with a manager and a host agent as processes of their own.
    Raises LabError, BenchmarkFailed.
    """
    if os.geteuid() != 0:
        raise BenchmarkFailed("benchmarks with guests need root: libvirt's system instance; run them through sudo")
    lab = lab_of_benchmarks(report)
    # Benchmarks with other directories may run at the same time: none may take another's domains for leftovers.
    host = HostSlice(f"bench-{hashlib.sha256(str(lab.directory).encode()).hexdigest()[:6]}", capacity)
    # The agent's own log on the terminal would cost it time; what it did is recorded otherwise.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with terminable():
        lab.down()
        try:
            state = lab.up([host]) if daemons else lab.prepare([host])
            yield BenchHost(lab, state, state.hosts[0])
        finally:
            lab.down()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and the end of its terminal end a benchmark as Ctrl-C does: with its guests removed."""

    def interrupt(_number: int, _frame: types.FrameType | None) -> None:
        # asyncio cancels the benchmark alone by it: what that puts back at its end needs the agent, whose tasks go on.
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A process in the background of a script ignores SIGINT.
    handlers = {signal.SIGTERM: interrupt, signal.SIGINT: signal.default_int_handler}
    # Who starts it under nohup wants it to go on.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a benchmark's coroutine in an event loop of its own."""
    return asyncio.run(work)


def room_mib(wanted_mib: float) -> float:
    """What a benchmark may take of the memory that is free now, at most ``wanted_mib``."""
    return min(wanted_mib, psutil.virtual_memory().available / 2**20 - RESERVE_MIB)


@contextlib.asynccontextmanager
async def running(ground: BenchHost, cold_first: bool = False) -> AsyncIterator[Agent]:
    """An agent that works; see `BenchHost.agent`."""
    agent = ground.agent(cold_first=cold_first)
    await agent.start()
    try:
        yield agent
    finally:
        await agent.close()


async def start_vm(agent: Agent, spec: VMSpec) -> ManagedVM:
    """Start a VM and wait until its guest answers and has all its memory. Raises BenchmarkFailed."""
    await finish(agent, await agent.creations.create(CreateCommand(request_id=_request_id(), vm=spec)))
    vm = agent.host.vm(spec.name)
    await ready(vm)
    return vm


async def ready(vm: ManagedVM) -> None:
    """Wait until a VM's guest answers and has all its memory. Raises BenchmarkFailed."""
    await vm.wait_for_hello(READY_S)
    if not vm.link.connected:
        raise BenchmarkFailed(f"the guest of {vm.name} has not said hello within {READY_S:g} s")
    until_s = time.monotonic() + READY_S
    while vm.boots_small:
        if time.monotonic() > until_s:
            raise BenchmarkFailed(f"{vm.name} does not have its memory after {READY_S:g} s")
        await asyncio.sleep(0.1)


async def resize(
    agent: Agent,
    vm: ManagedVM,
    size: ResourceVector,
    deadline_s: float = 120.0,
    request_id: str | None = None,
    may_fall_short: bool = False,
) -> VMOutcome:
    """Bring a VM to a size by the agent's own command. Raises BenchmarkFailed when it fails or falls short of it."""
    command = TargetCommand(
        request_id=request_id or _request_id(),
        generation=vm.intent.generation + 1,
        target=Vector.of(size),
        deadline_s=deadline_s,
    )
    outcome = (await finish(agent, await agent.sizes.target(vm.name, command))).vms[0]
    if not may_fall_short and not outcome.shortfall.vector().is_zero():
        raise BenchmarkFailed(f"{vm.name} did not get to its size: {outcome.sentence}")
    return outcome


async def finish(agent: Agent, operation: Operation) -> Operation:
    """An operation at its end. Raises BenchmarkFailed when it failed."""
    ended = await agent.requests.operations.get(operation.request_id, OPERATION_S)
    if ended is None or ended.state in (OperationState.RUNNING, OperationState.FAILED):
        raise BenchmarkFailed(f"{operation.kind} failed: {ended.sentence if ended else 'it is not known any more'}")
    return ended


async def lab_link(uri: str, domain: str) -> LabLink:
    """The benchmark's own hand inside a guest; the caller closes it. Raises LabError."""

    def find() -> Path:
        connection = libvirt.open(uri)
        try:
            return channel_path(connection.lookupByName(domain).XMLDesc())
        finally:
            connection.close()

    return await LabLink.connect(await asyncio.to_thread(find))


async def in_guest(guest: LabLink, script: str, limit_s: float = 600.0) -> str:
    """Run a shell script in a guest and return what it printed. Raises BenchmarkFailed when it fails, LabError."""
    # busybox: minimal guests have no other mount or mountpoint.
    argv = ["busybox", "sh", "-c", script]
    done = await guest.call("exec", reply_timeout_s=limit_s + 10, argv=argv, timeout_s=limit_s)
    if done["returncode"] != 0:
        raise BenchmarkFailed(f"`{script[:60]}` failed in the guest: {done['stderr'][-200:]}")
    return str(done["stdout"])


def _request_id() -> str:
    return f"bench-{uuid.uuid4().hex[:20]}"
