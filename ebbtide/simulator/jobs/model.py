"""The job engine as a model of experiments: jobs from a trace or made, machines constant, walking or from a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY, Input, Outcome
from ebbtide.simulator.generators import arrivals, capacity
from ebbtide.simulator.generators.durations import BoundedPareto, ClampedZipf, Durations, Gaussian, Uniform
from ebbtide.simulator.generators.quantiles import SURF_HALF_YEAR
from ebbtide.simulator.inputs.batches import CapacityBatch, JobBatch
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.nodes import KINDS
from ebbtide.simulator.jobs.settings import DISCIPLINES, ESTIMATES, KILLS, REQUEUE, Settings

_DURATIONS: Final = ("uniform", "gaussian", "pareto", "zipf", "surf")
_DAY_S: Final = 86400.0
#: More are a slip, and would take all memory before anybody sees it.
MOST_MACHINES: Final = 10_000_000
MOST_CORES: Final = 100_000


@dataclass(frozen=True, slots=True)
class Made:
    """Jobs that are made: Poisson arrivals for so long, so many that they want ``load`` of the mean capacity."""

    durations: Durations
    load: float
    until_s: float
    job_cores: tuple[float, ...]
    tasks: tuple[int, int]

    def batches(self, rng: np.random.Generator, mean_cores: float) -> Iterator[JobBatch]:
        work = self.durations.mean_s() * float(np.mean(self.job_cores)) * sum(self.tasks) / 2
        times = arrivals.poisson(rng, self.load * mean_cores / work, self.until_s)
        return arrivals.jobs(rng, times, self.durations, self.job_cores, self.tasks)


@dataclass(frozen=True, slots=True)
class Walk:
    """Capacity as in Wijayawardana 2025 §4.1: a share of machines is on and walks; the last on is the first off."""

    interval_s: float
    step: float
    least: float
    most: float
    start: float

    def __post_init__(self) -> None:
        """Raises InvalidParameter, by the names of the settings."""
        if not self.least < self.most:
            raise InvalidParameter("capacity_most", f"must be above capacity_least, but is {self.most:g}")
        if not self.least <= self.start <= self.most:
            raise InvalidParameter(
                "capacity_start", f"must be from capacity_least to capacity_most, but is {self.start:g}"
            )

    def batches(self, rng: np.random.Generator, until_s: float, machines: Machines) -> Iterator[CapacityBatch]:
        shares = capacity.random_walk(
            rng, until_s, interval_s=self.interval_s, step=self.step, least=self.least, most=self.most, start=self.start
        )
        memory_mib = math.inf if machines.memory_mib is None else float(machines.memory_mib)
        yield from capacity.machines([shares], machines.count, machines.cpu_cores, min(memory_mib, 2.0**39))


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one case."""

    policy: str
    engine: Settings
    machines: Machines
    jobs: Made | Input
    changes: Walk | Input | None


class JobsModel:
    """See docs/internals/jobs.md for the settings."""

    name: Final = "jobs"

    def settings(self, given: Mapping[str, Any]) -> Case:
        g = Given(given)
        trace, series = g.inputs("jobs", "capacity")
        jobs: Made | Input = made(g) if trace is None else trace
        changes: Walk | Input | None = series
        if g.choice("capacity", ("constant", "walk"), "constant") == "walk":
            if changes is not None:
                raise InvalidParameter("capacity", "is said twice: as walk, and by an input")
            changes = Walk(
                interval_s=g.number("capacity_interval_s", 3600.0, above=0.0),
                step=g.number("capacity_step", 0.15, above=0.0),
                least=g.number("capacity_least", 0.4, least=0.0, most=1.0),
                most=g.number("capacity_most", 1.0, least=0.0, most=1.0),
                start=g.number("capacity_start", 0.7, least=0.0, most=1.0),
            )
            if isinstance(jobs, Input):
                raise InvalidParameter("capacity", "can walk only where jobs are made: a trace does not say its end")
        engine = _engine(g)
        if isinstance(jobs, Made) and engine.from_s >= jobs.until_s:
            raise InvalidParameter("from_s", f"must be before the last job, but is {engine.from_s:g}")
        memory_mib = g.whole("memory_mib", 0, least=0)
        case = Case(
            policy=g.choice(POLICY, tuple(KINDS), "best-fit"),
            engine=engine,
            machines=Machines(
                g.whole("machines", least=1, most=MOST_MACHINES),
                g.whole("cpu_cores", least=1, most=MOST_CORES),
                memory_mib or None,
            ),
            jobs=jobs,
            changes=changes,
        )
        g.end()
        return case

    def prepare(self, settings: Sequence[Case], progress: Callable[[float], None]) -> None:
        """Nothing: traces stream through each run."""

    def run(self, settings: Case, seed: int, prepared: Any, progress: Callable[[float], None]) -> Outcome:
        job_seed, change_seed, policy_seed = np.random.SeedSequence(seed).spawn(3)
        machines: Machines | None = settings.machines
        changes: Iterator[CapacityBatch] | None = None
        mean_cores = float(settings.machines.count * settings.machines.cpu_cores)
        jobs, end_s = settings.jobs, math.nan
        if isinstance(jobs, Made):
            end_s = jobs.until_s
        if isinstance(settings.changes, Walk):
            rng = np.random.default_rng(change_seed)
            mean_cores *= settings.changes.start
            changes, machines = settings.changes.batches(rng, end_s, settings.machines), None
        elif settings.changes is not None:
            # An input says all that there is; `machines` only how much is wanted of it.
            changes, machines = settings.changes.batches(CapacityBatch, "capacity"), None
        if isinstance(jobs, Made):
            made = jobs.batches(np.random.default_rng(job_seed), mean_cores)
        else:
            made = jobs.batches(JobBatch, "jobs")
        engine = Engine(
            made,
            machines,
            changes,
            policy=settings.policy,
            settings=settings.engine,
            seed=int(policy_seed.generate_state(1)[0]),
            most_cores=None if isinstance(settings.changes, Input) else settings.machines.cpu_cores,
        )
        found = engine.run(lambda now_s: progress(min(now_s / end_s, 1.0)) if end_s > 0 else None)
        return Outcome(found.metrics)


def made(g: Given) -> Made:
    """Jobs that are made, by the settings of docs/internals/jobs.md. Raises InvalidParameter."""
    kind = g.choice("durations", _DURATIONS, "surf")
    durations: Durations = SURF_HALF_YEAR
    if kind == "uniform":
        durations = Uniform(g.number("least_s"), g.number("most_s"))
    elif kind == "gaussian":
        durations = Gaussian(g.number("centre_s"), g.number("spread_s"), g.number("least_s", 1.0))
    elif kind == "pareto":
        durations = BoundedPareto(g.number("shape"), g.number("least_s"), g.number("most_s"))
    elif kind == "zipf":
        durations = ClampedZipf(g.number("exponent"))
    cores = g.value("job_cores", [1.0, 2.0, 4.0, 8.0])
    if not isinstance(cores, list | tuple) or not all(map(_is_size, cores)) or not cores:
        raise InvalidParameter(
            "job_cores", f"must be a list of numbers above 0 and at most {MOST_CORES}, but is {cores!r}"
        )
    tasks = (g.whole("least_tasks", 1, least=1), g.whole("most_tasks", 1, least=1))
    if tasks[1] < tasks[0]:
        raise InvalidParameter("most_tasks", f"must be at least least_tasks, but is {tasks[1]}")
    return Made(
        durations,
        load=g.number("load", above=0.0),
        until_s=g.number("days", above=0.0) * _DAY_S,
        job_cores=tuple(float(x) for x in cores),
        tasks=tasks,
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_CORES


def _engine(g: Given) -> Settings:
    return Settings(
        discipline=g.choice("discipline", tuple(DISCIPLINES), "conserving"),
        kills=g.choice("kills", tuple(KILLS), "oldest"),
        requeue=g.choice("requeue", tuple(REQUEUE), "tail"),
        estimates=g.choice("estimates", ESTIMATES, "exact"),
        priorities=g.flag("priorities", False),
        memory=g.flag("memory", True),
        depth=g.whole("depth", 0, least=0),
        checkpoint_every_s=g.number("checkpoint_every_s", 0.0, least=0.0),
        checkpoint_cost_s=g.number("checkpoint_cost_s", 0.0, least=0.0),
        from_s=g.number("from_s", -math.inf),
        to_s=g.number("to_s", math.inf),
        short_s=g.number("short_s", 10.0, least=0.0),
        validate=g.flag("validate", False),
    )


MODEL: Final = JobsModel()
