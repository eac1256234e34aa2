"""A random machine of those that can hold a task, and YARN's filling of one that reports. Kernels.

Machines stand in one array by how many cores they have free, so that those that have enough are its end; a change
moves a machine across as many bins as its free cores changed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.nodes.draws import draw

Ints = NDArray[np.int64]

#: Draws before those that have the memory are counted.
_TRIES = 8


def move(by_free: Ints, places: Ints, starts: Ints, machine: int, before: int, after: int) -> None:
    """A machine that had ``before`` free cores has ``after``.

    :param by_free: machines by free cores, ascending; ``places``: where each stands in it.
    :param starts: where the machines of each number of free cores begin; one more at the end.
    """
    while before < after:
        last = starts[before + 1] - 1
        _swap(by_free, places, machine, last)
        starts[before + 1] = last
        before += 1
    while before > after:
        first = starts[before]
        _swap(by_free, places, machine, first)
        starts[before] = first + 1
        before -= 1


def _swap(by_free: Ints, places: Ints, machine: int, place: int) -> None:
    other = by_free[place]
    was = places[machine]
    by_free[was] = other
    places[other] = was
    by_free[place] = machine
    places[machine] = place


def random_fit(by_free: Ints, starts: Ints, spare_mib: Ints, cores: int, memory_mib: int, draws: Ints) -> int:
    """A machine of those that can hold a task, each as likely; -1 if none can.

    :param spare_mib: free memory of each machine.
    :param draws: state of `draws.draw`.
    """
    if cores >= len(starts) - 1:
        return -1
    begin = starts[cores]
    count = len(by_free) - begin
    if count <= 0:
        return -1
    for _ in range(_TRIES):
        machine = int(by_free[begin + draw(draws, count)])
        if spare_mib[machine] >= memory_mib:
            return machine
    fitting = 0
    for i in range(begin, len(by_free)):
        if spare_mib[by_free[i]] >= memory_mib:
            fitting += 1
    if fitting == 0:
        return -1
    chosen = draw(draws, fitting)
    for i in range(begin, len(by_free)):
        if spare_mib[by_free[i]] >= memory_mib:
            if chosen == 0:
                return int(by_free[i])
            chosen -= 1
    return -1
