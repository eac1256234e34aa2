"""Placement of a VM in a simulated cluster: its node, and the room made there, by the kernels of the live placement.

What differs from the live system is that everything takes no time and no layer ever falls short.
Source: Sharma et al. 2019 §5; docs/internals/contracts.md, splitting a need.
"""

from __future__ import annotations

from typing import Final

from ebbtide.deflation import kernels
from ebbtide.deflation.kernels import WIDTH
from ebbtide.deflation.placement import kernels as placement_kernels
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.placement.placement_step import (
    DEFLATED,
    LEAVE,
    MOST_HOSTS,
    MOST_RECLAIMS,
    PLACE,
    PREEMPTING,
    RECLAIM,
    REFUSE,
    START,
)
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.simulator.cluster.members import CPU, MEMORY, recount
from ebbtide.simulator.cluster.resizing import deflate, gather, reinflate
from ebbtide.simulator.cluster.slots import end_stay
from ebbtide.simulator.cluster.starting import start_deflated
from ebbtide.simulator.cluster.state import (
    MOST_NODES,
    NOBODY,
    NOW_S,
    NUMBER,
    PREEMPTED,
    PURPOSE,
    VICTIMS,
    Curves,
    Nodes,
    Rules,
    Tally,
    Vms,
    Work,
)
from ebbtide.simulator.compiling import inner, shared
from ebbtide.simulator.inputs.batches import Floats, Indices

for kernel in (*placement_step.KERNELS, *placement_kernels.KERNELS):
    shared(kernel)

best_host = placement_kernels.best_host
first_host = placement_kernels.first_host
fitter_host = placement_kernels.fitter_host
holds_demand = placement_kernels.holds_demand
decide = placement_step.decide
missing_of = placement_step.missing_of
need_of = placement_step.need_of
next_purpose = placement_step.next_purpose
sizes_to_reach = placement_step.sizes_to_reach
is_nothing = kernels.is_nothing
choose_victims = kernels.victims
preemption_cost = kernels.preemption_cost
scale_of = placement_kernels.scale_of

#: Rules.placement is an index of this.
PLACEMENTS: Final = tuple(PlacementPolicy)
BEST_FIT: Final = PLACEMENTS.index(PlacementPolicy.BEST_FIT)
FIRST_FIT: Final = PLACEMENTS.index(PlacementPolicy.FIRST_FIT)
TWO_CHOICES: Final = PLACEMENTS.index(PlacementPolicy.TWO_CHOICES)


@inner
def choose(nodes: Nodes, tally: Tally, rules: Rules, availability: Floats, draws: Floats) -> int:
    """The node to try first for the size that is asked for; NOBODY if none can hold it.

    :param draws: two numbers in [0, 1).
    """
    if rules.placement == FIRST_FIT:
        return int(first_host(tally.asked, availability, nodes.capacity))
    if rules.placement == TWO_CHOICES:
        return draw(nodes, tally, availability, draws)
    if rules.placement == BEST_FIT:
        return int(best_host(tally.asked, availability, nodes.capacity, tally.factors))
    raise ValueError("rules.placement is the index of no policy")


@inner
def draw(nodes: Nodes, tally: Tally, availability: Floats, draws: Floats) -> int:
    """The fitter of two nodes that can hold the size, each pair as likely as any other."""
    able = 0
    for node in range(len(availability)):
        if holds_demand(tally.asked, availability[node], nodes.capacity[node]):
            able += 1
    if able == 0:
        return NOBODY
    first = int(draws[0] * able)
    second = int(draws[1] * (able - 1))
    if able > 1 and second >= first:
        second += 1
    one = other = NOBODY
    able = 0
    for node in range(len(availability)):
        if holds_demand(tally.asked, availability[node], nodes.capacity[node]):
            if able == first:
                one = node
            if able == second:
                other = node
            able += 1
    return int(fitter_host(tally.asked, availability, nodes.capacity, tally.factors, one, other))


@inner
def place(
    vms: Vms,
    nodes: Nodes,
    tally: Tally,
    curves: Curves,
    rules: Rules,
    work: Work,
    vm: int,
    draws: Floats,
    victims: Indices,
) -> int:
    """Find a node for a VM and make room for it there.

    :param victims: its next rows are filled with whom that has preempted.
    :returns: the node; NOBODY if the VM is refused.
    """
    for c in range(WIDTH):
        tally.asked[c] = vms.upper[vm, c]
        tally.demand[c] = vms.upper[vm, c] + (rules.overhead_mib if c == MEMORY else 0.0)
    # In the tally and not in a variable: compilers take a constant that becomes a variable for two functions.
    tally.state[PURPOSE] = PLACE
    while tally.state[PURPOSE] != REFUSE:
        purpose = tally.state[PURPOSE]
        availability = nodes.preemptable if purpose == PREEMPTING else nodes.placeable
        found, left, acted = NOBODY, 0, 0
        while found == NOBODY and left < MOST_NODES and acted < MOST_HOSTS:
            if purpose == DEFLATED:
                for c in range(WIDTH):
                    tally.asked[c] = vms.minimum[vm, c]
            node = choose(nodes, tally, rules, availability, draws)
            if node == NOBODY:
                break
            if purpose == DEFLATED:
                started = start_deflated(vms, nodes, tally, curves, rules, work, node, vm, vms.minimum[vm])
            else:
                verdict, reclaims = make_room(
                    vms, nodes, tally, curves, rules, work, node, purpose == PREEMPTING, victims
                )
                started = verdict == START
                if reclaims and not started:
                    reinflate(vms, nodes, tally, curves, rules, work, node)
                    acted += 1
            if started:
                found = node
            else:
                # Out of the running, until it is recounted.
                availability[node, CPU] = -1.0
                tally.left[left] = node
                left += 1
        for k in range(left):
            recount(vms, nodes, rules, tally.left[k])
        if found != NOBODY:
            return found
        purpose = next_purpose(purpose, vms.priority[vm], rules.start_deflated != 0)
        tally.state[PURPOSE] = REFUSE if purpose == PREEMPTING and not rules.preempts else purpose
    return NOBODY


@inner
def make_room(
    vms: Vms,
    nodes: Nodes,
    tally: Tally,
    curves: Curves,
    rules: Rules,
    work: Work,
    node: int,
    preempting: bool,
    victims: Indices,
) -> tuple[int, int]:
    """Do at a node what the kernels decide, until the VM can start there or the node is left.

    :returns: START or LEAVE, and how often the node's VMs were deflated.
    """
    reclaims = preempted = 0
    while True:
        missing_of(tally.demand, nodes.free[node], nodes.capacity[node], tally.missing)
        need_of(tally.missing, nodes.deflatable[node], tally.need)
        may_reclaim = reclaims < MOST_RECLAIMS and (reclaims == 0 or is_nothing(tally.short))
        verdict = decide(tally.missing, nodes.deflatable[node], tally.need, preempting, preempted > 0, may_reclaim)
        if verdict == START:
            return START, reclaims
        if preempting and reclaims == 0 and preempted == 0:
            set_goals(vms, nodes, tally, rules, work, node)
        if verdict == RECLAIM:
            deflate(vms, nodes, tally, curves, rules, work, node)
            reclaims += 1
        elif verdict == LEAVE:
            return LEAVE, reclaims
        else:
            gone = preempt(vms, nodes, tally, rules, work, node, victims)
            if gone == 0:
                return LEAVE, reclaims
            preempted += gone


@inner
def set_goals(vms: Vms, nodes: Nodes, tally: Tally, rules: Rules, work: Work, node: int) -> None:
    """The sizes by which victims are chosen are those before anything changes."""
    rows = gather(vms, nodes, rules, work, node)
    sizes_to_reach(
        work.priority[:rows],
        work.upper[:rows],
        work.minimum[:rows],
        work.current[:rows],
        tally.missing,
        work.order[:rows],
        work.targets[:rows],
    )
    for k in range(rows):
        for c in range(WIDTH):
            vms.goal[work.vm[k], c] = work.targets[k, c]


@inner
def preempt(vms: Vms, nodes: Nodes, tally: Tally, rules: Rules, work: Work, node: int, victims: Indices) -> int:
    """Stop those that are farthest from their goals, together.

    :returns: how many; 0 if even all would not do.
    """
    rows = gather(vms, nodes, rules, work, node)
    for k in range(rows):
        ran_s = tally.clock[NOW_S] - vms.admitted_s[work.vm[k]]
        work.cost[k] = preemption_cost(rules.choice, work.current[k, MEMORY], ran_s)
        for c in range(WIDTH):
            work.targets[k, c] = vms.goal[work.vm[k], c]
    # There are no harvest VMs here: the largest size of each is its nominal one.
    many = choose_victims(
        work.priority[:rows],
        work.upper[:rows],
        work.current[:rows],
        work.charge[:rows],
        tally.missing,
        work.targets[:rows],
        work.cost[:rows],
        work.order[:rows],
        work.chosen[:rows],
    )
    if many <= 0:
        return 0
    for k in range(many):
        vm = work.vm[work.chosen[k]]
        written = tally.state[VICTIMS]
        victims[written, 0] = vms.number[vm]
        victims[written, 1] = node
        victims[written, 2] = tally.state[NUMBER]
        tally.state[VICTIMS] = written + 1
        end_stay(vms, nodes, tally, vm, PREEMPTED)
    recount(vms, nodes, rules, node)
    return int(many)
