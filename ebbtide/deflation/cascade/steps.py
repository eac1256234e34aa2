"""Amount that the next step of a deflation takes, reckoned from fresh readings of bound and guest.

A guest's figures are untrusted: they can only lower what is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import GuestKind, GuestReading
from ebbtide.deflation.floors import BALLOON_FLOOR_MIB
from ebbtide.deflation.resources import TOLERANCE

#: Of what a guest can spare, the largest part that one step may take (docs/internals/contracts.md, safety of the
#: guest).
STEP_SHARE: Final = 0.5
#: The same of a guest without our agent.
ORDINARY_STEP_SHARE: Final = 0.25
#: A memory step below this is not worth a round trip; what is left falls through.
SMALLEST_STEP_MIB: Final = 4.0


def cpus_to_keep(bound: Bound, guest: GuestReading, target_cores: float) -> tuple[int, ...] | None:
    """The map of CPUs to leave on line: whole CPUs are taken down to ``ceil(target)``, never CPU 0, none that is busy.

    :returns: CPU numbers; None if nothing is to be taken off line.
    """
    surplus = len(set(guest.online)) - cpus_wanted(target_cores)
    if bound.cpu_cores <= target_cores + TOLERANCE or surplus <= 0:
        return None
    takeable = [cpu for cpu in guest.unpluggable if cpu != 0 and cpu in guest.online]
    taken = set(takeable[:surplus])
    return tuple(cpu for cpu in guest.online if cpu not in taken) if taken else None


def cpus_wanted(cores: float) -> int:
    """How many whole CPUs a size needs on line."""
    return max(1, math.ceil(cores - TOLERANCE))


def memory_to_keep(
    bound: Bound, guest: GuestReading, need_mib: float, block_mib: float, whole_dimms: bool = True
) -> float | None:
    """The plugged memory to ask for in the next step: at most half of what the guest can spare.

    Whole blocks of virtio-mem come first; where no step of them is left, one whole DIMM, the largest that is not too
    much.

    :param block_mib: granularity of virtio-mem; 0 where it cannot be used.
    :param whole_dimms: whether DIMMs can be unplugged.
    :returns: MiB of plugged memory to keep; None if no step is worth while.
    """
    most = min(need_mib, guest.spare_mib * STEP_SHARE)
    if block_mib > 0:
        step = _whole_blocks(bound.virtio_mib, most, block_mib)
        if step >= max(SMALLEST_STEP_MIB, block_mib):
            return bound.plugged_mib - step
    whole = max((dimm for dimm in bound.dimms_mib if whole_dimms and dimm <= most + TOLERANCE), default=0.0)
    return bound.plugged_mib - whole if whole > 0 else None


def dimms_to_take(
    dimms_mib: Sequence[float], virtio_mib: float, take_mib: float, block_mib: float
) -> tuple[float, ...]:
    """Which DIMMs to take besides virtio-mem: none without which it gives as much, never more than is to be taken.

    :param block_mib: granularity of virtio-mem; 0 where it cannot be used.
    """
    taken: list[float] = []
    rest_mib = take_mib
    for dimm in sorted(dimms_mib, reverse=True):
        if dimm > rest_mib + TOLERANCE:
            continue
        after_mib = rest_mib - dimm
        gain = dimm + _whole_blocks(virtio_mib, after_mib, block_mib) - _whole_blocks(virtio_mib, rest_mib, block_mib)
        if gain > TOLERANCE:
            taken.append(dimm)
            rest_mib = after_mib
    return tuple(taken)


def _whole_blocks(virtio_mib: float, most_mib: float, block_mib: float) -> float:
    """So much of an amount as virtio-mem can give: one block is too much for less than it."""
    if block_mib <= 0:
        return 0.0
    return math.floor(min(virtio_mib, most_mib) / block_mib + TOLERANCE) * block_mib


def dimms_to_plug(missing_mib: Sequence[float], grow_mib: float) -> tuple[float, ...]:
    """Which of the DIMMs that are out to plug again: large ones first, never more than is to be given."""
    given: list[float] = []
    for dimm in sorted(missing_mib, reverse=True):
        if dimm <= grow_mib - sum(given) + TOLERANCE:
            given.append(dimm)
    return tuple(given)


def balloon_to_keep(bound: Bound, guest: GuestReading, need_mib: float) -> float | None:
    """The balloon size to ask for in the next step: at most half of what the guest can spare, or a quarter.

    Never below `BALLOON_FLOOR_MIB`, whatever the guest says.

    :returns: MiB of boot memory to keep; None if no step is worth while.
    """
    room = max(bound.balloon_mib - BALLOON_FLOOR_MIB, 0.0)
    share = STEP_SHARE if guest.kind is GuestKind.AGENT else ORDINARY_STEP_SHARE
    step = min(need_mib, math.floor(guest.spare_mib * share), room)
    return bound.balloon_mib - step if step >= min(SMALLEST_STEP_MIB, need_mib) else None
