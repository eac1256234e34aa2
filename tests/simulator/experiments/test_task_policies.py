"""The shipped experiments on task policies: their settings are sound, and a small run of each gives figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ebbtide.simulator.experiments.document import read
from ebbtide.simulator.experiments.model import model_named

ROOT = Path(__file__).parents[3]
SMALL: dict[str, dict[str, Any]] = {
    "waiting": {"sized_for": 3, "machines": [2], "days": 4},
    "intervals": {"machines": 10, "days": 32, "exponent": [1.8], "aggressiveness": [0.1], "history_days": 30},
    "coaster": {"servers": 50, "short_servers": 2, "hours": 1, "cost_ratio": [2]},
}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_policy_of_a_shipped_experiment_runs(name: str) -> None:
    experiment = read(ROOT / "experiments" / f"{name}.toml", overrides=SMALL[name])
    model = model_named(experiment.model)
    cases = experiment.cases()
    assert len(cases) >= 3
    for case in cases:
        found = model.run(model.settings(case.given), 1, None, lambda share: None).metrics
        plotted = {metric for plot in experiment.plots for metric in plot.metrics} - {"saving"}
        assert all(math.isfinite(found[metric]) for metric in plotted)


@pytest.mark.parametrize("name", ["waiting-trace", "coaster-trace", "coaster-yahoo", "eagle"])
def test_experiments_on_traces_are_sound(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "jobs.tr"
    trace.write_text("0 1 5 5\n10 2 7.5 5 10\n")
    experiment = read(ROOT / "experiments" / f"{name}.toml", inputs={"jobs": trace})
    for case in experiment.cases():
        model_named(experiment.model).settings(case.given)
