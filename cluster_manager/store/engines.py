"""The engine under the store: SQLite or PostgreSQL, both with every committed write on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Insert, Table, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_manager.errors import StoreError
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.postgresql import SERVER, connect
from ebbtide.extras import installing

#: So many queries are at work at a time: the pool keeps a connection for each, and for a write, which never waits.
MOST_READS: Final = 10
#: How long a write waits for another process that holds a SQLite database, seconds.
BUSY_S: Final = 10.0
#: In the lock file, behind the number of the process that holds it.
_MARK_AT, _MARK = 20, b"\nthe database has held a store\n"


def engine_of(database: Database, server: Callable[[], str | None], failed: Callable[[str], None]) -> AsyncEngine:
    """A pool of connections; none is opened yet.

    :param server: at which the lock is held; None: at none that is known.
    :param failed: is told in a sentence that another one was reached.
    :raises StoreError: the driver is missing.
    """
    if isinstance(database, PostgreSQL):

        async def connected() -> Any:
            connection = await connect(database, "ebb-manager store")
            try:
                # While a name or a pooler is turned to another server, both may be there, each with a store.
                (found,) = await (await connection.execute(SERVER)).fetchone() or ("",)
                if (held := server()) is not None and found != held:
                    said = f"the {database} is at another server than the one at which the lock is held"
                    failed(said)
                    raise StoreError(said)
            except BaseException:
                await connection.close()
                raise
            return connection

        try:
            return create_async_engine(
                "postgresql+psycopg://",
                async_creator=connected,
                isolation_level="READ COMMITTED",
                use_native_hstore=False,
                # What is above its size is closed at once after use; a new one has the server begin a process.
                pool_size=MOST_READS + 1,
                max_overflow=4,
            )
        except ImportError as error:
            raise StoreError(f"a PostgreSQL store needs psycopg: {installing('postgresql')}") from error
    engine = create_async_engine(f"sqlite+aiosqlite:///{database}", connect_args={"timeout": BUSY_S})
    event.listen(engine.sync_engine, "connect", _set_pragmas)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def reading(engine: AsyncEngine) -> AsyncEngine:
    """The same pool for single reads, which need no transaction around them where that costs a round trip."""
    return engine.execution_options(isolation_level="AUTOCOMMIT") if engine.dialect.name == "postgresql" else engine


def upsert(engine: AsyncEngine, table: Table) -> Any:
    """An insert that can be told what to do about a row that is there."""
    statement: Insert = (postgresql if engine.dialect.name == "postgresql" else sqlite).insert(table)
    return statement


def lock_path(database: Path) -> Path:
    """The file beside a database that its manager locks, the same for links to the database."""
    return Path(f"{database.resolve()}.lock")


def check_file(path: Path) -> None:
    """Say in plain words what SQLite's driver would say late.

    :raises StoreError: the file is there and no SQLite database, or was one; or it cannot be made.
    """
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600), "rb+") as file:
            header = file.read(16)
    except OSError as error:
        raise StoreError(f"cannot use the database {path}: {error.strerror}") from error
    if header not in (b"", b"SQLite format 3\x00"):
        raise StoreError(f"cannot use the database {path}: it is no SQLite file")
    lock = lock_path(path)
    if not header and lock.exists() and lock.read_bytes()[_MARK_AT:].startswith(_MARK):
        raise StoreError(
            f"the database {path} is empty, but it has held a store: restore it from a backup; "
            f"or remove it and {lock} to begin with an empty one"
        )


def mark_file(path: Path) -> None:
    """Note that a database has held a store, where its manager has locked it."""
    try:
        with lock_path(path).open("rb+") as file:
            file.seek(_MARK_AT)
            file.write(_MARK)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot use the database {path}: {error.strerror}") from error


def is_full(error: BaseException) -> bool:
    """Whether the driver says that the disk has no room."""
    sqlite_full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
    return sqlite_full or getattr(error, "sqlstate", None) == "53100" or getattr(error, "errno", None) == errno.ENOSPC


def _set_pragmas(connection: Any, _record: Any) -> None:
    """WAL, so that readers never wait; synchronous FULL, so that a plan's record outlives a loss of power."""
    # The driver must not begin transactions by itself: it would do so too late for a consistent read and write.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN")
