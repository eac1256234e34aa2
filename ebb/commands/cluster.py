"""Commands about hosts, operations, events and machines."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated

import typer

from deflation.messages import MachineRanking
from ebb.commands.options import Json, Limit, Manager, TokenFile, ask
from ebb.output import print_json, print_table, size


def hosts(manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """List the hosts with their capacity, what is free and what could be reclaimed."""
    found = ask(manager, token_file, lambda client: client.hosts())
    if json:
        print_json({"hosts": found})
        return
    print_table(
        ("host", "state", "mode", "capacity", "free", "deflatable", "accelerator", "vms"),
        (
            (
                host.id,
                host.state,
                f"{host.mode} ({host.mode_reason})" if host.mode_reason else host.mode.value,
                size(host.capacity),
                size(host.free),
                size(host.deflatable),
                host.accelerator,
                " ".join(host.vms) or "-",
            )
            for host in found
        ),
        "no host has reported yet",
    )


def operations(limit: Limit = 20, manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """List the latest operations and what each did and why."""
    found = ask(manager, token_file, lambda client: client.operations(limit))
    if json:
        print_json({"operations": found})
        return
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


def events(limit: Limit = 50, manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """List what happened and why: placements, deflations, preemptions."""
    found = ask(manager, token_file, lambda client: client.events(limit))
    if json:
        print_json({"events": found})
        return
    print_table(
        ("at", "kind", "vm", "host", "what happened"),
        ((clock(event.at), event.kind, event.vm or "-", event.host or "-", event.sentence) for event in found),
        "nothing has happened yet",
    )


def machines(
    duration_s: Annotated[float, typer.Option(min=0, help="How long the task runs, in seconds.")] = 600.0,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Rank the machines by the probability that they keep their cores for a task of this duration."""
    found = ask(manager, token_file, lambda client: client.machines(duration_s))
    if json:
        print_json({"machines": found})
        return
    print_machines(found)


def print_machines(found: Sequence[MachineRanking]) -> None:
    """A ranking as a table, best first."""
    print_table(
        ("machine", "host", "cores", "since last change", "last change", "keeps its cores"),
        (
            (
                row.machine,
                row.host or "-",
                row.cores,
                "-" if row.since_change_s is None else f"{row.since_change_s:.0f} s",
                row.last_change or "-",
                "no history" if row.completion_probability is None else f"{row.completion_probability:.2f}",
            )
            for row in found
        ),
        "there are no machines",
    )


def clock(at: float) -> str:
    """A time of day, in the zone of this machine."""
    return datetime.datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")
