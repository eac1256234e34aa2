"""The compiled event loop: arrivals in order, departures in between; at one instant departures come first."""

from __future__ import annotations

import math

from deflation.kernels import DEFLATABLE, FIXED, WIDTH, fits
from simulator.cluster.ballooning import balloon, least_loaded
from simulator.cluster.checks import check
from simulator.cluster.members import count, move_clock, recount
from simulator.cluster.placing import place
from simulator.cluster.resizing import reinflate
from simulator.cluster.slots import begin_stay, end_stay, give_slot, take_slot
from simulator.cluster.state import (
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
    Arrivals,
    Curves,
    Nodes,
    Rules,
    Tally,
    Vms,
    Work,
)
from simulator.compiling import compiled
from simulator.inputs.batches import Indices


@compiled
def advance(
    vms: Vms,
    nodes: Nodes,
    tally: Tally,
    curves: Curves,
    rules: Rules,
    work: Work,
    arrivals: Arrivals,
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
    rows = len(arrivals.at_s)
    row = 0
    while True:
        arrival_s = arrivals.at_s[row] if row < rows else math.inf
        departure_s = vms.departs_s[vms.heap[0]] if tally.state[LEAVING] > 0 else math.inf
        if departure_s <= (arrival_s if row < rows else until_s):
            move_clock(tally, departure_s)
            depart(vms, nodes, tally, curves, rules, work, vms.heap[0])
        elif row < rows:
            move_clock(tally, arrival_s)
            outcomes[row] = arrive(vms, nodes, tally, curves, rules, work, arrivals, row, victims)
            row += 1
        else:
            break
        tally.state[EVENTS] += 1
        if rules.validate and not check(vms, nodes, tally, curves, rules):
            return False
    if until_s < math.inf:
        move_clock(tally, until_s)
    return True


@compiled
def arrive(
    vms: Vms,
    nodes: Nodes,
    tally: Tally,
    curves: Curves,
    rules: Rules,
    work: Work,
    arrivals: Arrivals,
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


@compiled
def depart(vms: Vms, nodes: Nodes, tally: Tally, curves: Curves, rules: Rules, work: Work, vm: int) -> None:
    """A VM goes, and what it held goes back to the others."""
    node = end_stay(vms, nodes, tally, vm, DEPARTED, -1)
    recount(vms, nodes, rules, node)
    if rules.balloons:
        balloon(vms, nodes, tally, curves, rules, node)
    else:
        reinflate(vms, nodes, tally, curves, rules, work, node)
