"""Who waits, what that is predicted from, and the forest that predicts: kernels, held against figures by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ebbtide.matcher.policies.cluster_state import FEATURES, SUMS, began, describe, ended, waits, waits_no_more
from ebbtide.matcher.policies.forest import Forest, nothing, predicted
from ebbtide.matcher.policies.past_lengths import COLUMNS, PRIOR, found_out, long_chance
from ebbtide.matcher.policies.waiting import (
    BELIEVED_LATE,
    BELIEVED_MCC,
    HOLD,
    MIB_A_CORE,
    ON_DEMAND,
    SIZES,
    TRY,
    WAIT,
    after_trial,
    at_arrival,
    believed,
    leaves_at_s,
    length_s,
    rented_cores,
    tried,
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


def test_what_is_likely_long_is_not_tried_and_the_rest_one_after_the_other() -> None:
    assert tried(0.9, 0.8, trials=0, now_s=5.0, held_until_s=60.0) == WAIT
    assert tried(0.8, 0.8, trials=0, now_s=5.0, held_until_s=60.0) == TRY
    assert tried(0.5, 0.8, trials=3, now_s=5.0, held_until_s=60.0) == HOLD
    assert tried(0.5, 0.8, trials=3, now_s=60.0, held_until_s=60.0) == TRY
    # The paper's.
    assert tried(1.0, 1.0, trials=3, now_s=5.0, held_until_s=5.0) == TRY


def test_a_model_that_says_no_more_than_chance_or_has_seen_little_is_not_believed() -> None:
    assert believed(BELIEVED_MCC, BELIEVED_LATE)
    assert not believed(BELIEVED_MCC - 0.01, 10_000)
    assert not believed(0.9, BELIEVED_LATE - 1)
    assert not believed(math.nan, 10_000)


def test_what_is_known_of_the_past_ages_by_when_jobs_came() -> None:
    """Half-life 10 s: at 20 s a long one of 10 s weighs 1/2, a short one of 20 s 1; the prior .2 of .3."""
    past = np.zeros((5, COLUMNS))
    assert long_chance(past, 2, 0.0, 10.0) == pytest.approx(PRIOR)
    found_out(past, 2, True, 10.0, 15.0, 10.0)
    found_out(past, 2, False, 20.0, 20.0, 10.0)
    assert long_chance(past, 2, 20.0, 10.0) == pytest.approx((0.5 + 0.06) / (1.5 + 0.2))
    assert long_chance(past, 2, 1e6, 10.0) == pytest.approx(PRIOR)
    assert long_chance(past, 3, 20.0, 10.0) == pytest.approx(PRIOR)


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
        low=np.array([2, -1, -1, -1]),
        high=np.array([1, -1, -1, -1]),
        value=np.array([0.5, 0.75, 0.25, 1.0]),
    )
    assert predicted(forest, np.array([3.0])) == (0.25 + 1.0) / 2
    assert predicted(forest, np.array([3.1])) == (0.75 + 1.0) / 2
    assert predicted(nothing(), np.array([3.1])) == 0.0
