"""Oracles: they know every change that will come (Agarwal et al. 2023 §4.1). Kernels: compiled, no numba here.

The paper's starts a task where no shrink at all comes before its end; the real bound is where no shrink comes that
kills one. Of the machines where that holds it takes the one that it took last, as a node that reports is filled, else a
random one: as YARN's CapacityScheduler, from which it differs in what it skips.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from ebbtide.simulator.chance import draws_of
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import Floats, Indices
from ebbtide.simulator.jobs.columns import MACHINE, TASK, TIME, Ints, State
from ebbtide.simulator.jobs.machines import fits
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.nodes.draws import draw

NO_SHRINK: Final = 0
NO_KILL: Final = 1
KINDS: Final = {"oracle-no-shrink": NO_SHRINK, "oracle-no-kill": NO_KILL}


class Future(NamedTuple):
    """All changes to come; rows per machine as the engine's."""

    #: [kind, the machine that was taken last or -1].
    facts: Ints
    draws: Ints
    #: Changes of machine i are ``at_s[first[i] : first[i + 1]]``; cores after each.
    first: Ints
    at_s: Floats
    cores: Ints


def holds(s: State, p: Future, machine: int, task: int, now_s: float) -> bool:
    """Whether a task that starts on a machine now, and all that run there, complete."""
    ends_s = now_s + s.times[task, TIME.left]
    cores = s.machines[machine, MACHINE.cores]
    low = p.first[machine]
    high = p.first[machine + 1]
    low += np.searchsorted(p.at_s[low:high], now_s, side="right")
    while low < high and p.at_s[low] < ends_s:
        after = p.cores[low]
        if after < cores:
            if p.facts[0] == NO_SHRINK:
                return False
            used = s.tasks[task, TASK.cores]
            other = s.machines[machine, MACHINE.first]
            while other >= 0:
                if s.times[other, TIME.ends] > p.at_s[low]:
                    used += s.tasks[other, TASK.cores]
                other = s.tasks[other, TASK.next]
            if used > after:
                return False
        cores = after
        low += 1
    return True


def choose(s: State, p: Future, task: int, now_s: float) -> int:
    """A machine with room where the task will complete; -1: none."""
    last = int(p.facts[1])
    if last >= 0 and fits(s, last, task) and holds(s, p, last, task, now_s):
        return last
    count = len(s.machines)
    begin = draw(p.draws, count)
    for step in range(count):
        machine = (begin + step) % count
        if fits(s, machine, task) and holds(s, p, machine, task, now_s):
            p.facts[1] = machine
            return machine
    return -1


def begin(s: State, p: Future, now_s: float) -> None:
    """Another node reports next."""
    p.facts[1] = -1


def policy(name: str, machine: Indices, at_s: Floats, cores: Indices) -> Policy:
    """An oracle over these changes, in the order of their times; machines by the engine's numbers.

    :raises InvalidParameter: there is no such oracle.
    """
    if name not in KINDS:
        raise InvalidParameter("policy", f"must be one of {', '.join(KINDS)}, not {name!r}")
    order = np.lexsort((at_s, machine))
    counts = np.bincount(machine)

    def resized(s: State, p: Any, most_cores: int, seed: int) -> Future:
        first = np.zeros(len(s.machines) + 1, np.int64)
        known = min(len(counts), len(s.machines))
        first[1 : known + 1] = np.cumsum(counts[:known])
        first[known + 1 :] = first[known]
        return Future(
            np.array([KINDS[name], -1], np.int64),
            draws_of(seed),
            first,
            at_s[order],
            cores[order].astype(np.int64),
        )

    return Policy("oracle", {"choose": choose, "begin": begin}, Future, resized, by_demand=False)
