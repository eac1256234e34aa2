"""Replay for both sides of the benchmark `tasks`: the same tasks at the same moments, the same core changes. Seeded.

Everything is at a sixtieth of the scale of Agarwal et al. 2023: a second here is a minute there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ebbtide.matcher.match.rounds import LIVE_PREDICTION
from ebbtide.matcher.predict.changes import Change

SCALE: Final = 60.0
MACHINES: Final = 16
#: So many tasks come within a time: a load of .27 of the cores that there are on average. Changes go on for longer.
TASKS, WITHIN_S, LIMIT_S = 120, 400.0, 900.0
#: Mean seconds between two core changes of each machine: even on a logarithmic scale from one a day to twenty an hour
#: there. So half of them have at most one an hour, and the worst tenth tens of them (the paper's §2.1).
CALM_S: Final = tuple(round(1440.0 * (3.0 / 1440.0) ** (place / (MACHINES - 1)), 1) for place in range(MACHINES))
#: Of a machine. No machine has less than the least, the size at which a harvest VM is evicted instead: so there is no
#: moment at which Slurm would refuse a task as larger than every node.
CORES: Final = 8
LEAST_CORES: Final = 2
TASK_CORES: Final = (1, 2, 4)
#: Shortest and longest task: the paper's U[1 min, 1 h].
SHORTEST_S, LONGEST_S = 1.0, 60.0
#: How long the changes were watched before the first task comes: 1.25 days there.
WATCHED_S: Final = 1800.0
#: What a manager predicts by, at this scale; by Eq. 1 and the sizes of shrinks, since landmarks want more machines than
#: these to tell them apart (docs/research/benchmarks.md).
PREDICTION: Final = replace(
    LIVE_PREDICTION,
    form="next-change",
    window_s=LIVE_PREDICTION.window_s / SCALE,
    horizon_s=LIVE_PREDICTION.horizon_s / SCALE,
    look_every_s=LIVE_PREDICTION.look_every_s / SCALE,
    fresh_s=LIVE_PREDICTION.fresh_s / SCALE,
)


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
    for name, calm_s in zip(machines, generator.permutation(CALM_S)[: len(machines)], strict=True):
        at, cores = -WATCHED_S, CORES
        changes.append(Change(name, at, 0.0, float(cores)))
        while at < lasts_s:
            at += float(generator.exponential(calm_s))
            after = int(generator.choice([number for number in range(LEAST_CORES, CORES + 1) if number != cores]))
            changes.append(Change(name, at, float(cores), float(after)))
            cores = after
    moments = np.sort(generator.uniform(0.0, within_s, tasks))
    durations = generator.uniform(SHORTEST_S, LONGEST_S, tasks)
    cores_of = generator.choice(TASK_CORES, tasks)
    arrivals = (
        Arrival(f"t-{number}", float(moments[number]), int(cores_of[number]), round(float(durations[number]), 2))
        for number in range(tasks)
    )
    return Plan(tuple(arrivals), tuple(sorted(changes, key=lambda change: change.at)))


def plan_for(number: int, tasks: int = TASKS, within_s: float = WITHIN_S) -> Plan:
    """Of a run, by its number: other tasks and other changes, on Slurm's names for nodes."""
    names = [f"n{place:0{len(str(MACHINES))}}" for place in range(1, MACHINES + 1)]
    return plan_of(names, tasks, within_s, LIMIT_S, seed=number)


def p90(values: Collection[float]) -> float:
    """The value that nine of ten do not exceed."""
    return sorted(values)[int(0.9 * (len(values) - 1))]


def cores_at(plan: Plan, at_s: float) -> dict[str, int]:
    """What each machine has at a moment."""
    found = {}
    for change in plan.changes:
        if change.at <= at_s:
            found[change.machine] = int(change.cores_after)
    return found
