"""Trimming of steady mode: readings of a host's guests in, small steps of their memory out.

Memory that lies idle in deflatable and harvest VMs is taken slowly while the host has less free than its reserve, and
given back on the first sign that it is missed. Taking has a budget of stalls and faults, as Senpai's has; giving goes
first. What was taken needs no record: a VM that has less than nominal is given to, whatever has shrunk it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.cascade.pressure import STALE_S, PressureReading, rate_per_s, stalled_percent


@dataclass(frozen=True, slots=True)
class Terms:
    """How carefully memory is trimmed."""

    #: The pause between two steps of one VM, in seconds.
    step_s: float = 10.0
    #: The budget: beyond this share of time in which some task waited for memory, per cent, or so many faults a second
    #: that waited for a disk, nothing is taken ...
    stalled_percent: float = 0.5
    faults_per_s: float = 2.0
    #: ... and with stalls and faults both beyond it, or faults beyond this many, what was taken is given back.
    missed_faults_per_s: float = 10.0
    #: What stays available in any case: so many times the guest's reserve, and this share of its size.
    keep_reserves: float = 3.0
    keep_share: float = 0.10
    #: With less available than this many reserves memory is given back.
    need_reserves: float = 1.5
    #: A step: at most this share of what is idle, and of the nominal size; never less than so many MiB.
    idle_share: float = 0.25
    nominal_share: float = 1 / 64
    least_mib: float = 16.0
    #: What is given back at once: half of what is missing, and no less than this, MiB.
    give_mib: float = 256.0
    #: A VM that was given to is left alone for so long, in seconds; doubled where it is missed again soon after.
    rest_s: float = 60.0
    longest_rest_s: float = 3600.0
    again_s: float = 1800.0


USUAL: Final = Terms()
#: Trimming begins where the reserve lacks this share or so many MiB, the larger; it ends when the reserve is full.
BEGIN_SHARE: Final = 0.125
BEGIN_MIB: Final = 64.0


@dataclass(frozen=True, slots=True)
class TrimRow:
    """One VM for a decision."""

    allocation: Allocation
    #: Whether memory may be taken, and given: not beside an operation, nor where an operator holds a target.
    may_trim: bool = True
    may_grow: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done with one VM."""

    memory_mib: float
    why: str


@dataclass(slots=True)
class _Seen:
    """What is known of one VM."""

    at: float
    reading: PressureReading
    #: Between the last two readings; None: not known.
    stalled_percent: float | None = None
    faults_per_s: float | None = None
    stepped_at: float = float("-inf")
    rests_until: float = float("-inf")
    rest_s: float = 0.0

    def observe(self, now: float, reading: PressureReading) -> None:
        earlier, window_s = self.reading, now - self.at
        if window_s <= 0:
            return
        same = earlier.boot_id == reading.boot_id
        self.stalled_percent = self.faults_per_s = None
        if same:
            self.stalled_percent = stalled_percent(earlier.some_total_us, reading.some_total_us, window_s)
            major = rate_per_s(earlier.major_faults, reading.major_faults, window_s)
            swapped = rate_per_s(earlier.swap_in_pages, reading.swap_in_pages, window_s)
            known = [rate for rate in (major, swapped) if rate is not None]
            self.faults_per_s = max(known) if known else None
        self.at, self.reading = now, reading

    def missed(self, terms: Terms) -> str:
        """Why memory is missed, in words; empty if nothing says so."""
        available, faults = self.reading.available_mib, self.faults_per_s or 0.0
        if available < terms.need_reserves * self.reading.reserve_mib:
            return f"only {available:.0f} MiB are available in it"
        stalls = self.stalled_percent is None or self.stalled_percent > terms.stalled_percent
        if faults > terms.missed_faults_per_s or (stalls and faults > terms.faults_per_s):
            return f"it has {faults:.0f} major faults a second"
        return ""

    def idle_mib(self, terms: Terms, size_mib: float) -> float:
        """What lies idle by the latest reading and may be taken; 0 beyond the budget, or where that is not known."""
        if self.faults_per_s is None or self.faults_per_s > terms.faults_per_s:
            return 0.0
        if self.stalled_percent is None or self.stalled_percent > terms.stalled_percent:
            return 0.0
        kept = max(terms.keep_reserves * self.reading.reserve_mib, terms.keep_share * size_mib)
        return max(self.reading.available_mib - kept, 0.0)


@dataclass(slots=True)
class Trimmer:
    """The guests of one host. ``now`` is in seconds, of a clock that never goes back.

    :param terms: how carefully memory is trimmed.
    """

    terms: Terms = USUAL
    #: Whether the reserve is being filled.
    filling: bool = False
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def observe(self, now: float, name: str, reading: PressureReading) -> None:
        """Take in what a guest said of its memory."""
        if name in self._seen:
            self._seen[name].observe(now, reading)
        else:
            self._seen[name] = _Seen(now, reading)

    def fell_short(self, now: float, name: str) -> None:
        """A step that was to take memory of a VM gave next to nothing: what is left is in the way of being taken."""
        if (seen := self._seen.get(name)) is not None:
            self._rest(now, seen)

    def is_filling(self, free_mib: float, reserve_mib: float) -> bool:
        """Whether memory is to be taken now; takes note of it."""
        lacks_mib = reserve_mib - free_mib
        begins = lacks_mib >= max(BEGIN_MIB, BEGIN_SHARE * reserve_mib)
        self.filling = lacks_mib > 0 and (self.filling or begins)
        return self.filling

    def steps(
        self,
        now: float,
        rows: Sequence[TrimRow],
        free_mib: float,
        reserve_mib: float,
        room_mib: float = math.inf,
        budget_mib: float = math.inf,
    ) -> dict[str, Step]:
        """What is to be done now: give back where memory is missed, out of what is free; then take where it is idle.

        A VM without a reading younger than `pressure.STALE_S` is left alone.

        :param rows: all VMs of the host, also those that nobody has asked lately: what is known of others is forgotten,
            how long they are to be left alone with it.
        :param free_mib: what the host has free.
        :param reserve_mib: what it is to have free.
        :param room_mib: what of what is free may be given; the rest is spoken for.
        :param budget_mib: what harvest VMs together may be given of it.
        :returns: sizes to reach, by name; no VM goes below its minimum or, by this, above its nominal size.
        """
        names = {row.allocation.name for row in rows}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        steps: dict[str, Step] = {}
        fresh = [
            (row, seen)
            for row in rows
            if (seen := self._seen.get(row.allocation.name)) is not None and now - seen.at <= STALE_S
        ]
        for row, seen in fresh:
            if (why := seen.missed(self.terms)) == "":
                continue
            self._rest(now, seen)
            size, lacks = row.allocation.current.memory_mib, _lacks_mib(row.allocation)
            harvests = row.allocation.priority is Priority.HARVEST
            most = min(free_mib, room_mib, budget_mib if harvests else math.inf)
            given = min(max(lacks / 2, self.terms.give_mib), lacks, most)
            # A reading from before the last step says nothing of what that has helped.
            if row.may_grow and seen.at > seen.stepped_at and given >= min(self.terms.least_mib, lacks) > 0:
                steps[row.allocation.name] = Step(size + given, f"{why}: {given:.0f} MiB are given back")
                seen.stepped_at = now
                free_mib -= given
                room_mib -= given
                budget_mib -= given if harvests else 0.0
        if self.is_filling(free_mib, reserve_mib):
            steps |= self._takes(now, fresh, reserve_mib - free_mib)
        return steps

    def _takes(self, now: float, fresh: Sequence[tuple[TrimRow, _Seen]], lacks_mib: float) -> dict[str, Step]:
        steps: dict[str, Step] = {}
        # Harvest VMs give first, as in every reclaim.
        for harvest in (True, False):
            wanted = {}
            for row, seen in fresh:
                if (row.allocation.priority is Priority.HARVEST) is harvest:
                    wanted[row.allocation.name] = (row, seen, self._take_mib(now, row, seen))
            total = sum(take for _, _, take in wanted.values())
            if total <= 0:
                continue
            share, left_mib = min(lacks_mib / total, 1.0), lacks_mib
            for name, (row, seen, most) in wanted.items():
                take = min(max(most * share, self.terms.least_mib), most)
                if most <= 0 or left_mib <= 0:
                    continue
                size = row.allocation.current.memory_mib - take
                idle = f"{seen.reading.available_mib:.0f} MiB were available in it"
                steps[name] = Step(size, f"{take:.0f} MiB that lay idle are taken for the host's reserve: {idle}")
                seen.stepped_at = now
                left_mib -= take
            lacks_mib = left_mib
            if lacks_mib <= 0:
                break
        return steps

    def _take_mib(self, now: float, row: TrimRow, seen: _Seen) -> float:
        """The most that may be taken of a VM in one step."""
        terms, vm = self.terms, row.allocation
        if not row.may_trim or vm.priority is Priority.FIXED:
            return 0.0
        if now < seen.rests_until or seen.at <= seen.stepped_at or now - seen.stepped_at < terms.step_s:
            return 0.0
        step = max(terms.nominal_share * vm.nominal.memory_mib, terms.least_mib)
        idle = terms.idle_share * seen.idle_mib(terms, vm.current.memory_mib)
        most = min(step, idle, vm.deflatable.memory_mib)
        return most if most >= terms.least_mib else 0.0

    def _rest(self, now: float, seen: _Seen) -> None:
        """Leave a VM alone whose memory is missed; for longer where that comes again soon after."""
        if now < seen.rests_until:
            seen.rests_until = max(seen.rests_until, now + self.terms.rest_s)
            return
        again = now - seen.rests_until < self.terms.again_s
        seen.rest_s = min(2 * seen.rest_s, self.terms.longest_rest_s) if again else self.terms.rest_s
        seen.rests_until = now + seen.rest_s


def _lacks_mib(vm: Allocation) -> float:
    return max(vm.nominal.memory_mib - vm.current.memory_mib, 0.0)
