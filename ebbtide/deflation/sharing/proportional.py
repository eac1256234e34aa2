"""Proportional deflation: who gives how much, who gets it back, whom to preempt (Sharma et al. 2019, §5;
docs/internals/contracts.md, splitting a need).

Every function works one component at a time, so that each resource has an alpha of its own. The arithmetic is that of
`deflation.kernels`, which the simulator compiles; here it meets VMs with names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from ebbtide.deflation import kernels
from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.resources import COMPONENTS, ZERO, ResourceVector

#: How kernels call the priorities.
CODES: Final = {
    Priority.FIXED: kernels.FIXED,
    Priority.DEFLATABLE: kernels.DEFLATABLE,
    Priority.HARVEST: kernels.HARVEST,
}
_name = attrgetter("name")
_amounts = attrgetter(*COMPONENTS)


@dataclass(frozen=True, slots=True)
class Split:
    """The size each VM is to reach, by name, and what even that does not free."""

    targets: Mapping[str, ResourceVector]
    #: What stays missing after every VM has given all above its minimum.
    shortfall: ResourceVector


def split_need(allocations: Sequence[Allocation], need: ResourceVector) -> Split:
    """Spread a need over the VMs of a host: harvest VMs first, then deflatable VMs in proportion.

    For each component alpha solves ``sum x_i = sum(M_i - current_i) + need`` with ``x_i = (M_i - m_i)(1 - alpha)``
    counted from nominal; no VM grows, so the rest is water-filled. Fixed VMs are left out. Sizes stand on the grid of
    ``QUANTUM`` wherever the minimum does.

    :returns: targets of the VMs whose size changes, and the shortfall (zero if the need is met).
    """
    rows = _Rows(allocations)
    shortfall = [0.0] * kernels.WIDTH
    kernels.split(
        rows.priority, rows.upper, rows.minimum, rows.current, _amounts(need), rows.order, rows.targets, shortfall
    )
    left = ResourceVector(*shortfall)
    return Split(rows.changed(allocations), ZERO if left.is_zero() else left)


def split_need_in_turn(allocations: Sequence[Allocation], need: ResourceVector, last: Collection[str]) -> Split:
    """As `split_need`, but some VMs are asked only for what all others cannot give.

    :param last: their names: they have just given less than they were asked for.
    """
    first = split_need([row for row in allocations if row.name not in last], need)
    then = split_need([row for row in allocations if row.name in last], first.shortfall)
    return Split({**first.targets, **then.targets}, then.shortfall)


@dataclass(frozen=True, slots=True)
class Joining:
    """How a VM joins a host that has no room for its nominal size: its own size there, and what the others give."""

    size: ResourceVector
    #: What is to be reclaimed from the host's other VMs, without their room that is free already.
    need: ResourceVector


def joining(
    allocations: Sequence[Allocation], newcomer: Allocation, free: ResourceVector, least: ResourceVector
) -> Joining | None:
    """The largest proportional size at which a VM can be started: it takes part in the split as one of the VMs.

    One alpha for all: what its nominal size and overhead lack is split over the host's VMs and itself.

    :param newcomer: at its nominal size, with its overhead.
    :param free: what the host has left; components in which anything fits hold at least the newcomer's charge.
    :param least: the smallest size at which it can be started; at least its minimum.
    :returns: None if even its smallest size does not fit.
    """
    rows = _Rows(allocations)
    rows.add(newcomer)
    need, shortfall = [0.0] * kernels.WIDTH, [0.0] * kernels.WIDTH
    fits = placement_step.join(
        rows.priority,
        rows.upper,
        rows.minimum,
        rows.current,
        rows.order,
        _amounts(free),
        _amounts(least),
        newcomer.overhead_mib,
        rows.targets,
        shortfall,
        need,
    )
    return Joining(ResourceVector(*rows.targets[-1]), ResourceVector(*need)) if fits else None


def share_room(
    allocations: Sequence[Allocation], room: ResourceVector, pressed: Collection[str] = ()
) -> dict[str, ResourceVector]:
    """Give free room back: deflated VMs in proportion up to nominal, then harvest VMs up to their ceiling.

    The mirror of `split_need`: afterwards the deflation of every VM that still lacks something is
    ``(M_i - m_i)(1 - alpha)`` with one alpha, except that no VM shrinks. Never hands out more than ``room``.

    :param pressed: names of VMs under pressure: of the deflated ones, they get theirs before the others.
    :returns: targets of the VMs whose size changes.
    """
    rows = _Rows(allocations)
    under_pressure = [a.name in pressed for a in rows.sorted]
    kernels.share(
        rows.priority,
        rows.upper,
        rows.minimum,
        rows.current,
        _amounts(room),
        under_pressure,
        rows.order,
        rows.targets,
    )
    return rows.changed(allocations)


def sizes_to_reach(
    allocations: Sequence[Allocation], missing: ResourceVector
) -> tuple[dict[str, ResourceVector], bool]:
    """The sizes of all VMs if nothing stood in the way of what is missing: whom to preempt goes by these.

    :returns: sizes by name, and whether the minimums stand in the way; then some sizes are below them.
    """
    rows = _Rows(allocations)
    in_the_way = placement_step.sizes_to_reach(
        rows.priority, rows.upper, rows.minimum, rows.current, _amounts(missing), rows.order, rows.targets
    )
    return {a.name: a.current for a in allocations} | rows.changed(allocations), in_the_way


def choose_victims(
    allocations: Sequence[Allocation],
    missing: ResourceVector,
    targets: Mapping[str, ResourceVector],
    costs: Mapping[str, float] | None = None,
) -> list[str] | None:
    """Whom to preempt when deflation cannot free enough (Sharma et al. 2019, §5: those farthest from their targets).

    Greedy by ``max over resources of (current - target) / nominal`` among what is missing, to a step (``QUANTUM``) of
    each size, because sizes are rounded; then every victim that turns out unneeded is dropped again, in reverse order
    of choice, so no proper subset of the answer would do.

    :param missing: what has to be freed by preemption.
    :param targets: the size each VM should have reached; may lie below a minimum. Missing ones count as 0.
    :param costs: what stopping each costs (`kernels.preemption_cost`); those that are as far are chosen by it, the
        cheapest first, of equal costs the last by name. Missing ones count as 0.
    :returns: names in the order of choice; empty if nothing is missing; None if even all would not do.
    """
    rows = _Rows(allocations)
    chosen = [0] * len(rows.sorted)
    count = kernels.victims(
        rows.priority,
        [_amounts(a.nominal) for a in rows.sorted],
        rows.current,
        [_amounts(a.charge) for a in rows.sorted],
        _amounts(missing),
        [_amounts(targets.get(a.name, ZERO)) for a in rows.sorted],
        [(costs or {}).get(a.name, 0.0) for a in rows.sorted],
        rows.order,
        chosen,
    )
    return None if count < 0 else [rows.sorted[place].name for place in chosen[:count]]


class _Rows:
    """The VMs of a host as tables, in the order of their names."""

    __slots__ = ("current", "minimum", "order", "priority", "sorted", "targets", "upper")

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self.sorted = sorted(allocations, key=_name)
        self.priority = [CODES[a.priority] for a in self.sorted]
        self.upper = [_amounts(a.upper) for a in self.sorted]
        self.minimum = [_amounts(a.minimum) for a in self.sorted]
        self.current = [_amounts(a.current) for a in self.sorted]
        self.order: Sequence[int] = range(len(self.sorted))
        self.targets = [list(amounts) for amounts in self.current]

    def add(self, newcomer: Allocation) -> None:
        """One more VM, in the last row whatever its name."""
        rank = bisect_left(self.sorted, newcomer.name, key=_name)
        self.order = [*(place if place < rank else place + 1 for place in self.order), rank]
        self.sorted.append(newcomer)
        self.priority.append(CODES[newcomer.priority])
        self.upper.append(_amounts(newcomer.upper))
        self.minimum.append(_amounts(newcomer.minimum))
        self.current.append(_amounts(newcomer.current))
        self.targets.append(list(self.current[-1]))

    def changed(self, allocations: Sequence[Allocation]) -> dict[str, ResourceVector]:
        """The targets of those whose size changes, in the order in which they were given."""
        targets = {
            a.name: ResourceVector(*target)
            for a, target, current in zip(self.sorted, self.targets, self.current, strict=True)
            if tuple(target) != current
        }
        return {a.name: targets[a.name] for a in allocations if a.name in targets}
