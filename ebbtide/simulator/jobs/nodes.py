"""Policies that look at room only: best, first, worst fit, random, filling of the node that reports, least loaded.

The choices themselves are kernels of `simulator.nodes` (levels, tree, bins), but for worst fit and the least loaded
node, for which all are looked at. Here is what they know of the machines, kept up to date, for one compiled loop.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from ebbtide.simulator.chance import draws_of
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs.columns import MACHINE, TASK, Ints, State
from ebbtide.simulator.jobs.machines import fits, free_cores, free_mib
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.nodes import levels as node_levels
from ebbtide.simulator.nodes import tree as node_tree
from ebbtide.simulator.nodes.bins import move as move_bin
from ebbtide.simulator.nodes.bins import random_fit
from ebbtide.simulator.nodes.levels import best_fit
from ebbtide.simulator.nodes.levels import move as move_level
from ebbtide.simulator.nodes.tree import change as change_tree
from ebbtide.simulator.nodes.tree import first_fit

BEST_FIT: Final = 0
FIRST_FIT: Final = 1
RANDOM: Final = 2
FILLING: Final = 3
LEAST_LOADED: Final = 4
WORST_FIT: Final = 5
KINDS: Final = {
    "best-fit": BEST_FIT,
    "first-fit": FIRST_FIT,
    "random": RANDOM,
    "filling": FILLING,
    "least-loaded": LEAST_LOADED,
    "worst-fit": WORST_FIT,
}


class Nodes(NamedTuple):
    """What is known of the machines; a kind's arrays are empty where it is not the policy's."""

    #: (kind, the node that reports or -1).
    facts: Ints
    #: Free cores of each machine as they stand in the arrays below, and its free MiB.
    known: Ints
    spare: Ints
    draws: Ints
    sets: Ints
    offsets: Ints
    levels: Ints
    level_offsets: Ints
    tree: Ints
    by_free: Ints
    places: Ints
    starts: Ints


def make(kind: int, machines: int, most_cores: int, seed: int) -> Nodes:
    """Nothing is known of any machine yet."""
    none, empty = np.empty(0, np.int64), np.empty((0, 0), np.int64)
    best, tree, bins = kind == BEST_FIT, kind == FIRST_FIT, kind in (RANDOM, FILLING)
    offsets, level_offsets = node_levels.layers(machines), node_levels.layers(most_cores + 1)
    return Nodes(
        facts=np.array([kind, -1], np.int64),
        known=np.zeros(machines, np.int64) if bins else np.full(machines, -1, np.int64),
        spare=np.zeros(machines, np.int64),
        draws=draws_of(seed),
        sets=np.zeros((most_cores + 1, int(offsets[-1])), np.int64) if best else empty,
        offsets=offsets,
        levels=np.zeros((1, int(level_offsets[-1])), np.int64) if best else empty,
        level_offsets=level_offsets,
        tree=node_tree.tree_of(machines) if tree else none,
        by_free=np.arange(machines) if bins else none,
        places=np.arange(machines) if bins else none,
        starts=np.concatenate([[0], np.full(most_cores + 1, machines)]).astype(np.int64) if bins else none,
    )


def begin(s: State, p: Nodes, now_s: float) -> None:
    """Another node reports next."""
    p.facts[1] = -1


def choose(s: State, p: Nodes, task: int, now_s: float) -> int:
    """The machine by the policy's kind; -1 if none has room."""
    cores = s.tasks[task, TASK.cores]
    memory_mib = s.tasks[task, TASK.memory]
    kind = p.facts[0]
    if kind == BEST_FIT:
        return best_fit(p.sets, p.offsets, p.levels, p.level_offsets, p.spare, cores, memory_mib)
    if kind == FIRST_FIT:
        return first_fit(p.tree, p.spare, cores, memory_mib)
    if kind in (LEAST_LOADED, WORST_FIT):
        return emptiest(s, task, kind == WORST_FIT)
    if kind == FILLING:
        reporting = p.facts[1]
        if reporting >= 0 and fits(s, reporting, task):
            return int(reporting)
    machine = random_fit(p.by_free, p.starts, p.spare, cores, memory_mib, p.draws)
    if kind == FILLING and machine >= 0:
        p.facts[1] = machine
    return machine


def emptiest(s: State, task: int, idle: bool) -> int:
    """Of the nodes with room the one with the fewest cores in use, or the most `idle`, ties by number; -1: none has.

    Slurm's `LLN` takes the largest share of idle CPUs: the fewest in use where all nodes have as many CPUs, whatever a
    count beside them (`vcore`) leaves of them; the most idle where what a node lost counts as in use.
    """
    found, most = -1, 0
    for machine in range(len(s.machines)):
        if fits(s, machine, task):
            room = free_cores(s, machine) if idle else -s.machines[machine, MACHINE.used]
            if found < 0 or room > most:
                found, most = machine, room
    return found


def moved(s: State, p: Nodes, machine: int) -> None:
    """Take in what a machine has free now."""
    p.spare[machine] = free_mib(s, machine)
    free = free_cores(s, machine)
    before = p.known[machine]
    if free == before:
        return
    p.known[machine] = free
    kind = p.facts[0]
    if kind == BEST_FIT:
        move_level(p.sets, p.offsets, p.levels, p.level_offsets, machine, before, free)
    elif kind == FIRST_FIT:
        change_tree(p.tree, machine, free)
    elif kind in (RANDOM, FILLING):
        move_bin(p.by_free, p.places, p.starts, machine, before, free)


def policy(name: str) -> Policy:
    """A policy of this module by its name.

    :raises InvalidParameter: there is none.
    """
    if name not in KINDS:
        raise InvalidParameter("policy", f"must be one of {', '.join(KINDS)}, not {name!r}")
    kind = KINDS[name]

    def resized(s: State, p: Any, most_cores: int, seed: int) -> Nodes:
        known = make(kind, len(s.machines), most_cores, seed)
        if p is not None:
            known.draws[:] = p.draws
        return known

    return Policy(
        name="nodes",
        kernels={"begin": begin, "choose": choose, "moved": moved},
        state=Nodes,
        resized=resized,
        by_demand=True,
    )
