"""A look at the queue: all that waits, in order, by the discipline. Kernels: compiled, no numba here.

The order is: rank of the priority, then the place in the queue. Tasks of one rank that want the same wait in one
queue, so that a task is found among as many candidates as there are different demands, however many wait.
"""

from __future__ import annotations

import math
from typing import Any

from ebbtide.simulator.jobs.columns import COUNT, EASY, MACHINE, OPTION, QUEUE, STRICT, TASK, TIME, State
from ebbtide.simulator.jobs.machines import fits, free_cores, free_mib
from ebbtide.simulator.jobs.policy import begin, choose, moved
from ebbtide.simulator.jobs.running import start
from ebbtide.simulator.nodes.backfilling import may_start_before, reservation


def next_waiting(s: State) -> int:
    """The first of all that are still to be looked at, by the queues' cursors; its queue, or -1."""
    best = -1
    best_rank = 0
    best_order = 0
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        task = s.queues[queue, QUEUE.cursor]
        if task < 0:
            continue
        rank = s.queues[queue, QUEUE.rank]
        order = s.tasks[task, TASK.order]
        if best < 0 or rank < best_rank or (rank == best_rank and order < best_order):
            best = queue
            best_rank = rank
            best_order = order
    return best


def rewind(s: State) -> None:
    """Let the queues' cursors stand on their first tasks: a look begins."""
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        s.queues[queue, QUEUE.cursor] = s.queues[queue, QUEUE.first]


def schedule(s: State, p: Any, now_s: float) -> None:
    """Start what may start now.

    Strict: the first that cannot start blocks all others. Conserving: it is passed over. EASY: it is passed over by
    what does not delay it, by the expected runtimes.
    """
    if s.counts[COUNT.active] == 0:
        return
    begin(s, p, now_s)
    rewind(s)
    discipline = s.options[OPTION.discipline]
    left = s.options[OPTION.depth]
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
        task = s.queues[queue, QUEUE.cursor]
        machine = choose(s, p, task, now_s)
        if machine < 0 and reserved >= 0 and backfills(s, task, now_s, reserved, reserved_s, spare_cores, spare_mib):
            machine = reserved
            if now_s + s.times[task, TIME.estimate] > reserved_s:
                spare_cores -= s.tasks[task, TASK.cores]
                spare_mib -= s.tasks[task, TASK.memory]
        if machine >= 0:
            s.queues[queue, QUEUE.cursor] = s.tasks[task, TASK.next]
            start(s, p, task, machine, now_s)
            continue
        if discipline == STRICT:
            break
        if discipline == EASY:
            if not blocked:
                blocked = True
                reserved, reserved_s, spare_cores, spare_mib = reserve(s, task, now_s)
                if reserved >= 0:
                    s.machines[reserved, MACHINE.held] += 1
                    moved(s, p, reserved)
            s.queues[queue, QUEUE.cursor] = s.tasks[task, TASK.next]
        elif s.options[OPTION.by_demand] != 0:
            s.queues[queue, QUEUE.cursor] = -1
        else:
            s.queues[queue, QUEUE.cursor] = s.tasks[task, TASK.next]
    if reserved >= 0:
        s.machines[reserved, MACHINE.held] -= 1
        moved(s, p, reserved)
    s.counts[COUNT.reserved] = reserved


def backfills(
    s: State, task: int, now_s: float, reserved: int, reserved_s: float, spare_cores: int, spare_mib: int
) -> bool:
    """Whether a task may start on the reserved machine: it does not delay the task that this is reserved for."""
    s.machines[reserved, MACHINE.held] -= 1
    may = fits(s, reserved, task) and may_start_before(
        now_s + s.times[task, TIME.estimate],
        reserved_s,
        s.tasks[task, TASK.cores],
        s.tasks[task, TASK.memory],
        spare_cores,
        spare_mib,
    )
    s.machines[reserved, MACHINE.held] += 1
    return bool(may)


def reserve(s: State, task: int, now_s: float) -> tuple[int, float, int, int]:
    """The machine that has room for a task first (-1: none ever), when, and what is to spare there then."""
    found = -1
    found_s = math.inf
    found_cores = 0
    found_mib = 0
    need_cores = s.tasks[task, TASK.cores]
    need_mib = s.tasks[task, TASK.memory]
    for machine in range(len(s.machines)):
        if s.machines[machine, MACHINE.held] != 0 or s.machines[machine, MACHINE.cores] < need_cores:
            continue
        if s.machines[machine, MACHINE.memory] < need_mib:
            continue
        count = 0
        other = s.machines[machine, MACHINE.first]
        while other >= 0:
            # What runs longer than was expected may end at any time.
            s.scratch_times[count] = max(s.times[other, TIME.expected], now_s)
            s.scratch[count] = s.tasks[other, TASK.cores]
            s.scratch_more[count] = s.tasks[other, TASK.memory]
            count += 1
            other = s.tasks[other, TASK.next]
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
