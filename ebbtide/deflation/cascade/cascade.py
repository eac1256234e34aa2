"""Cascade deflation of one VM as a state machine: events in, instructions out (Sharma et al. 2019, §3.2, Fig. 3).

The machine asks the application, unplugs ``min(max(application, free in guest), target)`` in the guest, and throttles
what is still missing; `deflation.cascade.reinflation` is the way back. What the guest can do without, its cold pages,
becomes free ahead of unplugging (`deflation.cascade.cold_lane`). The layers overlap: once the application has
answered, what it has released so far is unplugged while it goes on releasing, and CPU and memory go their own ways
(`deflation.cascade.cpu_lane`, `deflation.cascade.memory_lane`). One instruction for each is under way at most, and one
for the application. The executor answers each with one event that carries the instruction's ``step``, also when it
failed or ran out of its time limit; a late answer is recognised and dropped. The machine knows no clock: every event
carries ``now`` in seconds of one monotonic clock.

Events, instructions and outcome are in `deflation.cascade.instructions`, the size of one step in
`deflation.cascade.steps`; why overlapping steps are safe is told in docs/internals/cascade.md. This module does *not*
cover: who gives how much (`deflation.sharing.proportional`), how an instruction is carried out (the host agent).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cold_lane import ColdLane
from ebbtide.deflation.cascade.cpu_lane import CpuLane
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
    Mode,
    Outcome,
    PollApplication,
    ReadGuest,
    ReclaimCold,
    Stopped,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.lanes import Job, Lane
from ebbtide.deflation.cascade.mechanisms import Mechanisms
from ebbtide.deflation.cascade.memory_lane import MemoryLane, Release
from ebbtide.deflation.cascade.outcomes import beyond_rounding, deflation_outcome
from ebbtide.deflation.errors import InvalidField, ProtocolViolation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ZERO, ResourceVector

#: How often a promise of the application is looked up at the most.
POLL_S: Final = 0.2


class Phase(StrEnum):
    """What a cascade waits for; while instructions overlap it is in several phases."""

    NEW = "new"
    ASKED = "asked"
    PROMISED = "promised"
    #: The guest makes cold pages free.
    CLEARING = "clearing"
    READING = "reading"
    OFFLINING = "offlining"
    UNPLUGGING = "unplugging"
    #: Quota and bandwidth.
    LIMITING = "limiting"
    #: Balloon, or the limit that swap backs.
    BALLOONING = "ballooning"
    DONE = "done"


@dataclass(slots=True)
class UnderWay:
    """An instruction that has not been answered."""

    instruction: Instruction
    #: The lanes that wait for it.
    lanes: frozenset[Lane]
    #: The lanes whose part of its reading counts: these, and those that have had nothing under way since it began.
    counts_for: set[Lane]

    @property
    def phase(self) -> Phase:
        match self.instruction:
            case AskApplication():
                return Phase.ASKED
            case PollApplication():
                return Phase.PROMISED
            case ReclaimCold():
                return Phase.CLEARING
            case ReadGuest():
                return Phase.READING
            case Unplug():
                return Phase.OFFLINING if Lane.CPU in self.lanes else Phase.UNPLUGGING
        return Phase.BALLOONING if Lane.MEMORY in self.lanes else Phase.LIMITING


class Cascade:
    """The deflation of one VM. Feed events to `handle` and carry out what it returns, all of it at once.

    Do not change attributes from outside; read them freely.

    :param before: the bound when the operation began.
    :param target: the size to reach. Components above the bound are left alone: a deflation never grows a VM.
    :param deadline_s: time for the whole cascade, in seconds; 0 means that only what needs no waiting is done.
    :raises InvalidField: a negative or non-finite deadline.
    """

    def __init__(
        self,
        before: Bound,
        target: ResourceVector,
        deadline_s: float,
        mechanisms: Mechanisms | None = None,
        mode: Mode = Mode.ASK,
    ) -> None:
        if not math.isfinite(deadline_s) or deadline_s < 0:
            raise InvalidField("deadline_s", f"must be finite and not negative, but is {deadline_s!r}")
        self.target = target
        self.mode = mode
        #: What the application says it has relinquished.
        self.relinquished = ZERO
        self.outcome: Outcome | None = None
        self._job = Job(before, target, deadline_s, mechanisms or Mechanisms(), before)
        self._cold = ColdLane(self._job)
        self._cpu = CpuLane(self._job)
        self._memory = MemoryLane(self._job)
        self._under_way: dict[int, UnderWay] = {}
        #: Whether it has begun, and whether the application has nothing more to say.
        self._started = self._released = False
        self._step = 0
        #: Calls that failed, each once.
        self._errors: dict[str, None] = {}

    @property
    def bound(self) -> Bound:
        """What is known of the bound."""
        return self._job.bound

    @property
    def guest(self) -> GuestReading | None:
        """The latest reading of the guest for memory; None: unknown, so no memory is taken."""
        return self._memory.guest

    @property
    def need(self) -> ResourceVector:
        """What is still missing at the latest reading."""
        return self._job.need

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is waited for, the longest first."""
        if self.outcome is not None:
            return (Phase.DONE,)
        return tuple(one.phase for one in self._under_way.values()) or (Phase.NEW,)

    @property
    def phase(self) -> Phase:
        """What has been waited for the longest."""
        return self.phases[0]

    def start(self, now: float) -> list[Instruction]:
        """Begin at ``now``.

        :raises ProtocolViolation: started twice.
        """
        if self._started or self.outcome is not None:
            raise ProtocolViolation(f"the phase is {self.phase.value}: a cascade starts once")
        self._started, self._job.started = True, now
        # A fraction of a page or of a quota's microsecond is no reason to have an application drop its cache.
        if beyond_rounding(self.need).is_zero():
            return self._finish(now)
        asking = self._ask(now)
        first = [(Lane.CPU, limits)] if (limits := self._cpu.at_once(now)) is not None else []
        return asking + self._issue(first) + self._advance(now)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and say what is to be done next.

        Answers to instructions that have been given up are dropped.

        :raises ProtocolViolation: the event does not fit the instruction it answers.
        """
        if isinstance(event, Stopped):
            return self._stop(event)
        answered = self._under_way.get(event.step)
        if self.outcome is not None or answered is None:
            return []
        match answered.instruction, event:
            case AskApplication(), ApplicationAnswered():
                del self._under_way[event.step]
                return self._on_answer(event) + self._advance(event.now)
            case PollApplication(), ApplicationReported():
                del self._under_way[event.step]
                return self._on_report(event) + self._advance(event.now)
            case ReclaimCold(), ColdReclaimed():
                del self._under_way[event.step]
                self._cold.see(event)
                return self._advance(event.now)
            case ReadGuest() | Unplug() | Throttle(), Measured():
                del self._under_way[event.step]
                self._on_reading(answered, event)
                return self._advance(event.now)
        raise ProtocolViolation(f"{type(event).__name__} does not answer what phase {answered.phase.value} asked")

    # --- application ---------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> list[Instruction]:
        account = self._job.accounts[Layer.APPLICATION]
        account.enter(COMPONENTS, self.need, now)
        left = self._job.time_left(Layer.APPLICATION, now)
        why = self._job.mechanisms.why_not(Layer.APPLICATION)
        if why or left <= 0:
            return self._done_with_the_application(now, why or "no time: the deadline leaves this layer none")
        asked = AskApplication(
            0,
            left,
            target=self.target,
            components=tuple(name for name in COMPONENTS if self.need[name] > TOLERANCE),
            bound_mib=self.bound.memory_mib,
            deadline_s=left,
            mode=self.mode,
        )
        return self._issue([(Lane.APPLICATION, asked)])

    def _on_answer(self, event: ApplicationAnswered) -> list[Instruction]:
        account = self._job.accounts[Layer.APPLICATION]
        account.promise(event.promised)
        account.say(event.reason)
        if account.promised.is_zero():
            return self._done_with_the_application(event.now)
        return self._poll(event.now)

    def _on_report(self, event: ApplicationReported) -> list[Instruction]:
        self.relinquished = event.relinquished
        if event.done:
            return self._done_with_the_application(event.now, event.reason)
        return self._poll(event.now)

    def _poll(self, now: float) -> list[Instruction]:
        left = self._job.time_left(Layer.APPLICATION, now)
        if left <= POLL_S:
            why = "promised, but not released within its share of the deadline"
            return self._done_with_the_application(now, why)
        until_mib = self.relinquished.memory_mib + self._memory.worth_mib
        return self._issue([(Lane.APPLICATION, PollApplication(0, left, delay_s=POLL_S, until_mib=until_mib))])

    def _done_with_the_application(self, now: float, why: str = "") -> list[Instruction]:
        account = self._job.accounts[Layer.APPLICATION]
        account.say(why)
        account.leave(COMPONENTS, now)
        self._released = True
        return []

    # --- guest and hypervisor --------------------------------------------------------------------------------------

    def _on_reading(self, answered: UnderWay, event: Measured) -> None:
        lanes = [lane for lane in (self._cpu, self._memory) if lane.lane in answered.lanes]
        for lane in lanes:
            lane.hear(event.reason)
            if lane is self._memory:
                self._memory.judge(answered.instruction, event.bound, event.guest)
        if event.bound is not None:
            self._job.read(event.bound, answered.counts_for)
        for lane in lanes:
            lane.see(event)
            if event.bound is not None and lane is self._cpu:
                self._cpu.judge(answered.instruction, event.reason)
        if event.error:
            self._errors[event.error] = None

    def _advance(self, now: float) -> list[Instruction]:
        """All that can be begun now; the end, when nothing is under way and nothing is left to do."""
        busy = {lane for one in self._under_way.values() for lane in one.lanes}
        promised = self._job.accounts[Layer.APPLICATION].promised
        if any(one.phase is Phase.ASKED for one in self._under_way.values()):
            return []
        begun: list[tuple[Lane, Instruction]] = []
        release = None if self._released else Release(promised.memory_mib, self.relinquished.memory_mib)
        cold = self._cold.step(now, self._memory) if release is None and Lane.COLD not in busy else None
        issued = self._issue([(Lane.COLD, cold)]) if cold is not None else []
        if Lane.MEMORY not in busy and (next_ := self._memory.step(now, release, self._cold.parts)) is not None:
            begun.append((Lane.MEMORY, next_))
        # An application that is to do with fewer CPUs is not to find them gone before.
        if Lane.CPU not in busy and (self._released or promised.cpu_cores <= TOLERANCE):
            next_ = self._cpu.step(now, memory_unplugs=self._memory.layer is Layer.GUEST)
            if next_ is not None:
                begun.append((Lane.CPU, next_))
        self._cpu.just_read = self._memory.just_read = False
        if not (begun or self._under_way) and self._released and self._cpu.done and self._memory.done:
            return self._finish(now)
        return issued + self._issue(begun)

    def _issue(self, begun: list[tuple[Lane, Instruction]]) -> list[Instruction]:
        """Number what is begun. Two readings are one, and so are two limits from outside: each costs a reading."""
        issued: list[Instruction] = []
        for lanes, instruction in _joined(begun):
            busy = {lane for one in self._under_way.values() for lane in one.lanes}
            for other in self._under_way.values():
                other.counts_for -= lanes
            self._step += 1
            numbered = replace(instruction, step=self._step)
            self._under_way[self._step] = UnderWay(numbered, lanes, (set(Lane) - busy) | lanes)
            issued.append(numbered)
        return issued

    # --- the end -----------------------------------------------------------------------------------------------------

    def _stop(self, event: Stopped) -> list[Instruction]:
        """Nothing more is taken. What was reached is what the executor commits and enforces by quota."""
        if self.outcome is not None:
            return []
        if not self._started:
            self._job.started = event.now
        for account in self._job.accounts.values():
            if account.is_open:
                account.say(event.reason)
        return self._finish(event.now, event.reason)

    def _finish(self, now: float, stopped: str = "") -> list[Instruction]:
        job = self._job
        self._under_way.clear()
        for account in job.accounts.values():
            account.leave(COMPONENTS, now)
        self._step += 1
        self.outcome = deflation_outcome(
            job.before,
            job.bound,
            self.target,
            job.accounts,
            self.relinquished,
            self._cold.freed_mib,
            seconds=now - job.started,
            stopped=stopped,
            errors=tuple(self._errors),
        )
        return [Finish(self._step, 0.0, self.outcome)]


def _joined(begun: Iterable[tuple[Lane, Instruction]]) -> list[tuple[frozenset[Lane], Instruction]]:
    """What the lanes begin at one moment, with what can be done in one instruction made one."""
    parts = [(frozenset({lane}), instruction) for lane, instruction in begun]
    match parts:
        case [(memory, ReadGuest() as one), (cpu, ReadGuest() as other)]:
            return [(memory | cpu, ReadGuest(0, max(one.limit_s, other.limit_s), one.cpus or other.cpus))]
        case [(memory, Throttle() as one), (cpu, Throttle() as other)]:
            balloon, limit, limit_s = one.balloon_mib, one.limit_mib, max(one.limit_s, other.limit_s)
            return [(memory | cpu, replace(other, balloon_mib=balloon, limit_mib=limit, limit_s=limit_s))]
    return parts
