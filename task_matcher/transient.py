"""How many transient servers short tasks get, and when (seed 003 §3.1, §3.2). Kernels, pure."""

from __future__ import annotations

import math

_ROUNDING = 1e-9


def most_transients(short_servers: int, cost_ratio: float, replaced_share: float) -> int:
    """K = r N p: transient servers for the money of the on-demand ones that they replace.

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
    """What to do next: 1: rent one more, -1: release one, 0: nothing (§3.2). Called anew after each step.

    :param servers: all that there are, those that were asked for with them: an answer that is under way is no reason to
        ask again.
    """
    load = long_load(long_servers, servers)
    if load > threshold:
        return 1 if have < most else 0
    if load < threshold and have > 0:
        return -1
    return 0
