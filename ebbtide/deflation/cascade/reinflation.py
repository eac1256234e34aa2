"""Reinflation of one VM as a state machine: the cascade in reverse (Sharma et al. 2019, §5, lifecycle events).

Limits of the hypervisor go up first, then the guest plugs, and the application is told last. Events and instructions
are those of `deflation.cascade.instructions`, and one is under way at a time. What the guest does not take back in time
is reported as a shortfall; the limits from outside are then those of the target, so that the guest can still take it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import (
    Event,
    Finish,
    GuestReading,
    Instruction,
    Measured,
    Outcome,
    Stopped,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.mechanisms import Mechanism, Mechanisms
from ebbtide.deflation.errors import InvalidField, ProtocolViolation
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ResourceVector


@dataclass(frozen=True, slots=True)
class TellApplication(Instruction):
    """Tell the application that there is room up to ``target``. Answer: `Told`."""

    target: ResourceVector
    bound_mib: float


@dataclass(frozen=True, slots=True)
class Told(Event):
    """The application has been told, or could not be, with the reason."""

    reason: str = ""


class Phase(StrEnum):
    """Where a reinflation stands."""

    NEW = "new"
    RAISING = "raising"
    PLUGGING = "plugging"
    SETTLING = "settling"
    TELLING = "telling"
    DONE = "done"


class Reinflation:
    """Give a VM back what it lacks up to ``target``. Feed events to `handle`, carry out what it returns.

    :param before: the bound when the operation began.
    :param target: the size to reach; components below the bound are left alone: a reinflation never shrinks a VM.
    :param boot_mib: the VM's boot memory: up to there the balloon can give back, the rest has to be plugged.
    :param cpus_present: vCPUs that the guest could put on line, if need be after they were plugged again.
    :param cpus_plugged: of these, how many are plugged now; None: all.
    :param owed: whether the application is told also where nothing is given: it may have shrunk for a deflation that
        took nothing.
    :param deadline_s: time for the whole operation, in seconds.
    :raises InvalidField: a negative or non-finite deadline.
    """

    def __init__(
        self,
        before: Bound,
        target: ResourceVector,
        boot_mib: float,
        cpus_present: int,
        deadline_s: float,
        mechanisms: Mechanisms | None = None,
        cpus_plugged: int | None = None,
        owed: bool = False,
    ) -> None:
        if not math.isfinite(deadline_s) or deadline_s < 0:
            raise InvalidField("deadline_s", f"must be finite and not negative, but is {deadline_s!r}")
        self.before = before
        self.target = target.larger(before.size)
        self.boot_mib = boot_mib
        self.cpus_present = cpus_present
        self.cpus_plugged = cpus_present if cpus_plugged is None else cpus_plugged
        self.deadline_s = deadline_s
        self.mechanisms = mechanisms or Mechanisms()
        self.owed = owed
        self.phase = Phase.NEW
        self.bound = before
        self.outcome: Outcome | None = None
        #: The boot memory that the guest may have taken back by now, whether it has or not.
        self._balloon_allowed = before.balloon_mib
        #: Whether the bound was read since something was given last.
        self._measured = True
        self._started = 0.0
        self._step = 0
        self._seconds = dict.fromkeys(Layer, 0.0)
        self._reasons: dict[Layer, list[str]] = {layer: [] for layer in Layer}
        self._entered = 0.0

    @property
    def need(self) -> ResourceVector:
        """What is still missing at the latest reading."""
        return self.target.less(self.bound.size)

    def start(self, now: float) -> list[Instruction]:
        """Begin at ``now``.

        :raises ProtocolViolation: started twice.
        """
        if self.phase is not Phase.NEW:
            raise ProtocolViolation(f"the phase is {self.phase.value}: a reinflation starts once")
        self._started = self._entered = now
        if self.need.is_zero():
            return self._tell(now) if self.owed else self._finish(now)
        # Spread over CPUs that are still off line it could be less than the VM has now.
        return self._raise_limits(Phase.RAISING, self.bound.cpus_online, now)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and say what is to be done next; answers to what was given up are dropped.

        :raises ProtocolViolation: the event does not fit the instruction it answers.
        """
        if isinstance(event, Stopped) and self.phase is not Phase.DONE:
            if self.phase is Phase.NEW:
                self._started = event.now
            self._say(Layer.HYPERVISOR, event.reason)
            return self._finish(event.now)
        if self.phase is Phase.DONE or event.step != self._step:
            return []
        match self.phase, event:
            case Phase.RAISING, Measured():
                self._read(event, Layer.HYPERVISOR)
                return self._plug(event)
            case Phase.PLUGGING, Measured():
                self._read(event, Layer.GUEST)
                # More on line means less for each.
                return self._raise_limits(Phase.SETTLING, self.bound.cpus_online, event.now)
            case Phase.SETTLING, Measured():
                self._read(event, Layer.HYPERVISOR)
                return self._tell(event.now)
            case Phase.TELLING, Told():
                self._spend(Layer.APPLICATION, event.now)
                self._say(Layer.APPLICATION, event.reason)
                return self._finish(event.now)
        raise ProtocolViolation(f"{type(event).__name__} does not answer what phase {self.phase.value} asked")

    @property
    def _cpus_wanted(self) -> int:
        wanted = math.ceil(self.target.cpu_cores - TOLERANCE)
        return max(self.bound.cpus_online, min(wanted, self.cpus_present))

    @property
    def _granularity_mib(self) -> float:
        """Of what can be plugged; which DIMMs fit is known where they are plugged."""
        if self.mechanisms.has(Mechanism.VIRTIO_MEM):
            return self.mechanisms.block_mib
        return 1.0 if self.mechanisms.has(Mechanism.DIMM) else 0.0

    def _raise_limits(self, phase: Phase, cpus: int, now: float) -> list[Instruction]:
        cpu = None
        if self.mechanisms.has(Mechanism.QUOTA) and self.target.cpu_cores > self.before.cpu_cores + TOLERANCE:
            cpu = self.target.cpu_cores
        # What the guest lacks of the target; below a limit it may hold enough already.
        lacking = max(self.target.memory_mib - self.bound.held_mib, 0.0)
        balloon = min(self.boot_mib, self.bound.balloon_mib + lacking)
        disk = self.target.disk_mib_s if self.target.disk_mib_s > self.before.disk_mib_s else None
        network = self.target.network_mib_s if self.target.network_mib_s > self.before.network_mib_s else None
        # Without its own share the memory that cannot be plugged would never come back by balloon.
        raised = balloon if balloon > self.bound.balloon_mib + TOLERANCE else None
        self._balloon_allowed = max(self._balloon_allowed, balloon)
        self.phase = phase
        self._measured = False
        limit = self._limit_wanted()
        left = self._time_left(now)
        return [Throttle(self._next_step(), left, cpu, raised, disk, network, cpus_online=cpus, limit_mib=limit)]

    def _limit_wanted(self) -> float | None:
        """The memory limit to raise before anything else is given: to the target, or away where it would limit nothing.

        Whatever is blocked, a limit can always be raised.
        """
        limit, target = self.bound.limit_mib, self.target.memory_mib
        if limit is None or self.need.memory_mib <= TOLERANCE:
            return None
        return math.inf if target >= self.bound.held_mib - TOLERANCE else target

    def _plug(self, event: Measured) -> list[Instruction]:
        cpus = self._cpus_wanted
        # A guest that is slow to take back its boot memory still may: it is not to be given twice.
        reached = max(self._balloon_allowed, self.bound.balloon_mib) + self.bound.plugged_mib
        missing = max(self.target.memory_mib - reached, 0.0)
        block = self._granularity_mib
        plugged = self.bound.plugged_mib + math.floor(missing / block + TOLERANCE) * block if block > 0 else 0.0
        wants_memory = missing >= max(block, 1.0) and block > 0
        wants_cpus = cpus > self.bound.cpus_online
        if wants_cpus and event.guest is None:
            # A map made without knowing which CPUs are on line could take off one that is in use.
            self._say(Layer.GUEST, "no fresh reading of the guest, so no CPU is put on line")
            wants_cpus = False
        if not (wants_memory or wants_cpus):
            if cpus > self.bound.cpus_online:
                return self._raise_limits(Phase.SETTLING, self.bound.cpus_online, event.now)
            return self._tell(event.now)
        self.phase = Phase.PLUGGING
        self._measured = False
        online = cpus_to_plug(event.guest, cpus) if wants_cpus and event.guest is not None else None
        return [
            Unplug(
                self._next_step(),
                self._time_left(event.now),
                online=online,
                plugged_mib=plugged if wants_memory else None,
                plug_vcpus=max(online) + 1 if online and max(online) >= self.cpus_plugged else None,
            )
        ]

    def _tell(self, now: float) -> list[Instruction]:
        if why := self.mechanisms.reason(Mechanism.APPLICATION):
            self._say(Layer.APPLICATION, why)
            return self._finish(now)
        self.phase = Phase.TELLING
        limit = self._time_left(now)
        return [TellApplication(self._next_step(), limit, target=self.target, bound_mib=self.bound.memory_mib)]

    def _read(self, event: Measured, layer: Layer) -> None:
        self._spend(layer, event.now)
        self._say(layer, event.reason)
        if event.bound is not None:
            self.bound = event.bound
            self._measured = True

    def _spend(self, layer: Layer, now: float) -> None:
        self._seconds[layer] += now - self._entered
        self._entered = now

    def _say(self, layer: Layer, reason: str) -> None:
        if reason and reason not in self._reasons[layer]:
            self._reasons[layer].append(reason)

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    def _time_left(self, now: float) -> float:
        return max(self._started + self.deadline_s - now, 1.0)

    def _finish(self, now: float) -> list[Instruction]:
        self.phase = Phase.DONE
        missing = self.need
        shortfall = ResourceVector(
            *(v if v > limit else 0.0 for v, limit in zip(missing, (0.005, 2.0, 0.5, 0.5), strict=True))
        )
        # What was given last can have brought it to its target at the most.
        self._measured = self._measured or shortfall.is_zero()
        self.outcome = Outcome(
            before=self.before,
            after=self.bound,
            target=self.target,
            ledger=self._ledger(),
            shortfall=shortfall,
            seconds=now - self._started,
            sentence=self._sentence(now, shortfall),
            measured=self._measured,
        )
        return [Finish(self._next_step(), 0.0, self.outcome)]

    def _ledger(self) -> tuple[LedgerEntry, ...]:
        """Growth of the bound by layer, in the layers' order of work; the application takes back on demand."""
        asked = self.target.less(self.before.size)
        grown = self.bound.size.less(self.before.size)
        plugged = min(max(self.bound.plugged_mib - self.before.plugged_mib, 0.0), grown.memory_mib)
        cpus = min(float(max(self.bound.cpus_online - self.before.cpus_online, 0)), grown.cpu_cores)
        guest = ResourceVector(cpu_cores=cpus, memory_mib=plugged)
        given = {Layer.HYPERVISOR: grown.less(guest), Layer.GUEST: guest, Layer.APPLICATION: ResourceVector()}
        return tuple(
            LedgerEntry(
                layer=layer,
                resource=component,
                asked=round(asked[component], 2),
                promised=round(given[layer][component], 2),
                verified=round(given[layer][component], 4),
                seconds=round(self._seconds[layer], 3),
                reason="; ".join(self._reasons[layer]),
            )
            for layer in (Layer.HYPERVISOR, Layer.GUEST, Layer.APPLICATION)
            for component in COMPONENTS
            if asked[component] > TOLERANCE
        )

    def _sentence(self, now: float, shortfall: ResourceVector) -> str:
        asked = self.target.less(self.before.size)
        if asked.is_zero():
            return "nothing to give back: the VM has its target already"
        text = f"gave back {self.bound.size.less(self.before.size)} of {asked} in {now - self._started:.1f} s"
        if shortfall.is_zero():
            return text
        reasons = [reason for layer in Layer for reason in self._reasons[layer]]
        if not self._measured:
            text = f"{text}, as far as it could be read: what was given last is not verified"
        return f"{text}; short of {shortfall}" + (f", because {'; '.join(reasons)}" if reasons else "")


def cpus_to_plug(guest: GuestReading, count: int) -> tuple[int, ...]:
    """The map of CPUs for ``count`` on line: all that are on line stay, the lowest numbers join them."""
    online = set(guest.online)
    absent = (cpu for cpu in itertools.count() if cpu not in online)
    return tuple(sorted(online | set(itertools.islice(absent, max(count - len(online), 0)))))
