"""Every experiment that is shipped takes a trace of one's own, in whatever format it is; docs have its command.

That each model then runs on it: test_manners.py, and tests of the models.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.experiments.document import read
from ebbtide.simulator.experiments.model import model_named
from ebbtide.simulator.inputs.traces import Trace
from tests.simulator.samples import VMTABLE

ROOT = Path(__file__).parents[3]
#: The project's own formats.
OWN = ("jobs", "vms", "capacity", "series")
SHIPPED = sorted(path.stem for path in (ROOT / "experiments").glob("*.toml"))
#: What a trace of two days wants of settings that were made for longer ones: windows, sizes, how often it is drawn.
SHORT: dict[str, dict[str, Any]] = {
    "intervals": {"days": 2, "from_s": 0, "machines": 6, "history_days": 10},
    "waiting": {"machines": 2, "from_s": 0},
    "jobs": {"from_s": 0, "machines": 6},
    "coaster": {"servers": 20, "short_servers": 4},
    "matching": {"servers": 10, "machines": 6, "jobs": 3, "most_task_s": 3600},
    "deflation-cluster": {"sample_share": 1.0, "window_from_s": 3600, "window_until_s": 86_400},
    "preemption": {"sample_share": 1.0, "window_from_s": 3600, "window_until_s": 86_400},
    "steady": {"sample_share": 1.0, "window_from_s": 3600, "window_until_s": 86_400},
    "harvest-series": {"servers": 6, "warm_up_s": 3600, "until_s": 86_400},
}


def traces(directory: Path) -> dict[str, Path]:
    """Two days of jobs, VMs, capacity, carbon and power, in the project's own formats."""
    rng = np.random.default_rng(1)
    at = np.sort(rng.uniform(0, 172_800, 200))
    lengths = [f"{value:.0f}" for value in rng.exponential(3000, 200) + 60]
    cores = rng.choice([1, 2, 4], 200).tolist()
    leaves = at + rng.exponential(40_000, 200) + 900
    lines = {
        "jobs": ["id,submit_s,runtime_s,cpu_cores,task_runtime_s"]
        + [f"j{i},{at[i]:.0f},{lengths[i]},{cores[i]},{lengths[i]}" for i in range(200)],
        "vms": ["id,arrives_s,departs_s,cpu_cores,memory_mib"]
        + [f"v{i},{at[i]:.0f},{leaves[i]:.0f},{cores[i]},{1024 * cores[i]}" for i in range(200)],
        "capacity": ["machine,at_s,cpu_cores"]
        + [f"m{i},0,8" for i in range(6)]
        + [f"m{h % 6},{3600 * h},{8 * (h // 6 % 2)}" for h in range(1, 48)],
        "carbon": ["at_s,value"] + [f"{3600 * h},{400 + 300 * (h % 24 > 11)}" for h in range(72)],
        "power": ["at_s,value"] + [f"{1800 * h},{100 + 50 * (h % 9)}" for h in range(144)],
    }
    paths = {}
    for name, rows in lines.items():
        paths[name] = directory / f"{name}.csv"
        paths[name].write_text("\n".join(rows) + "\n")
    return paths


def inputs_of(name: str) -> list[str]:
    text = (ROOT / "experiments" / f"{name}.toml").read_text()
    return re.findall(r"^\[inputs\.(\w+)\]", text, re.MULTILINE)


def model_of(name: str) -> str:
    found = re.search(r'^model = "([\w-]+)"', (ROOT / "experiments" / f"{name}.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_experiment_takes_a_trace_of_ones_own(name: str, tmp_path: Path) -> None:
    have = traces(tmp_path)
    wanted = inputs_of(name) or ["jobs"]
    short = dict(SHORT[model_of(name)])
    if "capacity" in wanted:
        del short["machines"]
    policies = tomllib.loads((ROOT / "experiments" / f"{name}.toml").read_text())["experiment"].get("policies", [])
    # What all policies state is not set by hand.
    short = {
        key: value for key, value in short.items() if not all(isinstance(one, dict) and key in one for one in policies)
    }
    if "window_h" in (ROOT / "experiments" / f"{name}.toml").read_text():
        del short["jobs"]
        short["window_h"] = 6
    if "carbon" in wanted:
        short |= {"carbon_from_s": 0, "history_days": 0}
    experiment = read(ROOT / "experiments" / f"{name}.toml", overrides=short, inputs={one: have[one] for one in wanted})
    model = model_named(experiment.model)
    settings = [model.settings(case.given) for case in experiment.cases()]
    assert settings
    for given in experiment.cases()[0].given["inputs"].values():
        assert Trace(given.path, given.format, options=dict(given.options)).form.name in OWN


def test_a_format_that_the_file_states_holds_for_files_in_it(tmp_path: Path) -> None:
    """The content is asked only where it is not in that format: a trace of hawk-tr could be taken for another."""
    path = tmp_path / "jobs.tr"
    path.write_text("0 1 5 5\n10 2 7.5 5 10\n")
    experiment = read(ROOT / "experiments" / "eagle.toml", inputs={"jobs": path})
    assert experiment.cases()[0].given["inputs"]["jobs"].format == "hawk-tr"


def test_what_a_file_says_of_its_own_trace_does_not_hold_for_one_in_another_format(tmp_path: Path) -> None:
    """VMs that this one shows staying would leave at drawn times, and its seconds would be moved on a grid."""
    file, own, vmtable = ROOT / "experiments" / "fig8c.toml", traces(tmp_path)["vms"], tmp_path / "vmtable.csv"
    vmtable.write_bytes(VMTABLE)

    def kept(path: Path, **overrides: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        experiment = read(file, overrides=overrides, inputs={"vms": path})
        assert experiment.plots[0].marks
        return {key: experiment.settings.get(key) for key in ("followed_until_s", "grid_s")}, experiment.notes

    said = "the input vms is in the format {}, not azure-derived: without {}"
    neither = {"followed_until_s": None, "grid_s": None}
    assert kept(own) == (neither, (said.format("vms", "followed_until_s, grid_s"),))
    stated = {"inputs.vms.format": "vms"}
    assert kept(own, **stated) == kept(own)
    assert kept(own, followed_until_s=60) == (neither | {"followed_until_s": 60}, (said.format("vms", "grid_s"),))
    # Azure's own table stands on the same grid.
    assert kept(vmtable) == (neither | {"grid_s": 300}, (said.format("azure-vmtable", "followed_until_s"),))
    same = ROOT / "tests" / "simulator" / "data" / "azure_derived.csv.gz"
    assert kept(same) == ({"followed_until_s": 300_000, "grid_s": 300}, ())


def test_how_capacity_walks_says_nothing_beside_a_trace_of_capacity(tmp_path: Path) -> None:
    walk = {"capacity_stays": False}
    inputs = {"capacity": traces(tmp_path)["capacity"]}
    text = (ROOT / "experiments" / "jobs-walk.toml").read_text()
    path = tmp_path / "walk.toml"
    path.write_text(text.replace('capacity = "walk"', 'capacity = "walk"\ncapacity_stays = false'))
    assert read(path).settings.items() >= walk.items()
    experiment = read(path, inputs=inputs)
    assert model_named("jobs").settings(experiment.cases()[0].given)
    assert "capacity_stays" in experiment.notes[0]


def test_mixes_of_made_jobs_are_one_beside_a_trace(tmp_path: Path) -> None:
    shipped = ROOT / "experiments" / "intervals-mixes.toml"
    made = read(shipped, overrides={"from_s": 0})
    traced = read(shipped, overrides={"from_s": 0}, inputs={"jobs": traces(tmp_path)["jobs"]})
    assert len(made.cases()) == 3 * len(traced.cases())
    assert not any("job_cores" in case.given for case in traced.cases())


@pytest.mark.parametrize("name", SHIPPED)
def test_docs_have_the_command_with_a_trace_for_each_experiment(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "experiments.md").read_text()
    rows = [line for line in page.splitlines() if f"experiments/{name}.toml" in line and line.startswith("|")]
    assert len(rows) == 1
    for wanted in inputs_of(name) or ["jobs"]:
        assert f"--input {wanted}=" in rows[0]
