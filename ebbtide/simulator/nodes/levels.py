"""Best fit on cores over very many machines: sets of machines by how many cores they have free. Kernels.

A set is a bit for each machine, and a bit for each word that is not empty above it, and so on: adding, removing and
finding the lowest member take one step a layer (four at a hundred thousand machines). Words hold 32 bits of 64, so
that no sign is in the way. Which levels have members is a set, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_BITS = 32
_DE_BRUIJN = 0x077CB531
#: By the upper five bits of the sequence, moved up by so many places.
_PLACES = np.argsort([(_DE_BRUIJN << place & 0xFFFFFFFF) >> 27 for place in range(_BITS)])


def layers(members: int) -> Ints:
    """Where each layer of a set of so many members begins, and where the last one ends: shape (layers + 1,)."""
    offsets = [0]
    words = max(members, 1)
    while True:
        words = -(-words // _BITS)
        offsets.append(offsets[-1] + words)
        if words == 1:
            return np.array(offsets, np.int64)


def lowest_bit(word: int) -> int:
    """The place of the lowest bit of a word of 32 that is not 0: by de Bruijn's sequence, without branches."""
    return int(_PLACES[((word & -word) * _DE_BRUIJN & 0xFFFFFFFF) >> 27])


def include(sets: Ints, offsets: Ints, row: int, member: int) -> None:
    """Add a member to the set in ``row``."""
    place = member
    for layer in range(len(offsets) - 1):
        word = offsets[layer] + (place >> 5)
        before = sets[row, word]
        sets[row, word] = before | (1 << (place & 31))
        if before != 0:
            return
        place >>= 5


def exclude(sets: Ints, offsets: Ints, row: int, member: int) -> bool:
    """Take a member out of the set in ``row``; whether the set is empty now."""
    place = member
    for layer in range(len(offsets) - 1):
        word = offsets[layer] + (place >> 5)
        left = sets[row, word] & ~(1 << (place & 31))
        sets[row, word] = left
        if left != 0:
            return False
        place >>= 5
    return True


def first_from(sets: Ints, offsets: Ints, row: int, start: int) -> int:
    """The lowest member from ``start`` on of the set in ``row``; -1 if there is none."""
    place = start
    for layer in range(len(offsets) - 1):
        word = offsets[layer] + (place >> 5)
        if word >= offsets[layer + 1]:
            return -1
        found = sets[row, word] >> (place & 31)
        if found != 0:
            place += lowest_bit(found)
            for below in range(layer - 1, -1, -1):
                place = (place << 5) + lowest_bit(sets[row, offsets[below] + place])
            return place
        place = (place >> 5) + 1
    return -1


def move(sets: Ints, offsets: Ints, levels: Ints, level_offsets: Ints, machine: int, before: int, after: int) -> None:
    """A machine that had ``before`` free cores has ``after``; -1: it is in no set.

    :param sets: shape (levels, words); ``levels``: shape (1, words), which of them have members.
    """
    if before >= 0 and exclude(sets, offsets, before, machine):
        exclude(levels, level_offsets, 0, before)
    if after >= 0:
        include(sets, offsets, after, machine)
        include(levels, level_offsets, 0, after)


def best_fit(
    sets: Ints, offsets: Ints, levels: Ints, level_offsets: Ints, spare_mib: Ints, cores: int, memory_mib: int
) -> int:
    """The machine with the fewest free cores that can hold a task, ties by the lower number; -1 if none can.

    :param spare_mib: free memory of each machine.
    """
    level = first_from(levels, level_offsets, 0, cores) if cores < len(sets) else -1
    while level >= 0:
        machine = first_from(sets, offsets, level, 0)
        while machine >= 0:
            if spare_mib[machine] >= memory_mib:
                return machine
            machine = first_from(sets, offsets, level, machine + 1)
        level = first_from(levels, level_offsets, 0, level + 1)
    return -1
