"""CloudCoaster (Ogden and Guo 2019) on the hybrid scheduler Eagle: where tasks go, and how many transient servers.

Kernels, pure. Sections are of the paper.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_ROUNDING = 1e-9


def is_long(mean_task_s: float, cutoff_s: float) -> bool:
    """Whether a job is long: by the mean of its tasks."""
    return mean_task_s >= cutoff_s


def probes(tasks: int, ratio: float, least: int) -> int:
    """How many servers a short job asks: ``ratio`` a task, and at least so many."""
    return max(int(tasks * ratio), least)


def on_demand_probes(tasks: int, each_task: bool) -> int:
    """How many of a short job's probes wait on servers that are not taken away (§3.3): one for each of its tasks, or
    one of the job."""
    return tasks if each_task else 1


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
    """Whether a job with so much work left goes before an earlier one (§2.2): shortest remaining first, but no job
    is passed over more often than so."""
    return left_s < other_left_s and other_bypassed < most_bypassed


def slack_s(estimate_s: float, delayed_s: float, most_delays: float) -> float:
    """By how much those that pass a job may still delay it: ``most_delays`` times the estimate of one of its tasks,
    less what they took already; s."""
    return most_delays * estimate_s - delayed_s


def passes(left_s: float, best_left_s: float, estimate_s: float, least_slack_s: float) -> bool:
    """Whether a job takes the turn, as in Eagle's published simulator: it has less work left than the best so far, and
    one of its tasks takes no more than the least slack of all who came before it."""
    return left_s < best_left_s and estimate_s <= least_slack_s


def most_transients(short_servers: int, cost_ratio: float, replaced_share: float) -> int:
    """K = r N p (§3.1): transient servers for the money of the on-demand ones that they replace.

    :param short_servers: N, servers for short tasks only; ``cost_ratio``: r, how many transient servers cost as much as
        one on demand; ``replaced_share``: p, of N that are given up.
    """
    return math.floor(cost_ratio * short_servers * replaced_share + _ROUNDING)


def kept_servers(short_servers: int, replaced_share: float) -> int:
    """(1 - p) N: on-demand servers for short tasks only that stay."""
    return math.floor(short_servers * (1.0 - replaced_share) + 0.5)


def long_load(long_servers: int, servers: int) -> float:
    """l_r: share of the servers that run long tasks; 0 of none."""
    return long_servers / servers if servers > 0 else 0.0


def wanted(long_servers: int, servers: int, threshold: float, have: int, most: int) -> int:
    """What to do next: 1: rent one more, -1: release one, 0: nothing (§3.2). Called again after each step.

    :param servers: all that there are, those that were asked for with them: an answer that is under way is no reason to
        ask again.
    """
    load = long_load(long_servers, servers)
    if load > threshold:
        return 1 if have < most else 0
    if load < threshold and have > 0:
        return -1
    return 0


def expected_backlog_s(backlog_s: float, expected_s: float, passed_s: float, memory_s: float) -> float:
    """Short work that is expected: what is there, or what was expected ``passed_s`` ago where that is still more of it.

    :param memory_s: in which what was expected fades to 1/e: short jobs come in bursts. 0: nothing is remembered.
    """
    faded_s = expected_s * math.exp(-passed_s / memory_s) if memory_s > 0 else 0.0
    return max(backlog_s, faded_s)


def wanted_by_wait(expected_s: float, servers: int, longest_s: float, kept_share: float, have: int, most: int) -> int:
    """What to do next, as `wanted`, by how long a short task that comes now has to wait: ours.

    :param expected_s: short work that has come and not ended; ``servers``: those that take short tasks, transient ones
        that were asked for with them.
    :param longest_s: the wait above which one more is rented; ``kept_share``: of it, at which one is released.
    """
    if expected_s > longest_s * servers:
        return 1 if have < most else 0
    if have > 0 and expected_s <= kept_share * longest_s * (servers - 1):
        return -1
    return 0
