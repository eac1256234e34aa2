"""Members of nodes, what a node has for others, what the cluster hosts: kept as VMs come, go and change size."""

from __future__ import annotations

import math

from ebbtide.deflation.kernels import FIXED, WIDTH
from ebbtide.deflation.placement.kernels import left_of
from ebbtide.deflation.sharing.utility import utility_at
from ebbtide.simulator.cluster.state import (
    HELD_CORES,
    HELD_MIB,
    HIGH_CORES,
    HIGH_RATE,
    HOSTED,
    LEVELS,
    LOW,
    LOW_CORES,
    LOW_DEFLATED,
    LOW_HOSTED,
    LOW_RATE,
    NOBODY,
    NOW_S,
    SOLD_CORES,
    SOLD_MIB,
    WINDOW_FROM_S,
    WINDOW_UNTIL_S,
    Curves,
    Nodes,
    Rules,
    Tally,
    Vms,
)
from ebbtide.simulator.compiling import compiled, inner, shared

CPU = 0
MEMORY = 1

shared(utility_at)
shared(left_of)


@inner
def charge_of(vms: Vms, rules: Rules, vm: int, c: int) -> float:
    """What a VM takes from its node in one component."""
    return float(vms.current[vm, c] + rules.overhead_mib) if c == MEMORY else float(vms.current[vm, c])


@compiled
def recount(vms: Vms, nodes: Nodes, rules: Rules, node: int) -> None:
    """What a node has for others, from its members as they are: nothing drifts."""
    for c in range(WIDTH):
        nodes.free[node, c] = nodes.capacity[node, c]
        nodes.deflatable[node, c] = 0.0
        nodes.low[node, c] = 0.0
    vm = nodes.first[node]
    while vm != NOBODY:
        for c in range(WIDTH):
            charge = charge_of(vms, rules, vm, c)
            nodes.free[node, c] -= charge
            if vms.priority[vm] != FIXED:
                nodes.low[node, c] += charge
                nodes.deflatable[node, c] += max(vms.current[vm, c] - vms.minimum[vm, c], 0.0)
        vm = vms.after[vm]
    for c in range(WIDTH):
        # The next VM costs its overhead too.
        taken = rules.overhead_mib if c == MEMORY else 0.0
        free = max(nodes.free[node, c], 0.0)
        nodes.free[node, c] = free
        nodes.placeable[node, c] = left_of(free, nodes.deflatable[node, c], taken)
        nodes.preemptable[node, c] = left_of(free, nodes.low[node, c], taken)


@inner
def share_left(vms: Vms, vm: int) -> float:
    """The smallest share of its nominal size that a VM has left in any component."""
    least = 1.0
    for c in range(WIDTH):
        if vms.upper[vm, c] > 0.0:
            least = min(least, vms.current[vm, c] / vms.upper[vm, c])
    return least


@inner
def rate_of(vms: Vms, curves: Curves, vm: int, share: float) -> float:
    """The throughput of a VM with a share of its nominal size, relative to that; high-priority VMs have no curve."""
    if vms.sold_as[vm] != LOW:
        return share
    row = vms.curve[vm]
    points = curves.points[row]
    return float(utility_at(curves.shares[row, :points], curves.utilities[row, :points], share))


@inner
def count_rate(vms: Vms, tally: Tally, vm: int, rate: float) -> None:
    """A VM's throughput has changed."""
    low = vms.sold_as[vm] == LOW
    level = LOW_RATE if low else HIGH_RATE
    tally.levels[level] += vms.upper[vm, CPU] * (rate - vms.rate[vm])
    vms.rate[vm] = rate
    deflated = 1 if low and rate > 0.0 and share_left(vms, vm) < 1.0 else 0
    tally.levels[LOW_DEFLATED] += deflated - vms.deflated[vm]
    vms.deflated[vm] = deflated


@inner
def resize(vms: Vms, tally: Tally, vm: int, c: int, size: float) -> None:
    """A VM has another size in one component; its throughput is to be counted again."""
    grows = size - vms.current[vm, c]
    vms.current[vm, c] = size
    if c == CPU:
        tally.levels[HELD_CORES] += grows
    elif c == MEMORY:
        tally.levels[HELD_MIB] += grows


@inner
def join(vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, vm: int, node: int) -> None:
    """A VM runs on a node, with the size that it has."""
    vms.node[vm] = node
    last = nodes.last[node]
    vms.before[vm] = last
    vms.after[vm] = NOBODY
    if last == NOBODY:
        nodes.first[node] = vm
    else:
        vms.after[last] = vm
    nodes.last[node] = vm
    nodes.members[node] += 1
    vms.rate[vm] = 0.0
    vms.deflated[vm] = 0
    settle_node(nodes, tally, node)
    nodes.sold_cores[node] += vms.upper[vm, CPU]
    count_sizes(vms, tally, vm, 1.0)
    count_rate(vms, tally, vm, rate_of(vms, curves, vm, share_left(vms, vm)))


@inner
def leave(vms: Vms, nodes: Nodes, tally: Tally, vm: int) -> int:
    """A VM runs no more; its slot keeps its figures until it is given to another.

    :returns: the node that it was on.
    """
    node = vms.node[vm]
    before, after = vms.before[vm], vms.after[vm]
    if before == NOBODY:
        nodes.first[node] = after
    else:
        vms.after[before] = after
    if after == NOBODY:
        nodes.last[node] = before
    else:
        vms.before[after] = before
    nodes.members[node] -= 1
    vms.node[vm] = NOBODY
    settle_node(nodes, tally, node)
    nodes.sold_cores[node] -= vms.upper[vm, CPU]
    count_rate(vms, tally, vm, 0.0)
    count_sizes(vms, tally, vm, -1.0)
    return int(node)


@inner
def count_sizes(vms: Vms, tally: Tally, vm: int, sign: float) -> None:
    """What the cluster hosts, with a VM or without it."""
    tally.levels[HOSTED] += sign
    tally.levels[SOLD_CORES] += sign * vms.upper[vm, CPU]
    tally.levels[SOLD_MIB] += sign * vms.upper[vm, MEMORY]
    tally.levels[HELD_CORES] += sign * vms.current[vm, CPU]
    tally.levels[HELD_MIB] += sign * vms.current[vm, MEMORY]
    tally.levels[LOW_CORES if vms.sold_as[vm] == LOW else HIGH_CORES] += sign * vms.upper[vm, CPU]
    if vms.sold_as[vm] == LOW:
        tally.levels[LOW_HOSTED] += sign


@inner
def in_window(tally: Tally) -> bool:
    """Whether what happens now is measured."""
    return bool(tally.clock[WINDOW_FROM_S] <= tally.clock[NOW_S] < tally.clock[WINDOW_UNTIL_S])


@inner
def count(tally: Tally, sold_as: int, kind: int) -> None:
    """Something has happened to a VM."""
    tally.counts[0, sold_as, kind] += 1
    if in_window(tally):
        tally.counts[1, sold_as, kind] += 1


@inner
def measured_s(tally: Tally, from_s: float, until_s: float) -> float:
    """How much of a stretch of time lies within the window."""
    begin = max(from_s, tally.clock[WINDOW_FROM_S])
    end = min(until_s, tally.clock[WINDOW_UNTIL_S])
    return float(max(end - begin, 0.0))


@inner
def move_clock(tally: Tally, now_s: float) -> None:
    """Time passes, and everything stays as it is until then."""
    before_s = tally.clock[NOW_S]
    if now_s <= before_s or now_s == math.inf:
        return
    measured = measured_s(tally, before_s, now_s)
    for k in range(LEVELS):
        tally.whole[k] += tally.levels[k] * (now_s - before_s)
        if measured > 0.0:
            tally.window[k] += tally.levels[k] * measured
            tally.peak[k] = max(tally.peak[k], tally.levels[k])
    tally.clock[NOW_S] = now_s


@inner
def settle_node(nodes: Nodes, tally: Tally, node: int) -> None:
    """What a node has hosted until now is counted."""
    now_s = tally.clock[NOW_S]
    nodes.sold_core_s[node] += nodes.sold_cores[node] * measured_s(tally, nodes.since_s[node], now_s)
    nodes.since_s[node] = now_s
