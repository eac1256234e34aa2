"""Options that several commands share, and how they find the manager."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ebbtide.errors import EbbError

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

Result = TypeVar("Result")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Manager = Annotated[
    str | None,
    typer.Option(
        "--manager",
        envvar="EBB_MANAGER",
        metavar="URL[,URL]",
        help="The manager's address, or several of which one leads; with --token-file; default: the lab's.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="EBB_TOKEN_FILE",
        help="File with the manager's token; with --manager; default: the lab's.",
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="How many at most, newest first.")]
VMName = Annotated[str, typer.Argument(metavar="NAME", help="The VM's name.")]


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """A parser of options: a number within bounds, which infinity and NaN are not."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= (sys.float_info.max if most is None else most):
            bounds = f"of at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise typer.BadParameter(f"must be a number {bounds}, but is {text!r}")
        return value

    return parse


def seconds(about: str, most: float | None = None) -> Any:
    """An option of so many seconds."""
    return typer.Option(parser=number(0, most), metavar="SECONDS", help=about)


DeadlineS = Annotated[float, seconds("What the deflations may take.", 86_400)]


#: CA, certificate and key: the options that stand before the command.
TLS_FILES: ContextVar[tuple[Path | None, Path | None, Path | None]] = ContextVar("tls_files", default=(None,) * 3)


class Interrupted(EbbError):
    """The user waits no more."""


class OperationFailed(EbbError):
    """An operation ended, but not with what was asked for."""


def client_of(manager: str | None, token_file: Path | None) -> ManagerClient:
    """The client of the manager that the options name, else of the lab's. Raises EbbError."""
    from ebbtide.client import ManagerClient, TLSFiles

    if (manager is None) != (token_file is None):
        # The token of one manager is never sent to another.
        raise EbbError("--manager and --token-file (EBB_MANAGER, EBB_TOKEN_FILE) need each other")
    if manager is None or token_file is None:
        from ebbtide.lab import paths
        from ebbtide.lab.state import StateFile

        try:
            state = StateFile(paths.state_dir()).running()
        except EbbError as error:
            raise EbbError(f"{error}, or name a manager by --manager and --token-file") from error
        manager, token_file = state.manager_url, state.manager_token_file
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise EbbError(f"the token file {token_file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EbbError(f"the token file {token_file} is no text") from error
    if not token or any(c.isspace() or not c.isprintable() for c in token):
        raise EbbError(f"the token file {token_file} must hold one word")
    return ManagerClient(manager, token, tls=TLSFiles(*TLS_FILES.get()).context())


def ask(manager: str | None, token_file: Path | None, question: Callable[[ManagerClient], Awaitable[Result]]) -> Result:
    """Run one conversation with the manager to its end."""

    async def conversation() -> Result:
        async with client_of(manager, token_file) as client:
            return await question(client)

    return asyncio.run(conversation())
