"""`idle`: what the host agent costs while it looks after 20 VMs and nothing else happens.

A real `ebb-hostagent` with a manager, over real guests; CPU time and resident size as the kernel counts them
(proc(5): /proc/PID/stat), in windows one after another once everything has settled. QEMU's own cost is not in it.
The same agent over 200 simulated VMs comes first, since no such machine has as many guests.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil

from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.bench_host import READY_S, BenchHost, bench, room_mib, run_async
from benchmarks.host.fake_agent import served
from benchmarks.passes import Pass
from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from hostagent.running import OVERHEAD_MIB

VMS = 20
SIMULATED_VMS = 200
SIMULATED_WINDOW_S = 30.0
SIZE = Vector(cpu_cores=1, memory_mib=256)
WINDOW_S = 60.0
SETTLE_S = 20.0
#: What one such guest takes of the host's memory, measured under emulation, MiB.
TAKES_MIB = 420.0


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    count = 2 if how.quick else VMS
    room = room_mib(count * TAKES_MIB)
    if room < count * TAKES_MIB:
        raise BenchmarkFailed(f"{count} guests need {count * TAKES_MIB:g} MiB of free memory, {room:.0f} are free")
    per_vm = SIZE.vector() + ResourceVector(memory_mib=max(OVERHEAD_MIB.values()))
    simulated = run_async(_simulated(20 if how.quick else SIMULATED_VMS, how))
    with bench(per_vm * count, how.report, daemons=True) as ground:
        return simulated | run_async(_measure(ground, count, how))


async def _simulated(count: int, how: Pass) -> Figures:
    """Many VMs over a make-believe libvirt: the agent's own share of its cost, in which libvirt's client is not."""
    window_s = 5.0 if how.quick else SIMULATED_WINDOW_S
    cpu, per_report = [], []
    async with served(count) as run:
        await asyncio.sleep(2.0 if how.quick else SETTLE_S)
        for number in range(how.runs):
            how.report(f"{count} simulated VMs for {window_s:g} s ({number + 1} of {how.runs})")
            before_s, reports, began = cpu_s(run.process), run.reports, time.monotonic()
            await asyncio.sleep(window_s)
            used_s = cpu_s(run.process) - before_s
            cpu.append(100 * used_s / (time.monotonic() - began))
            per_report.append(1000 * used_s / max(run.reports - reports, 1))
    conditions = f"{count} settled VMs over a make-believe libvirt in the same process, windows of {window_s:g} s"
    return {
        f"agent_cpu_{count}_simulated_vms": Figure.over(cpu, "% of one core", conditions),
        f"agent_cpu_per_report_{count}_simulated_vms": Figure.over(
            per_report, "ms", f"all that the agent does from one report to the next; {conditions}"
        ),
    }


async def _measure(ground: BenchHost, count: int, how: Pass) -> Figures:
    token = ground.state.manager_token_file.read_text().strip()
    async with ManagerClient(ground.state.manager_url, token) as client:
        await start(client, count, how)
    record = ground.lab.state().daemon(ground.host.id).process
    if record is None:
        raise BenchmarkFailed("the host agent has no process")
    process = psutil.Process(record.pid)
    window_s = 5.0 if how.quick else WINDOW_S
    how.report(f"{count} VMs run; waiting for them to settle")
    await asyncio.sleep(2.0 if how.quick else SETTLE_S)
    cpu, resident, share = [], [], []
    for number in range(how.runs):
        how.report(f"looking at the agent for {window_s:g} s ({number + 1} of {how.runs})")
        before_s, began = cpu_s(process), time.monotonic()
        await asyncio.sleep(window_s)
        cpu.append(100 * (cpu_s(process) - before_s) / (time.monotonic() - began))
        memory = process.memory_full_info()
        resident.append(memory.rss / 2**20)
        share.append(memory.pss / 2**20)
    conditions = f"{count} settled VMs, windows of {window_s:g} s, a manager listens"
    return {
        f"agent_cpu_{count}_vms": Figure.over(cpu, "% of one core", conditions),
        f"agent_resident_{count}_vms": Figure.over(resident, "MiB", conditions),
        f"agent_share_{count}_vms": Figure.over(
            share, "MiB", f"pages that processes share counted in parts; {conditions}"
        ),
    }


async def start(client: ManagerClient, count: int, how: Pass) -> None:
    """One after another: guests that boot at the same time only wait for one another."""
    for number in range(1, count + 1):
        name = f"idle-{number}"
        spec = VMSpec(name=name, priority=Priority.DEFLATABLE, nominal=SIZE, minimum=Vector())
        operation = await client.wait(await client.create(spec), limit_s=READY_S)
        if operation.state is not OperationState.DONE:
            raise BenchmarkFailed(f"{name} could not be started: {operation.sentence}")
        await _answers(client, name)
        how.report(f"{name} of {count} is up")


async def _answers(client: ManagerClient, name: str) -> None:
    deadline_s = time.monotonic() + READY_S
    while not (await client.vm(name)).guest_connected:
        if time.monotonic() > deadline_s:
            raise BenchmarkFailed(f"the guest of {name} has not said hello within {READY_S:g} s")
        await asyncio.sleep(0.5)


def cpu_s(process: psutil.Process) -> float:
    """CPU time of its threads, to the nanosecond: of an idle agent ticks of 10 ms are too coarse."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
