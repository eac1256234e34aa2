"""Figures of a trace in memory that does not grow with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.inputs.batches import SeriesBatch
from ebbtide.simulator.inputs.summary import PERCENTILES, Distribution, Summary


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=200))
def test_percentiles_are_within_one_percent(values: list[float]) -> None:
    distribution = Distribution()
    distribution.add(np.array(values[::2]))
    distribution.add(np.array(values[1::2]))
    found = distribution.as_json()
    assert found is not None
    assert found["count"] == len(values)
    assert (found["min"], found["max"]) == (min(values), max(values))
    assert found["mean"] == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-3)
    ordered = sorted(values)
    for percent in PERCENTILES:
        exact = ordered[math.ceil(len(values) * percent / 100) - 1]
        assert found[f"p{percent}"] == pytest.approx(exact, rel=0.011, abs=2e-6)


def test_sizes_that_repeat_are_exact() -> None:
    distribution = Distribution()
    distribution.add(np.array([1.0, 1, 2, 4, 4, 4, 8, 8, 8, 16]))
    found = distribution.as_json()
    assert found is not None
    assert [found[f"p{p}"] for p in PERCENTILES] == [4, 8, 16, 16]


def test_what_is_not_said_does_not_count() -> None:
    distribution = Distribution()
    distribution.add(np.array([np.nan, np.nan]))
    assert distribution.as_json() is None


def test_gaps_reach_over_batches() -> None:
    summary = Summary("series")
    for times in ([0.0, 10], [20.0], [50.0, 60]):
        summary.add(SeriesBatch(at_s=np.array(times), value=np.ones(len(times))))
    found = summary.as_json()
    assert (found["rows"], found["first_s"], found["last_s"]) == (5, 0, 60)
    assert found["distributions"]["gap_s"]["count"] == 4
    assert found["distributions"]["gap_s"]["max"] == 30
