"""Reserve of a host: learned from arrivals, bounded, and forgotten when none come any more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.sharing.reserve import (
    FORGET_S,
    HALF_LIFE_S,
    LEAST_REFILL_S,
    MOST_ARRIVALS,
    MOST_REFILL_S,
    MOST_SHARE,
    QUANTILE,
    REFILL_S,
    ReserveLearner,
    reserve_of,
)
from ebbtide.deflation.trimming import Trimmer

_ARRIVALS = st.lists(st.tuples(st.floats(0, 2000), st.floats(1, 64_000)), min_size=1, max_size=120)


def learner(*arrivals: tuple[float, float]) -> ReserveLearner:
    learned = ReserveLearner()
    for at, mib in arrivals:
        learned.arrived(at, mib)
    return learned


def test_a_host_to_which_nothing_came_keeps_nothing_free() -> None:
    assert ReserveLearner().learned_mib(0.0) == 0.0


def test_what_comes_within_one_refill_counts_together() -> None:
    assert learner((0.0, 1000.0), (REFILL_S / 2, 3000.0)).learned_mib(REFILL_S) == 4000.0
    assert learner((0.0, 1000.0), (2 * REFILL_S, 3000.0)).learned_mib(3 * REFILL_S) == 3000.0


def test_one_arrival_in_a_hundred_that_is_huge_is_no_reason_to_keep_so_much() -> None:
    rare = [(i * 1000.0, 64_000.0 if i == 50 else 1000.0) for i in range(100)]
    assert learner(*rare).learned_mib(100_000.0) == 1000.0


def test_what_came_lately_counts_for_more() -> None:
    then = [(i * 400.0, 8000.0) for i in range(50)]
    now = [(10 * HALF_LIFE_S + i * 400.0, 1000.0) for i in range(20)]
    assert learner(*then).learned_mib(20_000.0) == 8000.0
    assert learner(*then, *now).learned_mib(10 * HALF_LIFE_S + 8000.0) == 1000.0


def test_arrivals_are_forgotten_in_the_end() -> None:
    assert learner((0.0, 1000.0)).learned_mib(FORGET_S + 1) == 0.0


@given(_ARRIVALS, st.floats(0, 1e6))
def test_the_reserve_would_have_been_enough_for_the_wanted_share_of_arrivals(
    gaps: list[tuple[float, float]], rest_s: float
) -> None:
    learned, at, times = ReserveLearner(), 0.0, []
    for gap, mib in gaps:
        at += gap
        learned.arrived(at, mib)
        times.append((at, mib))
    now = at
    reserve = learned.learned_mib(now)
    weights, met = 0.0, 0.0
    for i, (came, _) in enumerate(times):
        demand = sum(mib for earlier, mib in times[: i + 1] if earlier >= came - learned.refill_s)
        weight = 0.5 ** ((now - came) / HALF_LIFE_S)
        weights += weight
        met += weight if demand <= reserve * (1 + 1e-9) + 1e-6 else 0.0
    assert met >= QUANTILE * weights * (1 - 1e-6)
    assert learned.learned_mib(now + rest_s) <= sum(mib for _, mib in times) * (1 + 1e-9)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-10, 1e6)), max_size=MOST_ARRIVALS + 50))
def test_what_is_remembered_is_bounded_and_in_order_whatever_the_clock_does(
    arrivals: list[tuple[float, float]],
) -> None:
    kept = learner(*arrivals).arrivals
    assert len(kept) <= MOST_ARRIVALS
    assert kept == sorted(kept, key=lambda one: one[0])
    assert all(mib > 0 for _, mib in kept)


def test_arrivals_after_a_clock_was_set_back_come_one_after_another_and_are_forgotten() -> None:
    ahead, hour = 1e9, 3600.0
    learned = learner((ahead, 1000.0), *((at * hour, 1000.0) for at in range(30)))
    assert learned.learned_mib(30 * hour) == pytest.approx(1000.0)
    assert learned.learned_mib(30 * hour + FORGET_S) == 0.0


def test_how_long_a_refill_takes_is_learned_within_bounds() -> None:
    learned = ReserveLearner()
    for start in range(0, 100_000, 1000):
        learned.observe(start, filling=True)
        learned.observe(start + 60.0, filling=False)
    assert learned.refill_s == pytest.approx(60.0, rel=0.01)
    for start in range(200_000, 1_200_000, 10_000):
        learned.observe(start, filling=True)
        learned.observe(start + 9000.0, filling=False)
    assert learned.refill_s == pytest.approx(MOST_REFILL_S)
    for start in range(2_000_000, 2_100_000, 1000):
        learned.observe(start, filling=True)
        learned.observe(start + 0.1, filling=False)
    assert learned.refill_s == pytest.approx(LEAST_REFILL_S)


def test_the_time_in_which_a_reserve_lacks_too_little_to_be_filled_is_no_part_of_a_refill() -> None:
    learned, trimmer, kept, hour = ReserveLearner(), Trimmer(), 1024.0, 3600.0

    def look(now: float, lacks_mib: float) -> None:
        learned.observe(now, trimmer.is_filling(kept - lacks_mib, kept))

    for now in range(0, int(6 * hour), 10):
        look(now, 40.0)
    look(6 * hour, -1.0)
    assert learned.refill_s == REFILL_S
    look(7 * hour, 40.0)
    # Another arrival: it is filled from here on, until it is full and not only until it lacks little.
    for since, lacks_mib in ((0.0, 300.0), (50.0, 40.0), (100.0, 0.0)):
        look(8 * hour + since, lacks_mib)
    assert learned.refill_s == REFILL_S - 50.0


def test_an_operators_word_goes_before_what_was_learned_and_the_host_bounds_both() -> None:
    assert reserve_of(None, 1000.0, 16_000.0) == 1000.0
    assert reserve_of(None, 90_000.0, 16_000.0) == MOST_SHARE * 16_000.0
    assert reserve_of(6000.0, 1000.0, 16_000.0) == 6000.0
    assert reserve_of(0.0, 1000.0, 16_000.0) == 0.0
    assert reserve_of(90_000.0, 1000.0, 16_000.0) == 16_000.0
