"""Records of attempts: a claim when one begins, its end, and what its command printed.

They lie in a directory that every machine sees under the same path. It belongs to the manager; in it each attempt has a
directory of its own, which the manager makes and gives to the attempt's user. A claim is made by a hard link, which
exactly one of many can make, on NFS too; so an attempt runs once at the most, whatever its engine forgets or repeats.

What is in an attempt's directory may be made by its command: the manager opens regular files of the directory's owner
only, never through a link, never waiting, and reads no more than a record can be.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pwd
import re
import secrets
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from ebbtide.matcher.engines.file_threads import RECORDS
from ebbtide.matcher.errors import EngineFull, EngineRefused, EngineSettingsError, EngineUnreachable
from ebbtide.matcher.match.attempts import NOTHING, AttemptState, Claim, Seen

T = TypeVar("T")

#: What an attempt ends with that may not begin, and one that cannot write that it begins.
CLAIMED, UNRECORDED = 99, 98
#: A shell's code for what a signal has ended, and above.
SIGNALLED: Final = 128
#: No record is longer, bytes.
RECORD_LIMIT: Final = 4096
#: In an attempt's directory: its claim, its end, what its command prints.
CLAIM, END, OUTPUT = "claim", "end", "out"

#: So many attempts are looked at in one call, which has a limit of time.
_PART: Final = 500

#: A claim is touched so often while its command runs, seconds.
BEAT_S: Final = 3.0
#: One from further ahead than this is as good as never touched, seconds: its command dated it, or a clock was set back.
_AHEAD_S: Final = 60.0
#: A file system whose clock differs by less has the manager's, seconds: its times are coarse.
_SAME_S: Final = 1.0
_MACHINE: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
#: What opening says of links, sockets, devices without a driver, and files that their owner keeps (a write lease).
_NO_RECORD: Final = {
    errno.ELOOP,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.ENODEV,
    errno.EACCES,
    errno.EPERM,
    errno.EAGAIN,
}

#: Arguments: the directory, the attempt, the machine, the command.
SCRIPT: Final = f"""\
directory=$1/$2 machine=$3
shift 3
# Slurm says nothing of its user to a job that another has submitted.
: "${{USER:=$(id -un)}}" "${{LOGNAME:=$USER}}" "${{HOME:=$(getent passwd "$(id -u)" | cut -d: -f6)}}"
export USER LOGNAME HOME
[ "$HOME" ] || unset HOME
# The command's, not this shell's.
trap 'kill -USR1 "$child" 2> /dev/null' USR1
trap 'kill -USR2 "$child" 2> /dev/null' USR2
# Before it begins, that it can: a shell that cannot open it ends with a code that would count as the command's own.
[ -e "$directory/{CLAIM}" ] || true >> "$directory/{OUTPUT}" || exit {UNRECORDED}
record=$(mktemp "$directory/.record.XXXXXXXX") || exit {UNRECORDED}
printf 'begun %s %s\\n' "$(date +%s.%N)" "$machine" > "$record" && sync "$record" || exit {UNRECORDED}
if ! ln "$record" "$directory/{CLAIM}" 2> /dev/null; then
    rm -f "$record"
    # Not where it cannot be linked for another reason.
    [ -e "$directory/{CLAIM}" ] || exit {UNRECORDED}
    exit {CLAIMED}
fi
rm -f "$record"
sync "$directory"
# The claim grows no older while this shell lives, whatever signals its session gets.
shell=$$
(
    trap '' TERM USR1 USR2
    while sleep {BEAT_S:g} && kill -0 "$shell"; do touch -c "$directory/{CLAIM}"; done
) > /dev/null 2>&1 &
heart=$!
"$@" > "$directory/{OUTPUT}" 2>&1 &
child=$!
trap 'kill -TERM "$child" 2> /dev/null' TERM INT HUP
wait "$child"
code=$?
while kill -0 "$child" 2> /dev/null; do
    wait "$child"
    code=$?
done
# Its number may be another's from now on.
trap '' TERM INT HUP USR1 USR2
kill -KILL "$heart" 2> /dev/null
# Where it cannot be written, the engine's word has to do.
record=$(mktemp "$directory/.record.XXXXXXXX") &&
    printf '%s %s\\n' "$code" "$(date +%s.%N)" > "$record" && sync "$record" && mv "$record" "$directory/{END}"
exit "$code"
"""


def batch_script(directory: Path, attempt: str, command: Collection[str], machine: str) -> str:
    """The script of one attempt, for an engine that runs scripts.

    :param machine: an expression of the shell.
    """
    words = shlex.join([str(directory), attempt])
    return f'#!/bin/sh\nset -- {words} "{machine}" {shlex.join(command)}\n{SCRIPT}'


def shell_of(directory: Path, attempt: str) -> list[str]:
    """How the command line of an attempt begins, for an engine that runs programs; no other attempt's does."""
    return ["/bin/sh", "-c", SCRIPT, "ebbtide", str(directory), attempt]


def exit_code_of(code: int) -> int | None:
    """What a command ended with, by what its attempt did; None: the attempt's own codes say nothing of a command."""
    return code if 0 <= code <= 255 and code not in (CLAIMED, UNRECORDED) else None


@dataclass(frozen=True, slots=True)
class Record:
    """What there is of one attempt. Times are seconds since the epoch."""

    claim: Claim = Claim.NONE
    begun_at: float | None = None
    machine: str | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    #: Since it was touched last, and when that was, both by its file system.
    silent_s: float | None = None
    touched_at: float | None = None
    #: It was sealed where it had no directory (any more): if it has begun, its claim was lost.
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """A part of what an attempt's command prints; offset and size (of the whole) in bytes."""

    data: bytes
    offset: int
    size: int


class Records:
    """The records in one directory.

    Every method raises EngineUnreachable where the directory cannot be used, or does not answer in time.

    :param answer_s: how long one call may take.
    """

    def __init__(self, directory: Path, answer_s: float = 20.0) -> None:
        self.directory = directory
        self._answer_s = answer_s
        #: The last notice of which an attempt was told, where that is not written yet.
        self._unwritten: dict[str, str] = {}

    async def check(self) -> None:
        """:raises EngineSettingsError: they cannot be written here, or others can write them."""
        await self.in_thread(self._check)

    def _check(self) -> None:
        try:
            with self._opened() as root:
                found = os.fstat(root)
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise EngineSettingsError(
                    f"directory {self.directory} must belong to the manager's own user (uid {os.geteuid()}) and be "
                    "writable by no other: tasks get directories of their own in it (chown, chmod 0711)"
                )
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".check.") as file:
                linked = Path(f"{file.name}.link")
                os.link(file.name, linked)
                linked.unlink()
        except OSError as error:
            raise EngineSettingsError(f"directory {self.directory} cannot be used: {error.strerror}") from error

    async def prepare(self, attempt: str, user: str | None = None) -> None:
        """Make an attempt's directory; harmless where it is there.

        :param user: whose attempt it is; None: the manager's own.
        :raises EngineFull: there is no such user, as far as is known now, or it cannot have the directory.
        """
        await self.in_thread(lambda: self._prepare(attempt, user))

    def _prepare(self, attempt: str, user: str | None = None) -> bool:
        """Whether there was none."""
        with self._opened() as root:
            try:
                os.mkdir(attempt, 0o700, dir_fd=root)
                made = True
            except FileExistsError:
                made = False
            if user is not None and os.geteuid() == 0:
                try:
                    found = pwd.getpwnam(user)
                except KeyError as error:
                    # Or nobody answers who knows the users: it is asked again, and no task fails for it.
                    raise EngineFull(f"there is no user {user} on the manager's machine") from error
                try:
                    with _directory(attempt, root) as own:
                        os.fchown(own, found.pw_uid, found.pw_gid)
                except OSError as error:
                    # That user's quota, as a rule: others' attempts can be prepared.
                    raise EngineFull(f"its directory cannot be given to {user}: {error.strerror}") from error
            os.fsync(root)
        return made

    async def read(self, attempts: Collection[str], begun: Collection[str] = ()) -> dict[str, Record]:
        """The records of these attempts.

        :param begun: attempts that have begun, so that they have a directory.
        :raises EngineUnreachable: none of those has one here: it is another directory, and says nothing of any attempt.
        """
        return await self._in_parts(lambda part: self._read_all(part, begun), attempts)

    def _read_all(self, attempts: Collection[str], begun: Collection[str] = ()) -> dict[str, Record]:
        if not attempts:
            return {}
        # The file system's own time: machines and its server may have others.
        asked_at = time.time()
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".now.") as file:
            now = os.fstat(file.fileno()).st_mtime
        beyond_s = _beyond_s(now, asked_at, time.time())
        with self._opened() as root:
            if begun and all(_owner(root, attempt) is None for attempt in begun):
                raise EngineUnreachable(
                    f"none of the attempts that have begun ({len(begun)}) has its record in {self.directory}: is that "
                    "mounted here, and is it (and label) the same as before? Nothing is begun or ended without them"
                )
            return {attempt: _read(root, attempt, now, beyond_s) for attempt in attempts}

    async def owners(self, attempts: Collection[str]) -> dict[str, int]:
        """Whose attempts these are, by uid; those without a directory are left out: they were never ours."""
        return await self._in_parts(self._owners, attempts)

    def _owners(self, attempts: Collection[str]) -> dict[str, int]:
        with self._opened() as root:
            return {attempt: owner for attempt in attempts if (owner := _owner(root, attempt)) is not None}

    async def seal(self, attempt: str) -> Record:
        """Claim an attempt, so that it never begins, unless it has. Returns its record.

        :raises EngineRefused: what lies in the place of its directory cannot be used.
        """
        return await self.in_thread(lambda: self._seal(attempt))

    def _seal(self, attempt: str) -> Record:
        # Before it is submitted there is none yet.
        made = self._prepare(attempt)
        # In its own directory its command could remove it before it is linked.
        with self._opened() as root, tempfile.NamedTemporaryFile(dir=self.directory, prefix=".seal.") as file:
            # In the seal itself: whoever seals it again, perhaps after a restart, finds the directory.
            file.write(b"sealed anew\n" if made else b"sealed\n")
            file.flush()
            os.fsync(file.fileno())
            try:
                with _directory(attempt, root) as own:
                    with contextlib.suppress(FileExistsError):
                        os.link(file.name, CLAIM, dst_dir_fd=own, follow_symlinks=False)
                    os.fsync(own)
            except OSError as error:
                # Its command's doing, or its user's quota: other attempts can be sealed.
                raise EngineRefused(f"attempt {attempt} cannot be sealed: {error.strerror}") from error
            return _read(root, attempt)

    async def output(self, attempt: str, offset: int, limit: int) -> Printed | None:
        """A part of what an attempt's command prints; None where there is nothing.

        :param offset: negative: from the end.
        :raises EngineRefused: something else lies there: nothing of it is read.
        """
        return await self.in_thread(lambda: self._output(attempt, offset, limit))

    def _output(self, attempt: str, offset: int, limit: int) -> Printed | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            with self._opened() as root, _directory(attempt, root) as own:
                owner, handle = os.fstat(own).st_uid, os.open(OUTPUT, flags, dir_fd=own)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NO_RECORD:
                raise
            raise EngineRefused(f"what it prints cannot be read: {error.strerror}") from error
        try:
            found = os.fstat(handle)
            # Another name, or another owner: it may be a file of somebody else's that was linked there, also one of
            # the manager's own, which are as little the task's.
            if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or found.st_nlink != 1:
                raise EngineRefused("what lies in the place of its output is no file of its own: it is not shown")
            start = max(found.st_size + offset, 0) if offset < 0 else offset
            return Printed(os.pread(handle, limit, start), start, found.st_size)
        finally:
            os.close(handle)

    async def untouched_since(self, moment: float) -> list[str]:
        """The attempts in whose directories nothing has come or gone since then, in seconds since the epoch."""
        return await self.in_thread(lambda: self._untouched_since(moment))

    def _untouched_since(self, moment: float) -> list[str]:
        found = []
        with self._opened() as root, os.scandir(root) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < moment:
                        found.append(entry.name)
        return found

    async def remove(self, attempt: str) -> None:
        """Remove what there is of an attempt, whatever its command has put there. It can begin no more."""
        await self.in_thread(lambda: self._remove(attempt))

    def _remove(self, attempt: str) -> None:
        self._unwritten.pop(attempt, None)
        # First: who looks for old records finds them by their directory.
        for beside in self._told_path(attempt), self.held_path(attempt):
            beside.unlink(missing_ok=True)
        with self._opened() as root:
            _remove_tree(attempt, root)

    async def told(self, attempt: str, notice: str) -> bool:
        """Whether that was the last notice of which an attempt was told; where it is not written yet, it is now.

        :raises EngineRefused: it cannot be.
        """
        if self._unwritten.get(attempt) == notice:
            await self.tell(attempt, notice)
            return True
        return await self.in_thread(lambda: self._told(attempt)) == notice

    def _told(self, attempt: str) -> str:
        try:
            return self._told_path(attempt).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    async def tell(self, attempt: str, notice: str) -> None:
        """Write down that an attempt was told of a notice; what cannot be written is known until this process ends.

        :raises EngineRefused: it cannot be.
        """
        self._unwritten[attempt] = notice
        await self.in_thread(lambda: self._tell(attempt, notice))
        self._unwritten.pop(attempt, None)

    def _tell(self, attempt: str, notice: str) -> None:
        try:
            self._told_path(attempt).write_text(notice, encoding="utf-8")
        except OSError as error:
            # A full disk: others' signals and ends can go out.
            raise EngineRefused(f"{attempt}: that it was signalled cannot be written down: {error.strerror}") from error

    def _told_path(self, attempt: str) -> Path:
        # Beside its directory, where no task can write.
        return self.directory / f"{attempt}.told"

    def held_path(self, attempt: str) -> Path:
        """Of what an engine keeps of an attempt that its scheduler does not have yet."""
        return self.directory / f"{attempt}.held"

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do something with files of the directory, with its limit of time; one that is at work then goes on alone."""
        try:
            return await RECORDS.run(work, self._answer_s)
        except OSError as error:
            why = error.strerror or f"no answer within {self._answer_s:g} s"
            raise EngineUnreachable(f"the records in {self.directory} cannot be used: {why}") from error

    async def _in_parts(self, work: Callable[[list[str]], dict[str, T]], attempts: Collection[str]) -> dict[str, T]:
        """Many attempts may take longer than one answer may."""
        names, found = list(attempts), dict[str, T]()
        for first in range(0, len(names), _PART):
            found |= await self.in_thread(partial(work, names[first : first + _PART]))
        return found

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        return _directory(str(self.directory))


@contextlib.contextmanager
def _directory(path: str, parent: int | None = None) -> Iterator[int]:
    """A directory, open; never through a link."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


def _remove_tree(name: str, parent: int) -> None:
    """Remove a directory, however deep it is: what is in a directory below is moved up first, and links are removed."""
    with _directory(name, parent) as top:
        left = os.listdir(top)
        while left:
            found = left.pop()
            if not stat.S_ISDIR(os.stat(found, dir_fd=top, follow_symlinks=False).st_mode):
                os.unlink(found, dir_fd=top)
                continue
            with _directory(found, top) as below:
                for one in os.listdir(below):
                    left.append(secrets.token_hex(16))
                    os.rename(one, left[-1], src_dir_fd=below, dst_dir_fd=top)
            os.rmdir(found, dir_fd=top)
    os.rmdir(name, dir_fd=parent)


def _owner(root: int, attempt: str) -> int | None:
    """Whose an attempt's directory is, by uid; None: it has none."""
    try:
        return os.stat(attempt, dir_fd=root, follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None


def _beyond_s(there: float, before: float, after: float) -> float:
    """By how much the clock of a file system is beyond the manager's, which said these before and after it was read."""
    beyond_s = there - min(max(there, before), after)
    return beyond_s if abs(beyond_s) > _SAME_S else 0.0


def _read(root: int, attempt: str, now: float | None = None, beyond_s: float = 0.0) -> Record:
    try:
        with _directory(attempt, root) as own:
            claim, touched_at = _content(own, CLAIM)
            end, ended_at = _content(own, END)
    except FileNotFoundError:
        return Record()
    except OSError as error:
        if error.errno not in _NO_RECORD:
            raise
        # Where tasks have the manager's own user, one may have put something else there.
        return Record(Claim.BEGUN)
    record = _claim(claim)
    if record.claim is Claim.BEGUN:
        if now is not None:
            silent_s = now - touched_at
            silent_s = max(silent_s, 0.0) if silent_s > -_AHEAD_S else math.inf
            record = replace(record, silent_s=silent_s, touched_at=touched_at)
        if (code := _end(end)) is not None:
            # By the file system, as above: the clock of a guest that was suspended stands where that was done. But as
            # the manager's has it, with whose dates it is compared.
            record = replace(record, exit_code=code, ended_at=ended_at - beyond_s)
    return record


def _content(own: int, name: str) -> tuple[str | None, float]:
    """A record's text and when it was touched; None where there is none, and empty for what is no record."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=own)
    except FileNotFoundError:
        return None, 0.0
    except OSError as error:
        if error.errno in _NO_RECORD:
            return "", 0.0
        raise
    try:
        found = os.fstat(handle)
        owners = {os.fstat(own).st_uid, os.geteuid()}
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners or found.st_size > RECORD_LIMIT:
            return "", found.st_mtime
        return os.read(handle, RECORD_LIMIT).decode(errors="replace"), found.st_mtime
    finally:
        os.close(handle)


def _claim(text: str | None) -> Record:
    """A claim that says nothing that can be, is one all the same: no attempt can begin beside it."""
    if text is None:
        return Record()
    words = text.split()
    if words in (["sealed"], ["sealed", "anew"]):
        return Record(Claim.SEALED, anew=len(words) == 2)
    begun_at = _time(words[1]) if len(words) == 3 and words[0] == "begun" else None
    if begun_at is None or not _MACHINE.fullmatch(words[2]):
        return Record(Claim.BEGUN)
    return Record(Claim.BEGUN, begun_at, words[2])


def _end(text: str | None) -> int | None:
    """What a command ended with; the time beside it is the guest's."""
    words = (text or "").split()
    if len(words) != 2 or not re.fullmatch(r"[0-9]{1,3}", words[0], re.ASCII):
        return None
    return int(words[0]) if _time(words[1]) is not None and int(words[0]) <= 255 else None


def _time(word: str) -> float | None:
    return float(word) if re.fullmatch(r"[0-9]{1,11}(\.[0-9]{1,9})?", word, re.ASCII) else None


def merged(seen: Mapping[str, Seen], before: Mapping[str, Record], after: Mapping[str, Record]) -> dict[str, Seen]:
    """What an engine shows, with the records.

    :param before: read before the engine was asked: a claim in there is older than the engine's answer.
    :param after: read afterwards: one that had ended by then has its end in there.
    :returns: with the exit code that the engine has; with that of the record only where the engine has none.
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
        claim, exit_code = record.claim, record.exit_code
        if over and found.exit_code is not None and (exit_code is not None or found.exit_code < SIGNALLED):
            # The engine's word comes before that of a file, which the command could have written. Where command and
            # attempt were killed there is no end, and the code is that of the signal: it was broken off.
            exit_code = found.exit_code
            claim = Claim.BEGUN if exit_code == 0 else claim
        elif found.state is AttemptState.ENDED and found.exit_code is None and (exit_code or 0) >= SIGNALLED:
            # The engine ended it (an administrator, a time limit, a machine that goes): it was broken off.
            exit_code = None
        merged[attempt] = replace(
            found,
            claim=claim,
            recorded_machine=record.machine,
            begun_at=record.begun_at,
            silent_s=record.silent_s,
            touched_at=record.touched_at,
            exit_code=exit_code if over else None,
            ended_at=record.ended_at if over else None,
        )
    return merged
