"""The job engine as a model of experiments: jobs from a trace or made, machines constant, walking or from a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import REQUIRED, Given
from ebbtide.simulator.experiments.model import POLICY, Input, Outcome
from ebbtide.simulator.generators import arrivals, capacity
from ebbtide.simulator.generators.durations import BoundedPareto, ClampedZipf, Durations, Gaussian, Uniform
from ebbtide.simulator.generators.quantiles import SURF_HALF_YEAR
from ebbtide.simulator.inputs.batches import CapacityBatch, JobBatch, SeriesBatch
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.facts import STAY, Facts, Supply, since, supplied
from ebbtide.simulator.jobs.facts import known as known_of
from ebbtide.simulator.jobs.nodes import KINDS
from ebbtide.simulator.jobs.results import METRICS
from ebbtide.simulator.jobs.rows import JobRowsTable
from ebbtide.simulator.jobs.settings import DISCIPLINES, ESTIMATES, KILLS, LOOKS, REQUEUE, Settings

_DURATIONS: Final = ("uniform", "gaussian", "pareto", "zipf", "surf")
_DAY_S: Final = 86400.0
#: Jobs may run on after the last one came for this share of the time before, without a word.
_DRAINING: Final = 0.1
#: More are a slip, and would take all memory before anybody sees it.
MOST_MACHINES: Final = 10_000_000
MOST_CORES: Final = 100_000


@dataclass(frozen=True, slots=True)
class Made:
    """Jobs that are made: Poisson arrivals for so long, so many that they want ``load`` of given cores."""

    durations: Durations
    load: float
    until_s: float
    job_cores: tuple[float, ...]
    tasks: tuple[int, int]

    def batches(self, rng: np.random.Generator, cores: float, most_cores: float = math.inf) -> Iterator[JobBatch]:
        """As many as want the load, without the work of those that want more than ``most_cores``: they are refused.

        :raises InvalidParameter: all do.
        """
        if min(self.job_cores) > most_cores:
            raise InvalidParameter("job_cores", f"must have one of at most the {most_cores:g} cores of a machine")
        fitting = [one if one <= most_cores else 0.0 for one in self.job_cores]
        work = self.durations.mean_s() * float(np.mean(fitting)) * sum(self.tasks) / 2
        times = arrivals.poisson(rng, self.load * cores / work, self.until_s)
        return arrivals.jobs(rng, times, self.durations, self.job_cores, self.tasks)


@dataclass(frozen=True, slots=True)
class Walk:
    """Capacity as in Wijayawardana 2025 §4.1: a share of machines is on and walks; the last on is the first off."""

    interval_s: float
    step: float
    least: float
    most: float
    start: float
    stays: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidParameter, by the names of the settings."""
        if not self.least < self.most:
            raise InvalidParameter("capacity_most", f"must be above capacity_least, but is {self.most:g}")
        if not self.least <= self.start <= self.most:
            raise InvalidParameter(
                "capacity_start", f"must be from capacity_least to capacity_most, but is {self.start:g}"
            )

    def shares(self, rng: np.random.Generator, until_s: float) -> SeriesBatch:
        """Of the machines that are on."""
        return capacity.random_walk(
            rng,
            until_s,
            interval_s=self.interval_s,
            step=self.step,
            least=self.least,
            most=self.most,
            start=self.start,
            stays=self.stays,
        )

    def batches(self, rng: np.random.Generator, until_s: float, machines: Machines) -> Iterator[CapacityBatch]:
        shares = self.shares(rng, until_s)
        memory_mib = math.inf if machines.memory_mib is None else float(machines.memory_mib)
        yield from capacity.machines([shares], machines.count, machines.cpu_cores, min(memory_mib, 2.0**39))


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one case."""

    policy: str
    engine: Settings
    #: None: an input of capacity says which there are.
    machines: Machines | None
    jobs: Made | Input
    changes: Walk | Input | None
    #: Of a trace of capacity, what falls on time 0.
    capacity_from_s: float = 0.0
    rows: bool = False


class JobsModel:
    """See docs/internals/jobs.md for the settings."""

    name: Final = "jobs"
    metrics: Final = METRICS

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
                stays=g.flag("capacity_stays", True),
            )
        engine = _engine(g)
        if isinstance(jobs, Made) and engine.from_s >= jobs.until_s:
            raise InvalidParameter("from_s", f"must be before the last job, but is {engine.from_s:g}")
        case = Case(
            policy=g.choice(POLICY, tuple(KINDS), "best-fit"),
            engine=engine,
            # An input says all that there is. Who states them all the same states of what `load` is a share.
            machines=None if series is not None and "machines" not in g and "cpu_cores" not in g else _machines(g),
            jobs=jobs,
            changes=changes,
            capacity_from_s=g.number("capacity_from_s", 0.0, least=0.0) if series is not None else 0.0,
            rows=g.flag("rows", False),
        )
        g.end()
        return case

    def prepare(self, settings: Sequence[Case], progress: Callable[[float], None]) -> dict[Any, Any]:
        """What is in each trace, which says whether the windows lie in it; the traces stream through each run."""
        found: dict[Any, Any] = {}
        for number, case in enumerate(settings):
            facts = _facts(case, found)
            if facts is not None:
                facts.within(case.engine.from_s, case.engine.to_s)
                if isinstance(case.changes, Walk) and not facts.last_s:
                    raise InvalidParameter("capacity", "cannot walk: all jobs of the trace come at the same moment")
            supply = _supply(case, facts, found)
            if facts is not None or supply is not None:
                progress((number + 1) / len(settings))
        return found

    def run(self, settings: Case, seed: int, prepared: Any, progress: Callable[[float], None]) -> Outcome:
        job_seed, change_seed, policy_seed = np.random.SeedSequence(seed).spawn(3)
        known = dict(prepared or {})
        facts = _facts(settings, known)
        supply = _supply(settings, facts, known)
        jobs = settings.jobs
        # Made jobs come for so long, those of a trace until its last one; then the walk stands still.
        end_s = jobs.until_s if isinstance(jobs, Made) else facts.last_s if facts is not None else math.nan
        machines, changes = settings.machines, settings.changes
        # Of which `load` is a share: of a trace its mean; of a walk what is on at its start.
        on_cores = supply.mean_cores if supply is not None else math.nan
        if machines is not None:
            on_cores = float(machines.count * machines.cpu_cores)
        stream: Iterator[CapacityBatch] | None = None
        if isinstance(changes, Walk):
            assert machines is not None
            on_cores *= changes.start
            stream = changes.batches(np.random.default_rng(change_seed), end_s, machines)
        elif changes is not None:
            stream = since(changes.batches(CapacityBatch, "capacity", from_first=True), settings.capacity_from_s)
        most_cores, most_mib = 1, None
        if supply is not None:
            most_cores, most_mib = supply.most_cores, supply.most_mib
        elif machines is not None:
            most_cores, most_mib = machines.cpu_cores, machines.memory_mib
        if not settings.engine.memory:
            most_mib = None
        if isinstance(jobs, Made):
            batches = jobs.batches(np.random.default_rng(job_seed), on_cores, most_cores)
        else:
            batches = jobs.batches(JobBatch, "jobs", from_first=True)
        rows = JobRowsTable() if settings.rows else None
        engine = Engine(
            batches if rows is None else rows.named(batches),
            machines if stream is None else None,
            stream,
            policy=settings.policy,
            settings=settings.engine,
            seed=int(policy_seed.generate_state(1)[0]),
            most_cores=most_cores,
            most_mib=most_mib,
            done=None if rows is None else rows.take,
        )
        found = engine.run(lambda now_s: progress(min(max(now_s / end_s, 0.0), 1.0)) if end_s > 0 else None)
        tables = {} if rows is None else {"jobs": rows.columns()}
        to_s = settings.engine.to_s
        beyond = () if facts is None else facts.beyond(to_s)
        # Without an end the window is as long as jobs come, and as they wait after the last one.
        ended_s = min(to_s, found.ended_s)
        drains = ended_s > (1.0 + _DRAINING) * end_s
        if supply is not None:
            beyond += supply.beyond(to_s if math.isfinite(to_s) else ended_s if drains else end_s)
        elif isinstance(changes, Walk) and drains:
            beyond += (f"the walk ends at {end_s:g} s, as jobs come no longer; from then to {ended_s:g} s {STAY}",)
        return Outcome(found.metrics, tables, (*found.not_done(most_cores, most_mib), *beyond))


def _machines(g: Given) -> Machines:
    memory_mib = g.whole("memory_mib", 0, least=0)
    return Machines(
        g.whole("machines", least=1, most=MOST_MACHINES),
        g.whole("cpu_cores", least=1, most=MOST_CORES),
        memory_mib or None,
    )


def _facts(case: Case, known: dict[Any, Any]) -> Facts | None:
    """What the trace of jobs is; None where they are made."""
    if isinstance(case.jobs, Made):
        return None
    # A window without an end is judged by the last job: one reading does for all of them.
    window_s = (case.engine.from_s, case.engine.to_s) if case.engine.to_s < math.inf else (-math.inf, math.inf)
    key = ("jobs", str(case.jobs.path), window_s, case.engine.memory)
    if key not in known:
        known[key] = known_of(case.jobs, window_s=window_s, memory=case.engine.memory)
    found: Facts = known[key]
    return found


def _supply(case: Case, facts: Facts | None, known: dict[Any, Any]) -> Supply | None:
    """What the trace of capacity gives while jobs come; None where there is none."""
    if not isinstance(case.changes, Input):
        return None
    until_s = case.jobs.until_s if isinstance(case.jobs, Made) else facts.last_s if facts is not None else math.inf
    terms = (case.capacity_from_s, until_s, case.engine.memory)
    key = ("capacity", str(case.changes.path), *terms)
    if key not in known:
        known[key] = supplied(case.changes, *terms)
    found: Supply = known[key]
    return found


def made(g: Given, load: Any = REQUIRED) -> Made:
    """Jobs that are made, by the settings of docs/internals/jobs.md. Raises InvalidParameter.

    :param load: its default.
    """
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
        raise InvalidParameter("job_cores", f"must be a list of whole numbers from 1 to {MOST_CORES}, but is {cores!r}")
    tasks = (g.whole("least_tasks", 1, least=1), g.whole("most_tasks", 1, least=1))
    if tasks[1] < tasks[0]:
        raise InvalidParameter("most_tasks", f"must be at least least_tasks, but is {tasks[1]}")
    return Made(
        durations,
        load=g.number("load", load, above=0.0),
        until_s=g.number("days", above=0.0) * _DAY_S,
        job_cores=tuple(float(x) for x in cores),
        tasks=tasks,
    )


def _is_size(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MOST_CORES and value % 1 == 0
    )


def _engine(g: Given) -> Settings:
    return Settings(
        discipline=g.choice("discipline", tuple(DISCIPLINES), "conserving"),
        kills=g.choice("kills", tuple(KILLS), "oldest"),
        requeue=g.choice("requeue", tuple(REQUEUE), "tail"),
        looks=g.choice("looks", tuple(LOOKS), "instants"),
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
