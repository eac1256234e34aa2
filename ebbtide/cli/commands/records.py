"""Commands about what happened: operations, events, core changes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.commands.options import Json, Limit, Manager, TokenFile, ask, seconds
from ebbtide.cli.commands.vms import print_ledger
from ebbtide.cli.output import clock, print_json, print_table, reader_is_gone, shown, text_of
from ebbtide.messages.explanations import Event
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import Operation, OperationState

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

OfVM = Annotated[str | None, typer.Option("--vm", help="Only about this VM.")]
OfHost = Annotated[str | None, typer.Option("--host", help="Only about this host.")]


def _moment(text: str) -> float:
    """Seconds since the epoch, of such a number or of a date and time."""
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        return datetime.datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        raise typer.BadParameter("must be like 2026-01-31T12:00 or seconds since the epoch") from None


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
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List the latest operations and what each did and why."""
    wanted: dict[str, Any] = {"kind": kind, "state": state, "vm": vm, "host": host, "since": since}
    found = ask(manager, token_file, lambda client: client.operations(limit, **wanted))
    if json:
        print_json({"operations": found})
    else:
        print_operations(found)


def print_operations(found: Sequence[Operation]) -> None:
    """Operations as a table."""
    print_table(
        ("started", "kind", "vm", "host", "state", "seconds", "what it did and why"),
        (
            (
                clock(operation.started_at),
                operation.kind,
                operation.vm or "-",
                operation.host or "-",
                operation.state.value,
                f"{operation.seconds:.1f}",
                operation.sentence,
            )
            for operation in found
        ),
        "there were no operations",
    )


def operation(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request that began it.")],
    wait_s: Annotated[float, seconds("Wait so long for its end.", 60)] = 0.0,
    host: Annotated[str | None, typer.Option(help="Whose operation it is, where it is not the manager's own.")] = None,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Show one operation with its progress and its ledger."""
    found = ask(manager, token_file, lambda client: client.operation(request_id, wait_s, host))
    if json:
        print_json(found)
        return
    print_operations([found])
    for sentence in found.progress:
        print(f"  {shown(sentence)}")
    if found.vms:
        print_ledger(found)


def events(
    limit: Limit = 50,
    kind: Annotated[str | None, typer.Option(help="Only these: placed, preempted, ...")] = None,
    vm: OfVM = None,
    host: OfHost = None,
    since: Since = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until interrupted; with --json a line each.")] = False,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List what happened and why: placements, deflations, preemptions. With --follow oldest first, and then on."""
    wanted: dict[str, Any] = {"kind": kind, "vm": vm, "host": host}
    if follow:
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            ask(manager, token_file, lambda client: _follow(client, limit, since, wanted, json))
        return
    found = ask(manager, token_file, lambda client: client.events(limit, since=since, **wanted))
    if json:
        print_json({"events": found})
        return
    print_table(
        ("at", "kind", "vm", "host", "what happened"),
        ((clock(event.at), event.kind, event.vm or "-", event.host or "-", event.sentence) for event in found),
        "nothing has happened yet",
    )


async def _follow(client: ManagerClient, limit: int, since: float | None, wanted: dict[str, Any], json: bool) -> None:
    newest = await client.events(1)
    for event in reversed(await client.events(limit, since=since, **wanted)):
        if not newest or event.id <= newest[0].id:
            await asyncio.to_thread(_print_event, event, json)
    async for event in client.follow_events(after=newest[0].id if newest else 0, **wanted):
        await asyncio.to_thread(_print_event, event, json)


def _print_event(event: Event, json: bool) -> None:
    line = text_of(event) if json else f"{clock(event.at)}  {event.kind:<12} {event.sentence}"
    print(shown(line), flush=True)
    if reader_is_gone():
        raise BrokenPipeError


def core_changes(
    limit: Limit = 100,
    machine: Annotated[str | None, typer.Option(help="Only of this machine.")] = None,
    since: Since = None,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List how machines' cores grew and shrank, newest first."""
    found = ask(manager, token_file, lambda client: client.core_changes(machine, limit, since=since))
    if json:
        print_json({"core_changes": found})
    else:
        print_core_changes(found)


def print_core_changes(found: Sequence[CoreChange]) -> None:
    """Core changes as a table."""
    print_table(
        ("at", "machine", "host", "cores", "cause"),
        (
            (clock(row.at), row.machine, row.host, f"{row.cores_before:g} -> {row.cores_after:g}", row.cause)
            for row in found
        ),
        "no cores have changed yet",
    )
