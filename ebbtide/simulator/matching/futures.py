"""What a pool's machines will keep: the truth that predictions are held against, and what a clairvoyant goes by."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ebbtide.matcher.predict.landmarks import FREE, SIZES, STEPS, size_class, step_s
from ebbtide.simulator.compiling import compiled
from ebbtide.simulator.inputs.batches import Floats, Mask
from ebbtide.simulator.jobs.columns import Ints
from ebbtide.simulator.matching.pools import Pool

#: Servers that a chance is counted of, at the least.
ALIKE: Final = 40
#: Between two moments of `kept`.
KNOWN_EVERY_S: Final = 900.0


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


class Foreseen(NamedTuple):
    """What could be known of the VMs to come, by who knows them all, and not on which server each will be."""

    #: Of `kept`.
    shares: Floats
    #: When its first row is of.
    from_s: float
    #: Of what is said of machines; the rest comes of what was seen.
    part: float


def first_losses(
    at_s: Floats, cores: Ints, first: Ints, now_s: float, until_s: float, had: Floats, lost_s: Floats
) -> None:
    """Cores of each server now, and in how many seconds it has first lost more than each of `FREE`. A kernel.

    :param first: changes of server i are ``at_s[first[i] : first[i + 1]]``; cores after each.
    :param had: out, (servers,).
    :param lost_s: out, (servers, FREE); infinite: not until ``until_s``.
    """
    for server in range(len(first) - 1):
        place, end = first[server], first[server + 1]
        had[server] = 0.0
        lost_s[server] = np.inf
        while place < end and at_s[place] <= now_s:
            had[server] = cores[place]
            place += 1
        f = 0
        while place < end and at_s[place] <= until_s and f < len(FREE):
            while f < len(FREE) and had[server] - cores[place] > FREE[f]:
                lost_s[server, f] = at_s[place] - now_s
                f += 1
            place += 1


@functools.cache
def _compiled() -> Any:
    return compiled(first_losses)


def kept(pools: Sequence[Pool], from_s: float, until_s: float, horizon_s: float, compile: bool = True) -> Floats:
    """Of servers with about as many cores the share that keep room.

    Counted of servers in the same class of cores; where these are fewer than `ALIKE`, of all that have the cores.

    :param pools: the same VMs by other draws.
    :param horizon_s: what comes later counts as nothing.
    :param compile: with numba.
    :returns: rows are moments, every `KNOWN_EVERY_S`; columns as of `landmarks.room_lasts`, of one age.
    """
    look = _compiled() if compile else first_losses
    orders = [np.lexsort((one.at_s, one.machine)) for one in pools]
    at_s = np.concatenate([one.at_s[order] for one, order in zip(pools, orders, strict=True)])
    cores = np.concatenate([one.cores[order] for one, order in zip(pools, orders, strict=True)]).astype(np.int64)
    counts = np.concatenate([np.bincount(one.machine, minlength=one.machines) for one in pools])
    first = np.append(0, np.cumsum(counts)).astype(np.int64)
    had, lost_s = np.zeros(len(counts)), np.zeros((len(counts), len(FREE)))
    edges_s = np.array([step_s(step) for step in range(STEPS + 1)])
    moments_s = np.arange(from_s, until_s, KNOWN_EVERY_S)
    found = np.ones((len(moments_s), SIZES + 1, len(FREE), STEPS + 1))
    for moment, now_s in enumerate(moments_s.tolist()):
        look(at_s, cores, first, now_s, now_s + horizon_s, had, lost_s)
        sizes = size_class(had)
        for f, free in enumerate(FREE):
            able = had > free
            for size in range(SIZES + 1):
                alike = able & (sizes == size)
                values_s = np.sort(lost_s[alike if alike.sum() >= ALIKE else able, f])
                if len(values_s):
                    found[moment, size, f] = 1.0 - np.searchsorted(values_s, edges_s, side="right") / len(values_s)
                elif f:
                    found[moment, size, f] = found[moment, size, f - 1]
    return found.reshape(len(moments_s), -1)
