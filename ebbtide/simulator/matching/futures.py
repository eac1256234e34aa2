"""What a pool's machines will keep: the truth that predictions are held against, and what a clairvoyant goes by."""

from __future__ import annotations

import numpy as np

from ebbtide.simulator.inputs.batches import Floats, Mask
from ebbtide.simulator.matching.pools import Pool


class Futures:
    """All changes of a pool, by machine."""

    def __init__(self, pool: Pool) -> None:
        rows = [pool.machine == number for number in range(pool.machines)]
        self._changes = [(pool.at_s[one], pool.cores[one]) for one in rows]

    def lost(self, now_s: float, duration_s: float) -> Floats:
        """How many cores at the most each machine is short of those of now, within a time from now on; (machines,)."""
        lost = np.zeros(len(self._changes))
        for number, (at_s, cores) in enumerate(self._changes):
            low, high = np.searchsorted(at_s, [now_s, now_s + duration_s], side="right")
            if low != high and low != 0:
                lost[number] = max(cores[low - 1] - cores[low:high].min(), 0)
        return lost

    def shrinks(self, now_s: float, duration_s: float) -> Mask:
        """Whether each machine has a shrink, of whatever size, within a time from now on; shape (machines,)."""
        found = np.zeros(len(self._changes), bool)
        for number, (at_s, cores) in enumerate(self._changes):
            low, high = np.searchsorted(at_s, [now_s, now_s + duration_s], side="right")
            found[number] = (np.diff(cores[max(low - 1, 0) : high]) < 0).any()
        return found

    def share_kept(self, now_s: float, duration_s: float, over_s: float, every_s: float = 900.0) -> Floats:
        """Of the moments of the time to come, those from which on each machine keeps all its cores; (machines,)."""
        found: Floats = np.mean(
            [self.lost(now_s + at_s, duration_s) == 0 for at_s in np.arange(0.0, over_s, every_s)], 0
        )
        return found
