"""A preempted VM starts again; a VM moves to another node: the live kernels, step by step."""

from __future__ import annotations

from ebbtide.deflation import kernels
from ebbtide.deflation.kernels import DEFLATABLE, WIDTH
from ebbtide.deflation.placement import placement_step
from ebbtide.simulator.cluster.members import (
    charge_of,
    count,
    count_rate,
    join,
    leave,
    rate_of,
    recount,
    resize,
    share_left,
)
from ebbtide.simulator.cluster.resizing import deflate, reinflate
from ebbtide.simulator.cluster.slots import begin_stay, give_slot, take_slot
from ebbtide.simulator.cluster.starting import start_deflated
from ebbtide.simulator.cluster.state import RETURNED, Asked, Curves, Nodes, Rules, Tally, Vms, Work
from ebbtide.simulator.compiling import compiled, shared
from ebbtide.simulator.inputs.batches import Floats

for kernel in (*kernels.KERNELS, *placement_step.KERNELS):
    shared(kernel)

is_nothing = kernels.is_nothing
missing_of = placement_step.missing_of
need_of = placement_step.need_of


@compiled
def bring_back(
    vms: Vms,
    nodes: Nodes,
    tally: Tally,
    curves: Curves,
    rules: Rules,
    work: Work,
    arrivals: Asked,
    number: int,
    node: int,
    least: Floats,
) -> bool:
    """A VM of low priority that was preempted runs again on a node, at the size that it gets there.

    There is a free slot.

    :param arrivals: its row; ``least``: the smallest size at which it can start.
    :returns: False if there is no room even for that.
    """
    vm = take_slot(vms, tally)
    vms.number[vm] = number
    vms.sold_as[vm] = arrivals.sold_as[0]
    vms.priority[vm] = DEFLATABLE
    vms.departs_s[vm] = arrivals.departs_s[0]
    vms.curve[vm] = arrivals.curve[0]
    for c in range(WIDTH):
        vms.upper[vm, c] = arrivals.upper[0, c]
        vms.minimum[vm, c] = arrivals.minimum[0, c]
        vms.current[vm, c] = arrivals.upper[0, c]
    if not start_deflated(vms, nodes, tally, curves, rules, work, node, vm, least):
        give_slot(vms, tally, vm)
        return False
    count(tally, vms.sold_as[vm], RETURNED)
    begin_stay(vms, nodes, tally, curves, vm, node)
    recount(vms, nodes, rules, node)
    reinflate(vms, nodes, tally, curves, rules, work, node)
    return True


@compiled
def move(
    vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, work: Work, vm: int, node: int, shrunk: bool
) -> bool:
    """A VM goes to another node at its present size, for which those there give; what is free then is shared."""
    source = vms.node[vm]
    if shrunk:
        for c in range(WIDTH):
            resize(vms, tally, vm, c, vms.minimum[vm, c])
        count_rate(vms, tally, vm, rate_of(vms, curves, vm, share_left(vms, vm)))
        recount(vms, nodes, rules, source)
    for c in range(WIDTH):
        tally.demand[c] = charge_of(vms, rules, vm, c)
    missing_of(tally.demand, nodes.free[node], nodes.capacity[node], tally.missing)
    need_of(tally.missing, nodes.deflatable[node], tally.need)
    if not is_nothing(tally.need):
        deflate(vms, nodes, tally, curves, rules, work, node)
        missing_of(tally.demand, nodes.free[node], nodes.capacity[node], tally.missing)
    able = is_nothing(tally.missing)
    if able:
        # The same VM in the same slot, so that its stay and its departure go on.
        leave(vms, nodes, tally, vm)
        join(vms, nodes, tally, curves, vm, node)
        recount(vms, nodes, rules, source)
        recount(vms, nodes, rules, node)
    reinflate(vms, nodes, tally, curves, rules, work, node)
    reinflate(vms, nodes, tally, curves, rules, work, source)
    return bool(able)
