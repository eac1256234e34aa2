"""Options that several commands share, and how they find the manager."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ebb.client import ManagerClient
from ebb.errors import EbbError
from ebb.lab.cluster import Lab
from ebb.lab.errors import LabError
from ebb.tls import TLS_FILES

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
DeadlineS = Annotated[float, typer.Option(min=0, max=86400, help="Seconds that the deflations may take.")]


def client_of(manager: str | None, token_file: Path | None) -> ManagerClient:
    """The client of the manager that the options name, else of the lab's. Raises EbbError."""
    if (manager is None) != (token_file is None):
        # The token of one manager is never sent to another.
        raise EbbError("--manager and --token-file (EBB_MANAGER, EBB_TOKEN_FILE) need each other")
    if manager is None or token_file is None:
        try:
            state = Lab().state()
        except LabError as error:
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
    return ManagerClient(manager, token, tls=TLS_FILES.get().context())


def ask(manager: str | None, token_file: Path | None, question: Callable[[ManagerClient], Awaitable[Result]]) -> Result:
    """Run one conversation with the manager to its end."""

    async def conversation() -> Result:
        async with client_of(manager, token_file) as client:
            return await question(client)

    return asyncio.run(conversation())
