"""Measures that stream by: each value falls into the bin that its logarithm says, and a sum loses nothing."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.jobs.measures import BINS, GROWTH, LEAST, add, bin_of


def by_logarithm(value: float) -> int:
    return min(int(math.log(value / LEAST) / GROWTH) + 1, BINS - 1)


@given(st.floats(LEAST, 1e18) | st.integers(1, 1 << 40).map(float))
def test_a_value_falls_into_the_bin_of_its_logarithm(value: float) -> None:
    assert bin_of(value) == by_logarithm(value)


def test_so_it_does_where_a_bin_ends_or_a_float_gets_another_upper_half() -> None:
    ends = LEAST * np.exp(np.arange(1, BINS) * GROWTH)
    near = (ends[:, None] * (1 + np.array([-1e-11, -1e-12, -1e-13, 0, 1e-13, 1e-12, 1e-11]))).ravel()
    halves = (np.arange(int(np.float64(LEAST).view(np.int64) >> 44) + 1, 1077 << 8) << 44).view(np.float64)
    for value in (LEAST, *near.tolist(), *halves.tolist(), *np.nextafter(halves, 0.0).tolist()):
        assert bin_of(value) == by_logarithm(value), value


@given(st.lists(st.floats(-1e15, 1e15), max_size=30))
def test_a_sum_is_right_to_its_last_place_but_one(values: list[float]) -> None:
    sums = np.zeros(2)
    for value in values:
        add(sums, 0, value)
    most = max(map(abs, values), default=0.0)
    assert math.isclose(float(sums[0]) + float(sums[1]), math.fsum(values), rel_tol=2.3e-16, abs_tol=most * 1e-28)
