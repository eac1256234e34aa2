"""The baseline that shrinks memory only, as Proxmox VE does by itself (PVE/AutoBalloon.pm, PVE/Service/pvestatd.pm).

Memory of a node above 80 % in use: VMs that have a balloon come down, each to its minimum and its part of what is left
by shares, all shares alike. Below, back up. Nothing is asked about CPU: cores are sold without end, and when more are
sold than there are, every VM runs slower, those of high priority too. No VM is ever preempted.

Proxmox moves at most 100 MiB a VM every 10 s; here it is where that ends, at once, which flatters it. Where a VM goes
is left to its owner there; here to the node with the fewest cores sold among those with room for its memory.
"""

from __future__ import annotations

from ebbtide.deflation.kernels import FIXED
from ebbtide.simulator.cluster.members import CPU, MEMORY, count, count_rate, rate_of, recount, resize, share_left
from ebbtide.simulator.cluster.state import DEFLATIONS, NOBODY, REINFLATIONS, Curves, Nodes, Rules, Tally, Vms
from ebbtide.simulator.compiling import inner
from ebbtide.simulator.inputs.batches import Floats

#: Share of a node's memory in use beyond which balloons fill: `ballooning-target`.
GOAL = 0.8


@inner
def least_loaded(vms: Vms, nodes: Nodes, rules: Rules, size: Floats) -> int:
    """The node with the fewest cores sold, of those whose memory holds a size with all balloons full."""
    best, lowest = NOBODY, 0.0
    for node in range(len(nodes.capacity)):
        room_mib = nodes.free[node, MEMORY] + nodes.deflatable[node, MEMORY] - rules.overhead_mib
        load = nodes.sold_cores[node] / nodes.capacity[node, CPU]
        if size[MEMORY] <= room_mib + 1e-6 and (best == NOBODY or load < lowest):
            best, lowest = node, load
    return best


@inner
def level_of(vms: Vms, nodes: Nodes, node: int, room_mib: float) -> float:
    """What each VM with a balloon may have above its minimum so that they have ``room_mib`` together; MiB."""
    level = 0.0
    while True:
        # Those that have all they may have leave more to the others.
        whole, others = 0.0, 0
        vm = nodes.first[node]
        while vm != NOBODY:
            if vms.priority[vm] != FIXED:
                span = vms.upper[vm, MEMORY] - vms.minimum[vm, MEMORY]
                if span <= level:
                    whole += span
                else:
                    others += 1
            vm = vms.after[vm]
        if others == 0:
            return level
        higher = max((room_mib - whole) / others, 0.0)
        if higher <= level + 1e-9:
            return level
        level = higher


@inner
def balloon(vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, node: int) -> None:
    """Bring the balloons and the rates of a node to where they belong after a change."""
    room_mib = GOAL * nodes.capacity[node, MEMORY]
    vm = nodes.first[node]
    while vm != NOBODY:
        floor = vms.upper[vm, MEMORY] if vms.priority[vm] == FIXED else vms.minimum[vm, MEMORY]
        room_mib -= floor + rules.overhead_mib
        vm = vms.after[vm]
    level = level_of(vms, nodes, node, room_mib)
    sold = nodes.sold_cores[node]
    cpu_share = min(nodes.capacity[node, CPU] / sold, 1.0) if sold > 0.0 else 1.0
    vm = nodes.first[node]
    while vm != NOBODY:
        if vms.priority[vm] != FIXED:
            size = min(vms.minimum[vm, MEMORY] + level, vms.upper[vm, MEMORY])
            before = vms.current[vm, MEMORY]
            if size != before:
                resize(vms, tally, vm, MEMORY, size)
                count(tally, vms.sold_as[vm], DEFLATIONS if size < before else REINFLATIONS)
        count_rate(vms, tally, vm, rate_of(vms, curves, vm, min(share_left(vms, vm), cpu_share)))
        vm = vms.after[vm]
    recount(vms, nodes, rules, node)
