"""Linked lists in arrays: what waits in each queue, what runs on each machine. Kernels: compiled, no numba here."""

from __future__ import annotations

from ebbtide.simulator.jobs.columns import COUNT, MACHINE, QUEUE, TASK, State


def enqueue(s: State, task: int, order: int, first: bool) -> None:
    """Let a task wait, behind all of its queue or ahead of them; ``order`` says its place among all queues."""
    queue = s.tasks[task, TASK.queue]
    s.tasks[task, TASK.machine] = -1
    s.tasks[task, TASK.order] = order
    s.counts[COUNT.newest] = task
    if s.queues[queue, QUEUE.waiting] == 0:
        place = s.counts[COUNT.active]
        s.active[place] = queue
        s.queues[queue, QUEUE.active] = place
        s.counts[COUNT.active] = place + 1
        s.queues[queue, QUEUE.first] = task
        s.queues[queue, QUEUE.last] = task
        s.tasks[task, TASK.next] = -1
        s.tasks[task, TASK.before] = -1
    elif first:
        other = s.queues[queue, QUEUE.first]
        s.tasks[task, TASK.next] = other
        s.tasks[task, TASK.before] = -1
        s.tasks[other, TASK.before] = task
        s.queues[queue, QUEUE.first] = task
    else:
        other = s.queues[queue, QUEUE.last]
        s.tasks[task, TASK.before] = other
        s.tasks[task, TASK.next] = -1
        s.tasks[other, TASK.next] = task
        s.queues[queue, QUEUE.last] = task
    s.queues[queue, QUEUE.waiting] += 1
    s.counts[COUNT.waiting] += 1
    if s.counts[COUNT.waiting] > s.counts[COUNT.most_waiting]:
        s.counts[COUNT.most_waiting] = s.counts[COUNT.waiting]


def enqueue_by_submission(s: State, task: int) -> None:
    """Let a task that was killed wait where it did when its job came: behind all that came before it."""
    order = s.tasks[task, TASK.came]
    after = s.queues[s.tasks[task, TASK.queue], QUEUE.first]
    # Who runs has come before most that wait: a few steps.
    while after >= 0 and s.tasks[after, TASK.order] < order:
        after = s.tasks[after, TASK.next]
    if after < 0 or s.tasks[after, TASK.before] < 0:
        enqueue(s, task, order, after >= 0)
        return
    enqueue(s, task, order, False)
    before = s.tasks[after, TASK.before]
    queue = s.tasks[task, TASK.queue]
    last = s.tasks[task, TASK.before]
    s.queues[queue, QUEUE.last] = last
    s.tasks[last, TASK.next] = -1
    s.tasks[before, TASK.next] = task
    s.tasks[task, TASK.before] = before
    s.tasks[task, TASK.next] = after
    s.tasks[after, TASK.before] = task


def dequeue(s: State, task: int) -> None:
    """Take a task out of its queue."""
    queue = s.tasks[task, TASK.queue]
    before = s.tasks[task, TASK.before]
    after = s.tasks[task, TASK.next]
    if before >= 0:
        s.tasks[before, TASK.next] = after
    else:
        s.queues[queue, QUEUE.first] = after
    if after >= 0:
        s.tasks[after, TASK.before] = before
    else:
        s.queues[queue, QUEUE.last] = before
    s.counts[COUNT.waiting] -= 1
    s.queues[queue, QUEUE.waiting] -= 1
    if s.queues[queue, QUEUE.waiting] == 0:
        place = s.queues[queue, QUEUE.active]
        last = s.counts[COUNT.active] - 1
        moved = s.active[last]
        s.active[place] = moved
        s.queues[moved, QUEUE.active] = place
        s.queues[queue, QUEUE.active] = -1
        s.counts[COUNT.active] = last


def put_on(s: State, task: int, machine: int) -> None:
    """Let a task be the last that started on a machine."""
    last = s.machines[machine, MACHINE.last]
    s.tasks[task, TASK.machine] = machine
    s.tasks[task, TASK.before] = last
    s.tasks[task, TASK.next] = -1
    if last >= 0:
        s.tasks[last, TASK.next] = task
    else:
        s.machines[machine, MACHINE.first] = task
    s.machines[machine, MACHINE.last] = task
    s.machines[machine, MACHINE.running] += 1


def take_off(s: State, task: int) -> None:
    """Take a task out of the running ones of its machine."""
    machine = s.tasks[task, TASK.machine]
    before = s.tasks[task, TASK.before]
    after = s.tasks[task, TASK.next]
    if before >= 0:
        s.tasks[before, TASK.next] = after
    else:
        s.machines[machine, MACHINE.first] = after
    if after >= 0:
        s.tasks[after, TASK.before] = before
    else:
        s.machines[machine, MACHINE.last] = before
    s.machines[machine, MACHINE.running] -= 1
