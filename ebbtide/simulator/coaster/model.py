"""Transient servers for short tasks as a model of experiments (docs/research/cloudcoaster.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.simulator.coaster.running import COPIES, METRICS, POLICIES, RULES, Terms, run
from ebbtide.simulator.coaster.workload import Mixed
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY, Input, Outcome
from ebbtide.simulator.inputs.batches import JobBatch

_MOST: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one case."""

    terms: Terms
    jobs: Mixed | Input
    rows: bool = False


class CoasterModel:
    """A run's seed draws the probes, and the jobs where they are made."""

    name: Final = "coaster"
    version: Final = 5
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> Case:
        """Raises InvalidParameter."""
        g = Given(given)
        (jobs,) = g.inputs("jobs")
        usual = Terms()
        case = Case(
            terms=Terms(
                policy=g.choice(POLICY, POLICIES, usual.policy),
                servers=g.whole("servers", usual.servers, least=2, most=_MOST),
                short_servers=g.whole("short_servers", usual.short_servers, least=1),
                replaced_share=g.number("replaced_share", usual.replaced_share, least=0, most=1),
                cost_ratio=g.number("cost_ratio", usual.cost_ratio, above=0, most=1000),
                threshold=g.number("threshold", usual.threshold, least=0),
                longest_wait_s=g.number("longest_wait_s", usual.longest_wait_s, least=0),
                kept_share=g.number("kept_share", usual.kept_share, least=0, most=1),
                memory_s=g.number("memory_s", usual.memory_s, least=0),
                provisioning_s=g.number("provisioning_s", usual.provisioning_s, least=0),
                cutoff_s=g.number("cutoff_s", usual.cutoff_s, above=0),
                probe_ratio=g.number("probe_ratio", usual.probe_ratio, least=1, most=1000),
                least_probes=g.whole("least_probes", usual.least_probes, least=1, most=10_000),
                rules=g.choice("rules", RULES, usual.rules),
                most_delays=g.number("most_delays", usual.most_delays, least=0, most=_MOST),
                copies=g.choice("copies", COPIES, usual.copies),
                bypasses=g.whole("bypasses", usual.bypasses, least=0, most=_MOST),
                shortest=g.flag("shortest", usual.shortest),
                sticky=g.flag("sticky", usual.sticky),
                validate=g.flag("validate", False),
            ),
            jobs=jobs
            if jobs is not None
            else Mixed(
                load=g.number("load", above=0),
                hours=g.number("hours", above=0),
                long_share=g.number("long_share", 0.1, least=0, most=1),
                long_mean_s=g.number("long_mean_s", 5000.0, above=0),
                cutoff_s=g.number("cutoff_s", usual.cutoff_s, above=0),
            ),
            rows=g.flag("rows", False),
        )
        g.end()
        return case

    def prepare(self, settings: Sequence[Case], progress: Callable[[float], None]) -> None:
        """Nothing: each run reads its trace, and holds all of its tasks."""

    def run(self, settings: Case, seed: int, prepared: Any, progress: Callable[[float], None]) -> Outcome:
        """One run."""
        jobs = settings.jobs
        if isinstance(jobs, Mixed):
            batches = jobs.batches(np.random.default_rng([seed, 0]), settings.terms.servers)
        else:
            batches = jobs.batches(JobBatch, "jobs", from_first=True)
        done = run(batches, settings.terms, seed)
        tables = {"delays": done.delays()} | ({"jobs": done.rows()} if settings.rows else {})
        return Outcome(done.metrics, tables, done.warnings)


MODEL: Final = CoasterModel()
