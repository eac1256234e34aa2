"""A VM on its host as a pure model: guest, application and hypervisor, with every way to fail that matters here.

It does what the host agent's executor does: each instruction is answered by one event, and when it is answered nothing
that takes is under way any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    ApplicationReported,
    AskApplication,
    ColdReclaimed,
    Event,
    Finish,
    GuestReading,
    Instruction,
    Measured,
    Outcome,
    PollApplication,
    ReadGuest,
    ReclaimCold,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.reconcile import cap_of
from ebbtide.deflation.cascade.reinflation import Reinflation, TellApplication, Told
from ebbtide.deflation.cascade.steps import dimms_to_plug, dimms_to_take
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.resources import ResourceVector


class Behaviour(StrEnum):
    """What the application does when it is asked."""

    NONE = "none"
    PROMISES = "promises"
    REFUSES = "refuses"
    #: Promises and reports a release, but keeps its memory.
    LIES = "lies"
    #: Promises and never releases.
    HANGS = "hangs"
    #: Does not answer within the time limit.
    SILENT = "silent"


@dataclass
class ModelVM:
    """Sizes in MiB and cores. ``used_mib`` is what the guest cannot do without, the application's memory apart."""

    boot_mib: float = 512.0
    device_mib: float = 512.0
    cpus: int = 4
    block_mib: float = 2.0
    used_mib: float = 120.0
    application_mib: float = 300.0
    application_minimum_mib: float = 64.0
    reserve_mib: float = 48.0
    #: Of what it can spare, what is not free but cold; None: a guest agent that does not say. And the most of it that
    #: one instruction gets.
    cold_mib: float | None = None
    cold_at_most_mib: float = 1e9
    behaviour: Behaviour = Behaviour.PROMISES
    #: CPUs with pinned tasks, and CPUs that fail to go off or on line although nobody said so.
    pinned: frozenset[int] = frozenset()
    stubborn: frozenset[int] = frozenset()
    #: The most that one unplug gets, and the plugged memory below which nothing more can be had.
    unplug_at_most_mib: float = 1e9
    unmovable_mib: float = 0.0
    #: The most that the balloon moves while one instruction waits; the rest comes later where it is given.
    balloon_at_most_mib: float = 1e9
    #: Swap that could back a limit, and the share of the way down that a limit gets.
    swap_mib: float = 0.0
    limit_goes: float = 1.0
    #: From this instruction on the guest agent says nothing; the bound cannot be read in these.
    vanishes_at: int = 1_000_000
    blind_at: frozenset[int] = frozenset()
    #: The guest claims this much more to spare than it has.
    boast_mib: float = 0.0
    #: DIMMs that are plugged, DIMMs that are out, and whether the guest holds on to those it has.
    dimms_mib: tuple[float, ...] = ()
    dimms_out_mib: tuple[float, ...] = ()
    dimms_stuck: bool = False
    #: vCPUs that are plugged; fewer than ``cpus`` after ACPI unplug.
    cpus_plugged: int = 0
    #: Whether the host hears of plugged memory late: only when it waits for it.
    lags: bool = False
    latency_s: float = 0.2
    online: set[int] = field(default_factory=set)
    quota_per_cpu: float | None = None
    cap_cores: float | None = None
    balloon_mib: float = -1.0
    plugged_mib: float = -1.0
    balloon_target_mib: float = -1.0
    limit_mib: float | None = None
    instructions: int = 0
    told: ResourceVector | None = None

    def __post_init__(self) -> None:
        self.cpus_plugged = self.cpus_plugged or self.cpus
        self.online = self.online or set(range(self.cpus))
        self.balloon_mib = self.boot_mib if self.balloon_mib < 0 else self.balloon_mib
        self.plugged_mib = self.device_mib if self.plugged_mib < 0 else self.plugged_mib
        self.balloon_target_mib = self.balloon_mib

    # --- readings --------------------------------------------------------------------------------------------------

    @property
    def bound(self) -> Bound:
        """The bound as it truly is."""
        return self._bound(len(self.online))

    @property
    def seen(self) -> Bound:
        """The bound as the host sees it: of a guest that says nothing, all CPUs count as on line."""
        return self._bound(len(self.online) if self.answers else self.cpus_plugged, self._unheard_mib)

    def _bound(self, online: int, unheard_mib: float = 0.0) -> Bound:
        plugged = self.plugged_mib + sum(self.dimms_mib) + unheard_mib
        return Bound(
            online,
            self.quota_per_cpu,
            self.balloon_mib,
            plugged,
            limit_mib=self.limit_mib,
            dimms_mib=self.dimms_mib,
            cap_cores=self.cap_cores,
            vcpus=self.cpus_plugged,
        )

    @property
    def answers(self) -> bool:
        return self.instructions < self.vanishes_at

    @property
    def spare_mib(self) -> float:
        """What the guest can truly spare; negative when it has been pressed below its reserve."""
        held = self.balloon_mib + self.plugged_mib + sum(self.dimms_mib)
        return held - self.used_mib - self.application_mib - self.reserve_mib

    def reading(self) -> GuestReading | None:
        if not self.answers:
            return None
        # The pinned are left out, and most idle first means highest number first.
        unpluggable = tuple(sorted(self.online - self.pinned - {0}, reverse=True))
        free_mib = None if self.cold_mib is None else max(self.spare_mib - self.cold_mib, 0.0)
        spare_mib = max(self.spare_mib, 0.0) + self.boast_mib
        total_mib = self.balloon_mib + self.plugged_mib if self.lags and not self.dimms_mib else None
        return GuestReading(tuple(sorted(self.online)), unpluggable, spare_mib, free_mib=free_mib, total_mib=total_mib)

    # --- instructions ----------------------------------------------------------------------------------------------

    def due(self, instruction: Instruction, now: float) -> float:
        """When it will have been carried out."""
        if isinstance(instruction, AskApplication) and (not self.answers or self.behaviour is Behaviour.SILENT):
            return now + instruction.limit_s
        takes_s = self.latency_s
        if isinstance(instruction, PollApplication):
            takes_s = max(takes_s, instruction.delay_s)
        return now + min(takes_s, instruction.limit_s)

    def carry_out(self, instruction: Instruction, now: float) -> Event:
        """Do it, and answer with a later time."""
        then = self.due(instruction, now)
        self.instructions += 1
        step = instruction.step
        match instruction:
            case AskApplication():
                return self._ask(instruction, then)
            case PollApplication():
                return self._report(then, step)
            case ReclaimCold():
                return self._clear(instruction, then)
            case ReadGuest():
                return self._measured(then, step, "")
            case Unplug():
                return self._measured(then, step, self._unplug(instruction))
            case Throttle():
                return self._measured(then, step, self._throttle(instruction))
            case TellApplication():
                self.told = instruction.target if self.answers else None
                return Told(then, step, "" if self.answers else "the guest does not answer")
        raise AssertionError(f"{instruction} is unknown")

    def _measured(self, then: float, step: int, reason: str) -> Measured:
        return Measured(then, step, None if self.instructions in self.blind_at else self.seen, self.reading(), reason)

    def _ask(self, instruction: AskApplication, then: float) -> Event:
        step = instruction.step
        if not self.answers or self.behaviour is Behaviour.SILENT:
            return ApplicationAnswered(then, step, reason="no answer in time")
        if self.behaviour is Behaviour.NONE:
            return ApplicationAnswered(then, step, reason="no application is registered in the guest")
        if self.behaviour is Behaviour.REFUSES:
            return ApplicationAnswered(then, step, reason="refused: busy")
        fall = instruction.bound_mib - instruction.target.memory_mib
        self._release = max(min(fall, self.application_mib - self.application_minimum_mib), 0.0)
        return ApplicationAnswered(then, step, ResourceVector(memory_mib=self._release), expected_s=1.0)

    def _report(self, then: float, step: int) -> Event:
        if not self.answers:
            return ApplicationReported(then, step, done=True, reason="the guest does not answer")
        released = ResourceVector(memory_mib=self._release)
        match self.behaviour:
            case Behaviour.HANGS:
                return ApplicationReported(then, step)
            case Behaviour.LIES:
                return ApplicationReported(then, step, released, done=True)
            case _:
                self.application_mib -= self._release
                return ApplicationReported(then, step, released, done=True)

    def _clear(self, instruction: ReclaimCold, then: float) -> Event:
        if not self.answers or self.cold_mib is None:
            return ColdReclaimed(then, instruction.step, done=True, reason="the guest does not answer")
        # What was unplugged meanwhile took cold pages with it, where there were not enough free ones.
        cold_mib = max(min(self.cold_mib, self.spare_mib), 0.0)
        freed_mib = min(instruction.memory_mib, cold_mib, self.cold_at_most_mib)
        self.cold_mib = cold_mib - freed_mib
        done = freed_mib < instruction.memory_mib
        return ColdReclaimed(then, instruction.step, freed_mib, done, "the rest is in use" if done else "")

    def _unplug(self, instruction: Unplug) -> str:
        if not self.answers and instruction.online is not None:
            return "the guest does not answer"
        reasons = []
        if instruction.online is not None:
            self.cpus_plugged = max(self.cpus_plugged, instruction.plug_vcpus or 0)
            assert 0 in instruction.online
            assert max(instruction.online) < self.cpus_plugged <= self.cpus, "only what is plugged can be put on line"
            wanted = set(instruction.online)
            failed = (wanted ^ self.online) & self.stubborn
            self.online = (wanted - failed) | (self.online & failed)
            reasons += [f"CPU {cpu}: busy" for cpu in sorted(failed)]
            if instruction.unplug_vcpus:
                self.cpus_plugged = max(self.online) + 1
        if instruction.plugged_mib is not None:
            assert instruction.plugged_mib >= 0
            had_mib = self.plugged_mib + self._unheard_mib
            reasons.append(self._plug(instruction.plugged_mib))
            word, total_mib = instruction.until_total_mib, self.balloon_mib + self.plugged_mib
            said = word is not None and self.answers and total_mib <= word + 1e-6
            self._unheard_mib = had_mib - self.plugged_mib if said else 0.0
        return "; ".join(filter(None, reasons))

    def _plug(self, goal_mib: float) -> str:
        """As `hostagent.libvirt.plugged` does it: virtio-mem and whole DIMMs, with the same choice of DIMMs."""
        held = self.plugged_mib + sum(self.dimms_mib)
        if goal_mib < held:
            dimms = dimms_to_take(self.dimms_mib, self.plugged_mib, held - goal_mib, self.block_mib)
            # Whole blocks, rather too little than too much.
            blocks = math.floor((held - goal_mib - sum(dimms)) / self.block_mib + 1e-9)
            reason = self._bring_device(max(self.plugged_mib - blocks * self.block_mib, 0.0))
            if dimms and self.dimms_stuck:
                return "the guest holds on to its DIMMs"
            self.dimms_mib = _less(self.dimms_mib, dimms)
            self.dimms_out_mib += dimms
            return reason
        dimms = dimms_to_plug(self.dimms_out_mib, goal_mib - held)
        self.dimms_out_mib = _less(self.dimms_out_mib, dimms)
        self.dimms_mib += dimms
        rest = min(goal_mib - held - sum(dimms), self.device_mib - self.plugged_mib)
        return self._bring_device(self.plugged_mib + math.floor(rest / self.block_mib + 1e-9) * self.block_mib)

    def _bring_device(self, size_mib: float) -> str:
        blocks = (size_mib - self.device_mib) / self.block_mib
        assert abs(blocks - round(blocks)) < 1e-6, "only whole blocks can be asked for"
        lowest = max(self.plugged_mib - self.unplug_at_most_mib, min(self.unmovable_mib, self.plugged_mib))
        reached = max(size_mib, lowest)
        reached = self.device_mib - (self.device_mib - reached) // self.block_mib * self.block_mib
        self.plugged_mib = min(reached, max(self.plugged_mib, size_mib))
        return "memory is in use" if reached > size_mib else ""

    def _throttle(self, instruction: Throttle) -> str:
        if instruction.cpu_cores is not None:
            seen = len(self.online) if self.answers else self.cpus_plugged
            self.quota_per_cpu = instruction.cpu_cores / (instruction.cpus_online or seen)
            self.cap_cores = cap_of(instruction.cpu_cores, self.cpus_plugged)
        if instruction.limit_mib is not None and (reason := self._limit(instruction.limit_mib)):
            return reason
        if instruction.balloon_mib is not None:
            assert 0 < instruction.balloon_mib <= self.boot_mib
            self.balloon_target_mib = instruction.balloon_mib
            self.let_the_balloon_move()
            if self.balloon_mib > self.balloon_target_mib:
                self.balloon_target_mib = self.balloon_mib
                return "the balloon stopped half way"
        return ""

    def _limit(self, limit_mib: float) -> str:
        """As the host does it: a limit goes up and away at once, and down only as far as swap backs it."""
        now = self.limit_mib if self.limit_mib is not None else self.bound.held_mib
        if math.isinf(limit_mib) or limit_mib >= now:
            self.limit_mib = None if math.isinf(limit_mib) else limit_mib
            return ""
        assert limit_mib >= HARD_FLOOR.memory_mib, "never below the hard floor"
        if self.boot_mib + self.plugged_mib - limit_mib > self.swap_mib:
            return "swap cannot back the memory limit"
        self.limit_mib = now - (now - limit_mib) * self.limit_goes
        return "" if self.limit_goes == 1.0 else "the memory is in use"

    def let_the_balloon_move(self) -> None:
        """As far as it goes in one instruction's time."""
        move = self.balloon_target_mib - self.balloon_mib
        self.balloon_mib += max(-self.balloon_at_most_mib, min(move, self.balloon_at_most_mib))

    _release: float = 0.0
    _unheard_mib: float = 0.0


def _less(sizes: tuple[float, ...], taken: tuple[float, ...]) -> tuple[float, ...]:
    left = list(sizes)
    for size in taken:
        left.remove(size)
    return tuple(left)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One instruction, its answer, and the VM around it."""

    #: When it was instructed.
    now: float
    instruction: Instruction
    answer: Event
    before: Bound
    after: Bound
    #: What the guest truly could spare before.
    spare_mib: float
    #: The reading from which a step of memory was reckoned: the latest one that no step of it overlapped.
    known: Measured | None


def moves_memory(instruction: Instruction) -> bool:
    """Whether it moves memory in either direction."""
    match instruction:
        case Unplug():
            return instruction.plugged_mib is not None
        case Throttle():
            return instruction.balloon_mib is not None or instruction.limit_mib is not None
    return False


def run(
    machine: Cascade | Reinflation, vm: ModelVM, now: float = 0.0, at_most: int = 5000
) -> tuple[Outcome, list[Exchange]]:
    """Let the machine drive the VM to its end: what is instructed together is answered as each is due."""
    exchanges: list[Exchange] = []
    known: Measured | None = None
    under_way: list[tuple[float, float, Instruction, Measured | None]] = []
    pending = machine.start(now)
    for _ in range(at_most):
        for instruction in pending:
            if isinstance(instruction, Finish):
                assert machine.outcome is instruction.outcome
                return instruction.outcome, exchanges
            assert sum(moves_memory(one) for *_, one, _ in under_way) + moves_memory(instruction) <= 1
            under_way.append((vm.due(instruction, now), now, instruction, known))
        under_way.sort(key=lambda one: one[0])
        _, since, instruction, known_then = under_way.pop(0)
        before, spare = vm.bound, vm.spare_mib
        answer = vm.carry_out(instruction, since)
        exchanges.append(Exchange(since, instruction, answer, before, vm.bound, spare, known_then))
        if isinstance(answer, Measured) and not any(moves_memory(one) for *_, one, _ in under_way):
            known = answer
        now = answer.now
        pending = machine.handle(answer)
    raise AssertionError(f"no end after {at_most} instructions")
