"""Jobs of long, uninterruptible tasks, as many as make a load on a pool (Agarwal et al. 2023 §4.1)."""

from __future__ import annotations

import math
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

#: Runtimes: even between a minute and the most (Seismic A), bell-shaped between them, or bounded Pareto (Genomics),
#: whose bounds are as far apart, and so high that its mean is that of the others.
SHAPES: Final = ("uniform", "gaussian", "pareto")
#: What the match maker counts with where nothing is said.
FALLBACK_S: Final = MatchOptions().fallback_s
#: Jobs that are drawn at once until a window is full.
_BLOCK: Final = 64
#: Of the bounded Pareto distribution.
_TAIL: Final = 1.1


@dataclass(frozen=True, slots=True)
class Workload:
    """What the paper leaves open is a setting: how many tasks a job has, and of how many cores.

    :param load: work / (mean harvested cores in the window in which the jobs come), as a share.
    :param rate_factors: jobs come so many times as often, each for ``rate_period_s``, in turn from the beginning of
        the window on (Agarwal et al. 2023 §4.4: 1 and 4, 6 hours); the load is the mean of the whole window.
    :param window_s: jobs come for so long, as many as make the load, to the nearest; None: ``jobs`` of them come, for
        as long as makes the load.
    :param edge_s: of a window's beginning and end, so much is not measured: of work what is done between counts, and of
        jobs those that come between. The machines are empty when the window begins, and empty again after it.
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
    window_s: float | None = None
    edge_s: float = 0.0

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
        if self.window_s is not None and not self.window_s > 0:
            raise InvalidParameter("window_h", f"must be above 0, but is {self.window_s / 3600:g}")
        if self.edge_s and not 0 < 2 * self.edge_s < (self.window_s or 0.0):
            raise InvalidParameter("edge_h", f"must be less than half of window_h, but is {self.edge_s / 3600:g}")
        if not self.cores or min(self.cores) < 1:
            raise InvalidParameter("cores", "must be numbers from 1 on")

    def measured(self, start_s: float, until_s: float) -> tuple[float, float]:
        """What is measured of a run in which jobs come from one time to the other: from when to when."""
        return (start_s + self.edge_s, until_s - self.edge_s) if self.edge_s else (start_s, math.inf)

    def warnings(self, span_s: float) -> tuple[str, ...]:
        """What is to be said where jobs come for so many seconds: sentences."""
        twice_s = 2 * len(self.rate_factors) * self.rate_period_s
        if len(set(self.rate_factors)) == 1 or round(span_s) >= twice_s:
            return ()
        return (f"jobs come for less than {twice_s / 3600:g} h, two periods of their rate, which hardly alternates",)


def runtimes(workload: Workload, count: int, generator: np.random.Generator) -> Floats:
    """Runtimes of tasks in seconds, of one mean whatever their shape."""
    least, most = 60.0, workload.most_task_s
    if workload.shape == "uniform":
        return generator.uniform(least, most, count)
    if workload.shape == "gaussian":
        return np.clip(generator.normal((least + most) / 2, (most - least) / 6, count), least, most)
    # Bounded Pareto, by its inverse; its mean is so many times its least value.
    ratio = least / most
    times = _TAIL / (_TAIL - 1.0) * (1.0 - ratio ** (_TAIL - 1.0)) / (1.0 - ratio**_TAIL)
    drawn: Floats = (1.0 - generator.random(count) * (1.0 - ratio**_TAIL)) ** (-1.0 / _TAIL)
    found: Floats = drawn * (least + most) / 2 / times
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


def _drawn(workload: Workload, count: int, generator: np.random.Generator) -> tuple[Indices, Floats, Floats]:
    """So many jobs: tasks and cores of each, and the runtimes of all their tasks in seconds."""
    tasks: Indices = generator.integers(workload.least_tasks, workload.most_tasks + 1, count)
    cores = generator.choice(np.asarray(workload.cores, np.float64), count)
    return tasks, cores, runtimes(workload, int(tasks.sum()), generator)


def _filling(workload: Workload, work: float, generator: np.random.Generator) -> tuple[Indices, Floats, Floats]:
    """As many jobs as come nearest to so many core-seconds, at least one; those of less work are the first of more."""
    parts: list[tuple[Indices, Floats, Floats]] = []
    done = np.zeros(1)
    while done[-1] <= work:
        parts.append(_drawn(workload, _BLOCK, generator))
        tasks, cores, values = parts[-1]
        done = np.append(done, done[-1] + np.cumsum(np.add.reduceat(values, np.cumsum(tasks) - tasks) * cores))
    count = int(np.abs(done[1:] - work).argmin()) + 1
    tasks, cores, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return tasks[:count], cores[:count], values[: tasks[:count].sum()]


def jobs(workload: Workload, pool: Pool, start_s: float, seed: int, held_share: float = 1.0) -> tuple[JobBatch, float]:
    """The jobs and the end of the window in which they come: Poisson arrivals, given how many there are.

    :param held_share: of the pool's machines, those that are held at a time: the load is one on so many mean machines.
    :raises InvalidParameter: the pool's changes end before the window does.
    """
    generator = np.random.default_rng([seed, 1])
    load = workload.load * held_share
    if workload.window_s is None:
        tasks, cores, values = _drawn(workload, workload.jobs, generator)
        work = float((values * np.repeat(cores, tasks)).sum())
        span_s = 3600.0
        for _ in range(20):
            span_s = work / (load * pool.mean_cores(start_s, start_s + span_s))
        if start_s + span_s > pool.until_s:
            problem = f"of {workload.load:g} needs {span_s / 3600:.1f} h, and the pool's changes end"
            raise InvalidParameter("load", problem)
    else:
        span_s = workload.window_s
        if start_s + span_s > pool.until_s:
            raise InvalidParameter("window_h", f"of {span_s / 3600:g} ends after the pool's changes")
        work = load * pool.mean_cores(start_s, start_s + span_s) * span_s
        tasks, cores, values = _filling(workload, work, generator)
    count = len(tasks)
    submit_s = np.sort(generator.uniform(start_s, start_s + span_s, count))
    if len(workload.rate_factors) > 1:
        submit_s = start_s + at_rates(workload, submit_s - start_s, span_s)
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
