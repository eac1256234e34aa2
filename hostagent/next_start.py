"""What a VM comes up with when it is started the next time. Pure: no hypervisor, no clock."""

from __future__ import annotations

from collections.abc import Callable

from deflation.messages import Vector, VMSpec
from deflation.respec import size_after
from hostagent.intents import Intent

#: How much of a VM's memory is boot memory, given nominal and wished-for boot memory, MiB.
BootMib = Callable[[float, float | None], float]


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
    intent = _fitted(intent.changed(at_next_start=None))
    return intent if waiting is None else resized_while_off(intent, waiting, boot_mib)


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
