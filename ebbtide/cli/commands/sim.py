"""`ebb sim`: what goes into the simulator."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ebbtide.cli.commands.options import Printing
from ebbtide.cli.output import print_table

if TYPE_CHECKING:
    from ebbtide.simulator.inputs.sources import Progress as Report

#: Seconds before a progress bar appears.
_SILENT_S = 2.0


def inputs(
    file: Annotated[Path, typer.Argument(help="A trace; gzip and zstd are recognised.")],
    format: Annotated[
        str | None, typer.Option("--format", help="Its format (docs/reference/traces.md); default: by its content.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE: an option of the format; again for more.")
    ] = None,
    convert: Annotated[Path | None, typer.Option(help="Write the rows here: .csv or .parquet.")] = None,
    order: Annotated[
        str | None, typer.Option(help="buffer: nearly in order; sort: any order, over temporary files.")
    ] = None,
    max_malformed: Annotated[
        float, typer.Option(help="Share of malformed lines above which the file is refused.")
    ] = 0.01,
    from_first: Annotated[bool, typer.Option("--from-first", help="Times count from the first row.")] = False,
    *,
    to: Printing,
) -> None:
    """Show what is in a trace: rows, span, sizes, durations, malformed lines; convert it to the own format."""
    from ebbtide.simulator.inputs.summary import Summary
    from ebbtide.simulator.inputs.traces import Trace
    from ebbtide.simulator.inputs.writing import write

    with _progress(file.name) as progress:
        trace = Trace(
            file,
            format,
            options=_options(option or []),
            order=order,
            max_malformed=max_malformed,
            from_first=from_first,
            progress=progress,
        )
        summary = Summary(trace.kind)

        def seen() -> Iterator[Any]:
            for batch in trace:
                summary.add(batch)
                yield batch

        if convert is not None:
            write(convert, trace.kind, seen())
        else:
            for _ in seen():
                pass
    found = {"report": trace.report.as_json(), "summary": summary.as_json()}
    to.say(found, lambda: _show(found, convert))


def _options(words: list[str]) -> dict[str, float | str]:
    options: dict[str, float | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--option must be NAME=VALUE, not {word!r}")
        options[name] = value
    return options


@contextmanager
def _progress(name: str) -> Iterator[Report | None]:
    """A bar on stderr for what takes longer than `_SILENT_S`, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    begin_s = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(f"reading {name}", total=None)

    def report(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - begin_s > _SILENT_S:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


def _show(found: dict[str, Any], convert: Path | None) -> None:
    report, summary = found["report"], found["summary"]
    facts: list[tuple[str, str]] = [
        ("format", report["format"]),
        (f"{report['place']}s", _count(report["lines"])),
        (summary["kind"], _count(summary["rows"])),
    ]
    if report["comments"]:
        facts.append(("comments, header, blank", _count(report["comments"])))
    facts += [(f"left out: {reason}", _count(count)) for reason, count in report["skipped"].items()]
    facts.append(("malformed", _count(report["malformed"])))
    if report["longer"]:
        facts.append(("with more columns, not read", _count(report["longer"])))
    if report["reordered"]:
        facts.append(("put in order", _count(report["reordered"])))
    if report["origin"]:
        facts.append(("0 s is", report["origin"]))
    if summary["rows"]:
        facts.append(("from, to", f"{_seconds(summary['first_s'])}, {_seconds(summary['last_s'])}"))
    for name, label in (
        ("still_there_at_the_end", "still there at the end"),
        ("tasks", "tasks"),
        ("machines", "machines"),
        ("core_hours", "core hours"),
    ):
        if name in summary:
            facts.append((label, _count(summary[name])))
    facts += [(f"priority {hint}", _count(count)) for hint, count in summary.get("priorities", {}).items()]
    if convert is not None:
        facts.append(("written to", str(convert)))
    print_table(("file", report["file"]), facts, "")
    print()
    columns = ("mean", "min", "p50", "p90", "p95", "p99", "max")
    print_table(
        ("of", "count", *columns),
        [
            (
                f"{name} [{report['unit']}]" if name == "value" and report["unit"] else name,
                _count(values["count"]),
                *(f"{values[c]:,.6g}" for c in columns),
            )
            for name, values in summary["distributions"].items()
        ],
        "no rows",
    )
    for example in report["examples"]:
        line = f"{report['place']} {example['line']}: {example['field']} {example['problem']}"
        print(f"malformed: {line}", file=sys.stderr)
    if report["malformed"] > len(report["examples"]):
        print(f"malformed: and {report['malformed'] - len(report['examples'])} more", file=sys.stderr)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:,.3f}".rstrip("0").rstrip(".") + f" s ({value / 86400:.2f} d)"
