"""Slurm's own programs as child processes, each with a limit of time, none with anything of our environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ebbtide.matcher.engines.slurm_json import document
from ebbtide.matcher.errors import EngineFull, EngineRefused, EngineUnreachable

#: Words in which Slurm's programs say that slurmctld, or what they need to ask it, is away; their exit codes are all 1.
_UNREACHABLE: Final = (
    "unable to contact slurm controller",
    "connection refused",
    "timed out",
    "communication connection failure",
    "zero bytes were transmitted",
    "slurmctld is not responding",
    "i/o error",
    "backup controller",
    "transport endpoint is not connected",
    "connection reset by peer",
    "message send failure",
    "message receive failure",
    "communication shutdown failure",
    "munge encode",
    "munge decode",
    "protocol authentication error",
    "invalid authentication credential",
    "unable to connect to database",
)
#: And that somebody has as many jobs as they may have, or the cluster has; or that something else is away for a while.
_FULL: Final = (
    "submitjob",
    "job violates accounting/qos policy",
    "temporarily unable to accept job",
    "partition not available",
    "inactive or drain",
    "invalid user id",
)
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class SlurmPrograms:
    """Runs them.

    :param conf: slurm.conf, where it is not where Slurm looks for it.
    :param answer_s: how long one may take.
    """

    def __init__(self, conf: Path | None, answer_s: float) -> None:
        self._environment: Mapping[str, str] = {
            "PATH": os.environ.get("PATH", _PATH),
            "LC_ALL": "C",
            **({"SLURM_CONF": str(conf)} if conf is not None else {}),
        }
        self._answer_s = answer_s

    async def run(self, *argv: str, text: str = "") -> str:
        """What a program prints.

        :param text: what it reads.
        :raises EngineUnreachable: slurmctld does not answer.
        :raises EngineRefused: it says no, in its own words; `EngineFull`: it would not say so at another time.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=self._environment,
                cwd="/",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except FileNotFoundError as error:
            raise EngineUnreachable(f"there is no program {argv[0]} here: install Slurm's client") from error
        try:
            async with asyncio.timeout(self._answer_s):
                output, errors = await process.communicate(text.encode())
        except TimeoutError as error:
            raise EngineUnreachable(f"{argv[0]} did not end within {self._answer_s:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            said = " ".join((errors or output).decode(errors="replace").split())
            kind = _kind(said.lower())
            raise kind(f"{argv[0]}: {said[:500] or f'it ended with {process.returncode}'}")
        return output.decode(errors="replace")

    async def json(self, *argv: str) -> dict[str, Any]:
        """What a program prints, read as JSON. Raises as `run`."""
        # All users' jobs may be many: read in pieces, so that the loop has its turns meanwhile.
        return await asyncio.to_thread(document, argv[0], await self.run(*argv, "--json"))


def _kind(said: str) -> type[EngineUnreachable | EngineRefused]:
    if any(words in said for words in _UNREACHABLE):
        return EngineUnreachable
    return EngineFull if any(words in said for words in _FULL) else EngineRefused
