"""The TOML file of an experiment: what it says, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.errors import ExperimentError, InvalidParameter
from ebbtide.simulator.experiments import document
from ebbtide.simulator.experiments.experiment import Axis, Experiment, Mark
from tests.simulator.experiments.places import SWEEP, put

#: How a figure with a policy as an axis, a bound and two panels is written down.
FIGURE = """
[experiment]
name = "fig8c"
model = "deflation-cluster"
policies = ["deflation", "preemption_only"]
seeds = 10
metrics = ["low_preempted", "low_rejected", "high_rejected"]

[settings]
node = { cpu_cores = 48, memory_mib = 131072 }

[sweep]
overcommitment = { from = 1.0, to = 2.0, step = 0.2 }
low_share = [0.3, 0.5, 0.6, 0.7, 0.8]
minimum_share = { from = 0, to = 0.5, step = 0.1 }

[[plots]]
title = "Preempted low-priority VMs"
metric = "low_preempted"
x = "overcommitment"
lines = ["policy", "minimum_share"]
panels = "low_share"
where = { low_share = [0.5, 0.7] }
marks = [{ bound = "incompressible_load", at = 1.0, label = "incompressible load = capacity" }]
percent = true
y_scale = "log"

[[plots]]
metrics = ["low_rejected", "high_rejected"]
where = { low_share = 0.5, minimum_share = 0.3 }
"""


def read(text: str, **more: Any) -> Experiment:
    return document.parsed(tomllib.loads(text), Path("/nowhere"), **more)


def test_a_figure_with_policies_bounds_and_panels_can_be_said() -> None:
    experiment = read(FIGURE)
    assert len(experiment.cases()) == 2 * 6 * 5 * 6
    first, last = experiment.cases()[0], experiment.cases()[-1]
    assert first.given == {
        "node": {"cpu_cores": 48, "memory_mib": 131072},
        "policy": "deflation",
        "overcommitment": 1.0,
        "low_share": 0.3,
        "minimum_share": 0.0,
    }
    assert str(last) == "policy=preemption_only, overcommitment=2, low_share=0.8, minimum_share=0.5"
    one, two = experiment.plots
    assert (one.x, one.lines, one.panels) == ("overcommitment", ("policy", "minimum_share"), ("low_share",))
    assert one.marks == (Mark("incompressible_load", 1.0, "incompressible load = capacity"),)
    assert (two.x, two.lines, two.panels, two.title) == (
        "overcommitment",
        ("policy",),
        (),
        "low_rejected, high_rejected",
    )


def test_a_range_has_the_numbers_that_one_reads() -> None:
    experiment = read(FIGURE)
    assert experiment.axes[0].values == (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    assert experiment.axes[2].values == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


@given(st.integers(-50, 50), st.integers(1, 40), st.integers(0, 30))
def test_a_range_ends_with_its_end(start: int, step: int, count: int) -> None:
    words = [f"{value / 100:.2f}" for value in (start, start + step * count, step)]
    text = "[experiment]\nname='a'\nmodel='jobs'\n[sweep]\na = {{from={}, to={}, step={}}}\n".format(*words)
    (axis,) = read(text).axes
    assert axis.values == tuple(float(f"{(start + i * step) / 100:.2f}") for i in range(count + 1))


def test_axes_may_be_settings_in_tables_and_policies_may_be_bundles_of_settings() -> None:
    text = """
    [experiment]
    name = "a"
    model = "matching"
    policies = ["capacity", { name = "no delay", policy = "matcher", delay = false, window = { d = 1 } }]
    [settings]
    window = { d = 7, w = 2 }
    [sweep]
    pool.servers = [64, 128]
    "pool.cores" = [48]
    """
    experiment = read(text)
    assert experiment.axis_names == ("policy", "pool.servers", "pool.cores")
    capacity, _, bundle, _ = experiment.cases()
    assert capacity.given == {"policy": "capacity", "window": {"d": 7, "w": 2}, "pool": {"servers": 64, "cores": 48}}
    assert bundle.given["policy"] == "matcher"
    assert bundle.given["delay"] is False
    assert bundle.given["window"] == {"d": 1, "w": 2}
    assert bundle.axes["policy"] == "no delay"


def test_a_single_policy_may_be_a_setting() -> None:
    experiment = read("[experiment]\nname='a'\nmodel='jobs'\n[settings]\npolicy='p'\n")
    assert experiment.axis_names == ()
    assert [case.given for case in experiment.cases()] == [{"policy": "p"}]


def test_cases_do_not_share_their_settings() -> None:
    one, two = read("[experiment]\nname='a'\nmodel='jobs'\n[settings]\nt={a=1}\n[sweep]\nt.b=[1,2]\n").cases()
    assert (one.given["t"], two.given["t"]) == ({"a": 1, "b": 1}, {"a": 1, "b": 2})


def test_what_is_set_by_hand_goes_before_the_file() -> None:
    overrides = {"seeds": [7, 9], "x": 5, "noise": 0, "inner.step": 1, "experiment.name": "other"}
    experiment = read(SWEEP, overrides=overrides)
    assert experiment.seeds == (7, 9)
    assert experiment.name == "other"
    assert experiment.settings == {"noise": 0}
    assert experiment.axes == (Axis("x", (5,)), Axis("inner.step", (1,)))


def test_a_key_in_a_table_of_the_settings_can_be_set() -> None:
    text = "[experiment]\nname='a'\nmodel='jobs'\n[settings]\nt={a=1, b=2}\n"
    assert read(text, overrides={"settings.t.a": 3, "t.c.d": "x"}).settings == {"t": {"a": 3, "b": 2, "c": {"d": "x"}}}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("packing", "packing"),
        ("a = 1", "a = 1"),
    ],
)
def test_words_of_a_command_line_are_toml_where_they_can_be(word: str, value: Any) -> None:
    assert document.value_of(word) == value


def test_plots_without_placed_axes_draw_them_all() -> None:
    plot = read(SWEEP).plots[0]
    assert (plot.lines, plot.panels) == (("policy",), ("inner.step",))


def test_inputs_are_relative_to_the_file_and_others_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.csv").touch()
    (tmp_path / "b.csv").touch()
    text = (
        '[experiment]\nname="a"\nmodel="jobs"\n[inputs]\na="a.csv"\n[inputs.b]\npath=""\nformat="swf"\norder="sort"\n'
    )
    path = put(tmp_path / "here", text)
    monkeypatch.chdir(tmp_path)
    experiment = document.read(path, inputs={"b": "b.csv"})
    assert experiment.inputs["a"].path == tmp_path / "here" / "a.csv"
    assert experiment.inputs["b"].path == tmp_path / "b.csv"
    assert (experiment.inputs["b"].format, experiment.inputs["b"].order) == ("swf", "sort")
    with pytest.raises(ExperimentError, match=r"lines.toml: inputs.b has no path here: state one by --input b=PATH"):
        document.read(path)
    named = r"inputs.c is no input of this experiment; there are a, b, jobs, capacity"
    for others in ({"b": "b.csv", "c": "b.csv"}, {"c": "b.csv"}):
        with pytest.raises(ExperimentError, match=named):
            document.read(path, inputs=others)
    with pytest.raises(ExperimentError, match=r"inputs.b is .*none.csv, which is no file"):
        document.read(path, inputs={"b": "none.csv"})


HEAD = '[experiment]\nname = "a"\nmodel = "jobs"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "experiment is missing"),
        ("[experiment]\nname='a'\n", "experiment.model is missing"),
        ("[experiment]\nname='a/b'\nmodel='jobs'\n", "experiment.name must be of letters"),
        (HEAD + "sedes = 3\n", "experiment.sedes is unknown; allowed are name, "),
        (HEAD + "[setings]\na=1\n", "setings is unknown; allowed are experiment, "),
        (HEAD + "seeds = 0\n", "experiment.seeds must be how many"),
        (HEAD + "seeds = [1, 1]\n", "experiment.seeds has a seed twice"),
        (HEAD + "seeds = [-1]\n", "experiment.seeds must be whole and not negative, but has -1"),
        (HEAD + "seeds = 1.5\n", "experiment.seeds must be how many"),
        (HEAD + "metrics = [1]\n", "experiment.metrics must be a list of texts"),
        (HEAD + "policies = ['a', 'a']\n", "experiment.policies must have names, each once, but has 'a'"),
        (HEAD + "policies = [{delay=true}]\n", "experiment.policies.name is missing"),
        (HEAD + "policies = [3]\n", "experiment.policies must have texts or tables, but has 3"),
        (HEAD + "[settings]\na = 2020-01-01\n", "settings.a must be a number"),
        (HEAD + "[settings]\nseed = 1\n", "settings.seed is a name of the results' own"),
        (HEAD + "[sweep]\na = 1\n", "sweep.a must be a list or {from, to, step}"),
        (HEAD + "[sweep]\na = []\n", "sweep.a must be a list or"),
        (HEAD + "[sweep]\na = [1, 1.0]\n", "sweep.a has a value twice"),
        (HEAD + "[sweep]\na = [1, 'b']\n", "sweep.a must have values of one sort"),
        (HEAD + "[sweep]\na = [[1]]\n", "sweep.a must have numbers, flags or texts"),
        (HEAD + "[sweep]\na = {from=1, to=2}\n", "sweep.a.step is missing"),
        (HEAD + "[sweep]\na = {from=1, to=2, step=0}\n", "sweep.a.step must be above 0, but is 0"),
        (HEAD + "[sweep]\na = {from=3, to=2, step=1}\n", "sweep.a.to must not be below from"),
        (HEAD + "[sweep]\na = {from=0, to=2, step=1, by=1}\n", "sweep.a.by is unknown; allowed are from, to, step"),
        (HEAD + "[sweep]\na = {from=0, to=2, step=1e-9}\n", "sweep.a.step makes 2000000001 values"),
        (HEAD + "[sweep]\na = {from=0, to=9e3, step=1}\nb = {from=0, to=9e3, step=1}\n", "sweep is 81018001 runs"),
        (HEAD + "[sweep]\npolicy = ['a']\n", "sweep.policy stands in experiment.policies"),
        (HEAD + "policies=['p']\n[settings]\npolicy='q'\n", "settings.policy stands in experiment.policies, too"),
        (HEAD + "[settings]\na=1\n[sweep]\na.b = [1]\n", "sweep.a.b stands in settings, too"),
        (HEAD + "policies=[{name='p', a=1}]\n[sweep]\na = [1]\n", "sweep.a stands in experiment.policies.p, too"),
        (HEAD + "[inputs]\na = 3\n", "inputs.a must be a path or a table, but is 3"),
        (HEAD + "[inputs.a]\npath='x'\nformt='y'\n", "inputs.a.formt is unknown"),
        (HEAD + "[plots]\nx='a'\n", "plots must be tables"),
        (HEAD + "[[plots]]\nx='a'\n", "plots[1].metric is missing"),
        (HEAD + "[[plots]]\nmetric='m'\nx='a'\n", "plots[1].x must be an axis, but is 'a'; there are none"),
        (HEAD + "[sweep]\na=[1]\n[[plots]]\nmetric='m'\nlines='b'\n", "plots[1].lines must be an axis, but is 'b'"),
        (
            HEAD + "[sweep]\na=[1]\n[[plots]]\nmetric='m'\nlines='a'\n",
            "plots[1].x and lines and panels must be different",
        ),
        (
            HEAD + "[sweep]\na=[1]\n[[plots]]\nmetric='m'\nwhere={a=2}\n",
            "plots[1].where.a has 2, which the axis has not",
        ),
        (HEAD + "[sweep]\na=[1]\n[[plots]]\nmetric='m'\ny_scale='x'\n", "plots[1].y_scale must be one of linear, log"),
        (HEAD + "[sweep]\na=[1]\n[[plots]]\nmetric='m'\nfoo=1\n", "plots[1].foo is unknown"),
        (HEAD + "[sweep]\na=[1]\n[[plots]]\nmetric='m'\nmarks=[{bound='b'}]\n", "plots[1].marks.at is missing"),
        (HEAD + "metrics=['k']\n[sweep]\na=[1]\n[[plots]]\nmetric='m'\n", "plots[1].metrics has 'm', which is not in"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(text: str, sentence: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[experiment\n", "lines.toml: file is no TOML: "),
        (b"\xff\xfe", "lines.toml: file is no text in UTF-8"),
        (None, "lines.toml: file cannot be read: No such file"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "lines.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ExperimentError, match=sentence):
        document.read(path)


def test_a_setting_in_no_table_is_refused_where_it_is_set() -> None:
    with pytest.raises(InvalidParameter, match="a is no table"):
        read("[experiment]\nname='a'\nmodel='jobs'\n[settings]\na=1\n", overrides={"a.b": 2})
    with pytest.raises(InvalidParameter, match="plots stand in the file"):
        read(SWEEP, overrides={"plots.x": 2})


def test_what_every_policy_states_cannot_be_set_by_hand() -> None:
    """It would count nowhere, and nobody would know."""
    head = "[experiment]\nname='a'\nmodel='jobs'\npolicies=[{}]\n[settings]\nmachines=1\nt={{a=1}}\n"
    both = head.format("{name='p', machines=2, t={a=2}}, {name='q', machines=3, t={a=3}}")
    for key in ("machines", "settings.machines", "t.a"):
        with pytest.raises(InvalidParameter, match=f"^{key} would count nowhere: each of experiment.policies states"):
            read(both, overrides={key: 9})
    one = head.format("{name='p', machines=2}, 'q'")
    assert [case.given["machines"] for case in read(one, overrides={"machines": 9}).cases()] == [2, 9]
    # Of a table the rest counts.
    assert [case.given["t"] for case in read(both, overrides={"settings.t": {"a": 9, "b": 9}}).cases()] == [
        {"a": 2, "b": 9},
        {"a": 3, "b": 9},
    ]
