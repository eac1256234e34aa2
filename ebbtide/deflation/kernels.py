"""Arithmetic of `sharing.proportional` over numbers: who gives how much, who gets it back, whom to preempt.

Kernels are plain functions over numbers and rows of numbers that are read and written by index, so that the simulator
can compile the very functions which the live system calls (docs/internals/policies.md). Rows are lists or arrays.
Tables hold one
row per VM and one column per component, in the order of ``COMPONENTS``; they are indexed ``table[vm][component]``.

Sums run over the VMs in the order of their names, so that a result does not depend on the order in which VMs are given,
down to the last bit. Plain sums are good enough: sizes of thousands of VMs of terabytes add up to an error far below
``TOLERANCE``, and results stand on the grid.

Source: Sharma et al. 2019, §5; docs/internals/contracts.md, splitting a need.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

from ebbtide.deflation.resources import COMPONENTS, QUANTUM, TOLERANCE

#: A list or a one-dimensional array, read or written by index.
Row: TypeAlias = Any
#: Rows by VM: a list of lists or a two-dimensional array.
Table: TypeAlias = Any

FIXED: Final = 0
DEFLATABLE: Final = 1
HARVEST: Final = 2

#: What becomes of a VM that is preempted, and how fast a slow disk takes or gives back what is saved, MiB/s.
DELETES: Final = 0
SUSPENDS: Final = 1
STOPS: Final = 2
SAVING_MIB_S: Final = 64.0

WIDTH: Final = len(COMPONENTS)
MEMORY: Final = COMPONENTS.index("memory_mib")
QUANTA: Final = tuple(QUANTUM)
#: Sizes are tidied to so many steps a unit, so that 0.1 + 0.2 is 0.3.
_PER_UNIT: Final = 1e6
#: Remainders that agree in so many parts of a step are a tie.
_PARTS: Final = 1e6


def total(values: Row) -> float:
    """The sum in the order of the row. Not ``sum``: from Python 3.12 on it compensates, compiled code does not."""
    result = 0.0
    for value in values:
        result += value
    return result


def tidy(value: float) -> float:
    """Drop what binary fractions add to a step of 0.01."""
    return math.floor(value * _PER_UNIT + 0.5) / _PER_UNIT


def floor_level(spans: Row, floors: Row, wanted: float) -> float:
    """The level (1 - alpha) in [0, 1] with ``sum max(span_i * level, floor_i) == wanted``: exact, piece by piece."""
    breaks = [(floors[k] / spans[k], k) for k in range(len(spans)) if spans[k] > TOLERANCE]
    breaks.sort()
    # Below its break a VM stands on its floor, above it on the level.
    resting, moving, lower = total(floors), 0.0, 0.0
    for at, k in breaks:
        upper = at if at < 1.0 else 1.0
        if moving * upper + resting >= wanted:
            return _between(lower, upper, wanted - resting, moving)
        lower = upper
        resting -= floors[k]
        moving += spans[k]
    return _between(lower, 1.0, wanted - resting, moving) if moving + resting >= wanted else 1.0


def ceiling_level(spans: Row, ceilings: Row, wanted: float) -> float:
    """The level (1 - alpha) in [0, 1] with ``sum min(span_i * level, ceiling_i) == wanted``: exact, piece by piece."""
    breaks = [(ceilings[k] / spans[k], k) for k in range(len(spans)) if spans[k] > TOLERANCE]
    breaks.sort()
    # Below its break a VM stands on the level, above it at its ceiling.
    resting, moving, lower = 0.0, 0.0, 0.0
    for _, k in breaks:
        moving += spans[k]
    for at, k in breaks:
        upper = at if at < 1.0 else 1.0
        if moving * upper + resting >= wanted:
            return _between(lower, upper, wanted - resting, moving)
        lower = upper
        resting += ceilings[k]
        moving -= spans[k]
    return 1.0


def _between(lower: float, upper: float, rise: float, slope: float) -> float:
    """Where a line of this slope has risen so far, within the piece."""
    if slope <= 0.0:
        return lower
    level = rise / slope
    if level < lower:
        return lower
    return level if level < upper else upper


def on_grid(exact: Row, lowest: Row, highest: Row, wanted: float, quantum: float, out: Row) -> None:
    """Round down to the grid, then hand out whole steps by largest remainder while the sum stays within ``wanted``.

    :param lowest: and ``highest``: what each size stays within; sizes at the highest need not stand on the grid.
    :param out: filled with the sizes.
    """
    count = len(exact)
    left = wanted
    for k in range(count):
        high, size = highest[k], exact[k]
        if size >= high - TOLERANCE:
            size = high
        else:
            size = tidy(math.floor(size / quantum + TOLERANCE) * quantum)
            if size < lowest[k]:
                size = lowest[k]
            if size > high:
                size = high
        out[k] = size
        left -= size
    if left < quantum - TOLERANCE:
        return
    # Ties by place, which is the order of the names; what rounding adds to a remainder must not decide them.
    steps = [
        (math.floor((out[k] - exact[k]) / quantum * _PARTS + 0.5), k)
        for k in range(count)
        if exact[k] > out[k] + TOLERANCE and out[k] + quantum <= highest[k] + TOLERANCE
    ]
    steps.sort()
    for _, k in steps:
        if left < quantum - TOLERANCE:
            break
        out[k] = tidy(out[k] + quantum)
        left -= quantum


def lowered(upper: Row, minimum: Row, current: Row, need: float, quantum: float, out: Row) -> float:
    """The sizes of VMs in one component after they have given ``need`` together, or all above their minimums.

    :param upper: the largest sizes, from which deflation counts; all rows in the order of the VMs' names.
    :param out: filled with the sizes.
    :returns: what they have given.
    """
    count = len(upper)
    lowest = [minimum[k] if minimum[k] < current[k] else current[k] for k in range(count)]
    held = total(current)
    if need >= held - total(lowest) - TOLERANCE:
        for k in range(count):
            out[k] = lowest[k]
    else:
        spans = [upper[k] - minimum[k] for k in range(count)]
        given = [upper[k] - current[k] for k in range(count)]
        level = floor_level(spans, given, total(given) + need)
        exact = [upper[k] - (spans[k] * level if spans[k] * level > given[k] else given[k]) for k in range(count)]
        on_grid(exact, lowest, current, held - need, quantum, out)
    return total([current[k] - out[k] for k in range(count)])


def raised(upper: Row, minimum: Row, current: Row, room: float, quantum: float, out: Row) -> float:
    """The sizes of VMs in one component after ``room`` was shared among them, none above its upper size.

    :param upper: all rows in the order of the VMs' names.
    :param out: filled with the sizes.
    :returns: what they were given.
    """
    count = len(upper)
    taken = [upper[k] - current[k] for k in range(count)]
    lacking = total(taken)
    if room >= lacking - TOLERANCE:
        for k in range(count):
            out[k] = upper[k]
    else:
        # A VM below its minimum counts from where it is, or it would be given more than there is.
        spans = [upper[k] - (minimum[k] if minimum[k] < current[k] else current[k]) for k in range(count)]
        level = ceiling_level(spans, taken, lacking - room)
        exact = [upper[k] - (spans[k] * level if spans[k] * level < taken[k] else taken[k]) for k in range(count)]
        on_grid(exact, current, upper, total(current) + room, quantum, out)
    return total([out[k] - current[k] for k in range(count)])


def by_name(order: Row) -> list[int]:
    """The places of the VMs in the order of their names.

    :param order: the rank of each VM's name among those of its host; any numbers that compare like the names.
    """
    places = list(range(len(order)))
    for k in range(1, len(places)):
        if order[k] < order[k - 1]:
            ranked = [(order[place], place) for place in places]
            ranked.sort()
            return [place for _, place in ranked]
    return places


def split(
    priority: Row,
    upper: Table,
    minimum: Table,
    current: Table,
    need: Row,
    order: Row,
    targets: Table,
    shortfall: Row,
) -> None:
    """Spread a need over the VMs of a host: `deflation.sharing.proportional.split_need` over tables.

    :param priority: ``FIXED``, ``DEFLATABLE`` or ``HARVEST`` by VM.
    :param order: see `by_name`.
    :param targets: filled with the size each VM is to reach; who gives nothing keeps its size.
    :param shortfall: filled with what even that does not free.
    """
    left = spread(priority, upper, minimum, 1.0, current, need, order, targets)
    for c in range(WIDTH):
        shortfall[c] = left[c]


def spread(
    priority: Row,
    upper: Table,
    minimum: Table,
    held_to: float,
    current: Table,
    need: Row,
    order: Row,
    targets: Table,
) -> tuple[float, float, float, float]:
    """As `split`, held to that share of the minimums: 1, or 0 where they do not count.

    :returns: the shortfall.
    """
    for i in range(len(priority)):
        for c in range(WIDTH):
            targets[i][c] = current[i][c]
    left = [need[c] for c in range(WIDTH)]
    places = by_name(order)
    for group in (HARVEST, DEFLATABLE):
        members = [i for i in places if priority[i] == group]
        if len(members) == 0:
            continue
        for c in range(WIDTH):
            missing = left[c]
            if missing <= TOLERANCE:
                continue
            high = [upper[i][c] for i in members]
            low = [minimum[i][c] * held_to for i in members]
            have = [current[i][c] for i in members]
            sizes = [0.0] * len(members)
            freed = lowered(high, low, have, missing, QUANTA[c], sizes)
            for k in range(len(members)):
                targets[members[k]][c] = sizes[k]
            left[c] = missing - freed if missing > freed else 0.0
    return left[0], left[1], left[2], left[3]


def share(
    priority: Row,
    upper: Table,
    minimum: Table,
    current: Table,
    room: Row,
    pressed: Row,
    order: Row,
    targets: Table,
) -> None:
    """Give free room back to the VMs of a host: `deflation.sharing.proportional.share_room` over tables.

    :param pressed: by VM, whether it is under pressure.
    :param order: see `by_name`.
    :param targets: filled with the size each VM is to reach; who gets nothing keeps its size.
    """
    for i in range(len(priority)):
        for c in range(WIDTH):
            targets[i][c] = current[i][c]
    left = [room[c] for c in range(WIDTH)]
    places = by_name(order)
    for turn in range(3):
        if turn == 0:
            members = [i for i in places if priority[i] == DEFLATABLE and pressed[i]]
        elif turn == 1:
            members = [i for i in places if priority[i] == DEFLATABLE and not pressed[i]]
        else:
            members = [i for i in places if priority[i] == HARVEST]
        if len(members) == 0:
            continue
        for c in range(WIDTH):
            if left[c] <= TOLERANCE:
                continue
            high = [upper[i][c] for i in members]
            low = [minimum[i][c] for i in members]
            have = [current[i][c] for i in members]
            sizes = [0.0] * len(members)
            given = raised(high, low, have, left[c], QUANTA[c], sizes)
            for k in range(len(members)):
                targets[members[k]][c] = sizes[k]
            left[c] = left[c] - given if left[c] > given else 0.0


def fits(amount: Row, room: Row) -> bool:
    """Whether no component of an amount exceeds that of the room (beyond rounding)."""
    fitting = True
    for c in range(WIDTH):
        fitting = fitting and amount[c] <= room[c] + TOLERANCE
    return fitting


def is_nothing(amount: Row) -> bool:
    """Whether nothing is left of an amount but rounding."""
    nothing = True
    for c in range(WIDTH):
        nothing = nothing and amount[c] <= TOLERANCE
    return nothing


def distance(nominal: Row, current: Row, target: Row, missing: Row, steps: float) -> float:
    """How far a VM is from its target, as the largest share of its nominal size, among what is missing.

    :param steps: so many steps of a size farther, because sizes are rounded to the grid.
    """
    largest = -math.inf
    for c in range(WIDTH):
        if missing[c] > TOLERANCE:
            away = (current[c] - target[c] + steps * QUANTA[c]) / nominal[c] if nominal[c] > 0.0 else 0.0
            if away > largest:
                largest = away
    return largest


def preemption_cost(choice: int, state_mib: float, work_s: float) -> float:
    """What the preemption of a VM costs, in seconds of its work that are lost or put off.

    Nothing is kept of one that is deleted, by its owner's word; one that is suspended loses the time in which its
    memory is written and read, at a slow disk's pace, and one that is stopped all that it has worked since it started.

    :param choice: ``DELETES``, ``SUSPENDS`` or ``STOPS``.
    :param state_mib: the memory that would be saved.
    :param work_s: for how long it has run.
    """
    if choice == DELETES:
        return 0.0
    return 2.0 * state_mib / SAVING_MIB_S if choice == SUSPENDS else work_s


def victims(
    priority: Row,
    nominal: Table,
    current: Table,
    charge: Table,
    missing: Row,
    targets: Table,
    cost: Row,
    order: Row,
    chosen: Row,
) -> int:
    """Whom to preempt: `deflation.sharing.proportional.choose_victims` over tables.

    :param charge: what each VM takes from its host: its current size and its overhead.
    :param targets: the size each VM should have reached.
    :param cost: what stopping each costs, by which those are chosen that are as far, to a step of each
        (`preemption_cost`).
    :param order: see `by_name`.
    :param chosen: its beginning is filled with the places of the victims, in the order of choice.
    :returns: how many; -1 if even all would not do.
    """
    candidates = [i for i in by_name(order) if priority[i] != FIXED]
    if not _cover(charge, candidates, len(candidates), -1, missing):
        return -1
    left = [missing[c] for c in range(WIDTH)]
    count = 0
    while not is_nothing(left):
        able, farthest, place = [False] * len(candidates), -math.inf, -1
        for k in range(len(candidates)):
            i = candidates[k]
            for c in range(WIDTH):
                able[k] = able[k] or (i >= 0 and left[c] > TOLERANCE and charge[i][c] > TOLERANCE)
            if able[k]:
                away = distance(nominal[i], current[i], targets[i], left, -1.0)
                farthest = away if away > farthest else farthest
        for k in range(len(candidates)):
            i = candidates[k]
            # Those within a step of each are as far. The cheapest goes, of two that cost as much the last by name.
            as_far = able[k] and distance(nominal[i], current[i], targets[i], left, 1.0) >= farthest - TOLERANCE
            if as_far and (place < 0 or cost[i] <= cost[candidates[place]]):
                place = k
        if place < 0:
            break
        victim = candidates[place]
        candidates[place] = -1
        chosen[count] = victim
        count += 1
        for c in range(WIDTH):
            left[c] = left[c] - charge[victim][c] if left[c] > charge[victim][c] else 0.0
    # Who turns out unneeded is dropped again, in reverse order of choice.
    for k in range(count - 1, -1, -1):
        if _cover(charge, chosen, count, k, missing):
            for later in range(k, count - 1):
                chosen[later] = chosen[later + 1]
            count -= 1
    return count


def _cover(charge: Table, places: Row, count: int, without: int, missing: Row) -> bool:
    """Whether the charges of the first VMs, without one of them, cover what is missing."""
    covered = True
    for c in range(WIDTH):
        have = 0.0
        for k in range(count):
            if k != without:
                have += charge[places[k]][c]
        covered = covered and missing[c] <= have + TOLERANCE
    return covered


#: All kernels of this module: what calls one of them compiled has to know the others.
KERNELS: Final = (
    total,
    tidy,
    floor_level,
    ceiling_level,
    _between,
    on_grid,
    lowered,
    raised,
    by_name,
    split,
    spread,
    share,
    fits,
    is_nothing,
    distance,
    preemption_cost,
    victims,
    _cover,
)
