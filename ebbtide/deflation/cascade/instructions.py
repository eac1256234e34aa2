"""Instructions of deflation and reinflation to their executor, the events that answer them, and the outcome.

Several instructions may be under way, but no two that move the same resource. The executor answers each with one event
that carries the instruction's ``step``, also when it failed or ran out of its time limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.ledger import LedgerEntry
from ebbtide.deflation.resources import ZERO, ResourceVector


class Mode(StrEnum):
    """Whether the application may say no."""

    ASK = "ask"
    FORCE = "force"


class GuestKind(StrEnum):
    """What of a guest answers: our agent, qemu-guest-agent only, or nothing but its kernel's balloon driver."""

    AGENT = "agent"
    QEMU_GUEST_AGENT = "qemu-guest-agent"
    BALLOON = "balloon"


@dataclass(frozen=True, slots=True)
class GuestReading:
    """What the guest says of itself. Untrusted: it can only lower what is taken."""

    #: CPUs on line, by number.
    online: tuple[int, ...]
    #: CPUs that may be taken, in the order in which to take them; never CPU 0, none with pinned tasks.
    unpluggable: tuple[int, ...]
    #: MemAvailable less the reserve, MiB.
    spare_mib: float
    #: Who says so.
    kind: GuestKind = GuestKind.AGENT
    #: Why what was taken last is to be given back; empty: it is not missed.
    missed: str = ""
    #: Whether it is only known what CPUs it has: unknown is not zero, so no memory is taken.
    silent: bool = False
    #: MemFree less the reserve, MiB: what can be unplugged without moving or dropping a page; None: it does not say.
    free_mib: float | None = None
    #: Why it reclaims no cold pages, in words; empty: it does.
    cold_blocked: str = ""
    #: MemTotal, MiB, where the host hears of plugged memory later than the guest knows of it; None: it does not.
    total_mib: float | None = None


# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something to carry out. ``step`` comes back in the answering event; ``limit_s`` is the time it may take."""

    step: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class AskApplication(Instruction):
    """Ask the application to fit a VM of size ``target``. Answer: `ApplicationAnswered`."""

    target: ResourceVector
    #: What of the target is asked for; a cache is not to shrink because CPUs are missing.
    components: tuple[str, ...]
    #: What the host lets the VM hold now, MiB: the guest reckons the application's own target from it.
    bound_mib: float
    #: When the application must have released, in seconds from now.
    deadline_s: float
    mode: Mode


@dataclass(frozen=True, slots=True)
class PollApplication(Instruction):
    """Look up what became of the promise, when ``until_mib`` are released or it is over, or after a while; answered no
    sooner than after ``delay_s``. Answer: `ApplicationReported`.
    """

    delay_s: float
    until_mib: float


@dataclass(frozen=True, slots=True)
class ReclaimCold(Instruction):
    """Have the guest make so much of its coldest memory free, at its own pace. Answer: `ColdReclaimed`.

    When it is answered, or called off, the guest reclaims no more.
    """

    memory_mib: float


@dataclass(frozen=True, slots=True)
class ReadGuest(Instruction):
    """Take a fresh reading of bound and guest. Answer: `Measured`."""

    #: Whether to say which CPUs could be taken: that costs the guest a look at all its tasks.
    cpus: bool = False


@dataclass(frozen=True, slots=True)
class Unplug(Instruction):
    """Bring the guest to these CPUs and this much plugged memory; None leaves as is. Answer: `Measured`.

    When it is answered nothing of it is under way any more: what was not reached is no longer asked of the guest, or it
    would fall below the target when the guest gives it later.
    """

    online: tuple[int, ...] | None
    plugged_mib: float | None
    #: vCPUs to have plugged before the CPUs are set; None leaves as is.
    plug_vcpus: int | None = None
    #: Whether the last vCPUs are to be unplugged once they are off line.
    unplug_vcpus: bool = False
    #: The guest's MemTotal, MiB, at which it has given all of it by its own word: then it may be answered before the
    #: host has heard of it, with what the guest has been asked for left standing. None: it is waited for.
    until_total_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Throttle(Instruction):
    """Limit from outside: CPU by quota over the CPUs on line, boot memory by balloon, all memory by a limit that swap
    backs, disk and network by bandwidth. Answer: `Measured`.

    When it is answered nothing that takes is under way any more, as with `Unplug`; what is given may be.
    """

    cpu_cores: float | None
    balloon_mib: float | None
    disk_mib_s: float | None = None
    network_mib_s: float | None = None
    #: Over how many CPUs to spread the quota; None: those on line when it is set.
    cpus_online: int | None = None
    #: Limit on the guest's whole memory, MiB; None leaves as is, infinity lifts it.
    limit_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """The operation has ended; no answer is expected."""

    outcome: Outcome


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at ``now`` (seconds) in answer to ``step``."""

    now: float
    step: int


@dataclass(frozen=True, slots=True)
class ApplicationAnswered(Event):
    """Promise or refusal. A refusal, a missing hook and an error are told apart only by their reason."""

    promised: ResourceVector = ZERO
    expected_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ApplicationReported(Event):
    """What the application has relinquished, as measured in the application."""

    relinquished: ResourceVector = ZERO
    done: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ColdReclaimed(Event):
    """What became free, as the guest measured it. Untrusted: it only says when the next step is worth a reading."""

    freed_mib: float = 0.0
    #: Whether there is no more to be had now.
    done: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Measured(Event):
    """A reading after an instruction; bound or guest are None where they could not be read."""

    bound: Bound | None
    guest: GuestReading | None = None
    #: Why the instruction did less than it should, in words; empty if it did not.
    reason: str = ""
    #: The call of the hypervisor that failed, which says nothing of what the VM could give; empty if none did.
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """Stop at what has been reached: the guest is under pressure, or the operation was called off."""

    reason: str = ""


# --- the outcome -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation did to one VM, in figures and in one sentence."""

    before: Bound
    after: Bound
    target: ResourceVector
    ledger: tuple[LedgerEntry, ...]
    #: What the target still asks for beyond ``after``.
    shortfall: ResourceVector
    seconds: float
    sentence: str
    #: Whether ``after`` was read since something was given last. If not, the VM may hold as much as its target.
    measured: bool = True
    #: Calls of the hypervisor that failed, where something is missing.
    errors: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        return self.shortfall.is_zero()
