"""Conservation: no machine over its size, no task lost or doubled, work in = work out + unfinished. A kernel.

With ``validate=True`` it looks at the whole state after every event; at the end of a run it always does.
"""

from __future__ import annotations

import math
from typing import Final

from ebbtide.simulator.jobs.columns import COUNT, JOB, LEAVING, MACHINE, QUEUE, SUM, TASK, TIME, State

#: What `check` answers with.
RULES: Final = (
    "all is well",
    "a machine has more in use than it has",
    "what a machine has in use is not what runs on it",
    "the tree of ends does not hold what runs, in its order",
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
        found = check_ends(s)
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
        if s.machines[machine, MACHINE.used] > s.machines[machine, MACHINE.cores]:
            return 1
        if s.machines[machine, MACHINE.used_memory] > s.machines[machine, MACHINE.memory]:
            return 1
        if s.machines[machine, MACHINE.held] != 0 and s.machines[machine, MACHINE.held] != LEAVING:
            return 10
        used = 0
        used_mib = 0
        count = 0
        order = -1
        task = s.machines[machine, MACHINE.first]
        while task >= 0 and count <= len(s.tasks):
            if s.tasks[task, TASK.machine] != machine or s.tasks[task, TASK.start] <= order:
                return 2
            order = s.tasks[task, TASK.start]
            used += s.tasks[task, TASK.cores]
            used_mib += s.tasks[task, TASK.memory]
            count += 1
            task = s.tasks[task, TASK.next]
        if used != s.machines[machine, MACHINE.used] or used_mib != s.machines[machine, MACHINE.used_memory]:
            return 2
        if count != s.machines[machine, MACHINE.running]:
            return 2
        running += count
        cores_used += used
        cores_there += s.machines[machine, MACHINE.cores]
    if cores_used != s.counts[COUNT.used_cores] or cores_there != s.counts[COUNT.all_cores]:
        return 7
    return 0 if running == s.counts[COUNT.running] else 3


def check_ends(s: State) -> int:
    leaves = len(s.ends_task)
    running = 0
    for task in range(len(s.tasks)):
        at_s = s.ends_at[leaves + task]
        if at_s < math.inf:
            running += 1
            if s.tasks[task, TASK.machine] < 0 or at_s != s.times[task, TIME.ends] or at_s < s.sums[SUM.now]:
                return 3
    if running != s.counts[COUNT.running]:
        return 3
    for place in range(leaves - 1, 0, -1):
        one, other = 2 * place, 2 * place + 1
        first = s.ends_task[one] if one < leaves else one - leaves
        second = s.ends_task[other] if other < leaves else other - leaves
        at_s = min(s.ends_at[one], s.ends_at[other])
        tied = s.ends_at[one] == at_s < math.inf and s.ends_at[other] == at_s
        if s.ends_at[other] < s.ends_at[one] or (tied and s.tasks[second, TASK.start] < s.tasks[first, TASK.start]):
            first = second
        if s.ends_at[place] != at_s or (at_s < math.inf and s.ends_task[place] != first):
            return 3
    return 0


def check_queues(s: State) -> int:
    waiting = 0
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        if s.queues[queue, QUEUE.active] != i:
            return 4
        count = 0
        task = s.queues[queue, QUEUE.first]
        while task >= 0 and count <= len(s.tasks):
            after = s.tasks[task, TASK.next]
            if s.tasks[task, TASK.machine] != -1 or s.tasks[task, TASK.queue] != queue:
                return 4
            if after >= 0 and s.tasks[after, TASK.order] <= s.tasks[task, TASK.order]:
                return 4
            count += 1
            task = after
        if count != s.queues[queue, QUEUE.waiting] or count == 0:
            return 4
        waiting += count
    return 0 if waiting == s.counts[COUNT.waiting] else 4


def check_tables(s: State) -> int:
    alive = s.counts[COUNT.waiting] + s.counts[COUNT.running]
    if s.counts[COUNT.tasks_in] != s.counts[COUNT.tasks_done] + s.counts[COUNT.withdrawn] + alive:
        return 5
    free = 0
    task = s.counts[COUNT.free_task]
    while task >= 0 and free <= len(s.tasks):
        if s.tasks[task, TASK.machine] != -2:
            return 5
        free += 1
        task = s.tasks[task, TASK.next]
    if free != s.counts[COUNT.task_room] or free + alive != len(s.tasks):
        return 5
    left = 0
    live = 0
    for job in range(len(s.jobs)):
        if s.jobs[job, JOB.number] >= 0:
            live += 1
            left += s.jobs[job, JOB.left]
            if s.jobs[job, JOB.left] <= 0:
                return 6
    free = 0
    job = s.counts[COUNT.free_job]
    while job >= 0 and free <= len(s.jobs):
        free += 1
        job = s.jobs[job, JOB.next]
    if free != s.counts[COUNT.job_room] or free + live != len(s.jobs):
        return 6
    return 0 if left == alive and live == s.counts[COUNT.jobs_in] - s.counts[COUNT.jobs_done] else 6


def check_work(s: State) -> int:
    left = 0.0
    under_way = 0.0
    most = 1
    for task in range(len(s.tasks)):
        if s.tasks[task, TASK.machine] == -2:
            continue
        cores = s.tasks[task, TASK.cores]
        most = max(most, cores)
        left += cores * s.times[task, TIME.left]
        if s.tasks[task, TASK.machine] >= 0:
            under_way += cores * (s.sums[SUM.now] - s.times[task, TIME.began])
    came = s.sums[SUM.came_in] + s.sums[SUM.came_in + 1]
    done = s.sums[SUM.done] + s.sums[SUM.done + 1]
    withdrawn = s.sums[SUM.withdrawn] + s.sums[SUM.withdrawn + 1]
    lost = s.sums[SUM.lost] + s.sums[SUM.lost + 1]
    used = s.sums[SUM.used] + s.sums[SUM.used + 1]
    # An end is a start and a runtime, rounded to what a time of this size can say.
    rounding = (s.counts[COUNT.starts] + 1) * most * (abs(s.sums[SUM.now]) + 1.0) * 1e-15
    if abs(came - done - withdrawn - left) > 1e-9 * came + rounding:
        return 8
    if abs(used - done - lost - under_way) > 1e-9 * used + rounding:
        return 9
    return 0
