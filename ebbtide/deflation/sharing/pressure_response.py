"""Response to pressure: what a VM gets at once, from whom, and what is left to ask of the manager.

See docs/internals/pressure.md.

A VM under pressure comes before every VM that is only to get back what it was sold. What is not free is given by
harvest VMs and then, of memory, by deflatable neighbours, none below its minimum (docs/internals/contracts.md, safety).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import COMPONENTS, QUANTUM, TOLERANCE, ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import split_need

#: So long pressure must have lasted before neighbours give, in seconds: what is short they need not notice.
LASTING_S: Final = 4.0
#: One that gave for another VM gives again after so long, in seconds.
GAVE_S: Final = 60.0
#: One that gave less than it was asked for is left out for so long, in seconds: others are asked instead.
FELL_SHORT_S: Final = 60.0
#: One that was under pressure itself gives nothing for so long, in seconds, so that memory does not go to and fro.
RECOVERED_S: Final = 300.0


@dataclass(slots=True)
class Neighbours:
    """Who of one host's VMs may be asked for another one's sake: hysteresis. Knows no clock but ``now``."""

    _since: dict[str, float] = field(default_factory=dict)
    _pressed_at: dict[str, float] = field(default_factory=dict)
    _gave_at: dict[str, float] = field(default_factory=dict)
    _short_at: dict[str, float] = field(default_factory=dict)

    def observe(self, now: float, names: Collection[str], pressed: Collection[str]) -> None:
        """Take in who is there, and who of them is under pressure of memory."""
        self._since = {name: self._since.get(name, now) for name in pressed}
        self._pressed_at.update(dict.fromkeys(pressed, now))
        for moments in (self._pressed_at, self._gave_at, self._short_at):
            for name in moments.keys() - set(names):
                del moments[name]

    def gave(self, now: float, name: str) -> None:
        """A VM has shrunk for another one."""
        self._gave_at[name] = now

    def fell_short(self, now: float, name: str) -> None:
        """A VM has given less than it was asked for."""
        self._short_at[name] = now

    def unable(self, now: float) -> set[str]:
        """Those on whom nobody counts now, harvest VMs too."""
        return {name for name, at in self._short_at.items() if now - at < FELL_SHORT_S}

    def may_give(self, now: float, receiver: str, names: Iterable[str]) -> set[str]:
        """Of these names of deflatable VMs those who may be asked for the receiver's sake now."""
        if now - self._since.get(receiver, now) < LASTING_S:
            return set()
        return {
            name
            for name in names
            if name != receiver
            and now - self._pressed_at.get(name, -RECOVERED_S) >= RECOVERED_S
            and now - self._gave_at.get(name, -GAVE_S) >= GAVE_S
        }


@dataclass(frozen=True, slots=True)
class PressureResponse:
    """What is to be done for one VM. First the others shrink; only what they have verifiably freed is given."""

    #: The size the VM gets; its current size where there is nothing to give.
    target: ResourceVector
    #: New sizes of the VMs that make room, by name.
    donors: Mapping[str, ResourceVector]
    #: What of its wants the host cannot spare: asked of the manager.
    remaining: ResourceVector
    sentence: str


def respond_to_pressure(
    vm: Allocation,
    wants: ResourceVector,
    free: ResourceVector,
    others: Sequence[Allocation] = (),
    pressed: Collection[str] = (),
    neighbours: Collection[str] = (),
) -> PressureResponse:
    """Decide what a VM under pressure gets, all of it in one step.

    Called again with what is free after the others have shrunk and with no ``others``, it says what may be given
    if they fell short.

    :param wants: what it wants beyond its current size; what is beyond its nominal size is not heard.
    :param free: what the host has left.
    :param others: the host's other VMs; none gives below its minimum, and fixed ones give nothing.
    :param pressed: names of VMs that are under pressure themselves and give nothing.
    :param neighbours: names of deflatable VMs that may be asked, for memory, where harvest VMs do not suffice.
    """
    lacks = wants.smaller(vm.nominal.less(vm.current))
    willing = [other for other in others if other.name != vm.name and other.name not in pressed]
    split = split_need([other for other in willing if other.priority is Priority.HARVEST], lacks.less(free))
    donors, missing = dict(split.targets), split.shortfall
    if missing.memory_mib > TOLERANCE:
        asked = [other for other in willing if other.priority is Priority.DEFLATABLE and other.name in neighbours]
        more = split_need(asked, ZERO.with_component("memory_mib", missing.memory_mib))
        donors |= more.targets
        missing = missing.with_component("memory_mib", more.shortfall.memory_mib)
    target = _on_grid(vm.current, lacks.less(missing), lacks)
    remaining = (vm.current + lacks).less(target)
    return PressureResponse(target, donors, remaining, _sentence(vm, target, donors, remaining))


def room_besides_pressure(room: ResourceVector, wants: Iterable[ResourceVector]) -> ResourceVector:
    """Of free room what may be given back to VMs without pressure: the wants of the others come first."""
    return room.less(sum(wants, ZERO))


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
    vm: Allocation, target: ResourceVector, donors: Mapping[str, ResourceVector], remaining: ResourceVector
) -> str:
    given = target.less(vm.current)
    parts = [f"{vm.name} gets {given} at once" if not given.is_zero() else f"there is nothing to give to {vm.name}"]
    if donors:
        parts.append("taken from " + ", ".join(sorted(donors)))
    if not remaining.is_zero():
        parts.append(f"{remaining} are asked of the manager")
    if vm.priority is not Priority.FIXED and vm.current.memory_mib <= vm.minimum.memory_mib + TOLERANCE:
        parts.append("it was at its minimum, which is too small to live on")
    return "; ".join(parts)
