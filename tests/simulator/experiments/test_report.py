"""report.html: its numbers are those of results.parquet, and it loads nothing from anywhere."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from ebbtide.simulator.experiments import drawing, load, report, run
from ebbtide.simulator.experiments.experiment import Mark, Plot
from ebbtide.simulator.experiments.panels import panels
from ebbtide.simulator.experiments.results import Results
from tests.simulator.experiments.places import SWEEP, put


class Tables(HTMLParser):
    """Every table of a page: rows of cells by the heading above them; a number is (as shown, exact)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self._name = ""
        self._heads: list[str] = []
        self._cells: list[Any] = []
        self._text = ""
        self._exact: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        given = dict(attrs)
        if tag == "table":
            self._name, self._heads = given.get("id") or "", []
            self.tables[self._name] = []
        elif tag == "tr":
            self._cells = []
        self._text, self._exact = "", given.get("data-value")

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "th":
            self._heads.append(self._text)
        elif tag == "td":
            self._cells.append(self._text if self._exact is None else (self._text, float(self._exact)))
        elif tag == "tr" and self._cells and self._heads:
            self.tables[self._name].append(dict(zip(self._heads, self._cells, strict=True)))


def same(shown: tuple[str, float], value: float) -> None:
    """The exact number is the value, and what is shown is that number."""
    text, exact = shown
    if math.isnan(value):
        assert math.isnan(exact)
        assert text == "-"
    else:
        assert exact == pytest.approx(value, rel=1e-12, abs=1e-15)
        assert float(text) == pytest.approx(value, rel=5.1e-6)


def by_hand(values: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval, by scipy's own."""
    mean = float(np.mean(values))
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
    return mean, float(low), float(high)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the results of a sweep, of which some runs failed."""
    directory = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBB_CACHE_DIR", str(directory / "cache"))
        text = SWEEP.replace("noise = 0.5", "noise = 0.5\nfails_at = 3").replace(
            '"Two slopes"', "'Two <b>slopes</b> &'"
        )
        run(put(directory, text), output=directory / "out", workers=0, command="ebb sim run 'a <b>.toml'")
    return directory / "out"


def test_every_number_of_its_tables_is_in_the_parquet(swept: Path) -> None:
    tables = Tables((swept / "report.html").read_text()).tables
    rows = pq.read_table(swept / "results.parquet").to_pylist()
    assert len(tables["runs"]) == len(rows) == 36
    for shown, row in zip(tables["runs"], rows, strict=True):
        assert set(shown) == set(row) - {"error", "run_s"}
        for name, cell in shown.items():
            if isinstance(cell, tuple):
                same(cell, math.nan if row[name] is None else float(row[name]))
            else:
                assert cell == str(row[name])

    def values(metric: str, **case: Any) -> list[float]:
        found = [r[metric] for r in rows if all(r[k.replace("__", ".")] == v for k, v in case.items())]
        return [value for value in found if not math.isnan(value)]

    points = tables["plot-1"]
    assert len(points) == 2 * 2 * 3
    for point in points:
        case = {"policy": point["policy"], "x": point["x"][1], "inner__step": point["inner.step"][1]}
        found = values("y", **case)
        same(point["seeds"], len(found))
        same(point["bound_line"], values("bound_line", **case)[0])
        for name, value in zip(("mean", "low", "high"), by_hand(found) if found else [math.nan] * 3, strict=True):
            same(point[name], value)
    means = tables["means"]
    assert len(means) == 12
    for row in means:
        found = values("y", policy=row["policy"], x=row["x"][1], inner__step=row["inner.step"][1])
        mean, _, high = by_hand(found) if found else (math.nan,) * 3
        same(row["y"], mean)
        same(row["y ±"], high - mean)
        same(row["nothing"], math.nan)
    (other,) = {text for row in tables["marks-1"] for text in [row["x"][0]]}
    assert other == "2.5"
    assert len(tables["failures"]) == 12


def test_it_names_command_version_and_seeds_and_lets_no_name_be_markup(swept: Path) -> None:
    page = (swept / "report.html").read_text()
    meta = load(swept).meta
    assert "<pre>ebb sim run &#x27;a &lt;b&gt;.toml&#x27;</pre>" in page
    assert f"Ebbtide {meta['version']}" in page
    assert "3 seeds (1, 2, 3)" in page
    assert "12 runs failed" in page
    assert "x fails here &lt;&amp;&gt;" in page
    assert "b" not in Tables(page).tags


def test_it_says_what_policies_stand_for_and_how_inputs_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("one")
    stated = '[inputs.data]\npath = "data"\nformat = "swf"\noptions = { unit = 2 }\n'
    found = run(put(tmp_path, SWEEP + stated), output=tmp_path / "out", workers=0, overrides={"seeds": 1})
    read = {key: found.meta["inputs"]["data"][key] for key in ("format", "options", "order")}
    assert read == {"format": "swf", "options": {"unit": 2}, "order": None}
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<td class="text">policy steep</td><td class="text">policy = steep</td>' in page
    assert "; read with format = swf, options = {&#x27;unit&#x27;: 2}</td>" in page


def test_it_needs_no_network_and_runs_nothing(swept: Path) -> None:
    page = Tables((swept / "report.html").read_text())
    assert not set(page.tags) & {"script", "link", "iframe", "object"}
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "action", "data"):
            assert value.startswith("data:image/svg+xml;base64,"), (tag, name)
    assert page.tags.count("img") == 1
    policy = [value for _, name, value in page.attributes if name == "content"]
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in policy


def test_without_matplotlib_the_tables_are_there(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def missing(name: str, *words: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *words, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    page = report.html(load(swept), [Plot("y", ("y",), "x", ("policy",), ("inner.step",))])
    assert "No picture: matplotlib is missing" in page
    assert len(Tables(page).tables["plot-1"]) == 12


def test_many_runs_are_left_to_the_parquet(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_RUNS", 35)
    page = report.html(load(swept), [])
    assert "36 runs stand in results.parquet" in page
    assert "runs" not in Tables(page).tables


@pytest.mark.parametrize(
    "plot",
    [
        Plot("text axis", ("y",), "policy", ("x",), ("inner.step",)),
        Plot("two metrics", ("y", "offset"), "x", ("policy", "inner.step"), log_y=True, log_x=True, percent=True),
        Plot("two panels' axes", ("y",), "x", (), ("policy", "inner.step"), bounds=("line",)),
        Plot("some values", ("y", "offset"), "x", ("policy",), ("inner.step",), where={"inner.step": (0.5,)}),
        Plot("all failed", ("y",), "x", ("policy",), where={"x": (3,)}),
        Plot(
            "a number that is none", ("nothing",), "x", ("policy",), marks=(Mark("line", 2.5, "m"),), bounds=("load",)
        ),
    ],
)
def test_plots_of_every_form_can_be_drawn(swept: Path, plot: Plot) -> None:
    page = report.html(load(swept), [plot])
    assert Tables(page).tags.count("img") == 1


def test_a_plot_shows_what_it_says(swept: Path) -> None:
    results = load(swept)
    plot = Plot("t", ("y",), "x", ("policy",), (), where={"inner.step": (1.0,), "x": (1, 2)}, bounds=("line",))
    (panel,) = panels(results, plot)
    assert [line.label for line in panel.lines] == ["flat", "steep"]
    assert [point.x for line in panel.lines for point in line.points] == [1, 2, 1, 2]
    assert [point.bounds["line"] for line in panel.lines for point in line.points] == [1, 2, 2, 4]
    found = results.mean("y", {"policy": "steep", "x": 2, "inner.step": 1.0})
    assert panel.lines[1].points[1].found == found


def test_lines_that_lie_on_each_other_are_drawn_once_under_a_name_that_says_so(swept: Path) -> None:
    results = load(swept)
    apart = drawing.svg(results, Plot("t", ("y",), "x", ("policy", "inner.step")))
    alike = drawing.svg(results, Plot("t", ("offset",), "x", ("policy", "inner.step")))
    assert apart is not None
    assert alike is not None
    assert [name in apart for name in ("flat, inner.step = 0.5", "flat, inner.step = 1", "any")] == [True, True, False]
    assert "<!-- flat, any inner.step -->" in alike
    assert "<!-- steep, any inner.step -->" in alike
    assert "inner.step = " not in alike


def test_an_interval_of_few_seeds_does_not_squeeze_the_means() -> None:
    columns = {
        "x": np.array([10.0, 10.0, 20.0, 20.0]),
        "seed": np.array([1, 2, 1, 2]),
        "y": np.array([0.4, 0.8, 0.5, 0.6]),
    }
    results = Results(columns, {"name": "a", "axes": ["x"], "metrics": ["y"], "seeds": [1, 2]})
    # The first interval reaches from -1.9 to 3.1.
    assert results.mean("y", {"x": 10.0}).high > 3
    picture = drawing.svg(results, Plot("t", ("y",), "x"))
    assert picture is not None
    assert "<!-- 0.8 -->" in picture
    assert "<!-- 3.0 -->" not in picture
    assert "<!-- 1.0 -->" not in picture


def test_a_mark_stands_where_its_bound_reaches_its_value(swept: Path) -> None:
    plot = Plot("t", ("y",), "x", ("policy",), (), marks=(Mark("line", 3.0, "three"),))
    (panel,) = panels(load(swept), plot)
    # The bound is slope * x.
    assert [[x for _, x in line.marks] for line in panel.lines] == [[3.0], [1.5]]
