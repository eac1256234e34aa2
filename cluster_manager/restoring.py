"""A store made of a backup, where no manager runs (`cluster_manager.store.settling` says what becomes of its rows)."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, Final, TypeVar

from sqlalchemy import Engine, create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError

from cluster_manager.errors import StoreError
from cluster_manager.leadership.locks import Taken, lock_of
from cluster_manager.privileges import SERVICE_DIRECTORY, acting_as, service_user
from cluster_manager.store import schema
from cluster_manager.store.backup import DUMP, SQLITE, TABLES, prefix_of, run
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.dump_scripts import carry_out, script_of
from cluster_manager.store.engines import check_file
from cluster_manager.store.enrolled import NAME, NOBODY, Enrolled, read_enrolled
from cluster_manager.store.postgresql import SYNCHRONOUS, options_of, sentence_of
from cluster_manager.store.settling import Settled, settle

#: How long the server leaves the lock to us, seconds: nothing proves it while pg_restore runs.
LOCK_S: Final = 86_400.0
#: The rows of the table of versions in the list of what a dump holds.
_VERSION_ROWS: Final = re.compile(rb" TABLE DATA \S+ migrations ")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Restored:
    """A store that a manager can begin on.

    :param aside: where the store of before is, or all that is left of it, its log (``-wal``); if there was one.
    :param interrupted: it was called off too late.
    :param unread: who was revoked by the store of before is not known: it is damaged, or was elsewhere.
    """

    settled: Settled
    aside: Path | None = None
    interrupted: bool = False
    unread: bool = False


class _CalledOff(StoreError):
    """Nothing has changed, and nothing will."""


async def restore(database: Database, file: Path, clock: Callable[[], float] = time.time) -> Restored:
    """Make the store of a backup, where no manager runs.

    A file's store of before is kept beside it; a PostgreSQL database must hold none.

    :raises StoreError: the backup cannot be used, or not with this version; or a manager runs. Nothing has changed.
    :raises CancelledError: it was cancelled in time. Nothing has changed.
    """
    called_off = Event()
    try:
        made = await _restore(database, file, clock, called_off)
    except _CalledOff:
        raise asyncio.CancelledError from None
    return replace(made, interrupted=called_off.is_set())


async def _restore(database: Database, file: Path, clock: Callable[[], float], called_off: Event) -> Restored:
    with ExitStack() as stack:
        source = stack.enter_context(await asyncio.to_thread(_opened, file))
        await asyncio.to_thread(_check_kind, database, file, source)
        if not isinstance(database, PostgreSQL):
            # What waits there by a name of ours, say a link to a file of root's, must do no more than its owner could.
            stack.enter_context(acting_as(*await asyncio.to_thread(_owner, database)))
        lock = lock_of(database, LOCK_S / 2, LOCK_S)
        try:
            await _to_its_end(lock.hold(), called_off)
            if isinstance(database, PostgreSQL):
                work = asyncio.to_thread(_restore_dump, database, file, clock(), called_off)
            else:
                work = asyncio.to_thread(_restore_file, database.resolve(), file, source, clock(), called_off)
            return await _to_its_end(work, called_off)
        except Taken as error:
            raise StoreError(f"{error}: stop it first") from error
        finally:
            await _to_its_end(lock.release(), called_off)


async def _to_its_end(work: Coroutine[Any, Any, Result], called_off: Event) -> Result:
    """What comes of it, also where we are cancelled: a thread at work needs the lock, and the owner it acts as."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            called_off.set()
    return task.result()


def _opened(file: Path) -> BinaryIO:
    try:
        opened = open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - by the caller
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            opened.close()
            raise StoreError(f"the backup {file} is no regular file")
    except OSError as error:
        raise StoreError(f"cannot read the backup {file}: {error.strerror}") from error
    return opened


def _check_kind(database: Database, file: Path, source: BinaryIO) -> None:
    begin = source.read(len(SQLITE))
    source.seek(0)
    of_file = not isinstance(database, PostgreSQL)
    if begin != SQLITE and not begin.startswith(DUMP):
        raise StoreError(f"{file} is no backup of a store: neither a SQLite file nor a custom dump of pg_dump")
    if (begin == SQLITE) is not of_file:
        kinds = ("SQLite", "PostgreSQL")
        raise StoreError(
            f"{file} is a backup of a {kinds[of_file]} store, but --database names a {kinds[not of_file]} one"
        )
    if of_file and Path(f"{file}-wal").exists():
        raise StoreError(f"{file} has a write-ahead log beside it: it is a database in use, not a backup of one")
    if not isinstance(database, PostgreSQL) and database.exists() and database.samefile(file):
        raise StoreError(f"{file} is the database itself")


def _check_version(file: Path, version: int) -> None:
    if version != (known := len(schema.MIGRATIONS)):
        which = "a later" if version > known else "an earlier"
        raise StoreError(
            f"the backup {file} has version {version} of the store, and this manager version {known}: restore it with "
            f"{which} version of Ebbtide, the one that made it"
            + ("" if version > known else ", and upgrade after that: a manager brings its store further at its start")
        )


# --- SQLite ----------------------------------------------------------------------------------------------------------


def _owner(database: Path) -> tuple[int, int]:
    """Whose the store is, who may be another one than he who restores it: whoever can put a link into its place."""
    if not database.parent.exists():
        _make_directory(database)
    found = [path.lstat() for path in (database, database.resolve()) if path.is_symlink() or path.exists()]
    found.append(database.parent.stat())
    one = next((one for one in found if one.st_uid != 0), found[-1])
    return one.st_uid, one.st_gid


def _make_directory(database: Path) -> None:
    """That of the service: on a new machine systemd has not made it yet, and nobody should start a manager for it."""
    directory, user = database.parent, service_user()
    if directory != SERVICE_DIRECTORY or user is None:
        raise StoreError(f"cannot use the database {database}: there is no directory {directory}")
    try:
        if not directory.parent.exists():
            directory.parent.mkdir()
            directory.parent.chmod(0o711)  # whatever the caller's umask: the service's user must get through
        directory.mkdir(mode=0o700)
        os.chown(directory, user.pw_uid, user.pw_gid)
    except OSError as error:
        raise StoreError(f"cannot make {directory}: {error.strerror}") from error


def _restore_file(database: Path, file: Path, source: BinaryIO, now: float, called_off: Event) -> Restored:
    try:
        descriptor, name = tempfile.mkstemp(dir=database.parent, prefix=prefix_of(database, "restored"))
        copy = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as target:
                shutil.copyfileobj(source, target)
            _check_file(file, copy)
            epoch, before = _known_of(database)
            made = _settled(create_engine(f"sqlite:///{copy}"), now, epoch, before or NOBODY)
            with copy.open("rb") as written:
                os.fsync(written.fileno())
            if called_off.is_set():
                raise _CalledOff
            aside = _put_aside(database, now)
            copy.replace(database)
            _sync(database.parent)
        finally:
            for left in (copy, Path(f"{copy}-wal"), Path(f"{copy}-shm")):
                left.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot restore {file} to {database}: {error.strerror}") from error
    return Restored(made, aside, unread=before is None)


def _check_file(file: Path, copy: Path) -> None:
    try:
        with closing(sqlite3.connect(copy)) as connection:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            version = 0
            if "migrations" in tables:
                (version,) = connection.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"the backup {file} is damaged: {error}") from error
    if said != "ok":
        raise StoreError(f"the backup {file} is damaged: {said}")
    if not version:
        raise StoreError(f"{file} is no backup of a store: it has no version of one")
    _check_version(file, version)


def _known_of(database: Path) -> tuple[int, Enrolled | None]:
    """The epoch of a store, as far as it can be read, and who was revoked; its write-ahead log goes into the file.

    :returns: None where it cannot be read who was, or there is no store.
    """
    epoch = 0
    try:
        check_file(database)
        if not database.stat().st_size:
            return epoch, None  # SQLite would remove its log
        with closing(sqlite3.connect(database)) as connection:
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with suppress(sqlite3.Error, TypeError, ValueError):
                for (value,) in connection.execute("SELECT value FROM counters WHERE name = 'epoch'"):
                    epoch = int(value)
            tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
            # A store of an early version has none of these. A file without tables is none: another one may have known
            # of some.
            if ("knowledge",) not in tables:
                return epoch, NOBODY if tables else None
            found = connection.execute("SELECT body FROM knowledge WHERE name = ?", (NAME,)).fetchone()
            return epoch, read_enrolled(*(found or (None,)))
    except (sqlite3.Error, StoreError):
        return epoch, None


def _put_aside(database: Path, now: float) -> Path | None:
    """A second name for the store of before, with what SQLite has beside it: a log must not go with another file.

    :returns: of a store that was cut to nothing its log, if it has one.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    number, aside = 1, Path(f"{database}.before-{stamp}")
    while aside.exists() or Path(f"{aside}-wal").exists():
        number, aside = number + 1, Path(f"{database}.before-{stamp}-{number}")
    kept = None
    # First: some file systems have no such links, and the store stays as it is then.
    if database.stat().st_size:
        aside.hardlink_to(database)
        kept = aside
    if (log := Path(f"{database}-wal")).exists():
        try:
            renamed = log.rename(f"{aside}-wal")
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        kept = kept or renamed
    Path(f"{database}-shm").unlink(missing_ok=True)
    return kept


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- PostgreSQL ------------------------------------------------------------------------------------------------------


def _restore_dump(database: PostgreSQL, file: Path, now: float, called_off: Event) -> Restored:
    # The lock has shown that psycopg and the server can be used.
    import psycopg

    options = options_of(database, "ebb-manager restore")

    def connected() -> psycopg.Connection[Any]:
        connection = psycopg.connect(**options, password=database.present_password())
        connection.execute(SYNCHRONOUS)
        connection.commit()
        return connection

    engine = create_engine("postgresql+psycopg://", creator=connected)
    try:
        if set(TABLES).intersection(inspect(engine).get_table_names()):
            raise StoreError(
                f"the {database} holds a store already: make an empty one (createdb), and name that by --database"
            )
        numbers = _numbers_in(file)
        _check_version(file, max(numbers))
        # The store's version comes with what settles it: no manager begins on a store of which only this is done.
        wanted = b"".join(
            line for line in run(["pg_restore", "--list", str(file)]).splitlines(True) if not _VERSION_ROWS.search(line)
        )
        if called_off.is_set():
            raise _CalledOff
        try:
            with connected() as connection, script_of(file, wanted) as script:
                carry_out(connection, script)
        except (StoreError, psycopg.Error) as error:
            if called_off.is_set():  # Ctrl-C ended pg_restore, too, and with it the one transaction
                raise _CalledOff from error
            raise
    except (SQLAlchemyError, psycopg.Error) as error:
        engine.dispose()
        raise StoreError(f"cannot use the {database}: {sentence_of(error)}") from error
    try:
        return Restored(_settled(engine, now, numbers=numbers), unread=True)
    except StoreError as error:
        raise StoreError(f"{error}; what the {database} holds is not to be used: drop it, and begin again") from error


def _numbers_in(file: Path) -> list[int]:
    """Of the migrations of the store in a dump; the rows stand between COPY and ``\\.``."""
    lines = run(["pg_restore", "--data-only", "--table=migrations", "--file=-", str(file)]).decode().splitlines()
    numbers = [int(line) for line in lines if line.isdigit()]
    if not numbers:
        raise StoreError(f"{file} is no backup of a store: it has no version of one")
    return numbers


def _settled(
    engine: Engine, now: float, other_epoch: int = 0, before: Enrolled = NOBODY, numbers: Sequence[int] = ()
) -> Settled:
    """:raises StoreError: what the store holds cannot be read."""
    try:
        with engine.begin() as connection:
            for number in numbers:
                schema.record(connection, number)
            return settle(connection, now, other_epoch, before)
    except (SQLAlchemyError, ValueError) as error:
        raise StoreError(f"the store of the backup cannot be read: {sentence_of(error)}") from error
    finally:
        engine.dispose()
