"""Three or four servers and a few jobs, on paper: Eagle, and what transient servers change (Ogden and Guo 2019)."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.simulator.coaster.arrays import KNOB
from ebbtide.simulator.coaster.running import Terms
from ebbtide.simulator.errors import InvalidParameter
from tests.simulator.coaster.scenes import told
from tests.simulator.jobs.scenes import job


def test_long_tasks_take_the_general_servers_and_short_ones_those_without() -> None:
    """Servers 1 and 2 are long, so both short tasks go to server 0, one after the other (sticky)."""
    found = told([job(0, 1, 200, 200), job(10, 1, 5, 5)], policy="eagle", servers=3, short_servers=1)
    assert sorted(found.state.ran_on[:2].tolist()) == [1, 2]
    assert found.state.ran_on[2:].tolist() == [0, 0]
    assert found.state.waited_s.tolist() == [0, 0, 0, 5]
    assert found.metrics["delay_mean_s"] == 2.5
    assert found.metrics["delay_max_s"] == 5


def test_a_third_long_task_waits_for_the_server_that_is_free_first() -> None:
    found = told([job(0, 1, 300), job(1, 1, 150), job(2, 1, 100)], policy="eagle", servers=3, short_servers=1)
    assert found.state.ran_on[0] != found.state.ran_on[1] == found.state.ran_on[2]
    assert found.state.waited_s.tolist() == [0, 0, 149]


@pytest.mark.parametrize(
    ("options", "b_begins_s", "c_begins_s"),
    [({}, 55, 50), ({"shortest": False}, 50, 70), ({"bypasses": 0}, 50, 70)],
)
def test_the_shortest_remaining_job_goes_first(options: dict[str, Any], b_begins_s: float, c_begins_s: float) -> None:
    """A has server 0 until 50 s; B wants 20 s, C 5 s."""
    jobs = [job(0, 1, 500), job(1, 1, 49), job(2, 1, 20), job(3, 1, 5)]
    found = told(jobs, policy="eagle", servers=2, short_servers=1, least_probes=1, **options)
    waited = found.state.waited_s
    assert (waited[2] + 2, waited[3] + 3) == (b_begins_s, c_begins_s)


#: N = 2, p = .5, r = 2: one on demand and two transient ones; servers 1 and 2 are the general ones.
FOUR: dict[str, Any] = {"servers": 4, "short_servers": 2, "cost_ratio": 2.0, "threshold": 0.3}


def test_transient_servers_come_after_the_delay_and_go_with_the_long_tasks() -> None:
    """Two of three long at 0 s: both are asked for, come at 120 s and are released at 200 s, when the tasks end."""
    found = told([job(0, 1, 200, 200), job(210, 1, 10)], **FOUR)
    assert found.metrics["transient_most"] == found.metrics["transient_peak"] == 2
    assert found.metrics["transient_lifetime_mean_h"] == pytest.approx(80 / 3600)
    # The last job comes at 210 s and ends at 220 s.
    assert found.metrics["transient_mean"] == pytest.approx(160 / 210)
    assert found.metrics["normalised_mean"] == pytest.approx(80 / 210)
    assert found.metrics["saving"] == pytest.approx(1 - 80 / 210)
    assert found.metrics["saving_asked"] == pytest.approx(1 - (80 + 120) / 210), "two were asked for at 0 s"
    assert found.metrics["transient_all_mean"] == pytest.approx(160 / 220)
    assert found.metrics["saving_all"] == pytest.approx(1 - 80 / 220)


def test_what_servers_cost_after_the_last_job_is_no_part_of_the_saving() -> None:
    """Two transient servers from 120 to 200 s; the last job comes at 160 s."""
    found = told([job(0, 1, 200, 200), job(160, 1, 10)], **FOUR)
    assert found.metrics["transient_mean"] == pytest.approx(80 / 160)
    assert found.metrics["transient_all_mean"] == pytest.approx(160 / 200)
    assert found.metrics["arrivals_h"] == pytest.approx(160 / 3600)


def test_by_the_wait_servers_are_rented_for_short_work_and_released_when_it_is_done() -> None:
    """At 40 s of work each, server 0 needs two more for 90 s at 10 s, and they come at once. At 100 s nothing is left,
    and one is given up; at 140 s there are 120 s of work, and one is rented again. It is given up at 170 s, with 60 s
    left, and the other at 200 s, when no work is left."""
    jobs = [job(0, 1, 900, 900), job(10, 1, 90), job(140, 1, 30, 30, 30, 30), job(800, 1, 1)]
    given = FOUR | {
        "policy": "by-wait",
        "longest_wait_s": 40.0,
        "kept_share": 0.9,
        "memory_s": 0.0,
        "provisioning_s": 0.0,
    }
    found = told(jobs, **given, copies="job")
    assert found.metrics["transient_peak"] == 2
    assert found.metrics["transient_mean"] == pytest.approx((190 + 90 + 30) / 800)
    assert found.metrics["transient_lifetime_max_h"] == pytest.approx(190 / 3600)


@pytest.mark.parametrize(("copies", "on_demand"), [("task", 3), ("job", 1)])
def test_each_short_task_has_one_of_the_probes_on_demand(copies: str, on_demand: int) -> None:
    """At 130 s three tasks have three probes, of this seed all for the two transient servers: instead all go to server
    0, or the last one does."""
    found = told(
        [job(0, 1, 200, 200), job(130, 1, 30, 30, 30)], seed=4, **FOUR, copies=copies, least_probes=1, probe_ratio=1.0
    )
    assert found.state.ran_on[2:].tolist().count(0) == on_demand
    assert found.state.knobs[KNOB.entries] == 2 + 3


def test_no_more_are_asked_for_than_the_threshold_wants() -> None:
    """At .5 one is enough: two of four servers are long then."""
    found = told([job(0, 1, 200, 200)], **FOUR | {"threshold": 0.5})
    assert found.metrics["transient_peak"] == 1


def test_what_was_just_asked_for_is_not_given_up_again() -> None:
    """At 0 s two of six are above .3, two of seven below it: two are asked for and come at 120 s, when three are long.
    Given up at once, the second was asked for again at 50 s and came at 170 s."""
    found = told([job(0, 1, 200, 200), job(50, 1, 200)], **FOUR | {"servers": 6})
    assert found.metrics["transient_lifetime_mean_h"] == pytest.approx(80 / 3600)


def test_servers_are_rented_when_a_long_job_comes_and_not_when_its_tasks_begin_later() -> None:
    """Short tasks have all servers until 50 s; the long ones of 1 s run from then to 250 s, two of three servers."""
    found = told([job(0, 1, 50, 50, 50), job(1, 1, 200, 200)], **FOUR)
    assert found.state.waited_s.tolist() == [0, 0, 0, 49, 49]
    assert found.metrics["transient_peak"] == 0


def test_work_is_shared_among_all_servers_that_were_there() -> None:
    """410 s on three servers for 220 s, and on two for the 80 s until 200 s."""
    found = told([job(0, 1, 200, 200), job(210, 1, 10)], **FOUR)
    assert found.metrics["utilisation"] == pytest.approx(410 / (3 * 220 + 2 * 80))


def test_a_released_server_ends_what_it_has() -> None:
    """Three short tasks at 190 s have a server each until 220 s; the transient ones are released at 200 s."""
    found = told([job(0, 1, 200, 200), job(190, 1, 30, 30, 30)], **FOUR)
    assert found.state.waited_s[2:].tolist() == [0, 0, 0]
    assert sorted(found.state.ran_on[2:].tolist()) == [0, 3, 4]
    assert found.metrics["transient_lifetime_max_h"] == pytest.approx(100 / 3600)


def test_one_that_was_only_asked_for_is_released_first_and_never_comes() -> None:
    """The long tasks end at 110 s, before the servers come."""
    found = told([job(0, 1, 110, 110), job(300, 1, 5)], **FOUR)
    assert found.metrics["transient_peak"] == 0
    assert found.metrics["transient_mean"] == 0


def test_one_that_is_asked_for_again_comes_by_the_second_asking() -> None:
    """Asked for at 0 s and given up at 110 s; asked for again at 115 s, so it comes at 235 s, not at 120 s."""
    jobs = [job(0, 1, 110, 110), job(115, 1, 200, 200), job(236, 1, 5)]
    found = told(jobs, **FOUR)
    assert found.metrics["transient_peak"] == 2
    assert found.metrics["transient_lifetime_max_h"] == pytest.approx((315 - 235) / 3600)


def test_servers_that_are_always_on_are_no_transient_ones() -> None:
    terms = Terms(policy="always-on")
    assert terms.sizes == (4080, 160, 0)
    assert Terms(policy="eagle").sizes == (4000, 80, 0)
    assert Terms(cost_ratio=2).sizes == (3960, 40, 80)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": "hawk"}, "policy"),
        ({"short_servers": 4000}, "short_servers"),
        ({"replaced_share": 1.0}, "replaced_share"),
        ({"probe_ratio": 0.5}, "probe_ratio"),
        ({"cost_ratio": 0.0}, "cost_ratio"),
        ({"bypasses": -1}, "bypasses"),
    ],
)
def test_wrong_terms_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        Terms(**changes)


def test_no_jobs_are_an_error() -> None:
    with pytest.raises(InvalidParameter, match="jobs"):
        told([], **FOUR)
