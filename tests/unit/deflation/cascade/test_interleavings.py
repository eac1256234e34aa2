"""All interleavings of the cascade's overlapping instructions, on small cases: what holds at every moment of each.

An instruction does its work at one moment, is read at a later one and answered at a third; between them any other that
is under way may move. Every order is gone through, each state once.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from ebbtide.deflation.bounds import reclaimed
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    ApplicationReported,
    AskApplication,
    Event,
    Finish,
    GuestReading,
    Instruction,
    Measured,
    PollApplication,
    ReclaimCold,
    Stopped,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.steps import STEP_SHARE
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.model_vm import ModelVM, moves_memory

#: Looks at the promise until the application has released all of it, a part at each.
PARTS = 2
TARGET = ResourceVector(1.5, 640)


@dataclass
class Step:
    """An instruction under way: what it is answered with, once it has been carried out and read."""

    instruction: Instruction
    #: What the VM held when it was instructed.
    held_mib: float
    carried_out: bool = False
    answer: Event | None = None


@dataclass
class World:
    """The machine, its VM and what is under way."""

    vm: ModelVM
    machine: Cascade
    under_way: list[Step]
    released: int = 0
    stops: bool = False
    reboots: bool = False

    def take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._check(instruction)
            self.under_way.append(Step(instruction, self.vm.bound.held_mib))
        moving = (one.held_mib for one in self.under_way if moves_memory(one.instruction))
        before_mib = next(moving, self.vm.bound.held_mib)
        assert self.machine.bound.held_mib == pytest.approx(before_mib), "as it was before the step under way"

    def _check(self, instruction: Instruction) -> None:
        """What must hold when something is begun, whatever else is under way."""
        others = [one.instruction for one in self.under_way]
        if moves_memory(instruction):
            assert not any(moves_memory(one) for one in others), "one step of memory at a time"
            kept = [
                x for x in (getattr(instruction, "plugged_mib", None), getattr(instruction, "balloon_mib", None)) if x
            ]
            if kept:
                now = self.vm.plugged_mib if isinstance(instruction, Unplug) else self.vm.balloon_mib
                assert now - kept[0] <= self.vm.spare_mib * STEP_SHARE + 1e-6, "half of what can be spared now"
                if self.machine._cold.parts is not None:
                    assert now - kept[0] <= self.vm.spare_mib - (self.vm.cold_mib or 0.0) + 1e-6, "only what is free"
        if isinstance(instruction, ReclaimCold):
            assert not any(isinstance(one, ReclaimCold | PollApplication) for one in others), "the application has done"
        if moves_cpu(instruction):
            assert not any(moves_cpu(one) for one in others), "one step of CPU at a time"
        if isinstance(instruction, AskApplication | PollApplication):
            assert not any(isinstance(one, AskApplication | PollApplication) for one in others)

    def _copy(self) -> World:
        """Several times as fast as ``copy.deepcopy``."""
        made: World = pickle.loads(pickle.dumps(self))
        return made

    def moves(self) -> Iterator[World]:
        """Each world that one event leads to."""
        for number in range(len(self.under_way)):
            world = self._copy()
            world._move(world.under_way[number])
            yield world
        if self.stops and self.under_way:
            world = self._copy()
            bound, last = world.vm.bound, world.under_way[-1].instruction
            answers: list[Event] = [
                Measured(0.0, step.instruction.step, bound, world.vm.reading())
                for step in world.under_way
                if not isinstance(step.instruction, AskApplication | PollApplication | ReclaimCold)
            ]
            for answer in (*answers, Stopped(0.0, last.step, "the guest is under pressure")):
                begun = world.machine.handle(answer)
                if world.machine.outcome is not None:
                    break
            world.under_way = [Step(instruction, bound.held_mib) for instruction in begun]
            yield world
        if self.reboots and self.under_way:
            world = self._copy()
            world.reboots = False
            world.vm.online = set(range(world.vm.cpus))
            yield world

    def _move(self, step: Step) -> None:
        instruction = step.instruction
        match instruction:
            case Finish():
                raise AssertionError("nothing comes after the end")
            case AskApplication():
                promised = ResourceVector(memory_mib=self.vm.application_mib - self.vm.application_minimum_mib)
                return self._answer(step, ApplicationAnswered(0.0, instruction.step, promised))
            case PollApplication():
                part = (300.0 - self.vm.application_minimum_mib) / PARTS
                self.vm.application_mib -= part
                self.released += 1
                given = ResourceVector(memory_mib=part * self.released)
                return self._answer(
                    step, ApplicationReported(0.0, instruction.step, given, done=self.released == PARTS)
                )
        if not step.carried_out:
            step.carried_out = True
            if isinstance(instruction, ReclaimCold):
                step.answer = self.vm.carry_out(instruction, 0.0)
                return None
            if not isinstance(instruction, Unplug | Throttle):
                return None
            before = self.vm.bound
            self.vm.carry_out(instruction, 0.0)
            after = self.vm.bound
            assert after.memory_mib >= min(TARGET.memory_mib, before.memory_mib) - 1e-6, "never below the target"
            assert self.vm.spare_mib >= 0, "never into the reserve"
            return None
        if step.answer is None:
            step.answer = Measured(0.0, instruction.step, self.vm.bound, self.vm.reading())
            return None
        return self._answer(step, step.answer)

    def _answer(self, step: Step, answer: Event) -> None:
        self.under_way.remove(step)
        self.take(self.machine.handle(answer))

    def key(self) -> str:
        """All that the future depends on; numbers of instructions apart."""
        steps = {step.instruction.step: number for number, step in enumerate(self.under_way)}
        under_way = [
            (replace(s.instruction, step=0), s.carried_out, s.answer and replace(s.answer, step=0))
            for s in self.under_way
        ]
        waits = [(steps.get(step), one.lanes, sorted(one.counts_for)) for step, one in self.machine._under_way.items()]
        lanes = [
            {k: v for k, v in vars(lane).items() if k != "job"}
            for lane in (self.machine._cpu, self.machine._memory, self.machine._cold)
        ]
        vm = replace(self.vm, instructions=0)
        return repr((vm, under_way, waits, lanes, self.machine._job, self.released, self.machine.outcome, self.reboots))


def moves_cpu(instruction: Instruction) -> bool:
    match instruction:
        case Unplug():
            return instruction.online is not None
        case Throttle():
            return instruction.cpu_cores is not None
    return False


def ends(
    vm: ModelVM, deadline_s: float, *, application: bool, stops: bool = False, reboots: bool = False
) -> list[World]:
    """Every world in which some order of events ends; also checks every one on the way."""
    blocked = (Mechanism.MEMORY_LIMIT,) if application else (Layer.APPLICATION, Mechanism.MEMORY_LIMIT)
    machine = Cascade(vm.bound, TARGET, deadline_s, without(*blocked))
    first = World(vm, machine, [], stops=stops, reboots=reboots)
    first.take(machine.start(0.0))
    seen, waiting, ended = set[str](), [first], []
    while waiting:
        world = waiting.pop()
        if len(world.under_way) == 1 and isinstance(world.under_way[0].instruction, Finish):
            ended.append(world)
            continue
        assert world.under_way, "it neither goes on nor ends"
        for moved in world.moves():
            if (key := moved.key()) not in seen:
                seen.add(key)
                waiting.append(moved)
    assert len(seen) > 20, "there was something to interleave"
    return ended


def check_end(world: World) -> None:
    """Capacity is counted by what is there: the figures are the VM's own, and the ledger adds up to them."""
    outcome = world.machine.outcome
    assert outcome is not None
    assert outcome.after.memory_mib == pytest.approx(world.vm.bound.memory_mib)
    given = reclaimed(outcome.before, outcome.after).total
    for component in ("cpu_cores", "memory_mib"):
        rows = {row.layer: row.verified for row in outcome.ledger if row.resource == component}
        assert rows[Layer.GUEST] + rows[Layer.HYPERVISOR] == pytest.approx(given[component], abs=1e-3)
        assert rows[Layer.APPLICATION] + rows.get(Layer.COLD, 0.0) <= rows[Layer.GUEST] + 1e-3


@pytest.mark.parametrize(
    ("deadline_s", "application", "stubborn"),
    [
        (60.0, True, frozenset()),
        (60.0, True, frozenset({3})),
        (60.0, False, frozenset({3})),
        (5.0, False, frozenset({3})),
        (5.0, True, frozenset()),
    ],
)
def test_in_every_order_of_overlapping_steps_the_target_is_reached_and_nothing_is_taken_twice(
    deadline_s: float, application: bool, stubborn: frozenset[int]
) -> None:
    vm = ModelVM(stubborn=stubborn, application_mib=300.0 if application else 64.0)
    ended = ends(vm, deadline_s, application=application)
    assert ended
    for world in ended:
        check_end(world)
        outcome = world.machine.outcome
        assert outcome is not None
        assert outcome.reached, outcome.sentence
        assert outcome.after.cpu_cores == pytest.approx(TARGET.cpu_cores, abs=0.01)
        assert world.vm.bound.cpu_cores == pytest.approx(TARGET.cpu_cores, abs=0.01)


@pytest.mark.parametrize("at_most_mib", [1e9, 40.0])
def test_in_every_order_cold_pages_become_free_ahead_of_unplugging_and_cost_nothing_that_is_in_use(
    at_most_mib: float,
) -> None:
    """92 MiB are missing of what is free, two instructions' worth."""
    ended = ends(ModelVM(application_mib=64.0, cold_mib=500.0, cold_at_most_mib=at_most_mib), 60.0, application=False)
    for world in ended:
        check_end(world)
        outcome = world.machine.outcome
        assert outcome is not None
        assert outcome.reached, outcome.sentence
        (cold,) = [row for row in outcome.ledger if row.layer is Layer.COLD]
        assert 40 <= cold.verified <= 92


def test_cold_pages_called_off_at_any_moment_of_any_order_leave_a_ledger_that_adds_up() -> None:
    vm = ModelVM(cold_mib=500.0, application_mib=64.0, cold_at_most_mib=40.0)
    for world in ends(vm, 60.0, application=False, stops=True):
        check_end(world)


def test_stopped_at_any_moment_of_any_order_it_counts_what_is_there() -> None:
    ended = ends(ModelVM(), 60.0, application=True, stops=True)
    assert any("stopped" in world.machine.outcome.sentence for world in ended if world.machine.outcome is not None)
    for world in ended:
        check_end(world)


def test_a_guest_that_reboots_at_any_moment_of_any_order_has_no_more_cpu_than_its_quota_and_cap_leave() -> None:
    ended = ends(ModelVM(), 60.0, application=True, reboots=True)
    for world in ended:
        check_end(world)
        assert world.vm.bound.cpu_cores <= TARGET.cpu_cores + 0.01


def test_a_reading_that_overlaps_a_step_of_memory_tells_nothing_of_memory() -> None:
    """The off-lining was read before 362 MiB were reached, and is answered after that."""
    vm = ModelVM()
    machine = Cascade(vm.bound, TARGET, 60.0, without(Layer.APPLICATION, Mechanism.MEMORY_LIMIT))
    (read,) = machine.start(0)
    all_on_line = GuestReading((0, 1, 2, 3), (3, 2, 1), 300)
    unplug, offline = machine.handle(Measured(1, read.step, vm.bound, all_on_line))
    assert isinstance(unplug, Unplug)
    assert isinstance(offline, Unplug)
    early = replace(vm.bound, cpus_online=2)
    late = replace(vm.bound, plugged_mib=362.0)
    (again,) = machine.handle(Measured(2, unplug.step, late, replace(all_on_line, spare_mib=150)))
    assert machine.handle(Measured(3, offline.step, early, replace(all_on_line, online=(0, 1)))) == []
    assert isinstance(again, Unplug)
    assert (machine.bound.plugged_mib, machine.bound.cpus_online) == (362.0, 2)
