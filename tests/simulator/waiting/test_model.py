"""Waiting policies as a model of experiments."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import checked, model_named
from ebbtide.simulator.waiting.model import MODEL

SMALL: dict[str, Any] = {"machines": 3, "cpu_cores": 8, "sized_for": 4, "load": 0.9, "days": 3, "job_cores": [1, 2]}


def run(**changes: Any) -> dict[str, float]:
    settings = MODEL.settings(SMALL | changes)
    return dict(checked(MODEL.run(settings, 1, None, lambda share: None)).metrics)


def test_it_is_there_by_its_name() -> None:
    assert model_named("waiting") is MODEL


def test_runs_are_the_same_for_the_same_seed_and_learn_from_others() -> None:
    first = run(wait_below_h=2.0)
    assert first == pytest.approx(run(wait_below_h=2.0), nan_ok=True)
    assert first["model_rows"] > 0
    assert first["fixed_cost"] == pytest.approx(3 * 8 * 72 * 0.048 * 0.4, rel=0.05)
    parts = first["fixed_cost"] + first["after_cost"] + first["on_demand_cost"]
    assert first["total_cost"] == pytest.approx(parts)


def test_the_shortest_first_wait_less_in_the_mean() -> None:
    waits = [run(policy="all-jobs-wait", order=order, sized_for=3)["wait_mean_h"] for order in ("arrival", "shortest")]
    assert waits[1] < 0.8 * waits[0]


def test_without_machines_everything_is_on_demand() -> None:
    found = run(machines=0, sized_for=4, policy="no-jobs-wait")
    assert found["fixed_cost"] == 0
    assert found["on_demand_cost"] > 0
    assert found["wait_mean_h"] == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"machines": 0, "policy": "all-jobs-wait"}, "machines must be at least 1 where jobs wait"),
        ({"machines": 0, "policy": "long-jobs-wait-tried"}, "machines must be at least 1 where jobs wait"),
        ({"order": "random", "policy": "short-waits-wait"}, "order cannot be random where waits are known"),
    ],
)
def test_what_could_not_be_measured_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        run(**changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": "some-wait"}, "policy"),
        ({"most_tasks": 2}, "most_tasks"),
        ({"wait_below_h": -1}, "wait_below_h"),
        ({"length": "long"}, "length"),
        ({"patience": 1}, "patience"),
        ({"inputs": {"tasks": 1}}, "inputs.tasks"),
        ({"error": 2}, "error"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        MODEL.settings(SMALL | changes)
