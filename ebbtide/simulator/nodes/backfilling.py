"""EASY backfilling (Lifka 1995): when the first of the queue can start, and what may start before it. Kernels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def reservation(
    ends: Floats,
    cores: Ints,
    memory_mib: Ints,
    count: int,
    free_cores: int,
    free_mib: int,
    need_cores: int,
    need_mib: int,
) -> tuple[float, int, int]:
    """When a machine will have room for a task, by the expected ends of what runs there, and what is then to spare.

    :param ends: when each running task is expected to end; s. It and the two others are put into another order.
    :param count: how many run.
    :returns: seconds, cores, MiB; (inf, 0, 0) if there is never room.
    """
    for place in range(count // 2 - 1, -1, -1):
        _sift_down(ends, cores, memory_mib, place, count)
    at_s = -math.inf
    while count > 0 and (free_cores < need_cores or free_mib < need_mib or ends[0] <= at_s):
        at_s = ends[0]
        free_cores += cores[0]
        free_mib += memory_mib[0]
        count -= 1
        _swap(ends, cores, memory_mib, 0, count)
        _sift_down(ends, cores, memory_mib, 0, count)
    if free_cores < need_cores or free_mib < need_mib:
        return math.inf, 0, 0
    return at_s, free_cores - need_cores, free_mib - need_mib


def may_start_before(
    expected_end_s: float, reserved_s: float, cores: int, memory_mib: int, spare_cores: int, spare_mib: int
) -> bool:
    """Whether a task that fits now on the machine that is reserved delays the one for which it is."""
    return expected_end_s <= reserved_s or (cores <= spare_cores and memory_mib <= spare_mib)


def _sift_down(ends: Floats, cores: Ints, memory_mib: Ints, place: int, count: int) -> None:
    while True:
        below = 2 * place + 1
        if below >= count:
            return
        if below + 1 < count and ends[below + 1] < ends[below]:
            below += 1
        if ends[place] <= ends[below]:
            return
        _swap(ends, cores, memory_mib, place, below)
        place = below


def _swap(ends: Floats, cores: Ints, memory_mib: Ints, one: int, other: int) -> None:
    end, core, mib = ends[one], cores[one], memory_mib[one]
    ends[one] = ends[other]
    cores[one] = cores[other]
    memory_mib[one] = memory_mib[other]
    ends[other] = end
    cores[other] = core
    memory_mib[other] = mib
