"""Where things stand in the engine's arrays, and the arrays themselves.

One row a task, job, machine or queue; columns are named here. A kernel is compiled with these names as constants. Rows
of tasks and jobs are used again as soon as theirs are done, so that the arrays grow with what is alive.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# Of a task, whole numbers. A task is in one list: of the waiting ones of its queue, or of the running ones of its
# machine.
T_JOB: Final = 0
T_NUMBER: Final = 1
T_QUEUE: Final = 2
T_CORES: Final = 3
T_MEMORY: Final = 4
#: -1 while it waits, -2 while the row is free.
T_MACHINE: Final = 5
#: Place among all that wait: the lower, the earlier.
T_ORDER: Final = 6
#: Number of its start among all starts.
T_START: Final = 7
T_NEXT: Final = 8
T_BEFORE: Final = 9
#: How often it was killed.
T_KILLS: Final = 10
#: The next replica of the same task, in a ring; itself where it has none.
T_TWIN: Final = 11
TASK_INTS: Final = 12

# Of a task, seconds.
#: Useful runtime that is left; falls only by checkpoints.
F_LEFT: Final = 0
#: What the scheduler believes of F_LEFT.
F_ESTIMATE: Final = 1
F_BEGAN: Final = 2
F_ENDS: Final = 3
#: When the scheduler believes that it ends.
F_EXPECTED: Final = 4
F_SINCE: Final = 5
#: Time in the queue so far, over all attempts.
F_QUEUED: Final = 6
#: For the policy's own use: whatever it keeps of a task.
F_NOTE: Final = 7
TASK_FLOATS: Final = 8

# Of a job.
J_NUMBER: Final = 0
J_TASKS: Final = 1
#: Tasks that are not done.
J_LEFT: Final = 2
J_KILLS: Final = 3
J_NEXT: Final = 4
JOB_INTS: Final = 5
G_SUBMITTED: Final = 0
#: First start of its first task; NaN before.
G_STARTED: Final = 1
G_LONGEST: Final = 2
G_LOST: Final = 3
JOB_FLOATS: Final = 4

# Of a machine.
M_CORES: Final = 0
M_USED: Final = 1
M_MEMORY: Final = 2
M_USED_MEMORY: Final = 3
#: Its running tasks in the order of their starts.
M_FIRST: Final = 4
M_LAST: Final = 5
M_RUNNING: Final = 6
#: Of its last change: 1 growth, -1 shrink. A new machine has grown (seed 000, Table 1).
M_DIRECTION: Final = 7
M_CHANGES: Final = 8
M_KILLS: Final = 9
#: Not 0: takes no new tasks. The look at the queue adds 1 and takes it back; `LEAVING` stays: the machine's owner wants
#: to give it back, and if it loses all cores then, he has.
M_HELD: Final = 10
LEAVING: Final = 2
MACHINE_INTS: Final = 11
#: When its cores last changed; s. A column of its own array.
H_CHANGED: Final = 0
MACHINE_FLOATS: Final = 1

# Of a queue: tasks of one rank that want the same.
Q_RANK: Final = 0
Q_CORES: Final = 1
Q_MEMORY: Final = 2
Q_FIRST: Final = 3
Q_LAST: Final = 4
Q_COUNT: Final = 5
#: Place among the queues that are not empty; -1 if it is.
Q_ACTIVE: Final = 6
Q_CURSOR: Final = 7
QUEUE_INTS: Final = 8

# Of the whole run: counts.
C_FREE_TASK: Final = 0
C_TASK_ROOM: Final = 1
C_FREE_JOB: Final = 2
C_JOB_ROOM: Final = 3
C_RUNNING: Final = 4
C_WAITING: Final = 5
C_ACTIVE: Final = 6
C_STARTS: Final = 7
#: The last and the first place that was given in the order of what waits.
C_TAIL: Final = 8
C_HEAD: Final = 9
#: 1: something has happened at this instant, and nobody has looked at the queue since.
C_DUE: Final = 10
C_JOBS_IN: Final = 11
C_JOBS_DONE: Final = 12
C_TASKS_IN: Final = 13
C_TASKS_DONE: Final = 14
C_KILLS: Final = 15
C_EVENTS: Final = 16
C_CHANGES: Final = 17
C_REFUSED: Final = 18
#: Next rows of the inputs at hand, and whether there are more after them.
C_NEXT_JOB: Final = 19
C_NEXT_CHANGE: Final = 20
C_MORE_JOBS: Final = 21
C_MORE_CHANGES: Final = 22
#: Tasks for which there was no room.
C_WANTED: Final = 23
C_DONE_ROWS: Final = 24
C_ATTEMPT_ROWS: Final = 25
C_USED_CORES: Final = 26
C_ALL_CORES: Final = 27
C_MOST_WAITING: Final = 28
C_MOST_ALIVE: Final = 29
#: What the validation found wrong: one of `validation.RULES`.
C_BROKEN: Final = 30
#: The machine that was reserved in the last look at the queue; -1: none.
C_RESERVED: Final = 31
#: 1: the policy's arrays are new, and it must hear of every machine.
C_UNSETTLED: Final = 32
#: Number of the first job at hand among all.
C_FIRST_JOB: Final = 33
#: Replicas that were withdrawn since another one was done.
C_WITHDRAWN: Final = 34
COUNTS: Final = 35

# Of the whole run: options.
O_DISCIPLINE: Final = 0
O_KILLS: Final = 1
O_REQUEUE: Final = 2
O_DEPTH: Final = 3
O_VALIDATE: Final = 4
O_DONE: Final = 5
O_ATTEMPTS: Final = 6
#: Cores of the largest machine that there will ever be; 0: unknown, and whatever asks for too much waits for ever.
O_MOST_CORES: Final = 7
#: Of each task, at least 1; the first to be done ends the others.
O_REPLICAS: Final = 8
OPTIONS: Final = 9

# Of the whole run: times and sums; sums of long runs stand in two places, the second of which holds what the first
# cannot (`measures.add`).
S_NOW: Final = 0
#: The policy wants to be asked again then; infinite if not.
S_WAKE: Final = 1
#: Nothing later than this happens yet.
S_UNTIL: Final = 2
#: What is measured: jobs submitted and work done in [S_FROM, S_TO).
S_FROM: Final = 3
S_TO: Final = 4
S_CHECKPOINT_EVERY: Final = 5
S_CHECKPOINT_COST: Final = 6
S_SHORT: Final = 7
#: Core-seconds that came in, were done usefully, were lost; used and there (integrals).
S_IN: Final = 8
S_DONE: Final = 10
S_LOST: Final = 12
S_USED: Final = 14
#: The same between S_FROM and S_TO.
S_DONE_MEASURED: Final = 16
S_LOST_MEASURED: Final = 18
S_USED_MEASURED: Final = 20
S_ALL_MEASURED: Final = 22
#: Work of replicas that were withdrawn, in core-seconds.
S_WITHDRAWN: Final = 24
SUMS: Final = 26

#: Columns of `changes`: machine, cores, MiB.
CHANGE_INTS: Final = 3

#: Rows of what is written down: a job that is done, an attempt that ended.
DONE_COLUMNS: Final = ("job", "tasks", "submitted_s", "started_s", "ended_s", "kills", "lost_core_s")
ATTEMPT_COLUMNS: Final = ("job", "task", "machine", "began_s", "ended_s", "completed")

# What is measured: of jobs, and of tasks.
WAIT: Final = 0
COMPLETION: Final = 1
SLOWDOWN: Final = 2
TASK_WAIT: Final = 3
MEASURES: Final = ("wait_s", "completion_s", "slowdown", "task_wait_s")

# Disciplines.
STRICT: Final = 0
CONSERVING: Final = 1
EASY: Final = 2
# Which running task is killed first.
OLDEST: Final = 0
NEWEST: Final = 1
# Where a killed task waits.
TAIL: Final = 0
HEAD: Final = 1

# Why the loop came back.
FINISHED: Final = 0
NEEDS_JOBS: Final = 1
NEEDS_CHANGES: Final = 2
NEEDS_ROOM: Final = 3
ROWS_FULL: Final = 4
REACHED: Final = 5
PAUSED: Final = 6
BROKEN: Final = 7

#: As good as unlimited; MiB.
UNLIMITED_MIB: Final = 1 << 50


class State(NamedTuple):
    """All that the engine knows, as arrays: what a policy reads, and what a checkpoint holds."""

    #: Shapes (capacity, TASK_INTS), (capacity, TASK_FLOATS).
    tasks: Ints
    times: Floats
    #: The heap of ends (each above four): times, and rows of `tasks`; where each task stands in it. As long as `tasks`.
    heap_at: Floats
    heap_task: Ints
    heap_place: Ints
    #: Shapes (capacity, JOB_INTS), (capacity, JOB_FLOATS).
    jobs: Ints
    job_times: Floats
    #: Shapes (machines, MACHINE_INTS), (machines, MACHINE_FLOATS).
    machines: Ints
    machine_times: Floats
    #: Shape (queues, QUEUE_INTS); the first C_ACTIVE of `active` are those that are not empty.
    queues: Ints
    active: Ints
    counts: Ints
    options: Ints
    sums: Floats
    #: How many values fell into each bin, their sum in each; rows as `MEASURES`. Then (sum, its rest, most).
    bins: Ints
    bin_sums: Floats
    moments: Floats
    #: Killed tasks of one change, and room to think; as long as `tasks`.
    scratch: Ints
    scratch_times: Floats
    scratch_more: Ints
    #: Jobs at hand: when they come, their queues, where the tasks of each begin (and those of the last end); the tasks'
    #: runtimes and estimates; s. Then changes at hand.
    in_at: Floats
    in_queue: Ints
    in_offsets: Ints
    in_runtime: Floats
    in_estimate: Floats
    change_at: Floats
    changes: Ints
    #: Rows that wait to be written, columns as DONE_COLUMNS and ATTEMPT_COLUMNS.
    done: Floats
    attempts: Floats
