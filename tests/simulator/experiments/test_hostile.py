"""Values that make no sense, files that change or are damaged: one sentence before the first run, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import ExperimentError, InvalidParameter
from ebbtide.simulator.experiments import code, compare, load, report, run, runner
from ebbtide.simulator.experiments.document import parsed, read, value_of
from ebbtide.simulator.experiments.experiment import Plot
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.finished import Finished
from ebbtide.simulator.experiments.finished import load as load_run
from ebbtide.simulator.experiments.finished import save as save_run
from ebbtide.simulator.experiments.model import Input, Outcome, model_named
from ebbtide.simulator.experiments.progress import Status
from ebbtide.simulator.experiments.results import Results
from ebbtide.simulator.experiments.shared import SharedArrays, cache_dir, shared_arrays
from ebbtide.simulator.generators import arrivals, capacity
from ebbtide.simulator.generators.durations import BoundedPareto
from ebbtide.simulator.inputs.batches import SeriesBatch
from tests.simulator.experiments.models import LINEAR
from tests.simulator.experiments.places import SWEEP, put

DATA = Path(__file__).parents[1] / "data"
HEAD = f'[experiment]\nname = "a"\nmodel = "{LINEAR}"\n'
HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        # All of them as a list would be terabytes.
        (HEAD + "seeds = 1_000_000_000_000\n", "experiment.seeds are too many; at most 1000000 runs"),
        (HEAD + f"seeds = {HUGE}\n", "experiment.seeds are too many"),
        (HEAD + 'metrics = ["y", "y"]\n', "experiment.metrics has a metric twice"),
        (HEAD + f"[sweep]\nx = [1, {HUGE}]\n", "sweep.x has a number of more than 64 bits"),
        (HEAD + "[sweep]\nx = [9_223_372_036_854_775_808]\n", "sweep.x has a number of more than 64 bits"),
        (HEAD + "[sweep]\nx = [1.0, nan]\n", "sweep.x must have finite numbers, but has nan"),
        (HEAD + "[sweep]\nx = [-inf]\n", "sweep.x must have finite numbers, but has -inf"),
        (HEAD + f"[sweep]\nx = {{from = 1, to = {HUGE}, step = 1}}\n", "sweep.x.to must be a finite number"),
        (HEAD + "[sweep]\nx = {from = 0, to = 1e300, step = 1e-300}\n", "sweep.x.step makes 1"),
        (HEAD + '[sweep]\n"inner.step" = [1]\ninner.step = [2]\n', "sweep.inner.step says the same as"),
        (HEAD + '[sweep]\ninner = [1]\n"inner.step" = [2]\n', "sweep.inner.step says the same as sweep.inner"),
        (HEAD + "[sweep]\nx = [0, 1]\n[[plots]]\nmetric = 'y'\nx_scale = 'log'\n", "plots[1].x_scale is log, which"),
        (HEAD + f"a = {'[' * 5000}{']' * 5000}\n", "file is no TOML: "),
        (HEAD + f"a = {'9' * 5000}\n", "file is no TOML: "),
    ],
)
def test_a_file_with_values_that_make_no_sense_is_refused_at_once(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        read(put(tmp_path, text))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'lines.toml'}: ")


@pytest.mark.parametrize(
    ("document", "key"),
    [({"settings": 3}, "x"), ({"sweep": [1]}, "sweep.x"), ({"experiment": "a"}, "seeds")],
)
def test_nothing_can_be_set_in_what_is_no_table(document: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{key} cannot be set: .* is no table"):
        parsed(document, Path(), {key: 1})


def test_words_of_a_command_line_that_toml_chokes_on_are_texts_or_bad_lists() -> None:
    assert value_of("9" * 5000) == "9" * 5000
    with pytest.raises(InvalidParameter, match="is no TOML") as caught:
        value_of("[" * 5000)
    assert len(str(caught.value)) < 300


def test_numbers_too_large_for_a_float_are_refused_and_large_whole_ones_are_exact() -> None:
    with pytest.raises(InvalidParameter, match="n must be a finite number"):
        Given({"n": int(HUGE)}).number("n")
    assert Given({"n": 2**60 + 1}).whole("n") == 2**60 + 1
    assert Given({"n": 3.0}).whole("n") == 3
    assert Given({}).whole("n", 7) == 7


VMS = {"vms": Input(DATA / "azure_derived.csv.gz")}
JOBS = {"machines": 1, "cpu_cores": 1, "days": 1, "load": 0.5}


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("jobs", JOBS | {"machines": 10**12}, "machines"),
        ("jobs", JOBS | {"job_cores": [1, float("inf")]}, "job_cores"),
        ("jobs", JOBS | {"job_cores": [True]}, "job_cores"),
        ("jobs", JOBS | {"job_cores": [float("nan")]}, "job_cores"),
        ("jobs", JOBS | {"capacity": "walk", "capacity_least": 0.9, "capacity_most": 0.5}, "capacity_most"),
        ("jobs", JOBS | {"capacity": "walk", "capacity_most": 0.6}, "capacity_start"),
        ("jobs", JOBS | {"inputs": {"job": Input(DATA)}}, "inputs.job"),
        ("jobs", JOBS | {"from_s": 86_400}, "from_s"),
        ("jobs", JOBS | {"durations": "pareto", "shape": 0.5, "least_s": 1e-300, "most_s": 1e300}, "least_s"),
        ("intervals", JOBS | {"capacity_most": 0.6}, "capacity_start"),
        ("intervals", JOBS | {"capacity_least": 0, "capacity_start": 0}, "capacity_start"),
        ("intervals", JOBS | {"bands": 10**9}, "bands"),
        ("waiting", JOBS | {"machines": 10**12}, "machines"),
        ("coaster", {"load": 0.5, "hours": 1, "cost_ratio": 1e300}, "cost_ratio"),
        ("coaster", {"load": 0.5, "hours": 1, "servers": 10**12}, "servers"),
        ("matching", {"inputs": VMS, "acquirer": True, "least_machines": 9, "most_machines": 5}, "least_machines"),
        ("matching", {"inputs": VMS, "acquirer": True, "least_utilisation": 0.9}, "least_utilisation"),
        ("matching", {}, "inputs.vms"),
        ("deflation-cluster", {"overcommitment": 1}, "inputs.vms"),
        ("deflation-cluster", {"overcommitment": float("nan"), "inputs": VMS}, "overcommitment"),
    ],
)
def test_a_setting_that_cannot_be_is_named_before_the_first_run(name: str, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        model_named(name).settings(given)
    assert caught.value.field == field


@pytest.mark.parametrize("name", [":x", ".models:MODEL", "a b:c", "tests..models:x"])
def test_a_model_of_no_module_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match=r"model .* is not there"):
        model_named(name)


@pytest.mark.parametrize(("name", "wrong"), [("jobs", "jobs"), ("jobs", "capacity"), ("waiting", "jobs")])
def test_a_trace_of_something_else_is_named_with_what_it_is(name: str, wrong: str) -> None:
    model = model_named(name)
    known = JOBS if wrong == "capacity" else {key: JOBS[key] for key in ("machines", "cpu_cores")}
    settings = model.settings(known | {"inputs": {wrong: VMS["vms"]}})
    with pytest.raises(InvalidParameter, match=rf"inputs\.{wrong} must be a trace of {wrong}, but .*is one of vms"):
        model.run(settings, 1, None, lambda share: None)


def test_a_slip_in_a_rate_does_not_run_for_ever() -> None:
    rng = np.random.default_rng(1)
    with pytest.raises(InvalidParameter, match=r"per_s makes 1e\+15 arrivals; at most 1e\+10"):
        next(arrivals.poisson(rng, 1e10, 1e5))
    for interval_s in (1e-9, 1e-305):
        with pytest.raises(InvalidParameter, match=r"interval_s makes .* steps"):
            capacity.random_walk(rng, 1e6, interval_s=interval_s)
    few: Iterable[SeriesBatch] = [capacity.random_walk(rng, 10.0, interval_s=1.0)]
    assert [len(batch) for batch in few] == [10]


@pytest.mark.parametrize("shape", [1e-300, 1e-3, 0.5, 1.0, 1.1, 1e300])
@pytest.mark.parametrize("most_s", [np.nextafter(300.0, 301.0), 301.0, 3e5, 3e17])
def test_a_pareto_distribution_at_the_edge_of_floats_has_a_mean(shape: float, most_s: float) -> None:
    mean_s = BoundedPareto(shape, 300.0, float(most_s)).mean_s()
    assert 300.0 * (1 - 1e-9) <= mean_s <= most_s * (1 + 1e-9)


def test_an_input_that_changes_while_the_sweep_runs_ends_it_and_keeps_what_was_made_before(tmp_path: Path) -> None:
    """Runs after the change would stand under the fingerprint of what the file held before."""
    (tmp_path / "log").mkdir()
    data = tmp_path / "data"
    data.write_text("one")
    text = HEAD + f'seeds = 4\n[settings]\nlog = "{tmp_path / "log"}"\n[inputs]\ndata = "data"\n'
    path = put(tmp_path, text)

    def meddle(status: Status) -> None:
        if status.done == 2:
            data.write_text("three")

    with pytest.raises(ExperimentError, match=r"inputs\.data has changed while the sweep ran: .*data; what was done"):
        run(path, output=tmp_path / "out", workers=0, listener=meddle)
    assert len(list((tmp_path / "out" / "runs").glob("*.npz"))) == 2
    data.write_text("one")
    assert run(path, output=tmp_path / "out", workers=0).meta["runs"] == {"total": 4, "kept": 2, "made": 2, "failed": 0}

    def remove(status: Status) -> None:
        data.unlink(missing_ok=True)

    with pytest.raises(ExperimentError, match=r"inputs\.data cannot be read"):
        run(path, output=tmp_path / "out", workers=0, fresh=True, listener=remove)


def test_an_old_report_does_not_stand_beside_new_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, HEAD)
    run(path, output=tmp_path / "out", workers=0)
    assert (tmp_path / "out" / "report.html").is_file()

    def full(*words: Any) -> None:
        raise ExperimentError("output", "cannot be written: No space left on device")

    monkeypatch.setattr(report, "write", full)
    with pytest.raises(ExperimentError, match="No space left"):
        run(path, output=tmp_path / "out", workers=0, overrides={"noise": 5.0})
    assert load(tmp_path / "out").meta["settings"] == {"noise": 5.0}
    assert not (tmp_path / "out" / runner.REPORT).exists()


def test_a_full_disk_is_named_and_leaves_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExperimentError, match=r"npz cannot be written: No space left on device"):
        run(put(tmp_path, HEAD), output=tmp_path / "out", workers=0)
    assert [left.name for left in (tmp_path / "out").rglob(".*")] == [".lock"]
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda meta: [1], "are none of ours: meta.json has no a table"),
        (lambda meta: {"name": "a"}, "meta.json has no axes, metrics, seeds, settings, runs"),
        (lambda meta: meta | {"metrics": ["z"]}, "do not fit together: results.parquet has no column 'z'"),
        (lambda meta: meta | {"axes": ["w"]}, "do not fit together: results.parquet has no column 'w'"),
    ],
)
def test_results_that_do_not_fit_together_are_refused(tmp_path: Path, spoil: Any, sentence: str) -> None:
    run(put(tmp_path, HEAD), output=tmp_path / "out", workers=0)
    meta = tmp_path / "out" / "meta.json"
    meta.write_text(json.dumps(spoil(json.loads(meta.read_text()))))
    with pytest.raises(ExperimentError, match=sentence):
        load(tmp_path / "out")


def test_a_damaged_file_of_a_run_is_as_good_as_none_and_never_something_else(tmp_path: Path) -> None:
    path = tmp_path / "one.npz"
    save_run(path, Finished(Outcome({"m": 0.25}, {"t": {"a": np.arange(50.0), "b": np.arange(50) % 7}}), 1.0))
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    found = 0
    for _ in range(300):
        spoiled = bytearray(whole)
        for place in rng.integers(0, len(whole), rng.integers(1, 4)).tolist():
            spoiled[place] ^= int(rng.integers(1, 256))
        path.write_bytes(spoiled)
        one = load_run(path)
        if one is not None:
            found += 1
            assert one.outcome.metrics == {"m": 0.25}
            assert one.outcome.tables["t"]["a"].tolist() == np.arange(50.0).tolist()
    assert found < 150
    np.save(tmp_path / "two.npy", np.arange(3))
    (tmp_path / "two.npy").rename(path)
    assert load_run(path) is None


def test_shared_arrays_are_made_again_by_other_code_and_go_when_they_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"a": np.array([len(made)])}

    old = shared_arrays("x", make)
    monkeypatch.setattr(code, "code_fingerprint", lambda: "a reader that was mended")
    assert shared_arrays("x", make)["a"].tolist() == [2]
    strange = cache_dir() / "not-ours"
    strange.mkdir()
    for place in (strange, old.directory):
        os.utime(place, (0, time.time() - 31 * 86400))
    shared_arrays("y", make)
    assert strange.is_dir()
    assert not old.directory.exists()
    assert len(list(cache_dir().iterdir())) == 3


def test_a_damaged_array_of_the_cache_is_named(tmp_path: Path) -> None:
    place = shared_arrays("x", lambda: {"a": np.arange(1000)}).directory
    (place / "a.npy").write_bytes(b"")
    with pytest.raises(ExperimentError, match=rf"cache has .*a\.npy, which is damaged .*: remove {place}"):
        SharedArrays(place)["a"]
    shutil.rmtree(place)


def test_names_with_dollars_and_underscores_are_drawn_as_they_are(tmp_path: Path) -> None:
    """A dollar would begin a formula, an underscore would hide a line from the legend."""
    names = ["a $\\nonsense$", "_b"]
    columns = {"policy": np.repeat(names, 2), "x": np.tile([1.0, 2.0], 2), "seed": np.ones(4, np.int64)}
    meta = {"name": "a", "axes": ["policy", "x"], "metrics": ["y $"], "seeds": [1]}
    results = Results(columns | {"y $": np.arange(4.0)}, meta)
    from ebbtide.simulator.experiments import drawing

    picture = drawing.svg(results, Plot("$ a $ b", ("y $",), "x", ("policy",)))
    assert picture is not None
    legend = picture[picture.index('id="legend_1"') :]
    assert legend.count("<!--") == 2


def test_a_comparison_tells_of_other_code_models_and_inputs() -> None:
    def results(name: str, **meta: Any) -> Results:
        columns = {"seed": np.array([1, 2]), "y": np.array([1.0, 2.0])}
        return Results(columns, {"name": name, "axes": [], "metrics": ["y"], "settings": {}, **meta})

    one = results("one", model="jobs", code="12ab", inputs={"vms": {"sha256": "aa"}})
    other = results("other", model="waiting", code="34cd", inputs={"vms": {"sha256": "bb"}})
    assert compare(one, one).notes == ()
    assert compare(one, other).notes == (
        "model is jobs in one and waiting in other",
        "code is 12ab in one and 34cd in other",
        "inputs.vms (sha256) is aa in one and bb in other",
    )


def test_means_of_many_metrics_are_those_of_each(tmp_path: Path) -> None:
    found = run(put(tmp_path, SWEEP), output=tmp_path / "out", workers=0)
    for case in found.cases():
        means = found.means(["y", "offset"], case)
        assert means == {metric: found.mean(metric, case) for metric in ("y", "offset")}
    with pytest.raises(ExperimentError, match="z is no metric; there are y, offset, nothing"):
        found.means(["y", "z"])
