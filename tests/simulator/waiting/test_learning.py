"""Models of waits: what they are judged by, and what they know when."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from ebbtide.matcher.policies.forest import predicted
from ebbtide.simulator.compiling import compiled, shared
from ebbtide.simulator.jobs.rows import JobRowsTable
from ebbtide.simulator.waiting import learning, policy, running
from ebbtide.simulator.waiting.learning import correlation, learn
from ebbtide.simulator.waiting.meanwhile import Asked, Version, ahead, table
from ebbtide.simulator.waiting.running import Run, Terms
from ebbtide.simulator.waiting.running import run as run_scheme
from ebbtide.simulator.waiting.schemes import named
from tests.simulator.jobs.scenes import Job, batches, job
from tests.simulator.waiting.scenes import Machines

shared(predicted)


@compiled
def _all(forest: Any, rows: Any, out: Any) -> None:
    for i in range(len(rows)):
        out[i] = predicted(forest, rows[i])


def test_correlation_by_hand() -> None:
    """2 right yes, 1 wrong yes, 1 missed, 4 right no: (2*4 - 1*1) / sqrt(3 * 3 * 5 * 5) = 7 / 15."""
    said = np.array([1, 1, 1, 0, 0, 0, 0, 0.0])
    true = np.array([1, 1, 0, 1, 0, 0, 0, 0.0])
    assert correlation(said, true) == pytest.approx(7 / 15)
    assert correlation(true, true) == 1
    assert correlation(1 - true, true) == -1
    assert correlation(np.zeros(8), true) == 0
    assert math.isnan(correlation(said, np.zeros(8)))


def test_all_models_learn_what_holds_at_all_times() -> None:
    rows = np.random.default_rng(1).uniform(size=(1200, 9))
    learned = learn(rows, (rows[:, 2] > 0.5).astype(float), 1)
    assert min(learned.mcc.values()) > 0.9
    assert min(learned.mixed.values()) > 0.9
    assert learned.believed
    assert (learned.rows, learned.late) == (1200, int((rows[:, 2] > 0.5).sum()))


def test_a_model_is_judged_by_stretches_that_it_has_not_seen() -> None:
    """Bursts that have nothing in common but the hour: rows drawn singly give them away, stretches do not."""
    rows = np.random.default_rng(1).uniform(size=(3000, 9))
    rows[:, 0] = np.arange(3000)
    labels = (np.arange(3000) % 1000 < 250).astype(float)
    learned = learn(rows, labels, 1, ("forest",))
    assert learned.mixed["forest"] > 0.9
    assert learned.mcc["forest"] < 0.25
    assert not learned.believed


@pytest.mark.parametrize("late", [0, 60])
def test_a_model_with_too_few_cases_is_not_believed(late: int) -> None:
    rows = np.random.default_rng(2).uniform(size=(2000, 9))
    labels = np.zeros(2000)
    labels[np.argsort(rows[:, 1])[:late]] = 1.0
    learned = learn(rows, labels, 1, ("forest",))
    assert not learned.believed
    assert math.isnan(learned.mcc["forest"]) == (late == 0)


def test_a_forest_says_compiled_what_the_library_says() -> None:
    rows = np.random.default_rng(5).uniform(size=(800, 9)).astype(np.float32).astype(float)
    learned = learn(rows, (rows[:, 1] * rows[:, 7] > 0.2).astype(float), 6, ("forest",))
    said = np.zeros(800)
    _all(learned.forest, rows, said)
    assert said.tolist() == [predicted(learned.forest, row) for row in rows]
    assert said == pytest.approx(learned.say(rows))


def test_each_version_is_judged_by_what_came_until_the_next() -> None:
    """The first forest has learned the rule, the second its reverse: right until 500 s, wrong after it."""
    rows = np.random.default_rng(3).uniform(size=(1000, 9))
    labels = (rows[:, 4] > 0.5).astype(float)
    asked = Asked(rows, labels, np.arange(1000.0))
    right, wrong = learn(rows, labels, 1, ("forest",)), learn(rows, 1 - labels, 1, ("forest",))
    assert ahead([Version(0.0, right)], asked) > 0.95
    assert ahead([Version(0.0, right), Version(500.0, wrong)], asked) == pytest.approx(0, abs=0.1)
    assert ahead([Version(500.0, wrong)], asked) < -0.95
    assert table([Version(0.0, right)])["sha256"][0] == right.digest != wrong.digest


def _jobs(seed: int, count: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(2.0, count) * np.where(np.arange(count) // 150 % 2, 0.3, 3.0))
    return [job(float(at), float(rng.integers(1, 4)), float(rng.exponential(8.0))) for at in times]


@pytest.mark.parametrize("scheme", ["short-waits-wait-meanwhile", "both-some-meanwhile"])
def test_the_future_does_not_count(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other jobs from 1000 s on: what was done before, and with what forests, stays as it was; all are believed."""
    monkeypatch.setattr(learning, "believed", lambda mcc, late: True)
    jobs = _jobs(1, 900)
    later = [one for one in jobs if one.at_s < 1000.0]
    later += [job(1000.0 + i, 4.0, 30.0) for i in range(200)]
    terms = Terms(short_below_s=4.0, wait_below_s=40.0, by_core_time=False, hold_s=3.0, learn_every_s=100.0)
    found: list[Run] = []
    done: list[dict[str, Any]] = []
    for one in (jobs, later):
        rows = JobRowsTable()
        found.append(run_scheme(partial(batches, one), Machines(2, 4), named(scheme), terms, 1, rows=rows))
        done.append(rows.columns())
    first, other = ([(v.from_s, v.learned.digest) for v in run.versions if v.from_s < 1000.0] for run in found)
    assert len(first) == 9
    assert first == other
    assert any(len(version.learned.forest.roots) for version in found[0].versions)
    ended = [dict(zip(one["job"].tolist(), one["ended_s"].tolist(), strict=True)) for one in done]
    before = {number: at for number, at in ended[0].items() if at < 1000.0}
    assert len(before) > 100
    assert all(ended[1][number] == at for number, at in before.items())


def test_jobs_are_left_out_of_what_is_learned_only_if_more_were_asked_than_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not if more came; and each row then stands for as many jobs as there were decisions to one that is recorded."""
    jobs = _jobs(1, 600)
    terms = Terms(wait_below_s=40.0, by_core_time=False, learn_every_s=1200.0)

    def learned(records: int) -> learning.Learned:
        monkeypatch.setattr(policy, "RECORDS", records)
        monkeypatch.setattr(running, "RECORDS", records)
        scheme = named("short-waits-wait-meanwhile")
        found = run_scheme(partial(batches, jobs), Machines(2, 4), scheme, terms, 1, compile=False)
        assert len(found.versions) == 1
        return found.versions[0].learned

    whole = learned(60_000)
    assert 0 < whole.late < whole.rows < 500
    enough = learned(599)
    assert (enough.digest, enough.late) == (whole.digest, whole.late)
    half = learned(300)
    assert half.rows == pytest.approx(whole.rows / 2, abs=1)
    assert half.late == pytest.approx(whole.late, abs=0.3 * whole.late)
