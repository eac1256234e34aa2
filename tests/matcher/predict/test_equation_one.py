"""Equation 1 of Agarwal et al. 2023 over observed core changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.changes import Change, Direction, whole_cores
from tests.matcher.equation_one import completion_probability, history_of, survival

#: Ten intervals like Fig. 8: 0.8 of them are longer than 20 s, 0.6 longer than 50 s.
FIGURE_8 = np.array([10.0, 20.0, 30.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 110.0])

Times = NDArray[np.float64]
GROWTH, SHRINK = Direction.GROWTH, Direction.SHRINK


def test_the_worked_example_of_figure_8() -> None:
    assert survival(FIGURE_8, 20.0) == pytest.approx(0.8)
    assert survival(FIGURE_8, 50.0) == pytest.approx(0.6)
    # P(X <= e + d | X > e) = 1 - 0.6 / 0.8, and every change is a shrink.
    assert completion_probability(FIGURE_8, 1.0, elapsed_s=20.0, duration_s=30.0) == pytest.approx(0.75)


def test_only_shrinks_end_a_task() -> None:
    assert completion_probability(FIGURE_8, 0.5, 20.0, 30.0) == pytest.approx(0.875)
    assert completion_probability(FIGURE_8, 0.0, 20.0, 30.0) == 1.0


def test_without_a_completed_interval_nothing_is_known() -> None:
    assert completion_probability(np.array([]), 1.0, 0.0, 10.0) is None


def test_without_a_bigram_nothing_is_known_even_where_no_change_is_in_sight() -> None:
    assert completion_probability(FIGURE_8, None, 0.0, 1.0) is None


def test_a_machine_that_has_outlived_every_interval_is_unknown() -> None:
    assert completion_probability(FIGURE_8, 1.0, 110.0, 10.0) is None
    assert completion_probability(FIGURE_8, 1.0, 109.0, 10.0) == 0.0


def test_a_clock_that_is_behind_counts_as_no_time() -> None:
    assert completion_probability(FIGURE_8, 1.0, -5.0, 15.0) == completion_probability(FIGURE_8, 1.0, 0.0, 15.0)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((1.0, 0.0, -1.0), "duration_s"),
        ((1.0, 0.0, math.inf), "duration_s"),
        ((1.0, 0.0, math.nan), "duration_s"),
        ((None, 0.0, math.nan), "duration_s"),
        ((1.0, math.nan, 1.0), "elapsed_s"),
        ((1.5, 0.0, 1.0), "shrink_probability"),
        ((math.nan, 0.0, 1.0), "shrink_probability"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[float | None, float, float], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        completion_probability(FIGURE_8, *arguments)
    assert caught.value.field == field


times = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60).map(lambda values: np.sort(np.array(values)))
spans = st.floats(0.0, 2e6)
shares = st.floats(0.0, 1.0)


@given(intervals=times, share=shares, elapsed_s=spans, duration_s=spans)
def test_it_is_a_probability_or_unknown(intervals: Times, share: float, elapsed_s: float, duration_s: float) -> None:
    probability = completion_probability(intervals, share, elapsed_s, duration_s)
    assert (probability is None) == (elapsed_s >= intervals[-1])
    assert probability is None or 0.0 <= probability <= 1.0


@given(intervals=times, share=shares, elapsed_s=spans, first=spans, second=spans)
def test_a_longer_task_is_never_likelier_to_complete(
    intervals: Times,
    share: float,
    elapsed_s: float,
    first: float,
    second: float,
) -> None:
    short = completion_probability(intervals, share, elapsed_s, min(first, second))
    long = completion_probability(intervals, share, elapsed_s, max(first, second))
    assert (short is None) == (long is None)
    assert short is None or long is None or long <= short + 1e-12


@given(intervals=times, share=shares, elapsed_s=spans)
def test_a_task_of_no_length_always_completes(intervals: Times, share: float, elapsed_s: float) -> None:
    assert completion_probability(intervals, share, elapsed_s, 0.0) in (1.0, None)


@given(intervals=times, low=shares, high=shares, elapsed_s=spans, duration_s=spans)
def test_more_shrinks_never_help(
    intervals: Times, low: float, high: float, elapsed_s: float, duration_s: float
) -> None:
    steady = completion_probability(intervals, min(low, high), elapsed_s, duration_s)
    shaky = completion_probability(intervals, max(low, high), elapsed_s, duration_s)
    assert steady is None or shaky is None or shaky <= steady + 1e-12


# --- histories -------------------------------------------------------------------------------------------------------


def test_intervals_and_bigrams_come_from_successive_changes_of_one_machine() -> None:
    history = history_of(
        [
            Change("a", 100.0, 0.0, 3.0),
            Change("a", 130.0, 3.0, 1.0),
            Change("b", 140.0, 0.0, 2.0),
            Change("a", 190.0, 1.0, 3.0),
        ],
        now=200.0,
    )
    assert history.intervals.tolist() == [30.0, 60.0]
    assert history.pairs == {(GROWTH, SHRINK): 1, (SHRINK, GROWTH): 1}
    assert history.shrink_probability(GROWTH) == 1.0
    assert history.shrink_probability(SHRINK) == 0.0
    assert (history.last["a"].at, history.last["a"].direction, history.last["a"].cores) == (190.0, GROWTH, 3)


def test_only_whole_cores_count() -> None:
    assert [whole_cores(value) for value in (0.0, 0.99, 1.0, 2.9999999, 2.5)] == [0, 0, 1, 3, 2]
    history = history_of([Change("a", 1.0, 0.0, 2.9), Change("a", 5.0, 2.9, 2.1), Change("a", 9.0, 2.1, 1.9)], now=10.0)
    assert history.intervals.tolist() == [8.0]
    assert history.last["a"].at == 9.0


def test_beginning_and_end_count_even_below_one_core() -> None:
    history = history_of([Change("a", 1.0, 0.0, 0.5), Change("a", 5.0, 0.5, 0.0)], now=10.0)
    assert history.pairs == {(GROWTH, SHRINK): 1}
    assert history.last["a"].gone


def test_nothing_reaches_over_the_end_of_a_machine() -> None:
    history = history_of(
        [Change("a", 1.0, 0.0, 2.0), Change("a", 5.0, 2.0, 0.0), Change("a", 50.0, 0.0, 2.0)], now=60.0
    )
    assert history.intervals.tolist() == [4.0]
    assert not history.last["a"].gone


def test_an_end_by_the_owner_completes_no_interval() -> None:
    history = history_of([Change("a", 1.0, 0.0, 2.0), Change("a", 5.0, 2.0, 0.0, by_owner=True)], now=10.0)
    assert len(history.intervals) == 0
    assert history.pairs == {}
    assert history.last["a"].gone


def test_only_the_window_teaches_but_what_is_older_still_says_where_a_machine_stands() -> None:
    old = [Change("a", 0.0, 0.0, 2.0), Change("a", 10.0, 2.0, 1.0)]
    history = history_of([*old, Change("a", 500.0, 1.0, 2.0)], now=600.0, window_s=200.0)
    assert history.intervals.tolist() == [490.0]
    assert history.pairs == {(SHRINK, GROWTH): 1}
    assert history_of(old, now=600.0, window_s=200.0).last["a"].direction is SHRINK


def test_what_was_never_seen_has_no_shrink_probability() -> None:
    assert history_of([], now=0.0).shrink_probability(GROWTH) is None


@given(st.data())
def test_the_order_of_arrival_does_not_matter(data: st.DataObject) -> None:
    sizes = st.floats(0.0, 8.0)
    changes = [
        Change(data.draw(st.sampled_from("ab")), float(at), data.draw(sizes), data.draw(sizes)) for at in range(12)
    ]
    there, back = history_of(changes, 20.0), history_of(reversed(changes), 20.0)
    assert there.intervals.tolist() == back.intervals.tolist()
    assert (there.pairs, there.last) == (back.pairs, back.last)
    assert sum(there.pairs.values()) == len(there.intervals)
    assert all(interval > 0 for interval in there.intervals)
