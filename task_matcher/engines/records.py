"""Records that attempts write themselves: a claim when one begins, its end, and what its command printed.

They lie in a directory that every machine sees under the same path. A claim is made by a hard link, which exactly one
of many can make, on NFS too; so an attempt runs once at the most, whatever its engine forgets, repeats or loses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from task_matcher.attempts import NOTHING, AttemptState, Claim, Seen
from task_matcher.errors import EngineSettingsError, EngineUnreachable

T = TypeVar("T")

#: What an attempt ends with that may not begin, and one that cannot write its record.
CLAIMED, UNRECORDED = 99, 98

#: A claim is touched so often while its command runs, seconds.
BEAT_S: Final = 3.0

#: Arguments: the directory, the attempt, the machine, the command.
SCRIPT: Final = f"""\
directory=$1 attempt=$2 machine=$3
shift 3
record=$(mktemp "$directory/.$attempt.XXXXXXXX") || exit {UNRECORDED}
printf 'begun %s %s %s\\n' "$(date +%s.%N)" "$$" "$machine" > "$record" && sync "$record" || exit {UNRECORDED}
if ! ln "$record" "$directory/$attempt.claim" 2> /dev/null; then
    rm -f "$record"
    exit {CLAIMED}
fi
rm -f "$record"
sync "$directory"
# The claim grows no older while this shell lives.
shell=$$
( while sleep {BEAT_S:g} && kill -0 "$shell"; do touch -c "$directory/$attempt.claim"; done ) > /dev/null 2>&1 &
heart=$!
"$@" > "$directory/$attempt.out" 2>&1 &
child=$!
trap 'kill -TERM "$child" 2> /dev/null' TERM INT HUP
wait "$child"
code=$?
while kill -0 "$child" 2> /dev/null; do
    wait "$child"
    code=$?
done
kill "$heart" 2> /dev/null
record=$(mktemp "$directory/.$attempt.XXXXXXXX") || exit {UNRECORDED}
printf '%s %s\\n' "$code" "$(date +%s.%N)" > "$record" && sync "$record" && mv "$record" "$directory/$attempt.end"
exit "$code"
"""


def batch_script(directory: Path, attempt: str, command: Collection[str], machine: str) -> str:
    """The script of one attempt, for an engine that runs scripts.

    :param machine: an expression of the shell.
    """
    words = shlex.join([str(directory), attempt])
    return f'#!/bin/sh\nset -- {words} "{machine}" {shlex.join(command)}\n{SCRIPT}'


def command_line(directory: Path, attempt: str, command: Collection[str], machine: str) -> list[str]:
    """The same for an engine that runs programs."""
    return ["/bin/sh", "-c", SCRIPT, "ebbtide", str(directory), attempt, machine, *command]


@dataclass(frozen=True, slots=True)
class Record:
    """What there is of one attempt. Times are seconds since the epoch."""

    claim: Claim = Claim.NONE
    begun_at: float | None = None
    machine: str | None = None
    #: Of the shell around the command, on its machine.
    pid: int | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    #: Since it was touched last.
    silent_s: float | None = None


class Records:
    """The records in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def check(self) -> None:
        """:raises EngineSettingsError: they cannot be written here."""
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        try:
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".check.") as file:
                linked = Path(f"{file.name}.link")
                os.link(file.name, linked)
                linked.unlink()
        except OSError as error:
            raise EngineSettingsError(f"directory {self.directory} cannot be used: {error.strerror}") from error

    async def read(self, attempts: Collection[str]) -> dict[str, Record]:
        """The records of these attempts."""
        return await self._in_thread(lambda: self._read_all(attempts))

    def _read_all(self, attempts: Collection[str]) -> dict[str, Record]:
        if not attempts:
            return {}
        # The file system's own time: machines and its server may have others.
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".now.") as file:
            now = os.fstat(file.fileno()).st_mtime
        return {attempt: self._read(attempt, now) for attempt in attempts}

    def _read(self, attempt: str, now: float = 0.0) -> Record:
        path = self.directory / f"{attempt}.claim"
        record = _claim(_text(path))
        if record.claim is Claim.BEGUN:
            with contextlib.suppress(FileNotFoundError):
                record = replace(record, silent_s=max(now - path.stat().st_mtime, 0.0))
        words = _text(self.directory / f"{attempt}.end").split()
        if len(words) == 2:
            with contextlib.suppress(ValueError):
                record = replace(record, exit_code=int(words[0]), ended_at=float(words[1]))
        return record

    async def seal(self, attempt: str) -> Record:
        """Claim an attempt, so that it never begins, unless it has. Returns its record."""
        return await self._in_thread(lambda: self._seal(attempt))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise EngineUnreachable(f"the records in {self.directory} cannot be used: {error.strerror}") from error

    def _seal(self, attempt: str) -> Record:
        handle, name = tempfile.mkstemp(dir=self.directory, prefix=f".{attempt}.")
        try:
            os.write(handle, b"sealed\n")
            os.fsync(handle)
            with contextlib.suppress(FileExistsError):
                os.link(name, self.directory / f"{attempt}.claim")
        finally:
            os.close(handle)
            os.unlink(name)
        return self._read(attempt)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _claim(text: str) -> Record:
    words = text.split()
    if not words:
        return Record()
    if words[0] == "sealed":
        return Record(Claim.SEALED)
    try:
        return Record(Claim.BEGUN, float(words[1]), words[3], int(words[2]))
    except (IndexError, ValueError):
        return Record(Claim.BEGUN)


def merged(seen: Mapping[str, Seen], before: Mapping[str, Record], after: Mapping[str, Record]) -> dict[str, Seen]:
    """What an engine shows, with the records.

    :param before: read before the engine was asked: a claim in there is older than the engine's answer.
    :param after: read afterwards: one that had ended by then has its end in there.
    """
    merged = {}
    for attempt in {*seen, *after}:
        found = seen.get(attempt, NOTHING)
        over = found.state in (AttemptState.ENDED, AttemptState.GONE)
        record = (after if over else before).get(attempt, Record())
        if found is NOTHING and record == Record():
            continue
        if found.state is AttemptState.RUNNING and record.claim is Claim.NONE:
            # The engine has given it its cores, and its command is about to begin.
            record = after.get(attempt, record)
        merged[attempt] = replace(
            found,
            claim=record.claim,
            machine=found.machine or record.machine,
            begun_at=record.begun_at,
            silent_s=record.silent_s,
            exit_code=record.exit_code if over else None,
            ended_at=record.ended_at if over else None,
        )
    return merged
