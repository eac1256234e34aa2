"""report.html: plots, the tables behind them, and how to get the same again, in one file that needs no network."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from ebbtide.extras import installing
from ebbtide.simulator.experiments import drawing
from ebbtide.simulator.experiments.experiment import BOUND, ERROR, RUN_S, SEED, Plot, Value, shown
from ebbtide.simulator.experiments.finished import write_whole
from ebbtide.simulator.experiments.panels import label, panels
from ebbtide.simulator.experiments.progress import in_words
from ebbtide.simulator.experiments.results import READING, Results
from ebbtide.simulator.experiments.statistics import CONFIDENCE

#: Runs that stand in the report one by one; of more it shows means only.
MOST_RUNS: Final = 2000

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; }
body { max-width: 1160px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { margin: 0 0 .3rem; font-size: 1.7rem; } h2 { margin: 2.2rem 0 .4rem; font-size: 1.2rem; }
p { margin: .4rem 0; } .quiet { color: #555; }
pre { background: #f3f3f1; padding: .6rem .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: .6rem 0; } figure img { max-width: 100%; height: auto; display: block; }
details { margin: .4rem 0 1rem; } summary { cursor: pointer; color: #004a75; }
.wide { overflow-x: auto; max-height: 34rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .18rem .6rem; text-align: right; border-bottom: 1px solid #e3e3e0; white-space: nowrap; }
th { position: sticky; top: 0; background: #fff; font-weight: 600; } td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 6.5rem; } .failed { color: #a02000; }
"""
#: Nothing is loaded and nothing is run, whatever stands in a name.
_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write(path: Path, results: Results, plots: Sequence[Plot]) -> None:
    """Write the report.

    :raises ExperimentError: the file cannot be written.
    """
    write_whole(path, html(results, plots).encode())


def html(results: Results, plots: Sequence[Plot]) -> str:
    """The report."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(str(results.meta['name']))}</title><style>{_STYLE}</style></head><body>",
            *_head(results),
            *_failures(results),
            *(f'<p class="failed">{escape(one)}.</p>' for one in results.meta.get("warnings", ())),
            *(line for number, plot in enumerate(plots, 1) for line in _plot(results, plot, number)),
            *_means(results),
            *_runs(results),
            *_origin(results),
            "</body></html>",
            "",
        ]
    )


def _head(results: Results) -> Iterator[str]:
    meta = results.meta
    made = meta["runs"]
    yield f"<h1>{escape(meta['name'])}</h1>"
    if meta["description"]:
        yield f"<p>{escape(meta['description'])}</p>"
    seeds = meta["seeds"]
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({_some(seeds)})"
    commit = f", commit {meta['commit']}" if meta["commit"] else ""
    yield (
        f'<p class="quiet">Model {escape(meta["model"])}; {len(results.cases())} cases with {escape(which)}: '
        f"{made['total']} runs, {made['failed']} failed. Ebbtide {escape(meta['version'] + commit)}; ended "
        f"{escape(meta['ended'])}.</p>"
    )
    yield f"<pre>{escape(meta['command'])}</pre>"


def _failures(results: Results) -> Iterator[str]:
    failed = [i for i, error in enumerate(results.columns[ERROR].tolist()) if error]
    if not failed:
        return
    yield f'<h2 class="failed">{len(failed)} runs failed</h2><p>They are in no figure below.</p>'
    names = [*results.axes, SEED, ERROR]
    rows = ([results.columns[name][i].item() for name in names] for i in failed)
    yield from _table("failures", names, rows)


def _plot(results: Results, plot: Plot, number: int) -> Iterator[str]:
    missing = [metric for metric in plot.metrics if metric not in results.columns]
    yield f"<h2>{escape(plot.title)}</h2>"
    if plot.where:
        yield f'<p class="quiet">{escape("; ".join(f"{k} = {_some(v)}" for k, v in plot.where.items()))}</p>'
    if missing:
        yield f"<p>No run has {escape(', '.join(missing))}.</p>"
        return
    try:
        picture = drawing.svg(results, plot)
    except ImportError:
        picture = None
        yield f"<p>No picture: matplotlib is missing ({escape(installing('sim'))}).</p>"
    if picture is not None:
        # As an image, so that names in one picture cannot meet those in another.
        content = base64.b64encode(picture.encode()).decode()
        yield (
            f'<figure><img alt="{escape(plot.title)}: {escape(", ".join(plot.metrics))} over {escape(plot.x)}; the '
            f'numbers are in the table below" src="data:image/svg+xml;base64,{content}"></figure>'
        )
    beyond = "" if len(results.meta["seeds"]) < 2 else " Where one ends beyond the picture, the table says where."
    yield f'<p class="quiet">{_interval_words(results)}{beyond}</p>'
    names = [*plot.panels, *plot.lines, plot.x, "metric", "mean", "low", "high", "seeds"]
    bounds = list(dict.fromkeys((*plot.bounds, *(mark.bound for mark in plot.marks))))
    yield "<details><summary>Table</summary>"
    yield from _table(f"plot-{number}", [*names, *(BOUND + name for name in bounds)], _points(results, plot, bounds))
    yield from _marks(results, plot, number)
    yield "</details>"


def _points(results: Results, plot: Plot, bounds: Sequence[str]) -> Iterator[list[Value]]:
    for panel in panels(results, plot):
        for line in panel.lines:
            for point in line.points:
                case = {**panel.case, **line.case, plot.x: point.x}
                found = point.found
                yield [
                    *(case[name] for name in (*plot.panels, *plot.lines, plot.x)),
                    panel.metric,
                    *(found.mean, found.low, found.high, found.count),
                    *(point.bounds[name] for name in bounds),
                ]


def _marks(results: Results, plot: Plot, number: int) -> Iterator[str]:
    """Where the vertical lines stand; they depend on bounds only, so one metric's are all."""
    if not plot.marks:
        return
    rows: list[list[Value]] = [
        [label({**panel.case, **line.case}), mark.label, x]
        for panel in panels(results, plot)
        if panel.metric == plot.metrics[0]
        for line in panel.lines
        for mark, x in line.marks
    ]
    yield f"<p>Dotted lines, at {escape(plot.x)}:</p>"
    yield from _table(f"marks-{number}", ["line", "mark", plot.x], rows)


def _interval_words(results: Results) -> str:
    if len(results.meta["seeds"]) < 2:
        return "One seed: no intervals."
    return f"Means over seeds with {CONFIDENCE:.0%} confidence intervals (Student's t)."


def _means(results: Results) -> Iterator[str]:
    if not results.metrics:
        return
    yield f"<h2>Means</h2><p class='quiet'>{_interval_words(results)}</p>"
    cases = results.cases()
    if len(cases) > MOST_RUNS:
        yield f"<p>{len(cases)} cases stand in results.parquet.</p>"
        return
    names = [*results.axes, *(word for metric in results.metrics for word in (metric, f"{metric} ±"))]

    def rows() -> Iterator[list[Value]]:
        for case in cases:
            found = results.means(results.metrics, case).values()
            yield [*case.values(), *(number for one in found for number in (one.mean, one.high - one.mean))]

    yield from _table("means", names, rows())


def _runs(results: Results) -> Iterator[str]:
    yield "<h2>Runs</h2>"
    if len(results) > MOST_RUNS:
        yield f"<p>{len(results)} runs stand in results.parquet.</p>"
        return
    names = [name for name in results.columns if name not in (ERROR, RUN_S)]
    yield f"<details><summary>All {len(results)} runs, as in results.parquet</summary>"
    rows = ([results.columns[name][i].item() for name in names] for i in range(len(results)))
    yield from _table("runs", names, rows)
    yield "</details>"


def _origin(results: Results) -> Iterator[str]:
    meta = results.meta
    yield "<h2>Where it comes from</h2>"
    host = meta["host"]
    made = meta["runs"]
    where = f"Dask at {meta['dask']}" if meta["dask"] else f"{meta['workers']} workers"
    run_s = float(results.columns[RUN_S].sum())
    facts = [
        ("settings", _settings(meta["settings"])),
        *((f"policy {name}", _settings(one)) for name, one in meta.get("policies", {}).items()),
        *((f"input {name}", _input(one)) for name, one in meta["inputs"].items()),
        ("runs", f"{made['made']} made now, {made['kept']} kept from before; {in_words(run_s)} of work, {where}"),
        ("from, to", f"{meta['started']}, {meta['ended']}"),
        ("code", meta["code"]),
        ("machine", ", ".join(f"{name} {value}" for name, value in host.items())),
    ]
    yield "<table>"
    for name, value in facts:
        yield f'<tr><td class="text">{escape(name)}</td><td class="text">{escape(str(value))}</td></tr>'
    yield "</table>"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items()) or "the model's own"


def _input(one: Mapping[str, Any]) -> str:
    stated = {word: one[word] for word in READING if one.get(word)}
    read = f"; read with {_settings(stated)}" if stated else ""
    return f"{one['path']}, {one['bytes']} bytes, sha256 {one['sha256']}{read}"


def _table(kind: str, names: Sequence[str], rows: Iterable[Sequence[Value]]) -> Iterator[str]:
    """A table; cells of numbers carry them exactly as ``data-value``, too."""
    body = [[_cell(value) for value in row] for row in rows]
    texts = [bool(body) and 'class="text"' in body[0][i] for i in range(len(names))]
    heads = (f"<th{' class=text' if text else ''}>{escape(name)}</th>" for name, text in zip(names, texts, strict=True))
    yield f'<div class="wide"><table id="{escape(kind)}"><thead><tr>{"".join(heads)}</tr></thead><tbody>'
    for cells in body:
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _cell(value: Value) -> str:
    if isinstance(value, str | bool):
        return f'<td class="text">{escape(shown(value))}</td>'
    if isinstance(value, int):
        return f'<td data-value="{value}">{value}</td>'
    return f'<td data-value="{value!r}">{number(value)}</td>'


def number(value: float) -> str:
    """A number as the tables show it."""
    return "-" if math.isnan(value) else f"{value:.6g}"


def _some(values: Sequence[Any]) -> str:
    words = [shown(value) for value in values]
    return ", ".join(words) if len(words) <= 12 else f"{', '.join(words[:5])}, ..., {words[-1]}"
