"""The prediction engine, change by change, against the exact form and against what happens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.changes import Change, Direction
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.rolling import GROWTH, NONE, SHRINK
from ebbtide.matcher.predict.self_check import SelfCheck
from tests.matcher.equation_one import completion_probability, history_of
from tests.matcher.pools import renewal_pool

DAY_S = 86_400.0
IGNORE = PredictorOptions(censored=False, fresh_share=0.0)


def learned(changes: Iterator[Change] | list[Change], now: float, options: PredictorOptions | None = None) -> Predictor:
    predictor = Predictor(0.0, options)
    for change in changes:
        predictor.observe(change)
    predictor.advance(now)
    return predictor


def exponential(mean_s: float = 1800.0):  # type: ignore[no-untyped-def]
    return lambda generator: float(generator.exponential(mean_s))


def mixed(generator: np.random.Generator) -> float:
    """Many short intervals, a few very long ones."""
    return float(generator.exponential(300.0) if generator.random() < 0.6 else generator.exponential(20_000.0))


def test_by_completed_intervals_alone_it_is_the_plain_form_up_to_the_grid() -> None:
    changes = list(renewal_pool(30, mixed, DAY_S, seed=1))
    history = history_of(changes, DAY_S)
    predictor = learned(changes, DAY_S, IGNORE)
    for direction, x in ((Direction.GROWTH, GROWTH), (Direction.SHRINK, SHRINK)):
        for elapsed_s in (0.0, 120.0, 900.0, 5000.0):
            for duration_s in (60.0, 1000.0, 7200.0):
                shrink = history.shrink_probability(direction)
                exact = completion_probability(history.intervals, shrink, elapsed_s, duration_s)
                assert exact is not None
                assert predictor.probability(x, elapsed_s, duration_s) == pytest.approx(exact, abs=0.03)


def test_only_the_window_counts_however_long_the_engine_runs() -> None:
    restless = list(renewal_pool(20, exponential(200.0), 3 * DAY_S, seed=2))
    calm = list(renewal_pool(20, exponential(20_000.0), 9 * DAY_S, seed=3, start_s=3 * DAY_S))
    ends = [Change(f"m{n}", 3 * DAY_S - 1.0, 10.0, 0.0, by_owner=True) for n in range(20)]
    predictor = learned([*restless, *ends, *calm], 9 * DAY_S)
    fresh = learned([c for c in calm if c.at < 9 * DAY_S], 9 * DAY_S)
    assert predictor.probability(GROWTH, 0.0, 1000.0) == pytest.approx(fresh.probability(GROWTH, 0.0, 1000.0), abs=0.05)
    assert predictor.state.all_ended.sum() < 20 * 9
    # What was counted in and taken out again leaves nothing behind.
    predictor.advance(30 * DAY_S)
    assert predictor.state.all_ended.sum() == 0.0
    assert np.cumsum(predictor.state.all_entered, axis=1).max() <= 20.0


def test_running_intervals_make_a_pool_of_steady_machines_look_as_steady_as_it_is() -> None:
    # Half of the machines change every quarter of an hour, the others hardly ever.
    quick = list(renewal_pool(20, exponential(900.0), DAY_S, seed=4))
    steady = [Change(f"s{n}", 1.0, 0.0, 8.0) for n in range(20)]
    changes = sorted([*quick, *steady], key=lambda change: change.at)
    counted, ignored = learned(changes, DAY_S), learned(changes, DAY_S, IGNORE)
    # A machine that has been steady for eight hours stays so; completed intervals never saw that.
    assert counted.probability(GROWTH, 8 * 3600.0, 3600.0) > 0.9
    assert math.isnan(ignored.probability(GROWTH, 8 * 3600.0, 3600.0))


def test_what_was_not_watched_from_its_beginning_counts_from_when_watching_began() -> None:
    predictor = Predictor(1000.0 * 3600)
    for number in range(10):
        predictor.observe(Change(f"old-{number}", 0.0, 0.0, 4.0))
    for number in range(10):
        predictor.observe(Change(f"new-{number}", 1000.0 * 3600, 0.0, 4.0))
        predictor.observe(Change(f"new-{number}", 1000.0 * 3600 + 600.0, 4.0, 3.0))
    predictor.advance(1000.0 * 3600 + 700.0)
    # All ten intervals that were watched at ages below an hour ended; the old ones say nothing of such ages.
    assert predictor.probability(GROWTH, 0.0, 700.0) == pytest.approx(0.0, abs=0.05)


def test_without_history_the_answer_is_unknown_and_never_a_guess() -> None:
    predictor = Predictor(0.0)
    assert math.isnan(predictor.probability(GROWTH, 0.0, 60.0))
    predictor.observe(Change("a", 1.0, 0.0, 4.0))
    assert predictor.probabilities_of(["a", "never seen"], 100.0, 60.0) == [None, None]
    predictor.observe(Change("a", 200.0, 4.0, 3.0))
    # Nothing has ever followed on a shrink.
    assert predictor.probabilities_of(["a"], 300.0, 60.0) == [None]
    assert math.isnan(float(predictor.probability(NONE, 0.0, 60.0)))


@pytest.mark.parametrize("form", ["next-change", "next-shrink", "landmark"])
def test_no_form_guesses(form: str) -> None:
    predictor = learned([Change("a", 1.0, 0.0, 4.0)], 2.0, PredictorOptions(form=form))
    assert predictor.probabilities_of(["a", "b"], 100.0, 60.0) == [None, None]


@pytest.mark.parametrize("duration_s", [-1.0, math.nan, math.inf])
def test_a_bad_duration_is_refused(duration_s: float) -> None:
    with pytest.raises(InvalidField, match="duration_s"):
        Predictor(0.0).probabilities_of([], 0.0, duration_s)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("form", "best"),
        ("window_s", 1e-300),
        ("window_s", math.inf),
        ("horizon_s", 0.99),
        ("horizon_s", math.nan),
        ("look_every_s", 1e-9),
        ("fresh_share", 2.0),
    ],
)
def test_a_bad_option_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidField, match=field):
        PredictorOptions(**{field: value})  # type: ignore[arg-type]


def test_a_change_that_comes_too_late_is_passed_over_and_counted() -> None:
    predictor = learned([Change("a", 100.0, 0.0, 4.0), Change("a", 90.0, 4.0, 3.0)], 200.0)
    assert predictor.late == 1
    last = predictor.last_of("a")
    assert last is not None
    assert last.at == 100.0


def test_an_end_by_the_owner_teaches_nothing_and_an_eviction_is_a_shrink() -> None:
    start = [Change("a", 0.0, 0.0, 4.0), Change("b", 0.0, 0.0, 4.0)]
    predictor = learned([*start, Change("a", 50.0, 4.0, 0.0, by_owner=True)], 60.0)
    assert predictor.state.all_ended.sum() == 0
    predictor.observe(Change("b", 70.0, 4.0, 0.0))
    assert predictor.state.all_ended[GROWTH, SHRINK].sum() == 1
    assert predictor.probabilities_of(["a", "b"], 80.0, 10.0) == [None, None]
    # A machine of the same name begins anew.
    predictor.observe(Change("b", 90.0, 0.0, 2.0))
    assert predictor.state.all_ended.sum() == 1


def test_a_machine_outside_the_pool_is_known_and_teaches_nothing() -> None:
    predictor = Predictor(0.0)
    for at in range(1, 9):
        predictor.observe(Change("fixed", 10.0 * at, 2.0 - at % 2, 1.0 + at % 2), teaches=False)
    assert predictor.last_of("fixed") is not None
    assert predictor.state.all_ended.sum() == 0
    assert predictor.probabilities_of(["fixed"], 100.0, 5.0) == [None]


def test_rows_of_machines_that_are_gone_are_used_again() -> None:
    predictor = Predictor(0.0)
    for number in range(200):
        at = 3600.0 * number
        predictor.observe(Change(f"m{number}", at, 0.0, 4.0))
        predictor.observe(Change(f"m{number}", at + 60.0, 4.0, 0.0))
    assert len(predictor.state.last_s) <= 16


def test_the_work_of_a_change_does_not_grow_with_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.matcher.predict import curves, rolling

    calls = 0
    original = curves.add_watched

    def counted(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        original(*arguments)  # type: ignore[arg-type]

    changes = list(renewal_pool(20, exponential(400.0), 0.5 * DAY_S, seed=5))
    predictor = Predictor(0.0)
    monkeypatch.setattr(rolling, "add_watched", counted)
    costs = []
    for change in changes:
        before = calls
        predictor.state.clock[0] = math.inf  # no cut of the window in between
        predictor.observe(change)
        costs.append(calls - before)
    assert max(costs[len(costs) // 2 :]) <= 2 + 2 * rolling.FOLLOWED


def test_equation_3_follows_growths_on_to_the_next_shrink() -> None:
    # Growths every 600 s, a shrink after each second one: Eq. 1 sees the next change only.
    changes = []
    for number in range(20):
        offset, cores = 17.0 * number, 8.0
        changes.append(Change(f"m{number}", offset, 0.0, cores))
        for step in range(1, 100):
            after = cores - 2.0 if step % 3 == 0 else cores + 1.0
            changes.append(Change(f"m{number}", offset + 600.0 * step, cores, after))
            cores = after
    changes.sort(key=lambda change: change.at)
    by_change = learned(changes, 50_000.0)
    by_shrink = learned(changes, 50_000.0, PredictorOptions(form="next-shrink"))
    # From any change the next shrink is 600, 1200 or 1800 s away, a third each.
    assert by_shrink.probability(GROWTH, 0.0, 900.0) == pytest.approx(2 / 3, abs=0.05)
    assert by_shrink.probability(GROWTH, 0.0, 1500.0) == pytest.approx(1 / 3, abs=0.05)
    assert by_change.probability(GROWTH, 0.0, 1500.0) == pytest.approx(1 / 2, abs=0.05)


def test_a_shrink_that_leaves_room_is_survived_if_sizes_count() -> None:
    changes = []
    for number in range(10):
        cores = 20.0
        changes.append(Change(f"m{number}", 10.0 * number, 0.0, cores))
        for step in range(1, 60):
            size = 1.0 if step % 4 else 8.0
            after = cores - size if step % 2 else 20.0
            changes.append(Change(f"m{number}", 10.0 * number + 1000.0 * step, cores, after))
            cores = after
    changes.sort(key=lambda change: change.at)
    # All shrinks are of one core here: odd steps are never divisible by four.
    sized = learned(changes, 60_000.0, PredictorOptions(sized=True))
    assert sized.probability(GROWTH, 0.0, 1500.0, 0.0) == pytest.approx(0.0, abs=0.02)
    assert sized.probability(GROWTH, 0.0, 1500.0, 1.0) == pytest.approx(1.0)
    assert learned(changes, 60_000.0).probability(GROWTH, 0.0, 1500.0, 5.0) == pytest.approx(0.0, abs=0.02)


def test_a_landmark_counts_what_became_of_machines_that_stood_the_same() -> None:
    changes = list(renewal_pool(40, exponential(1800.0), 3 * DAY_S, seed=7))
    predictor = learned(changes, 3 * DAY_S, PredictorOptions(form="landmark", sized=True))
    # One core up or down at each change, a change every half hour: first step down within 30 min.
    first_down = 1.0 - math.exp(-0.5)
    assert predictor.probability(GROWTH, 600.0, 1800.0, 0.0) == pytest.approx(1.0 - first_down, abs=0.1)
    three = predictor.probability(GROWTH, 600.0, 1800.0, 3.0)
    assert three > 0.95
    rows = np.array([predictor.probability(SHRINK, 600.0, d, 1.0) for d in (60.0, 600.0, 3600.0, 14_400.0, 40_000.0)])
    assert (np.diff(rows) <= 1e-12).all()


def test_arrays_over_machines_give_what_single_questions_give() -> None:
    changes = list(renewal_pool(25, mixed, 2 * DAY_S, seed=8))
    for form in ("next-change", "next-shrink", "landmark"):
        predictor = learned(changes, 2 * DAY_S, PredictorOptions(form=form, sized=True))
        elapsed_s, free = predictor.elapsed_s()[:25], np.arange(25.0)
        direction = predictor.directions()[:25]
        together = predictor.probability(direction, elapsed_s, 1200.0, free)
        alone = [
            float(predictor.probability(int(direction[n]), float(elapsed_s[n]), 1200.0, float(free[n])))
            for n in range(25)
        ]
        assert together == pytest.approx(np.array(alone), nan_ok=True)
        assert ((together >= 0) & (together <= 1)).all()


def test_predictions_come_true_as_often_as_they_say() -> None:
    def law(generator: np.random.Generator) -> float:
        return mixed(generator)

    predictor = Predictor(0.0, PredictorOptions(form="landmark", sized=True))
    check = SelfCheck(predictor, (900.0, 3600.0), 600.0)
    for change in renewal_pool(50, law, 5 * DAY_S, seed=10):
        check.advance(change.at)
        check.observe(change)
        predictor.observe(change)
    calibration = check.calibration
    assert calibration.count > 5000
    # A class of few landmarks leans on its neighbours, which are calmer here: rare deciles are said too well.
    rows = calibration.curve(200)
    assert max(abs(row.predicted - row.observed) for row in rows) < 0.15
    assert sum(row.count * abs(row.predicted - row.observed) for row in rows) < 0.02 * calibration.count
    assert calibration.brier is not None
    assert calibration.brier < 0.25


def test_a_machine_that_came_back_and_went_again_is_kept_until_its_landmarks_are_counted() -> None:
    options = PredictorOptions(form="landmark", horizon_s=1000.0, look_every_s=100.0)
    predictor = Predictor(0.0, options)
    for at, before, after in ((0.0, 0.0, 4.0), (500.0, 4.0, 0.0), (600.0, 0.0, 4.0), (2400.0, 4.0, 0.0)):
        predictor.observe(Change("a", at, before, after))
    # The horizon of its first end is over twice, that of the second one is not.
    predictor.advance(2600.0)
    assert "a" in predictor.rows
    predictor.advance(3400.0)
    counted = float(predictor.period.all_watched[:, 0].sum())
    predictor.advance(4500.0)
    assert "a" not in predictor.rows
    # Looks at 100, ... 500 and 700, ... 2400: those at 500 and at 2400 come before what happens then.
    assert counted == 5 + 18


def test_a_copy_goes_its_own_way() -> None:
    predictor = Predictor(0.0)
    for change in renewal_pool(8, lambda generator: float(generator.exponential(300.0)), 20_000.0):
        predictor.observe(change)
    copied = predictor.copy()
    names = list(predictor.rows)
    before = copied.probabilities_of(names, 20_000.0, 600.0)
    assert before == predictor.probabilities_of(names, 20_000.0, 600.0)
    for number in range(200):
        predictor.observe(Change("m0", 20_000.0 + number, 5.0 + number % 2, 6.0 - number % 2))
    predictor.row("another")
    assert copied.probabilities_of(names, 20_000.0, 600.0) == before
    assert "another" not in copied.rows
    copied.advance(200_000.0)
    assert predictor.now < 21_000.0
    assert predictor.probabilities_of(names, 20_200.0, 600.0) != before
