"""Floors below which no VM goes: of each resource, of the balloon, and a VM's own minimum raised to them."""

from __future__ import annotations

from typing import Final

from ebbtide.deflation.resources import ResourceVector

#: No VM can live below this: a tenth of a core; 1 MiB/s, since libvirt reads 0 as unlimited. Memory: a stock guest
#: kernel with its agents, before any reading of the guest itself raises it (docs/internals/contracts.md).
HARD_FLOOR: Final = ResourceVector(cpu_cores=0.1, memory_mib=192, disk_mib_s=1, network_mib_s=1)
#: Boot memory that the balloon leaves whatever the guest says: the kernel lives in it.
BALLOON_FLOOR_MIB: Final = HARD_FLOOR.memory_mib


def effective_minimum(minimum: ResourceVector, nominal: ResourceVector) -> ResourceVector:
    """The minimum a VM really has: as asked for, raised to the hard floor, never above its nominal size.

    A component the VM was not sold (nominal 0) has no floor.
    """
    return minimum.larger(HARD_FLOOR).smaller(nominal)
