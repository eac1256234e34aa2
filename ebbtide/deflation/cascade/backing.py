"""Check that swap backs a memory limit: all that a VM may touch beyond its limit must find room in swap (rule 4).

Sizes in MiB. The limit is on the guest's memory; the host's limit on QEMU is that plus a fixed allowance for what the
emulator needs itself, so that the one can be told from the other (docs/internals/host-memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Swap that no limit may count on: other users of the host's swap grow too.
RESERVE_MIB: Final = 64.0
#: A process always has a few locked pages; from here on it is the guest's memory that is locked.
UNSWAPPABLE_MIB: Final = 64.0


@dataclass(frozen=True, slots=True)
class Swap:
    """The host's swap."""

    total_mib: float
    free_mib: float


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one VM may come to need of memory and swap, measured."""

    #: Boot memory and plugged memory, whatever the balloon holds: after a reset the guest may touch all of it.
    touchable_mib: float
    #: What the emulator itself needs beyond the allowance that a limit leaves it.
    beyond_allowance_mib: float = 0.0
    #: What of the VM is in swap already.
    swapped_mib: float = 0.0
    #: What its cgroups still let into swap; None: no limit of theirs.
    swap_room_mib: float | None = None
    swappiness: int = 60
    #: Locked, pinned or huge pages.
    unswappable_mib: float = 0.0

    def claim_mib(self, limit_mib: float) -> float:
        """Free swap that a limit on the guest's memory needs behind it, at worst."""
        out = self.touchable_mib + max(self.beyond_allowance_mib, 0.0) - limit_mib
        return max(out - self.swapped_mib, 0.0)


def unbacked(vm: Footprint, limit_mib: float, swap: Swap, others_mib: float) -> str:
    """Why swap does not back this limit; empty if it does.

    :param others_mib: free swap that other limits count on.
    """
    figures = f"the guest may touch {vm.touchable_mib:.0f} MiB, the limit is {limit_mib:.0f} MiB"
    if swap.total_mib <= 0:
        return f"the host has no swap, so no memory limit can be backed: {figures}"
    if vm.swappiness == 0:
        return f"swappiness is 0, so the kernel would swap nothing and no memory limit can be backed: {figures}"
    if vm.unswappable_mib > UNSWAPPABLE_MIB:
        return (
            f"{vm.unswappable_mib:.0f} MiB of QEMU are locked, pinned or huge pages, which cannot be swapped, "
            "so no memory limit can be backed"
        )
    claim = vm.claim_mib(limit_mib)
    if vm.swap_room_mib is not None and claim > vm.swap_room_mib:
        return (
            f"the VM's cgroups let {vm.swap_room_mib:.0f} MiB more into swap, but the limit may need "
            f"{claim:.0f} MiB: {figures}"
        )
    if claim > max(swap.free_mib - others_mib - RESERVE_MIB, 0.0):
        return (
            f"swap cannot back the memory limit: it may need {claim:.0f} MiB more ({figures}), but of "
            f"{swap.free_mib:.0f} MiB free {others_mib:.0f} MiB back other limits and {RESERVE_MIB:.0f} MiB are kept"
        )
    return ""
