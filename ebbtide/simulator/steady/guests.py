"""Make-believe guests: what of their memory is hot, warm and idle, and what a lack of it costs.

These are assumptions: no public trace says what VMs do with their memory page by page. A guest has a hot part that it
touches all the time, which jumps to another size now and then, a warm part (page cache) that is read once in a while,
and the rest is idle. What a guest is short of is read from its disk each time it is touched: a refault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ebbtide.deflation.cascade.pressure import PressureReading

#: Memory that the guest agent keeps for its kernel: this share of nominal, and at least so many MiB.
RESERVE_SHARE: Final = 0.05
LEAST_RESERVE_MIB: Final = 48.0
#: What of it no program can have, since the kernel cannot do without: this share of nominal, and at least as much.
KERNEL_SHARE: Final = 0.02
PAGES_PER_MIB: Final = 256
#: How long a task waits for a page of the guest's disk, seconds.
FAULT_S: Final = 200e-6


@dataclass(frozen=True, slots=True)
class Habits:
    """What guests are assumed to do with their memory.

    :param hot_from: hot parts are even between this share of nominal and ``hot_to``.
    :param hot_stays_s: the mean time until a hot part has another size.
    :param warm_to: warm parts are even between 0 and this share of what is not hot.
    :param hot_again_s: how long until a hot page is touched again; ``warm_again_s``: a warm one.
    """

    hot_from: float = 0.15
    hot_to: float = 0.75
    hot_stays_s: float = 3600.0
    warm_to: float = 0.5
    hot_again_s: float = 60.0
    warm_again_s: float = 900.0


@dataclass(slots=True)
class Guest:
    """One guest. Its chance is its own, so that every policy meets the same guest."""

    habits: Habits
    nominal_mib: float
    chance: np.random.Generator
    now_s: float
    hot_mib: float = 0.0
    warm_mib: float = 0.0
    refaults: float = 0.0
    stalled_s: float = 0.0
    _changes_s: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._changes_s = self.now_s
        self.live_until(self.now_s, self.nominal_mib)

    @property
    def reserve_mib(self) -> float:
        return max(RESERVE_SHARE * self.nominal_mib, LEAST_RESERVE_MIB)

    @property
    def kernel_mib(self) -> float:
        return max(KERNEL_SHARE * self.nominal_mib, LEAST_RESERVE_MIB)

    def available_mib(self, size_mib: float) -> float:
        """What its kernel calls available at a size."""
        return max(size_mib - self.hot_mib, 0.0)

    def free_mib(self, size_mib: float) -> float:
        """What it does not use at all at a size."""
        return max(size_mib - self.hot_mib - self.warm_mib, 0.0)

    def live_until(self, now_s: float, size_mib: float) -> float:
        """Let it live on at a size; the pages that it had to read again meanwhile."""
        passed_s, self.now_s = max(now_s - self.now_s, 0.0), now_s
        usable_mib = max(size_mib - self.kernel_mib, 0.0)
        hot_short = max(self.hot_mib - usable_mib, 0.0)
        warm_short = min(max(self.hot_mib + self.warm_mib - usable_mib, 0.0), self.warm_mib)
        rate = PAGES_PER_MIB * (hot_short / self.habits.hot_again_s + warm_short / self.habits.warm_again_s)
        # One task waits for one page at a time: a guest that does nothing else reads no more than this.
        pages = min(rate * passed_s, passed_s / FAULT_S)
        self.refaults += pages
        self.stalled_s += pages * FAULT_S
        while self._changes_s <= now_s:
            part = self.chance.uniform(self.habits.hot_from, self.habits.hot_to)
            self.hot_mib = part * self.nominal_mib
            self.warm_mib = self.chance.uniform(0.0, self.habits.warm_to) * (self.nominal_mib - self.hot_mib)
            self._changes_s += self.chance.exponential(self.habits.hot_stays_s)
        return pages

    def reading(self, size_mib: float) -> PressureReading:
        """What its agent says."""
        return PressureReading(
            boot_id="made",
            available_mib=self.available_mib(size_mib),
            reserve_mib=self.reserve_mib,
            some_total_us=int(self.stalled_s * 1e6),
            major_faults=int(self.refaults),
        )
