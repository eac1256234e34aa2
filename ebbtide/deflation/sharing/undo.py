"""Sizes that undo all that was taken: the targets of mode off, and what of a growth is worth its while.

CPU, disk and network go back to nominal whatever the others have, since hosts share them by time: a limit that stayed
would be a deflation without an owner. Memory goes back as far as there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import TOLERANCE, ResourceVector
from ebbtide.deflation.sharing.proportional import share_room

#: A growth below this is not worth a resize, unless it completes a VM: free memory moves all the time.
SMALLEST_GROWTH: Final = ResourceVector(cpu_cores=0.05, memory_mib=16.0, disk_mib_s=1.0, network_mib_s=1.0)


def undone(
    allocations: Sequence[Allocation], room: ResourceVector, pressed: Collection[str] = ()
) -> dict[str, ResourceVector]:
    """The size of each VM that lacks something of its nominal size. No VM shrinks, harvest VMs grow to nominal only.

    :param room: what the host has free; only its memory counts.
    :param pressed: names of VMs under pressure, which get theirs before the others.
    :returns: targets of the VMs whose size changes.
    """
    plain = [
        replace(a, priority=Priority.DEFLATABLE, ceiling=None, current=a.current.smaller(a.nominal))
        for a in allocations
        if a.priority is not Priority.FIXED
    ]
    shared = share_room(plain, ResourceVector(memory_mib=room.memory_mib), pressed)
    targets = {}
    for a in allocations:
        memory_mib = shared[a.name].memory_mib if a.name in shared else a.current.memory_mib
        whole = a.nominal.with_component("memory_mib", min(memory_mib, a.nominal.memory_mib))
        target = a.current.larger(whole)
        if not target.fits_in(a.current):
            targets[a.name] = target
    return targets


def lacking(allocations: Iterable[Allocation]) -> dict[str, ResourceVector]:
    """What each VM lacks of its nominal size, by name; those that lack nothing are left out."""
    missing = {a.name: a.nominal.less(a.current) for a in allocations}
    return {name: vector for name, vector in missing.items() if not vector.fits_in(ResourceVector(0.005, 1.0))}


def is_worth_while(allocation: Allocation, target: ResourceVector) -> bool:
    """Whether a growth is more than a flutter of what is free."""
    gain = target.less(allocation.current)
    completes = (has >= whole for has, whole, more in zip(target, allocation.nominal, gain, strict=True) if more > 0)
    large = (more >= least - TOLERANCE for more, least in zip(gain, SMALLEST_GROWTH, strict=True))
    return any(large) or any(completes)
