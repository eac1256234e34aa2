"""Machines that a policy rents: as large as what runs on them, and gone with it. Kernels: compiled, no numba here."""

from __future__ import annotations

from simulator.jobs.columns import C_ALL_CORES, M_CORES, M_MEMORY, T_CORES, T_MEMORY, State


def rent(s: State, task: int, machine: int) -> None:
    """Let an elastic machine grow by what a task needs, right before it starts there."""
    s.machines[machine, M_CORES] += s.tasks[task, T_CORES]
    s.machines[machine, M_MEMORY] += s.tasks[task, T_MEMORY]
    s.counts[C_ALL_CORES] += s.tasks[task, T_CORES]


def give_back(s: State, task: int, machine: int) -> None:
    """Let it shrink by what a task had there, once that runs there no more."""
    s.machines[machine, M_CORES] -= s.tasks[task, T_CORES]
    s.machines[machine, M_MEMORY] -= s.tasks[task, T_MEMORY]
    s.counts[C_ALL_CORES] -= s.tasks[task, T_CORES]
