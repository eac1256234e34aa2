"""The benchmark `matcher`: what it compares decides alike, and one short pass."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.matching import matcher
from benchmarks.passes import Pass
from ebbtide.matcher.predict import knowledge


def test_the_plain_form_and_the_matcher_agree_on_the_expected_time() -> None:
    pool = matcher._pool(100, 20, 3)
    for demand in pool.demands:
        ours = pool.matcher.decide(demand, matcher.NOW_S)
        plain = pool.plain.decide(demand.cores, demand.duration_s or 0.0, matcher.NOW_S)
        assert plain is not None
        # The matcher counts running intervals too, and by bins; the plain form completed ones to the second.
        assert abs(ours.expected_s - plain[0]) < 0.25 * plain[0]


def test_a_short_pass_measures_decisions_rounds_and_the_plain_form() -> None:
    figures = matcher.run(Pass(runs=1, quick=True))
    for size in (100, 1000):
        assert figures[f"decisions_{size}_per_s"].value > 0
        assert figures[f"decision_{size}_p99_ms"].value > 0
        assert figures[f"plain_{size}_to_decision"].value > 1
        assert figures[f"plain_{size}_to_moved"].value > 1
        assert figures[f"default_cold_{size}_us"].value > 0
        assert figures[f"round_{size}_100_per_s"].value > 0
        assert figures[f"plain_{size}_to_round_100"].value > 0
    assert figures["growth_100_to_1000"].value > 0


def test_a_cold_decision_is_the_first_with_new_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, learned = matcher._pool(100, matcher.FIRST, 3), 0
    learn = knowledge.learn

    def counted(*given: Any) -> None:
        nonlocal learned
        learned += 1
        learn(*given)

    monkeypatch.setattr(knowledge, "learn", counted)
    assert matcher._cold_s(pool) > 0
    assert learned == matcher.FIRST
