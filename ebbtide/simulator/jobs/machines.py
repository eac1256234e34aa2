"""Kernels over one machine: what it can take, and how an elastic one grows by what runs on it. No numba here."""

from __future__ import annotations

from ebbtide.simulator.jobs.columns import COUNT, MACHINE, SUM, TASK, State
from ebbtide.simulator.jobs.measures import add, overlap


def free_cores(s: State, machine: int) -> int:
    """Whole cores that a machine can give to new tasks."""
    if s.machines[machine, MACHINE.held] != 0:
        return 0
    return int(max(s.machines[machine, MACHINE.cores] - s.machines[machine, MACHINE.used], 0))


def free_mib(s: State, machine: int) -> int:
    """Memory that no task uses; MiB."""
    return int(max(s.machines[machine, MACHINE.memory] - s.machines[machine, MACHINE.used_memory], 0))


def fits(s: State, machine: int, task: int) -> bool:
    """Whether a machine has room for a task now."""
    return bool(
        free_cores(s, machine) >= s.tasks[task, TASK.cores] and free_mib(s, machine) >= s.tasks[task, TASK.memory]
    )


def rent(s: State, task: int, machine: int) -> None:
    """Let an elastic machine grow by what a task needs, right before it starts there."""
    s.machines[machine, MACHINE.cores] += s.tasks[task, TASK.cores]
    s.machines[machine, MACHINE.memory] += s.tasks[task, TASK.memory]
    grow(s, s.tasks[task, TASK.cores])


def give_back(s: State, task: int, machine: int) -> None:
    """Let it shrink by what a task had there, once that runs there no more."""
    s.machines[machine, MACHINE.cores] -= s.tasks[task, TASK.cores]
    s.machines[machine, MACHINE.memory] -= s.tasks[task, TASK.memory]
    grow(s, -s.tasks[task, TASK.cores])


def grow(s: State, cores: int) -> None:
    """From now on there are so many cores more in all; those that there were until now are integrated."""
    add(s.sums, SUM.all_measured, there_core_s(s))
    s.sums[SUM.cores_since] = s.sums[SUM.now]
    s.counts[COUNT.all_cores] += cores


def there_core_s(s: State) -> float:
    """Core-seconds that were there since the number of cores last changed, as far as they are measured."""
    within_s = overlap(s.sums[SUM.cores_since], s.sums[SUM.now], s.sums[SUM.from_s], s.sums[SUM.to_s])
    return float(s.counts[COUNT.all_cores] * within_s)
