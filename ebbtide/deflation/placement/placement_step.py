"""Next step of a placement, by numbers alone: start, reclaim, preempt or leave the host (Sharma et al. 2019, §5).

The manager's plans ask these questions at every reading of a host, the simulator at every arrival; who carries the
answers out, and in which sentences they are told, is theirs. Kernels: see `deflation.kernels`.
"""

from __future__ import annotations

import math
from typing import Final

from ebbtide.deflation.kernels import FIXED, MEMORY, QUANTA, WIDTH, Row, Table, fits, is_nothing, split, spread, tidy
from ebbtide.deflation.placement.kernels import MAY_LACK
from ebbtide.deflation.resources import TOLERANCE

#: Hosts that a placement acts on before it gives up or preempts (docs/internals/contracts.md: a shortfall).
MOST_HOSTS: Final = 3
#: Reclaims on one host: the first, and two for what rounding left.
MOST_RECLAIMS: Final = 3
#: Figures travel rounded; less than this is not missing.
ROUNDING: Final = 1e-3

#: What is to be done at a host: there is room; deflate; stop a VM; try another host.
START: Final = 0
RECLAIM: Final = 1
PREEMPT: Final = 2
LEAVE: Final = 3

#: By what a placement looks for hosts: free + deflatable for the nominal size, the same for the smallest size at which
#: the VM can start, free + low-priority VMs. REFUSE: it looks no further.
PLACE: Final = 0
DEFLATED: Final = 1
PREEMPTING: Final = 2
REFUSE: Final = 3


def next_purpose(purpose: int, priority: int, may_start_deflated: bool) -> int:
    """By what a placement looks next when no host has come of this purpose. Low-priority VMs never preempt."""
    if purpose != PLACE:
        return REFUSE
    if priority == FIXED:
        return PREEMPTING
    return DEFLATED if may_start_deflated else REFUSE


def missing_of(demand: Row, free: Row, capacity: Row, missing: Row) -> None:
    """What a host lacks for a demand; of disk and network only where it declares them.

    :param demand: the VM's size and its overhead.
    :param missing: filled with ``max(demand - free, 0)``.
    """
    for c in range(WIDTH):
        lacks = demand[c] - free[c]
        missing[c] = 0.0 if lacks <= ROUNDING or capacity[c] <= TOLERANCE else lacks


def need_of(missing: Row, deflatable: Row, need: Row) -> None:
    """What to reclaim: what is missing, in whole steps of a size, and never more than can be deflated.

    :param need: filled.
    """
    for c in range(WIDTH):
        amount = tidy(math.ceil(missing[c] / QUANTA[c] - TOLERANCE) * QUANTA[c])
        need[c] = amount if amount < deflatable[c] else deflatable[c]


def decide(missing: Row, deflatable: Row, need: Row, preempting: bool, has_preempted: bool, may_reclaim: bool) -> int:
    """What is to be done at a host, as it is now.

    :param missing: see `missing_of`.
    :param need: see `need_of`.
    :param preempting: whether the placement may stop VMs here.
    :param has_preempted: whether it has stopped one here. It goes on with that: what deflation can do was done before.
    :param may_reclaim: whether deflation has not been tried in vain.
    :returns: ``START``, ``RECLAIM``, ``PREEMPT`` or ``LEAVE``.
    """
    if is_nothing(missing):
        return START
    if has_preempted:
        return PREEMPT
    if may_reclaim and not is_nothing(need) and (preempting or fits(missing, deflatable)):
        return RECLAIM
    return PREEMPT if preempting else LEAVE


def sizes_to_reach(
    priority: Row, upper: Table, minimum: Table, current: Table, missing: Row, order: Row, targets: Table
) -> bool:
    """The sizes that the VMs of a host should have if nothing stood in the way: whom to preempt goes by these.

    Where the minimums do not leave what is missing, sizes below them.

    :param priority: and the tables: see `deflation.kernels.split`.
    :param targets: filled.
    :returns: whether the minimums stand in the way.
    """
    count = len(priority)
    deflatable = [0.0] * WIDTH
    for c in range(WIDTH):
        for i in range(count):
            if priority[i] != FIXED and current[i][c] > minimum[i][c]:
                deflatable[c] += current[i][c] - minimum[i][c]
    in_the_way = not fits(missing, deflatable)
    spread(priority, upper, minimum, 0.0 if in_the_way else 1.0, current, missing, order, targets)
    return in_the_way


def join(
    priority: Row,
    upper: Table,
    minimum: Table,
    current: Table,
    order: Row,
    free: Row,
    least: Row,
    overhead_mib: float,
    targets: Table,
    shortfall: Row,
    need: Row,
) -> bool:
    """At what size a VM can start deflated, and what the others give: `deflation.sharing.proportional.joining`.

    :param priority: and the tables: the host's VMs, and in the last row the newcomer with its nominal size as current.
    :param free: what the host has left; anything where a demand need not be held against it.
    :param least: the smallest size at which the newcomer can start.
    :param targets: filled: in the last row the newcomer's size, before it those of the others.
    :param shortfall: filled with what the others cannot give.
    :param need: filled with what is to be reclaimed from the others.
    :returns: whether it can start at all.
    """
    last = len(priority) - 1
    for c in range(WIDTH):
        lacks = current[last][c] + (overhead_mib if c == MEMORY else 0.0) - free[c]
        need[c] = lacks if lacks > 0.0 else 0.0
    split(priority, upper, minimum, current, need, order, targets, shortfall)
    for c in range(WIDTH):
        if targets[last][c] < least[c]:
            targets[last][c] = least[c]
        # Where its smallest size is more than its share, the others give more than theirs.
        lacks = targets[last][c] + (overhead_mib if c == MEMORY else 0.0) - free[c]
        need[c] = lacks if lacks > 0.0 else 0.0
    split(
        priority[:last],
        upper[:last],
        minimum[:last],
        current[:last],
        need,
        order[:last],
        targets[:last],
        shortfall,
    )
    return is_nothing(shortfall)


def room_to_start(free: Row, capacity: Row, wished: Row, overhead_mib: float, size: Row) -> None:
    """As much of a wished size as is free on a host, on the grid of sizes.

    :param capacity: what the host does not declare of disk and network is there as wished.
    :param size: filled.
    """
    for c in range(WIDTH):
        room = free[c] - (overhead_mib if c == MEMORY else 0.0)
        if room < 0.0:
            room = 0.0
        if room > wished[c] or (MAY_LACK[c] and capacity[c] <= 0.0):
            room = wished[c]
        if room < wished[c] - TOLERANCE:
            room = math.floor(room / QUANTA[c] + TOLERANCE) * QUANTA[c]
        size[c] = tidy(room)


#: All kernels of this module.
KERNELS: Final = (next_purpose, missing_of, need_of, decide, sizes_to_reach, join, room_to_start)
