"""How many transient servers there are, and where tasks are asked for and placed (Ogden and Guo 2019 §3): by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.matcher.policies.cloudcoaster import (
    expected_backlog_s,
    goes_before,
    is_long,
    kept_servers,
    least_loaded,
    long_load,
    most_transients,
    on_demand_probes,
    passes,
    probes,
    slack_s,
    wanted,
    wanted_by_wait,
)


@pytest.mark.parametrize(("ratio", "most", "partition"), [(1.0, 40, 80), (2.0, 80, 120), (3.0, 120, 160)])
def test_the_budget_of_the_paper(ratio: float, most: int, partition: int) -> None:
    """N = 80, p = .5: K = r N p, and T = N ((r - 1) p + 1) servers for short tasks."""
    assert most_transients(80, ratio, 0.5) == most
    assert kept_servers(80, 0.5) + most == partition == 80 * ((ratio - 1) * 0.5 + 1)


def test_parts_of_servers_are_not_rented() -> None:
    assert most_transients(3, 1.5, 0.5) == 2
    assert most_transients(10, 0.3, 1.0) == 3


@pytest.mark.parametrize(
    ("long_servers", "servers", "have", "what"),
    [(96, 100, 0, 1), (96, 100, 5, 0), (95, 100, 3, 0), (94, 100, 3, -1), (94, 100, 0, 0), (0, 0, 0, 0)],
)
def test_servers_are_rented_above_the_threshold_and_released_below(
    long_servers: int, servers: int, have: int, what: int
) -> None:
    assert wanted(long_servers, servers, 0.95, have, 5) == what


def test_renting_ends_where_the_load_meets_the_threshold() -> None:
    """96 of 100 run long tasks; with one more it is 96 / 101, which is above .95; with two 96 / 102, which is not."""
    have = 0
    while wanted(96, 100 + have, 0.95, have, 50) == 1:
        have += 1
    assert have == 2
    assert long_load(96, 102) < 0.95 < long_load(96, 101)


def test_long_is_by_the_mean_and_short_jobs_ask_enough_servers() -> None:
    assert is_long(90.5811, 90.5811)
    assert not is_long(90.58, 90.5811)
    assert (probes(3, 2.0, 20), probes(30, 2.0, 20)) == (20, 60)


def test_long_tasks_go_where_they_begin_first() -> None:
    queued, ends = np.array([0.0, 50.0, 10.0, 0.0]), np.array([0.0, 0.0, 120.0, 125.0])
    assert least_loaded(queued, ends, 1, 4, 100.0) == 3  # 50, 10 + 20 and 25 s
    assert least_loaded(queued, ends, 1, 3, 100.0) == 2
    assert least_loaded(queued, ends, 1, 4, 70.0) == 1
    assert least_loaded(queued, ends, 2, 2, 0.0) == -1


def test_shortest_remaining_passes_over_so_often_and_no_more() -> None:
    assert goes_before(5.0, 80.0, 4, 5)
    assert not goes_before(5.0, 80.0, 5, 5)
    assert not goes_before(80.0, 80.0, 0, 5)


def test_who_waits_is_delayed_by_five_of_its_own_tasks_at_most() -> None:
    assert slack_s(4.0, 0.0, 5.0) == 20.0
    assert slack_s(4.0, 18.0, 5.0) == 2.0
    assert passes(left_s=6.0, best_left_s=8.0, estimate_s=2.0, least_slack_s=2.0)
    assert not passes(left_s=6.0, best_left_s=8.0, estimate_s=3.0, least_slack_s=2.0)
    assert not passes(left_s=8.0, best_left_s=8.0, estimate_s=1.0, least_slack_s=2.0)


def test_each_task_has_a_probe_on_demand_or_the_job_has_one() -> None:
    assert (on_demand_probes(7, True), on_demand_probes(7, False)) == (7, 1)


@pytest.mark.parametrize(
    ("expected_s", "have", "what"),
    [
        (501.0, 3, 1),  # 50.1 s each of ten servers.
        (501.0, 5, 0),
        (500.0, 3, 0),
        (406.0, 3, 0),  # 45.1 s each of nine.
        (405.0, 3, -1),
        (405.0, 0, 0),
    ],
)
def test_servers_are_rented_by_the_wait_that_is_expected(expected_s: float, have: int, what: int) -> None:
    assert wanted_by_wait(expected_s, 10, 50.0, 0.9, have, 5) == what


def test_a_burst_is_remembered_for_a_while() -> None:
    assert expected_backlog_s(100.0, 900.0, 300.0, 300.0) == pytest.approx(900 / np.e)
    assert expected_backlog_s(400.0, 900.0, 300.0, 300.0) == 400.0
    assert expected_backlog_s(100.0, 900.0, 0.0, 0.0) == 100.0
