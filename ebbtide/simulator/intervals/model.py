"""Interval-aware scheduling as a model of experiments: machines that are switched off, jobs.

See docs/research/interval-aware.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import INPUTS, POLICY, Input, Outcome
from ebbtide.simulator.inputs.batches import JobBatch
from ebbtide.simulator.intervals.arrays import SHORTER_H
from ebbtide.simulator.intervals.history import big_from, intervals
from ebbtide.simulator.intervals.platform import Carbon, Changes, Seen
from ebbtide.simulator.intervals.policy import HEURISTICS, Options, policy
from ebbtide.simulator.jobs.columns import Floats
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.facts import Facts, known
from ebbtide.simulator.jobs.intake import rounded_up
from ebbtide.simulator.jobs.model import MOST_CORES, MOST_MACHINES, Made, Walk, made
from ebbtide.simulator.jobs.results import Results
from ebbtide.simulator.jobs.rows import JobRowsTable
from ebbtide.simulator.jobs.settings import LOOKS, REQUEUE, Settings

_DAY_S: Final = 86_400.0
#: Jobs that are looked at to find out which are big, and which are long.
_LOOKED_AT: Final = 400_000
#: Streams of a seed's chance: the jobs and the capacity of the run, the jobs and the intervals that come before it.
_RUN_JOBS: Final = 0
_RUN_CAPACITY: Final = 1
_PAST_JOBS: Final = 2
_PAST_CAPACITY: Final = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one case.

    :param mean: share of the machines that is on, of which made jobs want ``load``.
    :param stable_fill: how full big jobs make the stable machines; it says which jobs are big.
    """

    heuristics: str
    machines: Machines
    jobs: Made | Input
    days: float
    platform: Walk | Carbon
    every_s: float
    least: float
    mean: float
    #: None: as the trace has it.
    load: float | None
    stable_fill: float
    aggressiveness: float
    bands: int
    history_days: float
    learns: bool
    engine: Settings
    rows: bool = False


#: What a run gives.
METRICS: Final = (
    *("goodput", "wasted_share", "idle_share", "kills", "kills_all", "failure_rate", "jobs_measured"),
    *(f"kills_under_{hours:g}_h" for hours in SHORTER_H),
    *("intervals", "interval_mean_h", "interval_variation"),
    *("jobs", "jobs_left", "jobs_refused", "refused_work_share", "offered_load", "offered_share", "big_core_h"),
    "intervals_known",
    *("wait_mean_s", "wait_p50_s", "wait_p90_s", "wait_p95_s", "wait_p99_s"),
    *("completion_mean_s", "slowdown_mean", "changes"),
)


class IntervalsModel:
    """See docs/research/interval-aware.md for the settings."""

    name: Final = "intervals"
    version: Final = 2
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> Case:
        """Raises InvalidParameter."""
        g = Given(given)
        trace, carbon = g.inputs("jobs", "carbon")
        jobs: Made | Input = made(g, 0.8) if trace is None else trace
        if isinstance(jobs, Made) and jobs.tasks != (1, 1):
            raise InvalidParameter("most_tasks", f"must be 1 here, but is {jobs.tasks[1]}")
        per_h = g.number("changes_per_h", 1.0, above=0)
        least = g.number("capacity_least", 0.4, least=0, most=1)
        mean = g.number("capacity_start", 0.7, above=0, least=least, most=1)
        platform: Walk | Carbon
        if carbon is not None:
            if mean >= 1:
                raise g.wrong("capacity_start", f"must be below 1 with a series of carbon, but is {mean:g}")
            platform = Carbon(carbon, g.number("carbon_from_s", 0.0, least=0), mean, 3600.0 / per_h)
        else:
            platform = Walk(
                interval_s=3600.0 / per_h,
                step=g.number("capacity_step", 0.15, above=0),
                least=least,
                most=g.number("capacity_most", 1.0, above=least, most=1),
                start=mean,
                stays=g.flag("capacity_stays", True),
            )
        days = g.number("days", above=0)
        case = Case(
            heuristics=g.choice(POLICY, tuple(HEURISTICS), "ias"),
            machines=Machines(
                g.whole("machines", 1000, least=1, most=MOST_MACHINES),
                g.whole("cpu_cores", 24, least=1, most=MOST_CORES),
            ),
            jobs=jobs,
            days=days,
            platform=platform,
            every_s=3600.0 / per_h,
            least=least,
            mean=mean,
            load=jobs.load if isinstance(jobs, Made) else None,
            stable_fill=g.number("stable_fill", 1.1, least=0),
            aggressiveness=g.number("aggressiveness", 0.6, least=0, most=1),
            bands=g.whole("bands", 1, least=1, most=10_000),
            history_days=g.number("history_days", 0.0 if carbon is not None else 365.0, least=0),
            learns=g.flag("learns", True),
            engine=Settings(
                memory=False,
                by_length=True,
                requeue=g.choice("requeue", tuple(REQUEUE), "tail"),
                looks=g.choice("looks", tuple(LOOKS), "instants"),
                checkpoint_every_s=g.number("checkpoint_every_s", 0.0, least=0),
                checkpoint_cost_s=g.number("checkpoint_cost_s", 0.0, least=0),
                from_s=g.number("from_s", -math.inf),
                to_s=g.number("to_s", days * _DAY_S),
                validate=g.flag("validate", False),
            ),
            rows=g.flag("rows", False),
        )
        if case.engine.from_s >= days * _DAY_S:
            raise InvalidParameter(
                "from_s", f"must be before the end of the {days:g} days, but is {case.engine.from_s:g}"
            )
        if carbon is not None and case.history_days:
            raise InvalidParameter("history_days", "must be 0 with a series: there is no walk to make a history of")
        g.end()
        return case

    def prepare(self, settings: Sequence[Case], progress: Callable[[float], None]) -> dict[Any, Facts]:
        """What is in each trace: whether it fits and the windows lie in it; and of jobs, the load that they make."""
        found: dict[Any, Facts] = {}
        checked: list[Carbon] = []
        for number, case in enumerate(settings):
            if isinstance(case.jobs, Input):
                facts = found[_key(case)] = _facts(case, case.jobs)
                facts.of_one_task_each()
                if not facts.core_s:
                    raise InvalidParameter(f"{INPUTS}.jobs", "has no job that fits on a machine and runs at all")
                facts.within(case.engine.from_s, case.engine.to_s)
            if isinstance(case.platform, Carbon) and case.platform not in checked:
                case.platform.shares(case.days * _DAY_S)
                checked.append(case.platform)
            progress((number + 1) / len(settings))
        return found

    def run(self, settings: Case, seed: int, prepared: Any, progress: Callable[[float], None]) -> Outcome:
        """One run: the same jobs and switches for all policies of a seed."""
        facts = None
        if isinstance(settings.jobs, Input):
            facts = (prepared or {}).get(_key(settings)) or _facts(settings, settings.jobs)
        return simulate(settings, seed, progress, facts=facts)


MODEL: Final = IntervalsModel()


def _key(case: Case) -> Any:
    path = str(case.jobs.path) if isinstance(case.jobs, Input) else ""
    return path, case.days, case.machines.cpu_cores, case.engine.from_s, case.engine.to_s, case.engine.memory


def _facts(case: Case, jobs: Input) -> Facts:
    window_s = case.engine.from_s, case.engine.to_s
    return known(jobs, case.days * _DAY_S, case.machines.cpu_cores, window_s, case.engine.memory)


def simulate(
    case: Case, seed: int, progress: Callable[[float], None], compile: bool = True, facts: Facts | None = None
) -> Outcome:
    """One run, whose trace of jobs, if it has one, is as ``facts`` say. Raises InvalidParameter."""
    load = case.load
    if load is None:
        assert facts is not None
        load = facts.mean_cores / (case.mean * case.machines.count * case.machines.cpu_cores)
    options = _options(case, seed, load)
    rows = JobRowsTable() if case.rows else None
    measured = _Measured(case.engine.from_s, case.engine.to_s, case.machines.cpu_cores)
    jobs = measured.counted(_jobs(case, seed, _RUN_JOBS))
    rng = np.random.default_rng([seed, _RUN_CAPACITY])
    changes = Changes(case.platform, case.machines, case.days * _DAY_S, case.engine.to_s, rng)
    engine = Engine(
        jobs if rows is None else rows.named(jobs),
        None,
        changes.batches(lambda: engine),
        policy=policy(options),
        settings=case.engine,
        seed=seed,
        most_cores=case.machines.cpu_cores,
        done=None if rows is None else rows.take,
        compile=compile,
    )
    found = engine.run(lambda now_s: progress(min(now_s / changes.until_s, 1.0)))
    tables = {} if rows is None else {"jobs": rows.columns()}
    beyond = () if facts is None else facts.beyond(case.engine.to_s)
    warnings = (*found.not_done(case.machines.cpu_cores), *beyond, *changes.beyond())
    return Outcome(_figures(found, changes.seen_by(engine), options, load, measured), tables, warnings)


@dataclass
class _Measured:
    """Counts the jobs that are submitted within what is measured, and their work; not those that are refused."""

    from_s: float
    to_s: float
    most_cores: int
    jobs: int = 0
    core_s: float = 0.0

    def counted(self, batches: Iterable[JobBatch]) -> Iterator[JobBatch]:
        for batch in batches:
            cores = rounded_up(batch.cpu_cores)
            within = (batch.submit_s >= self.from_s) & (batch.submit_s < self.to_s) & (cores <= self.most_cores)
            self.jobs += int(within.sum())
            tasks = batch.task_runtime_s
            self.core_s += float((tasks.means() * tasks.lengths * cores)[within].sum())
            yield batch


def _jobs(case: Case, seed: int, which: int) -> Iterable[JobBatch]:
    if not isinstance(case.jobs, Made):
        return case.jobs.batches(JobBatch, "jobs", from_first=True)
    made_jobs = case.jobs
    if which == _PAST_JOBS:
        # As many as are looked at, however long the run is: their tail is heavy.
        made_jobs = replace(made_jobs, until_s=100 * made_jobs.until_s)
    on_cores = case.mean * case.machines.count * case.machines.cpu_cores
    return made_jobs.batches(np.random.default_rng([seed, which]), on_cores, case.machines.cpu_cores)


def _options(case: Case, seed: int, load: float) -> Options:
    """The policy's thresholds, learned from other jobs and other intervals than those of the run; from a trace of jobs
    from the run's own, so that H1 and H3 know how long jobs are that are still to come.
    """
    stable = int(case.least * case.machines.count + 1e-9) if isinstance(case.platform, Walk) else 0
    core_s, runtime_s = _seen(_jobs(case, seed, _PAST_JOBS), case.machines.cpu_cores)
    past = []
    if isinstance(case.platform, Walk) and case.history_days:
        past = [case.platform.shares(np.random.default_rng([seed, _PAST_CAPACITY]), case.history_days * _DAY_S)]
    # Big jobs fill the stable machines; of the work, that is this share (the thesis does not say its threshold).
    share = case.stable_fill * case.least / (load * case.mean)
    return Options(
        heuristics=case.heuristics,
        stable=stable,
        every_s=case.every_s,
        big_core_s=big_from(core_s, share if stable else 0.0),
        long_s=float(np.percentile(runtime_s, 90)),
        aggressiveness=case.aggressiveness,
        ended=intervals(past, case.machines.count, stable, case.every_s, case.bands),
        learns=case.learns,
    )


def _figures(found: Results, seen: Seen, options: Options, load: float, measured: _Measured) -> dict[str, float]:
    there = found.there_core_s
    killed = seen.killed.tolist()
    count, hours = float(seen.met.sum()), np.arange(len(seen.met)) * options.every_s / 3600
    mean_h = float(seen.met @ hours) / count if count else math.nan
    spread_h = math.sqrt(float(seen.met @ (hours - mean_h) ** 2) / count) if count else math.nan
    return {
        "goodput": found.goodput,
        "wasted_share": found.lost_core_s / there if there else math.nan,
        "idle_share": 1.0 - (found.useful_core_s + found.lost_core_s) / there if there else math.nan,
        "kills": killed[0],
        "kills_all": float(seen.kills),
        "failure_rate": killed[0] / measured.jobs if measured.jobs else math.nan,
        "jobs_measured": float(measured.jobs),
        **{f"kills_under_{limit:g}_h": kills for limit, kills in zip(SHORTER_H, killed[1:], strict=True)},
        "intervals": count,
        "interval_mean_h": mean_h,
        "interval_variation": spread_h / mean_h if count else math.nan,
        "jobs": float(found.jobs),
        "jobs_left": float(found.jobs_left),
        "jobs_refused": float(found.jobs_refused),
        "refused_work_share": found.refused_work_share,
        "offered_load": load,
        "offered_share": measured.core_s / there if there else math.nan,
        "big_core_h": options.big_core_s / 3600,
        "intervals_known": float(options.ended.sum()),
        **{
            name: found.measures[name]
            for name in ("wait_mean_s", "wait_p50_s", "wait_p90_s", "wait_p95_s", "wait_p99_s")
        },
        "completion_mean_s": found.measures["completion_mean_s"],
        "slowdown_mean": found.measures["slowdown_mean"],
        "changes": float(seen.changes),
    }


def _seen(batches: Iterable[JobBatch], most_cores: int) -> tuple[Floats, Floats]:
    """Work and runtimes of tasks, of the first jobs that are not refused."""
    core_s, runtime_s, count = [], [], 0
    for batch in batches:
        tasks = batch.task_runtime_s
        cores = np.repeat(rounded_up(batch.cpu_cores), tasks.lengths)
        fit = cores <= most_cores
        values = tasks.values[tasks.offsets[0] : tasks.offsets[-1]][fit]
        core_s.append(values * cores[fit])
        runtime_s.append(values)
        count += len(values)
        if count >= _LOOKED_AT:
            break
    if not count:
        raise InvalidParameter("jobs", "are none")
    return np.concatenate(core_s), np.concatenate(runtime_s)
