"""Changes of what a VM is sold: its size while it runs, and what it comes up with at its next start. Pure.

Notify on decrease, ask on increase (docs/reference/lifecycle.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.deflation.allocations import Priority, size_after
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.state.intents import Intent

#: What is not measured in whole units of this machine never limits a spec.
_UNLIMITED = 1e12
#: How much of a VM's memory is boot memory, given nominal and wished-for boot memory, MiB.
BootMib = Callable[[float, float | None], float]


@dataclass(frozen=True, slots=True)
class Respec:
    """How a running VM comes to a new spec."""

    #: What counts from the end of the change on: the new spec as far as the running domain can take it.
    now: VMSpec
    #: The whole of it, where a restart is needed; None: ``now`` is all.
    at_next_start: VMSpec | None
    #: What counts while the size is being changed: wide enough for the old size and the new.
    meanwhile: VMSpec
    #: The size to reach.
    target: ResourceVector
    #: What is missing in the domain, in words; empty if nothing is.
    why: str = ""


def respec(spec: VMSpec, new: VMSpec, current: ResourceVector, most: ResourceVector) -> Respec:
    """Plan the change of a running VM's spec.

    :param current: what the VM has now (its committed size).
    :param most: CPU and memory that the running domain can be given at the most.
    """
    now, why = _within(spec, new, most)
    meanwhile = _both(spec, now)
    target = size_after(spec.allocation(current), now.allocation(now.nominal.vector()))
    return Respec(now, new if why else None, meanwhile, target, why)


def _within(spec: VMSpec, new: VMSpec, most: ResourceVector) -> tuple[VMSpec, str]:
    """The part of a spec that a running domain can take, and what it cannot."""
    room = most.with_component("disk_mib_s", _UNLIMITED).with_component("network_mib_s", _UNLIMITED)
    old, wanted = spec.nominal.vector(), new.nominal.vector()
    nominal, reasons = wanted, []
    for component in COMPONENTS:
        value = wanted[component]
        if value > room[component] + TOLERANCE and value > old[component]:
            value = max(room[component], min(old[component], value))
            reasons.append(f"{component} above {value:g}")
        if component not in ("cpu_cores", "memory_mib") and (value > 0) != (old[component] > 0):
            # A limit that was never declared cannot be told apart from none while the domain runs.
            value = old[component]
            reasons.append(f"declaring {component}")
        nominal = nominal.with_component(component, value)
    ceiling = new.ceiling
    if ceiling is not None:
        upper = ceiling.vector()
        lower = upper.smaller(room).larger(nominal)
        if not upper.fits_in(lower):
            reasons.append("the ceiling")
        ceiling = Vector.of(lower)
    boot_mib = min(spec.boot_memory_mib, nominal.memory_mib) if spec.boot_memory_mib is not None else None
    changed = {
        "nominal": Vector.of(nominal),
        "minimum": Vector.of(new.minimum.vector().smaller(nominal)),
        "ceiling": ceiling,
        "boot_memory_mib": boot_mib if reasons else new.boot_memory_mib,
    }
    return new.model_copy(update=changed), " and ".join(reasons)


def _both(old: VMSpec, new: VMSpec) -> VMSpec:
    """Wide enough for both: no size on the way is outside of it, and it does not count as fixed before it is."""
    priority = new.priority if new.priority is not Priority.FIXED else old.priority
    if priority is Priority.FIXED:
        priority = Priority.DEFLATABLE
    floors = (old.asked_minimum(), new.asked_minimum())
    uppers = ((old.ceiling or old.nominal).vector(), (new.ceiling or new.nominal).vector())
    upper = uppers[0].larger(uppers[1])
    harvest = priority is Priority.HARVEST
    nominal = old.nominal.vector().larger(new.nominal.vector()) if harvest else upper
    return new.with_minimum(floors[0].smaller(floors[1])).model_copy(
        update={
            "priority": priority,
            "nominal": Vector.of(nominal),
            "ceiling": Vector.of(upper) if harvest else None,
        }
    )


def returning(spec: VMSpec, size: ResourceVector) -> VMSpec:
    """What counts while an adopted VM is brought to the size that its owner gets back: wide enough for both."""
    upper = spec.nominal.vector().larger(size)
    priority = Priority.DEFLATABLE if spec.priority is Priority.FIXED else spec.priority
    floor = spec.asked_minimum().smaller(size)
    widened = {"priority": priority, "nominal": Vector.of(upper)}
    if spec.ceiling is not None:
        widened["ceiling"] = Vector.of(spec.ceiling.vector().larger(size))
    return spec.with_minimum(floor).model_copy(update=widened)


def fallen_short(old: VMSpec, reached: ResourceVector) -> VMSpec:
    """What a VM is sold as after a change that did not come to its end: what it was.

    Where it has fallen below the old minimum on the way, as its new spec allowed, the minimum follows; so does the
    nominal size of a fixed VM, which is never below it. Where it has grown, or may have, above the most that it was
    sold, that follows, since what a VM may hold is always charged.
    """
    if not reached.fits_in((old.ceiling or old.nominal).vector()):
        field = "nominal" if old.ceiling is None else "ceiling"
        upper = (old.ceiling or old.nominal).vector().larger(reached)
        old = old.with_minimum(old.asked_minimum()).model_copy(update={field: Vector.of(upper)})
    if old.priority is Priority.FIXED:
        nominal = Vector.of(old.nominal.vector().smaller(reached))
        sold = old.with_minimum(old.asked_minimum().smaller(nominal.vector()))
        boot_mib = min(old.boot_memory_mib, nominal.memory_mib) if old.boot_memory_mib is not None else None
        return sold.model_copy(update={"nominal": nominal, "boot_memory_mib": boot_mib})
    floor = old.asked_minimum()
    return old if floor.fits_in(reached) else old.with_minimum(floor.smaller(reached))


def resized_while_off(intent: Intent, spec: VMSpec, boot_mib: BootMib) -> Intent:
    """The intent of a VM that is off and is sold something else: its definition is written anew before it starts."""
    if spec == intent.spec:
        return intent
    old, now = intent.spec.allocation(intent.committed.vector()), spec.allocation(spec.nominal.vector())
    size = size_after(old, now)
    boot = boot_mib(spec.nominal.memory_mib, spec.boot_memory_mib)
    return _fitted(intent.changed(spec=spec, committed=Vector.of(size), boot_mib=boot, redefine=True))


def off(intent: Intent, boot_mib: BootMib) -> Intent:
    """The intent of a VM that has just been stopped: what it will come up with."""
    waiting, spec = intent.at_next_start, intent.spec
    if intent.redefine:
        intent = intent.changed(boot_mib=boot_mib(spec.nominal.memory_mib, spec.boot_memory_mib))
    intent = _fitted(intent.changed(at_next_start=None, saved_mib=None, told=""))
    return intent if waiting is None else resized_while_off(intent, waiting, boot_mib)


def starting_at(intent: Intent, size: ResourceVector) -> Intent:
    """The intent of a VM that is off and comes up at another size: as far as it is sold so, and can boot so.

    What one that is suspended has of memory is saved as it is.
    """
    spec = intent.spec
    least, most = spec.allocation(spec.nominal.vector()).minimum, spec.nominal.vector()
    size = size.larger(least).smaller(most)
    if intent.saved_mib is not None:
        kept = Vector.of(size.with_component("memory_mib", intent.committed.memory_mib))
        return intent.changed(committed=kept, target=kept)
    return _fitted(intent.changed(committed=Vector.of(size)))


def _fitted(intent: Intent) -> Intent:
    """No less memory than it boots with, which only a guest that runs can give back, and no more than it is sold."""
    spec, committed = intent.spec, intent.committed.vector()
    upper = spec.nominal.vector()
    if spec.ceiling is not None:
        # What a harvest VM had beyond its nominal size was lent: nothing says that it is there at its next start.
        committed = committed.smaller(upper)
    memory_mib = min(max(committed.memory_mib, intent.boot_mib), upper.memory_mib)
    size = Vector.of(committed.with_component("memory_mib", memory_mib))
    return intent.changed(committed=size, target=size)
