"""The matcher as a model of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.errors import InvalidParameter
from simulator.experiments.document import read
from simulator.experiments.model import Input, checked, model_named
from simulator.matching.model import MODEL

DAY_S = 86_400.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def vms(tmp_path: Path) -> Input:
    generator = np.random.default_rng(4)
    arrives_s = np.sort(generator.integers(0, 900, 5000)) * 300
    lines = ["arrival_s,batch,cores,mem_gb,dur_lo_s,dur_hi_s,censored,dur_s"]
    for number, at_s in enumerate(arrives_s.tolist()):
        cores, lasts_s = generator.choice([1, 2, 4]), int(generator.exponential(20.0) + 1) * 300
        lines.append(f"{at_s},{number},{cores},2.0,{lasts_s},{lasts_s},0,{lasts_s}")
    path = tmp_path / "vms.csv"
    path.write_text("\n".join(lines) + "\n")
    return Input(path)


def given(vms: Input, **changes: Any) -> dict[str, Any]:
    small = {
        "servers": 15,
        "machines": 5,
        "share": 1.0,
        "cpu_cores": 32.0,
        "from_s": 0.25 * DAY_S,
        "until_s": 2.5 * DAY_S,
    }
    jobs = {"jobs": 3, "least_tasks": 2, "most_tasks": 4, "most_task_s": 900.0, "load": 0.3, "policy": "random"}
    return {"inputs": {"vms": vms}, **small, **jobs, "policy": "capacity-random", **changes}


def test_a_run_gives_completion_times_waste_and_the_pools_statistics(
    vms: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    case = MODEL.settings(given(vms))
    seen: list[float] = []
    prepared = MODEL.prepare([case, case], seen.append)
    assert seen[-1] == 1.0
    outcome = checked(MODEL.run(case, 1, prepared, seen.append))
    assert outcome.metrics["jct_mean_s"] > 0
    assert outcome.metrics["pool_changes"] > 0
    assert len(outcome.tables["jobs"]["completion_s"]) == 3
    again = checked(MODEL.run(case, 1, prepared, seen.append))
    assert again.metrics.keys() == outcome.metrics.keys()
    assert again.metrics["jct_mean_s"] == outcome.metrics["jct_mean_s"]


def test_an_acquirer_has_all_servers_to_choose_from(
    vms: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    case = MODEL.settings(given(vms, acquirer=True, least_machines=5, most_machines=5, replaced_share=0.2))
    outcome = checked(MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None))
    assert outcome.metrics["machines_given_back"] > 5
    assert outcome.metrics["machines_held_mean"] == pytest.approx(5.0, abs=1.0)
    assert len(outcome.tables["held"]["cores"]) > 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "best"),
        ("packing", "tight"),
        ("servers", 0),
        ("load", -1.0),
        ("machines", 99),
        ("colour", 1),
        ("budget_cores", 9),
        ("estimate_error", 1.5),
        ("estimate_factor", 0),
    ],
)
def test_a_bad_setting_names_its_field(vms: Input, field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=field):
        MODEL.settings(given(vms, **{field: value}))


def test_wrong_estimates_are_an_axis_like_others(vms: Input) -> None:
    experiment = read(ROOT / "experiments" / "estimates.toml", inputs={"vms": vms.path})
    workloads = [MODEL.settings(case.given).workload for case in experiment.cases()]
    assert {workload.estimate_error for workload in workloads} >= {0.0, 1.0}
    assert {workload.estimate_factor for workload in workloads} >= {0.5, 2.0}


def test_experiments_find_it_by_its_name() -> None:
    assert model_named("matching") is MODEL
