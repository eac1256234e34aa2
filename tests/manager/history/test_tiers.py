"""Tiers of the history: every moment is read from one of them, and nothing is deleted that is still read."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.history.tiers import DAY_S, HOUR_S, LATE_S, TIERS, due, folded_by, outlived, stretches

NOW = 20_000 * DAY_S
#: How far folding has come: by an hour, by a day, or not at all; a manager may have been away for long.
folded = st.fixed_dictionaries(
    {},
    optional={
        600: st.integers(0, 24 * 40).map(lambda hours: NOW - HOUR_S * hours),
        3600: st.integers(0, 40).map(lambda days: NOW - DAY_S * days),
    },
)
moments = st.floats(0, 0.99 * DAY_S).map(lambda seconds: NOW + seconds)


@given(st.floats(1, 40 * DAY_S), moments, folded)
def test_the_tiers_cover_a_time_without_a_hole_or_a_moment_twice(
    length: float, now: float, done: dict[int, int]
) -> None:
    parts = stretches(now - length, now, done, now)
    assert parts[0].begin <= now - length
    assert parts[-1].end >= now
    assert all(one.end == other.begin for one, other in itertools.pairwise(parts))
    assert all(one.tier.step_s > other.tier.step_s for one, other in itertools.pairwise(parts))
    for part, (finer, coarser) in itertools.product(parts, itertools.pairwise(TIERS)):
        if part.tier is coarser and coarser.step_s in done:
            assert part.end <= done[coarser.step_s], "what has not been folded is still in the finer one"
        if part.tier is finer and part is not parts[0]:
            assert part.begin % coarser.span_s == 0


@given(st.floats(1, 40 * DAY_S), moments, folded)
def test_nothing_is_deleted_that_is_read_or_to_be_folded(length: float, now: float, done: dict[int, int]) -> None:
    parts = {part.tier: part for part in stretches(now - length, now, done, now)}
    for tier, coarser in zip(TIERS, (*TIERS[1:], None), strict=True):
        gone = outlived(tier, coarser, done, now)
        if coarser is not None:
            assert gone <= done.get(coarser.step_s, 0)
            if tier in parts and coarser.step_s in done:
                assert parts[tier].begin >= gone or length > TIERS[-1].kept_s


@given(moments, folded)
def test_what_was_folded_stays_so_but_for_what_a_clock_that_is_set_back_has_not_reached(
    now: float, done: dict[int, int]
) -> None:
    assert folded_by(done, now) == done
    ahead = {step_s: until + 50 * DAY_S for step_s, until in done.items()}
    assert folded_by(ahead, NOW + HOUR_S + 1.0) == {
        step_s: NOW + HOUR_S if step_s == TIERS[1].step_s else NOW for step_s in done
    }


@given(moments, folded, st.integers(0, 40 * 24).map(lambda hours: NOW - HOUR_S * hours))
def test_spans_are_folded_once_in_order_and_only_when_they_are_over(
    now: float, done: dict[int, int], oldest: int
) -> None:
    for before, tier in itertools.pairwise(TIERS):
        spans = due(tier, before, done, oldest, now)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
        assert due(tier, before, done, None, now) == []
        for begin, end in spans:
            assert end - begin == tier.span_s
            assert begin % tier.span_s == 0
            assert end <= now - LATE_S
            assert begin >= done.get(tier.step_s, 0)


def test_a_clock_that_was_far_behind_leaves_no_more_to_be_folded_than_is_kept() -> None:
    for before, tier in itertools.pairwise(TIERS):
        spans = due(tier, before, {600: 0 if tier.step_s == 600 else NOW}, 0, NOW)
        assert NOW - TIERS[-1].kept_s - 2 * DAY_S <= spans[0][0] <= NOW - TIERS[-1].kept_s
