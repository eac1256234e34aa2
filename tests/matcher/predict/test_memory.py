"""Predictors that go on where they stopped, and pools that begin with what another has shown."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.memory import document, prior, restored, warm
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.rolling import GROWTH, SHRINK
from tests.matcher.pools import renewal_pool

HALF_S = 43_200.0
LANDMARK = PredictorOptions(form="landmark", sized=True)
EQUATION = PredictorOptions(sized=True)


def law(generator: np.random.Generator) -> float:
    return float(generator.exponential(700.0))


@pytest.fixture(scope="module")
def changes() -> list[Change]:
    return list(renewal_pool(12, law, 3 * HALF_S, seed=3))


def run(predictor: Predictor, changes: list[Change], until_s: float) -> Predictor:
    for change in changes:
        if predictor.now <= change.at < until_s:
            predictor.observe(change)
    predictor.advance(until_s)
    return predictor


def answers(predictor: Predictor) -> list[float]:
    return [
        float(predictor.probability(x, e, d, 2.0))
        for x in (GROWTH, SHRINK)
        for e in (0.0, 900.0)
        for d in (60.0, 600.0, 3600.0)
    ]


@pytest.mark.parametrize("options", [EQUATION, LANDMARK], ids=["equation", "landmark"])
def test_a_restored_predictor_goes_on_exactly_as_if_it_had_never_stopped(
    changes: list[Change], options: PredictorOptions
) -> None:
    whole = run(Predictor(0.0, options), changes, 3 * HALF_S)
    first = run(Predictor(0.0, options), changes, 2 * HALF_S)
    again = restored(json.loads(json.dumps(document(first))), options)
    assert again.now == first.now
    assert answers(again) == answers(first)
    run(again, changes, 3 * HALF_S)
    assert answers(again) == answers(whole)
    assert again.probabilities_of(["m3"], 3 * HALF_S, 600.0) == whole.probabilities_of(["m3"], 3 * HALF_S, 600.0)


def test_a_document_of_the_version_before_is_read_and_new_landmarks_begin_with_how_machines_stand(
    changes: list[Change],
) -> None:
    first = run(Predictor(0.0, EQUATION), changes, 2 * HALF_S)
    # With those that were counted otherwise.
    old = document(first) | {"version": 1, "landmarks": {"at_s": {}}}
    assert "period" not in old
    assert answers(restored(old, EQUATION)) == answers(first)
    again = restored(old, LANDMARK)
    assert again.period.stood_cores[again.rows["m3"]] == first.lasts()["m3"].cores
    assert again.known().totals[2] == 0.0
    run(again, changes, 3 * HALF_S)
    cold = run(Predictor(2 * HALF_S, LANDMARK), changes, 3 * HALF_S)
    assert again.known().totals[2] > cold.known().totals[2] > 20.0
    # And landmarks are no hindrance to one that counts none.
    assert not restored(document(again), EQUATION).by_landmarks


@pytest.mark.parametrize("shape", [[13, 80, 55], [1, 80, 462]])
def test_landmarks_on_another_grid_are_refused(changes: list[Change], shape: list[int]) -> None:
    found = document(run(Predictor(0.0, LANDMARK), changes, HALF_S))
    found["period"]["watched"] = {"shape": shape, "type": "floats", "index": [], "value": []}
    with pytest.raises(InvalidField, match="another grid"):
        restored(found, LANDMARK)


def test_a_prior_of_landmarks_is_known_at_once_where_they_are_counted(changes: list[Change]) -> None:
    taught = json.loads(json.dumps(prior(run(Predictor(0.0, LANDMARK), changes, 2 * HALF_S))))
    fresh, other = Predictor(0.0, LANDMARK), Predictor(0.0, EQUATION)
    for predictor in (fresh, other):
        warm(predictor, taught, 50.0)
    assert fresh.known().totals[2] == pytest.approx(50.0)
    assert other.known().totals[2] == 0.0
    longer = Predictor(0.0, PredictorOptions(form="landmark", sized=True, horizon_s=50_000.0))
    with pytest.raises(InvalidField, match=r"all_watched.*horizon_s"):
        warm(longer, taught)
    assert longer.state.all_ended.sum() == 0.0


def broken(found: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(found)
    made[field] = value
    return made


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("version", 4, "version"),
        ("kind", "prior", "kind"),
        ("grid", [1, 2, 3], "grid"),
        ("slices", [1.0, 2.0, 3.0], "window_s"),
        ("rolling", {}, "document"),
        ("rows", {"a": 99_999}, "document"),
        ("last", {"a": [1.0]}, "document"),
    ],
)
def test_a_document_that_cannot_be_read_is_refused_with_its_field(
    changes: list[Change], field: str, value: Any, named: str
) -> None:
    found = document(run(Predictor(0.0), changes, HALF_S))
    with pytest.raises(InvalidField, match=named):
        restored(broken(found, field, value))


def test_a_pool_that_begins_with_another_ones_history_knows_something_at_once(changes: list[Change]) -> None:
    taught = prior(run(Predictor(0.0, LANDMARK), changes, 2 * HALF_S))
    fresh = Predictor(0.0, LANDMARK)
    assert math.isnan(float(fresh.probability(GROWTH, 0.0, 600.0)))
    warm(fresh, json.loads(json.dumps(taught)), 20.0)
    old = run(Predictor(0.0), changes, 2 * HALF_S)
    known = Predictor(0.0)
    warm(known, taught, 20.0)
    assert known.probability(GROWTH, 0.0, 600.0) == pytest.approx(float(old.probability(GROWTH, 0.0, 600.0)), abs=0.05)
    assert not math.isnan(float(fresh.probability(GROWTH, 0.0, 600.0)))


@pytest.mark.parametrize("hours", [0.5, 0.9, 1.9])
@pytest.mark.parametrize("form", ["next-change", "next-shrink"])
def test_what_a_pool_hands_on_says_what_it_says_itself_also_of_machines_that_have_kept_their_cores(
    form: str, hours: float
) -> None:
    """Intervals that run are cut, and counted, on the hour only."""
    own = Predictor(0.0, PredictorOptions(form=form))
    for change in renewal_pool(40, lambda generator: float(generator.exponential(14_400.0)), hours * 3600.0, seed=5):
        own.observe(change)
    own.advance(hours * 3600.0)
    ended = float(own.state.all_ended.sum())
    assert 0 < ended < 40
    for weight in (1.0, ended, 1000.0):
        warmed = Predictor(0.0, own.options)
        warm(warmed, json.loads(json.dumps(prior(own))), weight)
        for duration_s in (300.0, 1200.0):
            found = float(warmed.probability(GROWTH, 60.0, duration_s))
            assert found == pytest.approx(float(own.probability(GROWTH, 60.0, duration_s)))


def test_a_pools_own_history_outweighs_what_it_began_with(changes: list[Change]) -> None:
    taught = prior(run(Predictor(0.0), changes, 2 * HALF_S))
    slow = list(renewal_pool(12, lambda generator: float(generator.exponential(20_000.0)), 4 * HALF_S, seed=4))
    warmed = Predictor(0.0)
    warm(warmed, taught, 5.0)
    run(warmed, slow, 4 * HALF_S)
    cold = run(Predictor(0.0), slow, 4 * HALF_S)
    assert warmed.probability(GROWTH, 0.0, 3600.0) == pytest.approx(cold.probability(GROWTH, 0.0, 3600.0), abs=0.1)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_bad_weight_changes_nothing(changes: list[Change], weight: float) -> None:
    taught = prior(run(Predictor(0.0), changes, HALF_S))
    fresh = Predictor(0.0)
    with pytest.raises(InvalidField, match="weight"):
        warm(fresh, taught, weight)
    assert fresh.state.all_ended.sum() == 0.0
