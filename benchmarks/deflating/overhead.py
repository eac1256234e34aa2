"""`cascade`, part one: the agent's own time in a deflation of one real guest.

The guest's cache is filled, the agent deflates the VM through all layers, and what it did is recorded. Then, after
reinflation and with the cache filled again, the recorded operations are carried out once more without an agent
(`benchmarks.deflating.bare`). Both take turns; the ratio is that of one turn. The application adapter works in both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.deflating.bare import FellShort, Stalled, bare
from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import BenchHost, resize, start_vm
from benchmarks.host.recorder import (
    CallCounter,
    Recorder,
    RecordingHypervisor,
    StallMonitor,
    Step,
    record_guest,
    replayable,
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
#: Turns that may come to nothing, because a device stopped elsewhere than before or the agent fell short.
SPARE_TURNS = 5

PHASES = {
    "intents": "intents written to the domain's metadata",
    "readings": "readings of host and guest before and after each step",
    "application": "calls of the application in the guest",
    "devices": "quota, off-lining, virtio-mem and balloon, with the waits for them",
    "other calls": "other calls",
    "rest": "no call under way: pauses between looks at the application's promise, journal, the loop itself",
}


@dataclass
class Turns:
    """What was measured, a value a turn."""

    agent_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    phases: list[Mapping[str, float]] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    stalls_ms: list[float] = field(default_factory=list)
    outcomes: list[VMOutcome] = field(default_factory=list)
    #: Turns that do not count: whether the agent fell short in each.
    dropped: list[bool] = field(default_factory=list)


async def measure(ground: BenchHost, how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    turns, spare = Turns(), SPARE_TURNS
    calls = CallCounter()
    async with _agent(ground, calls, create=True) as (agent, vm, _):
        # Not measured: pages that were never touched come faster than those that were.
        await fill(ground, vm, how)
        await resize(agent, vm, TARGET, may_fall_short=True)
        await resize(agent, vm, NOMINAL)
    while len(turns.agent_s) < how.runs:
        number = f"turn {len(turns.agent_s) + 1} of {how.runs}"
        try:
            await _turn(ground, how, turns, calls, number)
        except Stalled as error:
            turns.dropped.append(isinstance(error, FellShort))
            spare -= 1
            if spare < 0:
                raise
            how.report(f"{number} does not count: {error}")
    async with _agent(ground, calls) as (agent, vm, _):
        await agent.host.forget(vm)
    return _figures(turns)


async def _turn(ground: BenchHost, how: Pass, turns: Turns, calls: CallCounter, number: str) -> None:
    async with _agent(ground, calls) as (agent, vm, recorder):
        await fill(ground, vm, how)
        calls.clear()
        recorder.take()
        async with StallMonitor() as monitor:
            began_s = time.perf_counter()
            outcome = await resize(agent, vm, TARGET, may_fall_short=True)
            agent_s = time.perf_counter() - began_s
        down = recorder.take()
        by_name = {name: (count, calls.seconds[name]) for name, count in calls.calls.items()}
        guest_calls = sum("." in step.name or step.name == "status" for step in down)
        how.report(f"{number}: the agent took {agent_s:.2f} s: {outcome.sentence}")
        await resize(agent, vm, NOMINAL)
        up = recorder.take()
        if not outcome.shortfall.vector().is_zero():
            raise FellShort(f"the agent fell short of {outcome.shortfall.vector()}")
        await fill(ground, vm, how)
        domain = vm.domain
    async with bare(ground.state.uri, domain) as hand:
        try:
            bare_s = await hand.replay(replayable(down))
        finally:
            await hand.replay(replayable(up))
    how.report(f"{number}: bare took {bare_s:.2f} s, ratio {agent_s / bare_s:.3f}")
    turns.agent_s.append(agent_s)
    turns.bare_s.append(bare_s)
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
    agent, bare_of = "one deflation by the agent, from command to its end", "the same operations called bare"
    figures = {
        "agent_to_bare": Figure.over(ratios(turns.agent_s, turns.bare_s), "ratio", f"{bare_of} on the same guest"),
        "agent_s": Figure.over(turns.agent_s, "s", agent),
        "bare_s": Figure.over(turns.bare_s, "s", bare_of),
        "calls_per_deflation": Figure.over(turns.calls, "calls", "calls of libvirt and of the guest in one deflation"),
        "loop_stall_ms": Figure.over(
            turns.stalls_ms, "ms", f"longest time that the event loop did not turn in {agent}"
        ),
        "turns_dropped_device": Figure.over([turns.dropped.count(False)], "turns", "not counted: a device stopped"),
        "turns_dropped_agent": Figure.over([turns.dropped.count(True)], "turns", "not counted: the agent fell short"),
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
async def _agent(
    ground: BenchHost, calls: CallCounter, create: bool = False
) -> AsyncIterator[tuple[Agent, ManagedVM, Recorder]]:
    """An agent inside this process whose calls are recorded, and its VM once the guest answers."""
    recorder = Recorder()
    agent = ground.agent(calls.open)
    host: Any = agent.host
    host.hypervisor = RecordingHypervisor(host.hypervisor, recorder)
    await agent.start()
    try:
        if create:
            vm = await start_vm(agent, VMSpec(name=NAME, nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB))
        else:
            vm = agent.host.vm(NAME)
            await vm.wait_for_hello(60.0)
            if not vm.link.connected:
                raise BenchmarkFailed("the guest did not answer the agent that was started again")
        record_guest(vm.link, recorder)
        yield agent, vm, recorder
    finally:
        await agent.close()


async def fill(ground: BenchHost, vm: ManagedVM, how: Pass) -> None:
    """Fill a guest's cache. Raises DemoFailed."""
    began_s = time.perf_counter()
    await Cache(vm.name, Gauge(vm.domain, ground.state.uri), KEYS).fill(lambda done: None)
    how.report(f"the cache was filled in {time.perf_counter() - began_s:.1f} s")
