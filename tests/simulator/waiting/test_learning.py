"""Judgement of a model of waits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ebbtide.matcher.policies.forest import grown, predicted
from ebbtide.simulator.compiling import compiled, shared
from ebbtide.simulator.waiting.learning import correlation, learn

shared(predicted)


@compiled
def _all(forest: Any, rows: Any, out: Any) -> None:
    for i in range(len(rows)):
        out[i] = predicted(forest, rows[i])


def test_correlation_by_hand() -> None:
    """2 right yes, 1 wrong yes, 1 missed, 4 right no: (2*4 - 1*1) / sqrt(3 * 3 * 5 * 5) = 7 / 15."""
    said = np.array([1, 1, 1, 0, 0, 0, 0, 0.0])
    true = np.array([1, 1, 0, 1, 0, 0, 0, 0.0])
    assert correlation(said, true) == pytest.approx(7 / 15)
    assert correlation(true, true) == 1
    assert correlation(1 - true, true) == -1
    assert correlation(np.zeros(8), true) == 0
    assert math.isnan(correlation(said, np.zeros(8)))


def test_a_model_is_judged_by_stretches_that_it_has_not_seen() -> None:
    """In the stretches that judge, the truth is turned round: a model that had seen them would do better."""
    rows = np.random.default_rng(1).uniform(size=(5000, 9))
    labels = (rows[:, 2] > 0.5).astype(float)
    judges = np.isin(np.arange(5000) * 10 // 5000, [2, 5, 8])
    assert learn(rows, labels, 1).forest_mcc > 0.95
    turned = learn(rows, np.where(judges, 1 - labels, labels), 1)
    assert turned.forest_mcc < -0.95
    assert turned.line_mcc < -0.9
    assert turned.rows == 5000


def test_nothing_to_learn_from_is_no_error() -> None:
    assert math.isnan(learn(np.zeros((3, 9)), np.zeros(3), 1).forest_mcc)


def test_a_forest_says_compiled_what_it_says_interpreted() -> None:
    rows = np.random.default_rng(5).uniform(size=(800, 9))
    labels = (rows[:, 1] * rows[:, 7] > 0.2).astype(float)
    forest = grown(rows, labels, np.random.default_rng(6), trees=4)
    said = np.zeros(800)
    _all(forest, rows, said)
    assert said.tolist() == [predicted(forest, row) for row in rows]
