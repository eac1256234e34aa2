"""Sizes on one node: its VMs as rows for the policies, and what those decide carried out at once and whole."""

from __future__ import annotations

from ebbtide.deflation import kernels
from ebbtide.deflation.kernels import FIXED, WIDTH
from ebbtide.simulator.cluster.members import charge_of, count, count_rate, rate_of, recount, resize, share_left
from ebbtide.simulator.cluster.state import DEFLATIONS, NOBODY, REINFLATIONS, Curves, Nodes, Rules, Tally, Vms, Work
from ebbtide.simulator.compiling import inner, shared

for kernel in kernels.KERNELS:
    shared(kernel)

split = kernels.split
share = kernels.share


@inner
def gather(vms: Vms, nodes: Nodes, rules: Rules, work: Work, node: int) -> int:
    """The VMs of a node that are not fixed, as rows; fixed ones are never resized.

    :returns: how many.
    """
    rows = 0
    vm = nodes.first[node]
    while vm != NOBODY:
        if vms.priority[vm] != FIXED:
            work.vm[rows] = vm
            work.priority[rows] = vms.priority[vm]
            work.order[rows] = vms.number[vm]
            work.pressed[rows] = 0
            for c in range(WIDTH):
                work.upper[rows, c] = vms.upper[vm, c]
                work.minimum[rows, c] = vms.minimum[vm, c]
                work.current[rows, c] = vms.current[vm, c]
                work.charge[rows, c] = charge_of(vms, rules, vm, c)
            rows += 1
        vm = vms.after[vm]
    return rows


@inner
def carry_out(
    vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, work: Work, node: int, rows: int
) -> None:
    """The VMs of a node reach their targets."""
    for k in range(rows):
        vm = work.vm[k]
        smaller = larger = False
        for c in range(WIDTH):
            target = work.targets[k, c]
            if target != vms.current[vm, c]:
                smaller = smaller or target < vms.current[vm, c]
                larger = larger or target > vms.current[vm, c]
                resize(vms, tally, vm, c, target)
        if smaller or larger:
            count_rate(vms, tally, vm, rate_of(vms, curves, vm, share_left(vms, vm)))
        if smaller:
            count(tally, vms.sold_as[vm], DEFLATIONS)
        if larger:
            count(tally, vms.sold_as[vm], REINFLATIONS)
    recount(vms, nodes, rules, node)


@inner
def deflate(vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, work: Work, node: int) -> None:
    """A node's VMs give ``tally.need`` in proportion; ``tally.short`` is what even that does not free."""
    rows = gather(vms, nodes, rules, work, node)
    split(
        work.priority[:rows],
        work.upper[:rows],
        work.minimum[:rows],
        work.current[:rows],
        tally.need,
        work.order[:rows],
        work.targets[:rows],
        tally.short,
    )
    carry_out(vms, nodes, tally, curves, rules, work, node, rows)


@inner
def reinflate(vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, work: Work, node: int) -> None:
    """What a node has free goes back to its deflated VMs."""
    rows = gather(vms, nodes, rules, work, node)
    share(
        work.priority[:rows],
        work.upper[:rows],
        work.minimum[:rows],
        work.current[:rows],
        nodes.free[node],
        work.pressed[:rows],
        work.order[:rows],
        work.targets[:rows],
    )
    carry_out(vms, nodes, tally, curves, rules, work, node, rows)
