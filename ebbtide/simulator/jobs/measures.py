"""Measures of a run that streams by: sums without drift, percentiles from narrow bins. Kernels.

Bins are 1 % wide each and know the sum of what fell in: a percentile is the mean of its bin, so at most 1 % off, and
exact where a bin holds equal values only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from ebbtide.simulator.jobs.columns import MEASURES, Floats, Ints

GROWTH: Final = math.log(1.01)
#: Below it (and for 0) there is one bin.
LEAST: Final = 1e-3
BINS: Final = int(math.log(1e13 / LEAST) / GROWTH) + 3
#: A float's upper bits name a cell of less than 1 %, so that at most one bin ends within it.
_CELL_BITS: Final = 45
#: Where bins end, as near as powers are told; the last has no end.
_ENDS: Final = np.append(LEAST * np.exp(np.arange(BINS - 1) * GROWTH), np.finfo(np.float64).max)
_FIRST: Final = int(np.float64(LEAST).view(np.int64)) >> _CELL_BITS
_LAST: Final = int(_ENDS[-2].view(np.int64) >> _CELL_BITS) + 1
#: The bin of the lowest value from LEAST on of each cell.
_CELLS: Final = np.maximum(
    np.searchsorted(_ENDS, (np.arange(_FIRST, _LAST + 1) << _CELL_BITS).view(np.float64), "right"), 1
).astype(np.int16)
PERCENTILES: Final = (50, 90, 95, 99)
#: Columns of `moments`: the sum in two parts, the most.
MOMENTS: Final = 3


def add(sums: Floats, place: int, value: float) -> None:
    """Add to the sum at ``place``, and what rounding loses to the one behind it, whichever is larger (Knuth)."""
    total = sums[place]
    after = total + value
    added = after - total
    sums[place + 1] += (total - (after - added)) + (value - added)
    sums[place] = after


def bin_of(value: float) -> int:
    """The bin of a value from LEAST on, by the logarithm; that itself is only asked for where a bin ends."""
    cell = min(int(np.float64(value).view(np.int64)) >> _CELL_BITS, _LAST) - _FIRST
    place = int(_CELLS[cell])
    end = _ENDS[place]
    if abs(value - end) <= 1e-12 * end:
        return min(int(math.log(value / LEAST) / GROWTH) + 1, BINS - 1)
    return place + int(value >= end)


def note(bins: Ints, bin_sums: Floats, moments: Floats, row: int, value: float) -> None:
    """One more value of a measure; not negative."""
    place = 0
    if value >= LEAST:
        place = bin_of(value)
    bins[row, place] += 1
    # As most waits are.
    if value != 0.0:
        bin_sums[row, place] += value
        add(moments[row], 0, value)
    if value > moments[row, 2]:
        moments[row, 2] = value


def overlap(begin_s: float, end_s: float, from_s: float, to_s: float) -> float:
    """How long [begin_s, end_s) and [from_s, to_s) are both; s."""
    begin = max(begin_s, from_s)
    end = min(end_s, to_s)
    return max(end - begin, 0.0)


def fresh() -> tuple[Ints, Floats, Floats]:
    """Empty bins, their sums, and moments."""
    rows = len(MEASURES)
    moments = np.zeros((rows, MOMENTS))
    moments[:, 2] = -np.inf
    return np.zeros((rows, BINS), np.int64), np.zeros((rows, BINS)), moments


def figures(bins: Ints, bin_sums: Floats, moments: Floats, left: Sequence[int] = ()) -> dict[str, float]:
    """Count, mean, percentiles and most of every measure; NaN where nothing was measured.

    :param left: of each measure, how many were not done: in percentiles, and there alone, their values are infinite.
    """
    found: dict[str, float] = {}
    for row, name in enumerate(MEASURES):
        stem, unit = (name[:-2], "_s") if name.endswith("_s") else (name, "")
        upto = np.cumsum(bins[row])
        count = int(upto[-1])
        found[f"{stem}_count"] = float(count)
        found[f"{stem}_mean{unit}"] = float(moments[row, 0] + moments[row, 1]) / count if count else math.nan
        every = count + (left[row] if left else 0)
        for percent in PERCENTILES:
            key, number = f"{stem}_p{percent}{unit}", math.ceil(every * percent / 100)
            found[key] = math.inf if every else math.nan
            if 0 < number <= count:
                place = int(np.searchsorted(upto, number))
                found[key] = float(bin_sums[row, place] / bins[row, place])
        found[f"{stem}_max{unit}"] = float(moments[row, 2]) if count else math.nan
    return found
