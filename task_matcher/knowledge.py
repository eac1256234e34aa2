"""What a pool knows of its machines' stability at one moment, and the three ways to ask it for P_c.

Kernel functions, as in :mod:`task_matcher.ages`: the questions take one machine or arrays of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from task_matcher.ages import BINS, Floats, Value, fill_lines
from task_matcher.curves import fill_curve
from task_matcher.landmarks import free_classes, lasts_size, room_lasts, standing
from task_matcher.probabilities import (
    Aged,
    Lines,
    aged,
    completes,
    fails,
    lives_and_wastes,
    lives_on,
    wasted_evenly_s,
)
from task_matcher.rolling import MOST_CORES, SHRINK, Integers, Rolling, add_running

#: Forms of P_c. Eq. 1: the next change is no shrink, or comes after the task.
NEXT_CHANGE: Final = 0
#: Eq. 3 (App. B.2): the next shrink, whatever lies between, comes after the task.
NEXT_SHRINK: Final = 1
#: Beyond the paper: machines that stood as this one kept the room (:mod:`task_matcher.landmarks`).
LANDMARK: Final = 2

#: What :class:`Knowledge` holds of direction NONE (-1: the last one).
_DIRECTIONS: Final = 3


class Standing(NamedTuple):
    """What is known of machines for tasks that leave them so many cores free, whatever their duration.

    One machine, or arrays of them; what the form of P_c does not use is 0.
    """

    #: Of the curve that the form goes by.
    aged: Aged
    #: Of the landmarks: where in the table, and how far along to the next class of elapsed time.
    place: Value
    along: Value
    #: How likely it is that what the form asks for, if it comes, takes the room; NaN where history is silent.
    fatal: Value


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
    _fill(knowledge.lines, knowledge.hazard, knowledge.area, knowledge.known)
    _fill(knowledge.open_lines, knowledge.open_hazard, knowledge.open_area, knowledge.open_known)
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
    machines = stand(knowledge, form, sized, direction, elapsed_s, free)
    failure, wasted = failures(knowledge, form, machines, duration_s)
    return 1.0 - failure, wasted


def stand(knowledge: Knowledge, form: int, sized: bool, direction: Value, elapsed_s: Value, free: Value) -> Standing:
    """The part of :func:`chances` that the task's duration has nothing to do with, to be asked once for many."""
    if form == LANDMARK:
        room = free if sized else free * 0.0
        place, along = standing(knowledge.classes, np.maximum(direction, 0), elapsed_s, room)
        # Every form has the same fields: kernels are of one type.
        nothing = along * 0.0
        return Standing(Aged(nothing, nothing, nothing, nothing), place, along, knowledge.certain[direction] + nothing)
    machines, known = aged(knowledge.open_lines if form == NEXT_SHRINK else knowledge.lines, elapsed_s)
    fatal = _fatal(knowledge, form, sized, direction, free) + known
    return Standing(machines, direction * 0, machines.area * 0.0, fatal)


def failures(knowledge: Knowledge, form: int, machines: Standing, duration_s: Value) -> tuple[Value, Value]:
    """``1 - P_c``, NaN where history is silent, and w of Eq. 2 in seconds.

    :param duration_s: not below 0.
    """
    if form == LANDMARK:
        lasts = room_lasts(knowledge.lasts, knowledge.totals[3], machines.place, machines.along, duration_s)
        failure = fails(machines.fatal, lasts)
        return failure, wasted_evenly_s(1.0 - failure, duration_s)
    lines = knowledge.open_lines if form == NEXT_SHRINK else knowledge.lines
    lives, wasted = lives_and_wastes(lines, machines.aged, duration_s)
    return fails(machines.fatal, lives), wasted


def _fatal(knowledge: Knowledge, form: int, sized: bool, direction: Value, free: Value) -> Value:
    """How likely the next change is a shrink (Eq. 1; certain by Eq. 3) that leaves the task no room."""
    likely = knowledge.certain[direction] if form == NEXT_SHRINK else knowledge.shrink[direction]
    if sized:
        likely = likely * knowledge.larger[np.int64(np.minimum(np.maximum(free, 0.0), MOST_CORES + 0.0))]
    return likely


def _by_landmarks(
    knowledge: Knowledge, sized: bool, direction: Value, elapsed_s: Value, duration_s: Value, free: Value
) -> Value:
    machines = stand(knowledge, LANDMARK, sized, direction, elapsed_s, free)
    lasts = room_lasts(knowledge.lasts, knowledge.totals[3], machines.place, machines.along, duration_s)
    return completes(machines.fatal, lasts)
