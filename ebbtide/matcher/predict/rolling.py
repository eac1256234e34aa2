"""Counts of a pool's core changes of the past D, kept up to date change by change (Agarwal et al. 2023, §3.1.1).

Kernel functions over `Rolling`, a bundle of arrays that numba compiles as it is. The past D is cut into slices;
a change is counted in the current one, in O(1), and a slice that has grown too old is taken away as a whole. At each
cut the intervals that still run are counted up to it, so the window is exact to a slice.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbtide.matcher.predict.ages import BINS, Floats, position
from ebbtide.matcher.predict.curves import add_all_watched, add_watched

Integers = NDArray[np.int64]

GROWTH: Final = 0
SHRINK: Final = 1
#: Of a machine that is not there, or of which no change is known.
NONE: Final = -1

#: Slices of the window.
SLICES: Final = 24
#: Shrinks by this many cores and more are counted together.
MOST_CORES: Final = 256
#: Growths in a row whose times to the next shrink are followed; more in a row are rare, and the first count.
FOLLOWED: Final = 16
_WIDTH: Final = BINS + 2


class Rolling(NamedTuple):
    """Counts of one pool. Rows of the arrays per machine are the caller's; all times in seconds."""

    #: [end of the current slice, seconds of a slice, number of the current slice's row, last time rolled to].
    clock: Floats
    #: Per machine: last change, how far its running interval is counted (-1: not yet), direction of the last change.
    last_s: Floats
    counted_s: Floats
    direction: Integers
    #: Per machine and change since its last shrink: when, and how far it is counted (Eq. 3); how many there are.
    opened_s: Floats
    opened_counted_s: Floats
    opened: Integers
    #: Per slice and direction x: who was watched at which age (`matcher.predict.curves.add_watched`).
    entered: Floats
    #: Per slice, direction x, direction of the change that followed, and age: how many intervals ended.
    ended: Floats
    #: Per slice: shrinks by how many whole cores.
    sizes: Floats
    #: Per slice: the same as ``entered`` and ``ended`` for the time from any change to the next shrink (Eq. 3).
    open_entered: Floats
    open_ended: Floats
    #: Sums over the slices, and over what was known before (the prior).
    all_entered: Floats
    all_ended: Floats
    all_sizes: Floats
    all_open_entered: Floats
    all_open_ended: Floats


def rolling(machines: int, window_s: float, now_s: float) -> Rolling:
    """Counts of nothing yet, with room for so many machines."""
    slice_s = window_s / SLICES
    return Rolling(
        np.array([now_s + slice_s, slice_s, 0.0, now_s]),
        np.zeros(machines),
        np.full(machines, -1.0),
        np.full(machines, NONE, np.int64),
        np.zeros((machines, FOLLOWED)),
        np.full((machines, FOLLOWED), -1.0),
        np.zeros(machines, np.int64),
        np.zeros((SLICES + 1, 2, _WIDTH)),
        np.zeros((SLICES + 1, 2, 2, BINS)),
        np.zeros((SLICES + 1, MOST_CORES + 1)),
        np.zeros((SLICES + 1, _WIDTH)),
        np.zeros((SLICES + 1, BINS)),
        np.zeros((2, _WIDTH)),
        np.zeros((2, 2, BINS)),
        np.zeros(MOST_CORES + 1),
        np.zeros(_WIDTH),
        np.zeros(BINS),
    )


def begin(state: Rolling, machine: int, at_s: float, direction: int) -> None:
    """A machine stands at a change with this direction; its interval begins. A new machine has just grown."""
    state.last_s[machine] = at_s
    state.counted_s[machine] = -1.0
    state.direction[machine] = direction
    count = state.opened[machine]
    if count < FOLLOWED:
        state.opened_s[machine, count] = at_s
        state.opened_counted_s[machine, count] = -1.0
        state.opened[machine] = count + 1


def leave(state: Rolling, machine: int, at_s: float) -> None:
    """A machine goes without a change: by its owner. Its interval stays incomplete."""
    if state.direction[machine] != NONE:
        _watch(state, machine, at_s, True)
        _watch_opened(state, machine, at_s, True)
    state.direction[machine] = NONE
    state.opened[machine] = 0


def change(state: Rolling, machine: int, at_s: float, direction: int, cores: float, gone: bool) -> None:
    """A machine's cores changed: its interval ends, and the next one begins unless it is gone.

    :param cores: by how many whole cores.
    :param gone: with this change the machine is taken away (a shrink to 0).
    """
    before = state.direction[machine]
    row = int(state.clock[2])
    if before != NONE:
        _watch(state, machine, at_s, False)
        index = np.int64(position(at_s - state.last_s[machine]))
        state.ended[row, before, direction, index] += 1.0
        state.all_ended[before, direction, index] += 1.0
        if direction == SHRINK:
            size = min(max(int(cores + 0.5), 0), MOST_CORES)
            state.sizes[row, size] += 1.0
            state.all_sizes[size] += 1.0
            _watch_opened(state, machine, at_s, False)
    if direction == SHRINK:
        state.opened[machine] = 0
    if gone:
        state.direction[machine] = NONE
        state.opened[machine] = 0
    else:
        begin(state, machine, at_s, direction)


def roll(state: Rolling, now_s: float) -> None:
    """Let time go on: slices that are too old are forgotten. Never backwards."""
    clock = state.clock
    clock[3] = max(clock[3], now_s)
    cuts = 0
    while clock[0] <= now_s:
        if cuts > SLICES:
            # All has been forgotten already: one long pause is not cut into thousands.
            clock[0] += np.floor((now_s - clock[0]) / clock[1]) * clock[1]
        cuts += 1
        _count_running(state, clock[0])
        row = (int(clock[2]) + 1) % (SLICES + 1)
        clock[2] = row
        clock[0] += clock[1]
        _forget_slice(state, row)


def _forget_slice(state: Rolling, row: int) -> None:
    """Take away what was counted in one slice."""
    state.all_entered[:] -= state.entered[row]
    state.entered[row] = 0.0
    state.all_ended[:] -= state.ended[row]
    state.ended[row] = 0.0
    state.all_open_entered[:] -= state.open_entered[row]
    state.open_entered[row] = 0.0
    state.all_open_ended[:] -= state.open_ended[row]
    state.open_ended[row] = 0.0
    state.all_sizes[:] -= state.sizes[row]
    state.sizes[row] = 0.0


def add_running(state: Rolling, now_s: float, entered: Floats, opened: Floats) -> None:
    """Count the intervals that run now, up to now, in copies of the sums: to be asked, not to be kept.

    :param entered: a copy of ``all_entered``; changed.
    :param opened: a copy of ``all_open_entered``; changed.
    """
    for x in range(2):
        rows = np.flatnonzero(state.direction == x)
        counted_s = state.counted_s[rows]
        add_all_watched(entered[x], counted_s, np.maximum(now_s - state.last_s[rows], counted_s))
    places = _opened_places(state)
    counted_s = state.opened_counted_s.ravel()[places]
    add_all_watched(opened, counted_s, np.maximum(now_s - state.opened_s.ravel()[places], counted_s))


def _count_running(state: Rolling, at_s: float) -> None:
    """Count the intervals that run in the current slice, up to its end."""
    entered, opened = np.zeros((2, _WIDTH)), np.zeros(_WIDTH)
    add_running(state, at_s, entered, opened)
    row = int(state.clock[2])
    state.entered[row] += entered
    state.all_entered[:] += entered
    state.open_entered[row] += opened
    state.all_open_entered[:] += opened
    rows = np.flatnonzero(state.direction != NONE)
    state.counted_s[rows] = np.maximum(np.maximum(at_s - state.last_s[rows], 0.0), state.counted_s[rows])
    places, counted_s = _opened_places(state), state.opened_counted_s.ravel()
    counted_s[places] = np.maximum(np.maximum(at_s - state.opened_s.ravel()[places], 0.0), counted_s[places])


def _opened_places(state: Rolling) -> Integers:
    """Where in ``opened_s``, as one row, the changes since the last shrinks of machines stand."""
    return np.flatnonzero(np.arange(FOLLOWED) < state.opened.reshape(-1, 1))


def _watch(state: Rolling, machine: int, at_s: float, censored: bool) -> None:
    counted_s = state.counted_s[machine]
    age_s = max(at_s - state.last_s[machine], 0.0)
    if censored:
        age_s = max(age_s, counted_s)
    row, x = int(state.clock[2]), state.direction[machine]
    add_watched(state.entered[row, x], max(counted_s, 0.0), counted_s < 0.0, age_s, censored, 1.0)
    add_watched(state.all_entered[x], max(counted_s, 0.0), counted_s < 0.0, age_s, censored, 1.0)
    state.counted_s[machine] = age_s


def _watch_opened(state: Rolling, machine: int, at_s: float, censored: bool) -> None:
    row = int(state.clock[2])
    for index in range(state.opened[machine]):
        counted_s = state.opened_counted_s[machine, index]
        age_s = max(at_s - state.opened_s[machine, index], 0.0)
        if censored:
            age_s = max(age_s, counted_s)
        else:
            where = np.int64(position(age_s))
            state.open_ended[row, where] += 1.0
            state.all_open_ended[where] += 1.0
        add_watched(state.open_entered[row], max(counted_s, 0.0), counted_s < 0.0, age_s, censored, 1.0)
        add_watched(state.all_open_entered, max(counted_s, 0.0), counted_s < 0.0, age_s, censored, 1.0)
        state.opened_counted_s[machine, index] = age_s
