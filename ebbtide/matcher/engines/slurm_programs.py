"""Slurm's own programs as child processes, each with a limit of time, none with our environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
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
#: Where the cluster has as many jobs as it may have, sbatch does not end: it goes on trying for two minutes.
_STALLED: Final = "sleeping and retrying"
#: And that somebody has as many jobs as they may have, or the cluster has; or that something else is away for a while.
_FULL: Final = (
    _STALLED,
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
        #: Tasks get it with their jobs. Without a word of language, messages are English.
        self._environment: dict[str, str] = {
            "PATH": _PATH,
            **({"SLURM_CONF": str(conf)} if conf is not None else {}),
        }
        self._answer_s = answer_s

    async def run(self, *argv: str, text: str = "") -> str:
        """What a program prints.

        :param text: what it reads.
        :raises EngineUnreachable: slurmctld does not answer.
        :raises EngineRefused: it says no, in its own words; `EngineFull`: it would not say so at another time.
        """
        program = shutil.which(argv[0]) or argv[0]
        where = os.path.dirname(program)
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *argv[1:],
                # Theirs only where it is none of the usual ones.
                env=self._environment | ({"PATH": f"{_PATH}:{where}"} if where not in ("", *_PATH.split(":")) else {}),
                cwd="/",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except FileNotFoundError as error:
            raise EngineUnreachable(f"there is no program {argv[0]} here: install Slurm's client") from error
        try:
            async with asyncio.timeout(self._answer_s):
                output, errors = await _talk(process, text)
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


async def _talk(process: asyncio.subprocess.Process, text: str) -> tuple[bytes, bytes]:
    """What a program prints, and its errors: until it ends, or says that it goes on trying."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output = asyncio.create_task(process.stdout.read(), name="read what a program of Slurm prints")
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(text.encode())
            await process.stdin.drain()
        process.stdin.close()
        errors = b""
        while part := await process.stderr.read(65536):
            errors += part
            if _STALLED.encode() in errors:
                return b"", errors
        found = await output
    finally:
        output.cancel()
        await asyncio.gather(output, return_exceptions=True)
    await process.wait()
    return found, errors


def _kind(said: str) -> type[EngineUnreachable | EngineRefused]:
    if _STALLED not in said and any(words in said for words in _UNREACHABLE):
        return EngineUnreachable
    return EngineFull if any(words in said for words in _FULL) else EngineRefused
