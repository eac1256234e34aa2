"""A low-priority VM that starts with less than nominal, as one of a full node's VMs: the live kernels, step by step."""

from __future__ import annotations

from ebbtide.deflation import kernels
from ebbtide.deflation.kernels import DEFLATABLE, WIDTH
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.placement.kernels import MAY_LACK
from ebbtide.simulator.cluster.members import MEMORY
from ebbtide.simulator.cluster.resizing import deflate, gather, reinflate
from ebbtide.simulator.cluster.state import Curves, Nodes, Rules, Tally, Vms, Work
from ebbtide.simulator.compiling import inner, shared
from ebbtide.simulator.inputs.batches import Floats

for kernel in (*kernels.KERNELS, *placement_step.KERNELS):
    shared(kernel)

fits = kernels.fits
is_nothing = kernels.is_nothing
join_split = placement_step.join
missing_of = placement_step.missing_of
need_of = placement_step.need_of
room_to_start = placement_step.room_to_start


@inner
def start_deflated(
    vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, work: Work, node: int, vm: int, least: Floats
) -> bool:
    """Make the room that a VM gets as one of a node's VMs, and set its size to what there is of that.

    :param least: the smallest size at which it can start.
    :returns: False if even that does not fit; then all is as before.
    """
    rows = gather(vms, nodes, rules, work, node)
    work.priority[rows] = DEFLATABLE
    work.order[rows] = vms.number[vm]
    for c in range(WIDTH):
        work.upper[rows, c] = vms.upper[vm, c]
        work.minimum[rows, c] = vms.minimum[vm, c]
        work.current[rows, c] = vms.upper[vm, c]
        undeclared = MAY_LACK[c] and nodes.capacity[node, c] <= 0.0
        tally.demand[c] = vms.upper[vm, c] if undeclared else nodes.free[node, c]
    count = rows + 1
    able = join_split(
        work.priority[:count],
        work.upper[:count],
        work.minimum[:count],
        work.current[:count],
        work.order[:count],
        tally.demand,
        least,
        rules.overhead_mib,
        work.targets[:count],
        tally.short,
        tally.need,
    )
    if not able:
        return False
    for c in range(WIDTH):
        tally.asked[c] = work.targets[rows, c]
        tally.demand[c] = tally.asked[c] + (rules.overhead_mib if c == MEMORY else 0.0)
    missing_of(tally.demand, nodes.free[node], nodes.capacity[node], tally.missing)
    need_of(tally.missing, nodes.deflatable[node], tally.need)
    reclaims = not is_nothing(tally.need)
    if reclaims:
        deflate(vms, nodes, tally, curves, rules, work, node)
    room_to_start(nodes.free[node], nodes.capacity[node], tally.asked, rules.overhead_mib, tally.demand)
    if not fits(least, tally.demand):
        if reclaims:
            reinflate(vms, nodes, tally, curves, rules, work, node)
        return False
    for c in range(WIDTH):
        vms.current[vm, c] = tally.demand[c]
    return True
