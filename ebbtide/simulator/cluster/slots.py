"""A VM's stay in the cluster: it gets a slot, runs on a node, and gives the slot back."""

from __future__ import annotations

from ebbtide.simulator.cluster.departures import expect, forget
from ebbtide.simulator.cluster.members import CPU, count, in_window, join, leave
from ebbtide.simulator.cluster.state import (
    ALIVE,
    COHORT_PREEMPTED,
    NOW_S,
    PREEMPTED,
    SPARE,
    STAY_CORE_S,
    STAY_S,
    WINDOW_FROM_S,
    Curves,
    Nodes,
    Tally,
    Vms,
)
from ebbtide.simulator.compiling import inner


@inner
def take_slot(vms: Vms, tally: Tally) -> int:
    """A slot for the next VM; there is one, or the table had to be grown before."""
    height = tally.state[SPARE] - 1
    tally.state[SPARE] = height
    return int(vms.spare[height])


@inner
def give_slot(vms: Vms, tally: Tally, vm: int) -> None:
    """A slot is free again."""
    vms.spare[tally.state[SPARE]] = vm
    tally.state[SPARE] += 1


@inner
def begin_stay(vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, vm: int, node: int) -> None:
    """A VM starts on a node, with the size that it has."""
    vms.admitted_s[vm] = tally.clock[NOW_S]
    tally.state[ALIVE] += 1
    join(vms, nodes, tally, curves, vm, node)
    expect(vms, tally, vm)


@inner
def end_stay(vms: Vms, nodes: Nodes, tally: Tally, vm: int, kind: int) -> int:
    """A VM departs or is preempted.

    :param kind: DEPARTED or PREEMPTED.
    :returns: the node that it was on.
    """
    forget(vms, tally, vm)
    node = leave(vms, nodes, tally, vm)
    sold_as = vms.sold_as[vm]
    count(tally, sold_as, kind)
    if kind == PREEMPTED and in_window(tally) and vms.admitted_s[vm] >= tally.clock[WINDOW_FROM_S]:
        tally.counts[1, sold_as, COHORT_PREEMPTED] += 1
    stay_s = tally.clock[NOW_S] - vms.admitted_s[vm]
    tally.stays[STAY_S] += stay_s
    tally.stays[STAY_CORE_S] += stay_s * vms.upper[vm, CPU]
    tally.state[ALIVE] -= 1
    give_slot(vms, tally, vm)
    return node
