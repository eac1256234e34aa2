"""Sweeps: every run once, what is done is kept, what fails costs nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments import code, load, model, processes, results, run, runner
from ebbtide.simulator.experiments.experiment import Case, Run
from ebbtide.simulator.experiments.finished import Finished
from ebbtide.simulator.experiments.finished import load as load_run
from ebbtide.simulator.experiments.finished import save as save_run
from ebbtide.simulator.experiments.model import Outcome
from ebbtide.simulator.experiments.progress import Status, in_words
from tests.simulator.experiments.models import LINEAR
from tests.simulator.experiments.places import SWEEP, put

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where runs leave a file each."""
    path = tmp_path / "log"
    path.mkdir()
    return path


def made(log: Path) -> set[tuple[float, int]]:
    """Which runs were made since the last look, each by its x and its seed."""
    files = list(log.iterdir())
    found = [(float(path.name.split("-")[0]), int(path.name.split("-")[1])) for path in files]
    for path in files:
        path.unlink()
    return set(found)


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, "did not happen in time"
        time.sleep(0.02)


def test_every_case_runs_with_every_seed_and_all_is_written(tmp_path: Path) -> None:
    said: list[Status] = []
    found = run(put(tmp_path), output=tmp_path / "out", workers=2, command="the command", listener=said.append)
    assert len(found) == 2 * 3 * 2 * 3
    table = pq.read_table(tmp_path / "out" / "results.parquet")
    assert table.column_names == [
        *("policy", "x", "inner.step", "seed", "y", "offset", "nothing", "bound_line", "bound_load", "run_s", "error"),
    ]
    for row in table.to_pylist():
        slope = {"flat": 1.0, "steep": 2.0}[row["policy"]]
        noise = 0.5 * np.random.default_rng(row["seed"]).standard_normal()
        assert row["y"] == slope * row["x"] + row["inner.step"] + noise
        assert (row["offset"], row["bound_line"], row["error"]) == (10.0, slope * row["x"], "")
    path = pq.read_table(tmp_path / "out" / "tables" / "path.parquet")
    assert path.column_names == ["policy", "x", "inner.step", "seed", "at", "y", "word"]
    assert len(path) == 3 * len(found)
    assert path["word"].to_pylist()[:4] == ["a", "b", "c", "a"]
    part = found.table("part")
    assert list(part) == ["policy", "axis_x", "inner.step", "seed", "x", "late", "said"]
    assert set(part["said"][part["axis_x"] <= 2].tolist()) == {""}
    assert part["x"].tolist()[:4] == [0.5, 1.5, 2.5, 0.5]
    np.testing.assert_array_equal(np.isnan(part["late"]), part["axis_x"] <= 2)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["command"], meta["seeds"], meta["axes"]) == ("the command", [1, 2, 3], ["policy", "x", "inner.step"])
    assert meta["policies"] == {"flat": {"policy": "flat"}, "steep": {"policy": "steep"}}
    assert meta["runs"] == {"total": 36, "kept": 0, "made": 36, "failed": 0}
    assert meta["started"] <= meta["ended"]
    assert meta["host"]["cores"] == os.cpu_count()
    assert (tmp_path / "out" / "report.html").is_file()
    assert said[0].stage == "reading inputs"
    assert (said[-1].stage, said[-1].done, said[-1].share) == ("done", 36, 1.0)


def test_processes_change_nothing_in_what_comes_out(tmp_path: Path) -> None:
    here = run(put(tmp_path), output=tmp_path / "here", workers=0)
    there = run(put(tmp_path), output=tmp_path / "there", workers=2)
    for name, values in here.columns.items():
        if name != "run_s":
            np.testing.assert_array_equal(values, there.columns[name])
    again = load(tmp_path / "there")
    for name, values in there.columns.items():
        np.testing.assert_array_equal(values, again.columns[name])
        assert values.dtype.kind == again.columns[name].dtype.kind


def test_a_change_makes_exactly_the_runs_that_it_touches(tmp_path: Path, log: Path) -> None:
    text = f'[experiment]\nname="a"\nmodel="{LINEAR}"\nmetrics=["y"]\nseeds=2\n[settings]\nlog="{log}"\n'
    text += "[sweep]\nx=[1, 2]\n"

    def sweep(text: str) -> set[tuple[float, int]]:
        run(put(tmp_path, text), output=tmp_path / "out", workers=0)
        return made(log)

    assert sweep(text) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert sweep(text) == set()
    assert sweep(text.replace("seeds=2", "seeds=3")) == {(1, 3), (2, 3)}
    assert sweep(text.replace("[1, 2]", "[1, 2, 4]")) == {(4, 1), (4, 2)}
    assert sweep(text.replace("[sweep]", "noise=0.2\n[sweep]")) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    # Words of the file that change no outcome change no run; and what was found before the change is still there.
    assert sweep(text.replace('name="a"', 'name="b"\ndescription="other"')) == set()
    run(put(tmp_path, text), output=tmp_path / "out", workers=0, fresh=True)
    assert len(made(log)) == 4


def test_another_content_of_an_input_or_other_code_makes_all_runs_again(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_text("one")
    (tmp_path / "same").write_text("one")
    text = f'[experiment]\nname="a"\nmodel="{LINEAR}"\n[settings]\nlog="{log}"\n[inputs]\ndata="data"\n'
    path = put(tmp_path, text)

    def sweep(file: str) -> int:
        run(path, output=tmp_path / "out", workers=0, inputs={"data": tmp_path / file})
        return len(made(log))

    assert [sweep("data"), sweep("data"), sweep("same")] == [1, 0, 0]
    (tmp_path / "data").write_text("two")
    assert [sweep("data"), sweep("data")] == [1, 0]
    monkeypatch.setattr(code, "code_fingerprint", lambda: "other")
    assert [sweep("data"), sweep("data")] == [1, 0]
    monkeypatch.setattr(type(model.model_named(LINEAR)), "version", 2, raising=False)
    assert [sweep("data"), sweep("data")] == [1, 0]


_BASE = """
from ebbtide.simulator.experiments.model import Outcome
class M:
    name = "m"
    def __init__(self, factor): self.factor = factor
    def settings(self, given): return dict(given)
    def prepare(self, settings, progress): return None
    def run(self, settings, seed, prepared, progress): return Outcome({"m": float(seed * self.factor)})
"""


@pytest.mark.parametrize("changed", ["mytwo.py", "helper.py", "mybase.py"])
def test_a_change_of_a_module_that_a_model_of_ones_own_is_made_of_makes_its_runs_again(
    tmp_path: Path, changed: str
) -> None:
    files = {"mybase.py": _BASE, "helper.py": "F = 1\n", "mytwo.py": "import mybase\nfrom helper import F\n"}
    files["mytwo.py"] += "MODEL = mybase.M(F * 1)\n"
    files["stranger.py"] = "A = 1\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    put(tmp_path, '[experiment]\nname="a"\nmodel="mytwo:MODEL"\nseeds=2\n')
    once = "from ebbtide.simulator.experiments import run\n"
    once += "print(run('lines.toml', output='out', workers=0).meta['runs'])"

    def sweep() -> str:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        words = [sys.executable, "-c", once]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert "'kept': 0, 'made': 2" in sweep()
    (tmp_path / "stranger.py").write_text("A = 2\n")
    assert "'kept': 2, 'made': 0" in sweep()
    (tmp_path / changed).write_text(files[changed].replace("1", "100") + "# changed\n")
    assert "'kept': 0, 'made': 2" in sweep()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_fails_is_recorded_and_costs_no_other(tmp_path: Path, log: Path, workers: int) -> None:
    text = SWEEP.replace("noise = 0.5", f'noise = 0.5\nfails_at = 2\nlog = "{log}"')
    found = run(put(tmp_path, text), output=tmp_path / "out", workers=workers)
    failed = found.columns["error"] != ""
    assert set(found.columns["x"][failed]) == {2}
    assert failed.sum() == 12
    assert set(found.columns["error"][failed]) == {"x fails here <&>"}
    assert np.isnan(found.columns["y"][failed]).all()
    assert not np.isnan(found.columns["y"][~failed]).any()
    assert found.meta["runs"]["failed"] == 12
    assert "models.py" in found.meta["failures"][0]["trace"]
    assert found.meta["failures"][0]["run"].startswith("policy=flat, x=2")
    made(log)
    # What failed is tried again, the rest is not.
    run(put(tmp_path, text), output=tmp_path / "out", workers=0)
    assert {x for x, _ in made(log)} == {2}


def test_a_process_that_is_killed_costs_its_run_only(tmp_path: Path) -> None:
    text = SWEEP.replace("noise = 0.5", "noise = 0.5\ndies_at = 2").replace("seeds = 3", "seeds = 1")
    found = run(put(tmp_path, text), output=tmp_path / "out", workers=2)
    failed = found.columns["error"] != ""
    assert (set(found.columns["x"][failed]), failed.sum()) == ({2}, 4)
    assert set(found.columns["error"][failed]) == {"its process was killed by SIGKILL"}


def test_a_process_that_dies_in_the_middle_of_a_message_costs_its_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    dies = (
        "import os, sys; from multiprocessing.connection import Connection; "
        "one = Connection(int(sys.argv[1])); one.recv(), one.recv(); os.write(one.fileno(), bytes([0, 0, 0, 9, 1]))"
    )
    monkeypatch.setattr(processes, "_COMMAND", dies)
    with processes.Workers(LINEAR, None, 1) as workers:
        (event,) = [one for one in workers.events([Run(Case({}, {}), 1, "key")]) if one.finished is not None]
    assert event.finished is not None
    assert event.finished.error == "its process ended with 0"


def test_a_process_whose_code_is_not_that_of_the_sweep_makes_no_run() -> None:
    """It was begun after a model's source had changed: its outcomes would stand under the old source's name."""
    with processes.Workers(LINEAR, None, 1) as workers:
        workers._hello = (*workers._hello[:-1], ["other"])
        (event,) = [one for one in workers.events([Run(Case({}, {}), 1, "key")]) if one.finished is not None]
    assert event.finished is not None
    assert event.finished.error.endswith("has changed since the sweep began: run it again")


def test_a_slip_in_the_last_case_is_found_before_the_first_run(tmp_path: Path, log: Path) -> None:
    text = f'[experiment]\nname="a"\nmodel="{LINEAR}"\n[settings]\nlog="{log}"\n[sweep]\nx=[1, 2, -1]\n'
    with pytest.raises(ExperimentError, match=r"lines.toml: settings.x must be at least 0, but is -1 \(x=-1\)"):
        run(put(tmp_path, text), output=tmp_path / "out", workers=0)
    assert not made(log)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('model = "', 'model = "x', "model 'xtests.* is not there: there is no module xtests"),
        (f'"{LINEAR}"', '"no-such"', "model 'no-such' is unknown; there are harvest-series, "),
        ("noise = 0.5", "noize = 0.5", "settings.noize is unknown; allowed are policy, "),
        ('"steep"]', '"odd"]', "settings.policy must be one of flat, steep, but is 'odd'"),
        ('"line"', '"lime"', r"plots\[1\] has no bound 'lime'; the model has line, load"),
        (
            'metric = "y"',
            'metric = "z"',
            r"plots\[1\].metrics has 'z', which the model does not give; it gives y, offset",
        ),
        ("seeds = 3", 'metrics = ["y", "z"]\nseeds = 3', r"experiment.metrics has 'z', which the model does not give"),
    ],
)
def test_what_the_model_does_not_know_is_refused(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert old in SWEEP
    with pytest.raises(ExperimentError, match=sentence):
        run(put(tmp_path, SWEEP.replace(old, new)), output=tmp_path / "out", workers=0)


def test_only_wanted_metrics_are_written(tmp_path: Path) -> None:
    found = run(
        put(tmp_path, SWEEP.replace("seeds = 3", 'seeds = 1\nmetrics = ["y"]')), output=tmp_path / "o", workers=0
    )
    assert found.metrics == ("y",)
    assert "offset" not in found.columns


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    with runner._alone(tmp_path / "out"), pytest.raises(ExperimentError, match="out is in use by another sweep"):
        run(put(tmp_path), output=tmp_path / "out", workers=0)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("text", ["{}", "[" * 100_000], ids=["small", "deep"])
@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("name", ["tables/mine.parquet", "runs/mine.npz", "meta.json"])
def test_a_directory_of_others_is_refused_and_stays_as_it_is(
    tmp_path: Path, name: str, lock: bool, text: str, fresh: bool
) -> None:
    mine = tmp_path / "project" / name
    mine.parent.mkdir(parents=True)
    mine.write_text(text)
    if lock:
        (tmp_path / "project" / ".lock").touch()
    first = name.split("/")[0]
    with pytest.raises(ExperimentError, match=f"output .*project has no results .* not empty [(]{first} is there"):
        run(put(tmp_path), output=tmp_path / "project", workers=0, fresh=fresh)
    assert mine.read_text() == text
    found = [path.name for path in (tmp_path / "project").rglob("*") if path.is_file() and path != mine]
    assert found == ([".lock"] if lock else [])


def test_a_fresh_sweep_removes_runs_of_sweeps_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(put(tmp_path), output=out, workers=0)
    mine = [out / "runs" / name for name in ("events/mine.log", "mine.npz", "notes.npz.txt", "mine.counts.json")]
    mine[0].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    key = "0123456789abcdef" * 2
    names = (f"{key}.npz", f"{key}.counts.json", f".{key}.npz.89abcdef", f".{key}.npz.1234.part")
    ours = [out / "runs" / name for name in names]
    for path in ours:
        path.write_text("")
    assert run(put(tmp_path), output=out, workers=0, fresh=True).meta["runs"]["kept"] == 0
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)
    assert not any(path.exists() for path in ours)


def test_results_that_were_copied_are_gone_on_with(tmp_path: Path) -> None:
    run(put(tmp_path), output=tmp_path / "out", workers=0)
    (tmp_path / "out" / ".lock").unlink()
    again = run(put(tmp_path), output=tmp_path / "out", workers=0)
    assert again.meta["runs"]["made"] == 0
    # As one that was broken off is copied.
    for path in (*(tmp_path / "out").glob("*.*"), tmp_path / "out" / ".lock"):
        path.unlink(missing_ok=True)
    again = run(put(tmp_path), output=tmp_path / "out", workers=0)
    assert again.meta["runs"]["made"] == 0


@pytest.mark.parametrize("lock", [False, True])
def test_a_sweep_that_was_broken_off_before_its_first_run_had_ended_is_gone_on_with(tmp_path: Path, lock: bool) -> None:
    (tmp_path / "out" / "runs").mkdir(parents=True)
    if lock:
        (tmp_path / "out" / ".lock").touch()
    assert run(put(tmp_path), output=tmp_path / "out", workers=0).meta["runs"]["kept"] == 0


def test_ctrl_c_ends_all_processes_and_the_same_command_goes_on(tmp_path: Path, log: Path) -> None:
    text = f"""
    [experiment]
    name = "a"
    model = "{LINEAR}"
    [settings]
    log = "{log}"
    waits_s = 0.3
    [sweep]
    x = {{ from = 1, to = 12, step = 1 }}
    """
    out = tmp_path / "out"
    words = [sys.executable, "-m", "ebbtide.cli.main", "sim", "run", str(put(tmp_path, text)), "--results", str(out)]
    words += ["--workers", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # Where the tests themselves run in the background of a shell, Ctrl-C is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: len(list(out.glob("runs/*.npz"))) >= 2)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "error: interrupted; what was done is kept in" in said
    assert "Traceback" not in said
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    kept = len(list(out.glob("runs/*.npz")))
    assert 2 <= kept < 12
    assert not list(out.glob("runs/.*"))
    assert not (out / "results.parquet").exists()
    made(log)
    found = run(put(tmp_path, text), output=out, workers=0)
    assert len(made(log)) == 12 - kept
    assert found.meta["runs"] == {"total": 12, "kept": kept, "made": 12 - kept, "failed": 0}


def test_workers_end_when_the_process_that_gives_them_work_is_killed(tmp_path: Path, log: Path) -> None:
    text = f'[experiment]\nname="a"\nmodel="{LINEAR}"\nseeds=2\n[settings]\nlog="{log}"\nwaits_s=600\nsilent=true\n'
    words = [
        sys.executable,
        "-m",
        "ebbtide.cli.main",
        "sim",
        "run",
        str(put(tmp_path, text)),
        "--results",
        str(tmp_path / "out"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*words, "--workers", "2"], stderr=subprocess.DEVNULL, env=environment)
    children: list[psutil.Process] = []
    try:
        wait_for(lambda: len(list(log.iterdir())) == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.kill()
        process.wait()
        wait_for(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children))
    finally:
        process.kill()
        process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def test_a_file_of_a_run_comes_back_as_it_was_or_not_at_all(tmp_path: Path) -> None:
    tables = {"t": {"a": np.array([1, 2]), "b/ü": np.array(["x", "é"])}, "empty": {"c": np.empty(0)}}
    outcome = Outcome({"m": 0.1 + 0.2, "n": float("nan"), "i": float("inf")}, tables)
    path = tmp_path / "runs" / "one.npz"
    save_run(path, Finished(outcome, 2.5))
    found = load_run(path)
    assert found is not None
    assert (found.outcome.metrics["m"], found.outcome.metrics["i"], found.run_s) == (
        0.1 + 0.2,
        float("inf"),
        2.5,
    )
    assert np.isnan(found.outcome.metrics["n"])
    for table, columns in tables.items():
        for name, values in columns.items():
            np.testing.assert_array_equal(found.outcome.tables[table][name], values)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert load_run(path) is None
    assert load_run(tmp_path / "none.npz") is None


def test_outcomes_that_cannot_be_kept_are_refused() -> None:
    for outcome, sentence in (
        (Outcome({"m": "much"}), "metric m must be a number, but is 'much'"),  # type: ignore[dict-item]
        (Outcome({}, {"t": {"a": np.zeros(2), "b": np.zeros(3)}}), "table t must have 1-d columns of one length"),
        (Outcome({}, {"t": {"a": np.zeros((2, 2))}}), "table t must have 1-d columns"),
        (Outcome({}, {"../t": {}}), "table '../t' must have a name of letters"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model.checked(outcome)


def test_a_metric_with_the_name_of_an_axis_is_refused() -> None:
    assert results.clash(["policy", "x"], ["y", "x"]) == "x"
    assert results.clash(["policy"], ["seed"]) == "seed"
    assert results.clash(["policy", "x"], ["y"]) is None


def test_time_left_goes_by_the_runs_made_now() -> None:
    status = Status("running", total=20, reused=10, done=4, under_way=1.0, elapsed_s=50.0)
    assert status.left_s == 50.0
    assert status.share == 0.75
    assert str(status) == "14 of 20 runs, 10 of them kept from before, about 50 s left"
    assert Status("running", total=5).left_s is None
    assert [in_words(s) for s in (59.4, 59.6, 3599, 7500)] == ["59 s", "1 min 00 s", "59 min 59 s", "2 h 05 min"]


def test_progress_names_what_is_compiled(tmp_path: Path) -> None:
    said: list[str] = []
    run(
        put(tmp_path),
        output=tmp_path / "out",
        overrides={"compiles": "live", "seeds": 1},
        workers=1,
        listener=lambda status: said.append(status.stage),
    )
    first = said.index("compiling the loop of live (kept for this code)")
    assert said[first + 1] == "running"
    assert said[-1] == "done"


JOBS = """\
[experiment]
name = "jobs"
model = "jobs"
policies = ["first-fit"]
seeds = 2

[settings]
machines = 2
cpu_cores = 4

[inputs.jobs]
path = "jobs.swf"
"""


@pytest.mark.parametrize(("malformed", "never_ran"), [(0, 0), (3, 0), (0, 4), (0, 60)])
def test_lines_of_an_input_that_are_no_rows_are_counted_and_warned_of(
    tmp_path: Path, malformed: int, never_ran: int
) -> None:
    """Also where the rest of what was read comes from the cache."""
    runtimes = ["x60"] * malformed + ["-1"] * never_ran + ["60"] * 400
    lines = [f"{n} {n} 0 {runtime} 1 -1 -1 1 60 -1 1 1 1 -1 1 -1 -1 -1" for n, runtime in enumerate(runtimes)]
    (tmp_path / "jobs.swf").write_text("\n".join(lines) + "\n")
    file = put(tmp_path, JOBS)
    for directory in ("one", "other"):
        meta = run(file, output=tmp_path / directory, workers=0).meta
        counts = meta["inputs"]["jobs"]["counts"]
        assert (counts["malformed"], counts["given"]) == (malformed, 400)
        assert sum(counts["skipped"].values()) == never_ran
        warned = [one for one in meta["warnings"] if one.startswith("inputs.jobs: ")]
        assert len(warned) == (malformed > 0) + (never_ran > 20)
    if malformed:
        assert "3 of 403 lines are malformed and left out; the first is line 1: run_time_s is 'x60'" in warned[0]
    elif warned:
        assert "of 460 rows 400 are taken; left out: 60 " in warned[0]


@pytest.mark.parametrize("model", ["jobs", "harvest-series"])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("change", ["copy", "touch", "no cache"])
def test_what_was_left_out_is_warned_of_although_nobody_reads_it_again(
    tmp_path: Path, cache: Path, model: str, kept: bool, change: str
) -> None:
    head, row = {
        "jobs": ("id,submit_s,runtime_s,cpu_cores,task_runtime_s", "{n},{at_s},60,1,60"),
        "harvest-series": ("id,arrives_s,departs_s,cpu_cores,memory_mib", "{n},{at_s},,1,1024"),
    }[model]
    rows = [head, *(row.format(n=n, at_s="x" if n == 7 else n) for n in range(200))]
    settings, name = {
        "jobs": ("machines=2\ncpu_cores=4\n", "jobs"),
        "harvest-series": ("servers=2\nwarm_up_s=0\n", "vms"),
    }[model]
    path, other = tmp_path / "one.csv", tmp_path / "two.csv"
    path.write_text("\n".join(rows) + "\n")
    file = put(tmp_path, f'[experiment]\nname="a"\nmodel="{model}"\nseeds=1\n[settings]\n{settings}[inputs.{name}]\n')

    def sweep(read: Path, output: str) -> list[str]:
        found = run(file, output=tmp_path / output, workers=0, inputs={name: read})
        assert not any(found.columns["error"])
        return [one for one in found.meta["warnings"] if "1 of 200 lines are malformed" in one]

    assert len(sweep(path, "out")) == 1
    if change == "copy":
        other.write_bytes(path.read_bytes())
        path = other
    elif change == "touch":
        os.utime(path, (0, 0))
    else:
        shutil.rmtree(cache)
    assert len(sweep(path, "out" if kept else "elsewhere")) == 1
