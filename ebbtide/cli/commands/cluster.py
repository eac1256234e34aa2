"""Commands about hosts, machines and the manager itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.commands.options import Json, Manager, TokenFile, ask, seconds
from ebbtide.cli.output import print_json, print_table, shown, size
from ebbtide.deflation.modes import HostMode
from ebbtide.errors import EbbError
from ebbtide.messages.hosts import HostStatus
from ebbtide.messages.machines import MachineRanking


class HostState(StrEnum):
    """What a host may be."""

    READY = "ready"
    OVERCOMMITTED = "overcommitted"
    UNAVAILABLE = "unavailable"
    SILENT = "silent"


def hosts(
    state: Annotated[HostState | None, typer.Option(help="Only hosts in this state.")] = None,
    mode: Annotated[HostMode | None, typer.Option(help="Only hosts of this mode.")] = None,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List the hosts with their capacity, what is free and what could be reclaimed."""
    found = ask(manager, token_file, lambda client: client.hosts(state=state, mode=mode))
    if json:
        print_json({"hosts": found})
    else:
        print_hosts(found)


def host(
    name: Annotated[str, typer.Argument(metavar="HOST", help="The host's name.")],
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Show one host."""
    found = ask(manager, token_file, lambda client: client.host(name))
    if json:
        print_json(found)
    else:
        print_hosts([found])


def forget(
    name: Annotated[str, typer.Argument(metavar="HOST", help="The host's name.")],
    lost_vms: Annotated[bool, typer.Option("--lost-vms", help="Its VMs are gone with it, their names free.")] = False,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Forget a silent host that does not come back. Make sure that it is off: what runs on it goes on unseen."""
    found = ask(manager, token_file, lambda client: client.forget_host(name, lost_vms=lost_vms))
    if json:
        print_json(found)
    else:
        print(shown(found.sentence))


def invite(
    name: Annotated[str | None, typer.Argument(metavar="HOST", help="Its name; default: it says so.")] = None,
    expires_s: Annotated[float, typer.Option(help="How long the invitation counts.", min=10, max=30 * 86_400)] = 3600.0,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Invite a host: print the line to run there, once, as root.

    The token in it enrols one host and expires. The manager needs --ca-key for hosts on other machines. By its name a
    host that is known can be enrolled again.
    """
    found = ask(manager, token_file, lambda client: client.invite_host(name, expires_s=expires_s))
    if json:
        print_json(found)
        return
    # On its standard input: command lines are shown to every user of a machine, and one could be there first.
    print(f"ebb-hostagent join {found.url} -{f' --id {name}' if name else ''} <<<{found.token}")


def revoke(
    name: Annotated[str, typer.Argument(metavar="HOST", help="The host's name.")],
    reason: Annotated[str, typer.Option(help="Why, for the log and for its agent.")] = "revoked by its operator",
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Revoke a host for good: nothing that it says counts, and it is told nothing. What runs on it goes on unseen.

    It counts as silent at once; `ebb forget HOST` drops it. Its id is not to be used again.
    """
    found = ask(manager, token_file, lambda client: client.revoke_host(name, reason))
    print_json(found) if json else print(shown(found.sentence))


def print_hosts(found: Sequence[HostStatus]) -> None:
    """Hosts as a table."""
    print_table(
        ("host", "state", "mode", "capacity", "free", "deflatable", "accelerator", "vms"),
        (
            (
                host.id,
                f"{host.state} {shown(host.state_reason)}".rstrip(),
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


def machines(
    duration_s: Annotated[float, seconds("How long the task runs.")] = 600.0,
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


def machine(
    name: Annotated[str, typer.Argument(metavar="MACHINE", help="The machine's name: that of its VM.")],
    duration_s: Annotated[float, seconds("How long the task runs.")] = 600.0,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Show how likely one machine keeps its cores for a task of this duration."""
    found = ask(manager, token_file, lambda client: client.machine(name, duration_s))
    if json:
        print_json(found)
    else:
        print_machines([found])


def calibration(manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Show whether predictions that machines keep their cores come true: reliability by decile, and Brier score."""
    found = ask(manager, token_file, lambda client: client.calibration())
    if json:
        print_json(found)
        return
    for what, curve in (("machines", found.machines), ("tasks", found.tasks)):
        brier = "-" if curve.brier is None else f"{curve.brier:.3f}"
        worst = "no decile has 200 of them" if curve.worst_error is None else f"{100 * curve.worst_error:.1f} points"
        print(f"{what}: {curve.count} predictions with an outcome, Brier score {brier}, largest error: {worst}")
        if curve.deciles:
            print_table(
                ("from", "predictions", "predicted", "came true"),
                ((f"{row.low:.1f}", row.count, f"{row.predicted:.3f}", f"{row.observed:.3f}") for row in curve.deciles),
                "",
            )


def health(
    ready: Annotated[bool, typer.Option("--ready", help="Also ask whether one leads and its store answers.")] = False,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Whether the manager runs, and its role."""
    if ready:
        found = ask(manager, token_file, lambda client: client.readiness())
        print_json(found) if json else print(shown(found.sentence))
        return
    alive = ask(manager, token_file, lambda client: client.health())
    print_json(alive) if json else print(f"the manager runs ({alive.role})")


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where it goes; replaced once all of it has come.")],
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Back the manager's store up into a file for its owner only; it may be written meanwhile.

    SQLite or PostgreSQL, as the manager has it; the token must be an admin's. Back: `ebb-manager restore FILE`.
    """
    try:
        # Beside it, 0600: what is there is replaced by a whole backup or not at all.
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(descriptor, "w+b") as opened:
                size_bytes = ask(manager, token_file, lambda client: client.backup(opened))
                opened.flush()
                os.fsync(opened.fileno())
            Path(name).replace(file)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise EbbError(f"{file} cannot be written: {error.strerror}") from error
    print_json({"file": str(file), "bytes": size_bytes}) if json else print(f"backed up to {file}: {size_bytes} bytes")


def openapi(manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Print the OpenAPI document that the manager serves; it is JSON with and without --json."""
    print_json(ask(manager, token_file, lambda client: client.openapi()))


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
