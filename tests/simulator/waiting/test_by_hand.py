"""Small days, worked out on paper from Ambati et al. 2021: who runs where, when, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.waiting.running import Terms
from ebbtide.simulator.waiting.running import run as run_scheme
from ebbtide.simulator.waiting.schemes import named
from tests.simulator.jobs.scenes import batches
from tests.simulator.waiting.scenes import Machines, a, job, run

#: One fixed machine of two cores. Job 0 has it until 100 s; job 1 is short, job 2 long; job 3 comes at 85 s.
ONE = Machines(1, 2)
DAY = [job(0, 2, 100), job(1, 1, 5), job(2, 1, 50), job(85, 2, 30)]
#: Dollars a second of the smallest machine, of two cores.
SECOND = 2 * 0.048 / 3600


def test_long_jobs_wait_and_short_ones_do_not() -> None:
    """t = 10 s: job 1 is rented a machine, the others wait for 100 s; job 2 then leaves one core, job 3 wants two."""
    told = run(DAY, ONE, short_below_s=10.0, wait_below_s=float("inf"))
    assert told.of(1) == [("rented", 1, 6, True)]
    assert told.of(2) == [("fixed", 100, 150, True)]
    assert told.of(3) == [("fixed", 150, 180, True)]
    assert told.total(a.PAID.dollars) == pytest.approx(5 * SECOND)
    assert told.total(a.PAID.wait_s) == told.total(a.PAID.delay_s) == (100 - 2) + (150 - 85)


def test_what_is_tried_is_killed_at_the_threshold_and_waits() -> None:
    """Job 2 is not known to be long until it has run for 10 s: 2 to 12 s are paid for in vain, then it waits."""
    told = run(DAY, ONE, short_below_s=10.0, wait_below_s=float("inf"), tries=True)
    assert told.of(1) == [("tried", 1, 6, True)]
    assert told.of(2) == [("tried", 2, 12, False), ("fixed", 100, 150, True)]
    assert told.of(3) == [("tried", 85, 95, False), ("fixed", 150, 180, True)]
    assert told.total(a.PAID.dollars) == pytest.approx((5 + 10 + 10) * SECOND)
    assert told.total(a.PAID.lost_core_s) == 10 * 1 + 10 * 2
    assert told.total(a.PAID.wait_s) == (100 - 12) + (150 - 95)
    assert told.total(a.PAID.delay_s) == (100 - 2) + (150 - 85)


def test_a_trial_that_ends_at_the_threshold_was_short() -> None:
    told = run([job(0, 2, 100), job(1, 1, 10)], ONE, short_below_s=10.0, tries=True)
    assert told.of(1) == [("tried", 1, 11, True)]


def test_who_has_waited_b_gives_up() -> None:
    """b = 20 s: job 2 gives up at 22 s, job 3 (15 s of waiting) does not."""
    told = run(DAY, ONE, short_below_s=0.0, wait_below_s=20.0)
    assert told.of(1) == [("rented", 21, 26, True)]
    assert told.of(2) == [("rented", 22, 72, True)]
    assert told.of(3) == [("fixed", 100, 130, True)]
    assert told.count(a.KNOB.gave_up) == 2
    assert told.total(a.PAID.wait_s) == 20 + 20 + 15


def test_room_at_the_very_end_of_patience_is_taken() -> None:
    told = run([job(0, 2, 100), job(80, 1, 5)], ONE, short_below_s=0.0, wait_below_s=20.0)
    assert told.of(1) == [("fixed", 100, 105, True)]


def test_who_is_known_to_be_late_does_not_wait_and_costs_the_same() -> None:
    marks = np.zeros(4, np.int8)
    waited = run(DAY, ONE, short_below_s=0.0, wait_below_s=20.0, marks=marks, fills_marks=True)
    assert marks.tolist() == [0, 1, 1, 0]
    told = run(DAY, ONE, short_below_s=0.0, wait_below_s=20.0, marks=marks, late="marks")
    assert told.of(1) == [("rented", 1, 6, True)]
    assert told.of(2) == [("rented", 2, 52, True)]
    assert told.of(3) == [("fixed", 100, 130, True)]
    assert told.total(a.PAID.dollars) == pytest.approx(waited.total(a.PAID.dollars))
    assert told.total(a.PAID.wait_s) == 15


def test_who_would_be_late_after_its_trial_stays_where_it_is() -> None:
    marks = np.array([0, 0, 1, 0], np.int8)
    told = run(DAY, ONE, short_below_s=10.0, wait_below_s=200.0, tries=True, marks=marks, late="marks")
    assert told.of(2) == [("stays", 2, 52, True)]
    assert told.total(a.PAID.lost_core_s) == 20  # of job 3
    assert told.count(a.KNOB.stayed) == 1


def test_one_is_tried_and_tells_of_the_others() -> None:
    """t = 10 s. Job 1 is tried, jobs 2 and 3 are held; at 11 s it was long, so they wait without a trial, as job 4
    does. Much later nothing is known any more, and job 5 is tried."""
    jobs = [job(0, 2, 100), *(job(1, 1, 50) for _ in range(3)), job(20, 1, 5), job(90, 1, 5)]
    told = run(jobs, ONE, short_below_s=10.0, tries=True, try_up_to=0.6, hold_s=60.0, half_life_s=20.0)
    assert told.of(1) == [("tried", 1, 11, False), ("fixed", 150, 200, True)]
    assert [told.of(number)[0][:2] for number in (2, 3, 4)] == [("fixed", 100), ("fixed", 100), ("fixed", 150)]
    assert told.of(5)[0] == ("tried", 90, 95, True)
    assert (told.count(a.KNOB.tried), told.count(a.KNOB.untried)) == (2, 3)


def test_who_was_held_is_tried_when_the_first_was_short_or_does_not_tell() -> None:
    """Job 1 tells at 6 s that it was short; then job 2 is tried; held for 4 s at most, it is tried at 5 s."""
    jobs = [job(0, 2, 100), job(1, 1, 5), job(1, 1, 50)]
    settings: dict[str, Any] = {"short_below_s": 10.0, "tries": True, "try_up_to": 0.6, "half_life_s": 20.0}
    assert run(jobs, ONE, hold_s=60.0, **settings).of(2)[0] == ("tried", 6, 16, False)
    assert run(jobs, ONE, hold_s=4.0, **settings).of(2)[0] == ("tried", 5, 15, False)


def test_a_length_can_be_core_time() -> None:
    """Of two cores for 6 s each: 12 s of core-time are long at t = 10 s, and a trial of it takes 5 s."""
    jobs = [job(0, 2, 100), job(1, 2, 6)]
    assert run(jobs, ONE, short_below_s=10.0, wait_below_s=1e9, by_core_time=True).of(1)[0][:2] == ("fixed", 100)
    told = run(jobs, ONE, short_below_s=10.0, wait_below_s=1e9, by_core_time=True, tries=True)
    assert told.of(1) == [("tried", 1, 6, False), ("fixed", 100, 106, True)]


def test_no_job_waits_if_the_longest_wait_is_nothing() -> None:
    told = run(DAY, ONE, short_below_s=0.0, wait_below_s=0.0)
    assert [row[1] for row in sorted(told.attempts)] == ["fixed", "rented", "rented", "rented"]
    assert told.total(a.PAID.wait_s) == 0


def test_the_smallest_machine_that_holds_cores_and_memory_is_paid() -> None:
    """Three cores need a machine of four; one core with 20 GiB one of eight (32 GiB)."""
    jobs = [job(0, 4, 100), job(1, 3, 10), job(2, 1, 10, memory_mib=20 * 1024)]
    told = run(jobs, Machines(1, 4, 65_536), short_below_s=60.0, wait_below_s=1e9)
    assert told.total(a.PAID.dollars) == pytest.approx((4 + 8) * 10 * 0.048 / 3600)


def test_fixed_machines_pass_over_what_does_not_fit() -> None:
    """Work-conserving: job 2 wants one core, and gets it before job 1, which wants two."""
    told = run([job(0, 1, 50), job(1, 2, 10), job(2, 1, 10)], ONE, short_below_s=0.0, wait_below_s=1e9)
    assert told.of(2) == [("fixed", 2, 12, True)]
    assert told.of(1) == [("fixed", 50, 60, True)]


def test_a_job_whose_spot_machine_goes_is_tried_again_at_a_third_of_the_price() -> None:
    """The second machine lives for 3 s: job 1 is tried from 1 to 4 s, and on another from 4 to 9 s."""
    lifetimes = np.array([90.0, 3.0])
    told = run(DAY[:2], ONE, short_below_s=10.0, tries=True, lifetimes=lifetimes)
    assert told.of(1) == [("tried", 1, 4, False), ("tried", 4, 9, True)]
    assert told.total(a.PAID.dollars) == pytest.approx(0.3 * 8 * SECOND)
    assert (told.count(a.KNOB.tried), told.count(a.KNOB.revoked)) == (2, 1)
    assert told.engine.policy_state.past[:, 3].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("from_s", "after_core_s"), [(0.0, 2 * 90 + 2 * 100), (5.0, 2 * 100)])
def test_core_time_on_fixed_machines_past_the_end_is_billed_to_jobs_that_are_measured(
    from_s: float, after_core_s: float
) -> None:
    """The last job comes at 10 s, when job 0 has 90 s to go; it runs from 100 to 200 s, at the price of reserved."""
    jobs = [job(0, 2, 100), job(10, 2, 100)]
    terms = Terms(from_s=from_s, validate=True)
    found = run_scheme(lambda: batches(jobs), ONE, named("all-jobs-wait"), terms, 1, compile=False).metrics
    assert found["after_cost"] == pytest.approx(0.4 * 0.048 / 3600 * after_core_s)
    assert found["total_cost"] == pytest.approx(0.4 * 0.048 / 3600 * (after_core_s + 2 * (10 - from_s)))


def test_of_those_that_wait_any_is_drawn_at_each_start() -> None:
    """A second each on one core, four hundred at once; two hundred are left when as many come at 200 s. From then on
    each start is as likely one of those that were left as one of those that came."""
    jobs = [job(0, 1, 1) for _ in range(400)] + [job(200.5, 1, 1) for _ in range(200)]
    told = run(jobs, Machines(1, 1), short_below_s=0.0, wait_below_s=float("inf"), random=True)
    order = [number for number, *_ in sorted(told.attempts, key=lambda row: row[2])]
    assert sorted(order) == list(range(600))
    assert 85 < np.mean(order[:200]) * 100 / 200 < 115
    assert 70 < sum(number < 400 for number in order[201:401]) < 130
