"""Kernels of interval-aware scheduling, held against figures by hand (Wijayawardana 2025, Algorithms 1 to 4)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ebbtide.matcher.policies.intervals import (
    aligned,
    fill_tails,
    is_big,
    mean_remaining_s,
    next_change_s,
    risk,
    since_change_s,
)


def known() -> tuple[np.ndarray, np.ndarray]:
    """Two intervals of one step, one of two, one of four: tails and sums."""
    ended = np.array([0.0, 2.0, 1.0, 0.0, 1.0, 0.0])
    tails, sums = np.zeros(6), np.zeros(6)
    fill_tails(ended, tails, sums)
    return tails, sums


def test_tails_count_what_was_longer() -> None:
    tails, sums = known()
    assert tails.tolist() == [4, 2, 1, 1, 0, 0]
    assert sums.tolist() == [8, 6, 4, 4, 0, 0]


@pytest.mark.parametrize(
    ("uptime_s", "runtime_s", "expected"),
    [
        (0.0, 5.0, 0.0),  # nothing is shorter than a step
        (0.0, 10.0, 0.0),  # it ends when the machines do that last one step
        (0.0, 10.1, 0.5),  # two of four are off by then
        (0.0, 20.1, 0.75),
        (0.0, 41.0, 1.0),
        (10.0, 10.0, 0.0),  # of the two that lasted longer than a step none is off before 20 s
        (10.0, 15.0, 0.5),
        (19.0, 2.0, 0.5),
        (20.0, 20.0, 0.0),
        (20.0, 20.1, 1.0),
        (40.0, 1e9, 0.0),  # nobody knows of one that got so old
        (1e9, 1e9, 0.0),
    ],
)
def test_risk_by_hand(uptime_s: float, runtime_s: float, expected: float) -> None:
    assert risk(known()[0], 10.0, uptime_s, runtime_s) == pytest.approx(expected)


def test_mean_of_what_is_left_by_hand() -> None:
    tails, sums = known()
    assert mean_remaining_s(tails, sums, 10.0, 0.0) == 20.0
    assert mean_remaining_s(tails, sums, 10.0, 15.0) == (20 + 40) / 2 - 15
    assert mean_remaining_s(tails, sums, 10.0, 40.0) == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_risk_is_the_share_of_intervals_that_end_too_early(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 12, 30)
    ended = np.bincount(lengths, minlength=20).astype(float)
    tails, sums = np.zeros(20), np.zeros(20)
    fill_tails(ended, tails, sums)
    uptime, runtime = float(generator.integers(0, 40)) / 4, float(generator.integers(1, 40)) / 4
    left = lengths[lengths > uptime] - uptime
    expected = (left < runtime).mean() if len(left) else 0.0
    assert risk(tails, 60.0, uptime * 60, runtime * 60) == pytest.approx(expected)
    if len(left):
        assert mean_remaining_s(tails, sums, 60.0, uptime * 60) == pytest.approx(left.mean() * 60)


def test_longer_jobs_are_never_less_risky() -> None:
    tails = known()[0]
    for uptime_s in np.arange(0, 60, 2.5):
        risks = [risk(tails, 10.0, uptime_s, runtime_s) for runtime_s in np.arange(0.5, 60, 0.5)]
        assert risks == sorted(risks)


@pytest.mark.parametrize(
    ("runtime_s", "now_s", "every_s", "starts"),
    [
        (600.0, 3600.0 - 601, 3600.0, True),
        (600.0, 3600.0 - 600, 3600.0, False),
        (3600.0, 7200.0, 3600.0, True),
        (3600.0, 7201.0, 3600.0, False),
        (3601.0, 7201.0, 3600.0, True),
        # Four changes an hour: the thesis' formula, which is off for them, would let the second start.
        (300.0, 500.0, 900.0, True),
        (300.0, 700.0, 900.0, False),
    ],
)
def test_small_jobs_start_where_no_change_comes_between(
    runtime_s: float, now_s: float, every_s: float, starts: bool
) -> None:
    assert aligned(runtime_s, now_s, every_s) is starts


@pytest.mark.parametrize("every_s", [3600.0, 450.0, 1200.0, 0.1, 1 / 3])
def test_the_grid_is_met_whatever_rounding_does(every_s: float) -> None:
    now_s = 0.0
    for _ in range(1000):
        after_s = next_change_s(now_s, every_s)
        assert now_s < after_s < now_s + 1.01 * every_s
        assert since_change_s(after_s, every_s) <= 1e-9 * every_s
        now_s = after_s


def test_big_is_by_work() -> None:
    assert is_big(100.0, 4.0, 400.0)
    assert not is_big(399.0, 1.0, 400.0)
    assert not is_big(1e12, 64.0, math.inf)
