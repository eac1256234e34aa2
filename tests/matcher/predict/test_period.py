"""Landmarks whose time counts step by step: what is counted when, and what follows from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.matcher.predict import period as p
from ebbtide.matcher.predict.ages import Floats, position
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.landmarks import (
    AGES,
    FREE,
    LEAST,
    PER_AGE,
    PER_STEP,
    SIZES,
    STEPS,
    lasts_size,
    size_class,
    step_s,
)
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.rolling import GROWTH, SHRINK

DAY_S = 86_400.0
BY_PERIOD = PredictorOptions(form="landmark", sized=True)
HORIZON_S, EVERY_S = 3600.0, 300.0
#: (at, machine, cores; -1: taken away by the owner, direction).
Events = list[tuple[float, int, float, int]]


def dips(machines: int, mean_s: float, from_s: float, until_s: float, seed: int) -> list[Change]:
    """Machines of ten cores that lose three for a second, again and again, without memory."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(machines):
        at = from_s
        while (at := at + 1.0 + generator.exponential(mean_s)) < until_s:
            found += [Change(f"m{number}", at, 10.0, 7.0), Change(f"m{number}", at + 1.0, 7.0, 10.0)]
    return found


def learned(changes: list[Change], until_s: float, options: PredictorOptions, machines: int = 40) -> Predictor:
    predictor = Predictor(0.0, options)
    for number in range(machines):
        predictor.observe(Change(f"m{number}", 0.0, 0.0, 10.0))
    for change in sorted(changes, key=lambda one: one.at):
        predictor.observe(change)
    predictor.advance(until_s)
    return predictor


def test_room_that_is_lost_without_memory_lasts_as_the_exponential_law_says() -> None:
    predictor = learned(dips(40, 3000.0, 0.0, DAY_S, 1), DAY_S, BY_PERIOD)
    for elapsed_s in (100.0, 1000.0, 5000.0):
        for duration_s in (600.0, 1800.0, 7200.0):
            found = predictor.probability(GROWTH, elapsed_s, duration_s, 2.0)
            assert found == pytest.approx(math.exp(-duration_s / 3000.0), abs=0.05), (elapsed_s, duration_s)
    # Three cores less do no harm to what leaves as many free; beyond the horizon losses go on.
    assert predictor.probability(GROWTH, 1000.0, 7200.0, 3.0) == pytest.approx(1.0, abs=1e-9)
    at_horizon = predictor.probability(GROWTH, 1000.0, 4 * 3600.0, 0.0)
    assert predictor.probability(GROWTH, 1000.0, 8 * 3600.0, 0.0) == pytest.approx(at_horizon**2)


def test_what_happens_now_is_known_before_the_horizon_of_a_landmark_is_over() -> None:
    # Calm for a day, and then as restless as above; asked two hours later.
    until_s = DAY_S + 7200.0
    changes = dips(40, 3000.0, DAY_S, until_s, 2)
    assert learned([], DAY_S, BY_PERIOD).probability(GROWTH, 500.0, 1800.0) > 0.95
    assert learned(changes, until_s, BY_PERIOD).probability(GROWTH, 500.0, 1800.0) < 0.8


def test_until_enough_is_known_the_answer_is_that_of_equation_1() -> None:
    changes = dips(10, 400.0, 0.0, 4000.0, 3)
    early = learned([change for change in changes if change.at < 1500.0], 1500.0, BY_PERIOD, 10)
    same = learned([change for change in changes if change.at < 1500.0], 1500.0, PredictorOptions(sized=True), 10)
    assert early.probability(GROWTH, 60.0, 600.0) == same.probability(GROWTH, 60.0, 600.0)
    # Two looks later, long before the horizon is over, there are landmarks of which the first steps are over.
    later = learned([change for change in changes if change.at < 3000.0], 3000.0, BY_PERIOD, 10)
    assert later.known().totals[2] >= LEAST


@pytest.mark.parametrize("late_s", [60.0, 900.0, 1700.0])
def test_a_pool_that_is_told_of_late_is_promised_no_more_than_one_that_is_told_of_at_once(late_s: float) -> None:
    """Also where a host's clock is behind, so that all that it tells of is older than it says."""
    changes = sorted(dips(40, 3000.0, 0.0, DAY_S / 2.0, 7), key=lambda one: one.at)
    at_once, late = learned(changes, DAY_S / 2.0, BY_PERIOD), learned([], 0.0, BY_PERIOD)
    for change in changes:
        late.observe(change, change.at + late_s)
    late.advance(DAY_S / 2.0)
    for duration_s in (600.0, 1800.0, 7200.0):
        expected = at_once.probability(GROWTH, 1000.0, duration_s)
        assert late.probability(GROWTH, 1000.0, duration_s) == pytest.approx(expected, abs=0.03)


def test_the_time_in_which_nobody_was_heard_of_is_no_time_in_which_all_kept_their_cores() -> None:
    """What happened in it is told at its end, four hours later."""
    changes, heard_s = sorted(dips(40, 3000.0, 0.0, DAY_S, 8), key=lambda one: one.at), DAY_S - 4 * 3600.0
    at_once, silent = learned(changes, DAY_S, BY_PERIOD), learned([], 0.0, BY_PERIOD)
    for change in changes:
        if change.at < heard_s:
            silent.observe(change)
    silent.advance(heard_s)
    before = silent.period.all_watched.copy()
    silent.known_until = lambda: dict.fromkeys(silent.rows, heard_s)
    silent.advance(DAY_S)
    assert (silent.period.all_watched <= before).all()
    silent.known_until = dict
    for change in changes:
        if change.at >= heard_s:
            silent.observe(change, DAY_S)
    for duration_s in (600.0, 1800.0, 7200.0):
        expected = at_once.probability(GROWTH, 1000.0, duration_s)
        assert silent.probability(GROWTH, 1000.0, duration_s) == pytest.approx(expected, abs=0.03)


def replayed(
    events: Events, machines: int, until_s: float, window_s: float = 1e9, late_s: Mapping[int, float] = {}
) -> p.Period:
    """:param late_s: so long after they happen the changes of some machines are told."""
    state = p.period(machines, window_s, HORIZON_S, EVERY_S, 0.0)
    for told_s, (at_s, machine, cores, direction) in sorted((one[0] + late_s.get(one[1], 0.0), one) for one in events):
        if told_s <= until_s:
            p.watch(state, told_s)
            p.stands(state, machine, at_s, cores, direction)
    p.watch(state, until_s)
    return state


def drawn(seed: int, machines: int, until_s: float) -> Events:
    generator = np.random.default_rng(seed)
    at_s = np.sort(generator.uniform(0.0, until_s, int(generator.integers(0, 150))))
    events: Events = [(0.0, machine, float(generator.integers(1, 30)), GROWTH) for machine in range(machines)]
    for at in at_s.tolist():
        cores = float(generator.choice([-1, 0, *range(1, 40)]))
        events.append((at, int(generator.integers(machines)), cores, int(generator.integers(2))))
    return events


def by_hand(
    events: Events, machines: int, until_s: float, window_s: float = 1e9, late_s: Mapping[int, float] = {}
) -> tuple[Counter[Any], Counter[Any]]:
    """Every landmark followed on its own: who had the room when each step that is over began, who lost it there.

    :param late_s: as `replayed`. There are no landmarks of how a machine stood that had changed already.
    """
    watched, failed = Counter[Any](), Counter[Any]()
    steps = int(position(HORIZON_S) / PER_STEP) + 1
    looks = [EVERY_S * number for number in range(1, int(until_s / EVERY_S) + 1)]
    slice_s = window_s / p.SLICES
    forgotten_s = (looks[-1] // slice_s - p.SLICES) * slice_s
    for machine in range(machines):
        delay_s = late_s.get(machine, 0.0)
        mine = [event for event in events if event[1] == machine and event[0] + delay_s <= until_s]
        for look_s in looks:
            before = [event for event in mine if event[0] < look_s]
            if not before or before[-1][2] < 1.0 or before[-1][0] + delay_s >= look_s:
                continue
            at_s, _, cores, _ = before[-1]
            x = int(size_class(cores))
            age = min(int(position(look_s - at_s) / PER_AGE), AGES - 1)
            after = [(event[0] - look_s, event[2]) for event in mine if event[0] >= look_s]
            ends_s = min([wait_s for wait_s, left in after if left < 0.0], default=math.inf)
            for f, free in enumerate(FREE):
                if cores <= free:
                    break
                late = [wait_s for wait_s, left in after if left >= 0.0 and cores - left > free]
                lost = [int(position(wait_s) / PER_STEP) for wait_s in late]
                for step in range(steps):
                    over_s = look_s + EVERY_S * math.ceil(step_s(step + 1) / EVERY_S)
                    # The owner may come within the time between the step's end and the look that counts it.
                    if over_s > until_s or look_s + ends_s < over_s or min(lost, default=STEPS) < step:
                        break
                    if over_s < forgotten_s:
                        continue
                    watched[x, age, f, step] += 1
                    if min(lost, default=STEPS) == step:
                        failed[x, age, f, step] += 1
    return watched, failed


def cells(found: Floats) -> Floats:
    """By class of cores, of elapsed time, free cores and step."""
    return found.reshape(SIZES, AGES, -1, len(FREE)).swapaxes(2, 3)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_counts_are_those_of_every_landmark_followed_on_its_own(seed: int) -> None:
    events = drawn(seed, 3, 9000.0)
    assert_counts(replayed(events, 3, 9000.0), by_hand(events, 3, 9000.0))


def assert_counts(state: p.Period, expected: tuple[Counter[Any], Counter[Any]]) -> None:
    for found, counted in zip((cells(p.at_risk(state)), cells(state.all_failed)), expected, strict=True):
        index = np.argwhere(found != 0)
        assert {tuple(at): found[tuple(at)] for at in index.tolist()} == dict(counted)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), late_s=st.floats(1.0, 550.0), window_s=st.sampled_from([1e9, 18_000.0, 6000.0]))
def test_losses_that_are_told_up_to_two_looks_late_count_as_if_they_had_been_told_at_once(
    seed: int, late_s: float, window_s: float
) -> None:
    """As those of a host whose clock is behind. By now some slices of the shorter windows are forgotten."""
    events = [event for event in drawn(seed, 3, 12_000.0) if event[1] > 0 or event[2] >= 0.0]
    late = {0: late_s}
    state = replayed(events, 3, 12_000.0, window_s, late)
    assert_counts(state, by_hand(events, 3, 12_000.0, window_s, late))
    assert state.watched.min() >= 0.0
    assert (state.watched.sum(0) == state.all_watched).all()
    assert (state.failed.sum(0) == state.all_failed).all()


def test_what_an_owner_took_away_is_not_counted_as_kept_until_the_news_came() -> None:
    events: Events = [(0.0, 0, 8.0, GROWTH), (2000.0, 0, -1.0, SHRINK)]
    late = {0: 700.0}
    assert_counts(replayed(events, 1, 3000.0, late_s=late), by_hand(events, 1, 3000.0, late_s=late))


def test_of_a_machine_that_nobody_tells_of_nothing_is_noted_and_nothing_counted() -> None:
    events: Events = [(0.0, machine, 8.0, GROWTH) for machine in range(2)]
    state = replayed(events, 2, 2000.0)
    known_s = np.array([np.inf, 2050.0])
    for now_s in (2250.0, 4000.0):
        p.watch_known(state, now_s, known_s)
    assert_counts(state, by_hand([*events, (2050.0, 1, -1.0, SHRINK)], 2, 4000.0))
    # Heard of again, and after a pause that is longer than the window.
    p.watch_known(state, 4600.0, np.full(2, np.inf))
    assert (state.noted[1] >= 0).sum() == 2
    short = replayed(events, 2, 2000.0, 6000.0)
    p.watch_known(short, 1e6, known_s)
    assert (short.noted >= 0).sum(1).tolist() == [1, 0]


def test_where_hardly_any_machine_has_as_many_cores_room_lasts_as_that_of_fewer_free_ones() -> None:
    # All have eight cores, so that none can lose more than eight; half of them lose seven at once.
    state = p.period(0, DAY_S, HORIZON_S, EVERY_S, 0.0)
    less = FREE.index(8)
    state.all_watched[10, :less] = 1000.0
    state.all_failed[10, :less] = 500.0
    lasts = np.zeros(lasts_size())
    p.fill_lasts_of_period(state, lasts)
    of_all = lasts.reshape(SIZES + 1, AGES, len(FREE), STEPS + 1)[-1, 10, :, 1]
    assert of_all == pytest.approx(0.5)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_answers_are_probabilities_and_longer_tasks_are_less_likely_to_complete(seed: int) -> None:
    state = replayed(drawn(seed, 4, 20_000.0), 4, 20_000.0, 15_000.0)
    lasts = np.zeros(lasts_size())
    if p.fill_lasts_of_period(state, lasts) < LEAST:
        assert np.isnan(lasts).all()
        return
    table = lasts.reshape(SIZES + 1, AGES, len(FREE), STEPS + 1)
    assert (table[..., 0] == 1.0).all()
    assert (np.diff(table, axis=-1) <= 0.0).all()
    assert table.min() >= 0.0


def test_a_class_leans_on_its_neighbours_and_is_heard_with_many_landmarks() -> None:
    # Young machines lose all, old ones nothing, each known by so many landmarks; nothing is known of those between.
    def at(age: int, many: float) -> float:
        state = p.period(0, DAY_S, HORIZON_S, EVERY_S, 0.0)
        state.all_watched[10, : len(FREE)] = many
        state.all_failed[10, : len(FREE)] = many
        state.all_watched[30, : len(FREE)] = many
        lasts = np.zeros(lasts_size())
        p.fill_lasts_of_period(state, lasts)
        return float(lasts.reshape(SIZES + 1, AGES, len(FREE), STEPS + 1)[0, age, 0, 1])

    assert at(10, 1e6) == pytest.approx(0.0, abs=0.01)
    assert at(30, 1e6) == pytest.approx(1.0, abs=0.01)
    # Few landmarks: both are near the pool's one half.
    few = p.LEANS / 10.0
    assert at(10, few) == pytest.approx(0.5, abs=0.2)
    assert 0.2 < at(10, few) < at(20, few) < at(30, few) < 0.8


def test_news_that_come_late_count_and_void_landmarks_that_were_noted_meanwhile() -> None:
    state = p.period(1, 1e9, HORIZON_S, EVERY_S, 0.0)
    p.stands(state, 0, 0.0, 8.0, GROWTH)
    p.watch(state, 650.0)
    # Looks were taken at 300 and at 600 s; the change was in between.
    p.stands(state, 0, 500.0, 4.0, SHRINK)
    assert (state.noted[0] >= 0).sum() == 1
    # That of 300 s had been counted as having all its room for five minutes, and lost four cores in its fourth one.
    step = int(position(200.0) / PER_STEP)
    failed = cells(state.all_failed)
    assert np.argwhere(failed).tolist() == [[size_class(8.0), 9, f, step] for f in range(FREE.index(4))]
    p.watch(state, 5000.0)
    assert cells(state.all_failed)[size_class(8.0)].sum() == 4.0
    steps = (cells(p.at_risk(state))[size_class(8.0)].sum(0) > 0).sum(1)
    assert set(steps[:4]) == {step + 1}
    assert steps[4] == len(state.due)
    # A look later the machine is noted as it stands.
    assert cells(p.at_risk(state))[size_class(4.0), :, 0, 0].sum() > 0


def test_a_late_loss_that_an_earlier_version_has_only_remembered_is_counted_at_the_next_look() -> None:
    state = p.period(1, 1e9, HORIZON_S, EVERY_S, 0.0)
    p.stands(state, 0, 0.0, 3.0, GROWTH)
    p.watch(state, 650.0)
    state.lost[0, 1], state.lost_step[0, 1, :2] = 2, int(position(200.0) / PER_STEP)
    p.watch(state, 950.0)
    assert state.all_failed.sum() == 2.0


def test_a_pool_that_nobody_is_in_any_more_is_forgotten_with_the_window() -> None:
    state = replayed(drawn(4, 3, 9000.0), 3, 9000.0, 20_000.0)
    assert state.all_watched.sum() > 0
    for machine in range(3):
        p.leaves(state, machine)
    p.watch(state, 9000.0 + 20_000.0 * (1.0 + 1.0 / p.SLICES) + EVERY_S)
    assert state.all_watched.sum() == 0.0
    assert state.all_failed.sum() == 0.0


def test_after_a_long_pause_nothing_is_made_up() -> None:
    state = replayed(drawn(5, 3, 9000.0), 3, 9000.0, 20_000.0)
    p.watch(state, 1e6)
    # Of the looks of the pause none was taken: a machine that stood still all the time is not seen to have done so.
    assert state.all_watched.sum() == 0.0
    assert state.clock[0] > 1e6


def test_a_copy_goes_its_own_way_and_rows_are_used_again() -> None:
    predictor = learned(dips(20, 3000.0, 0.0, 20_000.0, 6), 20_000.0, BY_PERIOD, 20)
    before = predictor.probability(GROWTH, 500.0, 1800.0)
    other = predictor.copy()
    for number in range(20):
        other.observe(Change(f"m{number}", 20_500.0 + number, 10.0, 2.0))
    other.advance(24_000.0)
    assert other.probability(GROWTH, 500.0, 1800.0) != before
    assert predictor.probability(GROWTH, 500.0, 1800.0) == before
    rows = len(predictor.period.stood_s)
    predictor.forget("m3")
    predictor.observe(Change("new", 20_001.0, 0.0, 4.0))
    assert len(predictor.period.stood_s) == rows
    assert predictor.period.stood_cores[predictor.rows["new"]] == 4.0


def test_a_clock_that_comes_from_far_behind_leaves_what_windows_of_silence_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = dips(40, 3000.0, 0.0, DAY_S, 8)
    leapt, stepped = (learned(changes, DAY_S, BY_PERIOD) for _ in range(2))
    forgotten, forget = 0, p._forget

    def counted(state: p.Period) -> None:
        nonlocal forgotten
        forgotten += 1
        forget(state)

    monkeypatch.setattr(p, "_forget", counted)
    leapt.advance(1.7e9 + DAY_S)
    assert forgotten <= 2 * p.SLICES
    for hours in range(1, 100):
        stepped.advance(DAY_S + hours * 3600.0)
    assert stepped.period.clock[0] < leapt.period.clock[0]
    for name in ("watched", "failed", "all_watched", "all_failed"):
        assert not getattr(leapt.period, name).any(), name
    assert leapt.period.clock[0] - EVERY_S <= leapt.now < leapt.period.clock[0]
    assert 0.0 < leapt.period.clock[2] - (leapt.period.clock[0] - leapt.period.clock[1]) <= leapt.period.clock[3]
    # It goes on from there.
    leapt.advance(leapt.now + DAY_S)
    assert leapt.period.all_watched.sum() > 0.0
    assert (leapt.period.watched.sum(0) == leapt.period.all_watched).all()


@pytest.mark.parametrize("form", ["next-change", "next-shrink"])
def test_other_forms_keep_no_landmarks_of_this_kind(form: str) -> None:
    predictor = learned([], 5000.0, PredictorOptions(form=form), 3)
    assert not predictor.by_landmarks
    assert predictor.period.all_watched.size == 0
