"""What a VM under pressure gets at once, from whom, and what is left to ask of the manager (docs/pressure.md).

"What its host has free plus what harvest VMs hold above minimum, never more" (docs/contracts.md, safety).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from deflation.allocations import Allocation, Priority
from deflation.proportional import split_need
from deflation.resources import COMPONENTS, QUANTUM, TOLERANCE, ResourceVector


@dataclass(frozen=True, slots=True)
class Relief:
    """What is to be done for one VM. First the harvest VMs shrink; only what they have verifiably freed is given."""

    #: The size the VM gets; its current size where there is nothing to give.
    target: ResourceVector
    #: New sizes of harvest VMs that make room, by name.
    harvest: Mapping[str, ResourceVector]
    #: What of its wants the host cannot spare: asked of the manager.
    remaining: ResourceVector
    sentence: str


def relieve(
    vm: Allocation,
    wants: ResourceVector,
    free: ResourceVector,
    others: Sequence[Allocation] = (),
    pressed: Collection[str] = (),
) -> Relief:
    """Decide what a VM under pressure gets, all of it in one step.

    Called again with what is free after the harvest VMs have shrunk and with no ``others``, it says what may be given
    if they fell short.

    :param wants: what it wants beyond its current size; what is beyond its nominal size is not heard.
    :param free: what the host has left.
    :param others: the host's other VMs; only harvest VMs give, none below its minimum.
    :param pressed: names of VMs that are under pressure themselves and give nothing.
    """
    lacks = wants.smaller(vm.nominal.less(vm.current))
    missing = lacks.less(free)
    donors = [
        other
        for other in others
        if other.priority is Priority.HARVEST and other.name != vm.name and other.name not in pressed
    ]
    split = split_need(donors, missing)
    target = _on_grid(vm.current, lacks.less(split.shortfall), lacks)
    remaining = (vm.current + lacks).less(target)
    return Relief(target, split.targets, remaining, _sentence(vm, target, split.targets, remaining))


def _on_grid(current: ResourceVector, gain: ResourceVector, lacks: ResourceVector) -> ResourceVector:
    """The size after a gain, on the grid of sizes wherever it is not all that is lacked."""
    sizes = {}
    for component in COMPONENTS:
        size = current[component] + gain[component]
        if gain[component] < lacks[component] - TOLERANCE:
            step = QUANTUM[component]
            size = max(math.floor((size + TOLERANCE) / step) * step, current[component])
        sizes[component] = size
    return ResourceVector.of(sizes)


def _sentence(
    vm: Allocation, target: ResourceVector, harvest: Mapping[str, ResourceVector], remaining: ResourceVector
) -> str:
    given = target.less(vm.current)
    parts = [f"{vm.name} gets {given} at once" if not given.is_zero() else f"there is nothing to give to {vm.name}"]
    if harvest:
        parts.append("taken back from harvest VMs " + ", ".join(sorted(harvest)))
    if not remaining.is_zero():
        parts.append(f"{remaining} are asked of the manager")
    if vm.priority is not Priority.FIXED and vm.current.memory_mib <= vm.minimum.memory_mib + TOLERANCE:
        parts.append("it was at its minimum, which is too small to live on")
    return "; ".join(parts)
