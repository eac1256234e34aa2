"""`ebb conformance`: whether a host agent of one's own does what managers rely on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.commands.options import Printing
from ebbtide.cli.conformance import examine
from ebbtide.cli.output import print_table
from ebbtide.errors import EbbError

Url = Annotated[str, typer.Argument(metavar="URL", help="Where the agent listens, such as http://127.0.0.1:7101.")]
AgentToken = Annotated[Path, typer.Option("--token-file", help="File with the token that managers send to the agent.")]
Epoch = Annotated[int, typer.Option(min=1, help="The leadership to play: managers below it are refused from then on.")]
Template = Annotated[str, typer.Option(help="What the VM of the test is made of.")]


def conformance(
    url: Url, token_file: AgentToken, epoch: Epoch = 1, template: Template = "lab", *, to: Printing
) -> None:
    """Test a host agent against the contract: makes, shrinks, stops and deletes one small VM. Exit code 1: it fails."""
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EbbError(
            f"cannot read the token file {token_file}: {getattr(error, 'strerror', None) or error}"
        ) from error
    checks = asyncio.run(examine(url, token, epoch, template))
    rows = (("ok" if c.ok else "FAILS", c.name, c.why) for c in checks)
    to.say(
        {"url": url, "checks": [{"name": c.name, "ok": c.ok, "why": c.why} for c in checks]},
        lambda: print_table(("", "check", "why"), rows, "nothing was checked"),
    )
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
