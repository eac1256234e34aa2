"""Who starts next: one look at all that waits, in order, by the discipline. Kernels: compiled, no numba here.

The order is: rank of the priority, then the place in the queue. Tasks of one rank that want the same wait in one
queue, so that a task is found among as many candidates as there are different demands, however many wait.
"""

from __future__ import annotations

import math
from typing import Any

from simulator.jobs.columns import (
    C_ACTIVE,
    C_RESERVED,
    EASY,
    F_ESTIMATE,
    F_EXPECTED,
    M_CORES,
    M_FIRST,
    M_HELD,
    M_MEMORY,
    O_DEPTH,
    O_DISCIPLINE,
    Q_CURSOR,
    Q_FIRST,
    Q_RANK,
    STRICT,
    T_CORES,
    T_MEMORY,
    T_NEXT,
    T_ORDER,
    State,
)
from simulator.jobs.hooks import begin, choose, moved
from simulator.jobs.room import fits, free_cores, free_mib
from simulator.jobs.running import start
from task_matcher.backfilling import may_start_before, reservation

#: Whether a policy that finds no machine for a task finds none for any other that wants the same. `building` replaces
#: it.
BY_DEMAND = True


def next_waiting(s: State) -> int:
    """The first of all that are still to be looked at, by the queues' cursors; its queue, or -1."""
    best = -1
    best_rank = 0
    best_order = 0
    for i in range(s.counts[C_ACTIVE]):
        queue = s.active[i]
        task = s.queues[queue, Q_CURSOR]
        if task < 0:
            continue
        rank = s.queues[queue, Q_RANK]
        order = s.tasks[task, T_ORDER]
        if best < 0 or rank < best_rank or (rank == best_rank and order < best_order):
            best = queue
            best_rank = rank
            best_order = order
    return best


def rewind(s: State) -> None:
    """Let the queues' cursors stand on their first tasks: a look begins."""
    for i in range(s.counts[C_ACTIVE]):
        queue = s.active[i]
        s.queues[queue, Q_CURSOR] = s.queues[queue, Q_FIRST]


def schedule(s: State, p: Any, now_s: float) -> None:
    """Start what may start now.

    Strict: the first that cannot start blocks all others. Conserving: it is passed over. EASY: it is passed over by
    what does not delay it, by the expected runtimes.
    """
    if s.counts[C_ACTIVE] == 0:
        return
    begin(s, p, now_s)
    rewind(s)
    discipline = s.options[O_DISCIPLINE]
    left = s.options[O_DEPTH]
    if left <= 0:
        left = 1 << 60
    reserved = -1
    reserved_s = math.inf
    spare_cores = 0
    spare_mib = 0
    blocked = False
    while left > 0:
        queue = next_waiting(s)
        if queue < 0:
            break
        left -= 1
        task = s.queues[queue, Q_CURSOR]
        machine = choose(s, p, task, now_s)
        if machine < 0 and reserved >= 0:
            s.machines[reserved, M_HELD] -= 1
            if fits(s, reserved, task) and may_start_before(
                now_s + s.times[task, F_ESTIMATE],
                reserved_s,
                s.tasks[task, T_CORES],
                s.tasks[task, T_MEMORY],
                spare_cores,
                spare_mib,
            ):
                machine = reserved
                if now_s + s.times[task, F_ESTIMATE] > reserved_s:
                    spare_cores -= s.tasks[task, T_CORES]
                    spare_mib -= s.tasks[task, T_MEMORY]
            s.machines[reserved, M_HELD] += 1
        if machine >= 0:
            s.queues[queue, Q_CURSOR] = s.tasks[task, T_NEXT]
            start(s, p, task, machine, now_s)
            continue
        if discipline == STRICT:
            break
        if discipline == EASY:
            if not blocked:
                blocked = True
                reserved, reserved_s, spare_cores, spare_mib = reserve(s, task, now_s)
                if reserved >= 0:
                    s.machines[reserved, M_HELD] += 1
                    moved(s, p, reserved)
            s.queues[queue, Q_CURSOR] = s.tasks[task, T_NEXT]
        elif BY_DEMAND:
            s.queues[queue, Q_CURSOR] = -1
        else:
            s.queues[queue, Q_CURSOR] = s.tasks[task, T_NEXT]
    if reserved >= 0:
        s.machines[reserved, M_HELD] -= 1
        moved(s, p, reserved)
    s.counts[C_RESERVED] = reserved


def reserve(s: State, task: int, now_s: float) -> tuple[int, float, int, int]:
    """The machine that has room for a task first (-1: none ever), when, and what is to spare there then."""
    found = -1
    found_s = math.inf
    found_cores = 0
    found_mib = 0
    need_cores = s.tasks[task, T_CORES]
    need_mib = s.tasks[task, T_MEMORY]
    for machine in range(len(s.machines)):
        if s.machines[machine, M_HELD] != 0 or s.machines[machine, M_CORES] < need_cores:
            continue
        if s.machines[machine, M_MEMORY] < need_mib:
            continue
        count = 0
        other = s.machines[machine, M_FIRST]
        while other >= 0:
            # What runs longer than was expected may end at any time.
            s.scratch_times[count] = max(s.times[other, F_EXPECTED], now_s)
            s.scratch[count] = s.tasks[other, T_CORES]
            s.scratch_more[count] = s.tasks[other, T_MEMORY]
            count += 1
            other = s.tasks[other, T_NEXT]
        at_s, cores, mib = reservation(
            s.scratch_times,
            s.scratch,
            s.scratch_more,
            count,
            free_cores(s, machine),
            free_mib(s, machine),
            need_cores,
            need_mib,
        )
        if at_s < found_s:
            found, found_s, found_cores, found_mib = machine, at_s, cores, mib
    return found, found_s, found_cores, found_mib
