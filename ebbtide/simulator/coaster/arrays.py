"""Arrays of a run. A server has one slot and a queue."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ebbtide.simulator.jobs.columns import Floats, Ints


class ServerColumns(NamedTuple):
    """Columns of `Coaster.servers`."""

    state: int = 0
    #: The job that it runs; -1: none.
    job: int = 1
    #: 1: what it runs is a long task.
    runs_long: int = 2
    #: Long tasks that it runs or that wait for it.
    long: int = 3
    #: Its queue: entries, linked.
    first: int = 4
    last: int = 5
    #: Place among those that take probes; -1: it does not.
    open: int = 6


SERVER: Final = ServerColumns()
SERVER_INTS: Final = len(SERVER)

OFF: Final = 0
ON: Final = 1
ASKED_FOR: Final = 2
#: It takes nothing new, ends what it has, and goes (§3.2).
DRAINING: Final = 3


class EntryColumns(NamedTuple):
    """Columns of `Coaster.entries`: a probe, or a long task."""

    job: int = 0
    next: int = 1
    long: int = 2
    bypassed: int = 3


ENTRY: Final = EntryColumns()
ENTRY_INTS: Final = len(ENTRY)


class Knobs(NamedTuple):
    """Places in `Coaster.knobs`."""

    #: On-demand servers in all; of those the first so many are for short tasks only.
    fixed: int = 0
    short: int = 1
    #: The most transient servers; how many are on or asked for; how many are on (draining ones with them).
    most: int = 2
    have: int = 3
    on: int = 4
    #: On-demand servers that run long tasks.
    long: int = 5
    open: int = 6
    entries: int = 7
    least_probes: int = 8
    bypasses: int = 9
    sticky: int = 10
    shortest: int = 11
    validate: int = 12
    #: Counts: tasks that ran; probes of which no task came; transient servers that came; the most at one time.
    run: int = 13
    void: int = 14
    came: int = 15
    peak: int = 16
    #: The rule that was broken; 0: none.
    broken: int = 17
    #: What was entered into the heap of ends so far.
    entered: int = 18
    #: 1: turns are taken as in Eagle's published simulator.
    published: int = 19
    #: 1: each short task has a probe on demand, not only each job.
    each_task: int = 20
    #: Transient servers that were asked for and have not come.
    asked: int = 21
    #: 1: transient servers are rented by the wait of short tasks, not by the long load.
    by_wait: int = 22
    #: Jobs that have come.
    jobs: int = 23


KNOB: Final = Knobs()
KNOBS: Final = len(KNOB)


class Numbers(NamedTuple):
    """Places in `Coaster.numbers`."""

    cutoff_s: int = 0
    probe_ratio: int = 1
    threshold: int = 2
    provisioning_s: int = 3
    #: Integral of transient servers that are on, time of the last change of it; sum and most of their lifetimes.
    active_s: int = 4
    since_s: int = 5
    lived_s: int = 6
    longest_s: int = 7
    busy_s: int = 8
    now_s: int = 9
    most_delays: int = 10
    #: As `active_s`, until the last job came; when that was.
    arriving_s: int = 11
    arrived_s: int = 12
    #: Estimates of the short tasks that have come and not ended; the wait for which servers are rented.
    backlog_s: int = 13
    longest_wait_s: int = 14
    #: What is expected of it, since when, and how long that is remembered.
    expected_s: int = 15
    expected_at_s: int = 16
    memory_s: int = 17
    #: Integral of transient servers that were asked for and are not there, time of its last change; until the last job.
    asked_s: int = 18
    asked_at_s: int = 19
    asked_arriving_s: int = 20
    #: Share of the wait for which servers are rented at which one is released.
    kept_share: int = 21


NUMBER: Final = Numbers()
NUMBERS: Final = len(NUMBER)


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
    #: Of entries: estimates of the tasks that passed them.
    delayed_s: Floats


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
    "the short work that has not ended is not counted right",
)


def empty(servers: int, entries: int, tasks: int, jobs: int) -> tuple[Ints, Ints, Floats, Ints]:
    """Servers that are off, entries, and what is known of tasks and jobs so far: nothing."""
    made = np.zeros((servers, SERVER_INTS), np.int64)
    made[:, [SERVER.job, SERVER.first, SERVER.last, SERVER.open]] = -1
    return made, np.zeros((entries, ENTRY_INTS), np.int64), np.full(tasks, -1.0), np.full(tasks, -1, np.int64)
