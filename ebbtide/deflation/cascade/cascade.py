"""Cascade deflation of one VM as a state machine: events in, instructions out (Sharma et al. 2019, §3.2, Fig. 3).

The machine asks the application, unplugs ``min(max(application, free in guest), target)`` in the guest, and throttles
what is still missing; `deflation.cascade.reinflation` is the way back. It knows no clock: every event carries ``now``
in seconds of one monotonic clock. One instruction is under way at a time; the executor answers each with one event that
carries the instruction's ``step``, also when it failed or ran out of its time limit, so a late answer is recognised and
dropped.

Events, instructions and outcome are in `deflation.cascade.instructions`, the size of one step in
`deflation.cascade.steps`. This module does *not* cover: who gives how much (`deflation.sharing.proportional`), how an
instruction is carried out (the host agent).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Final

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    ApplicationReported,
    AskApplication,
    Event,
    Finish,
    GuestKind,
    GuestReading,
    Instruction,
    Measured,
    Mode,
    Outcome,
    PollApplication,
    ReadGuest,
    Stopped,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Mechanism, Mechanisms
from ebbtide.deflation.cascade.outcomes import beyond_rounding, deflation_outcome
from ebbtide.deflation.cascade.steps import balloon_to_keep, cpus_to_keep, memory_to_keep
from ebbtide.deflation.errors import InvalidField, ProtocolViolation
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.ledger import Layer, LayerAccount
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ZERO, ResourceVector

#: By which share of the deadline a layer must have ended; time that a layer leaves over passes to the next.
LAYER_ENDS: Final[Mapping[Layer, float]] = {Layer.APPLICATION: 0.5, Layer.GUEST: 0.8, Layer.HYPERVISOR: 1.0}
#: How often a promise of the application is looked up.
POLL_S: Final = 0.2
#: For giving back what the guest misses, in seconds, whatever the deadline.
GIVE_BACK_S: Final = 10.0


class Phase(StrEnum):
    """Where a cascade stands."""

    NEW = "new"
    ASKED = "asked"
    PROMISED = "promised"
    GUEST_READ = "guest-read"
    UNPLUGGING = "unplugging"
    RESPREADING = "respreading"
    HYPERVISOR_READ = "hypervisor-read"
    THROTTLING = "throttling"
    DONE = "done"


class Cascade:
    """The deflation of one VM. Feed events to `handle` and carry out what it returns.

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
        self.before = before
        self.target = target
        self.deadline_s = deadline_s
        self.mechanisms = mechanisms or Mechanisms()
        self.mode = mode
        self.phase = Phase.NEW
        #: The latest reading of the bound.
        self.bound = before
        #: The latest reading of the guest; None: unknown, so no memory is taken.
        self.guest: GuestReading | None = None
        #: What the application says it has relinquished.
        self.relinquished = ZERO
        self.outcome: Outcome | None = None
        self._accounts = {layer: LayerAccount() for layer in Layer}
        self._started = 0.0
        self._step = 0
        self._stopped = ""
        #: The instruction that takes something; the reading that answers it tells what came of it.
        self._taking: Unplug | Throttle | None = None
        #: What was tried without getting all that was asked: it is not asked again.
        self._cpus_refused = False
        self._memory_refused = False
        self._balloon_stalled = False
        self._limit_tried = False
        #: The balloon before its latest step, MiB, for giving that back; None: it made none, or gave it back.
        self._balloon_before: float | None = None
        self._given_back = False
        #: Whether the latest attempt to read the bound failed: then no step can be reckoned from it.
        self._blind = False
        #: Calls that failed, each once.
        self._errors: dict[str, None] = {}

    @property
    def need(self) -> ResourceVector:
        """What is still missing at the latest reading."""
        return self.bound.size.less(self.target)

    @property
    def _held_beyond_target(self) -> float:
        """What unplugging and ballooning would have to take: an earlier limit makes the need less, but not this."""
        return max(self.bound.held_mib - self.target.memory_mib, 0.0)

    def start(self, now: float) -> list[Instruction]:
        """Begin at ``now``.

        :raises ProtocolViolation: started twice.
        """
        if self.phase is not Phase.NEW:
            raise ProtocolViolation(f"the phase is {self.phase.value}: a cascade starts once")
        self._started = now
        # A fraction of a page or of a quota's microsecond is no reason to have an application drop its cache.
        if beyond_rounding(self.need).is_zero():
            return self._finish(now)
        return self._enter_application(now)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and say what is to be done next.

        Answers to instructions that have been given up are dropped.

        :raises ProtocolViolation: the event does not fit the instruction it answers.
        """
        if isinstance(event, Stopped):
            return self._stop(event)
        if self.phase is Phase.DONE or event.step != self._step:
            return []
        match self.phase, event:
            case Phase.ASKED, ApplicationAnswered():
                return self._on_answer(event)
            case Phase.PROMISED, ApplicationReported():
                return self._on_report(event)
            case Phase.GUEST_READ, Measured():
                self._take_reading(event, Layer.GUEST)
                return self._continue_guest(event.now)
            case Phase.UNPLUGGING, Measured():
                self._take_reading(event, Layer.GUEST)
                return self._respread(event.now) or self._continue_guest(event.now)
            case Phase.RESPREADING, Measured():
                self._take_reading(event, Layer.HYPERVISOR)
                return self._continue_guest(event.now)
            case Phase.HYPERVISOR_READ | Phase.THROTTLING, Measured():
                self._take_reading(event, Layer.HYPERVISOR)
                return self._continue_hypervisor(event.now, first=self.phase is Phase.HYPERVISOR_READ)
        raise ProtocolViolation(f"{type(event).__name__} does not answer what phase {self.phase.value} asked")

    # --- application ---------------------------------------------------------------------------------------------

    def _enter_application(self, now: float) -> list[Instruction]:
        account = self._open(Layer.APPLICATION, now)
        if why := self.mechanisms.why_not(Layer.APPLICATION):
            account.say(why)
            return self._enter_guest(now)
        left = self._time_left(Layer.APPLICATION, now)
        if left <= 0:
            account.say("no time: the deadline leaves this layer none")
            return self._enter_guest(now)
        self.phase = Phase.ASKED
        return [
            AskApplication(
                self._next_step(),
                left,
                target=self.target,
                components=tuple(name for name in COMPONENTS if self.need[name] > TOLERANCE),
                bound_mib=self.bound.memory_mib,
                deadline_s=left,
                mode=self.mode,
            )
        ]

    def _on_answer(self, event: ApplicationAnswered) -> list[Instruction]:
        account = self._accounts[Layer.APPLICATION]
        account.promised = event.promised.smaller(account.asked)
        account.say(event.reason)
        if account.promised.is_zero():
            return self._enter_guest(event.now)
        return self._poll(event.now)

    def _on_report(self, event: ApplicationReported) -> list[Instruction]:
        self.relinquished = event.relinquished
        if event.done:
            self._accounts[Layer.APPLICATION].say(event.reason)
            return self._enter_guest(event.now)
        return self._poll(event.now)

    def _poll(self, now: float) -> list[Instruction]:
        left = self._time_left(Layer.APPLICATION, now)
        if left <= POLL_S:
            self._accounts[Layer.APPLICATION].say("promised, but not released within its share of the deadline")
            return self._enter_guest(now)
        self.phase = Phase.PROMISED
        return [PollApplication(self._next_step(), left, delay_s=POLL_S)]

    # --- guest ---------------------------------------------------------------------------------------------------

    def _enter_guest(self, now: float) -> list[Instruction]:
        self._close(Layer.APPLICATION, now)
        account = self._open(Layer.GUEST, now)
        if why := self.mechanisms.why_not(Layer.GUEST):
            account.say(why)
            return self._enter_hypervisor(now)
        left = self._time_left(Layer.GUEST, now)
        if left <= 0:
            account.say("no time: the deadline leaves this layer none")
            return self._enter_hypervisor(now)
        self.phase = Phase.GUEST_READ
        return [ReadGuest(self._next_step(), left, cpus=True)]

    def _respread(self, now: float) -> list[Instruction]:
        """A quota from an earlier deflation counts for each CPU on line, so that with fewer of them the VM has less
        than its target: spread the target over those that are left, before memory takes its time."""
        taken_off = isinstance(self._taking, Unplug) and self._taking.online is not None
        wanted = min(self.target.cpu_cores, float(self.bound.cpus_online))
        if not (taken_off and self.mechanisms.has(Mechanism.QUOTA) and self.bound.cpu_cores < wanted - TOLERANCE):
            return []
        self.phase = Phase.RESPREADING
        limit = max(self._time_left(Layer.GUEST, now), 1.0)
        return [Throttle(self._next_step(), limit, self.target.cpu_cores, None)]

    def _continue_guest(self, now: float) -> list[Instruction]:
        account = self._accounts[Layer.GUEST]
        if self.guest is None:
            account.say("no fresh reading of the guest, so nothing is unplugged")
            return self._enter_hypervisor(now)
        if self._blind:
            account.say("the size of the VM could not be read, so nothing is unplugged")
            return self._enter_hypervisor(now)
        left = self._time_left(Layer.GUEST, now)
        if left <= 0:
            account.say("stopped at its share of the deadline")
            return self._enter_hypervisor(now)
        online = plugged = None
        if not self._cpus_refused and self._usable(Mechanism.CPU_OFFLINE, self.need.cpu_cores):
            online = cpus_to_keep(self.bound, self.guest, self.target.cpu_cores)
        if not self._memory_refused:
            plugged = self._plugged_to_keep(self.guest)
        if online is None and plugged is None:
            return self._enter_hypervisor(now)
        self._promise(Layer.GUEST, online, plugged)
        self.phase = Phase.UNPLUGGING
        eject = online is not None and self.mechanisms.has(Mechanism.CPU_UNPLUG)
        self._taking = Unplug(self._next_step(), left, online, plugged, unplug_vcpus=eject)
        return [self._taking]

    def _plugged_to_keep(self, guest: GuestReading) -> float | None:
        """The next step of plugged memory, by virtio-mem or by a whole DIMM."""
        need = self.need.memory_mib
        dimms = bool(self.bound.dimms_mib) and self.mechanisms.has(Mechanism.DIMM)
        # Where there are DIMMs to take, a missing virtio-mem device is nothing to tell of.
        device = self.mechanisms.has(Mechanism.VIRTIO_MEM) if dimms else self._usable(Mechanism.VIRTIO_MEM, need)
        if need <= TOLERANCE or not (device or dimms):
            return None
        block = self.mechanisms.block_mib if device else 0.0
        return memory_to_keep(self.bound, guest, self._held_beyond_target, block, dimms)

    def _promise(self, layer: Layer, online: tuple[int, ...] | None, plugged_mib: float | None) -> None:
        """The guest's promise is what its own readings let us unplug."""
        account = self._accounts[layer]
        cpu = max(self.bound.cpu_cores - len(online), 0.0) if online is not None else 0.0
        memory = self.bound.plugged_mib - plugged_mib if plugged_mib is not None else 0.0
        account.promised = (account.promised + ResourceVector(cpu_cores=cpu, memory_mib=memory)).smaller(account.asked)

    # --- hypervisor ----------------------------------------------------------------------------------------------

    def _enter_hypervisor(self, now: float) -> list[Instruction]:
        self._close(Layer.GUEST, now)
        self._open(Layer.HYPERVISOR, now)
        self.phase = Phase.HYPERVISOR_READ
        return [ReadGuest(self._next_step(), max(self._time_left(Layer.HYPERVISOR, now), 1.0))]

    def _continue_hypervisor(self, now: float, first: bool) -> list[Instruction]:
        """Quota and bandwidth at once and always, since they also enforce what the guest only promised; then balloon
        steps for as long as they move anything; at last, once, a limit on what is still missing."""
        account = self._accounts[Layer.HYPERVISOR]
        if self._balloon_before is not None and self.guest is not None and self.guest.missed:
            return self._give_back(self._balloon_before, self.guest.missed)
        balloon = limit = None
        if self._memory_may_be_taken(now):
            balloon = self._balloon_step()
            limit = self._limit_step() if balloon is None else None
        cpu = None
        if first and self.mechanisms.has(Mechanism.QUOTA) and self.before.cpu_cores > self.target.cpu_cores + TOLERANCE:
            cpu = self.target.cpu_cores
        elif first and self.need.cpu_cores > TOLERANCE and not self.mechanisms.has(Mechanism.QUOTA):
            account.say(self.mechanisms.reason(Mechanism.QUOTA))
        disk = network = None
        if first and self._usable(Mechanism.DISK, self.need.disk_mib_s):
            disk = self.target.disk_mib_s
        if first and self._usable(Mechanism.NETWORK, self.need.network_mib_s):
            network = self.target.network_mib_s
        if (cpu, balloon, disk, network, limit) == (None, None, None, None, None):
            return self._finish(now)
        memory = self.bound.balloon_mib - balloon if balloon is not None else 0.0
        promised = ResourceVector(
            cpu_cores=self.need.cpu_cores if cpu is not None else 0.0,
            memory_mib=memory if limit is None else self.need.memory_mib,
            disk_mib_s=self.need.disk_mib_s if disk is not None else 0.0,
            network_mib_s=self.need.network_mib_s if network is not None else 0.0,
        )
        account.promised = (account.promised + promised).smaller(account.asked)
        self.phase = Phase.THROTTLING
        limit_s = max(self._time_left(Layer.HYPERVISOR, now), 1.0)
        self._taking = Throttle(self._next_step(), limit_s, cpu, balloon, disk, network, limit_mib=limit)
        self._balloon_before = self.bound.balloon_mib if balloon is not None else None
        return [self._taking]

    def _give_back(self, balloon_mib: float, why: str) -> list[Instruction]:
        """Undo the latest balloon step. Until it is read what the guest took of that, it counts as all."""
        self._accounts[Layer.HYPERVISOR].say(f"{why}; the last {balloon_mib - self.bound.balloon_mib:.0f} MiB go back")
        self.bound = replace(self.bound, balloon_mib=balloon_mib)
        self._balloon_before, self._taking, self._given_back = None, None, True
        self.phase = Phase.THROTTLING
        return [Throttle(self._next_step(), GIVE_BACK_S, None, balloon_mib)]

    def _usable(self, mechanism: Mechanism, need: float) -> bool:
        """Whether something is needed that this can give; says why if it could, but is blocked."""
        if need <= TOLERANCE:
            return False
        if self.mechanisms.has(mechanism):
            return True
        self._accounts[LAYER_OF[mechanism]].say(self.mechanisms.reason(mechanism))
        return False

    def _memory_may_be_taken(self, now: float) -> bool:
        """Whether memory is missing, and all that is known lets it be taken; says why not."""
        if self.need.memory_mib < 1.0:
            return False
        if self._given_back:
            return False
        why = ""
        if self.guest is None or self.guest.silent:
            why = "no fresh reading of the guest, so no memory is taken"
        elif self._blind:
            why = "the size of the VM could not be read, so no memory is taken"
        elif self.guest.missed:
            why = self.guest.missed
        elif self._time_left(Layer.HYPERVISOR, now) <= 0:
            why = "stopped at the deadline"
        usable = (Mechanism.BALLOON, Mechanism.MEMORY_LIMIT)
        if not any(self.mechanisms.has(mechanism) for mechanism in usable):
            why = "; ".join(dict.fromkeys(self.mechanisms.reason(mechanism) for mechanism in usable))
        self._accounts[Layer.HYPERVISOR].say(why)
        return not why

    def _balloon_step(self) -> float | None:
        """The next balloon size, or None with the reason why there is none."""
        account = self._accounts[Layer.HYPERVISOR]
        if not self.mechanisms.has(Mechanism.BALLOON):
            account.say(self.mechanisms.reason(Mechanism.BALLOON))
        elif self._balloon_stalled:
            account.say("the balloon made no further progress")
        elif self.guest is not None:
            if self.guest.kind is not GuestKind.AGENT:
                account.say(f"the guest's kind is {self.guest.kind.value}: by its balloon statistics, in small steps")
            if (balloon := balloon_to_keep(self.bound, self.guest, self._held_beyond_target)) is not None:
                return balloon
            account.say("the guest has no more memory to spare above its floor")
        return None

    def _limit_step(self) -> float | None:
        """The limit to set from outside on what neither guest nor balloon gave, or None; it is tried once."""
        if self._limit_tried or not self._usable(Mechanism.MEMORY_LIMIT, self.need.memory_mib):
            return None
        limit = max(self.target.memory_mib, HARD_FLOOR.memory_mib)
        if limit > self.bound.memory_mib - 1.0:
            return None
        self._limit_tried = True
        return limit

    # --- all layers ----------------------------------------------------------------------------------------------

    def _take_reading(self, event: Measured, layer: Layer) -> None:
        self._accounts[layer].say(event.reason)
        self.guest = event.guest
        self._blind = event.bound is None
        if event.error:
            self._errors[event.error] = None
        if event.bound is not None:
            if self._taking is not None and self._taking.step == event.step:
                self._judge(self._taking, event.bound, event.reason)
            self.bound = event.bound

    def _judge(self, taking: Unplug | Throttle, bound: Bound, reason: str) -> None:
        """See by a reading what did not give all that it was asked for.

        :param reason: why, as far as the guest has said.
        """
        if isinstance(taking, Throttle):
            if taking.balloon_mib is not None:
                self._balloon_stalled = self.bound.balloon_mib - bound.balloon_mib < 1.0
            return
        refused = taking.online is not None and self.guest is not None and len(self.guest.online) > len(taking.online)
        self._cpus_refused = self._cpus_refused or refused
        if refused and not reason and self.guest is not None and taking.online is not None:
            kept = ", ".join(str(cpu) for cpu in sorted(set(self.guest.online) - set(taking.online)))
            self._accounts[Layer.GUEST].say(f"CPU {kept} is on line after it was to go off: the quota takes over")
        # Together with CPUs that failed, memory may not have been tried at all: once more, on its own.
        if taking.plugged_mib is not None and bound.plugged_mib > taking.plugged_mib + TOLERANCE and not refused:
            self._memory_refused = True
            self._accounts[Layer.GUEST].say("the guest gave up less memory than it was asked for")

    def _open(self, layer: Layer, now: float) -> LayerAccount:
        account = self._accounts[layer]
        account.asked = self.need
        account.started = now
        return account

    def _close(self, layer: Layer, now: float) -> None:
        self._accounts[layer].ended = now

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    def _time_left(self, layer: Layer, now: float) -> float:
        return self._started + self.deadline_s * LAYER_ENDS[layer] - now

    def _stop(self, event: Stopped) -> list[Instruction]:
        """Nothing more is taken. What was reached is what the executor commits and enforces by quota."""
        if self.phase is Phase.DONE:
            return []
        self._stopped = event.reason
        if self.phase is Phase.NEW:
            self._started = event.now
        for layer, account in self._accounts.items():
            if account.started is not None and account.ended is None:
                account.say(event.reason)
                self._close(layer, event.now)
        return self._finish(event.now)

    def _finish(self, now: float) -> list[Instruction]:
        if self._accounts[Layer.HYPERVISOR].started is not None:
            self._close(Layer.HYPERVISOR, now)
        self.phase = Phase.DONE
        step = self._next_step()
        self.outcome = deflation_outcome(
            self.before,
            self.bound,
            self.target,
            self._accounts,
            self.relinquished,
            seconds=now - self._started,
            stopped=self._stopped,
            errors=tuple(self._errors),
        )
        return [Finish(step, 0.0, self.outcome)]
