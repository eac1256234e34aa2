"""Means and their intervals, by examples worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ebbtide.simulator.experiments.results import Results
from ebbtide.simulator.experiments.statistics import interval


def test_an_interval_is_students() -> None:
    # Standard deviation sqrt(2.5), t of 4 degrees at 97.5 % 2.776445 (tables): 2.776445 * sqrt(2.5 / 5).
    found = interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (found.mean, found.count) == (3.0, 5)
    assert found.high - found.mean == pytest.approx(1.963243, abs=1e-6)
    assert found.mean - found.low == pytest.approx(1.963243, abs=1e-6)


def test_what_is_no_number_is_left_out_and_counted_so() -> None:
    found = interval(np.array([1.0, math.nan, 3.0]))
    assert (found.mean, found.count) == (2.0, 2)
    # t of one degree at 97.5 % is 12.7062; the deviation is sqrt(2), over sqrt(2).
    assert found.high == pytest.approx(2 + 12.7062, abs=1e-4)


def test_one_number_has_no_interval_and_none_has_nothing() -> None:
    one, none = interval(np.array([7.0])), interval(np.array([math.nan]))
    assert (one.mean, one.count, math.isnan(one.low), math.isnan(one.high)) == (7.0, 1, True, True)
    assert (none.count, math.isnan(none.mean), math.isnan(none.low)) == (0, True, True)
    infinite = interval(np.array([1.0, math.inf]))
    assert (infinite.mean, math.isnan(infinite.low)) == (math.inf, True)


def test_what_does_not_vary_has_an_interval_of_no_width() -> None:
    found = interval(np.full(7, 0.1))
    assert (found.mean, found.low, found.high) == (0.1, 0.1, 0.1)


def test_intervals_cover_the_true_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    found = [interval(rng.normal(5, 2, 6)) for _ in range(4000)]
    share = np.mean([one.low <= 5 <= one.high for one in found])
    assert 0.94 < share < 0.96


def test_an_interval_over_what_is_left_open_is_one_over_seeds() -> None:
    """A hundred cases of two seeds tell of chance no more than two numbers."""
    cases, chance = np.arange(100.0), {1: -5.0, 2: 5.0}
    seed = np.tile([1, 2], 100)
    y = np.repeat(cases, 2) + np.array([chance[one] for one in seed.tolist()])
    y[:2] = np.nan
    meta = {"name": "a", "axes": ["x"], "metrics": ["y"], "seeds": [1, 2]}
    found = Results({"x": np.repeat(cases, 2), "seed": seed, "y": y}, meta)
    over_all = found.mean("y")
    assert (over_all.mean, over_all.count) == (50.0, 2)
    assert over_all.high - over_all.mean == pytest.approx(12.7062 * 5, abs=1e-3)
    assert found.mean("y", {"x": 3.0}) == interval(np.array([-2.0, 8.0]))
    assert found.mean("y", {"x": 0.0}).count == 0
