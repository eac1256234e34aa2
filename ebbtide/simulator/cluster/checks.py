"""Checks after every event: no node over capacity, no floor crossed, every figure what it stands for."""

from __future__ import annotations

import math
from typing import Final

from ebbtide.deflation.kernels import FIXED, WIDTH
from ebbtide.simulator.cluster.departures import sooner
from ebbtide.simulator.cluster.members import CPU, MEMORY, charge_of, share_left
from ebbtide.simulator.cluster.state import (
    ALIVE,
    FAULT,
    FAULT_COMPONENT,
    FAULT_NODE,
    FAULT_VM,
    HELD_CORES,
    HELD_MIB,
    HIGH_CORES,
    HIGH_RATE,
    HOSTED,
    LEAVING,
    LOW,
    LOW_CORES,
    LOW_DEFLATED,
    LOW_HOSTED,
    LOW_RATE,
    NOBODY,
    SOLD_CORES,
    SOLD_MIB,
    SPARE,
    Nodes,
    Rules,
    Tally,
    Vms,
)
from ebbtide.simulator.compiling import compiled, inner

#: What can be wrong, by the number in ``Tally.fault``; {component}, {vm} and {node} are filled in.
RULES: Final = (
    "nothing",
    "node {node} is over its capacity in {component}",
    "VM {vm} on node {node} is below its minimum in {component}",
    "VM {vm} on node {node} is above its nominal size in {component}",
    "VM {vm} on node {node} is fixed and yet has another than its nominal size in {component}",
    "node {node} says it has another amount of {component} free than its VMs leave",
    "node {node} says it could free another amount of {component} than its VMs could give",
    "node {node} has other members than it counts, or VM {vm} is on another node than it says",
    "node {node} keeps {component} from VMs that are deflated",
    "VM {vm} is not where the heap of departures says, or departs before the one above it",
    "slots are lost, or are used and free at once",
    "what the cluster hosts is not the sum of its VMs",
    "node {node} says it hosts other cores than its VMs were sold",
)
OVER_CAPACITY: Final = 1
BELOW_MINIMUM: Final = 2
ABOVE_NOMINAL: Final = 3
FIXED_CHANGED: Final = 4
WRONG_FREE: Final = 5
WRONG_DEFLATABLE: Final = 6
WRONG_MEMBERS: Final = 7
ROOM_KEPT: Final = 8
WRONG_HEAP: Final = 9
WRONG_SLOTS: Final = 10
WRONG_LEVELS: Final = 11
WRONG_SOLD: Final = 12

#: Of sizes; rounding is far below it.
_NEAR: Final = 1e-5
#: Of sums over a whole cluster and a whole run, relative.
_NEARLY: Final = 1e-9
#: Less than a step of any size, cores and MiB: nothing to share.
_STEPS: Final = (0.01, 1.0, 1.0, 1.0)


@inner
def fault(tally: Tally, rule: int, node: int, vm: int, component: int) -> bool:
    """Write down what is wrong."""
    tally.fault[FAULT] = rule
    tally.fault[FAULT_NODE] = node
    tally.fault[FAULT_VM] = vm
    tally.fault[FAULT_COMPONENT] = component
    return False


@compiled
def check(vms: Vms, nodes: Nodes, tally: Tally, rules: Rules) -> bool:
    """Whether the whole state is what it should be; if not, ``tally.fault`` says what is wrong."""
    alive = 0
    for node in range(len(nodes.capacity)):
        if not check_node(vms, nodes, tally, rules, node):
            return False
        alive += nodes.members[node]
    slots = len(vms)
    if alive != tally.state[ALIVE] or alive + tally.state[SPARE] != slots:
        return fault(tally, WRONG_SLOTS, NOBODY, NOBODY, 0)
    for k in range(tally.state[SPARE]):
        if vms.node[vms.spare[k]] != NOBODY:
            return fault(tally, WRONG_SLOTS, NOBODY, vms.number[vms.spare[k]], 0)
    return check_heap(vms, tally) and check_levels(vms, tally)


@inner
def check_node(vms: Vms, nodes: Nodes, tally: Tally, rules: Rules, node: int) -> bool:
    """One node and its members."""
    members = 0
    vm = nodes.first[node]
    before = NOBODY
    while vm != NOBODY:
        if vms.node[vm] != node or vms.before[vm] != before or members > nodes.members[node]:
            return fault(tally, WRONG_MEMBERS, node, vms.number[vm], 0)
        members += 1
        before, vm = vm, vms.after[vm]
    if members != nodes.members[node] or nodes.last[node] != before:
        return fault(tally, WRONG_MEMBERS, node, NOBODY, 0)
    sold = 0.0
    vm = nodes.first[node]
    while vm != NOBODY:
        sold += vms.upper[vm, CPU]
        vm = vms.after[vm]
    if abs(nodes.sold_cores[node] - sold) > _NEAR:
        return fault(tally, WRONG_SOLD, node, NOBODY, 0)
    for c in range(WIDTH):
        charged = deflatable = lacking = low = 0.0
        vm = nodes.first[node]
        while vm != NOBODY:
            number, has = vms.number[vm], vms.current[vm, c]
            if vms.priority[vm] == FIXED and has != vms.upper[vm, c]:
                return fault(tally, FIXED_CHANGED, node, number, c)
            if has < vms.minimum[vm, c] - _NEAR:
                return fault(tally, BELOW_MINIMUM, node, number, c)
            if has > vms.upper[vm, c] + _NEAR:
                return fault(tally, ABOVE_NOMINAL, node, number, c)
            charged += charge_of(vms, rules, vm, c)
            lacking += vms.upper[vm, c] - has
            if vms.priority[vm] != FIXED:
                deflatable += has - vms.minimum[vm, c]
                low += charge_of(vms, rules, vm, c)
            vm = vms.after[vm]
        capacity = nodes.capacity[node, c]
        if capacity > 0.0 and charged > capacity + _NEAR and not (rules.balloons and c == CPU):
            return fault(tally, OVER_CAPACITY, node, NOBODY, c)
        if abs(nodes.free[node, c] - max(capacity - charged, 0.0)) > _NEAR:
            return fault(tally, WRONG_FREE, node, NOBODY, c)
        if abs(nodes.deflatable[node, c] - deflatable) > _NEAR or abs(nodes.low[node, c] - low) > _NEAR:
            return fault(tally, WRONG_DEFLATABLE, node, NOBODY, c)
        if not rules.balloons and min(lacking, nodes.free[node, c]) > _STEPS[c] + _NEAR:
            return fault(tally, ROOM_KEPT, node, NOBODY, c)
    return True


@inner
def check_heap(vms: Vms, tally: Tally) -> bool:
    """The heap of departures."""
    length = tally.state[LEAVING]
    for k in range(length):
        vm = vms.heap[k]
        if vms.node[vm] == NOBODY or vms.place[vm] != k or (k > 0 and sooner(vms, vm, vms.heap[(k - 1) // 2])):
            return fault(tally, WRONG_HEAP, NOBODY, vms.number[vm], 0)
    for vm in range(len(vms)):
        waits = vms.node[vm] != NOBODY and vms.departs_s[vm] < math.inf
        if waits and (vms.place[vm] < 0 or vms.place[vm] >= length or vms.heap[vms.place[vm]] != vm):
            return fault(tally, WRONG_HEAP, NOBODY, vms.number[vm], 0)
    return True


@inner
def check_levels(vms: Vms, tally: Tally) -> bool:
    """What the cluster hosts, against its VMs."""
    hosted = low_hosted = deflated = 0
    sold = sold_mib = held = held_mib = low = rate = high_rate = 0.0
    for vm in range(len(vms)):
        if vms.node[vm] != NOBODY:
            hosted += 1
            sold += vms.upper[vm, CPU]
            sold_mib += vms.upper[vm, MEMORY]
            held += vms.current[vm, CPU]
            held_mib += vms.current[vm, MEMORY]
            if vms.sold_as[vm] == LOW:
                low_hosted += 1
                deflated += 1 if share_left(vms, vm) < 1.0 else 0
                low += vms.upper[vm, CPU]
                rate += vms.upper[vm, CPU] * vms.rate[vm]
            else:
                high_rate += vms.upper[vm, CPU] * vms.rate[vm]
    near = (
        tally.levels[HOSTED] == hosted
        and tally.levels[LOW_HOSTED] == low_hosted
        and tally.levels[LOW_DEFLATED] == deflated
        and abs(tally.levels[SOLD_CORES] - sold) <= _NEAR + _NEARLY * sold
        and abs(tally.levels[HELD_CORES] - held) <= _NEAR + _NEARLY * sold
        and abs(tally.levels[SOLD_MIB] - sold_mib) <= _NEAR + _NEARLY * sold_mib
        and abs(tally.levels[HELD_MIB] - held_mib) <= _NEAR + _NEARLY * held_mib
        and abs(tally.levels[LOW_CORES] - low) <= _NEAR + _NEARLY * sold
        and abs(tally.levels[LOW_RATE] - rate) <= _NEAR + _NEARLY * sold
        and abs(tally.levels[HIGH_CORES] - (sold - low)) <= _NEAR + _NEARLY * sold
        and abs(tally.levels[HIGH_RATE] - high_rate) <= _NEAR + _NEARLY * sold
    )
    return near or fault(tally, WRONG_LEVELS, NOBODY, NOBODY, 0)
