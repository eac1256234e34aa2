"""Properties under any jobs: none waits longer than b, costs add up, and the loop is the same compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.matcher.policies.waiting import CORE_HOUR, MIB_A_CORE, SIZES, rented_cores
from ebbtide.simulator.waiting.running import Terms
from ebbtide.simulator.waiting.running import run as run_scheme
from ebbtide.simulator.waiting.schemes import SCHEMES, named
from tests.simulator.jobs.scenes import batches
from tests.simulator.waiting.scenes import Machines, a, random_jobs, run

FIXED = Machines(2, 4, 8192)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tries", [False, True])
@pytest.mark.parametrize("wait_below_s", [0.0, 15.0, float("inf")])
def test_waits_are_bounded_and_every_second_on_demand_is_paid(seed: int, tries: bool, wait_below_s: float) -> None:
    jobs = random_jobs(seed)
    told = run(jobs, FIXED, compile=True, short_below_s=4.0, wait_below_s=wait_below_s, tries=tries)
    done = {row[0]: row for row in told.attempts if row[4]}
    assert sorted(done) == list(range(len(jobs)))
    dollars = 0.0
    for number, place, began_s, ended_s, completed in told.attempts:
        asked = jobs[number]
        if place != "fixed":
            size = rented_cores(np.array(SIZES), MIB_A_CORE, int(asked.cores), int(asked.memory_mib))
            dollars += (ended_s - began_s) / 3600 * size * CORE_HOUR
        if not completed:
            assert place == "tried"
            assert ended_s - began_s == pytest.approx(4.0)
            assert asked.runtimes_s[0] > 4.0
        waited = began_s - asked.at_s
        assert waited <= wait_below_s + (4.0 if tries else 0.0) + 1e-9
    assert told.total(a.PAID.dollars) == pytest.approx(dollars)
    waits = sum(
        done[n][2] - j.at_s - sum(r[3] - r[2] for r in told.attempts if r[0] == n and not r[4])
        for n, j in enumerate(jobs)
    )
    assert told.total(a.PAID.wait_s) == pytest.approx(waits)


@pytest.mark.parametrize("seed", range(8))
def test_who_gives_up_never_touches_the_fixed_machines(seed: int) -> None:
    """So that waits known before cost what waiting and giving up does, and the others start when they did (§2.1)."""
    jobs = random_jobs(seed)
    marks = np.zeros(len(jobs), np.int8)
    first = run(jobs, FIXED, compile=True, short_below_s=3.0, wait_below_s=12.0, marks=marks, fills_marks=True)
    told = run(jobs, FIXED, compile=True, short_below_s=3.0, wait_below_s=12.0, marks=marks, late="marks")
    assert 0 < marks.sum() == first.count(a.KNOB.gave_up)
    assert told.count(a.KNOB.gave_up) == 0
    fixed = [[row for row in one.attempts if row[1] == "fixed"] for one in (first, told)]
    assert fixed[0] == fixed[1]
    assert told.total(a.PAID.dollars) == pytest.approx(first.total(a.PAID.dollars))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_compiled_and_interpreted_agree_on_every_scheme(scheme: str) -> None:
    jobs = random_jobs(3, count=60)
    terms = Terms(short_below_s=4.0, wait_below_s=12.0, by_core_time=False, validate=True)
    found: list[dict[str, Any]] = [
        run_scheme(lambda: batches(jobs), FIXED, named(scheme), terms, 1, compile=how).metrics for how in (False, True)
    ]
    assert found[0] == pytest.approx(found[1], nan_ok=True)
    assert found[0]["jobs"] == 60
    if scheme != "all-jobs-wait" and SCHEMES[scheme].late != "forever":
        assert found[0]["wait_max_h"] <= 12.0 / 3600 + 1e-9


@pytest.mark.parametrize("scheme", ["all-jobs-wait", "both-tried-after"])
def test_compiled_and_interpreted_draw_the_same(scheme: str) -> None:
    jobs = random_jobs(4, count=80)
    terms = Terms(short_below_s=4.0, wait_below_s=12.0, by_core_time=False, order="random", validate=True)
    found: list[dict[str, Any]] = [
        run_scheme(lambda: batches(jobs), FIXED, named(scheme), terms, 1, compile=how).metrics for how in (False, True)
    ]
    assert found[0] == pytest.approx(found[1], nan_ok=True)


def test_knowing_is_never_worse_than_not_knowing() -> None:
    jobs = random_jobs(5, count=200)
    terms = Terms(short_below_s=4.0, wait_below_s=12.0, by_core_time=False)
    found = {
        name: run_scheme(lambda: batches(jobs), FIXED, named(name), terms, 1)
        for name in ("short-waits-wait", "short-waits-wait-after", "both", "both-tried-after")
    }
    assert found["short-waits-wait"].wait_mean_s < found["short-waits-wait-after"].wait_mean_s
    assert found["short-waits-wait"].on_demand_cost == pytest.approx(found["short-waits-wait-after"].on_demand_cost)
    assert found["both"].tried_core_s == 0 < found["both-tried-after"].tried_core_s
