"""`cascade`, part four: two real guests deflated at once, and one of them beside programs that want all cores.

Guests as in part one, their caches filled before each deflation. In one run one of the two is deflated alone, then both
at once, then the first again beside busy loops; which of them is alone changes from run to run, and the order turns
round with every other run. How much CPU time the
guests themselves took stands beside it: under emulation two guests want more than two cores, so that the cores may be
what they wait for, and not the agent. So one alone and both at once are also measured with each guest kept on a core of
its own, as on a host that has cores for all its guests; the agent runs on whatever core is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.deflating.overhead import BOOT_MIB, NOMINAL, SPARE_TURNS, TARGET, FellShort, fill
from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import BenchHost, resize, running, start_vm
from benchmarks.passes import Pass
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.limits.footprints import qemu_pid
from hostagent.operations.agent import Agent
from hostagent.vm.managed_vm import ManagedVM

VMS = 2
LOOPS = 2
CASES = (
    ("alone", True, 0, False),
    ("both", False, 0, False),
    ("busy", True, LOOPS, False),
    ("apart_alone", True, 0, True),
    ("apart_both", False, 0, True),
)
#: Runs as long as it is the child of this one.
LOOP = "import os\nwhile os.getppid() == {parent}:\n    for _ in range(100_000):\n        pass"
SETTLE_S = 1.0


@dataclass(frozen=True)
class Deflated:
    """Seconds from the first command to the last end, and the CPU seconds that the guests' processes took in them."""

    seconds: float
    guests_cpu_s: float

    @property
    def cores(self) -> float:
        return self.guests_cpu_s / self.seconds


@dataclass
class Turns:
    """What was measured, a value a run."""

    alone: list[Deflated] = field(default_factory=list)
    both: list[Deflated] = field(default_factory=list)
    busy: list[Deflated] = field(default_factory=list)
    #: Each guest on a core of its own.
    apart_alone: list[Deflated] = field(default_factory=list)
    apart_both: list[Deflated] = field(default_factory=list)
    #: Runs that do not count, since the agent fell short.
    dropped: int = 0


async def measure(ground: BenchHost, how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    turns, spare = Turns(), SPARE_TURNS
    async with running(ground) as agent:
        vms = []
        for number in range(VMS):
            spec = VMSpec(name=f"neighbour-{number}", nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB)
            vms.append(await start_vm(agent, spec))
        try:
            # Not measured: pages that were never touched come faster than those that were.
            await _deflate(ground, agent, vms, how)
            while len(turns.busy) < how.runs:
                number = len(turns.busy) + 1
                try:
                    one = vms[number % VMS]
                    found = {
                        name: await _deflate(ground, agent, [one] if alone else vms, how, loops, apart)
                        for name, alone, loops, apart in in_turn(number)
                    }
                except FellShort as error:
                    turns.dropped += 1
                    spare -= 1
                    if spare < 0:
                        raise
                    how.report(f"run {number} of {how.runs} does not count: {error}")
                    continue
                for name, each in found.items():
                    getattr(turns, name).append(each)
                words = ", ".join(
                    f"{name} {each.seconds:.2f} s ({each.cores:.2f} cores)" for name, each in found.items()
                )
                how.report(f"run {number} of {how.runs}: {words}")
        finally:
            for vm in vms:
                await agent.host.forget(vm)
    return figures(turns)


def in_turn(number: int) -> list[tuple[str, bool, int, bool]]:
    """What a run measures, in its order: where it is kept; whether one VM alone, beside how many loops, on own cores.

    Turned round in two runs of four, so that each of the two VMs is alone first and last.
    """
    return list(CASES)[:: 1 if number // VMS % 2 == 0 else -1]


async def _deflate(
    ground: BenchHost, agent: Agent, vms: Sequence[ManagedVM], how: Pass, loops: int = 0, apart: bool = False
) -> Deflated:
    """Fill their caches, deflate them all at once, beside so many busy loops, and give all back.

    :param apart: keep each guest on a core of its own meanwhile.
    """
    for vm in vms:
        await fill(ground, vm, how)
    processes = [psutil.Process(qemu_pid(vm.domain)) for vm in vms]
    with busy_loops(loops), apart_on_cores(processes if apart else []):
        # For the loops to have started, and for the guests to be done with what the filling left.
        await asyncio.sleep(SETTLE_S)
        before_s, began_s = _cpu_s(processes), time.perf_counter()
        outcomes = await asyncio.gather(*(resize(agent, vm, TARGET, may_fall_short=True) for vm in vms))
        found = Deflated(time.perf_counter() - began_s, _cpu_s(processes) - before_s)
    for vm in vms:
        await resize(agent, vm, NOMINAL)
    for outcome in outcomes:
        if not outcome.shortfall.vector().is_zero():
            raise FellShort(f"the agent fell short of {outcome.shortfall.vector()}: {outcome.sentence}")
    return found


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many programs that do nothing but run; each in a session of its own, as those of other users are.

    They also end where this process is killed.
    """
    command = [sys.executable, "-c", LOOP.format(parent=os.getpid())]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def apart_on_cores(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Each process on a core of its own, all its threads. Raises BenchmarkFailed where there are too few cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(processes):
        raise BenchmarkFailed(
            f"{len(processes)} guests on cores of their own need as many cores, there are {len(cores)}"
        )
    try:
        for process, core in zip(processes, cores, strict=False):
            _keep_on(process, {core})
        yield
    finally:
        for process in processes:
            _keep_on(process, set(cores))


def _keep_on(process: psutil.Process, cores: set[int]) -> None:
    for thread in process.threads():
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)


def figures(turns: Turns) -> Figures:
    """Ratios within each run, and what tells whether the cores were what was waited for."""
    cores = os.cpu_count() or 1
    one, quiet = "one of them deflated alone", "the same VM deflated without them"
    alone_s = [found.seconds for found in turns.alone]
    made: Figures = {
        "two_vms_to_one": Figure.over(ratios([found.seconds for found in turns.both], alone_s), "ratio", one),
        "two_vms_apart_to_one": Figure.over(
            ratios([found.seconds for found in turns.apart_both], [found.seconds for found in turns.apart_alone]),
            "ratio",
            f"{one}; each guest on a core of its own",
        ),
        "busy_to_quiet": Figure.over(ratios([found.seconds for found in turns.busy], alone_s), "ratio", quiet),
        "two_vms_runs_dropped": Figure.over([turns.dropped], "runs", "not counted: the agent fell short"),
    }
    names = (
        ("one_vm", turns.alone, one),
        ("two_vms", turns.both, f"{VMS} VMs deflated at once"),
        ("busy", turns.busy, f"one VM deflated beside {LOOPS} busy loops"),
        ("one_vm_apart", turns.apart_alone, f"{one}, on a core of its own"),
        ("two_vms_apart", turns.apart_both, f"{VMS} VMs deflated at once, each on a core of its own"),
    )
    for name, found, words in names:
        words = f"{words}, {cores} cores"
        made[f"{name}_s"] = Figure.over([each.seconds for each in found], "s", words)
        made[f"{name}_guests_cores"] = Figure.over(
            [each.cores for each in found], "cores", f"CPU time of the guests' processes over {name}_s"
        )
    # As much CPU time as both took cannot pass sooner on these cores, whoever deflates them.
    least = [max(found.guests_cpu_s / cores, 1e-3) for found in turns.both]
    made["two_vms_least_to_one"] = Figure.over(
        ratios(least, alone_s), "ratio", f"two_vms_to_one if nothing but the guests' own CPU time took time; {one}"
    )
    return made
