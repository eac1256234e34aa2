"""Transient servers for short tasks as a model of experiments (docs/task-policies.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from simulator.coaster.running import POLICIES, Terms, run
from simulator.coaster.workload import Mixed
from simulator.errors import InvalidParameter
from simulator.experiments.fields import Given
from simulator.experiments.model import INPUTS, POLICY, Input, Outcome
from simulator.inputs.batches import JobBatch


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one case."""

    terms: Terms
    jobs: Mixed | Input


class CoasterModel:
    """A run's seed draws the probes, and the jobs where they are made."""

    name: Final = "coaster"
    version: Final = 1

    def settings(self, given: Mapping[str, Any]) -> Case:
        """Raises InvalidParameter."""
        g = Given(given)
        inputs = Given(g.table(INPUTS, {}), f"{INPUTS}.")
        jobs: Input | None = inputs.value("jobs", None)
        inputs.end()
        usual = Terms()
        case = Case(
            terms=Terms(
                policy=g.choice(POLICY, POLICIES, usual.policy),
                servers=g.whole("servers", usual.servers, least=2),
                short_servers=g.whole("short_servers", usual.short_servers, least=1),
                replaced_share=g.number("replaced_share", usual.replaced_share, least=0, most=1),
                cost_ratio=g.number("cost_ratio", usual.cost_ratio, above=0),
                threshold=g.number("threshold", usual.threshold, least=0),
                provisioning_s=g.number("provisioning_s", usual.provisioning_s, least=0),
                cutoff_s=g.number("cutoff_s", usual.cutoff_s, above=0),
                probe_ratio=g.number("probe_ratio", usual.probe_ratio, least=1),
                least_probes=g.whole("least_probes", usual.least_probes, least=1),
                bypasses=g.whole("bypasses", usual.bypasses, least=0),
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
        )
        g.end()
        return case

    def prepare(self, settings: Sequence[Case], progress: Callable[[float], None]) -> None:
        """Nothing: traces stream through each run."""

    def run(self, settings: Case, seed: int, prepared: Any, progress: Callable[[float], None]) -> Outcome:
        """One run."""
        jobs = settings.jobs
        batches: Iterator[JobBatch]
        if isinstance(jobs, Mixed):
            batches = jobs.batches(np.random.default_rng([seed, 0]), settings.terms.servers)
        else:
            batches = _jobs(jobs)
        return Outcome(run(batches, settings.terms, seed).metrics)


MODEL: Final = CoasterModel()


def _jobs(given: Input) -> Iterator[JobBatch]:
    for batch in given.trace():
        if not isinstance(batch, JobBatch):
            raise InvalidParameter(
                f"{INPUTS}.jobs", f"must be a trace of jobs, but {given.path} is one of {batch.KIND}"
            )
        yield batch
