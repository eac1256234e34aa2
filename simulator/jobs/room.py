"""What a machine can take. Kernels: compiled, no numba here."""

from __future__ import annotations

from simulator.jobs.columns import (
    M_CORES,
    M_HELD,
    M_MEMORY,
    M_USED,
    M_USED_MEMORY,
    T_CORES,
    T_MEMORY,
    State,
)


def free_cores(s: State, machine: int) -> int:
    """Whole cores that a machine can give to new tasks."""
    if s.machines[machine, M_HELD] != 0:
        return 0
    return int(max(s.machines[machine, M_CORES] - s.machines[machine, M_USED], 0))


def free_mib(s: State, machine: int) -> int:
    """Memory that nobody uses; MiB."""
    return int(max(s.machines[machine, M_MEMORY] - s.machines[machine, M_USED_MEMORY], 0))


def fits(s: State, machine: int, task: int) -> bool:
    """Whether a machine has room for a task now."""
    return bool(free_cores(s, machine) >= s.tasks[task, T_CORES] and free_mib(s, machine) >= s.tasks[task, T_MEMORY])
