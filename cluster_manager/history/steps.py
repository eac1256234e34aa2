"""Steps of a history as it is asked for: how long they are, and when each begins. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400
#: Lengths that people read without reckoning; beyond the last one whole days.
_LENGTHS_S: Final = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, DAY_S)


@dataclass(frozen=True, slots=True)
class Grid:
    """Equal steps.

    :param start: seconds since the epoch, a multiple of ``step_s``.
    """

    start: int
    step_s: int
    steps: int

    @property
    def end(self) -> int:
        return self.start + self.step_s * self.steps

    def times(self) -> tuple[float, ...]:
        """Where each begins."""
        return tuple(float(self.start + self.step_s * number) for number in range(self.steps))


def grid_of(begin: float, end: float, points: int, least_s: int) -> Grid:
    """The shortest steps of which no more than ``points`` cover the time.

    :param begin: before ``end``; seconds since the epoch.
    :param points: two or more.
    :param least_s: no step is shorter: what is kept of that time has this length.
    """
    for length in _LENGTHS_S:
        if length >= least_s and (grid := _grid(begin, end, length)).steps <= points:
            return grid
    days = 1
    while (grid := _grid(begin, end, days * DAY_S)).steps > points:
        days = max(days + 1, math.ceil((end - begin) / (DAY_S * points)))
    return grid


def _grid(begin: float, end: float, step_s: int) -> Grid:
    start = math.floor(begin / step_s) * step_s
    return Grid(start, step_s, max(math.ceil((end - start) / step_s), 1))
