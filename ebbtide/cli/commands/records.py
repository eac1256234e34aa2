"""Commands about what happened: operations, events, core changes, and how hosts and VMs were."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import AWAY_LOOK_S, Asking, HostName, Limit, Listing, Showing, VMName, seconds
from ebbtide.cli.commands.vms import carry_out, print_ledger
from ebbtide.cli.output import Table, clock, print_lines, print_table, shown
from ebbtide.deflation.resources import figure
from ebbtide.messages.explanations import Event, EventKind
from ebbtide.messages.history import HostHistory, VMHistory
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import Operation, OperationState

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

#: A host's answer is held back no longer.
_HELD_S: Final = 30.0
OfVM = Annotated[str | None, typer.Option("--vm", help="Only about this VM.", autocompletion=completion.vms)]
OfHost = Annotated[str | None, typer.Option("--host", help="Only about this host.", autocompletion=completion.hosts)]


def _moment(text: str) -> float:
    """Seconds since the epoch, of such a number or of a date and time."""
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        return datetime.datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        raise typer.BadParameter("must be like 2026-01-31T12:00 or seconds since the epoch") from None


def _event_kind(text: str) -> str:
    if text not in get_args(EventKind):
        raise typer.BadParameter(f"{text!r} is no kind of event; there are {', '.join(get_args(EventKind))}")
    return text


Since = Annotated[
    float | None,
    typer.Option("--since", parser=_moment, metavar="TIME", help="Only from then on: 2026-01-31T12:00, or seconds."),
]


def operations(
    limit: Limit = 20,
    kind: Annotated[str | None, typer.Option(help="Only these: create, delete, target, ...")] = None,
    state: Annotated[OperationState | None, typer.Option(help="Only those that stand so.")] = None,
    vm: OfVM = None,
    host: OfHost = None,
    since: Since = None,
    *,
    to: Listing,
) -> None:
    """List the latest operations and what each did and why."""
    wanted: dict[str, Any] = {"kind": kind, "state": state, "vm": vm, "host": host, "since": since}
    to.list("operations", lambda client: client.operations(limit, **wanted), OPERATIONS, wanted.values())


OPERATIONS: Table[Operation] = Table(
    {
        "started": lambda operation: clock(operation.started_at),
        "kind": lambda operation: operation.kind,
        "vm": lambda operation: operation.vm or "-",
        "host": lambda operation: operation.host or "-",
        "state": lambda operation: operation.state,
        "seconds": lambda operation: f"{operation.seconds:.1f}",
        "what it did and why": lambda operation: operation.sentence,
    },
    {
        "id": lambda operation: operation.request_id,
        "vms moved": lambda operation: " ".join(vm.name for vm in operation.vms) or "-",
    },
    "there were no operations",
)


def operation(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request that began it.")],
    wait_s: Annotated[float, seconds("Wait so long for its end.", 60)] = 0.0,
    host: Annotated[str | None, typer.Option(help="Whose operation it is, where it is not the manager's own.")] = None,
    *,
    to: Showing,
) -> None:
    """Show one operation with its progress and its ledger."""

    async def look(client: ManagerClient) -> Operation:
        from ebbtide.client.errors import ClientError, passes

        left_s = wait_s
        while True:
            held_s = min(left_s, _HELD_S)
            try:
                seen = await client.operation(request_id, held_s, host)
            except ClientError as error:
                # Its host's agent is started again.
                if left_s <= 0 or not passes(error):
                    raise
                left_s -= AWAY_LOOK_S
                await asyncio.sleep(AWAY_LOOK_S)
                continue
            left_s -= held_s
            if seen.state is not OperationState.RUNNING or left_s <= 0:
                return seen

    found = to.ask(look)

    def told() -> None:
        OPERATIONS.print([found], wide=to.wide)
        for sentence in found.progress:
            print(f"  {shown(sentence)}")
        if found.vms:
            print_ledger(found)

    to.say(found, told)


def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request that began it.")], *, to: Asking
) -> None:
    """Call a placement off before its VM starts; what was taken for it is given back."""
    carry_out(to, lambda client, once: client.cancel(request_id, request_id=once), f"calling {request_id} off")


def events(
    limit: Limit = 50,
    kind: Annotated[
        str | None, typer.Option(parser=_event_kind, metavar="KIND", help="Only these: placed, preempted, ...")
    ] = None,
    vm: OfVM = None,
    host: OfHost = None,
    since: Since = None,
    *,
    to: Listing,
) -> None:
    """List what happened and why: placements, deflations, preemptions. With --watch oldest first, and then on."""
    wanted: dict[str, Any] = {"kind": kind, "vm": vm, "host": host}
    if to.watch and to.sort_by is not None:
        raise typer.BadParameter("has no meaning with --watch: events come as they happen", param_hint="--sort-by")
    if to.watch:
        # They come over the manager's stream, in their order.
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            to.ask(lambda client: _follow(client, limit, since, wanted, to))
        return
    chosen_by = [since, *wanted.values()]
    to.list("events", lambda client: client.events(limit, since=since, **wanted), EVENTS, chosen_by)


EVENTS: Table[Event] = Table(
    {
        "at": lambda event: clock(event.at),
        "kind": lambda event: event.kind,
        "vm": lambda event: event.vm or "-",
        "host": lambda event: event.host or "-",
        "what happened": lambda event: event.sentence,
    },
    {"id": lambda event: event.id},
    "nothing has happened yet",
)


async def _follow(client: ManagerClient, limit: int, since: float | None, wanted: dict[str, Any], to: Listing) -> None:
    newest = await client.events(1)
    for event in reversed(await client.events(limit, since=since, **wanted)):
        if not newest or event.id <= newest[0].id:
            await asyncio.to_thread(_print_event, event, to)
    async for event in client.follow_events(after=newest[0].id if newest else 0, **wanted):
        await asyncio.to_thread(_print_event, event, to)


def _print_event(event: Event, to: Listing) -> None:
    line = f"{clock(event.at)}  {event.kind:<12} {event.sentence}"
    print_lines([to.line(event) if to.for_programs else line])


def core_changes(
    limit: Limit = 100,
    machine: Annotated[str | None, typer.Option(help="Only of this machine.", autocompletion=completion.vms)] = None,
    since: Since = None,
    *,
    to: Listing,
) -> None:
    """List how machines' cores grew and shrank, newest first."""
    chosen_by = (machine, since)
    to.list("core_changes", lambda client: client.core_changes(machine, limit, since=since), CORE_CHANGES, chosen_by)


CORE_CHANGES: Table[CoreChange] = Table(
    {
        "at": lambda row: clock(row.at),
        "machine": lambda row: row.machine,
        "host": lambda row: row.host,
        "cores": lambda row: f"{row.cores_before:g} -> {row.cores_after:g}",
        "cause": lambda row: row.cause,
    },
    {"sequence": lambda row: row.sequence},
    "no cores have changed yet",
)


#: From nothing to the most of its line. What is not known is no space: a narrow terminal breaks lines there.
_BARS: Final = "▁▂▃▄▅▆▇█"
_UNKNOWN: Final = "·"
#: Marks under the table; `-o json` has all.
_MARKS: Final = 10

_From = Annotated[
    float | None,
    typer.Option(
        "--from", parser=_moment, metavar="TIME", help="2026-01-31T12:00, or seconds; default: six hours ago."
    ),
]
_To = Annotated[float | None, typer.Option("--to", parser=_moment, metavar="TIME", help="The same; default: now.")]
_Points = Annotated[
    int | None, typer.Option(min=2, max=2000, help="Steps, at most; default: 40, or what the terminal has room for.")
]
#: Steps where there is room, and columns that the other cells of a line take.
_MOST_POINTS: Final = 40
_BESIDE: Final = 60


def host_history(name: HostName, begin: _From = None, end: _To = None, points: _Points = None, *, to: Asking) -> None:
    """Show how a host was: what was sold, bound, free and resident, pressure, and what each layer held."""
    found = to.ask(lambda client: client.host_history(name, begin=begin, end=end, points=points or _fitting()))
    to.say(found, lambda: _print_history(found))


def vm_history(name: VMName, begin: _From = None, end: _To = None, points: _Points = None, *, to: Asking) -> None:
    """Show how a VM was, on whatever hosts: nominal, bound, resident, pressure, and what each layer held."""
    found = to.ask(lambda client: client.vm_history(name, begin=begin, end=end, points=points or _fitting()))
    to.say(found, lambda: _print_history(found))


def _fitting() -> int:
    """Steps for which a line has room."""
    if not sys.stdout.isatty():
        return _MOST_POINTS
    return min(_MOST_POINTS, max(shutil.get_terminal_size().columns - _BESIDE, 10))


def _print_history(found: HostHistory | VMHistory) -> None:
    """A line for each figure that there was, and the latest marks."""
    rows = []
    for name in type(found.columns).model_fields:
        series = getattr(found.columns, name)
        known = [value for value in series if value is not None]
        if known:
            last = "-" if series[-1] is None else figure(series[-1])
            rows.append((name, figure(min(known)), figure(max(known)), last, sparkline(series)))
    print(f"{clock(found.from_)} to {clock(found.to)}, steps of {found.step_s / 60:g} min, {_UNKNOWN}: not known")
    print_table(("figure", "least", "most", "last", "course"), rows, "nothing is known of that time")
    for mark in found.marks[-_MARKS:]:
        print(shown(f"{clock(mark.time)}  {mark.kind:<12} {mark.sentence}"))


def sparkline(series: Sequence[float | None]) -> str:
    """A bar for each value, from 0 to the most of all; a point where it is not known."""
    most = max((value for value in series if value is not None), default=0.0)
    return "".join(
        _UNKNOWN if value is None else _BARS[round((len(_BARS) - 1) * value / most)] if most > 0 else _BARS[0]
        for value in series
    )
