"""What a run keeps, as arrays. A server has one slot and a queue."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from simulator.jobs.columns import Floats, Ints

# Of a server: whole numbers.
V_STATE: Final = 0
#: The job that it runs; -1: none.
V_JOB: Final = 1
#: 1: what it runs is a long task.
V_RUNS_LONG: Final = 2
#: Long tasks that it runs or that wait for it.
V_LONG: Final = 3
#: Its queue: entries, linked.
V_FIRST: Final = 4
V_LAST: Final = 5
#: Place among those that take probes; -1: it does not.
V_OPEN: Final = 6
SERVER_INTS: Final = 7

OFF: Final = 0
ON: Final = 1
ASKED_FOR: Final = 2
#: It takes nothing new, ends what it has, and goes (§3.2).
DRAINING: Final = 3

# Of an entry: a probe, or a long task.
E_JOB: Final = 0
E_NEXT: Final = 1
E_LONG: Final = 2
E_BYPASSED: Final = 3
ENTRY_INTS: Final = 4

# Of a run.
#: On-demand servers in all; of those the first so many are for short tasks only.
K_FIXED: Final = 0
K_SHORT: Final = 1
#: The most transient servers; how many are on or asked for; how many are on (draining ones with them).
K_MOST: Final = 2
K_HAVE: Final = 3
K_ON: Final = 4
#: On-demand servers that run long tasks.
K_LONG: Final = 5
K_OPEN: Final = 6
K_ENTRIES: Final = 7
K_LEAST_PROBES: Final = 8
K_BYPASSES: Final = 9
K_STICKY: Final = 10
K_SHORTEST: Final = 11
K_VALIDATE: Final = 12
#: Counts: tasks that ran; probes of which no task came; transient servers that came; the most at one time.
K_RUN: Final = 13
K_VOID: Final = 14
K_CAME: Final = 15
K_PEAK: Final = 16
#: The rule that was broken; 0: none.
K_BROKEN: Final = 17
KNOBS: Final = 18

N_CUTOFF_S: Final = 0
N_PROBE_RATIO: Final = 1
N_THRESHOLD: Final = 2
N_PROVISIONING_S: Final = 3
#: Integral of transient servers that are on, time of the last change of it; sum and most of their lifetimes.
N_ACTIVE_S: Final = 4
N_SINCE_S: Final = 5
N_LIVED_S: Final = 6
N_LONGEST_S: Final = 7
N_BUSY_S: Final = 8
N_NOW_S: Final = 9
NUMBERS: Final = 10


class Coaster(NamedTuple):
    """All of a run."""

    knobs: Ints
    numbers: Floats
    draws: Ints
    #: Of jobs: when they come, the mean of their tasks, where their tasks begin (and those of the last end).
    at_s: Floats
    mean_s: Floats
    offsets: Ints
    #: Of tasks: runtime, how long they waited, where they ran.
    runtime_s: Floats
    waited_s: Floats
    ran_on: Ints
    #: Of jobs: tasks that began, tasks that ended, when the last did.
    begun: Ints
    done: Ints
    ended_s: Floats
    servers: Ints
    #: Estimates of long tasks that wait on each server; when the running one is expected to end; when it came on.
    queued_s: Floats
    expected_s: Floats
    since_s: Floats
    open: Ints
    entries: Ints


RULES: Final = (
    "all is well",
    "a server that is off, or only asked for, has something to do",
    "servers that run long tasks are not counted right",
    "a long task is on a server for short ones",
    "there are more transient servers than the budget allows",
    "a task has not run, or twice",
    "the list of servers that take probes is wrong",
    "a server stands idle while somebody waits for it",
    "transient servers that are on, or asked for, are not counted right",
    "a server expects other work than waits for it",
    "the time that servers worked is not the work of the tasks",
)


def empty(servers: int, entries: int, tasks: int, jobs: int) -> tuple[Ints, Ints, Floats, Ints]:
    """Servers that are off, entries, and what is known of tasks and jobs so far: nothing."""
    made = np.zeros((servers, SERVER_INTS), np.int64)
    made[:, [V_JOB, V_FIRST, V_LAST, V_OPEN]] = -1
    return made, np.zeros((entries, ENTRY_INTS), np.int64), np.full(tasks, -1.0), np.full(tasks, -1, np.int64)
