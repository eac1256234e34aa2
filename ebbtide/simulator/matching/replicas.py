"""Replicas (Agarwal et al. 2023 §B.1): each on a random machine that has room, and no two of one task on one machine.

Kernels: compiled, no numba here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ebbtide.simulator.chance import draws_of
from ebbtide.simulator.jobs.columns import TASK, Ints, State
from ebbtide.simulator.jobs.machines import fits
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.nodes.draws import draw


class Chance(NamedTuple):
    """Of the policy."""

    draws: Ints


def beside(s: State, machine: int, task: int) -> bool:
    """Whether another replica of a task runs on a machine."""
    twin = s.tasks[task, TASK.twin]
    while twin != task:
        if s.tasks[twin, TASK.machine] == machine:
            return True
        twin = s.tasks[twin, TASK.twin]
    return False


def choose(s: State, p: Chance, task: int, now_s: float) -> int:
    """Each machine with room and without another replica is as likely; -1: there is none."""
    found = -1
    count = 0
    for machine in range(len(s.machines)):
        if fits(s, machine, task) and not beside(s, machine, task):
            count += 1
            if draw(p.draws, count) == 0:
                found = machine
    return found


def policy() -> Policy:
    """For runs with `Settings.replicas`."""

    def resized(s: State, p: Any, most_cores: int, seed: int) -> Chance:
        if p is not None:
            return p  # type: ignore[no-any-return]
        return Chance(draws_of(seed))

    return Policy("replicas", {"choose": choose}, Chance, resized, by_demand=False)
