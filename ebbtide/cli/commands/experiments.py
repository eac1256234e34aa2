"""`ebb sim run`, `compare`, `show`: experiments (docs/reference/experiments.md)."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ebbtide.cli.commands.options import Printing
from ebbtide.cli.output import print_error, print_table

if TYPE_CHECKING:
    from ebbtide.simulator.experiments.comparison import Comparison, Difference
    from ebbtide.simulator.experiments.progress import Listener, Status
    from ebbtide.simulator.experiments.results import Results

#: Seconds between two plain lines of progress, and before a bar appears.
_LINE_S = 10.0
_SILENT_S = 1.0
_INTERRUPTED = 130

Metrics = Annotated[list[str] | None, typer.Option("--metric", help="Only this metric; again for more.")]


def run(
    file: Annotated[Path, typer.Argument(help="The experiment: a TOML file (docs/reference/experiments.md).")],
    directory: Annotated[
        Path | None, typer.Option("--results", metavar="DIRECTORY", help="Where they go; default: results/NAME.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Instead of what the file says; again for more."),
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=PATH", help="The file of an input; again for more.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one a core.")] = None,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Run on the Dask cluster at tcp://...")] = None,
    rows: Annotated[
        Path | None, typer.Option(metavar="FILE.parquet", help="Write a row for each job of each run here.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Keep no runs of an earlier sweep.")] = False,
    *,
    to: Printing,
) -> None:
    """Run an experiment; write Parquet and an HTML report. Runs that are there already are kept."""
    from ebbtide.simulator.errors import Interrupted
    from ebbtide.simulator.experiments import document, runner

    overrides = {key: document.value_of(value) for key, value in _pairs("--set", sets or [])}
    given = dict(_pairs("--input", inputs or []))
    if rows is not None:
        if rows.suffix != ".parquet":
            raise typer.BadParameter(f"--rows must be a file .parquet, not {rows}")
        overrides["settings.rows"] = True
    words = ["ebb", "sim", "run", str(file)]
    words += [] if directory is None else ["--results", str(directory)]
    words += [word for pair in sets or [] for word in ("--set", pair)]
    words += [word for pair in inputs or [] for word in ("--input", pair)]
    words += [] if rows is None else ["--rows", str(rows)]
    try:
        with _progress(file.name) as listener:
            results = runner.run(
                file,
                output=directory,
                overrides=overrides,
                inputs=given,
                workers=workers,
                dask=dask,
                fresh=fresh,
                command=shlex.join(words),
                listener=listener,
            )
    except Interrupted as error:
        print_error(str(error))
        raise typer.Exit(_INTERRUPTED) from None
    _print(results, [], to)
    failed = [one for one in results.columns["error"].tolist() if one]
    if rows is not None and len(failed) < len(results):
        results.export("jobs", rows)
    if failed:
        print_error(f"{len(failed)} of {len(results)} runs failed, the first: {failed[0]}")
        raise typer.Exit(1)


def show(
    directory: Annotated[Path, typer.Argument(help="Results of ebb sim run.")],
    metrics: Metrics = None,
    *,
    to: Printing,
) -> None:
    """Show the means of a sweep, with 95 % confidence intervals over its seeds."""
    from ebbtide.simulator.experiments import load

    _print(load(directory), metrics or [], to)


def compare(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Results; the first is the baseline.")],
    metrics: Metrics = None,
    axis: Annotated[
        str | None, typer.Option(help="Compare along an axis of a single run instead, as: --axis policy.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="With --axis: its value that others are compared with.")] = None,
    *,
    to: Printing,
) -> None:
    """Put runs side by side: differences with 95 % confidence intervals over the seeds that both have."""
    from ebbtide.simulator.experiments import compare as compared

    found = compared(*directories, metrics=metrics or [], axis=axis, baseline=baseline)
    to.say(found.as_json() if to.for_programs else None, lambda: _print_comparison(found))


def _print_comparison(found: Comparison) -> None:
    several = len(found.others) > 1
    axes = list(found.differences[0].case)
    print_table(
        (
            *axes,
            "metric",
            *(("against",) if several else ()),
            f"{found.baseline}",
            "other" if several else found.others[0],
            "difference",
            "95 % interval",
            "relative",
            "seeds",
        ),
        (_row(one, several) for one in found.differences),
        "nothing differs",
    )
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    clear = sum(one.clear for one in found.differences)
    typer.echo(f"note: {clear} of {len(found.differences)} intervals leave out 0 (marked *)", err=True)


def _row(one: Difference, several: bool) -> tuple[object, ...]:
    difference = one.difference
    known = not math.isnan(difference.low)
    return (
        *(_value(value) for value in one.case.values()),
        one.metric,
        *((one.other,) if several else ()),
        _number(one.baseline.mean),
        _number(one.found.mean),
        f"{difference.mean:+.6g}{' *' if one.clear else ''}",
        f"{difference.low:+.6g} ... {difference.high:+.6g}" if known else "-",
        "-" if math.isnan(one.relative) else f"{one.relative:+.1%}",
        difference.count,
    )


def _print(results: Results, metrics: list[str], to: Printing) -> None:
    from ebbtide.simulator.errors import ExperimentError

    for metric in metrics:
        if metric not in results.metrics:
            raise ExperimentError(metric, f"is no metric; there are {', '.join(results.metrics)}")
    chosen = metrics or list(results.metrics)
    cases = [(case, results.means(chosen, case)) for case in results.cases()]
    if to.for_programs:
        to.say(
            {"directory": str(results.directory), "meta": results.meta, "cases": [_as_json(*c) for c in cases]}, list
        )
        return
    # Metrics below each other where there are more than a screen has room for beside each other.
    axes, seeds = results.axes, len(results.meta["seeds"])
    if len(chosen) <= 4:
        rows = [(*(_value(case[a]) for a in axes), *(_mean(found[m], seeds) for m in chosen)) for case, found in cases]
        print_table((*axes, *chosen), rows, "no runs")
    else:
        print_table(
            (*axes, "metric", "mean"),
            [(*(_value(case[a]) for a in axes), m, _mean(found[m], seeds)) for case, found in cases for m in chosen],
            "no runs",
        )
    for warning in results.meta.get("warnings", ()):
        typer.echo(f"warning: {warning}", err=True)
    made = results.meta["runs"]
    typer.echo(
        f"{made['total']} runs: {made['made']} made, {made['kept']} kept, {made['failed']} failed; "
        f"{results.directory}/report.html, results.parquet",
        err=True,
    )


def _as_json(case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "case": case,
        "metrics": {
            metric: {"mean": plain(one.mean), "low": plain(one.low), "high": plain(one.high), "seeds": one.count}
            for metric, one in found.items()
        },
    }


def _mean(one: Any, seeds: int) -> str:
    mean = _number(one.mean) if math.isnan(one.low) else f"{_number(one.mean)} ± {one.high - one.mean:.3g}"
    return f"{mean} ({one.count} of {seeds} seeds)" if 0 < one.count < seeds else mean


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6g}"


def _value(value: object) -> str:
    from ebbtide.simulator.experiments.experiment import shown

    return shown(value)


def _pairs(option: str, words: list[str]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip() or not value:
            raise typer.BadParameter(f"{option} must be NAME=VALUE, not {word!r}")
        name = name.strip()
        if name in seen:
            one = "a trace is one file" if option == "--input" else "values of an axis are a list, as x=[1,2]"
            raise typer.BadParameter(f"{option} {name} is given twice; {one}")
        seen.add(name)
        yield name, value


@contextmanager
def _progress(name: str) -> Iterator[Listener]:
    """A bar on a terminal, a line now and then elsewhere; both on stderr."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(name)
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(name, total=None, words="")
    begin_s = time.monotonic()

    def tell(status: Status) -> None:
        if not bar.live.is_started and time.monotonic() - begin_s > _SILENT_S:
            bar.start()
        words = str(status) if status.total else ""
        bar.update(
            task,
            description=f"{name}: {status.stage}",
            total=1.0 if status.total else None,
            completed=status.share,
            words=words,
        )

    try:
        yield tell
    finally:
        bar.stop()


class _Lines:
    """A line for each stage, and for the runs one every `_LINE_S` seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage = ""
        self._said_s = -math.inf

    def __call__(self, status: Status) -> None:
        stage = status.stage.partition(",")[0]
        now_s = time.monotonic()
        if stage == self._stage and now_s - self._said_s < _LINE_S:
            return
        self._stage, self._said_s = stage, now_s
        typer.echo(f"{self._name}: {status.stage}" + (f": {status}" if status.total else ""), err=True)
