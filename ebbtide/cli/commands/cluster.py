"""Commands about hosts, machines and the manager itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import (
    Asking,
    HostName,
    LabelChanges,
    Listing,
    SelectorText,
    Showing,
    Yes,
    confirm,
    label_changes,
    label_words,
    seconds,
)
from ebbtide.cli.output import Steps, Table, clock, print_json, print_table, shown, size
from ebbtide.deflation.modes import HostMode
from ebbtide.errors import EbbError
from ebbtide.files import replacing
from ebbtide.messages.hosts import HostStatus
from ebbtide.messages.machines import CalibrationReport, MachineRanking


class HostState(StrEnum):
    """What a host may be."""

    READY = "ready"
    OVERCOMMITTED = "overcommitted"
    UNAVAILABLE = "unavailable"
    SILENT = "silent"


def hosts(
    state: Annotated[HostState | None, typer.Option(help="Only hosts in this state.")] = None,
    mode: Annotated[HostMode | None, typer.Option(help="Only hosts of this mode.")] = None,
    selector: SelectorText = None,
    *,
    to: Listing,
) -> None:
    """List the hosts with their capacity, what is free and what could be reclaimed."""
    wanted: dict[str, Any] = {"state": state, "mode": mode, "selector": selector}
    to.list("hosts", lambda client: client.hosts(**wanted), HOSTS, wanted.values())


def label(name: HostName, labels: LabelChanges, *, to: Showing) -> None:
    """Set labels of a host, or take them away; its other labels stay."""
    changes = label_changes(labels)
    found = to.ask(lambda client: client.label_host(name, changes))
    to.say(found, lambda: print(f"{name}: {label_words(found.labels)}"))


def host(name: HostName, *, to: Showing) -> None:
    """Show one host."""
    found = to.ask(lambda client: client.host(name))
    to.say(found, lambda: HOSTS.print([found], wide=to.wide))


HOSTS: Table[HostStatus] = Table(
    {
        "host": lambda host: host.id,
        "state": lambda host: f"{host.state} {shown(host.state_reason)}".rstrip(),
        "mode": lambda host: f"{host.mode} ({host.mode_reason})" if host.mode_reason else host.mode.value,
        "capacity": lambda host: size(host.capacity),
        "free": lambda host: size(host.free),
        "deflatable": lambda host: size(host.deflatable),
        "accelerator": lambda host: host.accelerator,
        "vms": lambda host: " ".join(host.vms) or "-",
    },
    {
        "agent": lambda host: host.url,
        "last heard": lambda host: clock(host.seen_at),
        "version": lambda host: host.version or "-",
        "labels": lambda host: label_words(host.labels),
    },
    "no host has reported yet",
)


def forget(
    name: HostName,
    lost_vms: Annotated[bool, typer.Option("--lost-vms", help="Its VMs are gone with it, their names free.")] = False,
    yes: Yes = False,
    *,
    to: Asking,
) -> None:
    """Forget a silent host that does not come back. Make sure that it is off: what runs on it goes on unseen."""
    confirm(f"forget {name}{' and its VMs' if lost_vms else ''}", yes)
    found = to.ask(lambda client: client.forget_host(name, lost_vms=lost_vms))
    to.say(found, lambda: print(shown(found.sentence)))


def invite(
    name: Annotated[str | None, typer.Argument(metavar="HOST", help="Its name; default: it says so.")] = None,
    expires_s: Annotated[float, typer.Option(help="How long the invitation counts.", min=10, max=30 * 86_400)] = 3600.0,
    *,
    to: Asking,
) -> None:
    """Invite a host: print the line to run there, once, as root.

    The token in it enrols one host and expires. The manager needs --ca-key for hosts on other machines. By its name a
    host that is known can be enrolled again.
    """
    found = to.ask(lambda client: client.invite_host(name, expires_s=expires_s))
    # On its standard input: command lines are shown to every user of a machine, and one could be there first.
    line = f"ebb-hostagent join {found.url} -{f' --id {name}' if name else ''} <<<{found.token}"
    to.say(found, lambda: print(line))


def uninvite(*, to: Asking) -> None:
    """Take back all invitations that no host has used: the lines that were printed are good for nothing then."""
    found = to.ask(lambda client: client.void_invitations())
    to.say(found, lambda: print(shown(found.sentence)))


def revoke(
    name: HostName,
    reason: Annotated[str, typer.Option(help="Why, for the log and for its agent.")] = "revoked by its operator",
    yes: Yes = False,
    *,
    to: Asking,
) -> None:
    """Revoke a host for good: nothing that it says counts, and it is told nothing. What runs on it goes on unseen.

    It counts as silent at once; `ebb host forget HOST` drops it. Its id is not to be used again.
    """
    confirm(f"revoke {name} for good", yes)
    found = to.ask(lambda client: client.revoke_host(name, reason))
    to.say(found, lambda: print(shown(found.sentence)))


def machines(
    duration_s: Annotated[float, seconds("How long the task runs.")] = 600.0,
    *,
    to: Listing,
) -> None:
    """Rank the machines by the probability that they keep their cores for a task of this duration."""
    to.list("machines", lambda client: client.machines(duration_s), MACHINES)


def machine(
    name: Annotated[
        str,
        typer.Argument(metavar="MACHINE", help="The machine's name: that of its VM.", autocompletion=completion.vms),
    ],
    duration_s: Annotated[float, seconds("How long the task runs.")] = 600.0,
    *,
    to: Showing,
) -> None:
    """Show how likely one machine keeps its cores for a task of this duration."""
    found = to.ask(lambda client: client.machine(name, duration_s))
    to.say(found, lambda: MACHINES.print([found], wide=to.wide))


MACHINES: Table[MachineRanking] = Table(
    {
        "machine": lambda row: row.machine,
        "host": lambda row: row.host or "-",
        "cores": lambda row: row.cores,
        "since last change": lambda row: "-" if row.since_change_s is None else f"{row.since_change_s:.0f} s",
        "last change": lambda row: row.last_change or "-",
        "keeps its cores": lambda row: (
            "no history" if row.completion_probability is None else f"{row.completion_probability:.2f}"
        ),
    },
    {"for": lambda row: f"{row.duration_s:g} s"},
    "there are no machines",
)


def calibration(*, to: Asking) -> None:
    """Show whether predictions that machines keep their cores come true: reliability by decile, and Brier score."""
    found = to.ask(lambda client: client.calibration())
    to.say(found, lambda: _print_calibration(found))


def _print_calibration(found: CalibrationReport) -> None:
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
    *,
    to: Asking,
) -> None:
    """Whether the manager runs, and its role."""
    if ready:
        found = to.ask(lambda client: client.readiness())
        to.say(found, lambda: print(shown(found.sentence)))
        return
    alive = to.ask(lambda client: client.health())
    to.say(alive, lambda: print(f"the manager runs ({alive.role})"))


def whoami(*, to: Asking) -> None:
    """The name and role of the token that is used."""
    caller = to.ask(lambda client: client.whoami())
    to.say(caller, lambda: print(shown(caller.sentence)))


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where it goes; replaced once all of it has come.")],
    *,
    to: Asking,
) -> None:
    """Back the manager's store up into a file for its owner only; it may be written meanwhile.

    SQLite or PostgreSQL, as the manager has it; the token must be an admin's. Back: `ebb-manager restore FILE`.
    """
    if str(file) == "-":
        raise typer.BadParameter("a backup is whole or not there: give a file", param_hint="FILE")
    try:
        if file.exists() and not file.is_file():
            raise EbbError(f"{file} is no regular file")
        # A link goes on pointing where it does.
        file = Path(os.path.realpath(file))
        # Beside it, 0600: what is there is replaced by a whole backup or not at all.
        with _terminated_like_interrupted(), replacing(file) as opened, Steps(quiet=to.for_programs) as steps:
            steps("the manager makes the backup")
            size_bytes = to.ask(lambda client: client.backup(opened))
    except OSError as error:
        raise EbbError(f"{file} cannot be written: {error.strerror}") from error
    made = {"file": str(file), "bytes": size_bytes}
    to.say(made, lambda: print(f"backed up to {file}: {size_bytes} bytes"))


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM is a Ctrl-C, so that nothing is left of what was begun."""
    if threading.current_thread() is not threading.main_thread():
        # No signal comes here.
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def openapi(*, to: Asking) -> None:
    """Print the OpenAPI document that the manager serves: JSON, if nothing else is said."""
    document = to.ask(lambda client: client.openapi())
    to.say(document, lambda: print_json(document))


def top(
    vms: Annotated[bool, typer.Option("--vms", help="Begin with the VMs instead of the hosts.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, for a pipe or a file, and end.")] = False,
    *,
    to: Asking,
) -> None:
    """Watch hosts and VMs: bars, sorting, a filter, a VM's layers, events; ? shows the keys.

    With --once, or -o json, it is one picture.
    """
    from ebbtide.cli.top.showing import show

    show(to, vms, once)
