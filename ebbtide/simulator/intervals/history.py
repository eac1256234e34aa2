"""History before a run: how long intervals of a platform last, which jobs are big, and which are long."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ebbtide.simulator.inputs.batches import SeriesBatch
from ebbtide.simulator.intervals.policy import band
from ebbtide.simulator.jobs.columns import Floats


def intervals(
    shares: Iterable[SeriesBatch], machines: int, stable: int, every_s: float, bands: int = 1, most: int = 4096
) -> Floats:
    """How many intervals had which length in steps: shape (bands, most); longer ones count as most - 1.

    The last on is the first off. Intervals that had not ended when the series does are left out.

    :param shares: of the machines that are on.
    """
    ended = np.zeros((bands, most))
    rows = np.array([band(i, stable, machines, bands) for i in range(machines)], np.int64)
    began_s = np.zeros(machines)
    on: int | None = None
    for batch in shares:
        for at_s, share in zip(batch.at_s.tolist(), batch.value.tolist(), strict=True):
            wanted = min(max(int(share * machines + 1e-9), 0), machines)
            if on is None:
                began_s[:wanted] = at_s
            elif wanted > on:
                began_s[on:wanted] = at_s
            else:
                steps = np.minimum(((at_s - began_s[wanted:on]) / every_s + 0.5).astype(np.int64), most - 1)
                np.add.at(ended, (rows[wanted:on], steps), 1.0)
            on = wanted
    return ended


def big_from(core_s: Floats, share: float) -> float:
    """The work from which jobs are big, so that the big ones have this share of all work; core-seconds.

    :param core_s: the work of each of many jobs. Infinite for a share of 0, 0 for a share of 1.
    """
    ordered = np.sort(core_s)[::-1]
    if share <= 0 or not len(ordered):
        return float("inf")
    if share >= 1:
        return 0.0
    place = int(np.searchsorted(np.cumsum(ordered), share * ordered.sum()))
    return float(ordered[min(place, len(ordered) - 1)])
