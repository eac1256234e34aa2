"""The policy's kernels give compiled what they give interpreted: they are the same functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.matcher.match.choices import choose
from ebbtide.matcher.predict.ages import position
from ebbtide.matcher.predict.completion_probability import (
    LANDMARK,
    NEXT_CHANGE,
    NEXT_SHRINK,
    completion_probability,
    failure_and_loss,
    outlook,
)
from ebbtide.matcher.predict.expected_time import aversion, expected_s, remaining_s, restart_s, usable_duration_s
from ebbtide.matcher.predict.knowledge import Knowledge, learn, nothing_known
from ebbtide.matcher.predict.period import fill_lasts_of_period, period, stands, watch
from ebbtide.matcher.predict.rolling import GROWTH, NONE, SHRINK, begin, change, leave, roll, rolling
from ebbtide.simulator.compiling import compiled, plain
from ebbtide.simulator.compiling import shared as share

DAY_S = 86_400.0
for kernel in (
    position,
    choose,
    learn,
    completion_probability,
    outlook,
    failure_and_loss,
    fill_lasts_of_period,
    stands,
    watch,
    aversion,
    expected_s,
    remaining_s,
    restart_s,
    usable_duration_s,
    begin,
    change,
    leave,
    roll,
):
    share(kernel)


@compiled
def _replay(state: Any, watched: Any, events: Any) -> None:
    for row in range(len(events)):
        at_s, machine, kind, cores = events[row, 0], int(events[row, 1]), int(events[row, 2]), events[row, 3]
        roll(state, at_s)
        watch(watched, at_s)
        if kind == 0:
            begin(state, machine, at_s, GROWTH)
        elif kind == 1:
            change(state, machine, at_s, GROWTH, 2.0, False)
        elif kind == 2:
            change(state, machine, at_s, SHRINK, 3.0, False)
        else:
            leave(state, machine, at_s)
        direction = 0 if kind < 2 else 1
        stands(watched, machine, at_s, -1.0 if kind == 3 else cores, direction)


@compiled
def _learn(knowledge: Any, state: Any, watched: Any, now_s: float, censored: bool) -> float:
    learn(knowledge, state, now_s, censored)
    knowledge.totals[2] = fill_lasts_of_period(watched, knowledge.lasts)
    return float(knowledge.totals[2])


@compiled
def _ask(knowledge: Any, form: int, sized: bool, questions: Any, answers: Any) -> None:
    for row in range(len(questions)):
        x, elapsed_s, duration_s, free = int(questions[row, 0]), questions[row, 1], questions[row, 2], questions[row, 3]
        failure, w = failure_and_loss(
            knowledge, form, outlook(knowledge, form, sized, x, elapsed_s, free, 9.0), duration_s
        )
        p = 1.0 - failure
        answers[row, 0] = completion_probability(knowledge, form, sized, x, elapsed_s, duration_s, free, 9.0)
        answers[row, 1] = w
        answers[row, 2] = expected_s(
            elapsed_s, 1.0 - p, w, restart_s(p, w, duration_s), duration_s, 600.0, aversion(0.3, free, 0.1)
        )
        answers[row, 3] = usable_duration_s(elapsed_s - 500.0, free, 7.0)
        answers[row, 4] = remaining_s(elapsed_s, free, duration_s)
        answers[row, 5] = position(elapsed_s)


@compiled
def _choose(expected: Any, waits: Any, p: Any, idle: Any, delay: bool, spare: float, spread: float) -> int:
    return choose(expected, waits, p, idle, 100.0, delay, spare, spread)


def events(seed: int, machines: int = 6, count: int = 700) -> np.ndarray[Any, np.dtype[np.float64]]:
    generator = np.random.default_rng(seed)
    at_s = np.sort(generator.uniform(0, 3 * DAY_S, count))
    machine = generator.integers(0, machines, count)
    kind = generator.choice([0, 1, 1, 2, 2, 2, 3], count, p=[0.04, 0.2, 0.2, 0.2, 0.2, 0.14, 0.02])
    return np.column_stack([at_s, machine, kind, generator.integers(0, 30, count)]).astype(float)


def replayed(seed: int, interpreted: bool) -> tuple[Any, Any]:
    state = rolling(6, DAY_S, 0.0)
    watched = period(6, DAY_S, 7200.0, 1800.0, 0.0)
    (plain(_replay) if interpreted else _replay)(state, watched, events(seed))
    return state, watched


def known(seed: int, interpreted: bool, censored: bool) -> Knowledge:
    state, watched = replayed(seed, interpreted)
    knowledge = nothing_known(7200.0)
    (plain(_learn) if interpreted else _learn)(knowledge, state, watched, 3 * DAY_S, censored)
    return knowledge


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_counts_are_the_same(seed: int) -> None:
    for ours, theirs in zip(replayed(seed, False), replayed(seed, True), strict=True):
        for name, one, other in zip(type(ours)._fields, ours, theirs, strict=True):
            assert np.array_equal(one, other, equal_nan=True), name


@pytest.mark.parametrize("censored", [True, False])
def test_what_is_known_and_every_answer_are_the_same(censored: bool) -> None:
    ours, theirs = known(4, False, censored), known(4, True, censored)
    assert ours.totals[2] > 20.0
    for name, one, other in zip(ours._fields, ours, theirs, strict=True):
        # Lines are bundles of curves.
        assert np.allclose(np.array(one), np.array(other), rtol=1e-9, atol=1e-9, equal_nan=True), name
    generator = np.random.default_rng(5)
    questions = np.column_stack(
        [
            generator.integers(NONE, 2, 300),
            generator.uniform(0, 20_000, 300),
            generator.uniform(0, 20_000, 300),
            generator.integers(0, 40, 300),
        ]
    ).astype(float)
    for form in (NEXT_CHANGE, NEXT_SHRINK, LANDMARK):
        for sized in (True, False):
            found, expected = np.zeros((300, 6)), np.zeros((300, 6))
            _ask(ours, form, sized, questions, found)
            with np.errstate(invalid="ignore"):
                plain(_ask)(ours, form, sized, questions, expected)
            assert np.allclose(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True), (form, sized)


def test_the_same_machine_is_chosen() -> None:
    generator = np.random.default_rng(6)
    for _ in range(200):
        waits = generator.choice([0.0, 50.0, np.inf], 8)
        expected = waits + generator.integers(1, 6, 8) * 10.0
        p = generator.choice([0.2, 0.7, np.nan], 8)
        # As the engine has it: a column of whole numbers.
        idle = generator.integers(0, 4, (8, 2))[:, 1]
        for delay in (True, False):
            for spare, spread in ((0.0, 0.0), (0.15, 0.0), (0.0, 0.15)):
                found = _choose(expected, waits, p, idle, delay, spare, spread)
                assert found == choose(expected, waits, p, idle, 100.0, delay, spare, spread)
