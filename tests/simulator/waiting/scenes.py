"""Runs of the waiting policy that write down every attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.settings import Settings
from ebbtide.simulator.waiting import arrays as a
from ebbtide.simulator.waiting.policy import Options, elastic, policy
from tests.simulator.jobs.scenes import Job, batches, job


@dataclass
class Told:
    """Attempts: (job, place, began, ended, completed); the place is ``fixed``, ``rented``, ``tried`` or ``stays``."""

    engine: Engine
    attempts: list[tuple[int, str, float, float, bool]]

    def of(self, number: int) -> list[tuple[str, float, float, bool]]:
        return [row[1:] for row in self.attempts if row[0] == number]

    def total(self, place: int) -> float:
        return float(self.engine.policy_state.sums[place : place + 2].sum())

    def count(self, knob: int) -> int:
        return int(self.engine.policy_state.knobs[knob])


def run(jobs: Sequence[Job], machines: Machines, *, compile: bool = False, **options: Any) -> Told:
    """In validating mode, interpreted unless told otherwise; lengths are runtimes unless told otherwise."""
    rows: list[Any] = []
    engine = Engine(
        batches(jobs),
        machines,
        policy=policy(Options(**({"by_core_time": False} | options)), machines),
        settings=Settings(validate=True),
        elastic=elastic(machines),
        attempts=rows.append,
        compile=compile,
    )
    engine.run()

    def place(machine: int) -> str:
        beyond = machine - machines.count
        if beyond < 0:
            return "fixed"
        if beyond == 0:
            return "rented"
        return "tried" if beyond <= machines.cpu_cores else "stays"

    found = np.concatenate(rows) if rows else np.empty((0, 6))
    told = [(int(r[0]), place(int(r[2])), float(r[3]), float(r[4]), bool(r[5])) for r in found]
    assert engine.policy_state.cluster[4] == 0
    assert engine.policy_state.cluster[6] == 0
    return Told(engine, told)


def random_jobs(seed: int, count: int = 120, most_cores: int = 4) -> list[Job]:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 150, count) * rng.choice([1.0, 0.5, 0.3], count))
    return [
        job(
            float(at_s),
            float(rng.integers(1, most_cores + 1)),
            float(rng.choice([0.0, 1.0, 4.0, 10.0, rng.exponential(20.0)])),
            memory_mib=float(rng.choice([100.0, 3000.0])),
        )
        for at_s in times
    ]


__all__ = ["Job", "Machines", "Told", "a", "job", "random_jobs", "run"]
