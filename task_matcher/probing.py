"""How a hybrid scheduler places tasks: Eagle, on which CloudCoaster builds (seed 003 §2.2, §4). Kernels, pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def is_long(mean_task_s: float, cutoff_s: float) -> bool:
    """Whether a job is long: by the mean of its tasks."""
    return mean_task_s >= cutoff_s


def probes(tasks: int, ratio: float, least: int) -> int:
    """How many servers a short job asks: ``ratio`` a task, and at least so many."""
    return max(int(tasks * ratio), least)


def least_loaded(queued_s: Floats, ends_s: Floats, first: int, end: int, now_s: float) -> int:
    """The server of [first, end) on which a long task would begin first, ties by the lower number; -1 of none.

    :param queued_s: estimates of the long tasks that wait on each; ``ends_s``: when the one that runs is expected to
        end. Short tasks count as nothing.
    """
    best = -1
    best_s = 0.0
    for server in range(first, end):
        wait_s = queued_s[server] + max(ends_s[server] - now_s, 0.0)
        if best < 0 or wait_s < best_s:
            best = server
            best_s = wait_s
    return best


def goes_before(left_s: float, other_left_s: float, other_bypassed: int, most_bypassed: int) -> bool:
    """Whether a job with so much work left goes before one that came earlier: shortest remaining first, but nobody is
    passed over more often than so."""
    return left_s < other_left_s and other_bypassed < most_bypassed
