"""Waiting policies as a model of experiments: jobs, fixed machines, machines on demand.

See docs/research/waiting.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY, Input, Outcome
from ebbtide.simulator.inputs.batches import JobBatch
from ebbtide.simulator.jobs.engine import Machines
from ebbtide.simulator.jobs.facts import Facts, known
from ebbtide.simulator.jobs.model import MOST_CORES, MOST_MACHINES, Made, made
from ebbtide.simulator.jobs.rows import JobRowsTable
from ebbtide.simulator.waiting.meanwhile import table
from ebbtide.simulator.waiting.running import COUNTED, MODEL_METRICS, Terms, run
from ebbtide.simulator.waiting.schemes import SCHEMES, named

_MINUTE_S: Final = 60.0
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one case.

    :param sized_for: machines of which made jobs want ``load``, however many of them are there.
    """

    scheme: str
    machines: Machines
    jobs: Made | Input
    sized_for: int
    terms: Terms
    rows: bool = False


#: What a run gives.
METRICS: Final = (
    *("wait_mean_h", "delay_mean_h", "on_demand_share", "total_cost", "fixed_cost", "after_cost", "on_demand_cost"),
    *("on_demand_core_h", "tried_core_h", "fixed_utilisation", "waited_share", "wait_max_h", "wait_p99_h"),
    *("slowdown_mean", *COUNTED, "jobs", "jobs_refused", *MODEL_METRICS),
)


class WaitingModel:
    """See docs/research/waiting.md for the settings."""

    name: Final = "waiting"
    version: Final = 3
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> Case:
        """Raises InvalidParameter."""
        g = Given(given)
        (trace,) = g.inputs("jobs")
        jobs: Made | Input = made(g) if trace is None else trace
        if isinstance(jobs, Made) and jobs.tasks != (1, 1):
            raise InvalidParameter("most_tasks", f"must be 1 here, but is {jobs.tasks[1]}")
        count = g.whole("machines", 150, least=0, most=MOST_MACHINES)
        cores = g.whole("cpu_cores", 64, least=1, most=MOST_CORES)
        case = Case(
            scheme=g.choice(POLICY, tuple(SCHEMES), "both-tried-forest"),
            machines=Machines(count, cores, g.whole("memory_mib", 262_144, least=1)),
            jobs=jobs,
            sized_for=g.whole("sized_for", max(count, 1), least=1, most=MOST_MACHINES),
            terms=Terms(
                short_below_s=g.number("short_below_min", 15.0, least=0) * _MINUTE_S,
                wait_below_s=g.number("wait_below_h", 24.0, least=0) * _HOUR_S,
                by_core_time=g.choice("length", ("core-time", "runtime"), "core-time") == "core-time",
                error=g.number("error", 0.1, least=0, most=1),
                try_up_to=g.number("try_up_to", 0.7, least=0, most=1),
                hold_s=g.number("hold_min", 2.0, least=0) * _MINUTE_S,
                half_life_s=g.number("half_life_min", 2.0, least=0.01) * _MINUTE_S,
                learn_every_s=g.number("learn_every_days", 7.0, least=0.01) * 86_400.0,
                memory=g.flag("memory", True),
                order=g.choice("order", ("arrival", "shortest", "random"), "arrival"),
                from_s=g.number("from_s", -np.inf),
                validate=g.flag("validate", False),
            ),
            rows=g.flag("rows", False),
        )
        g.end()
        if isinstance(jobs, Made) and case.terms.from_s >= jobs.until_s:
            raise InvalidParameter("from_s", f"must be before the last job, but is {case.terms.from_s:g}")
        return case

    def prepare(self, settings: Sequence[Case], progress: Callable[[float], None]) -> dict[str, Facts]:
        """What is in each trace, and whether the windows lie in it; the traces stream through each run."""
        found: dict[str, Facts] = {}
        for number, case in enumerate(settings):
            if isinstance(case.jobs, Input):
                facts = found[str(case.jobs.path)] = known(case.jobs, memory=case.terms.memory)
                facts.of_one_task_each()
                facts.within(case.terms.from_s)
            progress((number + 1) / len(settings))
        return found

    def run(self, settings: Case, seed: int, prepared: Any, progress: Callable[[float], None]) -> Outcome:
        """One run. Made jobs are the seed's own; a forest learns from others of their kind."""
        jobs = settings.jobs

        def stream(which: int) -> Iterable[JobBatch]:
            if isinstance(jobs, Made):
                cores = float(settings.sized_for * settings.machines.cpu_cores)
                return jobs.batches(np.random.default_rng([seed, which]), cores)
            return jobs.batches(JobBatch, "jobs", from_first=True)

        rows = JobRowsTable() if settings.rows else None
        found = run(
            lambda: stream(0),
            settings.machines,
            named(settings.scheme),
            settings.terms,
            seed,
            training=lambda: stream(1),
            progress=progress,
            rows=rows,
        )
        tables = {} if rows is None else {"jobs": rows.columns()}
        if found.versions:
            tables["models"] = table(found.versions)
        facts = (
            None
            if isinstance(jobs, Made)
            else (prepared or {}).get(str(jobs.path)) or known(jobs, memory=settings.terms.memory)
        )
        return Outcome(found.metrics, tables, () if facts is None else facts.beyond(math.inf))


MODEL: Final = WaitingModel()
