"""Conservation: no machine over its size, no task lost or doubled, work in = work out + unfinished. A kernel.

With ``validate=True`` it looks at the whole state after every event; at the end of a run it always does.
"""

from __future__ import annotations

from typing import Final

from simulator.jobs.columns import (
    C_ACTIVE,
    C_ALL_CORES,
    C_FREE_JOB,
    C_FREE_TASK,
    C_JOB_ROOM,
    C_JOBS_DONE,
    C_JOBS_IN,
    C_RUNNING,
    C_STARTS,
    C_TASK_ROOM,
    C_TASKS_DONE,
    C_TASKS_IN,
    C_USED_CORES,
    C_WAITING,
    C_WITHDRAWN,
    F_BEGAN,
    F_ENDS,
    F_LEFT,
    J_LEFT,
    J_NEXT,
    J_NUMBER,
    LEAVING,
    M_CORES,
    M_FIRST,
    M_HELD,
    M_MEMORY,
    M_RUNNING,
    M_USED,
    M_USED_MEMORY,
    Q_ACTIVE,
    Q_COUNT,
    Q_FIRST,
    S_DONE,
    S_IN,
    S_LOST,
    S_NOW,
    S_USED,
    S_WITHDRAWN,
    T_CORES,
    T_MACHINE,
    T_MEMORY,
    T_NEXT,
    T_ORDER,
    T_QUEUE,
    T_START,
    State,
)

#: What `check` answers with.
RULES: Final = (
    "all is well",
    "a machine has more in use than it has",
    "what a machine has in use is not what runs on it",
    "the heap of ends does not hold what runs, in its order",
    "a queue does not hold what waits, in its order",
    "a task is neither waiting, running nor done, or it is twice",
    "a job's tasks are not those that are left of it",
    "the cores of all machines, or of all tasks, are not the sum of each",
    "work that came in is not work done, withdrawn and left",
    "the time that cores were used is not work done, lost and under way",
    "a machine is held, and nobody looks at the queue",
)


def check(s: State) -> int:
    """The first rule that does not hold, a place in `RULES`; 0 if all do."""
    found = check_machines(s)
    if found == 0:
        found = check_heap(s)
    if found == 0:
        found = check_queues(s)
    if found == 0:
        found = check_tables(s)
    if found == 0:
        found = check_work(s)
    return found


def check_machines(s: State) -> int:
    running = 0
    cores_used = 0
    cores_there = 0
    for machine in range(len(s.machines)):
        if s.machines[machine, M_USED] > s.machines[machine, M_CORES]:
            return 1
        if s.machines[machine, M_USED_MEMORY] > s.machines[machine, M_MEMORY]:
            return 1
        if s.machines[machine, M_HELD] != 0 and s.machines[machine, M_HELD] != LEAVING:
            return 10
        used = 0
        used_mib = 0
        count = 0
        order = -1
        task = s.machines[machine, M_FIRST]
        while task >= 0 and count <= len(s.tasks):
            if s.tasks[task, T_MACHINE] != machine or s.tasks[task, T_START] <= order:
                return 2
            order = s.tasks[task, T_START]
            used += s.tasks[task, T_CORES]
            used_mib += s.tasks[task, T_MEMORY]
            count += 1
            task = s.tasks[task, T_NEXT]
        if used != s.machines[machine, M_USED] or used_mib != s.machines[machine, M_USED_MEMORY]:
            return 2
        if count != s.machines[machine, M_RUNNING]:
            return 2
        running += count
        cores_used += used
        cores_there += s.machines[machine, M_CORES]
    if cores_used != s.counts[C_USED_CORES] or cores_there != s.counts[C_ALL_CORES]:
        return 7
    return 0 if running == s.counts[C_RUNNING] else 3


def check_heap(s: State) -> int:
    for place in range(s.counts[C_RUNNING]):
        task = s.heap_task[place]
        if s.heap_place[task] != place or s.tasks[task, T_MACHINE] < 0:
            return 3
        if s.heap_at[place] != s.times[task, F_ENDS] or s.heap_at[place] < s.sums[S_NOW]:
            return 3
        if place > 0:
            above = (place - 1) >> 2
            if s.heap_at[above] > s.heap_at[place]:
                return 3
            tied = s.heap_at[above] == s.heap_at[place]
            if tied and s.tasks[s.heap_task[above], T_START] >= s.tasks[task, T_START]:
                return 3
    return 0


def check_queues(s: State) -> int:
    waiting = 0
    for i in range(s.counts[C_ACTIVE]):
        queue = s.active[i]
        if s.queues[queue, Q_ACTIVE] != i:
            return 4
        count = 0
        task = s.queues[queue, Q_FIRST]
        while task >= 0 and count <= len(s.tasks):
            after = s.tasks[task, T_NEXT]
            if s.tasks[task, T_MACHINE] != -1 or s.tasks[task, T_QUEUE] != queue:
                return 4
            if after >= 0 and s.tasks[after, T_ORDER] <= s.tasks[task, T_ORDER]:
                return 4
            count += 1
            task = after
        if count != s.queues[queue, Q_COUNT] or count == 0:
            return 4
        waiting += count
    return 0 if waiting == s.counts[C_WAITING] else 4


def check_tables(s: State) -> int:
    alive = s.counts[C_WAITING] + s.counts[C_RUNNING]
    if s.counts[C_TASKS_IN] != s.counts[C_TASKS_DONE] + s.counts[C_WITHDRAWN] + alive:
        return 5
    free = 0
    task = s.counts[C_FREE_TASK]
    while task >= 0 and free <= len(s.tasks):
        if s.tasks[task, T_MACHINE] != -2:
            return 5
        free += 1
        task = s.tasks[task, T_NEXT]
    if free != s.counts[C_TASK_ROOM] or free + alive != len(s.tasks):
        return 5
    left = 0
    live = 0
    for job in range(len(s.jobs)):
        if s.jobs[job, J_NUMBER] >= 0:
            live += 1
            left += s.jobs[job, J_LEFT]
            if s.jobs[job, J_LEFT] <= 0:
                return 6
    free = 0
    job = s.counts[C_FREE_JOB]
    while job >= 0 and free <= len(s.jobs):
        free += 1
        job = s.jobs[job, J_NEXT]
    if free != s.counts[C_JOB_ROOM] or free + live != len(s.jobs):
        return 6
    return 0 if left == alive and live == s.counts[C_JOBS_IN] - s.counts[C_JOBS_DONE] else 6


def check_work(s: State) -> int:
    left = 0.0
    under_way = 0.0
    most = 1
    for task in range(len(s.tasks)):
        if s.tasks[task, T_MACHINE] == -2:
            continue
        cores = s.tasks[task, T_CORES]
        most = max(most, cores)
        left += cores * s.times[task, F_LEFT]
        if s.tasks[task, T_MACHINE] >= 0:
            under_way += cores * (s.sums[S_NOW] - s.times[task, F_BEGAN])
    came = s.sums[S_IN] + s.sums[S_IN + 1]
    done = s.sums[S_DONE] + s.sums[S_DONE + 1]
    withdrawn = s.sums[S_WITHDRAWN] + s.sums[S_WITHDRAWN + 1]
    lost = s.sums[S_LOST] + s.sums[S_LOST + 1]
    used = s.sums[S_USED] + s.sums[S_USED + 1]
    # An end is a start and a runtime, rounded to what a time of this size can say.
    rounding = (s.counts[C_STARTS] + 1) * most * (abs(s.sums[S_NOW]) + 1.0) * 1e-15
    if abs(came - done - withdrawn - left) > 1e-9 * came + rounding:
        return 8
    if abs(used - done - lost - under_way) > 1e-9 * used + rounding:
        return 9
    return 0
