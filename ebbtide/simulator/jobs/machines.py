"""Kernels over one machine: what it can take, and how an elastic one grows by what runs on it. No numba here."""

from __future__ import annotations

from ebbtide.simulator.jobs.columns import COUNT, MACHINE, TASK, State


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
    s.counts[COUNT.all_cores] += s.tasks[task, TASK.cores]


def give_back(s: State, task: int, machine: int) -> None:
    """Let it shrink by what a task had there, once that runs there no more."""
    s.machines[machine, MACHINE.cores] -= s.tasks[task, TASK.cores]
    s.machines[machine, MACHINE.memory] -= s.tasks[task, TASK.memory]
    s.counts[COUNT.all_cores] -= s.tasks[task, TASK.cores]
