"""Memory of a guest that runs nothing of ours, by what its balloon driver says of it and nothing else.

The statistics come once in `STATS_PERIOD_S`, without a word on the guest's applications, and are believed only while
they are fresh: the reserve is larger and the steps are smaller than with our agent, a step counts as borne only by a
statement that is later than the step, and one after which the guest misses its pages is given back
(docs/internals/contracts.md, safety of the guest). Statistics that do not come any more are no reason to take anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.cascade.instructions import GuestKind, GuestReading

#: How often the balloon driver is asked, in seconds: set by us, since without it libvirt never asks.
STATS_PERIOD_S: Final = 1
#: Statements older than two periods say nothing of now, in seconds; libvirt gives their time in whole seconds.
FRESH_S: Final = 2.0 * STATS_PERIOD_S + 1.0
#: What is left to the guest beyond what it uses: twice what is left to one with our agent, MiB and share of its memory.
RESERVE_MIB: Final = 96.0
RESERVE_SHARE: Final = 0.1
#: Of its reserve, the part below which a guest is short of memory.
SHORT_SHARE: Final = 0.5
#: So many pages a second that waited for a disk, and so many times as many as before the step, mean that what was
#: taken is missed.
MISSED_PER_S: Final = 40.0
RISING: Final = 2.0
#: A comparison of counters over longer than this says nothing of now, in seconds.
LONGEST_WINDOW_S: Final = 10.0
_PAGES_PER_MIB: Final = 256


@dataclass(frozen=True, slots=True)
class Statement:
    """What a balloon driver said. None: it does not say, which is not zero."""

    #: Seconds since the epoch, whole.
    said_at: float
    #: What can be had without swapping; where the driver does not say, what is free, which is less. MiB.
    usable_mib: float
    #: All memory of the guest, MiB.
    total_mib: float | None = None
    #: Since boot: faults that waited for a disk, and what was swapped in, MiB.
    major_faults: int | None = None
    swap_in_mib: float | None = None

    @property
    def reserve_mib(self) -> float:
        """What is never taken of its usable memory, MiB."""
        return max(RESERVE_MIB, RESERVE_SHARE * (self.total_mib or 0.0))


class OrdinaryGuest:
    """What is known of one such guest. ``read_at`` is seconds since the epoch, by the clock of the statements."""

    def __init__(self) -> None:
        #: What of it answered at the latest look.
        self.kind = GuestKind.BALLOON
        self._read_at = 0.0
        #: The earliest second of which a statement counts: nothing has been moved since.
        self._from_s: float | None = None
        self._latest: Statement | None = None
        #: Pages a second that were missed: by the latest two statements, and by those before the latest step.
        self._missed_per_s = 0.0
        self._calm_per_s = 0.0

    def observe(self, read_at: float, said: Statement | None, qemu_agent: bool = False) -> None:
        """Take in what the driver said, which may be what it said before, and whether a qemu-guest-agent is there."""
        self._read_at = read_at
        self.kind = GuestKind.QEMU_GUEST_AGENT if qemu_agent else GuestKind.BALLOON
        if self._from_s is None or read_at < self._from_s - LONGEST_WINDOW_S:
            # Who looked after it before may have taken something a moment ago; so may we, before a clock was set back.
            self._from_s = read_at
        if said is None:
            return
        if self._latest is not None and said.said_at != self._latest.said_at:
            self._missed_per_s = _missed_per_s(self._latest, said)
        self._latest = said

    def moved(self, read_at: float) -> None:
        """Memory was taken or given until ``read_at``: what was said before does not count any more."""
        self._from_s, self._calm_per_s = read_at, self._missed_per_s

    @property
    def fresh(self) -> bool:
        """Whether the driver has said something lately."""
        return self._latest is not None and is_fresh(self._latest, self._read_at)

    def reading(self, vcpus: int) -> GuestReading | None:
        """What may be taken now; None: it is not known, so nothing. All vCPUs count as on line."""
        said = self._latest
        if said is None or not self.fresh or said.said_at < (self._from_s or 0.0):
            return None
        spare_mib = max(said.usable_mib - said.reserve_mib, 0.0)
        return GuestReading(tuple(range(vcpus)), (), spare_mib, GuestKind.BALLOON, self._misses(said))

    def _misses(self, said: Statement) -> str:
        if self._missed_per_s >= max(MISSED_PER_S, RISING * self._calm_per_s):
            return f"the guest misses what was taken: {self._missed_per_s:.0f} pages a second from disk"
        if said.usable_mib < SHORT_SHARE * said.reserve_mib:
            return f"the guest is short of memory: {said.usable_mib:.0f} MiB usable, reserve {said.reserve_mib:.0f} MiB"
        return ""


@dataclass(frozen=True, slots=True)
class Gift:
    """What a guest could give now if it were of a kind."""

    kind: GuestKind
    #: vCPUs that could be taken off line; any can be held by quota.
    cpus: int
    #: By its balloon driver's word, MiB; None: it has not said anything lately. Applications may release more.
    memory_mib: float | None


def gifts(vcpus: int, said: Statement | None, read_at: float) -> tuple[Gift, ...]:
    """What each kind of guest would give, the most able last."""
    fresh = said if said is not None and is_fresh(said, read_at) else None
    ordinary = max(fresh.usable_mib - fresh.reserve_mib, 0.0) if fresh is not None else None
    with_agent = max(fresh.usable_mib - fresh.reserve_mib / 2, 0.0) if fresh is not None else None
    return (
        Gift(GuestKind.BALLOON, 0, ordinary),
        Gift(GuestKind.QEMU_GUEST_AGENT, max(vcpus - 1, 0), ordinary),
        Gift(GuestKind.AGENT, max(vcpus - 1, 0), with_agent),
    )


def is_fresh(said: Statement, read_at: float) -> bool:
    """Whether a statement says something of the time at which it was read."""
    return abs(read_at - said.said_at) <= FRESH_S


def _missed_per_s(earlier: Statement, later: Statement) -> float:
    """Pages that were fetched from disk, a second; 0 where the statements do not tell."""
    seconds = later.said_at - earlier.said_at
    if not 0 < seconds <= LONGEST_WINDOW_S:
        return 0.0
    faults = _risen(earlier.major_faults, later.major_faults)
    pages = _risen(earlier.swap_in_mib, later.swap_in_mib) * _PAGES_PER_MIB
    return max(faults, pages) / seconds


def _risen(earlier: float | None, later: float | None) -> float:
    """By how much a counter has; a reset guest begins again."""
    return max(later - earlier, 0.0) if earlier is not None and later is not None else 0.0
