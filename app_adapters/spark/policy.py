"""Choice between giving Spark's slots up and having their VMs throttled (Sharma et al. 2019, §4.1.1). Pure.

Both running times are relative to that of the undeflated job, which therefore need not be known.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Mapping, Sequence

from app_adapters.spark.curves import LINEAR, Curves

VM_LEVEL = "vm-level"
SELF = "self"
#: Of more waves than this the last one does not matter any more.
MOST_WAVES = 64.0


@dataclass(frozen=True)
class Deflation:
    """What is wanted of one VM. `vm`: the share that it loses of its own; `own`: the share of slots that goes instead.

    They differ where slots are whole: a VM of two slots that loses a quarter gives up one slot, which is half.
    """

    vm: float
    own: float
    cores: float = 1.0  # at full size: weighs the VM in the mean


@dataclass(frozen=True)
class Job:
    """One running application. `progress` is c, `recomputed` is r of Eq. 2, both in [0, 1].

    `cores` weigh it beside others. `waves`: tasks of a stage for each slot, at least 1.
    """

    name: str
    progress: float
    recomputed: float
    cores: float = 1.0
    waves: float = 1.0


@dataclass(frozen=True)
class Decision:
    """`choice`: VM_LEVEL or SELF; the times are relative to an undeflated run, weighted means of all jobs."""

    choice: str
    vm_time: float
    self_time: float
    reason: str


def time_vm_level(progress: float, vector: Sequence[Deflation], curves: Curves = LINEAR, waves: float = 1.0) -> float:
    """Eq. 1: stages wait for the slowest VM. Infinite where one is gone.

    The equation holds for stages of one task a slot. Where there are more, slots that are faster take more of them, and
    the slowest VM holds the stage up by its last task only.
    """
    return progress + (1 - progress) * _stretch(vector, curves, waves) if progress < 1 else progress


def _stretch(vector: Sequence[Deflation], curves: Curves, waves: float) -> float:
    """How much longer a stage takes on throttled VMs, each free slot taking the next task."""
    lefts = [curves.vm.at(one.vm) for one in vector] or [1.0]
    if min(lefts) <= 0:
        return math.inf
    if min(lefts) == max(lefts) or waves <= 1:
        return 1 / min(lefts)
    waves = min(waves, MOST_WAVES)
    tasks = waves * sum(one.cores for one in vector)
    # By VM: when its slots are free, in times of a task on a VM that is not throttled.
    free = [(0.0, 1 / left, number) for number, left in enumerate(lefts)]
    heapq.heapify(free)
    last = 0.0
    while tasks > 1e-9:
        at, takes, number = free[0]
        at += takes
        last = max(last, at)
        tasks -= vector[number].cores
        heapq.heapreplace(free, (at, takes, number))
    # No better than all slots together, no worse than the slowest VM.
    return min(last / math.ceil(waves - 1e-9), 1 / min(lefts))


def time_self(progress: float, recomputed: float, vector: Sequence[Deflation], curves: Curves = LINEAR) -> float:
    """Eq. 2 and 3: slots that are gone hold no other up, so the mean counts; what was lost with them is computed again.

    Nothing is added for a restart: the slots that stay go on as they are.
    """
    return progress + _over(recomputed * progress + 1 - progress, curves.self_deflated.at(mean(vector)))


def mean(vector: Sequence[Deflation]) -> float:
    """The mean share of slots that goes, each VM weighted by its cores."""
    cores = sum(one.cores for one in vector)
    return sum(one.own * one.cores for one in vector) / cores if cores > 0 else 0.0


def decide(vector: Mapping[str, Deflation], jobs: Sequence[Job], curves: Curves = LINEAR) -> Decision:
    """One decision for all VMs: whichever gives the shorter running time, VM-level where they are equal.

    `vector` has all VMs of the cluster by host, also those that are not deflated. Of several jobs the sum of relative
    times counts, each weighted by the cores that it holds. No job: giving slots up costs nothing.
    """
    every = tuple(vector.values())
    most, average = max((one.vm for one in every), default=0.0), mean(every)
    wanted = f"{sum(one.vm > 0 for one in every)} of {len(every)} VMs deflated, max d {most:.2f}, mean d {average:.2f}"
    if not jobs:
        return Decision(SELF, 1.0, 1.0, f"self-deflation: no application is running ({wanted})")
    weight = sum(max(job.cores, 1.0) for job in jobs)
    vm_time = own_time = 0.0
    parts = []
    for job in jobs:
        vm = time_vm_level(job.progress, every, curves, job.waves)
        own = time_self(job.progress, job.recomputed, every, curves)
        vm_time += vm * max(job.cores, 1.0) / weight
        own_time += own * max(job.cores, 1.0) / weight
        figures = f"c {job.progress:.2f}, r {job.recomputed:.2f}, {job.waves:.1f} tasks a slot"
        parts.append(f"{job.name}: {figures}, T_VM {vm:.2f}, T_self {own:.2f}")
    choice = SELF if own_time < vm_time else VM_LEVEL
    sign = "<" if choice == SELF else ">" if own_time > vm_time else "="
    words = "self-deflation" if choice == SELF else "VM-level deflation"
    times = f"T_self {own_time:.2f} {sign} T_VM {vm_time:.2f}"
    return Decision(choice, vm_time, own_time, f"{words}: {times} ({wanted}; {'; '.join(parts)})")


def _over(work: float, throughput: float) -> float:
    if work <= 0:
        return 0.0
    return work / throughput if throughput > 0 else math.inf
