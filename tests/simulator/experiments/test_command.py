"""`ebb sim run`, `show`, `compare` as a user calls them, and the examples of docs/reference/experiments.md."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ebbtide.cli import main
from ebbtide.cli.commands import experiments
from ebbtide.cli.schemas import schema_of
from ebbtide.simulator.experiments import document, load
from ebbtide.simulator.experiments.progress import Status
from tests.simulator.experiments.places import put

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "reference" / "experiments.md"


def call(*words: str) -> Result:
    return CliRunner().invoke(main.app, ["sim", *words], catch_exceptions=True)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the usual sweep."""
    directory = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBB_CACHE_DIR", str(directory / "cache"))
        done = call("run", str(put(directory)), "--results", str(directory / "out"), "--workers", "2")
    assert done.exit_code == 0, done.output
    return directory / "out"


def test_run_shows_the_means_and_says_where_the_rest_is(tmp_path: Path) -> None:
    words = [str(put(tmp_path)), "--results", str(tmp_path / "out"), "--set", "seeds=2", "--set", "x=[4]"]
    done = call("run", *words)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "policy x inner.step y offset nothing"
    assert re.fullmatch(r"flat 4 0\.5 \d\.\d+ ± \S+ 10 ± 0 -", lines[1])
    assert "8 runs: 8 made, 0 kept, 0 failed" in done.stderr
    assert "lines.toml: running: 0 of 8 runs" in done.stderr
    assert load(tmp_path / "out").meta["command"] == shlex.join(["ebb", "sim", "run", *words])


def test_json_is_one_document(swept: Path) -> None:
    done = call("show", str(swept), "--metric", "y", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    jsonschema.validate(found, schema_of("sim show"))
    assert found["meta"]["name"] == "lines"
    assert len(found["cases"]) == 12
    results = load(swept)
    one = found["cases"][5]
    interval = results.mean("y", one["case"])
    assert one["metrics"] == {"y": {"mean": interval.mean, "low": interval.low, "high": interval.high, "seeds": 3}}


def test_compare_shows_differences_and_notes(swept: Path, tmp_path: Path) -> None:
    done = call("run", str(put(tmp_path)), "--results", str(tmp_path / "b"), "--set", "noise=0.6", "--set", "x=[1,2]")
    assert done.exit_code == 0, done.output
    done = call("compare", str(swept), str(tmp_path / "b"), "--metric", "y")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 1 + 8
    assert "note: settings.noise is 0.5 in out and 0.6 in b" in done.stderr
    assert "note: 4 cases are in" in done.stderr
    found = json.loads(call("compare", str(swept), "--axis", "policy", "--metric", "y", "-o", "json").stdout)
    jsonschema.validate(found, schema_of("sim compare"))
    steps = {one["case"]["x"]: one["difference"] for one in found["differences"]}
    # Noise is that of the seed in both, so steep - flat is x.
    assert steps == pytest.approx({1: 1, 2: 2, 3: 3})
    assert all(one["seeds"] == 3 for one in found["differences"])


def test_a_run_that_failed_ends_the_command_with_1_when_all_is_written(tmp_path: Path) -> None:
    done = call(
        "run", str(put(tmp_path)), "--results", str(tmp_path / "out"), "--set", "fails_at=2", "--set", "seeds=1"
    )
    assert done.exit_code == 1
    assert "error: 4 of 12 runs failed, the first: x fails here <&>" in done.stderr
    assert len(load(tmp_path / "out")) == 12


def test_show_says_of_how_many_seeds_a_mean_is_where_some_have_no_number(
    swept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load(swept)
    columns = {name: values.copy() for name, values in found.columns.items()}
    columns["y"][0] = np.nan
    monkeypatch.setattr(found, "columns", columns)
    monkeypatch.setattr("ebbtide.simulator.experiments.load", lambda directory: found)
    lines = [" ".join(line.split()) for line in call("show", str(swept)).stdout.splitlines()]
    assert re.fullmatch(r"flat 1 0\.5 \S+ ± \S+ \(2 of 3 seeds\) 10 ± 0 -", lines[1])
    assert "seeds" not in "".join(lines[2:])


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["run", "none.toml"], 1, "none.toml: file cannot be read"),
        (["run", "lines.toml", "--set", "noise"], 2, "--set must be NAME=VALUE, not 'noise'"),
        (
            ["run", "lines.toml", "--set", "noise=x"],
            1,
            "lines.toml: settings.noise must be a finite number, but is 'x'",
        ),
        (["run", "lines.toml", "--set", "x=1", "--set", " x = 2"], 2, "--set x is given twice"),
        (
            ["run", "lines.toml", "--input", "jobs=a", "--input", "jobs=b"],
            2,
            "--input jobs is given twice; a trace is one",
        ),
        (
            ["run", "lines.toml", "--set", "policies=[flat]"],
            1,
            "--set '[flat]' is no TOML (Invalid value (at line 1, column 10)): texts in it stand in quotes, as in "
            "'[\"random\"]'",
        ),
        (
            ["run", "lines.toml", "--set", "settings.seed=2"],
            1,
            "lines.toml: settings.seed is a name of the results' own; how many are run is experiment.seeds (--set "
            "seeds=N)",
        ),
        (["run", "lines.toml", "--input", "a=b"], 1, "inputs.a is no input of this experiment; there are none"),
        (["show", "."], 1, "results are not in .: there is no meta.json"),
        (["compare", "."], 1, "results are not in ."),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, sentence: str
) -> None:
    put(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = call(*words)
    if code == 1:
        assert sentence in str(done.exception)
    else:
        assert sentence in " ".join(done.stderr.replace("│", " ").split())
        assert done.exit_code == code


@pytest.mark.parametrize("command", ["run", "show", "compare"])
def test_help_has_an_example(command: str) -> None:
    done = call(command, "--help")
    assert f"Example: ebb sim {command} " in " ".join(done.stdout.split())


def test_lines_of_progress_come_with_each_stage_and_then_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tell = experiments._Lines("a.toml")
    tell(Status("preparing", total=10))
    for done in range(6):
        tell(Status("running", total=10, done=done, elapsed_s=3.0 * done))
        now[0] += 3.0
    assert capsys.readouterr().err.splitlines() == [
        "a.toml: preparing: 0 of 10 runs",
        "a.toml: running: 0 of 10 runs",
        "a.toml: running: 4 of 10 runs, about 18 s left",
    ]


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCS.read_text(encoding="utf-8")
    toml, *_ = re.findall(r"```toml\n(.*?)```", text, re.S)
    python = re.findall(r"```python\n(.*?)```", text, re.S)[:1]
    monkeypatch.chdir(tmp_path)
    put(tmp_path, toml, "pools.toml")
    done = call("run", "pools.toml")
    assert done.exit_code == 0, done.output
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S))
    commands = [line.split("#")[0].strip() for line in shell.splitlines() if line.startswith("ebb sim ")]
    assert "ebb sim run pools.toml" in commands
    names: dict[str, object] = {}
    exec(python[0], names)  # noqa: S102
    results = load("results/pools")
    assert np.isfinite(results.columns["gap_mean_s"]).all()
    for command in commands:
        if not command.startswith("ebb sim run"):
            found = call(*shlex.split(command)[2:])
            assert found.exit_code == 0, (command, found.output)


def test_every_experiment_of_the_project_can_be_read(tmp_path: Path) -> None:
    files = sorted((ROOT / "experiments").glob("*.toml"))
    assert ROOT / "experiments" / "harvest-series.toml" in files
    (tmp_path / "any").touch()
    for file in files:
        inputs = re.findall(r"^\[inputs\.(\w+)\]", file.read_text(encoding="utf-8"), re.M)
        experiment = document.read(file, inputs=dict.fromkeys(inputs, tmp_path / "any"))
        assert experiment.plots
