"""The compiled event loop: arrivals in order, departures in between; at one instant departures come first."""

from __future__ import annotations

from ebbtide.deflation.kernels import DEFLATABLE, FIXED, WIDTH, fits
from ebbtide.simulator.cluster.ballooning import balloon, least_loaded
from ebbtide.simulator.cluster.checks import check
from ebbtide.simulator.cluster.members import count, move_clock, recount
from ebbtide.simulator.cluster.placing import place
from ebbtide.simulator.cluster.resizing import reinflate
from ebbtide.simulator.cluster.slots import begin_stay, end_stay, give_slot, take_slot
from ebbtide.simulator.cluster.state import (
    ADMITTED,
    DEFLATED_AT_START,
    DEPARTED,
    EVENTS,
    LEAVING,
    LOW,
    NOBODY,
    NUMBER,
    OFFERED,
    REFUSED,
    VICTIMS,
    Asked,
    Curves,
    Nodes,
    Rules,
    Tally,
    Vms,
    Work,
)
from ebbtide.simulator.compiling import compiled, inner
from ebbtide.simulator.inputs.batches import Indices


@compiled
def advance(
    vms: Vms,
    nodes: Nodes,
    tally: Tally,
    curves: Curves,
    rules: Rules,
    work: Work,
    arrivals: Asked,
    until_s: float,
    outcomes: Indices,
    victims: Indices,
) -> bool:
    """Go through arrivals, and departures up to the last of them; then through departures up to ``until_s``.

    There is a free slot for every arrival.

    :param until_s: minus infinity: the next arrivals are still to come.
    :param outcomes: filled with the node of each arrival; NOBODY: refused.
    :param victims: filled with number and node of each VM that was preempted, and the number for which it was.
    :returns: False if a check has failed: see ``tally.fault``.
    """
    rows = len(arrivals)
    for row in range(rows + 1):
        next_s = arrivals.at_s[row] if row < rows else until_s
        while tally.state[LEAVING] > 0 and vms.departs_s[vms.heap[0]] <= next_s:
            move_clock(tally, vms.departs_s[vms.heap[0]])
            depart(vms, nodes, tally, curves, rules, work, vms.heap[0])
            tally.state[EVENTS] += 1
            if rules.validate and not check(vms, nodes, tally, rules):
                return False
        move_clock(tally, next_s)
        if row < rows:
            outcomes[row] = arrive(vms, nodes, tally, curves, rules, work, arrivals, row, victims)
            tally.state[EVENTS] += 1
            if rules.validate and not check(vms, nodes, tally, rules):
                return False
    return True


@inner
def arrive(
    vms: Vms,
    nodes: Nodes,
    tally: Tally,
    curves: Curves,
    rules: Rules,
    work: Work,
    arrivals: Asked,
    row: int,
    victims: Indices,
) -> int:
    """A VM is asked for. Returns its node; NOBODY: refused."""
    vm = take_slot(vms, tally)
    vms.number[vm] = tally.state[NUMBER]
    vms.sold_as[vm] = arrivals.sold_as[row]
    # A policy that gives low priority no other treatment knows fixed VMs only.
    vms.priority[vm] = DEFLATABLE if arrivals.sold_as[row] == LOW and rules.preempts + rules.balloons else FIXED
    vms.departs_s[vm] = arrivals.departs_s[row]
    vms.curve[vm] = arrivals.curve[row]
    for c in range(WIDTH):
        vms.upper[vm, c] = arrivals.upper[row, c]
        vms.minimum[vm, c] = arrivals.minimum[row, c]
        vms.current[vm, c] = arrivals.upper[row, c]
    count(tally, vms.sold_as[vm], OFFERED)
    preempted = tally.state[VICTIMS]
    if rules.balloons:
        node = least_loaded(vms, nodes, rules, arrivals.upper[row])
    else:
        node = place(vms, nodes, tally, curves, rules, work, vm, arrivals.draws[row], victims)
    tally.state[NUMBER] += 1
    if node == NOBODY:
        count(tally, vms.sold_as[vm], REFUSED)
        give_slot(vms, tally, vm)
        return NOBODY
    count(tally, vms.sold_as[vm], ADMITTED)
    if not fits(arrivals.upper[row], vms.current[vm]):
        count(tally, vms.sold_as[vm], DEFLATED_AT_START)
    begin_stay(vms, nodes, tally, curves, vm, node)
    if rules.balloons:
        balloon(vms, nodes, tally, curves, rules, node)
        return node
    recount(vms, nodes, rules, node)
    if tally.state[VICTIMS] > preempted:
        # What the preemption freed beyond the need goes back to the others.
        reinflate(vms, nodes, tally, curves, rules, work, node)
    return node


@inner
def depart(vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, work: Work, vm: int) -> None:
    """A VM goes, and what it held goes back to the others."""
    node = end_stay(vms, nodes, tally, vm, DEPARTED)
    recount(vms, nodes, rules, node)
    if rules.balloons:
        balloon(vms, nodes, tally, curves, rules, node)
    else:
        reinflate(vms, nodes, tally, curves, rules, work, node)
