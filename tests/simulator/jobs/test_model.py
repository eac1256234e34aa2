"""The engine as a model of experiments: settings with their names in errors, runs that a seed decides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments import Input, run
from ebbtide.simulator.experiments.model import model_named
from ebbtide.simulator.jobs.model import MODEL
from tests.simulator.test_excerpts import DATA

ROOT = Path(__file__).resolve().parents[3]
MADE: dict[str, Any] = {"machines": 20, "cpu_cores": 16, "load": 0.5, "days": 1.0, "job_cores": [1, 4]}
#: Name, seconds, MiB.
JOBS_OF = [("a", 0, 1000), ("wide", 10, 1_000_000), ("b", 70, 60_000), ("c", 80, 1000)]


def metrics(seed: int = 1, **given: Any) -> dict[str, float]:
    seen: list[float] = []
    settings = MODEL.settings({**MADE, **given})
    MODEL.prepare([settings], seen.append)
    outcome = MODEL.run(settings, seed, None, seen.append)
    assert seen == sorted(seen)
    assert not seen or seen[-1] <= 1
    return dict(outcome.metrics)


def test_it_is_found_by_its_name() -> None:
    assert model_named("jobs") is MODEL


def test_load_is_what_was_asked_for_and_a_seed_decides() -> None:
    one = metrics(durations="uniform", least_s=60, most_s=600, days=2.0, validate=False)
    assert one["utilisation"] == pytest.approx(0.5, abs=0.05)
    assert one == metrics(durations="uniform", least_s=60, most_s=600, days=2.0)
    assert one != metrics(2, durations="uniform", least_s=60, most_s=600, days=2.0)
    assert one["jobs_done"] == one["jobs"] > 1000


def test_made_jobs_that_are_too_wide_for_any_machine_are_no_load() -> None:
    found = metrics(durations="uniform", least_s=60, most_s=600, days=2.0, job_cores=[2, 32])
    assert found["jobs_refused"] > 0
    assert found["utilisation"] == pytest.approx(0.5, abs=0.05)
    with pytest.raises(InvalidParameter, match="job_cores must have one of at most the 16 cores of a machine"):
        metrics(job_cores=[32])


def test_a_walk_kills_and_checkpoints_save() -> None:
    walk: dict[str, Any] = {
        "capacity": "walk",
        "durations": "uniform",
        "least_s": 60,
        "most_s": 7200,
        "load": 0.9,
        "days": 4.0,
    }
    plain = metrics(**walk)
    assert plain["kills"] > 10
    assert 0 < plain["waste"] < 1
    saved = metrics(**walk, checkpoint_every_s=600.0)
    assert saved["waste"] < plain["waste"] / 2


def test_a_trace_goes_in_with_its_own_capacity() -> None:
    path = DATA / "gaia_azure.csv"
    given = {k: v for k, v in MADE.items() if k == "machines"}
    settings = MODEL.settings({**given, "cpu_cores": 128, "inputs": {"jobs": Input(path)}})
    found = MODEL.run(settings, 1, None, lambda share: None).metrics
    assert found["jobs_done"] == 60
    assert math.isfinite(found["completion_mean_s"])


@pytest.mark.parametrize("later", ["n1,50,8,", "n2,50,0,", "n2,50,0,0\nn2,60,16,", "n2,50,0,2000000\nn2,60,8,"])
@pytest.mark.parametrize("capacity_from_s", [0.0, 55.0])
def test_a_machine_keeps_the_memory_that_it_was_said_to_have(
    tmp_path: Path, later: str, capacity_from_s: float
) -> None:
    """What wants more than any machine has is refused, and keeps nothing else waiting."""
    capacity = f"machine,at_s,cpu_cores,memory_mib\nn1,0,16,65536\nn2,0,16,65536\n{later}\nn1,60,16,\n"
    (tmp_path / "capacity.csv").write_text(capacity)
    rows = [f"{name},{at_s},100,4,{mib},100\n" for name, at_s, mib in JOBS_OF]
    (tmp_path / "jobs.csv").write_text("id,submit_s,runtime_s,cpu_cores,memory_mib,task_runtime_s\n" + "".join(rows))
    inputs = {name: Input(tmp_path / f"{name}.csv") for name in ("jobs", "capacity")}
    given = {"policy": "first-fit", "discipline": "strict", "validate": True, "capacity_from_s": capacity_from_s}
    settings = MODEL.settings({"inputs": inputs, **given})
    prepared = MODEL.prepare([settings], lambda share: None)
    found = MODEL.run(settings, 1, prepared, lambda share: None).metrics
    assert (found["jobs_refused"], found["jobs_left"], found["jobs_done"]) == (1, 0, 3)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"policy": "worst"}, "policy"),
        ({"discipline": "fifo"}, "discipline"),
        ({"colour": 1}, "colour"),
        ({"load": 0}, "load"),
        ({"durations": "pareto"}, "shape"),
        ({"job_cores": []}, "job_cores"),
        ({"job_cores": [1, 0.5]}, "job_cores"),
        ({"least_tasks": 3}, "most_tasks"),
        ({"capacity": "tide"}, "capacity"),
        ({"inputs": {"vms": Input(Path("/nowhere"))}}, "inputs"),
        ({"machines": 0}, "machines"),
        ({"checkpoint_every_s": -1}, "checkpoint_every_s"),
    ],
)
def test_settings_that_cannot_be_name_their_field(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{problem}"):
        MODEL.settings({**MADE, **given})


def test_the_experiment_that_is_shipped_runs_and_more_work_is_lost_the_more_is_asked_for(tmp_path: Path) -> None:
    """A tenth of it, in this process."""
    small = {"machines": 20, "seeds": 2, "from_s": 86400.0, "to_s": 259200.0, "days": 3.0, "load": [0.4, 0.9]}
    found = run(
        ROOT / "experiments" / "jobs-walk.toml",
        output=tmp_path,
        overrides={"policies": ["best-fit"], "checkpoint_every_s": [0], **small},
        workers=0,
    )
    assert not any(found.columns["error"])
    loads, wastes = np.asarray(found.columns["load"], float), np.asarray(found.columns["waste"], float)
    assert wastes[loads == 0.9].mean() > wastes[loads == 0.4].mean() > 0
