"""Who gives how much, who gets it back, and whom to preempt (seed 004 §5; docs/contracts.md, splitting a need).

Every function works one component at a time, so that each resource has an alpha of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from deflation.allocations import Allocation, Priority
from deflation.resources import COMPONENTS, QUANTUM, TOLERANCE, ZERO, ResourceVector


@dataclass(frozen=True, slots=True)
class Split:
    """The size each VM is to reach, by name, and what even that does not free."""

    targets: Mapping[str, ResourceVector]
    #: What stays missing after every VM has given all above its minimum.
    shortfall: ResourceVector


def split_need(allocations: Sequence[Allocation], need: ResourceVector) -> Split:
    """Spread a need over the VMs of a host: harvest VMs first, then deflatable VMs in proportion.

    For each component alpha solves ``sum x_i = sum(M_i - current_i) + need`` with ``x_i = (M_i - m_i)(1 - alpha)``
    counted from nominal; nobody grows, so the rest is water-filled. Fixed VMs are left out. Sizes stand on the grid of
    ``QUANTUM`` wherever the minimum does.

    :returns: targets of the VMs whose size changes, and the shortfall (zero if the need is met).
    """
    sizes = {allocation.name: allocation.current for allocation in allocations}
    shortfall = need
    for group in (Priority.HARVEST, Priority.DEFLATABLE):
        members = [allocation for allocation in allocations if allocation.priority is group]
        for component in COMPONENTS:
            missing = shortfall[component]
            if missing <= TOLERANCE or not members:
                continue
            lowered = _lowered(members, component, missing)
            freed = math.fsum(member.current[component] - lowered[member.name] for member in members)
            for name, size in lowered.items():
                sizes[name] = sizes[name].with_component(component, size)
            shortfall = shortfall.with_component(component, max(missing - freed, 0.0))
    changed = {a.name: sizes[a.name] for a in allocations if sizes[a.name] != a.current}
    return Split(changed, ZERO if shortfall.is_zero() else shortfall)


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
    split = split_need([*allocations, newcomer], newcomer.charge.less(free))
    size = split.targets.get(newcomer.name, newcomer.current).larger(least)
    # Where its smallest size is more than its share, the others give more than theirs.
    need = (size + ResourceVector(memory_mib=newcomer.overhead_mib)).less(free)
    if not split_need(allocations, need).shortfall.is_zero():
        return None
    return Joining(size, need)


def share_room(
    allocations: Sequence[Allocation], room: ResourceVector, pressed: Collection[str] = ()
) -> dict[str, ResourceVector]:
    """Give free room back: deflated VMs in proportion up to nominal, then harvest VMs up to their ceiling.

    The mirror of :func:`split_need`: afterwards the deflation of every VM that still lacks something is
    ``(M_i - m_i)(1 - alpha)`` with one alpha, except that nobody shrinks. Never hands out more than ``room``.

    :param pressed: names of VMs under pressure: of the deflated ones, they get theirs before the others.
    :returns: targets of the VMs whose size changes.
    """
    sizes = {allocation.name: allocation.current for allocation in allocations}
    left = room
    deflatable = [allocation for allocation in allocations if allocation.priority is Priority.DEFLATABLE]
    for members in (
        [allocation for allocation in deflatable if allocation.name in pressed],
        [allocation for allocation in deflatable if allocation.name not in pressed],
        [allocation for allocation in allocations if allocation.priority is Priority.HARVEST],
    ):
        for component in COMPONENTS:
            if left[component] <= TOLERANCE or not members:
                continue
            raised = _raised(members, component, left[component])
            given = math.fsum(raised[member.name] - member.current[component] for member in members)
            for name, size in raised.items():
                sizes[name] = sizes[name].with_component(component, size)
            left = left.with_component(component, max(left[component] - given, 0.0))
    return {a.name: sizes[a.name] for a in allocations if sizes[a.name] != a.current}


def choose_victims(
    allocations: Sequence[Allocation], missing: ResourceVector, targets: Mapping[str, ResourceVector]
) -> list[str] | None:
    """Whom to preempt when deflation cannot free enough (seed 004 §5: those farthest from their targets).

    Greedy by ``max over resources of (current - target) / nominal`` among what is missing; then every victim that
    turns out unneeded is dropped again, the nearest to its target first, so no proper subset of the answer would do.

    :param missing: what has to be freed by preemption.
    :param targets: the size each VM should have reached; may lie below a minimum. Missing ones count as 0.
    :returns: names in the order of choice; empty if nothing is missing; None if even all would not do.
    """
    candidates = {a.name: a for a in allocations if a.priority is not Priority.FIXED}
    if not missing.fits_in(sum((a.charge for a in candidates.values()), ZERO)):
        return None
    victims: list[Allocation] = []
    left = missing
    while not left.is_zero():
        wanted = [component for component in COMPONENTS if left[component] > TOLERANCE]
        victim = max(
            (a for a in candidates.values() if any(a.charge[component] > TOLERANCE for component in wanted)),
            key=lambda a: (_distance(a, targets.get(a.name, ZERO), wanted), a.name),
        )
        del candidates[victim.name]
        victims.append(victim)
        left = left.less(victim.charge)
    for victim in reversed(victims.copy()):
        rest = [other for other in victims if other is not victim]
        if missing.fits_in(sum((other.charge for other in rest), ZERO)):
            victims = rest
    return [victim.name for victim in victims]


def _distance(allocation: Allocation, target: ResourceVector, components: Sequence[str]) -> float:
    """How far a VM is from its target, as the largest share of its nominal size."""
    return max(
        (allocation.current[c] - target[c]) / allocation.nominal[c] if allocation.nominal[c] > 0 else 0.0
        for c in components
    )


def _lowered(members: Sequence[Allocation], component: str, need: float) -> dict[str, float]:
    """The members' sizes after they have given ``need`` together, or all above their minimums."""
    lowest = [min(m.minimum[component], m.current[component]) for m in members]
    spans = [m.upper[component] - m.minimum[component] for m in members]
    given = [m.upper[component] - m.current[component] for m in members]
    current = math.fsum(m.current[component] for m in members)
    if need >= current - math.fsum(lowest) - TOLERANCE:
        return {m.name: size for m, size in zip(members, lowest, strict=True)}
    level = _level(max, spans, given, math.fsum(given) + need)
    exact = [
        m.upper[component] - max(span * level, floor) for m, span, floor in zip(members, spans, given, strict=True)
    ]
    return _on_grid(members, component, exact, lowest, [m.current[component] for m in members], current - need)


def _raised(members: Sequence[Allocation], component: str, room: float) -> dict[str, float]:
    """The members' sizes after ``room`` was shared among them, none above its upper size."""
    highest = [m.upper[component] for m in members]
    # A VM below its minimum counts from where it is, or it would be given more than there is.
    spans = [m.upper[component] - min(m.minimum[component], m.current[component]) for m in members]
    taken = [m.upper[component] - m.current[component] for m in members]
    if room >= math.fsum(taken) - TOLERANCE:
        return {m.name: size for m, size in zip(members, highest, strict=True)}
    level = _level(min, spans, taken, math.fsum(taken) - room)
    exact = [
        m.upper[component] - min(span * level, ceiling) for m, span, ceiling in zip(members, spans, taken, strict=True)
    ]
    current = [m.current[component] for m in members]
    return _on_grid(members, component, exact, current, highest, math.fsum(current) + room)


def _level(
    pick: Callable[[float, float], float], spans: Sequence[float], limits: Sequence[float], total: float
) -> float:
    """The level (1 - alpha) in [0, 1] with ``sum pick(span_i * level, limit_i) == total``: exact, piece by piece."""

    def height(level: float) -> float:
        return math.fsum(pick(span * level, limit) for span, limit in zip(spans, limits, strict=True))

    lower = 0.0
    breaks = {min(limit / span, 1.0) for span, limit in zip(spans, limits, strict=True) if span > TOLERANCE}
    for upper in [*sorted(breaks), 1.0]:
        if (top := height(upper)) >= total:
            bottom = height(lower)
            return lower if top <= bottom else lower + (upper - lower) * (total - bottom) / (top - bottom)
        lower = upper
    return 1.0


def _on_grid(
    members: Sequence[Allocation],
    component: str,
    exact: Sequence[float],
    lowest: Sequence[float],
    highest: Sequence[float],
    total: float,
) -> dict[str, float]:
    """Round down to the grid, then hand out whole steps by largest remainder while the sum stays in ``total``."""
    quantum = QUANTUM[component]
    rows = []
    for m, size, low, high in zip(members, exact, lowest, highest, strict=True):
        on_grid = _tidy(math.floor(size / quantum + TOLERANCE) * quantum)
        rounded = high if size >= high - TOLERANCE else min(max(on_grid, low), high)
        rows.append((m.name, size, rounded, high))
    sizes = {name: rounded for name, _, rounded, _ in rows}
    left = total - math.fsum(sizes.values())
    for name, size, rounded, high in sorted(rows, key=lambda row: (row[2] - row[1], row[0])):
        if left < quantum - TOLERANCE:
            break
        if size > rounded + TOLERANCE and rounded + quantum <= high + TOLERANCE:
            sizes[name] = _tidy(rounded + quantum)
            left -= quantum
    return sizes


def _tidy(value: float) -> float:
    """Drop what binary fractions add to a step of 0.01."""
    return round(value, 6)
