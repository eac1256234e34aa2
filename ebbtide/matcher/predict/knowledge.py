"""Curves and tables of a pool's stability at one moment, from which P_c is read.

Kernel functions, as in `matcher.predict.ages`. What is asked of it is in `matcher.predict.completion_probability`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ebbtide.matcher.predict.ages import BINS, Floats, fill_lines
from ebbtide.matcher.predict.curves import fill_curve
from ebbtide.matcher.predict.landmarks import free_classes, lasts_size
from ebbtide.matcher.predict.rolling import MOST_CORES, SHRINK, Integers, Rolling, add_running

#: What `Knowledge` holds of direction NONE (-1: the last one).
_DIRECTIONS: Final = 3


class Lines(NamedTuple):
    """A curve by `matcher.predict.ages.fill_lines`. Shapes (BINS + 2,)."""

    hazard: Floats
    hazard_rises: Floats
    area: Floats
    area_rises: Floats
    #: 0, or NaN for bins of ages of which nothing is known.
    known: Floats


class Knowledge(NamedTuple):
    """Curves and tables that questions are answered from."""

    #: Of the time between changes: cumulative hazard, area under survival, 0 or NaN by age.
    hazard: Floats
    area: Floats
    known: Floats
    #: The same for the time from any change to the next shrink.
    open_hazard: Floats
    open_area: Floats
    open_known: Floats
    #: P_s(x), by direction; NaN where nothing has followed.
    shrink: Floats
    #: How likely a shrink takes more than so many cores.
    larger: Floats
    #: [how many intervals ended, how many of the time to the next shrink, how many landmarks, horizon in seconds].
    totals: Floats
    #: `matcher.predict.period.fill_lasts_of_period`, and the class of each number of free cores.
    lasts: Floats
    classes: Integers
    #: 1 for the two directions, NaN for none.
    certain: Floats
    #: The two curves as lines.
    lines: Lines
    open_lines: Lines


def nothing_known(horizon_s: float) -> Knowledge:
    """Of an empty pool."""
    width = BINS + 2
    return Knowledge(
        np.zeros(width),
        np.zeros(width),
        np.full(width, np.nan),
        np.zeros(width),
        np.zeros(width),
        np.full(width, np.nan),
        np.full(_DIRECTIONS, np.nan),
        np.ones(MOST_CORES + 2),
        np.array([0.0, 0.0, 0.0, horizon_s]),
        np.full(lasts_size(), np.nan),
        free_classes(),
        np.array([1.0, 1.0, np.nan]),
        _unknown_lines(),
        _unknown_lines(),
    )


def _unknown_lines() -> Lines:
    width = BINS + 2
    return Lines(np.zeros(width), np.zeros(width), np.zeros(width), np.zeros(width), np.full(width, np.nan))


def _fill(lines: Lines, hazard: Floats, area: Floats, known: Floats) -> None:
    fill_lines(hazard, lines.hazard, lines.hazard_rises)
    fill_lines(area, lines.area, lines.area_rises)
    lines.known[:] = known


def learn(knowledge: Knowledge, state: Rolling, now_s: float, censored: bool) -> None:
    """Bring the curves up to date: O(bins + machines), whatever the number of changes.

    :param censored: whether intervals that are still running, or were not seen from their beginning, count for the
        ages at which they were watched; without, only completed intervals count, each whole (as
        Agarwal et al. 2023, §3.1.1).
    """
    entered = state.all_entered.copy()
    opened = state.all_open_entered.copy()
    ended = state.all_ended[0, 0] + state.all_ended[0, 1] + state.all_ended[1, 0] + state.all_ended[1, 1]
    if censored:
        add_running(state, now_s, entered, opened)
        pooled = entered[0] + entered[1]
    else:
        pooled = np.zeros(BINS + 2)
        pooled[0] = np.sum(ended)
        pooled[1 : BINS + 1] -= ended
        opened[:] = 0.0
        opened[0] = np.sum(state.all_open_ended)
        opened[1 : BINS + 1] -= state.all_open_ended
    totals = knowledge.totals
    totals[0] = fill_curve(pooled, ended, censored, knowledge.hazard, knowledge.area, knowledge.known)
    totals[1] = fill_curve(
        opened, state.all_open_ended, censored, knowledge.open_hazard, knowledge.open_area, knowledge.open_known
    )
    _fill(knowledge.lines, knowledge.hazard, knowledge.area, knowledge.known)
    _fill(knowledge.open_lines, knowledge.open_hazard, knowledge.open_area, knowledge.open_known)
    for x in range(2):
        shrinks = np.sum(state.all_ended[x, SHRINK])
        changes = shrinks + np.sum(state.all_ended[x, 0])
        knowledge.shrink[x] = shrinks / changes if changes > 0.0 else np.nan
    shrinks = np.sum(state.all_sizes)
    if shrinks > 0.0:
        knowledge.larger[: MOST_CORES + 1] = 1.0 - np.cumsum(state.all_sizes) / shrinks
