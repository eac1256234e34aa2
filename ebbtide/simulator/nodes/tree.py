"""First fit over very many machines: a tree of the most free cores below each of its nodes. Kernels.

Leaf i is machine i; a change and a question take one step a layer (seventeen at a hundred thousand machines).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def tree_of(machines: int) -> Ints:
    """An empty tree: no machine can hold anything."""
    leaves = 1
    while leaves < machines:
        leaves *= 2
    return np.full(2 * leaves, -1, np.int64)


def change(tree: Ints, machine: int, free: int) -> None:
    """A machine has so many free cores now."""
    place = (len(tree) >> 1) + machine
    tree[place] = free
    place >>= 1
    while place >= 1:
        most = max(tree[2 * place], tree[2 * place + 1])
        if tree[place] == most:
            return
        tree[place] = most
        place >>= 1


def first_at_least(tree: Ints, start: int, cores: int) -> int:
    """The lowest machine from ``start`` on that has so many free cores; -1 if none has."""
    leaves = len(tree) >> 1
    if start >= leaves or tree[1] < cores:
        return -1
    place = leaves + start
    while tree[place] < cores:
        # The next tree to the right: above all of which this is the last part.
        while place & 1 == 1:
            place >>= 1
        if place == 0:
            return -1
        place += 1
    while place < leaves:
        place *= 2
        if tree[place] < cores:
            place += 1
    return place - leaves


def first_fit(tree: Ints, spare_mib: Ints, cores: int, memory_mib: int) -> int:
    """The lowest machine that can hold a task; -1 if none can.

    :param spare_mib: free memory of each machine.
    """
    machine = first_at_least(tree, 0, cores)
    while machine >= 0 and spare_mib[machine] < memory_mib:
        machine = first_at_least(tree, machine + 1, cores)
    return machine
