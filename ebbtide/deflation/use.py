"""Minimums derived from what a VM uses: what it keeps in any case where nobody has said how much that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.cascade.ordinary import RESERVE_MIB, RESERVE_SHARE
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.resources import ResourceVector

#: A VM keeps so many times the cores that it used while it was measured: a few seconds are no busy hour.
CPU_HEADROOM: Final = 1.5
_CPU_STEP: Final = 0.05


@dataclass(frozen=True, slots=True)
class Use:
    """What a VM used while it was measured. None: it is not known, which is not zero."""

    cpu_cores: float | None
    #: Of what it has, all that its kernel does not call usable, MiB.
    memory_mib: float | None


def use_of(size_mib: float, usable_mib: float | None, cpu_s: float | None, window_s: float) -> Use:
    """What was used.

    :param size_mib: what the VM has.
    :param usable_mib: the least that its kernel called usable; None: it said nothing while it was measured.
    :param cpu_s: what its vCPUs ran; None: it could not be read.
    """
    cores = max(cpu_s, 0.0) / window_s if cpu_s is not None and window_s > 0 else None
    return Use(cores, max(size_mib - usable_mib, 0.0) if usable_mib is not None else None)


def minimum_cpu_cores(use: Use, nominal: ResourceVector) -> float | None:
    """What it used and half as much again, in steps of 0.05 cores; None: it is not known."""
    if use.cpu_cores is None:
        return None
    cores = math.ceil(round(use.cpu_cores * CPU_HEADROOM / _CPU_STEP, 6)) * _CPU_STEP
    return round(min(max(cores, HARD_FLOOR.cpu_cores), nominal.cpu_cores), 2)


def minimum_memory_mib(use: Use, nominal: ResourceVector) -> float | None:
    """What it uses and the reserve that a guest without our agent keeps, in whole MiB; None: it is not known."""
    if use.memory_mib is None:
        return None
    kept = math.ceil(use.memory_mib + max(RESERVE_MIB, RESERVE_SHARE * nominal.memory_mib))
    return float(min(max(kept, HARD_FLOOR.memory_mib), nominal.memory_mib))
