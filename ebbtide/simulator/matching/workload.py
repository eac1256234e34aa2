"""Jobs of long, uninterruptible tasks, as many as make a load on a pool (Agarwal et al. 2023 §4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ebbtide.matcher.match.matching import MatchOptions
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import (
    EstimatedJobBatch,
    Floats,
    Indices,
    JobBatch,
    Ragged,
    hints,
    same,
    texts,
    unknown,
)
from ebbtide.simulator.matching.pools import Pool

#: Runtimes: even between a minute and the most (Seismic A), bell-shaped between them, or bounded Pareto (Genomics).
SHAPES: Final = ("uniform", "gaussian", "pareto")
#: What the match maker counts with where nothing is said.
FALLBACK_S: Final = MatchOptions().fallback_s


@dataclass(frozen=True, slots=True)
class Workload:
    """What the paper leaves open is a setting: how many tasks a job has, and of how many cores.

    :param load: work / (mean harvested cores in the window in which the jobs come), as a share.
    :param rate_factors: jobs come so many times as often, each for ``rate_period_s``, in turn from the beginning of
        the window on (Agarwal et al. 2023 §4.4: 1 and 4, 6 hours); the load is the mean of the whole window.
    :param most_task_s: X of U[1 min, X].
    :param estimate_factor: runtimes are said to be so many times what they are,
    :param estimate_error: but for a relative error, drawn evenly from [-e, e] for each task;
    :param estimate_missing: and of this share of the tasks nothing is said: they count as ``FALLBACK_S``.
    """

    load: float = 0.3
    jobs: int = 50
    least_tasks: int = 20
    most_tasks: int = 100
    most_task_s: float = 3600.0
    shape: str = "uniform"
    cores: tuple[int, ...] = (1, 2, 4)
    estimate_factor: float = 1.0
    estimate_error: float = 0.0
    estimate_missing: float = 0.0
    rate_factors: tuple[float, ...] = (1.0,)
    rate_period_s: float = 21_600.0

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        if not 0 < self.load < 10:
            raise InvalidParameter("load", f"must be above 0 and below 10, but is {self.load:g}")
        if not 1 <= self.least_tasks <= self.most_tasks:
            raise InvalidParameter("least_tasks", f"must be from 1 to most_tasks, but is {self.least_tasks}")
        if self.shape not in SHAPES:
            raise InvalidParameter("shape", f"must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.jobs < 1:
            raise InvalidParameter("jobs", f"must be at least 1, but is {self.jobs}")
        if not self.most_task_s > 60:
            raise InvalidParameter("most_task_s", f"must be above 60, but is {self.most_task_s:g}")
        if not 0 < self.estimate_factor < 1000:
            raise InvalidParameter(
                "estimate_factor", f"must be above 0 and below 1000, but is {self.estimate_factor:g}"
            )
        for name in ("estimate_error", "estimate_missing"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidParameter(name, f"must be from 0 to 1, but is {getattr(self, name):g}")
        if not self.rate_factors or min(self.rate_factors) <= 0:
            raise InvalidParameter("rate_factors", "must be numbers above 0")
        if not self.rate_period_s > 0:
            raise InvalidParameter("rate_period_s", f"must be above 0, but is {self.rate_period_s:g}")
        if not self.cores or min(self.cores) < 1:
            raise InvalidParameter("cores", "must be numbers from 1 on")


def runtimes(workload: Workload, count: int, generator: np.random.Generator) -> Floats:
    """Runtimes of tasks in seconds, between a minute and the most."""
    least, most = 60.0, workload.most_task_s
    if workload.shape == "uniform":
        return generator.uniform(least, most, count)
    if workload.shape == "gaussian":
        return np.clip(generator.normal((least + most) / 2, (most - least) / 6, count), least, most)
    # Bounded Pareto of shape 1.1, by its inverse.
    ratio = (least / most) ** 1.1
    found: Floats = least / (1.0 - generator.random(count) * (1.0 - ratio)) ** (1.0 / 1.1)
    return found


def estimates(workload: Workload, runtimes_s: Floats, generator: np.random.Generator) -> Floats:
    """What is said of tasks with these runtimes; the same draws whatever the workload says of errors."""
    errors = workload.estimate_error * generator.uniform(-1.0, 1.0, len(runtimes_s))
    missing = generator.random(len(runtimes_s)) < workload.estimate_missing
    found: Floats = np.where(missing, FALLBACK_S, runtimes_s * workload.estimate_factor * (1.0 + errors))
    return found


def at_rates(workload: Workload, even_s: Floats, span_s: float) -> Floats:
    """Arrivals that are even over a window, moved so that they come at the workload's rates; in order as before."""
    edges_s = np.append(np.arange(0.0, span_s, workload.rate_period_s), span_s)
    factors = np.resize(np.asarray(workload.rate_factors), len(edges_s) - 1)
    expected = np.append(0.0, np.cumsum(factors * np.diff(edges_s)))
    found: Floats = np.interp(even_s / span_s * expected[-1], expected, edges_s)
    return found


def jobs(workload: Workload, pool: Pool, start_s: float, seed: int, held_share: float = 1.0) -> tuple[JobBatch, float]:
    """The jobs and the end of the window in which they come: Poisson arrivals, given how many there are.

    :param held_share: of the pool's machines, those that are held at a time: the load is one on so many mean machines.
    :raises InvalidParameter: the pool's changes end before the window does.
    """
    generator = np.random.default_rng([seed, 1])
    tasks: Indices = generator.integers(workload.least_tasks, workload.most_tasks + 1, workload.jobs)
    cores = generator.choice(np.asarray(workload.cores, np.float64), workload.jobs)
    values = runtimes(workload, int(tasks.sum()), generator)
    work = float((values * np.repeat(cores, tasks)).sum())
    span_s = 3600.0
    for _ in range(20):
        span_s = work / (workload.load * held_share * pool.mean_cores(start_s, start_s + span_s))
    if start_s + span_s > pool.until_s:
        raise InvalidParameter("load", f"of {workload.load:g} needs {span_s / 3600:.1f} h, and the pool's changes end")
    submit_s = np.sort(generator.uniform(start_s, start_s + span_s, workload.jobs))
    if len(workload.rate_factors) > 1:
        submit_s = start_s + at_rates(workload, submit_s - start_s, span_s)
    count = workload.jobs
    said_s = estimates(workload, values, np.random.default_rng([seed, 3]))
    batch = EstimatedJobBatch(
        id=texts(f"job-{number}" for number in range(count)),
        group=same("", count),
        submit_s=submit_s,
        cpu_cores=cores,
        memory_mib=unknown(count),
        priority=hints(count),
        runtime_s=unknown(count),
        requested_s=unknown(count),
        task_runtime_s=Ragged.of(values, tasks),
        task_estimate_s=Ragged.of(said_s, tasks),
    )
    return batch, start_s + span_s
