"""Equations 1 and 2 of Agarwal 2023 on a curve whose answers are known by hand, and what is said of bad estimates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.matcher.predict.ages import BINS, Floats, Value, edge, fill_lines
from ebbtide.matcher.predict.completion_probability import aged, failure_probability, survival_and_loss, wasted_evenly_s
from ebbtide.matcher.predict.expected_time import (
    LEAST_PROBABILITY,
    OVERRUN,
    aversion,
    expected_s,
    remaining_s,
    restart_s,
    usable_duration_s,
)
from ebbtide.matcher.predict.knowledge import Lines
from tests.matcher.equation_one import lives_on

#: Changes come at an even rate, once in 2000 s.
MEAN_S = 2000.0
EDGES: Floats = np.array([edge(index) for index in range(BINS + 2)])
HAZARD = np.minimum(EDGES / MEAN_S, 100.0)
AREA = MEAN_S * (1.0 - np.exp(-HAZARD))
KNOWN = np.zeros(BINS + 2)


def wasted_s(hazard: Floats, area: Floats, elapsed_s: Value, duration_s: Value) -> Value:
    lines = Lines(np.empty(BINS + 2), np.empty(BINS + 2), np.empty(BINS + 2), np.empty(BINS + 2), KNOWN)
    fill_lines(hazard, lines.hazard, lines.hazard_rises)
    fill_lines(area, lines.area, lines.area_rises)
    machines, known = aged(lines, elapsed_s)
    lives, wasted = survival_and_loss(lines, machines, duration_s)
    assert np.allclose(lives + known, lives_on(hazard, KNOWN, elapsed_s, duration_s), rtol=0.0, atol=1e-12)
    return wasted


def test_an_even_rate_has_no_memory() -> None:
    for elapsed_s in (0.0, 100.0, 5000.0):
        assert lives_on(HAZARD, KNOWN, elapsed_s, 1000.0) == pytest.approx(math.exp(-0.5), abs=2e-3)


def test_time_wasted_is_the_mean_of_what_falls_within_the_task() -> None:
    for duration_s in (60.0, 1000.0, 6000.0):
        rate = duration_s / MEAN_S
        exact = duration_s * (1.0 / rate - 1.0 / math.expm1(rate))
        assert wasted_s(HAZARD, AREA, 500.0, duration_s) == pytest.approx(exact, rel=0.05)
        assert wasted_evenly_s(math.exp(-rate), duration_s) == pytest.approx(exact, rel=1e-6)


def test_where_no_change_can_come_half_the_duration_would_be_wasted() -> None:
    nothing = np.zeros(BINS + 2)
    assert wasted_s(nothing, EDGES, 0.0, 600.0) == pytest.approx(300.0, rel=0.5)
    assert wasted_evenly_s(1.0, 600.0) == pytest.approx(300.0, rel=1e-3)


def test_equation_2_by_hand() -> None:
    # a=100, p=.75, d=1000, w=400; the restart on a machine that has just changed: p=.5, w=500: 1000 + 1 * 500.
    restart = restart_s(0.5, 500.0, 1000.0)
    assert restart == pytest.approx(1500.0)
    found = expected_s(100.0, 1.0 - 0.75, 400.0, restart, 1000.0, math.inf, 0.0)
    assert found == pytest.approx(100.0 + 750.0 + 0.25 * (400.0 + 1500.0))


def test_the_restart_is_the_fixed_point_of_equation_2() -> None:
    p, w, d = 0.3, 350.0, 900.0
    restart = restart_s(p, w, d)
    assert restart == pytest.approx(expected_s(0.0, 1.0 - p, w, restart, d, math.inf, 0.0))


def test_a_hopeless_machine_restarts_often_but_not_for_ever() -> None:
    assert restart_s(0.0, 100.0, 1000.0) == pytest.approx(1000.0 + (1 / LEAST_PROBABILITY - 1) * 100.0)


def test_checkpoints_save_what_was_done() -> None:
    restart = restart_s(0.5, 500.0, 1000.0)
    never = expected_s(0.0, 0.5, 500.0, restart, 1000.0, math.inf, 0.0)
    often = expected_s(0.0, 0.5, 500.0, restart, 1000.0, 10.0, 0.0)
    seldom = expected_s(0.0, 0.5, 500.0, restart, 1000.0, 600.0, 0.0)
    assert often < seldom < never
    assert often == pytest.approx(0.5 * 1000.0 + 0.5 * (500.0 + restart * (1.0 - 0.495)))


def test_dislike_counts_a_preemption_as_so_many_durations() -> None:
    assert aversion(0.0, 3, 0.0) == 0.0
    assert aversion(0.5, 0, 0.0) == pytest.approx(1.0)
    assert aversion(0.5, 2, 0.25) == pytest.approx(1.5)
    assert aversion(1.0, 0, 0.0) > 1e5
    plain = expected_s(0.0, 0.2, 100.0, 1000.0, 600.0, math.inf, 0.0)
    assert expected_s(0.0, 0.2, 100.0, 1000.0, 600.0, math.inf, 1.0) == pytest.approx(plain + 0.2 * 600.0)


@pytest.mark.parametrize("estimate_s", [math.nan, -1.0, -math.inf, math.inf])
def test_an_estimate_that_makes_no_sense_is_a_missing_one(estimate_s: float) -> None:
    assert usable_duration_s(estimate_s, 0.0, 1800.0) == 1800.0


def test_an_estimate_is_taken_as_it_is_until_time_refutes_it() -> None:
    assert usable_duration_s(600.0, 0.0, 1800.0) == 600.0
    assert usable_duration_s(0.0, 0.0, 1800.0) == 0.0
    assert usable_duration_s(600.0, 400.0, 1800.0) == 600.0
    assert usable_duration_s(0.0, 800.0, 1800.0) == pytest.approx((1 + OVERRUN) * 800.0)
    assert usable_duration_s(math.nan, 8000.0, 1800.0) == pytest.approx((1 + OVERRUN) * 8000.0)


def test_a_task_that_overruns_is_expected_to_take_a_share_of_its_age_longer() -> None:
    assert remaining_s(1000.0, 0.0, 400.0) == 600.0
    assert remaining_s(1000.0, 0.0, 1400.0) == pytest.approx(OVERRUN * 1400.0)
    assert remaining_s(1000.0, 1000.0, 1000.0) > 0.0


numbers = st.floats(0, 1e5)
shares = st.floats(0, 1)


@given(p=shares, shrink=shares, elapsed_s=numbers, duration_s=st.floats(1, 1e5), wait_s=numbers)
def test_probabilities_and_times_stay_within_their_bounds(
    p: float, shrink: float, elapsed_s: float, duration_s: float, wait_s: float
) -> None:
    lives = lives_on(HAZARD, KNOWN, elapsed_s, duration_s)
    assert 0.0 <= failure_probability(shrink, lives) <= 1.0
    wasted = wasted_s(HAZARD, AREA, elapsed_s, duration_s)
    assert 0.0 <= wasted <= duration_s
    restart = restart_s(p, wasted, duration_s)
    for checkpoint_s in (math.inf, 0.1 * duration_s, 1e-3):
        found = expected_s(wait_s, 1.0 - p, wasted, restart, duration_s, checkpoint_s, 0.0)
        # By this the match maker leaves busy machines out.
        assert found >= (wait_s + duration_s) * (1.0 - 1e-12)
        assert math.isfinite(found)


def test_unknown_stays_unknown() -> None:
    assert math.isnan(failure_probability(math.nan, 0.5))
    assert math.isnan(expected_s(0.0, math.nan, 1.0, 1.0, 1.0, math.inf, 0.0))


@given(st.lists(st.tuples(shares, numbers, st.floats(1, 1e5)), min_size=1, max_size=20))
def test_arrays_and_single_values_give_the_same(rows: list[tuple[float, float, float]]) -> None:
    p, elapsed_s, duration_s = (np.array(column) for column in zip(*rows, strict=True))
    together = [
        lives_on(HAZARD, KNOWN, elapsed_s, duration_s),
        wasted_s(HAZARD, AREA, elapsed_s, duration_s),
        wasted_evenly_s(p, duration_s),
        expected_s(elapsed_s, p, 0.5 * elapsed_s, 2e5, 1e5, 60.0, 0.3),
    ]
    for index, (share, age, span) in enumerate(rows):
        alone = [
            lives_on(HAZARD, KNOWN, age, span),
            wasted_s(HAZARD, AREA, age, span),
            wasted_evenly_s(share, span),
            expected_s(age, share, 0.5 * age, 2e5, 1e5, 60.0, 0.3),
        ]
        assert [float(values[index]) for values in together] == pytest.approx([float(value) for value in alone])
