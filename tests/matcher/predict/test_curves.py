"""The survival curve on a grid, against the exact one, and against the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.matcher.predict.ages import BINS, Floats, edge, position
from ebbtide.matcher.predict.curves import add_all_watched, add_watched, fill_curve
from tests.matcher.equation_one import interpolate, lives_on, survival

WIDTH = BINS + 2


def curve(watched: list[tuple[float, float, bool]], extrapolate: bool = True) -> tuple[Floats, Floats, Floats]:
    """Hazard, area, known of intervals (watched from, to, whether it ended there)."""
    entered, ended = np.zeros(WIDTH), np.zeros(BINS)
    for from_s, to_s, complete in watched:
        add_watched(entered, from_s, from_s == 0.0, to_s, not complete, 1.0)
        if complete:
            ended[int(position(to_s))] += 1.0
    hazard, area, known = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    fill_curve(entered, ended, extrapolate, hazard, area, known)
    return hazard, area, known


def product_limit(watched: list[tuple[float, float, bool]], seconds: float) -> float:
    """Kaplan-Meier with late entry, by its definition."""
    found = 1.0
    for at in sorted({to_s for _, to_s, complete in watched if complete and to_s <= seconds}):
        ended = sum(complete and to_s == at for _, to_s, complete in watched)
        at_risk = sum(from_s < at <= to_s or (from_s == 0.0 and at <= to_s) for from_s, to_s, _ in watched)
        found *= 1.0 - ended / at_risk
    return found


def at(hazard: Floats, seconds: float) -> float:
    where = float(position(seconds))
    return math.exp(-float(interpolate(hazard, int(where), where - int(where))))


@given(st.floats(0, 1e7))
def test_a_position_and_its_edge_agree(age_s: float) -> None:
    where = float(position(age_s))
    assert 0 <= where < BINS
    if where < BINS - 1:
        assert edge(where) == pytest.approx(age_s, rel=1e-9, abs=1e-6)


def test_ages_that_are_none_count_as_nothing() -> None:
    assert position(-5.0) == 0.0
    assert position(math.nan) == 0.0
    assert position(math.inf) < BINS


def test_without_censoring_it_is_the_share_that_lived_longer() -> None:
    generator = np.random.default_rng(1)
    intervals = np.sort(generator.exponential(1800.0, 4000))
    hazard, _, _ = curve([(0.0, float(x), True) for x in intervals])
    for seconds in (30.0, 300.0, 1000.0, 3600.0, 7200.0):
        assert at(hazard, seconds) == pytest.approx(survival(intervals, seconds), abs=0.01)


def test_running_intervals_count_for_the_time_that_they_were_watched() -> None:
    # One machine in two never changes within sight: completed intervals alone would say that all end by 1000 s.
    watched = [(0.0, 1000.0, True)] * 10 + [(0.0, 5000.0, False)] * 10
    hazard, _, _ = curve(watched)
    assert at(hazard, 4000.0) == pytest.approx(0.5)
    ignoring, _, _ = curve([row for row in watched if row[2]])
    assert at(ignoring, 4000.0) < 0.01


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_it_is_the_product_limit_estimate_up_to_the_grid(seed: int) -> None:
    generator = np.random.default_rng(seed)
    watched = []
    for _ in range(300):
        life, from_s = generator.exponential(2000.0), float(generator.choice([0.0, 300.0, 1500.0]))
        leaves = generator.uniform(100.0, 8000.0)
        if from_s < min(life, leaves):
            watched.append((from_s, float(min(life, leaves)), bool(life <= leaves)))
    hazard, _, _ = curve(watched)
    for seconds in (200.0, 1000.0, 3000.0):
        assert at(hazard, seconds) == pytest.approx(product_limit(watched, seconds), abs=0.04)


def test_late_entries_do_not_make_intervals_look_longer() -> None:
    # Only intervals that had reached 2000 s by then are watched at all, as those that ran when watching began.
    generator = np.random.default_rng(2)
    lives = [float(x) for x in generator.exponential(1000.0, 30_000)]
    late = [(2000.0, x, True) for x in lives if x > 2000.0]
    whole = [(0.0, x, True) for x in lives[:5000]]
    hazard, _, _ = curve(late + whole)
    assert at(hazard, 1000.0) == pytest.approx(math.exp(-1.0), abs=0.02)
    assert at(hazard, 3000.0) == pytest.approx(math.exp(-3.0), abs=0.01)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.booleans()), min_size=1, max_size=30), st.floats(1, 1e5))
def test_parts_of_an_interval_add_up_to_the_whole(cuts: list[tuple[float, bool]], end_s: float) -> None:
    whole, parts = np.zeros(WIDTH), np.zeros(WIDTH)
    add_watched(whole, 0.0, True, end_s, False, 1.0)
    begin_s, born = 0.0, True
    for cut_s, _ in cuts:
        # Cuts may lie beyond the end: what was counted too much is taken back.
        if cut_s >= begin_s:
            add_watched(parts, begin_s, born, cut_s, True, 1.0)
            begin_s, born = cut_s, False
    add_watched(parts, begin_s, born, end_s, False, 1.0)
    assert np.cumsum(parts) == pytest.approx(np.cumsum(whole), abs=1e-9)


@given(st.lists(st.tuples(st.one_of(st.just(-1.0), st.floats(0, 1e8)), st.floats(-10, 1e8)), max_size=30))
def test_running_intervals_counted_together_count_as_one_by_one(watched: list[tuple[float, float]]) -> None:
    one_by_one, together = np.zeros(WIDTH), np.zeros(WIDTH)
    for from_s, to_s in watched:
        add_watched(one_by_one, max(from_s, 0.0), from_s < 0.0, to_s, True, 1.0)
    add_all_watched(together, np.array([one[0] for one in watched]), np.array([one[1] for one in watched]))
    assert np.array_equal(together, one_by_one)


def test_the_area_is_the_mean_life() -> None:
    generator = np.random.default_rng(3)
    intervals = generator.exponential(1800.0, 5000)
    _, area, _ = curve([(0.0, float(x), True) for x in intervals])
    assert area[-1] == pytest.approx(intervals.mean(), rel=0.02)


def test_beyond_what_was_seen_the_rate_goes_on_or_nothing_is_known() -> None:
    generator = np.random.default_rng(4)
    watched = [(0.0, min(float(x), 3000.0), x < 3000.0) for x in generator.exponential(2000.0, 2000)]
    hazard, _, known = curve(watched)
    assert lives_on(hazard, known, 4000.0, 1000.0) == pytest.approx(math.exp(-0.5), abs=0.05)
    complete = [row for row in watched if row[2]]
    hazard, _, known = curve(complete, extrapolate=False)
    assert math.isnan(lives_on(hazard, known, 4000.0, 1000.0))
    assert lives_on(hazard, known, 1000.0, 4000.0) == pytest.approx(0.0, abs=1e-9)


def test_of_nothing_nothing_is_known() -> None:
    hazard, _, known = curve([])
    assert math.isnan(lives_on(hazard, known, 0.0, 60.0))
    # A machine that is watched and has not changed is no interval that ended.
    hazard, _, known = curve([(0.0, 500.0, False)])
    assert math.isnan(lives_on(hazard, known, 0.0, 60.0))
