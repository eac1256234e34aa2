"""Interval-aware scheduling: machines that a job may start on before they are switched off (Wijayawardana 2025, §6.1).

Kernels, pure. A machine interval lasts from switching on to switching off. Machines of lower numbers are switched off
last, and switching happens at multiples of ``every_s`` (1/freq). Lengths of past intervals say how likely a machine is
to outlast a job, given how long it has been on.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Times that should stand on the grid are off it by rounding, at most so much of a step.
_ROUNDING = 1e-9


def is_big(runtime_s: float, cores: float, from_core_s: float) -> bool:
    """Whether a job is big by its work (Algorithm 1: exec * res >= longJobThresh)."""
    return runtime_s * cores >= from_core_s


def since_change_s(now_s: float, every_s: float) -> float:
    """Time since the last instant at which machines may have been switched; s."""
    steps = now_s / every_s
    return max(steps - math.floor(steps + _ROUNDING), 0.0) * every_s


def next_change_s(now_s: float, every_s: float) -> float:
    """The next such instant after now; s."""
    return (math.floor(now_s / every_s + _ROUNDING) + 1.0) * every_s


def aligned(runtime_s: float, now_s: float, every_s: float) -> bool:
    """Algorithm 2: a job of at most one step starts if it ends before the next change, or right after one; others do
    always.

    The thesis' time until the next change is right for one change an hour only; this is right for every frequency.
    """
    if runtime_s > every_s:
        return True
    since_s = since_change_s(now_s, every_s)
    return since_s <= _ROUNDING * every_s or every_s - since_s > runtime_s


def fill_tails(ended: Floats, tails: Floats, sums: Floats) -> None:
    """From how many intervals had which length to how many were longer, and how long those were together.

    :param ended: shape (steps,): of place l, how many lasted l steps. ``tails``, ``sums``: the same shape; of place l,
        over intervals longer than l steps.
    """
    count = 0.0
    total = 0.0
    for length in range(len(ended) - 1, -1, -1):
        tails[length] = count
        sums[length] = total
        count += ended[length]
        total += ended[length] * length


def risk(tails: Floats, every_s: float, uptime_s: float, runtime_s: float) -> float:
    """P(remaining < exec | uptime): how likely a machine is switched off under a job that starts now (Algorithm 4).

    A job that ends when its machine does has ended. 0 where no interval is known that lasted longer than this one: all
    of its age that are known are still on.
    """
    last = len(tails) - 1
    lived = tails[min(math.floor(uptime_s / every_s + _ROUNDING), last)]
    if lived <= 0.0:
        return 0.0
    steps = math.ceil((uptime_s + runtime_s) / every_s - _ROUNDING) - 1
    return float(1.0 - tails[min(max(steps, 0), last)] / lived)


def mean_remaining_s(tails: Floats, sums: Floats, every_s: float, uptime_s: float) -> float:
    """The mean of what is left of intervals that got so old (Algorithm 3); s. Infinite where none is known."""
    place = min(math.floor(uptime_s / every_s + _ROUNDING), len(tails) - 1)
    if tails[place] <= 0.0:
        return math.inf
    return float(sums[place] / tails[place] * every_s - uptime_s)
