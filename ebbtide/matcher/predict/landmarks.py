"""Landmarks: how long the room of machines lasted that stood as one stands now.

Eq. 1 of Agarwal et al. 2023 asks for the next change only, and takes every shrink for fatal. Here the size of shrinks
counts, and shrinks after growths: each machine is looked at every quarter of an hour: last direction x, time e since
the last change, cores then. The horizon later it is known when the machine had first lost more than f cores of those,
for several f; the share of such landmarks whose room lasted longer than d is the probability that a task of duration d
survives that leaves f cores free ("landmarking" of survival analysis). Since every landmark is counted whole, when its
horizon is over, none is censored, and nothing is assumed of how changes follow on each other.

Kernel functions over `Landmarks`, as in `matcher.predict.rolling`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ebbtide.matcher.predict.ages import BINS, Floats, Value, edge, position
from ebbtide.matcher.predict.rolling import Integers

#: Classes of elapsed time: two to a doubling.
AGES: Final = 40
PER_AGE: Final = BINS / AGES
#: Steps of duration: four to a doubling.
STEPS: Final = 80
PER_STEP: Final = BINS / STEPS
#: Cores that may be lost without harm; what a task leaves free counts as the next lower one.
FREE: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SLICES: Final = 6
#: Changes of one machine that are remembered: with more within a horizon its landmarks are left out.
REMEMBERED: Final = 128
#: A class with few landmarks leans on the average of both directions by so many, and that on the pool's.
LEANS: Final = 8.0
#: Landmarks below which nothing is known.
LEAST: Final = 20.0


class Landmarks(NamedTuple):
    """Landmarks of one pool. Rows of the arrays per machine are the caller's; times in seconds."""

    #: [next look, seconds between looks, horizon, end of the current slice, seconds of a slice, row].
    clock: Floats
    #: Per machine, the last changes: when, cores after (-1: gone by its owner), direction; how many there ever were.
    at_s: Floats
    cores: Floats
    direction: Integers
    written: Integers
    #: Per slice, direction, class of elapsed time: how many landmarks; and per free cores, step of time: failures.
    counts: Floats
    failures: Floats
    all_counts: Floats
    all_failures: Floats


def landmarks(machines: int, window_s: float, horizon_s: float, every_s: float, now_s: float) -> Landmarks:
    """Of nothing yet, with room for so many machines."""
    slice_s = window_s / SLICES
    return Landmarks(
        np.array([now_s + every_s, every_s, horizon_s, now_s + slice_s, slice_s, 0.0]),
        np.zeros((machines, REMEMBERED)),
        np.zeros((machines, REMEMBERED)),
        np.zeros((machines, REMEMBERED), np.int64),
        np.zeros(machines, np.int64),
        np.zeros((SLICES + 1, 2, AGES)),
        np.zeros((SLICES + 1, 2, AGES, len(FREE), STEPS)),
        np.zeros((2, AGES)),
        np.zeros((2, AGES, len(FREE), STEPS)),
    )


def remember(state: Landmarks, machine: int, at_s: float, cores: float, direction: int) -> None:
    """A machine has so many cores from now on; -1: its owner took it away, and its landmarks say nothing."""
    index = state.written[machine] % REMEMBERED
    state.at_s[machine, index] = at_s
    state.cores[machine, index] = cores
    state.direction[machine, index] = direction
    state.written[machine] += 1


def look(state: Landmarks, now_s: float) -> None:
    """Count the landmarks whose horizon is over by now, and forget slices that are too old."""
    clock = state.clock
    if now_s - clock[0] > 2.0 * SLICES * clock[4]:
        # A pause longer than all that is kept.
        clock[0] += np.floor((now_s - clock[0]) / clock[1] - SLICES * clock[4] / clock[1]) * clock[1]
    while clock[0] <= now_s:
        while clock[3] <= clock[0]:
            _forget(state)
        for machine in range(len(state.written)):
            if state.written[machine] > 0:
                _count(state, machine, clock[0] - clock[2])
        clock[0] += clock[1]


def fill_lasts(state: Landmarks, lasts: Floats) -> float:
    """How likely room lasts, from the counts.

    :param lasts: out: ``P(room of f lasts longer than d)`` by direction, class of elapsed time, free cores and step of
        duration, flat, of `lasts_size`; NaN where fewer than `LEAST` landmarks are known in all.
    :returns: how many landmarks there are.
    """
    total = np.sum(state.all_counts)
    if total < LEAST:
        lasts[:] = np.nan
        return float(total)
    for f in range(len(FREE)):
        pooled = np.zeros(STEPS)
        for age in range(AGES):
            pooled += state.all_failures[0, age, f] + state.all_failures[1, age, f]
        pooled /= total
        for age in range(AGES):
            # Neighbours count one half, so that one class more or less makes no jump.
            counts = np.zeros(2)
            failures = np.zeros((2, STEPS))
            for x in range(2):
                for other in range(max(age - 1, 0), min(age + 2, AGES)):
                    weight = 1.0 if other == age else 0.5
                    counts[x] += weight * state.all_counts[x, other]
                    failures[x] += weight * state.all_failures[x, other, f]
            share = (failures[0] + failures[1] + LEANS * pooled) / (counts[0] + counts[1] + LEANS)
            for x in range(2):
                first = ((x * AGES + age) * len(FREE) + f) * (STEPS + 1)
                lasts[first] = 1.0
                failed = np.cumsum((failures[x] + LEANS * share) / (counts[x] + LEANS))
                lasts[first + 1 : first + STEPS + 1] = np.fmax(1.0 - failed, 0.0)
    return float(total)


def lasts_size() -> int:
    """How long the array of `fill_lasts` is."""
    return 2 * AGES * len(FREE) * (STEPS + 1)


def free_classes() -> Integers:
    """The class of each number of free cores from 0 to the largest that matters."""
    return np.searchsorted(np.array(FREE), np.arange(FREE[-1] + 1), side="right").astype(np.int64) - 1


def standing(classes: Integers, direction: Value, elapsed_s: Value, free: Value) -> tuple[Value, Value]:
    """The part of `room_lasts` that the task's duration has nothing to do with: where to look, and how far along.

    :param direction: of the last change, 0 or 1.
    :param free: cores that are left free when the task runs; below 0 counts as 0.
    """
    age = np.minimum(np.maximum(position(elapsed_s) / PER_AGE - 0.5, 0.0), AGES - 1.001)
    low = np.int64(age)
    f = classes[np.int64(np.minimum(np.maximum(free, 0.0), FREE[-1] + 0.0))]
    return ((direction * AGES + low) * len(FREE) + f) * (STEPS + 1), age - low


def room_lasts(table: Floats, horizon_s: float, place: Value, along: Value, duration_s: Value) -> Value:
    """Probability that a machine keeps what a task needs: works alike on one machine and on arrays of them.

    Beyond the horizon failures go on at their rate within it.

    :param place: of `standing`, as is ``along``.
    """
    step = position(np.minimum(duration_s, horizon_s)) / PER_STEP
    below = np.int64(step)
    first = place + below
    second = first + len(FREE) * (STEPS + 1)
    part = step - below
    low, high = table[first], table[second]
    here = low + part * (table[first + 1] - low)
    there = high + part * (table[second + 1] - high)
    probability = here + along * (there - here)
    return probability ** np.maximum(duration_s / horizon_s, 1.0)


def _forget(state: Landmarks) -> None:
    row = (int(state.clock[5]) + 1) % (SLICES + 1)
    state.clock[5] = row
    state.clock[3] += state.clock[4]
    for x in range(2):
        for age in range(AGES):
            if state.counts[row, x, age] == 0.0:
                continue
            state.all_counts[x, age] -= state.counts[row, x, age]
            state.counts[row, x, age] = 0.0
            for f in range(len(FREE)):
                for step in range(STEPS):
                    state.all_failures[x, age, f, step] -= state.failures[row, x, age, f, step]
                    state.failures[row, x, age, f, step] = 0.0


def _count(state: Landmarks, machine: int, at_s: float) -> None:
    """One machine as it stood at a moment whose horizon is over."""
    count = int(state.written[machine])
    oldest = max(count - REMEMBERED, 0)
    start = count - 1
    while start >= oldest and state.at_s[machine, start % REMEMBERED] > at_s:
        start -= 1
    if start < oldest:
        return
    slot = start % REMEMBERED
    cores = state.cores[machine, slot]
    if cores < 1.0:
        return
    until_s = at_s + state.clock[2]
    for other in range(start + 1, count):
        if state.at_s[machine, other % REMEMBERED] <= until_s and state.cores[machine, other % REMEMBERED] < 0.0:
            return
    row = int(state.clock[5])
    x = state.direction[machine, slot]
    age = min(int(position(at_s - state.at_s[machine, slot]) / PER_AGE), AGES - 1)
    state.counts[row, x, age] += 1.0
    state.all_counts[x, age] += 1.0
    f = 0
    for other in range(start + 1, count):
        later = other % REMEMBERED
        after_s = state.at_s[machine, later] - at_s
        if after_s > state.clock[2]:
            break
        while f < len(FREE) and cores - state.cores[machine, later] > FREE[f]:
            step = min(int(position(after_s) / PER_STEP), STEPS - 1)
            state.failures[row, x, age, f, step] += 1.0
            state.all_failures[x, age, f, step] += 1.0
            f += 1


def step_s(step: int) -> float:
    """The duration at which a step begins, in seconds."""
    return edge(step * PER_STEP)
