"""Commands of the history: how a host or a VM was over hours and days."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from ebbtide.cli.commands.options import Asking, HostName, VMName
from ebbtide.cli.commands.records import moment
from ebbtide.cli.output import clock, print_table, shown
from ebbtide.messages.history import HostHistory, VMHistory

#: From nothing to the most of its line; what is not known is left out.
BARS: Final = "▁▂▃▄▅▆▇█"
#: Marks under the table; `-o json` has all.
MARKS: Final = 10

From = Annotated[
    float | None,
    typer.Option("--from", parser=moment, metavar="TIME", help="2026-01-31T12:00, or seconds; default: six hours ago."),
]
To = Annotated[float | None, typer.Option("--to", parser=moment, metavar="TIME", help="The same; default: now.")]
Points = Annotated[int, typer.Option(min=2, max=2000, help="Steps, at most.")]


def host(name: HostName, begin: From = None, end: To = None, points: Points = 40, *, to: Asking) -> None:
    """Show how a host was: what was sold, bound, free and resident, pressure, and what each layer held."""
    found = to.ask(lambda client: client.host_history(name, begin=begin, end=end, points=points))
    to.say(found, functools.partial(_print, found))


def vm(name: VMName, begin: From = None, end: To = None, points: Points = 40, *, to: Asking) -> None:
    """Show how a VM was, on whatever hosts: nominal, bound, resident, pressure, and what each layer held."""
    found = to.ask(lambda client: client.vm_history(name, begin=begin, end=end, points=points))
    to.say(found, functools.partial(_print, found))


def _print(found: HostHistory | VMHistory) -> None:
    """A line for each figure that there was, and the latest marks."""
    rows = []
    for figure in type(found.columns).model_fields:
        series = getattr(found.columns, figure)
        known = [value for value in series if value is not None]
        if known:
            last = "-" if series[-1] is None else f"{series[-1]:g}"
            rows.append((figure, f"{min(known):g}", f"{max(known):g}", last, sparkline(series)))
    title = f"{clock(found.from_)} to {clock(found.to)}, steps of {found.step_s / 60:g} min"
    print_table(("figure", "least", "most", "last", title), rows, "nothing is known of that time")
    for mark in found.marks[-MARKS:]:
        print(shown(f"{clock(mark.time)}  {mark.kind:<12} {mark.sentence}"))


def sparkline(series: Sequence[float | None]) -> str:
    """A bar for each value, from 0 to the most of all; a space where it is not known."""
    most = max((value for value in series if value is not None), default=0.0)
    return "".join(
        " " if value is None else BARS[round((len(BARS) - 1) * value / most)] if most > 0 else BARS[0]
        for value in series
    )
