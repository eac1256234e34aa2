"""From the size that a VM is to have to the slots that it keeps. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping


@dataclass(frozen=True)
class Nominal:
    """A VM at full size: its slots of one core, and the resident MiB that all Workers and executors may grow to."""

    cores: int
    memory_mib: float


def slots(target: Mapping[str, float], nominal: Nominal) -> int:
    """Whole slots that the VM keeps at a target; what the target does not name stays in full.

    Cores are rounded down, but to one where there is anything left. A slot needs its part of the memory in full:
    executors have their heaps whatever runs in them.
    """
    cores = min(target.get("cpu_cores", float(nominal.cores)), float(nominal.cores))
    kept = max(math.floor(cores + 1e-6), 1) if cores > 0 else 0
    share = target.get("memory_mib", nominal.memory_mib) / nominal.memory_mib
    return min(kept, math.floor(share * nominal.cores + 1e-3))


def lost(target: Mapping[str, float], current_mib: float, nominal: Nominal) -> float:
    """The share that the VM loses of what its Workers have, by the component that loses most, in [0, 1].

    Memory that they do not hold now is no loss yet.
    """
    shares = [0.0]
    if "cpu_cores" in target and nominal.cores > 0:
        shares.append(1 - target["cpu_cores"] / nominal.cores)
    if "memory_mib" in target and current_mib > 0:
        shares.append(1 - target["memory_mib"] / current_mib)
    return min(max(shares), 1.0)
