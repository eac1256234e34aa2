"""Jobs of long, uninterruptible tasks, as many as make a load on a pool (seed 000 §4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.errors import InvalidParameter
from simulator.inputs.batches import Floats, Indices, JobBatch, Ragged, hints, same, texts, unknown
from simulator.matching.pools import Pool

#: Runtimes: even between a minute and the most (Seismic A), bell-shaped around the middle, or bounded Pareto (Genomics).
SHAPES: Final = ("uniform", "gaussian", "pareto")


@dataclass(frozen=True, slots=True)
class Workload:
    """What the paper leaves open is a setting: how many tasks a job has, and of how many cores.

    :param load: work / (mean harvested cores in the window in which the jobs come), as a share.
    :param most_task_s: X of U[1 min, X].
