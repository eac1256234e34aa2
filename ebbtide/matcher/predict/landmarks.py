"""Landmarks: how long the room of machines lasted that stood as one stands now. The table of the answers.

Eq. 1 of Agarwal et al. 2023 asks for the next change only, and takes every shrink for fatal. Here the size of shrinks
counts, and shrinks after growths: each machine is looked at every quarter of an hour: time e since the last change,
cores then. How many those are says more than which way they changed last: machines of full servers are small. From
then on it is followed for when it has first lost more than f cores of those, for several f ("landmarking" of survival
analysis; `matcher.predict.period` counts). The share of such landmarks whose room lasted longer than d is the
probability that a task of duration d survives that leaves f cores free. Nothing is assumed of how changes follow on
each other.

Kernel functions, as in `matcher.predict.rolling`.
"""

from __future__ import annotations

from typing import Final

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
#: Classes of cores begin there, and at 0.
SIZE_EDGES: Final = (3.0, 6.0, 12.0, 24.0)
SIZES: Final = len(SIZE_EDGES) + 1
#: Cores of a machine of which it is not known how many it will have: it is one of the pool's.
ANY_CORES: Final = -1.0
#: Landmarks below which nothing is known.
LEAST: Final = 20.0


def lasts_size() -> int:
    """How long the table is: P(room of f lasts longer than d) by class of cores, of elapsed time, f, step of d.

    Behind the classes of cores stands that of all machines.
    """
    return (SIZES + 1) * AGES * len(FREE) * (STEPS + 1)


def free_classes() -> Integers:
    """The class of each number of free cores from 0 to the largest that matters."""
    return np.searchsorted(np.array(FREE), np.arange(FREE[-1] + 1), side="right").astype(np.int64) - 1


def size_class(cores: Value) -> Value:
    """The class of a machine's cores; of `ANY_CORES` that of all machines. For one machine or arrays of them."""
    found = (cores < 0.0) * SIZES
    for at in SIZE_EDGES:
        found = found + (cores >= at)
    return found


def standing(classes: Integers, free: Value, cores: Value) -> Value:
    """Where in the table of `room_lasts` machines begin of their cores that leave so many free.

    :param free: cores that are left free when the task runs; below 0 counts as 0.
    :param cores: that the machine has, or `ANY_CORES`.
    """
    f = classes[np.int64(np.minimum(np.maximum(free, 0.0), FREE[-1] + 0.0))]
    return (size_class(cores) * (AGES * len(FREE)) + f) * (STEPS + 1)


def beyond(elapsed_s: Value) -> tuple[Value, Value]:
    """How much further in the table those stand that have not changed for so long, and how far along to the next."""
    age = np.minimum(np.maximum(position(elapsed_s) / PER_AGE - 0.5, 0.0), AGES - 1.001)
    low = np.int64(age)
    return low * (len(FREE) * (STEPS + 1)), age - low


def room_lasts(table: Floats, horizon_s: float, place: Value, along: Value, duration_s: Value) -> Value:
    """Probability that a machine keeps what a task needs: works alike on one machine and on arrays of them.

    Beyond the horizon failures go on at their rate within it.

    :param place: of `standing` and `beyond`, as is ``along``.
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


def step_s(step: int) -> float:
    """The duration at which a step begins, in seconds."""
    return edge(step * PER_STEP)
