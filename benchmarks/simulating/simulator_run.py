"""One run of the simulator or of the plain loop in its own process: `python -m benchmarks.simulating.simulator_run`.

A process's peak of memory never falls, so each size has one to itself. Time that goes into making the jobs is not the
simulation's, and counted apart. Seconds are CPU time, which other processes do not lengthen; time by the
clock is told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from benchmarks.simulating import simulator_plain
from ebbtide.simulator.generators.quantiles import SURF_HALF_YEAR
from ebbtide.simulator.inputs.batches import Floats, JobBatch, Ragged, hints, same, unknown

#: The cluster of Ambati et al. 2021: 225 machines of 64 cores, a year of 14 million jobs.
MACHINES: Final = 225
CORES: Final = 64
YEAR_S: Final = 365 * 86400.0
YEAR_JOBS: Final = 14_000_000
#: Drawn evenly. SURF's trace says 16 of every job; with these its runtimes fill the cluster to three quarters.
JOB_CORES: Final = (1.0, 2.0, 4.0, 8.0)
_BATCH: Final = 1 << 16


def jobs(count: int, machines: int, seed: int) -> Iterator[JobBatch]:
    """Poisson arrivals at the year's rate for so many machines; runtimes as in SURF's half-year."""
    rng = np.random.default_rng([seed, count])
    gap_s = YEAR_S / YEAR_JOBS * MACHINES / machines
    now_s = 0.0
    for begin in range(0, count, _BATCH):
        rows = min(_BATCH, count - begin)
        submit_s = now_s + np.cumsum(rng.exponential(gap_s, rows))
        now_s = float(submit_s[-1])
        runtime_s = SURF_HALF_YEAR.draw(rng, rows)
        yield job_batch(submit_s, runtime_s, rng.choice(np.array(JOB_CORES), rows))


def job_batch(submit_s: Floats, runtime_s: Floats, cpu_cores: Floats) -> JobBatch:
    """Jobs of one task."""
    rows = len(submit_s)
    return JobBatch(
        id=same("", rows),
        group=same("", rows),
        submit_s=submit_s,
        runtime_s=runtime_s,
        cpu_cores=cpu_cores,
        memory_mib=unknown(rows),
        priority=hints(rows),
        requested_s=unknown(rows),
        task_runtime_s=Ragged.single(runtime_s),
    )


class Timed:
    """Batches, and how long they took to be made."""

    def __init__(self, batches: Iterable[JobBatch]) -> None:
        self._batches = iter(batches)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[JobBatch]:
        while True:
            began = time.process_time()
            batch = next(self._batches, None)
            self.seconds += time.process_time() - began
            if batch is None:
                return
            yield batch


def simulate(count: int, machines: int, seed: int) -> dict[str, Any]:
    """The engine: best fit, conserving."""
    from ebbtide.simulator.jobs.engine import Engine, Machines

    began = time.process_time()
    Engine(jobs(10, machines, seed), Machines(2, CORES)).run()
    first_s = time.process_time() - began
    before_kib = peak_kib()
    timed = Timed(jobs(count, machines, seed))
    began, began_cpu = time.perf_counter(), time.process_time()
    found = Engine(timed, Machines(machines, CORES)).run()
    wall_s, seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return {
        "seconds": seconds - timed.seconds,
        "wall_s": wall_s,
        "inputs_s": timed.seconds,
        "first_s": first_s,
        "before_mib": before_kib / 1024,
        "peak_mib": peak_kib() / 1024,
        "events": found.events,
        "jobs": found.jobs_done,
        "wait_s": found.measures["wait_mean_s"] * found.jobs_done,
        "completion_s": found.measures["completion_mean_s"] * found.jobs_done,
        "core_s": found.useful_core_s,
        "ended_s": found.ended_s,
        "most_waiting": found.most_waiting,
        "utilisation": found.utilisation,
    }


def plain(count: int, machines: int, seed: int) -> dict[str, Any]:
    """The plain loop over the same jobs."""
    timed = Timed(jobs(count, machines, seed))
    began = time.process_time()
    found = simulator_plain.run(timed, machines, CORES)
    seconds = time.process_time() - began - timed.seconds
    return {"seconds": seconds, "inputs_s": timed.seconds, "peak_mib": peak_kib() / 1024, **vars(found)}


def peak_kib() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("simulate", "plain"))
    parser.add_argument("jobs", type=int)
    parser.add_argument("machines", type=int)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    # One core: neither the loop nor its inputs are spread over more.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = (simulate if given.how == "simulate" else plain)(given.jobs, given.machines, given.seed)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
