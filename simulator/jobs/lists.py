"""Linked lists in arrays: what waits in each queue, what runs on each machine. Kernels: compiled, no numba here."""

from __future__ import annotations

from simulator.jobs.columns import (
    C_ACTIVE,
    C_MOST_WAITING,
    C_WAITING,
    M_FIRST,
    M_LAST,
    M_RUNNING,
    Q_ACTIVE,
    Q_COUNT,
    Q_FIRST,
    Q_LAST,
    T_BEFORE,
    T_MACHINE,
    T_NEXT,
    T_ORDER,
    T_QUEUE,
    State,
)


def enqueue(s: State, task: int, order: int, first: bool) -> None:
    """Let a task wait, behind all of its queue or ahead of them; ``order`` says its place among all queues."""
    queue = s.tasks[task, T_QUEUE]
    s.tasks[task, T_MACHINE] = -1
    s.tasks[task, T_ORDER] = order
    if s.queues[queue, Q_COUNT] == 0:
        place = s.counts[C_ACTIVE]
        s.active[place] = queue
        s.queues[queue, Q_ACTIVE] = place
        s.counts[C_ACTIVE] = place + 1
        s.queues[queue, Q_FIRST] = task
        s.queues[queue, Q_LAST] = task
        s.tasks[task, T_NEXT] = -1
        s.tasks[task, T_BEFORE] = -1
    elif first:
        other = s.queues[queue, Q_FIRST]
        s.tasks[task, T_NEXT] = other
        s.tasks[task, T_BEFORE] = -1
        s.tasks[other, T_BEFORE] = task
        s.queues[queue, Q_FIRST] = task
    else:
        other = s.queues[queue, Q_LAST]
        s.tasks[task, T_BEFORE] = other
        s.tasks[task, T_NEXT] = -1
        s.tasks[other, T_NEXT] = task
        s.queues[queue, Q_LAST] = task
    s.queues[queue, Q_COUNT] += 1
    s.counts[C_WAITING] += 1
    if s.counts[C_WAITING] > s.counts[C_MOST_WAITING]:
        s.counts[C_MOST_WAITING] = s.counts[C_WAITING]


def dequeue(s: State, task: int) -> None:
    """Take a task out of its queue."""
    queue = s.tasks[task, T_QUEUE]
    before = s.tasks[task, T_BEFORE]
    after = s.tasks[task, T_NEXT]
    if before >= 0:
        s.tasks[before, T_NEXT] = after
    else:
        s.queues[queue, Q_FIRST] = after
    if after >= 0:
        s.tasks[after, T_BEFORE] = before
    else:
        s.queues[queue, Q_LAST] = before
    s.counts[C_WAITING] -= 1
    s.queues[queue, Q_COUNT] -= 1
    if s.queues[queue, Q_COUNT] == 0:
        place = s.queues[queue, Q_ACTIVE]
        last = s.counts[C_ACTIVE] - 1
        moved = s.active[last]
        s.active[place] = moved
        s.queues[moved, Q_ACTIVE] = place
        s.queues[queue, Q_ACTIVE] = -1
        s.counts[C_ACTIVE] = last


def put_on(s: State, task: int, machine: int) -> None:
    """Let a task be the last that started on a machine."""
    last = s.machines[machine, M_LAST]
    s.tasks[task, T_MACHINE] = machine
    s.tasks[task, T_BEFORE] = last
    s.tasks[task, T_NEXT] = -1
    if last >= 0:
        s.tasks[last, T_NEXT] = task
    else:
        s.machines[machine, M_FIRST] = task
    s.machines[machine, M_LAST] = task
    s.machines[machine, M_RUNNING] += 1


def take_off(s: State, task: int) -> None:
    """Take a task out of the running ones of its machine."""
    machine = s.tasks[task, T_MACHINE]
    before = s.tasks[task, T_BEFORE]
    after = s.tasks[task, T_NEXT]
    if before >= 0:
        s.tasks[before, T_NEXT] = after
    else:
        s.machines[machine, M_FIRST] = after
    if after >= 0:
        s.tasks[after, T_BEFORE] = before
    else:
        s.machines[machine, M_LAST] = before
    s.machines[machine, M_RUNNING] -= 1
