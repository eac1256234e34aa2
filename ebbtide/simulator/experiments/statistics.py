"""Means over seeds: intervals by Student's t."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.extras import Later

special: Any = Later("scipy.special")

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval; NaN where there are no numbers, or (the interval) fewer than two."""

    mean: float
    low: float
    high: float
    count: int


def interval(values: NDArray[Any], confidence: float = CONFIDENCE) -> Interval:
    """The mean of what is not NaN, with the interval that covers the true one with this probability.

    It takes the seeds' values as independent and about normal: with few seeds of a skewed metric it is a guide only.
    """
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    count = len(values)
    if not count:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(values.mean())
    if count < 2 or not np.isfinite(values).all():
        return Interval(mean, math.nan, math.nan, count)
    if (values == values[0]).all():
        # Rounding of the mean must not make an interval of what does not vary.
        return Interval(float(values[0]), float(values[0]), float(values[0]), count)
    half = float(special.stdtrit(count - 1, (1 + confidence) / 2)) * float(values.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def by_seed(values: NDArray[Any], seeds: NDArray[Any]) -> NDArray[np.float64]:
    """The mean of what is not NaN of each seed: what cases of one seed have in common is chance once, not in each.

    :param values: shape (n,), as ``seeds``.
    """
    values = np.asarray(values, np.float64)
    _, seed = np.unique(seeds, return_inverse=True)
    some = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = np.bincount(seed, np.where(some, values, 0.0)) / np.bincount(seed, some)
    return means
