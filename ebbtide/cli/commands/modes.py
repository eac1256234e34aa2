"""Commands that change what a host does: pause, resume, drain, undeflate, config (docs/reference/modes.md)."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from ebbtide.cli.commands.options import Asking, HostName, Showing
from ebbtide.cli.commands.vms import carry_out
from ebbtide.cli.output import shown
from ebbtide.deflation.modes import HostMode
from ebbtide.errors import EbbError
from ebbtide.messages.commands import ModeCommand, SteadySettings, SteadyStatus
from ebbtide.messages.common import NAME_PATTERN, problem_of

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

Reason = Annotated[str, typer.Option(help="Why; shown wherever the mode is.")]


def pause(host: HostName, reason: Reason = "", *, to: Asking) -> None:
    """Have a host change no size until it is resumed. Ends when what was begun before has ended."""
    _set(host, HostMode.PAUSED, reason, to)


def resume(host: HostName, reason: Reason = "", *, to: Asking) -> None:
    """Make a host active again, from any mode."""
    _set(host, HostMode.ACTIVE, reason, to)


def drain(host: HostName, reason: Reason = "", *, to: Asking) -> None:
    """Have a host take no new VM; its VMs grow as room appears."""
    _set(host, HostMode.DRAINING, reason, to)


def undeflate(host: HostName, reason: Reason = "", *, to: Asking) -> None:
    """Give back all that was taken on a host, as far as there is room, and leave its VMs alone."""
    _set(host, HostMode.OFF, reason, to)


class Switch(StrEnum):
    """On or off."""

    ON = "on"
    OFF = "off"


def config(
    host: HostName,
    steady: Annotated[
        Switch | None, typer.Option(help="Trim idle memory before room is asked for; default: as it is.")
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(metavar="GIB|auto", help="Memory to keep free; auto: learned; default: as it is."),
    ] = None,
    *,
    to: Showing,
) -> None:
    """Show, or change, how a host keeps room before it is asked for."""
    reserve_mib: float | Literal["auto"] | None = None
    if reserve == "auto":
        reserve_mib = "auto"
    elif reserve is not None:
        try:
            reserve_mib = float(reserve) * 1024
        except ValueError:
            raise typer.BadParameter(f"{reserve!r} is neither GiB nor auto", param_hint="--reserve") from None
    enabled = None if steady is None else steady is Switch.ON
    try:
        SteadySettings(enabled=enabled, reserve_mib=reserve_mib)
    except ValidationError as error:
        raise typer.BadParameter(problem_of(error).detail, param_hint="--reserve") from error
    if enabled is None and reserve_mib is None:
        found = to.ask(lambda client: client.steady(host))
    else:

        async def change(client: ManagerClient) -> SteadyStatus:
            if isinstance(reserve_mib, float):
                most = (await client.host(host)).capacity.memory_mib
                if reserve_mib > most:
                    raise EbbError(
                        f"--reserve: {reserve} GiB are more than {host} has: {most / 1024:g}, which is {most:g} MiB"
                    )
            return await client.set_steady(host, enabled=enabled, reserve_mib=reserve_mib)

        found = to.ask(change)
    kept = "learned" if found.reserve_mib is None else f"{found.reserve_mib / 1024:g} GiB"
    to.say(found, lambda: print(f"{host}: {shown(found.sentence)}; reserve: {kept}"))


def _set(host: str, mode: HostMode, reason: str, to: Asking) -> None:
    """Change the mode and follow the host to the end of it. Raises OperationFailed if something is left to be done."""
    try:
        ModeCommand(request_id="x", mode=mode, reason=reason)
    except ValidationError as error:
        raise EbbError(problem_of(error).detail) from error
    if not re.fullmatch(NAME_PATTERN, host):
        raise EbbError(f"{host!r} is no name of a host: lower-case letters, digits and hyphens, 1 to 40")

    carry_out(
        to,
        lambda client, once: client.set_mode(host, mode, reason=reason, request_id=once),
        f"{host} is to be {mode.value}",
        host=host,
    )
