"""Arrays of the engine, and the names of their columns.

A row is a task, job, machine or queue. A kernel is compiled with the columns' names as constants. Rows of tasks and
jobs are used again as soon as theirs are done, so that the arrays grow with what is alive.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


class TaskColumns(NamedTuple):
    """Columns of `State.tasks`."""

    # A task is in one list: of the waiting ones of its queue, or of the running ones of its machine.
    job: int = 0
    number: int = 1
    queue: int = 2
    cores: int = 3
    memory: int = 4
    #: -1 while it waits, -2 while the row is free.
    machine: int = 5
    #: Place among all that wait: the lower, the earlier.
    order: int = 6
    #: Number of its start among all starts.
    start: int = 7
    next: int = 8
    before: int = 9
    #: How often it was killed.
    kills: int = 10
    #: The next replica of the same task, in a ring; itself where it has none.
    twin: int = 11
    #: TASK.order when its job came.
    came: int = 12


TASK: Final = TaskColumns()
TASK_INTS: Final = len(TASK)


class TimeColumns(NamedTuple):
    """Columns of `State.times`: seconds of a task."""

    #: Useful runtime that is left; falls only by checkpoints.
    left: int = 0
    #: What the scheduler believes of TIME.left.
    estimate: int = 1
    began: int = 2
    ends: int = 3
    #: When the scheduler believes that it ends.
    expected: int = 4
    since: int = 5
    #: Time in the queue so far, over all attempts.
    queued: int = 6
    #: For the policy's own use: whatever it keeps of a task.
    note: int = 7


TIME: Final = TimeColumns()
TASK_FLOATS: Final = len(TIME)


class JobColumns(NamedTuple):
    """Columns of `State.jobs`."""

    number: int = 0
    tasks: int = 1
    #: Tasks that are not done.
    left: int = 2
    kills: int = 3
    next: int = 4


JOB: Final = JobColumns()
JOB_INTS: Final = len(JOB)


class JobTimeColumns(NamedTuple):
    """Columns of `State.job_times`."""

    submitted: int = 0
    #: First start of its first task; NaN before.
    started: int = 1
    longest: int = 2
    lost: int = 3


JOB_TIME: Final = JobTimeColumns()
JOB_FLOATS: Final = len(JOB_TIME)


class MachineColumns(NamedTuple):
    """Columns of `State.machines`."""

    cores: int = 0
    used: int = 1
    memory: int = 2
    used_memory: int = 3
    #: Its running tasks in the order of their starts.
    first: int = 4
    last: int = 5
    running: int = 6
    #: Of its last change: 1 growth, -1 shrink. A new machine has grown (Agarwal et al. 2023, Table 1).
    direction: int = 7
    changes: int = 8
    kills: int = 9
    #: Not 0: takes no new tasks. The look at the queue adds 1 and takes it back; `LEAVING` stays: the machine's owner
    #: wants to give it back, and has done so once it has no cores.
    held: int = 10


MACHINE: Final = MachineColumns()
LEAVING: Final = 2
MACHINE_INTS: Final = len(MACHINE)


class MachineTimeColumns(NamedTuple):
    """Columns of `State.machine_times`."""

    #: When its cores last changed; s. A column of its own array.
    changed: int = 0


MACHINE_TIME: Final = MachineTimeColumns()
MACHINE_FLOATS: Final = len(MACHINE_TIME)


class QueueColumns(NamedTuple):
    """Columns of `State.queues`; a queue has tasks of one rank that want the same."""

    rank: int = 0
    cores: int = 1
    memory: int = 2
    first: int = 3
    last: int = 4
    waiting: int = 5
    #: Place among the queues that are not empty; -1 if it is.
    active: int = 6
    cursor: int = 7


QUEUE: Final = QueueColumns()
QUEUE_INTS: Final = len(QUEUE)


class Counts(NamedTuple):
    """Places in `State.counts`."""

    free_task: int = 0
    task_room: int = 1
    free_job: int = 2
    job_room: int = 3
    running: int = 4
    waiting: int = 5
    active: int = 6
    starts: int = 7
    #: The last and the first place that was given in the order of what waits.
    tail: int = 8
    head: int = 9
    #: 1: something has happened at this instant, and there was no look at the queue since; 2: the look comes at once.
    due: int = 10
    jobs_in: int = 11
    jobs_done: int = 12
    tasks_in: int = 13
    tasks_done: int = 14
    kills: int = 15
    events: int = 16
    changes: int = 17
    refused: int = 18
    #: Next rows of the inputs at hand, and whether there are more after them.
    next_job: int = 19
    next_change: int = 20
    more_jobs: int = 21
    more_changes: int = 22
    #: Tasks for which there was no room.
    wanted: int = 23
    done_rows: int = 24
    attempt_rows: int = 25
    used_cores: int = 26
    all_cores: int = 27
    most_waiting: int = 28
    most_alive: int = 29
    #: What the validation found wrong: one of `validation.RULES`.
    broken: int = 30
    #: The machine that was reserved in the last look at the queue; -1: none.
    reserved: int = 31
    #: 1: the policy's arrays are new, and it must hear of every machine.
    unsettled: int = 32
    #: Number of the first job at hand among all.
    first_job: int = 33
    #: Replicas that were withdrawn since another one was done.
    withdrawn: int = 34
    #: The task that was the last to be put into a queue.
    newest: int = 35


COUNT: Final = Counts()
COUNTS: Final = len(COUNT)


class Options(NamedTuple):
    """Places in `State.options`."""

    discipline: int = 0
    kills: int = 1
    requeue: int = 2
    depth: int = 3
    validate: int = 4
    done: int = 5
    attempts: int = 6
    #: Cores of the largest machine that there will ever be; 0: unknown, and whatever asks for too much waits for ever.
    most_cores: int = 7
    #: Of each task, at least 1; the first to be done ends the others.
    replicas: int = 8
    #: Whether a policy that finds no machine for a task finds none for any other that wants the same.
    by_demand: int = 9
    #: 1: the queue is looked at after every end of a task, not only once an instant is over.
    looks: int = 10
    #: Jobs whose number is a multiple of it make checkpoints, where there are any.
    checkpointed: int = 11
    #: Memory of the machine that will ever have most; UNLIMITED_MIB: unknown, as for OPTION.most_cores.
    most_mib: int = 12


OPTION: Final = Options()
OPTIONS: Final = len(OPTION)


class Sums(NamedTuple):
    """Places in `State.sums`: times and sums of the whole run."""

    # Sums of long runs stand in two places, the second of which holds what the first cannot (`measures.add`).
    now: int = 0
    #: The policy wants to be asked again then; infinite if not.
    wake: int = 1
    #: Nothing later than this happens yet.
    until: int = 2
    #: What is measured: jobs submitted and work done in [SUM.from_s, SUM.to_s).
    from_s: int = 3
    to_s: int = 4
    checkpoint_every: int = 5
    checkpoint_cost: int = 6
    short: int = 7
    #: Core-seconds that came in, were done usefully, were lost; used (an integral).
    came_in: int = 8
    done: int = 10
    lost: int = 12
    used: int = 14
    #: Of these, what is not between SUM.from_s and SUM.to_s: mostly nothing.
    done_outside: int = 16
    lost_outside: int = 18
    used_outside: int = 20
    #: Core-seconds that were there between SUM.from_s and SUM.to_s, until the number of cores last changed.
    all_measured: int = 22
    #: Work of replicas that were withdrawn, in core-seconds.
    withdrawn: int = 24
    #: Core-seconds of jobs that were refused.
    refused: int = 26
    #: When the number of cores last changed.
    cores_since: int = 28


SUM: Final = Sums()
SUMS: Final = 29

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
# Where a killed task waits.
TAIL: Final = 0
HEAD: Final = 1
SUBMISSION: Final = 2

# Why the loop came back; GOES_ON: it does not.
GOES_ON: Final = -1
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
    #: The tree of ends (`ends`): the earliest below each node, and whose it is; leaves know that by their places.
    ends_at: Floats
    ends_task: Ints
    #: Shapes (capacity, JOB_INTS), (capacity, JOB_FLOATS).
    jobs: Ints
    job_times: Floats
    #: Shapes (machines, MACHINE_INTS), (machines, MACHINE_FLOATS).
    machines: Ints
    machine_times: Floats
    #: Shape (queues, QUEUE_INTS); the first COUNT.active of `active` are those that are not empty.
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
    scratch_lost: Floats
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
