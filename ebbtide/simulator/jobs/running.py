"""Steps in the life of tasks: they start, complete, are killed; machines change under them. Kernels, no numba here."""

from __future__ import annotations

import math
from typing import Any

from ebbtide.matcher.policies.victims import NEWEST, choose_victims
from ebbtide.simulator.jobs.columns import (
    COMPLETION,
    COUNT,
    HEAD,
    JOB,
    JOB_TIME,
    MACHINE,
    MACHINE_TIME,
    OPTION,
    SLOWDOWN,
    SUBMISSION,
    SUM,
    TASK,
    TASK_WAIT,
    TIME,
    WAIT,
    State,
)
from ebbtide.simulator.jobs.ends import push, remove
from ebbtide.simulator.jobs.lists import dequeue, enqueue, enqueue_by_submission, put_on, take_off
from ebbtide.simulator.jobs.machines import grow
from ebbtide.simulator.jobs.measures import add, note, overlap
from ebbtide.simulator.jobs.policy import changed, ended, moved, started, withdrawn


def tick(s: State, at_s: float) -> None:
    """Let time go on: what is used and what is there, integrated. Nothing has changed since the last time."""
    now_s = s.sums[SUM.now]
    if at_s <= now_s:
        return
    used = s.counts[COUNT.used_cores] * (at_s - now_s)
    add(s.sums, SUM.used, used)
    outside = outside_share(s, now_s, at_s)
    if outside > 0.0:
        add(s.sums, SUM.used_outside, used * outside)
    s.sums[SUM.now] = at_s


def outside_share(s: State, begin_s: float, end_s: float) -> float:
    """Which share of a stretch of time is not measured."""
    from_s = s.sums[SUM.from_s]
    to_s = s.sums[SUM.to_s]
    if from_s <= begin_s and end_s <= to_s:
        return 0.0
    return 1.0 - overlap(begin_s, end_s, from_s, to_s) / (end_s - begin_s)


def checkpoint_every_s(s: State, task: int) -> float:
    """Useful seconds between two checkpoints of a task; 0: it makes none."""
    every_s = s.sums[SUM.checkpoint_every]
    if every_s > 0.0 and s.jobs[s.tasks[task, TASK.job], JOB.number] % s.options[OPTION.checkpointed] != 0:
        return 0.0
    return float(every_s)


def checkpoints(every_s: float, left_s: float) -> float:
    """How many checkpoints a task makes on its way: none at its end."""
    if every_s <= 0 or left_s <= every_s:
        return 0.0
    return math.ceil(left_s / every_s) - 1.0


def start(s: State, p: Any, task: int, machine: int, now_s: float) -> None:
    """A waiting task starts on a machine that has room for it."""
    dequeue(s, task)
    put_on(s, task, machine)
    cores = s.tasks[task, TASK.cores]
    s.machines[machine, MACHINE.used] += cores
    s.machines[machine, MACHINE.used_memory] += s.tasks[task, TASK.memory]
    s.counts[COUNT.used_cores] += cores
    s.tasks[task, TASK.start] = s.counts[COUNT.starts]
    s.counts[COUNT.starts] += 1
    every_s = checkpoint_every_s(s, task)
    cost_s = s.sums[SUM.checkpoint_cost]
    left_s = s.times[task, TIME.left]
    ends_s = now_s + left_s
    expected_s = now_s + s.times[task, TIME.estimate]
    if every_s > 0:
        ends_s += cost_s * checkpoints(every_s, left_s)
        expected_s += cost_s * checkpoints(every_s, s.times[task, TIME.estimate])
    s.times[task, TIME.began] = now_s
    s.times[task, TIME.ends] = ends_s
    s.times[task, TIME.expected] = expected_s
    s.times[task, TIME.queued] += now_s - s.times[task, TIME.since]
    job = s.tasks[task, TASK.job]
    if math.isnan(s.job_times[job, JOB_TIME.started]):
        s.job_times[job, JOB_TIME.started] = now_s
    push(s.ends_at, s.ends_task, s.tasks, task, ends_s)
    s.counts[COUNT.running] += 1
    moved(s, p, machine)
    started(s, p, task, machine, now_s)


def stop(s: State, task: int, machine: int) -> None:
    """A task runs no more."""
    remove(s.ends_at, s.ends_task, s.tasks, task)
    s.counts[COUNT.running] -= 1
    take_off(s, task)
    cores = s.tasks[task, TASK.cores]
    s.machines[machine, MACHINE.used] -= cores
    s.machines[machine, MACHINE.used_memory] -= s.tasks[task, TASK.memory]
    s.counts[COUNT.used_cores] -= cores


def account(s: State, task: int, now_s: float, useful_s: float, lost_s: float) -> float:
    """Enter an attempt that ends: how much of it was of use, and how much was not; the core-seconds that were lost."""
    cores = s.tasks[task, TASK.cores]
    began_s = s.times[task, TIME.began]
    useful = cores * useful_s
    lost = cores * lost_s
    add(s.sums, SUM.done, useful)
    if lost != 0.0:
        add(s.sums, SUM.lost, lost)
    if now_s > began_s:
        # Of an attempt that reaches over an end of what is measured, the same share of both counts.
        outside = outside_share(s, began_s, now_s)
        if outside > 0.0:
            add(s.sums, SUM.done_outside, useful * outside)
            add(s.sums, SUM.lost_outside, lost * outside)
    return float(lost)


def finish(s: State, p: Any, task: int, now_s: float) -> None:
    """A task has completed."""
    machine = s.tasks[task, TASK.machine]
    stop(s, task, machine)
    job = s.tasks[task, TASK.job]
    left_s = s.times[task, TIME.left]
    lost_s = s.sums[SUM.checkpoint_cost] * checkpoints(checkpoint_every_s(s, task), left_s)
    s.job_times[job, JOB_TIME.lost] += account(s, task, now_s, left_s, lost_s)
    if s.options[OPTION.attempts] != 0:
        write_attempt(s, task, machine, now_s, 1.0)
    moved(s, p, machine)
    ended(s, p, task, machine, now_s, True)
    s.counts[COUNT.tasks_done] += 1
    twin = s.tasks[task, TASK.twin]
    while twin != task:
        after = s.tasks[twin, TASK.twin]
        withdraw(s, p, twin, now_s)
        twin = after
    submitted_s = s.job_times[job, JOB_TIME.submitted]
    measured = s.sums[SUM.from_s] <= submitted_s < s.sums[SUM.to_s]
    if measured:
        note(s.bins, s.bin_sums, s.moments, TASK_WAIT, s.times[task, TIME.queued])
    free(s, task)
    if s.jobs[job, JOB.left] > 0:
        return
    if measured:
        completion_s = now_s - submitted_s
        note(s.bins, s.bin_sums, s.moments, WAIT, s.job_times[job, JOB_TIME.started] - submitted_s)
        note(s.bins, s.bin_sums, s.moments, COMPLETION, completion_s)
        usual_s = max(s.job_times[job, JOB_TIME.longest], s.sums[SUM.short])
        slowdown = completion_s / usual_s if usual_s > 0 else 1.0
        note(s.bins, s.bin_sums, s.moments, SLOWDOWN, max(slowdown, 1.0))
    if s.options[OPTION.done] != 0:
        row = s.counts[COUNT.done_rows]
        s.done[row, 0] = s.jobs[job, JOB.number]
        s.done[row, 1] = s.jobs[job, JOB.tasks]
        s.done[row, 2] = submitted_s
        s.done[row, 3] = s.job_times[job, JOB_TIME.started]
        s.done[row, 4] = now_s
        s.done[row, 5] = s.jobs[job, JOB.kills]
        s.done[row, 6] = s.job_times[job, JOB_TIME.lost]
        s.counts[COUNT.done_rows] = row + 1
    s.counts[COUNT.jobs_done] += 1
    s.jobs[job, JOB.number] = -1
    s.jobs[job, JOB.next] = s.counts[COUNT.free_job]
    s.counts[COUNT.free_job] = job
    s.counts[COUNT.job_room] += 1


def free(s: State, task: int) -> None:
    """Nothing more will become of a task: its row is another one's."""
    s.tasks[task, TASK.machine] = -2
    s.tasks[task, TASK.next] = s.counts[COUNT.free_task]
    s.counts[COUNT.free_task] = task
    s.counts[COUNT.task_room] += 1
    s.jobs[s.tasks[task, TASK.job], JOB.left] -= 1


def withdraw(s: State, p: Any, task: int, now_s: float) -> None:
    """A replica is not needed any more, whether it waits or runs: it is neither completed nor killed."""
    machine = s.tasks[task, TASK.machine]
    add(s.sums, SUM.withdrawn, s.tasks[task, TASK.cores] * s.times[task, TIME.left])
    if machine >= 0:
        stop(s, task, machine)
        job = s.tasks[task, TASK.job]
        s.job_times[job, JOB_TIME.lost] += account(s, task, now_s, 0.0, now_s - s.times[task, TIME.began])
        if s.options[OPTION.attempts] != 0:
            write_attempt(s, task, machine, now_s, 0.0)
        moved(s, p, machine)
        withdrawn(s, p, task, machine, now_s)
    else:
        dequeue(s, task)
    s.counts[COUNT.withdrawn] += 1
    free(s, task)


def saved_s(s: State, task: int, now_s: float) -> float:
    """Of the useful seconds of a running task, those that its checkpoints hold."""
    every_s = checkpoint_every_s(s, task)
    if every_s <= 0:
        return 0.0
    made = math.floor((now_s - s.times[task, TIME.began]) / (every_s + s.sums[SUM.checkpoint_cost]))
    return float(every_s * min(float(made), checkpoints(every_s, s.times[task, TIME.left])))


def kill(s: State, p: Any, task: int, now_s: float) -> None:
    """A running task loses its machine, and all its work since its last checkpoint; it waits in no queue yet."""
    machine = s.tasks[task, TASK.machine]
    stop(s, task, machine)
    kept_s = saved_s(s, task, now_s)
    if kept_s > 0.0:
        s.times[task, TIME.left] -= kept_s
        s.times[task, TIME.estimate] = max(s.times[task, TIME.estimate] - kept_s, 0.0)
    job = s.tasks[task, TASK.job]
    s.job_times[job, JOB_TIME.lost] += account(
        s, task, now_s, kept_s, max(now_s - s.times[task, TIME.began] - kept_s, 0.0)
    )
    if s.options[OPTION.attempts] != 0:
        write_attempt(s, task, machine, now_s, 0.0)
    s.jobs[job, JOB.kills] += 1
    s.tasks[task, TASK.kills] += 1
    s.tasks[task, TASK.machine] = -1
    s.times[task, TIME.since] = now_s
    s.machines[machine, MACHINE.kills] += 1
    s.counts[COUNT.kills] += 1
    ended(s, p, task, machine, now_s, False)


def write_attempt(s: State, task: int, machine: int, now_s: float, completed: float) -> None:
    """Write down an attempt that ends."""
    row = s.counts[COUNT.attempt_rows]
    s.attempts[row, 0] = s.jobs[s.tasks[task, TASK.job], JOB.number]
    s.attempts[row, 1] = s.tasks[task, TASK.number]
    s.attempts[row, 2] = machine
    s.attempts[row, 3] = s.times[task, TIME.began]
    s.attempts[row, 4] = now_s
    s.attempts[row, 5] = completed
    s.counts[COUNT.attempt_rows] = row + 1


def list_victims(s: State, machine: int, now_s: float) -> int:
    """Put the tasks that have no room any more into ``scratch``, in the order in which they go; how many."""
    over_cores = s.machines[machine, MACHINE.used] - s.machines[machine, MACHINE.cores]
    over_mib = s.machines[machine, MACHINE.used_memory] - s.machines[machine, MACHINE.memory]
    running = 0
    task = s.machines[machine, MACHINE.first]
    while task >= 0:
        s.scratch[running] = s.tasks[task, TASK.cores]
        s.scratch_more[running] = s.tasks[task, TASK.memory]
        # Every task of the simulator may be begun again.
        s.scratch_times[running] = 1.0
        s.scratch_lost[running] = s.tasks[task, TASK.cores] * (
            now_s - s.times[task, TIME.began] - saved_s(s, task, now_s)
        )
        running += 1
        task = s.tasks[task, TASK.next]
    order = s.options[OPTION.kills]
    count = choose_victims(
        s.scratch, s.scratch_more, s.scratch_lost, s.scratch_times, running, over_cores, over_mib, order
    )
    place = found = 0
    task = s.machines[machine, MACHINE.first]
    while task >= 0:
        if s.scratch_times[place] > 0.0:
            s.scratch[count - 1 - found if order == NEWEST else found] = task
            found += 1
        place += 1
        task = s.tasks[task, TASK.next]
    return count


def resize(s: State, p: Any, machine: int, cores: int, memory_mib: int, now_s: float) -> None:
    """A machine has another size: what has no room any more is killed, in the order of the option, and waits again."""
    before = s.machines[machine, MACHINE.cores]
    s.machines[machine, MACHINE.memory] = memory_mib
    if cores != before:
        s.machines[machine, MACHINE.cores] = cores
        s.machines[machine, MACHINE.direction] = 1 if cores > before else -1
        s.machines[machine, MACHINE.changes] += 1
        s.counts[COUNT.changes] += 1
        grow(s, cores - before)
        changed(s, p, machine, now_s, before)
        s.machine_times[machine, MACHINE_TIME.changed] = now_s
    count = 0
    if s.machines[machine, MACHINE.used] > cores or s.machines[machine, MACHINE.used_memory] > memory_mib:
        count = list_victims(s, machine, now_s)
        for i in range(count):
            kill(s, p, s.scratch[i], now_s)
    moved(s, p, machine)
    if s.options[OPTION.requeue] == HEAD:
        s.counts[COUNT.head] -= count
        for i in range(count - 1, -1, -1):
            enqueue(s, s.scratch[i], s.counts[COUNT.head] + i, True)
    elif s.options[OPTION.requeue] == SUBMISSION:
        for i in range(count):
            enqueue_by_submission(s, s.scratch[i])
    else:
        for i in range(count):
            enqueue(s, s.scratch[i], s.counts[COUNT.tail], False)
            s.counts[COUNT.tail] += 1
