"""Replay for both sides of the benchmark `tasks`: the same tasks at the same moments, the same core changes. Seeded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ebbtide.matcher.predict.changes import Change

#: Mean seconds between two core changes of each machine: from calm to restless.
CALM_S: Final = (240.0, 60.0, 15.0, 6.0)
CORES: Final = 4
#: How long the changes were watched before the first task comes.
WATCHED_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A task of the benchmark."""

    name: str
    at_s: float
    cores: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Times in seconds from the beginning; changes before it have negative ones."""

    arrivals: tuple[Arrival, ...]
    changes: tuple[Change, ...]


def plan_of(machines: list[str], tasks: int, within_s: float, lasts_s: float, seed: int) -> Plan:
    """Tasks that come within a time, and changes that go on for longer."""
    generator = np.random.default_rng(seed)
    changes: list[Change] = []
    # Slurm fills its nodes in the order of their names: which of them is calm must not follow it.
    for name, calm_s in zip(machines, generator.permutation(CALM_S), strict=True):
        at, cores = -WATCHED_S, CORES
        changes.append(Change(name, at, 0.0, float(cores)))
        while at < lasts_s:
            at += float(generator.lognormal(np.log(calm_s) - 0.5, 1.0))
            others = [number for number in range(CORES + 1) if number != cores]
            after = int(generator.choice(others, p=_likely(others)))
            changes.append(Change(name, at, float(cores), float(after)))
            cores = after
    moments = np.sort(generator.uniform(0.0, within_s, tasks))
    durations = np.clip(generator.lognormal(np.log(6.0), 0.8, tasks), 1.0, 30.0)
    cores_of = generator.choice([1, 2], tasks)
    arrivals = (
        Arrival(f"t-{number}", float(moments[number]), int(cores_of[number]), round(float(durations[number]), 2))
        for number in range(tasks)
    )
    return Plan(tuple(arrivals), tuple(sorted(changes, key=lambda change: change.at)))


def _likely(cores: list[int]) -> list[float]:
    """Many cores more often than few."""
    weights = np.asarray([number + 1.0 for number in cores])
    return [float(weight) for weight in weights / weights.sum()]


def cores_at(plan: Plan, at_s: float) -> dict[str, int]:
    """What each machine has at a moment."""
    found = {}
    for change in plan.changes:
        if change.at <= at_s:
            found[change.machine] = int(change.cores_after)
    return found
