"""A manager with a host for tests of the command line, and the answers that it gave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from typer.testing import CliRunner

from ebbtide.cli.main import app
from tests import schema_run
from tests.manager.with_agent import Lab

SIZES = ["--cpu-cores", "1", "--memory-mib", "512"]


@dataclass
class Running:
    """``lab``: what runs; ``seen``: its answers."""

    lab: Lab
    seen: schema_run.Seen

    def options(self) -> list[str]:
        return ["--manager", self.lab.url, "--token-file", str(self.lab.token_file)]

    async def ebb(self, *words: str, exit_code: int = 0) -> str:
        """What a command prints; it must succeed, if nothing else is said."""
        argv = [*words, *self.options()]
        result = await asyncio.to_thread(CliRunner().invoke, app, argv)
        assert result.exit_code == exit_code, (argv, result.output, result.exception)
        return str(result.stdout)

    async def add_domain(self, name: str) -> None:
        """A domain that is none of Ebbtide's."""
        await self.lab.world.create(name, "")
        self.lab.world.domains[name].state = "running"
        self.lab.world.domains[name].stats_period_s = 0
