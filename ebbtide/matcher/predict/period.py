"""Counts of how long room lasts, by what was seen in the past day: landmarks whose time counts step by step.

Each step of a landmark's time counts once it is over: who still had the room when it began, and who lost it in it. The
chance of each step is then that of the past day, whichever landmark it came from, and the product of these lasts (a
period life table, as against one by cohorts, which knows what came of machines that stood so hours ago). What an owner
takes away counts up to then.

Landmarks that are alike are few, and those of one machine hang together. So machines of
about as many cores lean on their neighbours in age, those on a wider neighbourhood, that on machines of any size, and
these on theirs and on the whole pool likewise, each as if so many landmarks had said the same.

Kernel functions over `Period`, as in `matcher.predict.rolling`; the table that they fill is asked by
`matcher.predict.landmarks.room_lasts`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ebbtide.matcher.predict.ages import PER_DOUBLING, Floats, edge, position
from ebbtide.matcher.predict.landmarks import AGES, FREE, LEAST, PER_AGE, PER_STEP, SIZES, STEPS, size_class
from ebbtide.matcher.predict.rolling import NONE, Integers

#: Slices of the window: it is exact to one.
SLICES: Final = 12
#: Neighbours in age on either side, from the widest to the closest; weights fall evenly to 0 beyond them.
WIDTHS: Final = (12, 6, 3)
#: Landmarks that what a class leans on counts as. From pools other than those that are shown
#: (docs/internals/matching.md).
LEANS: Final = 100.0


class Period(NamedTuple):
    """Landmarks of one pool. Rows of the arrays per machine are the caller's; times in seconds."""

    #: [next look, seconds between looks, end of the current slice, seconds of a slice, row, looks so far].
    clock: Floats
    #: Per step of time: at which look after its beginning a landmark has it behind itself.
    due: Integers
    #: When the landmark of each place in the round of looks began.
    looked_s: Floats
    #: Per machine: last change, cores since then (-1: not there), its direction.
    stood_s: Floats
    stood_cores: Floats
    stood_direction: Integers
    #: Per machine and landmark: class (of cores and age; -1: none), cores, how many of FREE are lost, how many of
    #: these are counted, and in which step each was lost.
    noted: Integers
    noted_cores: Floats
    lost: Integers
    counted: Integers
    lost_step: Integers
    #: Per slice, class (of cores, then elapsed time) and cell (step, then free cores: rows of one dimension compile
    #: quickly): who had the room when the steps that are due at one look began, at the first of them; who lost it.
    watched: Floats
    failed: Floats
    #: Sums over the slices, and over what was known before (the prior).
    all_watched: Floats
    all_failed: Floats


def period(machines: int, window_s: float, horizon_s: float, every_s: float, now_s: float) -> Period:
    """Of nothing yet, with room for so many machines."""
    slice_s = window_s / SLICES
    steps = min(int(position(horizon_s) / PER_STEP) + 1, STEPS)
    due = np.array([np.ceil(edge((step + 1) * PER_STEP) / every_s) for step in range(steps)]).astype(np.int64)
    places = int(due[-1]) + 1
    shape = (SIZES * AGES, steps * len(FREE))
    return Period(
        np.array([now_s + every_s, every_s, now_s + slice_s, slice_s, 0.0, 0.0]),
        due,
        np.zeros(places),
        np.zeros(machines),
        np.full(machines, -1.0),
        np.full(machines, NONE, np.int64),
        np.full((machines, places), -1, np.int64),
        np.zeros((machines, places)),
        np.zeros((machines, places), np.int64),
        np.zeros((machines, places), np.int64),
        np.zeros((machines, places, len(FREE)), np.int64),
        np.zeros((SLICES + 1, *shape)),
        np.zeros((SLICES + 1, *shape)),
        np.zeros(shape),
        np.zeros(shape),
    )


def no_period() -> Period:
    """Arrays of the right kinds, and nothing in them: where landmarks are counted otherwise."""
    return Period(
        np.zeros(6),
        np.zeros(0, np.int64),
        np.zeros(0),
        np.zeros(0),
        np.zeros(0),
        np.zeros(0, np.int64),
        np.zeros((0, 0), np.int64),
        np.zeros((0, 0)),
        np.zeros((0, 0), np.int64),
        np.zeros((0, 0), np.int64),
        np.zeros((0, 0, 0), np.int64),
        np.zeros((0, 0, 0)),
        np.zeros((0, 0, 0)),
        np.zeros((0, 0)),
        np.zeros((0, 0)),
    )


def stands(state: Period, machine: int, at_s: float, cores: float, direction: int) -> None:
    """A machine has so many cores from now on; -1: its owner took it away, and its landmarks end here.

    The looks up to now have been taken (`watch`).
    """
    state.stood_s[machine] = at_s
    state.stood_cores[machine] = cores
    state.stood_direction[machine] = direction
    for place in range(len(state.looked_s)):
        if state.noted[machine, place] < 0:
            continue
        after_s = at_s - state.looked_s[place]
        if cores < 0.0 or after_s < 0.0:
            # Also one that was noted before the news of an older change came: the machine did not stand so.
            _end(state, machine, place, at_s)
            continue
        before = state.lost[machine, place]
        lost = before
        while lost < len(FREE) and state.noted_cores[machine, place] - cores > FREE[lost]:
            state.lost_step[machine, place, lost] = int(position(after_s) / PER_STEP)
            lost += 1
        if lost > before:
            state.lost[machine, place] = lost
            _count_late(state, machine, place)


def leaves(state: Period, machine: int) -> None:
    """A row is given up: what its machine taught stays."""
    state.stood_direction[machine] = NONE
    state.noted[machine] = -1


def watch(state: Period, now_s: float) -> None:
    """Take the looks up to now: count the steps that are over, note how machines stand, forget slices too old."""
    clock = state.clock
    if now_s - clock[0] > 2.0 * SLICES * clock[3]:
        # A pause longer than all that is kept.
        clock[0] += np.floor((now_s - clock[0]) / clock[1]) * clock[1]
        state.noted[:] = -1
        # Nor is it cut into its slices, which may be thousands: so many are all that there are.
        clock[2] += (np.floor((clock[0] - clock[2]) / clock[3]) - SLICES) * clock[3]
    places = len(state.looked_s)
    # A manager that starts with no machine on record looks back over days, and there is nothing to see.
    empty = not np.any(state.noted >= 0) and not np.any(state.stood_direction != NONE)
    while clock[0] <= now_s:
        while clock[2] <= clock[0]:
            _forget(state)
        looks = int(clock[5])
        first = 0 if not empty else len(state.due)
        while first < len(state.due):
            end = first + 1
            while end < len(state.due) and state.due[end] == state.due[first]:
                end += 1
            place = (looks - state.due[first]) % places
            _count_all(state, place, first, end)
            first = end
        place = looks % places
        state.looked_s[place] = clock[0]
        if not empty:
            _note_all(state, place, clock[0])
        clock[5] += 1.0
        clock[0] += clock[1]


def watch_known(state: Period, now_s: float, known_s: Floats) -> None:
    """As `watch`, where changes of some machines may have happened of which nobody has told yet.

    A landmark of such a machine ends without an outcome, and none is noted. What comes later than its step is counted
    (`stands`), but only for as long as its landmark is remembered.

    :param known_s: per machine: up to when its changes are known.
    """
    clock = state.clock
    while clock[0] <= now_s:
        # A long pause is passed over at once, as there.
        until_s = now_s if now_s - clock[0] > 2.0 * SLICES * clock[3] else float(clock[0])
        silent = known_s < until_s
        state.noted[silent] = -1
        watch(state, until_s)
        state.noted[silent] = -1


def _note_all(state: Period, place: int, at_s: float) -> None:
    """How the machines stand."""
    ages = np.minimum((position(at_s - state.stood_s) / PER_AGE).astype(np.int64), AGES - 1)
    there = (state.stood_direction != NONE) & (state.stood_cores >= 1.0)
    state.noted[:, place] = np.where(there, size_class(state.stood_cores) * AGES + ages, -1)
    state.noted_cores[:, place] = state.stood_cores
    state.lost[:, place] = 0
    state.counted[:, place] = 0


def _count_all(state: Period, place: int, first: int, end: int) -> None:
    """The steps from first to before end of the landmarks of one look are over."""
    noted, counted, lost = state.noted[:, place], state.counted[:, place], state.lost[:, place]
    losing = np.flatnonzero((noted >= 0) & (lost > counted))
    rows = np.flatnonzero((noted >= 0) & (lost <= counted))
    for machine in losing:
        _count(state, int(machine), place, first, end)
    # Most have lost nothing since, and count alike.
    groups, kept, cores = noted[rows], counted[rows], state.noted_cores[:, place][rows]
    row, able = int(state.clock[4]), np.zeros(len(rows), np.int64)
    for f in range(len(FREE)):
        has = FREE[f] < cores
        able += has
        watched = np.bincount(groups[has & (kept <= f)], None, len(state.all_watched))
        state.watched[row, :, first * len(FREE) + f] += watched
        state.all_watched[:, first * len(FREE) + f] += watched
    noted[rows[kept >= able]] = -1


def _count(state: Period, machine: int, place: int, first: int, end: int) -> None:
    """The steps from first to before end of one landmark are over."""
    # Of those that an earlier version has remembered: it did not count them when the news came.
    _count_late(state, machine, place)
    if state.noted[machine, place] < 0:
        return
    row = int(state.clock[4])
    group = state.noted[machine, place]
    lost, f = state.lost[machine, place], state.counted[machine, place]
    able = _able(state, machine, place)
    begin = first * len(FREE)
    state.watched[row, group, begin + f : begin + able] += 1.0
    state.all_watched[group, begin + f : begin + able] += 1.0
    while f < lost and state.lost_step[machine, place, f] < end:
        cell = state.lost_step[machine, place, f] * len(FREE) + f
        state.failed[row, group, cell] += 1.0
        state.all_failed[group, cell] += 1.0
        f += 1
    state.counted[machine, place] = f
    if f == able:
        state.noted[machine, place] = -1


def _count_late(state: Period, machine: int, place: int) -> None:
    """Losses of which the news came after their steps had been counted: as if they had come in time."""
    places, looks = len(state.looked_s), _looks_since(state, place)
    group, f = state.noted[machine, place], state.counted[machine, place]
    before = f
    while f < state.lost[machine, place]:
        step = state.lost_step[machine, place, f]
        if step >= len(state.due) or state.due[step] > looks:
            break
        row = _slice_of(state, state.looked_s[(place + state.due[step]) % places])
        if row >= 0:
            state.failed[row, group, step * len(FREE) + f] += 1.0
            state.all_failed[group, step * len(FREE) + f] += 1.0
        _take_back(state, machine, place, state.due[step] + 1, f, f + 1)
        f += 1
    if f > before:
        state.counted[machine, place] = f
        if f == _able(state, machine, place):
            state.noted[machine, place] = -1


def _end(state: Period, machine: int, place: int, at_s: float) -> None:
    """A landmark has no outcome after a moment: what was counted of it at later looks is taken back."""
    places, looks = len(state.looked_s), _looks_since(state, place)
    since = looks + 1
    while since > 0 and state.looked_s[(place + since - 1) % places] > at_s:
        since -= 1
    if since <= looks:
        _take_back(state, machine, place, since, state.counted[machine, place], _able(state, machine, place))
    state.noted[machine, place] = -1


def _take_back(state: Period, machine: int, place: int, since: int, low: int, high: int) -> None:
    """Of what was counted of one landmark: who had the room at looks from one on, with numbers of free cores within.

    :param since: at which look after the landmark's beginning.
    """
    places, looks = len(state.looked_s), _looks_since(state, place)
    group = state.noted[machine, place]
    for step in range(len(state.due)):
        due = state.due[step]
        if due > looks:
            break
        # Steps that are due at one look are counted at the first of them.
        if due < since or (step > 0 and state.due[step - 1] == due):
            continue
        row = _slice_of(state, state.looked_s[(place + due) % places])
        if row >= 0:
            begin = step * len(FREE)
            state.watched[row, group, begin + low : begin + high] -= 1.0
            state.all_watched[group, begin + low : begin + high] -= 1.0


def _looks_since(state: Period, place: int) -> int:
    """How many looks were taken after that of a place in their round."""
    return int((int(state.clock[5]) - 1 - place) % len(state.looked_s))


def _able(state: Period, machine: int, place: int) -> int:
    """How many of FREE a landmark can lose: nobody can lose more cores than there were."""
    able = 0
    while able < len(FREE) and FREE[able] < state.noted_cores[machine, place]:
        able += 1
    return able


def _slice_of(state: Period, look_s: float) -> int:
    """The slice in which was counted what was over at a look; -1: it is forgotten."""
    back = int(np.ceil((state.clock[2] - look_s) / state.clock[3])) - 1
    return (int(state.clock[4]) - back) % (SLICES + 1) if back <= SLICES else -1


def _forget(state: Period) -> None:
    row = (int(state.clock[4]) + 1) % (SLICES + 1)
    state.clock[4] = row
    state.clock[2] += state.clock[3]
    for group in range(len(state.all_watched)):
        # All landmarks have the first step.
        if state.watched[row, group, 0] > 0.0 or np.sum(state.watched[row, group]) > 0.0:
            state.all_watched[group] -= state.watched[row, group]
            state.all_failed[group] -= state.failed[row, group]
            state.watched[row, group] = 0.0
            state.failed[row, group] = 0.0


def fill_lasts_of_period(state: Period, lasts: Floats) -> float:
    """How likely room lasts, from the counts.

    :param lasts: out, of `matcher.predict.landmarks.lasts_size`; NaN with fewer than `LEAST` landmarks in all.
    :returns: how many landmarks there are, of which the first step is over.
    """
    total = float(np.sum(state.all_watched[:, 0]))
    if total < LEAST:
        lasts[:] = np.nan
        return total
    watched, failed = at_risk(state), state.all_failed
    all_watched, all_failed = watched[:AGES].copy(), failed[:AGES].copy()
    for group in range(AGES, len(watched)):
        all_watched[group % AGES] += watched[group]
        all_failed[group % AGES] += failed[group]
    shares = np.zeros(all_watched.shape)
    pooled = _pooled(all_watched, all_failed)
    for age in range(AGES):
        shares[age] = pooled
    for width in WIDTHS:
        shares = _leaning(all_watched, all_failed, width, shares)
    steps = len(state.due)
    for size in range(SIZES + 1):
        own = shares
        if size < SIZES and np.sum(watched[size * AGES : (size + 1) * AGES, 0]) > 0.0:
            mine, lost = watched[size * AGES : (size + 1) * AGES], failed[size * AGES : (size + 1) * AGES]
            for width in (WIDTHS[0], WIDTHS[-1]):
                own = _leaning(mine, lost, width, own)
        for age in range(AGES):
            surviving = _surviving(own[age])
            for f in range(len(FREE)):
                at = ((size * AGES + age) * len(FREE) + f) * (STEPS + 1)
                lasts[at : at + steps + 1] = surviving[f :: len(FREE)]
                # Nobody asks beyond the horizon.
                lasts[at + steps + 1 : at + STEPS + 1] = surviving[steps * len(FREE) + f]
    return total


def at_risk(state: Period) -> Floats:
    """Who had the room when each step began: of those at the first of the steps due at one look, the ones left.

    By class and cell, as the counts.
    """
    found = state.all_watched.copy()
    free = len(FREE)
    for step in range(1, len(state.due)):
        if state.due[step] == state.due[step - 1]:
            cell = step * free
            for group in range(len(state.all_watched)):
                before = slice(cell - free, cell)
                found[group, cell : cell + free] = found[group, before] - state.all_failed[group, before]
    return found


def _pooled(watched: Floats, failed: Floats) -> Floats:
    """The share that loses its room in each cell; where hardly any machine was watched, the rate of the step before.

    In the first step that of the next lower number of free cores.
    """
    count, lost = watched.sum(0), failed.sum(0)
    found = np.zeros(len(count))
    for cell in range(len(count)):
        if count[cell] >= LEAST:
            found[cell] = lost[cell] / count[cell]
        elif cell >= len(FREE):
            longer = 2.0 ** (PER_STEP / PER_DOUBLING)
            found[cell] = 1.0 - (1.0 - found[cell - len(FREE)]) ** longer
        elif cell > 0:
            # Who has more free loses it less often.
            found[cell] = found[cell - 1]
    return found


def _leaning(watched: Floats, failed: Floats, width: int, shares: Floats) -> Floats:
    """The share that loses its room, of neighbours in age, and of what they lean on. All by age and cell."""
    found = np.zeros(shares.shape)
    for age in range(AGES):
        count = np.fmax(LEANS * _surviving(shares[age])[: shares.shape[1]], 1e-9)
        lost = count * shares[age]
        for other in range(max(age - width, 0), min(age + width + 1, AGES)):
            weight = 1.0 - abs(other - age) / (width + 1.0)
            count += weight * watched[other]
            lost += weight * failed[other]
        found[age] = lost / count
    return found


def _surviving(shares: Floats) -> Floats:
    """Who still has the room when each step begins, and at the end of the last: one step more than there are."""
    free = len(FREE)
    kept = np.fmax(1.0 - shares, 0.0)
    found = np.ones(len(shares) + free)
    for cell in range(0, len(shares), free):
        found[cell + free : cell + 2 * free] = found[cell : cell + free] * kept[cell : cell + free]
    return found
