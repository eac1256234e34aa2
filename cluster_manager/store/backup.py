"""A backup of the manager's store, taken while it is written: one file, consistent, for its owner only."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import structlog

from cluster_manager.errors import StoreError
from cluster_manager.store import schema
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.postgresql import options_of

log = structlog.get_logger()

#: How the files of both kinds begin.
SQLITE: Final = b"SQLite format 3\x00"
DUMP: Final = b"PGDMP"
#: So long a client program may take, seconds. What it cannot hear of any more must not hold up later backups for ever.
PROGRAM_S: Final = 3600.0
#: What a backup leaves free of the store's disk, bytes, for what the manager writes meanwhile.
RESERVE: Final = 2**26
#: The tables of a store.
TABLES: Final = (*schema.metadata.tables, "migrations")


def back_up(database: Database, target: Path) -> None:
    """Write a backup. Blocks for as long as it takes; writers do not wait for it.

    :param target: an empty file of ours, which keeps its mode.
    :raises StoreError: it cannot be made.
    """
    if isinstance(database, PostgreSQL):
        tables = [f"--table={name}" for name in TABLES]
        with target.open("wb") as file:
            client(database, "pg_dump", "--format=custom", "--no-owner", "--no-privileges", *tables, stdout=file)
    else:
        _copy(database, target)
    with target.open("rb") as written:
        os.fsync(written.fileno())


def check_room(database: Path) -> None:
    """Look whether the disk of a store has room for a copy beside it.

    :raises StoreError: it has not. A write of the manager that finds no room ends its term.
    :raises OSError: that cannot be found out.
    """
    disk = os.statvfs(database.parent)
    needed = database.stat().st_size + RESERVE
    with suppress(FileNotFoundError):  # it goes with the last connection
        needed += Path(f"{database}-wal").stat().st_size
    if (free := disk.f_bavail * disk.f_frsize) < needed:
        raise StoreError(f"no room for it beside the store: it takes up to {needed >> 20} MiB, {free >> 20} are free")


def prefix_of(database: Path, what: str) -> str:
    """How the name of a file begins that is being made beside a store: others may be in the same directory."""
    return f".{database.name}.{what}."


def remove_left(database: Database) -> None:
    """Remove what a backup or a restore that was killed has left beside a store. Its lock is held, and none runs."""
    if isinstance(database, PostgreSQL):
        return
    database = database.resolve()
    begins = prefix_of(database, "backup"), prefix_of(database, "restored")
    try:
        for path in database.parent.iterdir():
            if path.name.startswith(begins):
                path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("what a backup has left cannot be removed", why=error.strerror, file=error.filename)


def client(database: PostgreSQL, program: str, *arguments: str, stdout: Any) -> None:
    """Run a client program of PostgreSQL on a database.

    :raises StoreError: it is missing, or has failed.
    """
    # The list of processes shows the command line to every user: the password goes by the environment.
    password = database.present_password()
    secret = {"PGPASSWORD": password} if password is not None else {}
    options = options_of(database, f"ebb-manager {program}")
    # The lock, or the store, has shown that psycopg can be used.
    from psycopg.conninfo import make_conninfo

    run([program, "--no-password", f"--dbname={make_conninfo(**options)}", *arguments], secret, stdout)


def run(argv: Sequence[str], secret: dict[str, str] | None = None, stdout: Any = subprocess.PIPE) -> bytes:
    """What a program prints. Raises StoreError: it is missing, has failed, or does not end."""
    try:
        env = {**os.environ, **(secret or {})}
        done = subprocess.run(argv, input=b"", stdout=stdout, stderr=subprocess.PIPE, env=env, timeout=PROGRAM_S)
    except OSError as error:
        raise not_run(argv, error) from error
    except subprocess.TimeoutExpired as error:
        raise StoreError(f"{argv[0]} did not end within {PROGRAM_S:g} s") from error
    if done.returncode != 0:
        raise said_of(argv, done.stderr, done.returncode)
    return done.stdout or b""


def not_run(argv: Sequence[str], error: OSError) -> StoreError:
    return StoreError(f"cannot run {argv[0]} (Debian package postgresql-client): {error.strerror}")


def said_of(argv: Sequence[str], stderr: bytes, status: int) -> StoreError:
    """What a program that has failed says."""
    said = " ".join(stderr.decode(errors="replace").split())
    return StoreError(f"{argv[0]} failed: {said[:500] or f'status {status}'}")


def _copy(database: Path, target: Path) -> None:
    try:
        with (
            closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            # All pages in one step, so under one snapshot: in pieces each write would make it begin again.
            source.backup(copy)
            # One file, which can be read where nothing can be written.
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise StoreError(f"cannot back up the database {database}: {error}") from error
