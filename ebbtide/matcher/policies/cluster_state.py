"""State of the cluster when a job comes, from which its wait is predicted (Ambati et al. 2021, Table 1). A kernel."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEATURES: Final = (
    "cluster-cpu-util",
    "cluster-mem-util",
    "runq-size",
    "waitq-size",
    "runq-mean-cpu",
    "runq-mean-time",
    "waitq-mean-cpu",
    "waitq-mean-time",
    "num-cores",
)

# Sums that say all of it, kept up to date by the caller, which knows of starts, ends and waiting jobs.
USED_CORES: Final = 0
ALL_CORES: Final = 1
USED_MIB: Final = 2
ALL_MIB: Final = 3
RUNNING: Final = 4
#: Sum of the times at which they began.
RUNNING_BEGAN_S: Final = 5
WAITING: Final = 6
WAITING_CORES: Final = 7
WAITING_SINCE_S: Final = 8
SUMS: Final = 9


def began(sums: Floats, cores: float, memory_mib: float, now_s: float) -> None:
    """A job begins on the fixed machines."""
    sums[USED_CORES] += cores
    sums[USED_MIB] += memory_mib
    sums[RUNNING] += 1.0
    sums[RUNNING_BEGAN_S] += now_s


def ended(sums: Floats, cores: float, memory_mib: float, began_s: float) -> None:
    """A job runs there no more."""
    sums[USED_CORES] -= cores
    sums[USED_MIB] -= memory_mib
    sums[RUNNING] -= 1.0
    sums[RUNNING_BEGAN_S] = sums[RUNNING_BEGAN_S] - began_s if sums[RUNNING] > 0 else 0.0


def waits(sums: Floats, cores: float, since_s: float) -> None:
    """A job waits for them."""
    sums[WAITING] += 1.0
    sums[WAITING_CORES] += cores
    sums[WAITING_SINCE_S] += since_s


def waits_no_more(sums: Floats, cores: float, since_s: float) -> None:
    """A job does not any more: it begins there, or elsewhere."""
    sums[WAITING] -= 1.0
    sums[WAITING_CORES] -= cores
    sums[WAITING_SINCE_S] = sums[WAITING_SINCE_S] - since_s if sums[WAITING] > 0 else 0.0


def describe(features: Floats, sums: Floats, now_s: float, cores: float) -> None:
    """Fill in the nine features for a job of so many cores that comes now; shares, counts, cores and s.

    :param features: shape (9,), as `FEATURES`. Means of nothing are 0.
    """
    running = max(sums[RUNNING], 1.0)
    waiting = max(sums[WAITING], 1.0)
    features[0] = sums[USED_CORES] / sums[ALL_CORES] if sums[ALL_CORES] > 0 else 0.0
    features[1] = sums[USED_MIB] / sums[ALL_MIB] if sums[ALL_MIB] > 0 else 0.0
    features[2] = sums[RUNNING]
    features[3] = sums[WAITING]
    features[4] = sums[USED_CORES] / running
    features[5] = max((sums[RUNNING] * now_s - sums[RUNNING_BEGAN_S]) / running, 0.0)
    features[6] = sums[WAITING_CORES] / waiting
    features[7] = max((sums[WAITING] * now_s - sums[WAITING_SINCE_S]) / waiting, 0.0)
    features[8] = cores
