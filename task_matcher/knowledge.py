"""What a pool knows of its machines' stability at one moment, and the three ways to ask it for P_c.

Kernel functions, as in :mod:`task_matcher.ages`: the questions take one machine or arrays of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from task_matcher.ages import BINS, Floats, Value
from task_matcher.curves import fill_curve
from task_matcher.landmarks import free_classes, lasts_size, room_lasts
from task_matcher.probabilities import completes, lives_and_wastes, lives_on, wasted_evenly_s
from task_matcher.rolling import MOST_CORES, SHRINK, Integers, Rolling, add_running

#: Forms of P_c. Eq. 1: the next change is no shrink, or comes after the task.
NEXT_CHANGE: Final = 0
#: Eq. 3 (App. B.2): the next shrink, whatever lies between, comes after the task.
NEXT_SHRINK: Final = 1
#: Beyond the paper: machines that stood as this one kept the room (:mod:`task_matcher.landmarks`).
LANDMARK: Final = 2

#: What :class:`Knowledge` holds of direction NONE (-1: the last one).
_DIRECTIONS: Final = 3


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
    #: :func:`task_matcher.landmarks.fill_lasts`, and the class of each number of free cores.
    lasts: Floats
    classes: Integers
    #: 1 for the two directions, NaN for none.
    certain: Floats


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
    )


def learn(knowledge: Knowledge, state: Rolling, now_s: float, censored: bool) -> None:
    """Bring the curves up to date: O(bins + machines), whatever the number of changes.

    :param censored: whether intervals that are still running, or were not seen from their beginning, count for the
        ages at which they were watched; without, only completed intervals count, each whole (as seed 000 §3.1.1).
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
    for x in range(2):
        shrinks = np.sum(state.all_ended[x, SHRINK])
        changes = shrinks + np.sum(state.all_ended[x, 0])
        knowledge.shrink[x] = shrinks / changes if changes > 0.0 else np.nan
    shrinks = np.sum(state.all_sizes)
    if shrinks > 0.0:
        knowledge.larger[: MOST_CORES + 1] = 1.0 - np.cumsum(state.all_sizes) / shrinks


def probability(
    knowledge: Knowledge, form: int, sized: bool, direction: Value, elapsed_s: Value, duration_s: Value, free: Value
) -> Value:
    """P_c of a task of a duration on machines with these last changes; NaN where history is silent.

    :param form: NEXT_CHANGE, NEXT_SHRINK or LANDMARK.
    :param sized: whether a shrink that leaves the task room is survived: one of at most ``free`` cores.
    :param direction: of the last change; NONE (-1): no change is known.
    """
    if form == LANDMARK:
        return _by_landmarks(knowledge, sized, direction, elapsed_s, duration_s, free)
    if form == NEXT_SHRINK:
        lives = lives_on(knowledge.open_hazard, knowledge.open_known, elapsed_s, duration_s)
    else:
        lives = lives_on(knowledge.hazard, knowledge.known, elapsed_s, duration_s)
    return completes(_fatal(knowledge, form, sized, direction, free), lives)


def chances(
    knowledge: Knowledge, form: int, sized: bool, direction: Value, elapsed_s: Value, duration_s: Value, free: Value
) -> tuple[Value, Value]:
    """What :func:`probability` says, and w of Eq. 2 in seconds: how long a task runs that does not complete."""
    if form == LANDMARK:
        p = _by_landmarks(knowledge, sized, direction, elapsed_s, duration_s, free)
        return p, wasted_evenly_s(p, duration_s)
    if form == NEXT_SHRINK:
        lives, wasted = lives_and_wastes(
            knowledge.open_hazard, knowledge.open_area, knowledge.open_known, elapsed_s, duration_s
        )
    else:
        lives, wasted = lives_and_wastes(knowledge.hazard, knowledge.area, knowledge.known, elapsed_s, duration_s)
    return completes(_fatal(knowledge, form, sized, direction, free), lives), wasted


def _fatal(knowledge: Knowledge, form: int, sized: bool, direction: Value, free: Value) -> Value:
    """How likely the next change is a shrink (Eq. 1; certain by Eq. 3) that leaves the task no room."""
    likely = knowledge.certain[direction] if form == NEXT_SHRINK else knowledge.shrink[direction]
    if sized:
        likely = likely * knowledge.larger[np.int64(np.minimum(np.maximum(free, 0.0), MOST_CORES + 0.0))]
    return likely


def _by_landmarks(
    knowledge: Knowledge, sized: bool, direction: Value, elapsed_s: Value, duration_s: Value, free: Value
) -> Value:
    room = free if sized else free * 0.0
    steady = room_lasts(
        knowledge.lasts, knowledge.classes, knowledge.totals[3], np.maximum(direction, 0), elapsed_s, duration_s, room
    )
    return steady * knowledge.certain[direction]
