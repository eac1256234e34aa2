"""The lock that the leader holds: a file beside a SQLite database, or a session's advisory lock in PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import secrets
import stat
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cluster_manager.errors import StoreError
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.engines import lock_path
from cluster_manager.store.postgresql import SERVER, connect, sentence_of

if TYPE_CHECKING:
    from psycopg import AsyncConnection

#: The lock's number: one for each schema, so that several stores can share a database.
_KEY: Final = "SELECT hashtextextended('ebbtide manager of schema ' || current_schema(), 0)"
#: A session that asks for the lock is marked: a pooler in transaction mode lets two managers use one, which would give
#: the lock to both.
_TRY: Final = """
    SELECT CASE
        WHEN coalesce(current_setting('ebbtide.session', true), '') NOT IN ('', %(mark)s) THEN 'shared'
        WHEN set_config('ebbtide.session', %(mark)s, false) IS NULL THEN 'shared'
        WHEN pg_try_advisory_lock(%(key)s) THEN 'held'
        ELSE 'taken'
    END
"""
_UNLOCK: Final = """
    SELECT pg_advisory_unlock(%(key)s), set_config('ebbtide.session', '', false)
    WHERE current_setting('ebbtide.session', true) = %(mark)s
"""
_HELD: Final = """
    SELECT count(*) > 0 FROM pg_locks
    WHERE current_setting('ebbtide.session', true) = %(mark)s
    AND locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND objsubid = 1
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (classid::bigint << 32) | objid::bigint = %(key)s
"""
#: How long a standby asks over one connection, seconds: its server may be another one by now than the name leads to.
ANEW_S: Final = 60.0
#: struct flock: a write lock on one byte, behind all that SQLite locks; of the open file, not of the process.
_BYTE: Final = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 2**62, 1, 0)
_LEADER: Final = "SELECT url FROM terms ORDER BY epoch DESC LIMIT 1"


class Taken(Exception):
    """Another manager holds the lock.

    :param leader: where it is reached, if that is known.
    """

    def __init__(self, sentence: str, leader: str | None) -> None:
        super().__init__(sentence)
        self.leader = leader


class LeaderLock(Protocol):
    """One lock for one store."""

    #: How long a proof counts, seconds.
    limit_s: float
    #: At which server it is held; None: it is not held, or at none.
    server: str | None
    #: Whether a manager that does not get the lock at its start waits for it.
    waits: bool

    async def hold(self) -> None:
        """Take the lock, or prove that it is still held.

        :raises Taken: another manager holds it.
        :raises StoreError: the store does not answer, or the lock was lost.
        """

    async def release(self) -> None:
        """Give it up, if it is held. Never fails."""


def lock_of(database: Database, limit_s: float, release_s: float) -> LeaderLock:
    """The lock of a database. ``release_s``: when the server takes it from a leader that has fallen silent."""
    if isinstance(database, PostgreSQL):
        return AdvisoryLock(database, limit_s, release_s)
    return FileLock(database)


class FileLock:
    """A lock on one byte of the database itself, so by whatever name it is called, and ``flock`` on FILE.lock, which
    tells who holds it. The kernel gives both back when their process ends, however that happens.
    """

    limit_s = math.inf
    waits = False
    server: str | None = None

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = lock_path(database)
        #: Of the lock file, and of the database.
        self._files: tuple[int, int] | None = None

    async def hold(self) -> None:
        if self._files is None:
            self._files = await asyncio.to_thread(self._take)
            return
        for file, path in zip(self._files, (self._path, self._database), strict=True):
            if not await asyncio.to_thread(_is_in_place, file, path):
                raise StoreError(f"the file {path} was removed while the manager held it")

    async def release(self) -> None:
        """After the store is closed: closing any descriptor of a database gives SQLite's own locks up."""
        files, self._files = self._files, None
        for file in files or ():
            os.close(file)

    def _take(self) -> tuple[int, int]:
        with contextlib.ExitStack() as stack:
            file = self._open(self._path)
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(file, 20, 0).decode(errors="replace").strip()
                raise self._taken(f" (process {holder})" if holder else "") from error
            except OSError as error:
                raise StoreError(f"cannot lock {self._path}: {error.strerror}") from error
            database = self._open(self._database)
            stack.callback(os.close, database)
            try:
                fcntl.fcntl(database, fcntl.F_OFD_SETLK, _BYTE)
                # As wide as the mark behind it, which stays.
                os.pwrite(file, f"{os.getpid():<20}".encode(), 0)
            except BlockingIOError as error:
                raise self._taken(" by another name of this file") from error
            except OSError as error:
                raise StoreError(f"cannot lock {self._database}: {error.strerror}") from error
            stack.pop_all()
            return file, database

    def _open(self, path: Path) -> int:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot use the database {self._database}: {error.strerror} ({path})") from error
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            os.close(file)
            raise StoreError(f"cannot use the database {self._database}: {path} is no regular file")
        if found.st_mode & 0o077 and found.st_uid == os.geteuid():
            # SQLite gives its other files the mode of this one.
            os.fchmod(file, 0o600)
        return file

    def _taken(self, by: str) -> Taken:
        return Taken(f"cannot use the database {self._database}: another manager{by} uses it", None)


def _is_in_place(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


class AdvisoryLock:
    """A lock of one session, on a connection of its own.

    The server gives it back when the connection ends, and ends the connection of a leader that has asked nothing for
    ``release_s``: a leader that hangs keeps its TCP connection, which no keepalive would notice.
    """

    waits = True

    def __init__(self, database: PostgreSQL, limit_s: float, release_s: float) -> None:
        if not 0 < limit_s < release_s:
            raise ValueError("the server must wait longer than the leader itself")
        self.limit_s = limit_s
        self._database = database
        self._release_s = release_s
        self._connection: AsyncConnection[Any] | None = None
        self._key: int | None = None
        self._mark = ""
        self.server: str | None = None
        #: Since when this connection is there, by the monotonic clock.
        self._since = 0.0
        self._held = False

    async def hold(self) -> None:
        import psycopg

        try:
            if not self._held and time.monotonic() - self._since > ANEW_S:
                await self.release()
            if self._connection is None:
                self._connection = await connect(self._database, "ebb-manager leadership", self._release_s)
                self._mark, self._since = secrets.token_hex(16), time.monotonic()
            if self._held:
                if not await self._value(_HELD):
                    raise StoreError(
                        f"the lock in the {self._database} is gone (a pooler in transaction mode cannot keep it)"
                    )
                return
            self._key = await self._value(_KEY)
            if self._key is None:
                raise StoreError(
                    f"cannot use the {self._database}: no schema of its search_path exists: CREATE SCHEMA first"
                )
            match await self._value(_TRY):
                case "held":
                    self._held = True
                    self.server = await self._value(SERVER)
                case "shared":
                    raise StoreError(
                        f"another manager uses this session of the {self._database}: a pooler in transaction mode "
                        "cannot keep the lock"
                    )
                case _:
                    raise Taken("another manager holds the lock", await self._leader())
        except psycopg.Error as error:
            raise StoreError(f"the {self._database} does not answer: {sentence_of(error)}") from error

    async def release(self) -> None:
        """By the end of the session, which gives up whatever it holds."""
        connection, self._connection = self._connection, None
        held, self._held, self.server = self._held, False, None
        if connection is None:
            return
        import psycopg

        try:
            if held and not connection.broken:
                # Its end is noticed by the server a moment later than this.
                async with asyncio.timeout(1.0):
                    await connection.execute(_UNLOCK, self._known)
        except (psycopg.Error, TimeoutError):
            pass
        finally:
            await connection.close()

    async def _leader(self) -> str | None:
        """Where the leader said that it is reached."""
        if await self._value("SELECT to_regclass('terms')::text") is None:
            return None
        leader: str | None = await self._value(_LEADER)
        return leader

    @property
    def _known(self) -> dict[str, Any]:
        return {"key": self._key, "mark": self._mark}

    async def _value(self, query: Any) -> Any:
        assert self._connection is not None
        row = await (await self._connection.execute(query, self._known)).fetchone()
        return row[0] if row is not None else None
