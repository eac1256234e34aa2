"""What happens to tasks: they start, complete, are killed; machines change under them. Kernels, no numba here."""

from __future__ import annotations

import math
from typing import Any

from simulator.jobs.columns import (
    C_ALL_CORES,
    C_ATTEMPT_ROWS,
    C_CHANGES,
    C_DONE_ROWS,
    C_FREE_JOB,
    C_FREE_TASK,
    C_HEAD,
    C_JOB_ROOM,
    C_JOBS_DONE,
    C_KILLS,
    C_RUNNING,
    C_STARTS,
    C_TAIL,
    C_TASK_ROOM,
    C_TASKS_DONE,
    C_USED_CORES,
    C_WITHDRAWN,
    COMPLETION,
    F_BEGAN,
    F_ENDS,
    F_ESTIMATE,
    F_EXPECTED,
    F_LEFT,
    F_QUEUED,
    F_SINCE,
    G_LONGEST,
    G_LOST,
    G_STARTED,
    G_SUBMITTED,
    H_CHANGED,
    HEAD,
    J_KILLS,
    J_LEFT,
    J_NEXT,
    J_NUMBER,
    J_TASKS,
    M_CHANGES,
    M_CORES,
    M_DIRECTION,
    M_FIRST,
    M_KILLS,
    M_LAST,
    M_MEMORY,
    M_USED,
    M_USED_MEMORY,
    NEWEST,
    O_ATTEMPTS,
    O_DONE,
    O_KILLS,
    O_REQUEUE,
    S_ALL_MEASURED,
    S_CHECKPOINT_COST,
    S_CHECKPOINT_EVERY,
    S_DONE,
    S_DONE_MEASURED,
    S_FROM,
    S_LOST,
    S_LOST_MEASURED,
    S_NOW,
    S_SHORT,
    S_TO,
    S_USED,
    S_USED_MEASURED,
    S_WITHDRAWN,
    SLOWDOWN,
    T_CORES,
    T_JOB,
    T_KILLS,
    T_MACHINE,
    T_MEMORY,
    T_NEXT,
    T_NUMBER,
    T_START,
    T_TWIN,
    TASK_WAIT,
    WAIT,
    State,
)
from simulator.jobs.heap import push, remove
from simulator.jobs.hooks import changed, ended, moved, started, withdrawn
from simulator.jobs.lists import dequeue, enqueue, put_on, take_off
from simulator.jobs.measures import add, note, overlap


def tick(s: State, at_s: float) -> None:
    """Let time go on: what is used and what is there, integrated. Nothing has changed since the last time."""
    now_s = s.sums[S_NOW]
    if at_s <= now_s:
        return
    add(s.sums, S_USED, s.counts[C_USED_CORES] * (at_s - now_s))
    within_s = overlap(now_s, at_s, s.sums[S_FROM], s.sums[S_TO])
    if within_s > 0:
        add(s.sums, S_USED_MEASURED, s.counts[C_USED_CORES] * within_s)
        add(s.sums, S_ALL_MEASURED, s.counts[C_ALL_CORES] * within_s)
    s.sums[S_NOW] = at_s


def checkpoints(every_s: float, left_s: float) -> float:
    """How many checkpoints a task makes on its way: none at its end."""
    if every_s <= 0 or left_s <= every_s:
        return 0.0
    return math.ceil(left_s / every_s) - 1.0


def start(s: State, p: Any, task: int, machine: int, now_s: float) -> None:
    """A waiting task starts on a machine that has room for it."""
    dequeue(s, task)
    put_on(s, task, machine)
    cores = s.tasks[task, T_CORES]
    s.machines[machine, M_USED] += cores
    s.machines[machine, M_USED_MEMORY] += s.tasks[task, T_MEMORY]
    s.counts[C_USED_CORES] += cores
    s.tasks[task, T_START] = s.counts[C_STARTS]
    s.counts[C_STARTS] += 1
    every_s = s.sums[S_CHECKPOINT_EVERY]
    cost_s = s.sums[S_CHECKPOINT_COST]
    left_s = s.times[task, F_LEFT]
    ends_s = now_s + left_s
    expected_s = now_s + s.times[task, F_ESTIMATE]
    if every_s > 0:
        ends_s += cost_s * checkpoints(every_s, left_s)
        expected_s += cost_s * checkpoints(every_s, s.times[task, F_ESTIMATE])
    s.times[task, F_BEGAN] = now_s
    s.times[task, F_ENDS] = ends_s
    s.times[task, F_EXPECTED] = expected_s
    s.times[task, F_QUEUED] += now_s - s.times[task, F_SINCE]
    job = s.tasks[task, T_JOB]
    if math.isnan(s.job_times[job, G_STARTED]):
        s.job_times[job, G_STARTED] = now_s
    push(s.heap_at, s.heap_task, s.heap_place, s.tasks, s.counts[C_RUNNING], task, ends_s)
    s.counts[C_RUNNING] += 1
    moved(s, p, machine)
    started(s, p, task, machine, now_s)


def stop(s: State, task: int, machine: int) -> None:
    """A task runs no more."""
    remove(s.heap_at, s.heap_task, s.heap_place, s.tasks, s.counts[C_RUNNING], task)
    s.counts[C_RUNNING] -= 1
    take_off(s, task)
    cores = s.tasks[task, T_CORES]
    s.machines[machine, M_USED] -= cores
    s.machines[machine, M_USED_MEMORY] -= s.tasks[task, T_MEMORY]
    s.counts[C_USED_CORES] -= cores


def account(s: State, task: int, now_s: float, useful_s: float, lost_s: float) -> float:
    """Enter an attempt that ends: how much of it was of use, and how much was not; the core-seconds that were lost."""
    cores = s.tasks[task, T_CORES]
    began_s = s.times[task, F_BEGAN]
    useful = cores * useful_s
    lost = cores * lost_s
    add(s.sums, S_DONE, useful)
    add(s.sums, S_LOST, lost)
    if now_s > began_s:
        # Of an attempt that reaches over an end of what is measured, the same share of both counts.
        share = 1.0
        if began_s < s.sums[S_FROM] or now_s > s.sums[S_TO]:
            share = overlap(began_s, now_s, s.sums[S_FROM], s.sums[S_TO]) / (now_s - began_s)
        add(s.sums, S_DONE_MEASURED, useful * share)
        add(s.sums, S_LOST_MEASURED, lost * share)
    return float(lost)


def finish(s: State, p: Any, task: int, now_s: float) -> None:
    """A task has completed."""
    machine = s.tasks[task, T_MACHINE]
    stop(s, task, machine)
    job = s.tasks[task, T_JOB]
    left_s = s.times[task, F_LEFT]
    lost_s = 0.0
    if s.sums[S_CHECKPOINT_EVERY] > 0:
        lost_s = s.sums[S_CHECKPOINT_COST] * checkpoints(s.sums[S_CHECKPOINT_EVERY], left_s)
    s.job_times[job, G_LOST] += account(s, task, now_s, left_s, lost_s)
    if s.options[O_ATTEMPTS] != 0:
        write_attempt(s, task, machine, now_s, 1.0)
    moved(s, p, machine)
    ended(s, p, task, machine, now_s, True)
    s.counts[C_TASKS_DONE] += 1
    twin = s.tasks[task, T_TWIN]
    while twin != task:
        after = s.tasks[twin, T_TWIN]
        withdraw(s, p, twin, now_s)
        twin = after
    submitted_s = s.job_times[job, G_SUBMITTED]
    measured = s.sums[S_FROM] <= submitted_s < s.sums[S_TO]
    if measured:
        note(s.bins, s.bin_sums, s.moments, TASK_WAIT, s.times[task, F_QUEUED])
    free(s, task)
    if s.jobs[job, J_LEFT] > 0:
        return
    if measured:
        completion_s = now_s - submitted_s
        note(s.bins, s.bin_sums, s.moments, WAIT, s.job_times[job, G_STARTED] - submitted_s)
        note(s.bins, s.bin_sums, s.moments, COMPLETION, completion_s)
        usual_s = max(s.job_times[job, G_LONGEST], s.sums[S_SHORT])
        slowdown = completion_s / usual_s if usual_s > 0 else 1.0
        note(s.bins, s.bin_sums, s.moments, SLOWDOWN, max(slowdown, 1.0))
    if s.options[O_DONE] != 0:
        row = s.counts[C_DONE_ROWS]
        s.done[row, 0] = s.jobs[job, J_NUMBER]
        s.done[row, 1] = s.jobs[job, J_TASKS]
        s.done[row, 2] = submitted_s
        s.done[row, 3] = s.job_times[job, G_STARTED]
        s.done[row, 4] = now_s
        s.done[row, 5] = s.jobs[job, J_KILLS]
        s.done[row, 6] = s.job_times[job, G_LOST]
        s.counts[C_DONE_ROWS] = row + 1
    s.counts[C_JOBS_DONE] += 1
    s.jobs[job, J_NUMBER] = -1
    s.jobs[job, J_NEXT] = s.counts[C_FREE_JOB]
    s.counts[C_FREE_JOB] = job
    s.counts[C_JOB_ROOM] += 1


def free(s: State, task: int) -> None:
    """Nothing more will become of a task: its row is another one's."""
    s.tasks[task, T_MACHINE] = -2
    s.tasks[task, T_NEXT] = s.counts[C_FREE_TASK]
    s.counts[C_FREE_TASK] = task
    s.counts[C_TASK_ROOM] += 1
    s.jobs[s.tasks[task, T_JOB], J_LEFT] -= 1


def withdraw(s: State, p: Any, task: int, now_s: float) -> None:
    """A replica is not needed any more, whether it waits or runs: it is neither completed nor killed."""
    machine = s.tasks[task, T_MACHINE]
    add(s.sums, S_WITHDRAWN, s.tasks[task, T_CORES] * s.times[task, F_LEFT])
    if machine >= 0:
        stop(s, task, machine)
        job = s.tasks[task, T_JOB]
        s.job_times[job, G_LOST] += account(s, task, now_s, 0.0, now_s - s.times[task, F_BEGAN])
        if s.options[O_ATTEMPTS] != 0:
            write_attempt(s, task, machine, now_s, 0.0)
        moved(s, p, machine)
        withdrawn(s, p, task, machine, now_s)
    else:
        dequeue(s, task)
    s.counts[C_WITHDRAWN] += 1
    free(s, task)


def kill(s: State, p: Any, task: int, now_s: float) -> None:
    """A running task loses its machine, and all its work since its last checkpoint; it waits in no queue yet."""
    machine = s.tasks[task, T_MACHINE]
    stop(s, task, machine)
    saved_s = 0.0
    every_s = s.sums[S_CHECKPOINT_EVERY]
    if every_s > 0:
        cycle_s = every_s + s.sums[S_CHECKPOINT_COST]
        made = math.floor((now_s - s.times[task, F_BEGAN]) / cycle_s)
        saved_s = every_s * min(float(made), checkpoints(every_s, s.times[task, F_LEFT]))
        s.times[task, F_LEFT] -= saved_s
        s.times[task, F_ESTIMATE] = max(s.times[task, F_ESTIMATE] - saved_s, 0.0)
    job = s.tasks[task, T_JOB]
    s.job_times[job, G_LOST] += account(s, task, now_s, saved_s, max(now_s - s.times[task, F_BEGAN] - saved_s, 0.0))
    if s.options[O_ATTEMPTS] != 0:
        write_attempt(s, task, machine, now_s, 0.0)
    s.jobs[job, J_KILLS] += 1
    s.tasks[task, T_KILLS] += 1
    s.tasks[task, T_MACHINE] = -1
    s.times[task, F_SINCE] = now_s
    s.machines[machine, M_KILLS] += 1
    s.counts[C_KILLS] += 1
    ended(s, p, task, machine, now_s, False)


def write_attempt(s: State, task: int, machine: int, now_s: float, completed: float) -> None:
    """Write down an attempt that ends."""
    row = s.counts[C_ATTEMPT_ROWS]
    s.attempts[row, 0] = s.jobs[s.tasks[task, T_JOB], J_NUMBER]
    s.attempts[row, 1] = s.tasks[task, T_NUMBER]
    s.attempts[row, 2] = machine
    s.attempts[row, 3] = s.times[task, F_BEGAN]
    s.attempts[row, 4] = now_s
    s.attempts[row, 5] = completed
    s.counts[C_ATTEMPT_ROWS] = row + 1


def resize(s: State, p: Any, machine: int, cores: int, memory_mib: int, now_s: float) -> None:
    """A machine has another size: what has no room any more is killed, in the order of the option, and waits again."""
    before = s.machines[machine, M_CORES]
    s.machines[machine, M_MEMORY] = memory_mib
    if cores != before:
        s.machines[machine, M_CORES] = cores
        s.machines[machine, M_DIRECTION] = 1 if cores > before else -1
        s.machines[machine, M_CHANGES] += 1
        s.counts[C_CHANGES] += 1
        s.counts[C_ALL_CORES] += cores - before
        changed(s, p, machine, now_s, before)
        s.machine_times[machine, H_CHANGED] = now_s
    count = 0
    while s.machines[machine, M_USED] > cores or s.machines[machine, M_USED_MEMORY] > memory_mib:
        task = s.machines[machine, M_LAST] if s.options[O_KILLS] == NEWEST else s.machines[machine, M_FIRST]
        kill(s, p, task, now_s)
        s.scratch[count] = task
        count += 1
    moved(s, p, machine)
    if s.options[O_REQUEUE] == HEAD:
        s.counts[C_HEAD] -= count
        for i in range(count - 1, -1, -1):
            enqueue(s, s.scratch[i], s.counts[C_HEAD] + i, True)
    else:
        for i in range(count):
            enqueue(s, s.scratch[i], s.counts[C_TAIL], False)
            s.counts[C_TAIL] += 1
