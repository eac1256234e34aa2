"""The reliability curve and the Brier score."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.calibration import Calibration
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.self_check import SelfCheck


def test_deciles_hold_what_was_predicted_and_what_came_true() -> None:
    calibration = Calibration()
    for completed in (True, True, True, False):
        calibration.add(0.72, completed)
    calibration.add(1.0, True)
    low, high = calibration.curve()
    assert (low.low, low.count, low.observed) == (0.7, 4, 0.75)
    assert low.predicted == pytest.approx(0.72)
    assert low.error == pytest.approx(0.03)
    assert (high.low, high.count, high.error) == (0.9, 1, 0.0)
    assert calibration.brier == pytest.approx((3 * 0.28**2 + 0.72**2) / 5)
    assert calibration.worst_error(least=2) == pytest.approx(0.03)
    assert calibration.worst_error(least=100) is None


def test_what_is_unknown_is_no_prediction() -> None:
    calibration = Calibration()
    calibration.add(math.nan, True)
    calibration.add_all(np.array([math.nan, 0.5]), np.array([True, False]))
    assert calibration.count == 1
    assert Calibration().brier is None


@pytest.mark.parametrize("predicted", [-0.1, 1.1, math.inf])
def test_a_probability_that_is_none_is_refused(predicted: float) -> None:
    with pytest.raises(InvalidField, match="predicted"):
        Calibration().add(predicted, True)
    with pytest.raises(InvalidField, match="predicted"):
        Calibration().add_all(np.array([predicted]), np.array([True]))


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_one_by_one_and_all_at_once_are_the_same_and_outlive_a_document(rows: list[tuple[float, bool]]) -> None:
    one, many = Calibration(), Calibration()
    for predicted, completed in rows:
        one.add(predicted, completed)
    many.add_all(np.array([row[0] for row in rows]), np.array([row[1] for row in rows], bool))
    again = Calibration.of(json.loads(json.dumps(many.document())))
    assert [row.count for row in one.curve()] == [row.count for row in again.curve()]
    assert [row.observed for row in one.curve()] == pytest.approx([row.observed for row in again.curve()])
    assert one.brier == pytest.approx(again.brier) if rows else again.brier is None


def test_a_document_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidField, match="version"):
        Calibration.of({"version": 99})


def known_pool() -> Predictor:
    predictor = Predictor(0.0)
    for number in range(10):
        for step in range(20):
            before, after = (3.0, 4.0) if step % 2 else (4.0, 3.0)
            predictor.observe(Change(f"m{number}", 100.0 * step + number, 0.0 if step == 0 else before, after))
    return predictor


def test_a_shrink_within_the_duration_refutes_a_prediction_and_time_proves_it() -> None:
    predictor = known_pool()
    check = SelfCheck(predictor, (150.0,), 50.0)
    check.advance(2000.0)
    assert check.calibration.count == 0
    check.observe(Change("m0", 2100.0, 4.0, 3.0))
    check.observe(Change("m1", 2100.0, 4.0, 5.0))
    check.observe(Change("m2", 2100.0, 4.0, 0.0, by_owner=True))
    # Its owner may take that one away, too.
    assert check.calibration.count == 0
    check.advance(2200.0)
    # All but the one that its owner took away.
    assert (check.calibration.count, outcomes(check)) == (9, (8, 1))


def outcomes(check: SelfCheck) -> tuple[int, int]:
    """So many predictions came true, and so many did not."""
    true = sum(round(row.count * row.observed) for row in check.calibration.curve())
    return true, check.calibration.count - true


@pytest.mark.parametrize(("ends_at", "expected"), [(2100.0, (0, 0)), (2160.0, (1, 1))])
def test_what_an_owner_ends_has_an_outcome_only_if_the_time_was_over_whether_it_shrank_or_not(
    ends_at: float, expected: tuple[int, int]
) -> None:
    predictor = known_pool()
    check = SelfCheck(predictor, (150.0,), 500.0)
    check.advance(2000.0)
    check.observe(Change("m0", 2050.0, 4.0, 3.0))
    for machine, cores in (("m0", 3.0), ("m1", 4.0)):
        check.observe(Change(machine, ends_at, cores, 0.0, by_owner=True))
    assert outcomes(check) == expected


def test_a_preemption_refutes_at_once_and_a_machine_that_begins_anew_says_nothing_of_before() -> None:
    predictor = known_pool()
    check = SelfCheck(predictor, (150.0,), 500.0)
    check.advance(2000.0)
    check.observe(Change("m0", 2050.0, 4.0, 0.0))
    check.observe(Change("m1", 2160.0, 0.0, 4.0))
    assert outcomes(check) == (0, 1)


def short_lived(until_s: float, every_s: float, lives_s: float, keeps_s: float, seed: int) -> list[Change]:
    """Machines that come one after another, lose half of their cores once, and are ended by their owners."""
    generator = np.random.default_rng(seed)
    found: list[Change] = []
    at = 0.0
    while (at := at + generator.exponential(every_s)) < until_s:
        name, cores = f"m{len(found)}", 8.0
        found.append(Change(name, at, 0.0, cores))
        ends_at, shrinks_at = at + generator.exponential(lives_s), at + generator.exponential(keeps_s)
        if shrinks_at < ends_at:
            found.append(Change(name, shrinks_at, cores, 4.0))
            cores = 4.0
        found.append(Change(name, ends_at, cores, 0.0, by_owner=True))
    return sorted((change for change in found if change.at < until_s), key=lambda change: change.at)


def test_where_owners_end_machines_early_the_calibration_is_right_as_the_predictor_is() -> None:
    """They live for 45 minutes on average, and lose cores every four hours: .78 keep them for an hour."""
    predictor = Predictor(0.0, PredictorOptions(form="landmark", sized=True))
    check = SelfCheck(predictor, (3600.0,))
    for change in short_lived(86_400.0, 60.0, 2700.0, 14_400.0, 1):
        check.observe(change)
        predictor.observe(change)
        check.advance(change.at)
    (row,) = [row for row in check.calibration.curve() if row.low == pytest.approx(0.7)]
    assert row.count > 200
    assert row.predicted == pytest.approx(math.exp(-0.25), abs=0.03)
    assert row.observed == pytest.approx(row.predicted, abs=0.05)


def test_of_a_machine_whose_host_is_silent_nothing_is_predicted() -> None:
    predictor = known_pool()
    predictor.known_until = lambda: {"m0": 1990.0, "m1": 2000.0, "m2": math.inf}
    check = SelfCheck(predictor, (150.0,))
    check.advance(2000.0)
    assert {name for name, waiting in check.document()["open"].items() if waiting} == set(predictor.rows) - {"m0"}


def test_open_predictions_outlive_a_document_also_one_of_an_earlier_version() -> None:
    predictor = known_pool()
    check = SelfCheck(predictor, (150.0,), 500.0)
    check.advance(2000.0)
    check.observe(Change("m0", 2050.0, 4.0, 3.0))
    found = json.loads(json.dumps(check.document()))
    again = SelfCheck(predictor, (150.0,), 100.0)
    again.resume(found)
    # It had counted what was refuted.
    old = found | {"open": {name: [row[:4] for row in rows] for name, rows in found["open"].items()}, "next_at": 2100.0}
    del old["open"]["m0"]
    before = SelfCheck(predictor, (150.0,), 100.0)
    before.resume(old)
    for made in (again, before):
        made.advance(2600.0)
    assert (outcomes(again), outcomes(before)) == ((9, 1), (9, 0))


@pytest.mark.parametrize(("form", "refuted"), [("next-change", 1), ("landmark", 0)])
def test_by_landmarks_what_is_lost_of_cores_that_came_later_refutes_nothing(form: str, refuted: int) -> None:
    """Also without sizes: what landmarks say is that a machine keeps the cores that it had."""
    predictor = Predictor(0.0, PredictorOptions(form=form, sized=False))
    predictor.observe(Change("m", 10.0, 0.0, 4.0))
    for at in (20.0, 40.0):
        predictor.observe(Change("m", at, 4.0, 5.0))
        predictor.observe(Change("m", at + 10.0, 5.0, 4.0))
    check = SelfCheck(predictor, (3600.0,))
    check.advance(1000.0)
    for change in (Change("m", 1100.0, 4.0, 5.0), Change("m", 1200.0, 5.0, 4.0)):
        check.observe(change)
        predictor.observe(change)
    check.advance(4700.0)
    assert outcomes(check) == (1 - refuted, refuted)
