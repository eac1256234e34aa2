"""Durations of which only a few quantiles are known: between two of them, log-uniform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import Floats


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution through (share of all that are at most so long, seconds).

    :param points: from share 0 to 1, ascending in both.
    :raises InvalidParameter: fewer than two points, not from 0 to 1, not ascending, or a duration that is not positive.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares, seconds = [p[0] for p in self.points], [p[1] for p in self.points]
        if len(self.points) < 2 or shares[0] != 0 or shares[-1] != 1:
            raise InvalidParameter("points", "must lead from share 0 to share 1")
        if any(b <= a for a, b in pairwise(shares)):
            raise InvalidParameter("points", "must have ascending shares")
        if not seconds[0] > 0 or not math.isfinite(seconds[-1]) or any(not b > a for a, b in pairwise(seconds)):
            raise InvalidParameter("points", "must have ascending durations above 0")

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """``count`` durations; s."""
        logs = np.log([seconds for _, seconds in self.points])
        return np.asarray(np.exp(np.interp(rng.random(count), [share for share, _ in self.points], logs)), np.float64)

    def mean_s(self) -> float:
        """The exact mean; s."""
        return math.fsum(
            (share - before) * (end - begin) / math.log(end / begin)
            for (before, begin), (share, end) in pairwise(self.points)
        )


#: Runtimes as in half a year of SURF's Lisa cluster (194,917 jobs, 2022): of its jobs 49, 65 and 79 % are shorter than
#: 3 min, 15 min and 1 h, the median is 3.2 min, the 95th percentile 6 h; its mean of 1.83 h says how long the longest
#: are.
SURF_HALF_YEAR: Final = Quantiles(
    ((0.0, 1.0), (0.49, 180.0), (0.5, 192.0), (0.65, 900.0), (0.79, 3600.0), (0.95, 21_600.0), (1.0, 246_200.0))
)
