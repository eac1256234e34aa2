"""Small jobs and changes for tests, and runs of them that write down every attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.inputs.batches import CapacityBatch, JobBatch, Ragged, same, texts
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.jobs.results import Results
from ebbtide.simulator.jobs.settings import Settings


@dataclass(frozen=True)
class Job:
    at_s: float
    cores: float
    runtimes_s: Sequence[float]
    memory_mib: float = float("nan")
    priority: int = 0
    requested_s: float = float("nan")


def job(at_s: float, cores: float, *runtimes_s: float, **more: Any) -> Job:
    return Job(at_s, cores, runtimes_s, **more)


def batches(jobs: Sequence[Job], size: int = 3) -> list[JobBatch]:
    """The jobs in several batches."""
    return [_batch(jobs[i : i + size]) for i in range(0, len(jobs), size)]


def _batch(jobs: Sequence[Job]) -> JobBatch:
    values = np.array([r for j in jobs for r in j.runtimes_s], np.float64)
    runtimes = Ragged.of(values, np.array([len(j.runtimes_s) for j in jobs], np.int64))
    return JobBatch(
        id=same("", len(jobs)),
        group=same("", len(jobs)),
        submit_s=np.array([j.at_s for j in jobs], np.float64),
        runtime_s=runtimes.means(),
        cpu_cores=np.array([j.cores for j in jobs], np.float64),
        memory_mib=np.array([j.memory_mib for j in jobs], np.float64),
        priority=np.array([j.priority for j in jobs], np.int8),
        requested_s=np.array([j.requested_s for j in jobs], np.float64),
        task_runtime_s=runtimes,
    )


def changes(rows: Sequence[tuple[float, str, float]], size: int = 2) -> list[CapacityBatch]:
    """(seconds, machine, cores) in several batches."""
    return [
        CapacityBatch(
            machine=texts(r[1] for r in part),
            at_s=np.array([r[0] for r in part], np.float64),
            cpu_cores=np.array([r[2] for r in part], np.float64),
            memory_mib=np.full(len(part), np.nan),
        )
        for part in (rows[i : i + size] for i in range(0, len(rows), size))
    ]


@dataclass
class Told:
    """A run, and all that it wrote down."""

    results: Results
    engine: Engine
    attempts: list[NDArray[np.float64]] = field(default_factory=list)
    done: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[float, ...]]:
        """Attempts: (job, task, machine, began, ended, completed), in the order of their ends."""
        return [tuple(row) for part in self.attempts for row in part.tolist()]

    @property
    def spans(self) -> dict[int, tuple[float, float]]:
        """Of jobs of one task: begin and end of the attempt that completed."""
        return {int(r[0]): (r[3], r[4]) for r in self.rows if r[5]}


def run(
    jobs: Sequence[Job],
    machines: Machines | None = None,
    moves: Sequence[tuple[float, str, float]] | None = None,
    *,
    policy: Policy | str = "best-fit",
    compile: bool = False,
    seed: int = 1,
    most_cores: int | None = None,
    most_mib: int | None = None,
    batch: int = 3,
    **settings: Any,
) -> Told:
    """Run it in validating mode, interpreted unless told otherwise."""
    attempts: list[NDArray[np.float64]] = []
    done: list[NDArray[np.float64]] = []
    engine = Engine(
        batches(jobs, batch),
        machines,
        None if moves is None else changes(moves),
        policy=policy,
        settings=Settings(**({"validate": True} | settings)),
        seed=seed,
        most_cores=most_cores,
        most_mib=most_mib,
        attempts=attempts.append,
        done=done.append,
        compile=compile,
    )
    return Told(engine.run(), engine, attempts, done)


def random_scene(seed: int, jobs: int = 60, machines: int = 5) -> tuple[list[Job], list[tuple[float, str, float]]]:
    """Jobs of one or more tasks, many at the same instants, on machines that come, go and change."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 100, jobs) * rng.choice([1.0, 0.5, 0.37], jobs))
    made = [
        Job(
            float(at_s),
            float(rng.integers(1, 6)),
            tuple(float(rng.choice([0.0, 1.0, 2.5, rng.exponential(10)])) for _ in range(rng.integers(1, 5))),
            memory_mib=float(rng.choice([np.nan, 100.0, 300.0])),
            priority=int(rng.integers(0, 3)),
            requested_s=float(rng.choice([np.nan, 0.0, 5.0, 20.0])),
        )
        for at_s in times
    ]
    at = np.sort(rng.integers(0, 120, 8 * machines).astype(np.float64))
    moves = [(0.0, f"m{i}", 8.0) for i in range(machines)]
    moves += [(float(t), f"m{rng.integers(machines + 1)}", float(rng.integers(0, 13))) for t in at]
    # In the end all have room, so that nothing waits for ever.
    moves += [(130.0, f"m{i}", 8.0) for i in range(machines)]
    return made, moves
