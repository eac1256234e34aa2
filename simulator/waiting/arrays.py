"""What the waiting policy keeps, as arrays."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.jobs.columns import Floats, Ints
from simulator.jobs.nodes import Nodes
from task_matcher.forest import Forest

#: Machines: the fixed ones; one for what is rented for good; then those of trials, and of jobs that stay after theirs,
#: one for each number of cores: so each holds jobs in the order in which their time is up.
K_FIXED: Final = 0
#: Cores of a fixed machine: the most that a job has.
K_MOST: Final = 1
#: Jobs are tried; what is believed of lengths counts not at all.
K_TRIES: Final = 2
#: What says who would wait too long: one of LATE.
K_LATE: Final = 3
K_BY_CORE_TIME: Final = 4
#: Tasks from this place in the queue on are new.
K_NEW: Final = 5
#: Write down who waits too long; write down what the cluster looked like.
K_MARKS: Final = 6
K_RECORDS: Final = 7
K_RECORDED: Final = 8
#: Every so manyth decision is recorded.
K_STRIDE: Final = 9
K_DECISIONS: Final = 10
#: Counts: jobs that went on demand at once, that were tried, that stayed after it, that gave up waiting.
K_RENTED: Final = 11
K_TRIED: Final = 12
K_STAYED: Final = 13
K_GAVE_UP: Final = 14
#: Where a look at the queue stands.
K_PHASE: Final = 15
K_AT: Final = 16
KNOBS: Final = 17

#: Nobody is believed to be late, the marks know, or the forest says so.
LATE: Final = {"nobody": 0, "marks": 1, "forest": 2}

N_SHORT_BELOW_S: Final = 0
N_WAIT_BELOW_S: Final = 1
NUMBERS: Final = 2

# Sums of long runs, each in two places (`measures.add`).
#: Dollars for machines on demand, core-seconds of jobs on them, and those of trials that were killed.
D_DOLLARS: Final = 0
D_CORE_S: Final = 2
D_LOST_CORE_S: Final = 4
#: Over jobs that were measured: time in the queue; completion time without the runtime; how many; runtimes.
D_WAIT_S: Final = 6
D_DELAY_S: Final = 8
D_JOBS: Final = 10
D_LATE: Final = 12
#: Core-seconds used of the fixed machines, within what is measured.
D_FIXED_CORE_S: Final = 14
SUMS: Final = 16


class Waiting(NamedTuple):
    """All that it keeps."""

    knobs: Ints
    numbers: Floats
    sums: Floats
    #: `task_matcher.cluster_state`: its sums, and room for features.
    cluster: Floats
    features: Floats
    sizes: Ints
    #: Of each job by its number: 1 if it would wait too long. Shape (jobs,), or (0,) where nobody asks.
    marks: NDArray[np.int8]
    #: Features of jobs that found no room, and whether they would have waited too long.
    rows: Floats
    labels: Floats
    forest: Forest
    nodes: Nodes
