"""The loop: the next event, what it does, and a look at the queue once an instant is over. Kernels, no numba here.

Events of one instant come in this order: ends of tasks by the order of their starts, changes of machines and then
arrivals by their inputs; then one look at the queue. What starts there and takes no time ends at the same instant.
Where `Settings.looks` says so, there is a look after every end, too.
"""

from __future__ import annotations

import math
from typing import Any

from ebbtide.simulator.jobs.columns import (
    BROKEN,
    COUNT,
    FINISHED,
    GOES_ON,
    JOB,
    JOB_TIME,
    NEEDS_CHANGES,
    NEEDS_JOBS,
    NEEDS_ROOM,
    OPTION,
    PAUSED,
    QUEUE,
    REACHED,
    ROWS_FULL,
    SUM,
    TASK,
    TIME,
    State,
)
from ebbtide.simulator.jobs.lists import enqueue
from ebbtide.simulator.jobs.measures import add
from ebbtide.simulator.jobs.policy import moved, schedule
from ebbtide.simulator.jobs.running import finish, resize, tick
from ebbtide.simulator.jobs.validation import check
from ebbtide.simulator.references import by_reference


def admit(s: State, row: int, now_s: float) -> bool:
    """Take a job in: its tasks wait. False if there is no room in the arrays; nothing has changed then."""
    queue = s.in_queue[row]
    first = s.in_offsets[row]
    replicas = s.options[OPTION.replicas]
    count = (s.in_offsets[row + 1] - first) * replicas
    cores = s.queues[queue, QUEUE.cores]
    if 0 < s.options[OPTION.most_cores] < cores or s.queues[queue, QUEUE.memory] > s.options[OPTION.most_mib]:
        s.counts[COUNT.refused] += 1
        for task in range(first, s.in_offsets[row + 1]):
            add(s.sums, SUM.refused, cores * s.in_runtime[task] * replicas)
        return True
    if s.counts[COUNT.job_room] < 1 or s.counts[COUNT.task_room] < count:
        s.counts[COUNT.wanted] = count
        return False
    job = s.counts[COUNT.free_job]
    s.counts[COUNT.free_job] = s.jobs[job, JOB.next]
    s.counts[COUNT.job_room] -= 1
    s.counts[COUNT.task_room] -= count
    s.jobs[job, JOB.number] = s.counts[COUNT.first_job] + row
    s.jobs[job, JOB.tasks] = count
    s.jobs[job, JOB.left] = count
    s.jobs[job, JOB.kills] = 0
    longest_s = 0.0
    for place in range(first, s.in_offsets[row + 1]):
        runtime_s = s.in_runtime[place]
        longest_s = max(longest_s, runtime_s)
        twin = -1
        for _ in range(replicas):
            task = s.counts[COUNT.free_task]
            s.counts[COUNT.free_task] = s.tasks[task, TASK.next]
            if twin < 0:
                twin = task
                s.tasks[task, TASK.twin] = task
            else:
                s.tasks[task, TASK.twin] = s.tasks[twin, TASK.twin]
                s.tasks[twin, TASK.twin] = task
            s.tasks[task, TASK.job] = job
            s.tasks[task, TASK.number] = place - first
            s.tasks[task, TASK.queue] = queue
            s.tasks[task, TASK.cores] = cores
            s.tasks[task, TASK.memory] = s.queues[queue, QUEUE.memory]
            s.tasks[task, TASK.kills] = 0
            s.tasks[task, TASK.came] = s.counts[COUNT.tail]
            s.times[task, TIME.left] = runtime_s
            s.times[task, TIME.estimate] = s.in_estimate[place]
            s.times[task, TIME.since] = now_s
            s.times[task, TIME.queued] = 0.0
            s.times[task, TIME.note] = 0.0
            add(s.sums, SUM.came_in, cores * runtime_s)
            enqueue(s, task, s.counts[COUNT.tail], False)
            s.counts[COUNT.tail] += 1
    s.job_times[job, JOB_TIME.submitted] = now_s
    s.job_times[job, JOB_TIME.started] = math.nan
    s.job_times[job, JOB_TIME.longest] = longest_s
    s.job_times[job, JOB_TIME.lost] = 0.0
    s.counts[COUNT.jobs_in] += 1
    s.counts[COUNT.tasks_in] += count
    alive = s.counts[COUNT.waiting] + s.counts[COUNT.running]
    s.counts[COUNT.most_alive] = max(s.counts[COUNT.most_alive], alive)
    return True


def next_event(s: State) -> float:
    """When something happens next, by what is at hand; infinite if nothing does."""
    at_s = s.ends_at[1]
    if s.counts[COUNT.next_job] < len(s.in_at):
        at_s = min(at_s, s.in_at[s.counts[COUNT.next_job]])
    if s.counts[COUNT.next_change] < len(s.change_at):
        at_s = min(at_s, s.change_at[s.counts[COUNT.next_change]])
    return float(min(at_s, s.sums[SUM.wake]))


def ended_well(s: State) -> int:
    """FINISHED, if all is well; else BROKEN."""
    s.counts[COUNT.broken] = check(s)
    return FINISHED if s.counts[COUNT.broken] == 0 else BROKEN


def missing(s: State) -> int:
    """What must be handed in before anything happens: NEEDS_JOBS or NEEDS_CHANGES; GOES_ON: nothing.

    What the inputs hold next may belong to this very instant.
    """
    counts = s.counts
    if counts[COUNT.next_job] >= len(s.in_at) and counts[COUNT.more_jobs] != 0:
        return NEEDS_JOBS
    if counts[COUNT.next_change] >= len(s.change_at) and counts[COUNT.more_changes] != 0:
        return NEEDS_CHANGES
    return GOES_ON


def stops(s: State, at_s: float, stop_at: int) -> int:
    """Why the loop comes back before the next event; GOES_ON: it does not."""
    counts = s.counts
    if at_s == math.inf:
        return ended_well(s)
    if at_s > s.sums[SUM.until]:
        return REACHED
    if counts[COUNT.events] >= stop_at:
        return PAUSED
    if s.options[OPTION.done] != 0 and counts[COUNT.done_rows] >= len(s.done):
        return ROWS_FULL
    if s.options[OPTION.attempts] != 0 and counts[COUNT.attempt_rows] + counts[COUNT.running] >= len(s.attempts):
        return ROWS_FULL
    return GOES_ON


def happens(s: State, p: Any, at_s: float) -> bool:
    """The next event, at its time; False: a job has no room in the arrays, and nothing has happened."""
    counts = s.counts
    due = 1
    if s.ends_at[1] <= at_s:
        finish(s, p, s.ends_task[1], at_s)
        due += s.options[OPTION.looks]
    elif counts[COUNT.next_change] < len(s.change_at) and s.change_at[counts[COUNT.next_change]] <= at_s:
        row = counts[COUNT.next_change]
        resize(s, p, s.changes[row, 0], s.changes[row, 1], s.changes[row, 2], at_s)
        counts[COUNT.next_change] = row + 1
    elif counts[COUNT.next_job] < len(s.in_at) and s.in_at[counts[COUNT.next_job]] <= at_s:
        if not admit(s, counts[COUNT.next_job], at_s):
            return False
        counts[COUNT.next_job] += 1
    else:
        s.sums[SUM.wake] = math.inf
    counts[COUNT.due] = due
    counts[COUNT.events] += 1
    return True


def advance(s: State, p: Any, most_events: int) -> int:
    """Go on until something is needed, or that many events are done; why it came back: FINISHED to BROKEN."""
    counts = s.counts
    stop_at = counts[COUNT.events] + most_events
    if counts[COUNT.unsettled] != 0:
        counts[COUNT.unsettled] = 0
        for machine in range(len(s.machines)):
            moved(s, p, machine)
    while True:
        why = missing(s)
        if why != GOES_ON:
            return why
        if counts[COUNT.jobs_done] == counts[COUNT.jobs_in] and counts[COUNT.next_job] >= len(s.in_at):
            return ended_well(s)
        at_s = next_event(s)
        now_s = s.sums[SUM.now]
        if counts[COUNT.due] > 1 or (counts[COUNT.due] != 0 and at_s > now_s):
            counts[COUNT.due] = 0
            s.sums[SUM.wake] = math.inf
            schedule(s, p, now_s)
            if not sound(s):
                return BROKEN
            at_s = next_event(s)
        why = stops(s, at_s, stop_at)
        if why != GOES_ON:
            return why
        tick(s, at_s)
        if not happens(s, p, at_s):
            return NEEDS_ROOM
        if not sound(s):
            return BROKEN


def sound(s: State) -> bool:
    """Whether all is well, where that is asked after every step."""
    if s.options[OPTION.validate] != 0:
        s.counts[COUNT.broken] = check(s)
    return bool(s.counts[COUNT.broken] == 0)


def run(s: State, p: Any, most_events: int) -> int:
    """`advance`, compiled: it is here that the arrays become references."""
    return advance(by_reference(s), by_reference(p), most_events)
