"""Who waits, what that is predicted from, and the forest that predicts: kernels, held against figures by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ebbtide.matcher.policies.cluster_state import FEATURES, SUMS, began, describe, ended, waits, waits_no_more
from ebbtide.matcher.policies.forest import Forest, grown, nothing, predicted
from ebbtide.matcher.policies.waiting import (
    MIB_A_CORE,
    ON_DEMAND,
    SIZES,
    TRY,
    WAIT,
    after_trial,
    at_arrival,
    leaves_at_s,
    length_s,
    rented_cores,
    tried_for_s,
)


@pytest.mark.parametrize(
    ("length", "late", "tries", "what"),
    [
        (899.0, False, False, ON_DEMAND),
        (900.0, False, False, WAIT),
        (900.0, True, False, ON_DEMAND),
        (899.0, True, False, ON_DEMAND),
        (math.nan, False, False, WAIT),
        (1.0, False, True, TRY),
        (1e9, True, True, TRY),
    ],
)
def test_a_job_waits_only_if_both_policies_say_so(length: float, late: bool, tries: bool, what: int) -> None:
    assert at_arrival(length, 900.0, late, tries) == what


def test_nothing_is_tried_for_no_time() -> None:
    assert at_arrival(1.0, 0.0, False, True) == WAIT


def test_a_long_job_that_would_be_late_stays_where_it_was_tried() -> None:
    assert after_trial(True) == ON_DEMAND
    assert after_trial(False) == WAIT


def test_lengths_are_core_time_or_runtime() -> None:
    assert (length_s(60.0, 4, True), length_s(60.0, 4, False)) == (240.0, 60.0)
    assert (tried_for_s(900.0, 4, True), tried_for_s(900.0, 4, False)) == (225.0, 900.0)
    assert leaves_at_s(5.0, math.inf) == math.inf


@pytest.mark.parametrize(
    ("cores", "gib", "size"), [(1, 0, 2), (2, 8, 2), (2, 9, 4), (33, 0, 48), (96, 384, 96), (97, 0, 192), (1, 400, 192)]
)
def test_the_smallest_size_that_holds_it_is_rented(cores: int, gib: int, size: int) -> None:
    assert rented_cores(np.array(SIZES), MIB_A_CORE, cores, gib * 1024) == size


def test_features_are_those_of_table_1() -> None:
    """Two of four cores run since 10 s and 30 s, a job of three cores waits since 20 s; it is 50 s now."""
    sums = np.zeros(SUMS)
    sums[1], sums[3] = 4.0, 1000.0
    began(sums, 1.0, 100.0, 10.0)
    began(sums, 1.0, 150.0, 30.0)
    waits(sums, 3.0, 20.0)
    found = np.zeros(len(FEATURES))
    describe(found, sums, 50.0, 2.0)
    assert found.tolist() == [0.5, 0.25, 2.0, 1.0, 1.0, 30.0, 3.0, 30.0, 2.0]
    ended(sums, 1.0, 100.0, 10.0)
    ended(sums, 1.0, 150.0, 30.0)
    waits_no_more(sums, 3.0, 20.0)
    describe(found, sums, 60.0, 1.0)
    assert found.tolist() == [0.0] * 8 + [1.0]


def test_a_forest_is_asked_down_to_its_leaves() -> None:
    """Two trees: x0 <= 3 says .25, else .75; and one leaf that says 1."""
    forest = Forest(
        roots=np.array([0, 3]),
        feature=np.array([0, -1, -1, -1]),
        threshold=np.array([3.0, 0.0, 0.0, 0.0]),
        child=np.array([1, -1, -1, -1]),
        value=np.array([0.5, 0.25, 0.75, 1.0]),
    )
    assert predicted(forest, np.array([3.0])) == (0.25 + 1.0) / 2
    assert predicted(forest, np.array([3.1])) == (0.75 + 1.0) / 2
    assert predicted(nothing(), np.array([3.1])) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_a_forest_learns_what_no_straight_line_can(seed: int) -> None:
    """Late if exactly one of two features is high."""
    generator = np.random.default_rng(seed)
    rows = generator.uniform(size=(4000, 4))
    labels = ((rows[:, 0] > 0.6) ^ (rows[:, 1] > 0.3)).astype(float)
    forest = grown(rows[:3000], labels[:3000], generator, trees=8)
    said = np.array([predicted(forest, row) for row in rows[3000:]]) >= 0.5
    assert (said == (labels[3000:] >= 0.5)).mean() > 0.95


def test_the_same_seed_grows_the_same_forest() -> None:
    rows = np.random.default_rng(1).uniform(size=(500, 3))
    labels = (rows[:, 0] > 0.5).astype(float)
    one, other = (grown(rows, labels, np.random.default_rng(9), trees=3) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))


def test_leaves_are_not_smaller_than_asked_and_trees_not_deeper() -> None:
    rows = np.random.default_rng(2).uniform(size=(300, 2))
    labels = np.random.default_rng(3).integers(0, 2, 300).astype(float)
    forest = grown(rows, labels, np.random.default_rng(4), trees=1, depth=2, least_leaf=60)
    assert 1 < (forest.feature < 0).sum() <= 4
    assert len(grown(rows, labels, np.random.default_rng(4), trees=1, least_leaf=200).feature) == 1


def test_forests_refuse_what_they_cannot_learn_from() -> None:
    generator = np.random.default_rng(1)
    with pytest.raises(ValueError, match="shapes"):
        grown(np.zeros((3, 2)), np.zeros(2), generator)
    with pytest.raises(ValueError, match="finite"):
        grown(np.full((3, 2), np.nan), np.zeros(3), generator)
    assert len(grown(np.zeros((0, 2)), np.zeros(0), generator).roots) == 0
