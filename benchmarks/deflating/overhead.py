"""`cascade`, part one: where the time goes in a deflation of one real guest.

The guest's cache is filled, the agent deflates the VM through all layers, and when each of its calls was under way is
recorded. Two figures are of the time outside the calls that move the VM: without any such call under way, and with all
in which another call was. They bound the agent's own time from below only: what its looks, its queue and its choice of
steps cost inside a call that moves the VM is in neither.

The same calls are not made once more without an agent: what a step takes of the next one depends on what the
application has released by then. Replayed with fixed sizes, each step waiting for those that were over when it began in
the agent's run, the copy takes longer by chance alone: by 1 to 4 % where steps of ten differ by 10 to 30 %.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import BenchHost, resize, start_vm
from benchmarks.host.recorder import (
    CallCounter,
    Recorder,
    RecordingHypervisor,
    StallMonitor,
    Step,
    outside,
    record_guest,
    spent,
)
from benchmarks.passes import Pass
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from ebbtide.demo.cache import Cache
from ebbtide.lab.readings import Gauge
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import VMOutcome
from ebbtide.messages.vms import VMSpec
from hostagent.operations.agent import Agent
from hostagent.vm.managed_vm import ManagedVM

NAME = "bench"
#: As in the demo: each layer has to give something, CPU as well as memory.
NOMINAL = ResourceVector(cpu_cores=3, memory_mib=1024)
TARGET = ResourceVector(cpu_cores=1.25, memory_mib=384)
BOOT_MIB = 512.0
KEYS = 10_400
#: Turns that may come to nothing, because the agent fell short.
SPARE_TURNS = 5

PHASES = {
    "intents": "intents written to the domain's metadata",
    "readings": "readings of host and guest before and after each step",
    "application": "calls of the application in the guest",
    "devices": "quota, off-lining, virtio-mem, balloon and cold pages, with the waits for them",
    "other calls": "other calls",
    "rest": "no call under way: pauses between looks at the application's promise, journal, the loop itself",
}


class FellShort(BenchmarkFailed):
    """The agent did not get all that it was to take: this turn cannot be compared."""


@dataclass
class Turns:
    """What was measured, a value a turn."""

    agent_s: list[float] = field(default_factory=list)
    #: Of it outside the calls that move the VM: alone, and with other calls beside these.
    outside_s: list[tuple[float, float]] = field(default_factory=list)
    phases: list[Mapping[str, float]] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    stalls_ms: list[float] = field(default_factory=list)
    outcomes: list[VMOutcome] = field(default_factory=list)
    #: Turns that do not count, since the agent fell short.
    dropped: int = 0


@dataclass(frozen=True)
class Work:
    """The agent that is measured, its VM, and what is recorded of its calls."""

    agent: Agent
    vm: ManagedVM
    recorder: Recorder
    calls: CallCounter


async def measure(ground: BenchHost, how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    turns, spare = Turns(), SPARE_TURNS
    async with _agent(ground) as work:
        # Not measured: pages that were never touched come faster than those that were.
        await fill(ground, work.vm, how)
        await resize(work.agent, work.vm, TARGET, may_fall_short=True)
        await resize(work.agent, work.vm, NOMINAL)
        while len(turns.agent_s) < how.runs:
            number = f"turn {len(turns.agent_s) + 1} of {how.runs}"
            try:
                await _turn(ground, how, turns, work, number)
            except FellShort as error:
                turns.dropped += 1
                spare -= 1
                if spare < 0:
                    raise
                how.report(f"{number} does not count: {error}")
        await work.agent.host.forget(work.vm)
    return _figures(turns)


async def _turn(ground: BenchHost, how: Pass, turns: Turns, work: Work, number: str) -> None:
    await fill(ground, work.vm, how)
    work.calls.clear()
    work.recorder.take()
    async with StallMonitor() as monitor:
        began_s = time.perf_counter()
        outcome = await resize(work.agent, work.vm, TARGET, may_fall_short=True)
        agent_s = time.perf_counter() - began_s
    down = work.recorder.take()
    by_name = {name: (count, work.calls.seconds[name]) for name, count in work.calls.calls.items()}
    guest_calls = sum("." in step.name or step.name == "status" for step in down)
    await resize(work.agent, work.vm, NOMINAL)
    if not outcome.shortfall.vector().is_zero():
        raise FellShort(f"the agent fell short of {outcome.shortfall.vector()}")
    alone_s, beside_s = outside(down, agent_s)
    how.report(
        f"{number}: the agent took {agent_s:.2f} s, {alone_s:.2f} of them outside calls that move the VM, "
        f"{beside_s:.2f} with other calls beside these: {outcome.sentence}"
    )
    turns.agent_s.append(agent_s)
    turns.outside_s.append((alone_s, beside_s))
    turns.phases.append(spent(down, agent_s))
    turns.calls.append(sum(count for count, _ in by_name.values()) + guest_calls)
    turns.stalls_ms.append(1000 * monitor.longest_s)
    turns.outcomes.append(outcome)
    for line in _account(down, by_name):
        how.report(line)


def _account(down: Sequence[Step], by_name: Mapping[str, tuple[int, float]]) -> Iterator[str]:
    """Where the time of one deflation went, call by call."""
    began_s = down[0].began_s if down else 0.0
    for step in down:
        words = ", ".join(str(argument)[:70] for argument in step.arguments if isinstance(argument, int | float | dict))
        yield f"    at {step.began_s - began_s:6.3f} s for {step.seconds:6.3f} s: {step.name} {words}"
    for name, (count, seconds) in sorted(by_name.items(), key=lambda item: -item[1][1]):
        yield f"    libvirt {name}: {count} calls, {seconds:.3f} s"


def _figures(turns: Turns) -> Figures:
    agent = "one deflation by the agent, from command to its end"
    alone_s, beside_s = zip(*turns.outside_s, strict=True)
    inside = "what the agent adds inside such calls is not in it"
    figures = {
        name: Figure.over(
            ratios(turns.agent_s, [total - part for total, part in zip(turns.agent_s, outside_s, strict=True)]),
            "ratio",
            f"agent_s without the time in which {words}; {inside}",
        )
        for name, outside_s, words in (
            ("agent_outside_calls_alone", alone_s, "no call that moves the VM was under way"),
            ("agent_outside_calls_beside", beside_s, "none was, or another call of the agent's beside it"),
        )
    }
    figures |= {
        "agent_s": Figure.over(turns.agent_s, "s", agent),
        "calls_per_deflation": Figure.over(turns.calls, "calls", "calls of libvirt and of the guest in one deflation"),
        "loop_stall_ms": Figure.over(
            turns.stalls_ms, "ms", f"longest time that the event loop did not turn in {agent}"
        ),
        "turns_dropped_agent": Figure.over([turns.dropped], "turns", "not counted: the agent fell short"),
    }
    for name, words in PHASES.items():
        seconds = [phases.get(name, 0.0) for phases in turns.phases]
        of = f"part of agent_s, overlapping with others, so that parts add up to more: {words}"
        figures[f"agent_{name.replace(' ', '_')}_s"] = Figure.over(seconds, "s", of)
    for layer in Layer:
        speeds = [speed for outcome in turns.outcomes if (speed := _speed(outcome, layer)) is not None]
        if speeds:
            of = f"memory verified by the {layer.value} layer over that layer's seconds in the ledger of agent_s"
            figures[f"ledger_{layer.value}_mib_s"] = Figure.over(speeds, "MiB/s", of)
    return figures


def _speed(outcome: VMOutcome, layer: Layer) -> float | None:
    """MiB/s; None where the layer gave none."""
    for row in outcome.ledger:
        if row.layer is layer and row.resource == "memory_mib" and row.verified > 0 and row.seconds > 0:
            return row.verified / row.seconds
    return None


@contextlib.asynccontextmanager
async def _agent(ground: BenchHost) -> AsyncIterator[Work]:
    """An agent inside this process whose calls are recorded, and its VM once the guest answers."""
    recorder, calls = Recorder(), CallCounter()
    agent = ground.agent(calls.open)
    host: Any = agent.host
    host.hypervisor = RecordingHypervisor(host.hypervisor, recorder)
    await agent.start()
    try:
        vm = await start_vm(agent, VMSpec(name=NAME, nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB))
        record_guest(vm.link, recorder)
        yield Work(agent, vm, recorder, calls)
    finally:
        await agent.close()


async def fill(ground: BenchHost, vm: ManagedVM, how: Pass) -> None:
    """Fill a guest's cache. Raises DemoFailed."""
    began_s = time.perf_counter()
    await Cache(vm.name, Gauge(vm.domain, ground.state.uri), KEYS).fill(lambda done: None)
    how.report(f"the cache was filled in {time.perf_counter() - began_s:.1f} s")
