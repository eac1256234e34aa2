"""The loop: the next event, what it does, and a look at the queue once an instant is over. Kernels, no numba here.

Events of one instant come in this order: ends of tasks by the order of their starts, changes of machines and then
arrivals by their inputs; then one look at the queue. What starts there and takes no time ends at the same instant.
"""

from __future__ import annotations

import math
from typing import Any

from simulator.jobs.columns import (
    BROKEN,
    C_ATTEMPT_ROWS,
    C_BROKEN,
    C_DONE_ROWS,
    C_DUE,
    C_EVENTS,
    C_FIRST_JOB,
    C_FREE_JOB,
    C_FREE_TASK,
    C_JOB_ROOM,
    C_JOBS_DONE,
    C_JOBS_IN,
    C_MORE_CHANGES,
    C_MORE_JOBS,
    C_MOST_ALIVE,
    C_NEXT_CHANGE,
    C_NEXT_JOB,
    C_REFUSED,
    C_RUNNING,
    C_TAIL,
    C_TASK_ROOM,
    C_TASKS_IN,
    C_UNSETTLED,
    C_WAITING,
    C_WANTED,
    F_ESTIMATE,
    F_LEFT,
    F_NOTE,
    F_QUEUED,
    F_SINCE,
    FINISHED,
    G_LONGEST,
    G_LOST,
    G_STARTED,
    G_SUBMITTED,
    J_KILLS,
    J_LEFT,
    J_NEXT,
    J_NUMBER,
    J_TASKS,
    NEEDS_CHANGES,
    NEEDS_JOBS,
    NEEDS_ROOM,
    O_ATTEMPTS,
    O_DONE,
    O_MOST_CORES,
    O_REPLICAS,
    O_VALIDATE,
    PAUSED,
    Q_CORES,
    Q_MEMORY,
    REACHED,
    ROWS_FULL,
    S_IN,
    S_NOW,
    S_UNTIL,
    S_WAKE,
    T_CORES,
    T_JOB,
    T_KILLS,
    T_MEMORY,
    T_NEXT,
    T_NUMBER,
    T_QUEUE,
    T_TWIN,
    State,
)
from simulator.jobs.hooks import moved
from simulator.jobs.lists import enqueue
from simulator.jobs.measures import add
from simulator.jobs.passes import schedule
from simulator.jobs.running import finish, resize, tick
from simulator.jobs.validation import check


def admit(s: State, row: int, now_s: float) -> bool:
    """Take a job in: its tasks wait. False if there is no room in the arrays; nothing has changed then."""
    queue = s.in_queue[row]
    first = s.in_offsets[row]
    replicas = s.options[O_REPLICAS]
    count = (s.in_offsets[row + 1] - first) * replicas
    cores = s.queues[queue, Q_CORES]
    if 0 < s.options[O_MOST_CORES] < cores:
        s.counts[C_REFUSED] += 1
        return True
    if s.counts[C_JOB_ROOM] < 1 or s.counts[C_TASK_ROOM] < count:
        s.counts[C_WANTED] = count
        return False
    job = s.counts[C_FREE_JOB]
    s.counts[C_FREE_JOB] = s.jobs[job, J_NEXT]
    s.counts[C_JOB_ROOM] -= 1
    s.counts[C_TASK_ROOM] -= count
    s.jobs[job, J_NUMBER] = s.counts[C_FIRST_JOB] + row
    s.jobs[job, J_TASKS] = count
    s.jobs[job, J_LEFT] = count
    s.jobs[job, J_KILLS] = 0
    longest_s = 0.0
    twin = -1
    for copy in range(count):
        number = copy // replicas
        task = s.counts[C_FREE_TASK]
        s.counts[C_FREE_TASK] = s.tasks[task, T_NEXT]
        if copy % replicas == 0:
            twin = task
            s.tasks[task, T_TWIN] = task
        else:
            s.tasks[task, T_TWIN] = s.tasks[twin, T_TWIN]
            s.tasks[twin, T_TWIN] = task
        runtime_s = s.in_runtime[first + number]
        longest_s = max(longest_s, runtime_s)
        s.tasks[task, T_JOB] = job
        s.tasks[task, T_NUMBER] = number
        s.tasks[task, T_QUEUE] = queue
        s.tasks[task, T_CORES] = cores
        s.tasks[task, T_MEMORY] = s.queues[queue, Q_MEMORY]
        s.tasks[task, T_KILLS] = 0
        s.times[task, F_LEFT] = runtime_s
        s.times[task, F_ESTIMATE] = s.in_estimate[first + number]
        s.times[task, F_SINCE] = now_s
        s.times[task, F_QUEUED] = 0.0
        s.times[task, F_NOTE] = 0.0
        add(s.sums, S_IN, cores * runtime_s)
        enqueue(s, task, s.counts[C_TAIL], False)
        s.counts[C_TAIL] += 1
    s.job_times[job, G_SUBMITTED] = now_s
    s.job_times[job, G_STARTED] = math.nan
    s.job_times[job, G_LONGEST] = longest_s
    s.job_times[job, G_LOST] = 0.0
    s.counts[C_JOBS_IN] += 1
    s.counts[C_TASKS_IN] += count
    alive = s.counts[C_WAITING] + s.counts[C_RUNNING]
    s.counts[C_MOST_ALIVE] = max(s.counts[C_MOST_ALIVE], alive)
    return True


def next_event(s: State) -> float:
    """When something happens next, by what is at hand; infinite if nothing does."""
    at_s = s.heap_at[0] if s.counts[C_RUNNING] > 0 else math.inf
    if s.counts[C_NEXT_JOB] < len(s.in_at):
        at_s = min(at_s, s.in_at[s.counts[C_NEXT_JOB]])
    if s.counts[C_NEXT_CHANGE] < len(s.change_at):
        at_s = min(at_s, s.change_at[s.counts[C_NEXT_CHANGE]])
    return float(min(at_s, s.sums[S_WAKE]))


def ended_well(s: State) -> int:
    """FINISHED, if all is well; else BROKEN."""
    s.counts[C_BROKEN] = check(s)
    return FINISHED if s.counts[C_BROKEN] == 0 else BROKEN


def advance(s: State, p: Any, most_events: int) -> int:
    """Go on until something is needed, or that many events are done; why it came back: FINISHED to BROKEN."""
    counts = s.counts
    sums = s.sums
    stop_at = counts[C_EVENTS] + most_events
    if counts[C_UNSETTLED] != 0:
        counts[C_UNSETTLED] = 0
        for machine in range(len(s.machines)):
            moved(s, p, machine)
    while True:
        # Inputs first: what they hold next may belong to this very instant.
        if counts[C_NEXT_JOB] >= len(s.in_at) and counts[C_MORE_JOBS] != 0:
            return NEEDS_JOBS
        if counts[C_NEXT_CHANGE] >= len(s.change_at) and counts[C_MORE_CHANGES] != 0:
            return NEEDS_CHANGES
        if counts[C_JOBS_DONE] == counts[C_JOBS_IN] and counts[C_NEXT_JOB] >= len(s.in_at):
            return ended_well(s)
        at_s = next_event(s)
        if counts[C_DUE] != 0 and at_s > sums[S_NOW]:
            counts[C_DUE] = 0
            sums[S_WAKE] = math.inf
            schedule(s, p, sums[S_NOW])
            if s.options[O_VALIDATE] != 0:
                counts[C_BROKEN] = check(s)
                if counts[C_BROKEN] != 0:
                    return BROKEN
            continue
        if at_s == math.inf:
            return ended_well(s)
        if at_s > sums[S_UNTIL]:
            return REACHED
        if counts[C_EVENTS] >= stop_at:
            return PAUSED
        if s.options[O_DONE] != 0 and counts[C_DONE_ROWS] >= len(s.done):
            return ROWS_FULL
        if s.options[O_ATTEMPTS] != 0 and counts[C_ATTEMPT_ROWS] + counts[C_RUNNING] >= len(s.attempts):
            return ROWS_FULL
        tick(s, at_s)
        if counts[C_RUNNING] > 0 and s.heap_at[0] <= at_s:
            finish(s, p, s.heap_task[0], at_s)
        elif counts[C_NEXT_CHANGE] < len(s.change_at) and s.change_at[counts[C_NEXT_CHANGE]] <= at_s:
            row = counts[C_NEXT_CHANGE]
            resize(s, p, s.changes[row, 0], s.changes[row, 1], s.changes[row, 2], at_s)
            counts[C_NEXT_CHANGE] = row + 1
        elif counts[C_NEXT_JOB] < len(s.in_at) and s.in_at[counts[C_NEXT_JOB]] <= at_s:
            if not admit(s, counts[C_NEXT_JOB], at_s):
                return NEEDS_ROOM
            counts[C_NEXT_JOB] += 1
        else:
            sums[S_WAKE] = math.inf
        counts[C_DUE] = 1
        counts[C_EVENTS] += 1
        if s.options[O_VALIDATE] != 0:
            counts[C_BROKEN] = check(s)
            if counts[C_BROKEN] != 0:
                return BROKEN
