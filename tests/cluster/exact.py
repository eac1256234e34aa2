"""Exact search: by how few moves of VMs between hosts would all have room at their minimums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ebbtide.deflation.resources import ZERO, ResourceVector

#: Sizes are set in steps; capacity that nobody declares holds anything.
STEP = ResourceVector(cpu_cores=0.005, memory_mib=1.0)


@dataclass(frozen=True)
class Least:
    """The least that a VM is charged; ``host``: where it is, None for one that has no host yet."""

    size: ResourceVector
    host: str | None
    movable: bool = True


def fewest_moves(capacity: Mapping[str, ResourceVector], vms: Sequence[Least], most: int) -> int | None:
    """The fewest moves after which every VM has a host, and every host room; None: so many would not do.

    :param capacity: of each host that may be used; VMs elsewhere are left out.
    """
    there = [vm for vm in vms if vm.host is None or vm.host in capacity]
    return next((moves for moves in range(most + 1) if _fits(capacity, there, moves)), None)


def _fits(capacity: Mapping[str, ResourceVector], vms: Sequence[Least], moves: int) -> bool:
    """Branch over all assignments of who has no host, then over all moves off a host that is too full."""
    homeless = next((index for index, vm in enumerate(vms) if vm.host is None), None)
    if homeless is not None:
        return any(_fits(capacity, _moved(vms, homeless, host), moves) for host in capacity)
    full = next((host for host, has in capacity.items() if not _load(vms, host).fits_in(has + STEP)), None)
    if full is None:
        return True
    return moves > 0 and any(
        _fits(capacity, _moved(vms, index, host), moves - 1)
        for index, vm in enumerate(vms)
        if vm.host == full and vm.movable
        for host in capacity
        if host != full
    )


def _load(vms: Sequence[Least], host: str) -> ResourceVector:
    return sum((vm.size for vm in vms if vm.host == host), ZERO)


def _moved(vms: Sequence[Least], index: int, host: str) -> list[Least]:
    return [*vms[:index], Least(vms[index].size, host, vms[index].movable), *vms[index + 1 :]]
