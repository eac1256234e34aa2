"""Runtimes that are said wrongly, or not at all: what the matcher is told, and that it always goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import EstimatedJobBatch, Floats, Ragged
from ebbtide.simulator.jobs.intake import Demands, job_rows
from ebbtide.simulator.jobs.settings import Settings
from ebbtide.simulator.matching.running import WARM_UP_S, run
from ebbtide.simulator.matching.workload import FALLBACK_S, Workload, estimates, jobs
from tests.simulator.matching.test_running import SMALL, made


def said(**changes: Any) -> Floats:
    """What is said of ten thousand tasks of 1000 s, in thousands of seconds."""
    return estimates(replace(SMALL, **changes), np.full(10_000, 1000.0), np.random.default_rng(5)) / 1000.0


def test_errors_are_even_around_the_runtime_or_a_multiple_of_it() -> None:
    assert (said() == 1.0).all()
    assert (said(estimate_factor=3.0) == 3.0).all()
    wrong = said(estimate_error=1.0)
    assert 0.0 <= wrong.min() < 0.01
    assert 1.99 < wrong.max() <= 2.0
    assert wrong.mean() == pytest.approx(1.0, abs=0.02)
    # The same draws for every size of the error.
    assert said(estimate_error=0.5) - 1.0 == pytest.approx((wrong - 1.0) / 2.0)
    assert said(estimate_error=0.5, estimate_factor=2.0) == pytest.approx(2.0 * said(estimate_error=0.5))


def test_tasks_of_which_nothing_is_said_count_as_the_match_maker_counts_them() -> None:
    assert (said(estimate_missing=1.0) == FALLBACK_S / 1000.0).all()
    some = said(estimate_missing=0.3, estimate_factor=2.0)
    assert set(some) == {2.0, FALLBACK_S / 1000.0}
    assert (some == 2.0).mean() == pytest.approx(0.7, abs=0.02)


def test_what_is_said_changes_no_job() -> None:
    (plain, until_s), (other, other_until_s) = (
        jobs(workload, made(), WARM_UP_S, 3) for workload in (SMALL, replace(SMALL, estimate_error=0.9))
    )
    assert until_s == other_until_s
    for name in ("submit_s", "cpu_cores"):
        assert (getattr(plain, name) == getattr(other, name)).all()
    assert (plain.task_runtime_s.values == other.task_runtime_s.values).all()
    rows, wrong = (job_rows(batch, Settings(memory=False), Demands(), 0.0) for batch in (plain, other))
    assert (rows.in_estimate == rows.in_runtime).all()
    assert (wrong.in_runtime == rows.in_runtime).all()
    assert (wrong.in_estimate != rows.in_runtime).all()


@pytest.mark.parametrize(
    ("values", "lengths", "problem"), [([5.0], [1], "one for each task"), ([5.0, -1.0], [2], "must be a number from 0")]
)
def test_estimates_that_cannot_be_are_named(values: list[float], lengths: list[int], problem: str) -> None:
    batch, _ = jobs(Workload(jobs=1, least_tasks=2, most_tasks=2, load=0.1), made(), WARM_UP_S, 3)
    assert isinstance(batch, EstimatedJobBatch)
    wrong = replace(batch, task_estimate_s=Ragged.of(np.array(values), np.array(lengths)))
    with pytest.raises(InvalidParameter, match=f"task_estimate_s.*{problem}"):
        job_rows(wrong, Settings(memory=False), Demands(), 0.0)


@pytest.mark.parametrize(
    "wrong",
    [{"estimate_error": 1.0}, {"estimate_factor": 1e-6}, {"estimate_factor": 100.0}, {"estimate_missing": 1.0}],
)
def test_every_task_ends_whatever_is_said_of_it(wrong: dict[str, Any]) -> None:
    busy = replace(SMALL, load=3.0, jobs=8)
    found = run(made(), replace(busy, **wrong), "sized", seed=2, validate=True, compile=False)
    right = run(made(), busy, "sized", seed=2, compile=False)
    assert found.results.jobs_done == busy.jobs
    # Other machines, and no other work.
    assert found.completion_s.tolist() != right.completion_s.tolist()
    assert found.results.useful_core_s == pytest.approx(right.results.useful_core_s)


def test_who_does_not_ask_how_long_tasks_run_does_the_same_whatever_is_said() -> None:
    for scheme in ("capacity-random", "oracle-no-kill"):
        right, wrong = (
            run(made(), replace(SMALL, estimate_error=error), scheme, seed=2, compile=False) for error in (0.0, 1.0)
        )
        assert right.completion_s.tolist() == wrong.completion_s.tolist()


@pytest.mark.parametrize(
    ("field", "value"), [("estimate_factor", 0.0), ("estimate_error", 1.5), ("estimate_missing", -0.1)]
)
def test_errors_that_cannot_be_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=field):
        said(**{field: value})
