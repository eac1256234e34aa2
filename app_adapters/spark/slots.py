"""From the size that a VM is to have to the slots that its Worker keeps. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping


@dataclass(frozen=True)
class Nominal:
    """A Worker at full size: its cores, and the resident MiB that it and its executors may grow to."""

    cores: int
    memory_mib: float


def slots(target: Mapping[str, float], nominal: Nominal) -> int:
    """Whole cores that the Worker keeps at a target; what the target does not name stays in full.

    Cores are rounded down, but to one where there is anything left. An executor has its heap whatever its cores are, so
    a VM that cannot hold it in full keeps no executor.
    """
    if target.get("memory_mib", nominal.memory_mib) < nominal.memory_mib - 0.5:
        return 0
    cores = min(target.get("cpu_cores", float(nominal.cores)), float(nominal.cores))
    if cores <= 0:
        return 0
    return max(math.floor(cores + 1e-6), 1)


def lost(target: Mapping[str, float], current_mib: float, nominal: Nominal) -> float:
    """The share that the VM loses of what the Worker has, by the component that loses most, in [0, 1].

    Memory that the Worker does not hold now is no loss yet.
    """
    shares = [0.0]
    if "cpu_cores" in target and nominal.cores > 0:
        shares.append(1 - target["cpu_cores"] / nominal.cores)
    if "memory_mib" in target and current_mib > 0:
        shares.append(1 - target["memory_mib"] / current_mib)
    return min(max(shares), 1.0)
