"""How a pool's machines differ, and whether they go on differing (Agarwal 2023 §2.1, Fig. 2)."""

from __future__ import annotations

import itertools
from typing import Final, Protocol

import numpy as np

from ebbtide.simulator.inputs.batches import Floats, Indices, Mask

_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0
#: Of tasks, and how sure it is to be that they are not preempted (Agarwal et al. 2023, Fig. 13).
DURATIONS_S: Final = (600.0, 1800.0, 3600.0)
CONFIDENCE: Final = 0.7
_PART_S: Final = 6 * _HOUR_S
#: Fewer gaps say nothing of how they are spread.
_LEAST_GAPS: Final = 50


class Changes(Protocol):
    """Changes of machines in the order of their times; the first of each says what it begins with."""

    @property
    def machine(self) -> Indices: ...

    @property
    def at_s(self) -> Floats: ...

    @property
    def cores(self) -> Indices: ...

    @property
    def machines(self) -> int: ...


def spread(pool: Changes, from_s: float, until_s: float) -> dict[str, float]:
    """Figures by name, of the whole hours and days of a window; without a whole day, of its hours only.

    Machines without cores are not there, and count for nothing in hours and days in which they never are.
    hour_p50_changes, hour_p90_changes: changes of a machine in an hour, over machines and hours (Fig. 2b). day_...: in
    a day, over machines and days. rank_correlation: of the machines' changes in one hour and the next (Spearman), mean
    over hours. cores_p10, cores_p90: of the machines' cores at the ends of the hours.
    """
    found: dict[str, float] = {}
    for name, step_s in (("hour", _HOUR_S), ("day", _DAY_S)):
        counts = counted(pool, from_s, until_s, step_s)
        begins_s: Floats = from_s + step_s * np.arange(len(counts), dtype=np.float64)
        there = (held(pool, begins_s) > 0) | (counts > 0)
        if there.any():
            found[f"{name}_p50_changes"] = float(np.median(counts[there]))
            found[f"{name}_p90_changes"] = float(np.percentile(counts[there], 90))
        if name == "hour" and len(counts) > 1:
            pairs = itertools.pairwise(zip(counts, there, strict=True))
            both = [correlation(one[here & still], other[here & still]) for (one, here), (other, still) in pairs]
            known = [value for value in both if not np.isnan(value)]
            found["rank_correlation"] = float(np.mean(known)) if known else float("nan")
            sizes = held(pool, begins_s + _HOUR_S)
            if (sizes > 0).any():
                found["cores_p10"], found["cores_p90"] = (float(np.percentile(sizes[sizes > 0], at)) for at in (10, 90))
    return found


def stability(gap_s: Floats, duration_s: float) -> float:
    """For how many durations a machine must not have changed for Eq. 1 to say CONFIDENCE of a task (Fig. 13).

    Infinite: no time is long enough.

    :param gap_s: times between changes, of all machines.
    """
    ordered = np.sort(gap_s)
    ages_s = np.append(0.0, ordered[:-1])
    after, longer = (
        len(ordered) - np.searchsorted(ordered, at_s, side="right") for at_s in (ages_s, ages_s + duration_s)
    )
    enough = (after >= _LEAST_GAPS) & (longer >= CONFIDENCE * after)
    return float(ages_s[enough.argmax()] / duration_s) if enough.any() else float("inf")


def drift(gap_s: Floats, end_s: Floats) -> float:
    """How far gaps that end within six hours are spread otherwise than all (Kolmogorov's distance); the mean.

    Fig. 7 shows such distributions; NaN: there are too few gaps.
    """
    parts = (end_s / _PART_S).astype(np.int64)
    ordered = np.sort(gap_s)
    found = []
    for part in np.unique(parts):
        mine = np.sort(gap_s[parts == part])
        if len(mine) >= _LEAST_GAPS:
            own, whole = (np.searchsorted(one, ordered, side="right") / len(one) for one in (mine, ordered))
            found.append(float(np.abs(own - whole).max()))
    return float(np.mean(found)) if found else float("nan")


def counted(pool: Changes, from_s: float, until_s: float, step_s: float) -> Indices:
    """Changes by step and machine: shape (whole steps within the window, machines). What one begins with is none.

    Nor what one comes back with that had no cores.
    """
    steps = int((until_s - from_s) / step_s)
    found = np.zeros((steps, pool.machines), np.int64)
    within = ~begins(pool) & (pool.at_s >= from_s) & (pool.at_s < from_s + steps * step_s)
    step = ((pool.at_s[within] - from_s) / step_s).astype(np.int64)
    np.add.at(found, (np.minimum(step, max(steps - 1, 0)), pool.machine[within]), 1)
    return found


def begins(pool: Changes) -> Mask:
    """Whether each change is one that a machine begins with, or comes back with that had no cores."""
    order = np.argsort(pool.machine, kind="stable")
    machine, cores = pool.machine[order], pool.cores[order]
    found = np.ones(len(order), bool)
    found[order[1:]] = (machine[1:] != machine[:-1]) | (cores[:-1] <= 0)
    return found


def held(pool: Changes, at_s: Floats) -> Indices:
    """Cores by moment and machine."""
    found = np.zeros((len(at_s), pool.machines), np.int64)
    for number in range(pool.machines):
        mine = pool.machine == number
        places = np.searchsorted(pool.at_s[mine], at_s, side="right") - 1
        found[:, number] = np.where(places >= 0, pool.cores[mine][np.maximum(places, 0)], 0)
    return found


def correlation(one: Indices, other: Indices) -> float:
    """Spearman's, ties with their mean rank; NaN where all values of one are the same, or there are none."""
    if not len(one):
        return float("nan")
    first, second = _ranks(one), _ranks(other)
    if min(first.std(), second.std()) == 0.0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Indices) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found: Floats = (ends - (counts - 1) / 2.0)[inverse]
    return found
