"""Growth of harvest VMs into a host's unallocated room, and the budget for it (Agarwal et al. 2023, §2.1).

The manager owns the bound: a budget of what the harvest VMs of a host may hold together above their minimums. The
agent owns the sizes: it grows them by itself within the budget and what is really free (docs/internals/contracts.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.hysteresis import Pace, RoomWatch
from ebbtide.deflation.sharing.undo import SMALLEST_GROWTH

#: Harvest VMs have no claim to what they take up, so they wait longer than deflated ones.
HARVEST_PACE: Final = Pace(hold_s=30.0, rest_s=60.0, large_share=0.5)
#: Share of a host's capacity that is never granted, so that a small VM starts without waiting for a shrink.
RESERVE_SHARE: Final = 0.05


def harvested(allocations: Sequence[Allocation]) -> ResourceVector:
    """What the harvest VMs among these hold above their minimums, together."""
    held = ResourceVector()
    for allocation in allocations:
        if allocation.priority is Priority.HARVEST:
            held += allocation.deflatable
    return held


def harvest_targets(
    allocations: Sequence[Allocation],
    room: ResourceVector,
    budget: ResourceVector,
    watch: RoomWatch,
    now: float,
    whole: Collection[str] = (),
) -> dict[str, ResourceVector]:
    """Which harvest VMs are to grow to what now: in proportion to ceiling less minimum, and never a shrink.

    What is held beyond a budget that became smaller is not taken: what needs it reclaims it.

    :param allocations: the VMs of one host; all but harvest VMs are passed over.
    :param room: what the host has free.
    :param budget: what the harvest VMs may hold above their minimums, together.
    :param watch: has observed what the host did so far, this reading included.
    :param whole: names of VMs whose guests can use whole cores only.
    :returns: targets of those that grow; they hand out neither more than the room nor more than the budget.
    """
    rows = [allocation for allocation in allocations if allocation.priority is Priority.HARVEST]
    growth = room.smaller(budget.less(harvested(rows)))
    targets = watch.grown(now, rows, growth)
    return _in_whole_cores(rows, targets, growth.cpu_cores, whole)


def grant(
    allocations: Sequence[Allocation],
    free: ResourceVector,
    capacity: ResourceVector,
    held: Collection[str] = (),
    reserve_share: float = RESERVE_SHARE,
) -> ResourceVector:
    """The budget that a host can be granted: what its harvest VMs have, and what no other VM has a claim to.

    :param free: what the host has free.
    :param held: names of deflated VMs that are not to grow by themselves, so that they have no claim.
    :param reserve_share: share of the capacity to keep free.
    """
    claims = ResourceVector()
    most = ResourceVector()
    for allocation in allocations:
        if allocation.priority is Priority.DEFLATABLE and allocation.name not in held:
            claims += allocation.nominal.less(allocation.current)
        if allocation.priority is Priority.HARVEST:
            most += allocation.upper.less(allocation.minimum)
    spare = free.less(claims).less(capacity * reserve_share)
    return (harvested(allocations) + spare).smaller(most)


def is_worth_granting(present: ResourceVector, wanted: ResourceVector) -> bool:
    """Whether a budget is so much larger than the present one that the host should hear of it.

    A smaller one need not be sent: the agent never gives more than is free, and a reclaim takes harvested room first.
    """
    return any(more >= least for more, least in zip(wanted.less(present), SMALLEST_GROWTH, strict=True))


def _in_whole_cores(
    rows: Sequence[Allocation], targets: dict[str, ResourceVector], room_cores: float, whole: Collection[str]
) -> dict[str, ResourceVector]:
    """The same targets with whole cores where the guest needs them; what that leaves over goes to those that lost most.

    A VM whose size is no whole number keeps it until a whole number is reached.
    """
    lost: list[tuple[float, Allocation, float]] = []
    left = room_cores
    for row in rows:
        size = targets.get(row.name, row.current)
        if row.name in whole and row.name in targets:
            floored = max(float(math.floor(size.cpu_cores + 1e-6)), row.current.cpu_cores)
            lost.append((floored - size.cpu_cores, row, floored))
        else:
            left -= size.cpu_cores - row.current.cpu_cores
    left -= math.fsum(floored - row.current.cpu_cores for _, row, floored in lost)
    for _, row, floored in sorted(lost, key=lambda one: (one[0], one[1].name)):
        more = math.floor(floored + 1e-6) + 1.0
        wanted = targets[row.name].cpu_cores
        if wanted > floored + 1e-6 and more <= row.upper.cpu_cores + 1e-6 and more - floored <= left + 1e-6:
            left -= more - floored
            floored = more
        targets[row.name] = targets[row.name].with_component("cpu_cores", floored)
    return {row.name: targets[row.name] for row in rows if row.name in targets and targets[row.name] != row.current}


def without_harvest(allocations: Sequence[Allocation]) -> list[Allocation]:
    """The VMs among which room is shared by command: harvest VMs grow within their budget only."""
    return [allocation for allocation in allocations if allocation.priority is not Priority.HARVEST]
