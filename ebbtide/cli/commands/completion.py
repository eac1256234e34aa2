"""Names that a shell completes: of VMs, hosts, tasks and machines, asked for within a second, else none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

#: Whoever presses the tabulator key does not wait for longer, seconds.
LIMIT_S = 1.0


def _names(
    context: typer.Context, incomplete: str, question: Callable[[ManagerClient], Awaitable[list[Any]]]
) -> list[str]:
    """The names that begin so. Whatever goes wrong completes to nothing: it would be printed into the user's line."""
    from ebbtide.cli.managers import CONTEXT, MIXED, TLS_FILES, client_of
    from ebbtide.cli.output import name_of, plain

    async def conversation() -> list[str]:
        async with asyncio.timeout(LIMIT_S):
            given = context.params
            token_file = given.get("token_file")
            async with client_of(given.get("manager"), Path(token_file) if token_file else None) as client:
                return [name_of(plain(row)) for row in await question(client)]

    try:
        sources = [context.get_parameter_source(name) for name in ("manager", "token_file")]
        if {source.name for source in sources if source is not None} == MIXED:
            return []
        root = context.find_root().params
        CONTEXT.set(root.get("context"))
        files = (context.params.get("ca") or root.get("ca"), root.get("certificate"), root.get("key"))
        ca, certificate, key = (Path(file) if file else None for file in files)
        TLS_FILES.set((ca, certificate, key))
        return sorted(name for name in asyncio.run(conversation()) if name.startswith(incomplete))
    except Exception:
        return []


def vms(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda client: client.vms(prefix=incomplete or None))


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda client: client.hosts())


def tasks(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda client: client.tasks(1000, prefix=incomplete or None))


def contexts(incomplete: str) -> list[str]:
    try:
        from ebbtide.cli.contexts import LAB, read

        return [name for name in (LAB, *read().contexts) if name.startswith(incomplete)]
    except Exception:
        return []
