"""Arrays of the waiting policy."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbtide.matcher.policies.forest import Forest
from ebbtide.simulator.jobs.columns import Floats, Ints
from ebbtide.simulator.jobs.nodes import Nodes


class Knobs(NamedTuple):
    """Places in `Waiting.knobs`."""

    #: Machines: the fixed ones; one for what is rented for good; then those of trials, and of jobs that stay after
    #: theirs, one for each number of cores: so each holds jobs in the order in which their time is up.
    fixed: int = 0
    #: Cores of a fixed machine; a job that wants more is rented for at once.
    most: int = 1
    #: Jobs are tried; what is believed of lengths counts not at all.
    tries: int = 2
    #: What says who would wait too long: one of LATE.
    late: int = 3
    by_core_time: int = 4
    #: Tasks from this place in the queue on are new, or held.
    new: int = 5
    #: Write down who waits too long; write down what the cluster looked like.
    marks: int = 6
    records: int = 7
    recorded: int = 8
    #: Every so manyth decision is recorded; and how many there were, recorded or not.
    stride: int = 9
    decisions: int = 10
    #: Counts: jobs that went on demand at once, that were tried, that stayed after it, that gave up waiting.
    rented: int = 11
    tried: int = 12
    stayed: int = 13
    gave_up: int = 14
    #: Where a look at the queue stands.
    phase: int = 15
    at: int = 16
    #: Memory of a fixed machine, in MiB; and the count of jobs that were too large for one.
    most_mib: int = 17
    too_large: int = 18
    #: Jobs that were never tried, since jobs like them were long.
    untried: int = 19
    #: Trials that ended with their spot machine.
    revoked: int = 20
    #: Fixed machines take any of those that wait and have room, each as likely.
    random: int = 21


KNOB: Final = Knobs()
KNOBS: Final = len(KNOB)

#: No job is believed to be late, the marks know, or the forest says so.
LATE: Final = {"nobody": 0, "marks": 1, "forest": 2}


class Limits(NamedTuple):
    """Places in `Waiting.numbers`."""

    short_below_s: int = 0
    wait_below_s: int = 1
    #: The chance to be long up to which a job is tried; how long it is held for others' trials; s; half-life of what
    #: is known of the past; s.
    try_up_to: int = 2
    hold_s: int = 3
    half_life_s: int = 4
    #: When the next of those that are held is asked again; s.
    held_until_s: int = 5


LIMIT: Final = Limits()
NUMBERS: Final = len(LIMIT)


class Paid(NamedTuple):
    """Places in `Waiting.sums`; each takes two (`measures.add`)."""

    # Sums of long runs, each in two places (`measures.add`).
    #: Dollars for machines on demand, core-seconds of jobs on them, and those of trials that were killed.
    dollars: int = 0
    core_s: int = 2
    lost_core_s: int = 4
    #: Over jobs that were measured: time in the queue; completion time without the runtime; how many; runtimes.
    wait_s: int = 6
    delay_s: int = 8
    jobs: int = 10
    late: int = 12
    #: Core-seconds used of the fixed machines, within what is measured.
    fixed_core_s: int = 14
    #: Core-seconds on fixed machines past the end of what is measured, of jobs that were measured.
    after_core_s: int = 16


PAID: Final = Paid()
SUMS: Final = 18


class Waiting(NamedTuple):
    """All that it keeps."""

    knobs: Ints
    numbers: Floats
    sums: Floats
    #: `matcher.policies.cluster_state`: its sums, and room for features.
    cluster: Floats
    features: Floats
    sizes: Ints
    #: Of each job by its number: 1 if it would wait too long. Shape (jobs,), or (0,) where it is not asked.
    marks: NDArray[np.int8]
    #: `matcher.policies.past_lengths`.
    past: Floats
    #: Of spot machines, which trials get one after the other; s. None: trials are on demand.
    lifetimes: Floats
    #: Features of jobs that found no room, whether they would have waited too long, and when they were asked; s.
    rows: Floats
    labels: Floats
    asked_s: Floats
    forest: Forest
    nodes: Nodes
