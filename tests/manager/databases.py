"""Databases for tests: a SQLite file each, or a database each on one real PostgreSQL server."""

from __future__ import annotations

import itertools
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import create_engine

from cluster_manager.store import schema
from cluster_manager.store.database import Database, PostgreSQL
from tests.adapters import postgres

#: How the manager connects, and psql.
USER = postgres.OWNER
#: Nothing here outlives the server (it runs without fsync, too): the less it writes, the sooner a database is made.
FORGETFUL = (
    "shared_buffers = 32MB",
    "max_connections = 200",
    "full_page_writes = off",
    "wal_level = minimal",
    "max_wal_senders = 0",
    "checkpoint_timeout = 1h",
    "autovacuum = off",
)
#: A database with the tables of this version, which others are copied from.
TEMPLATE = "migrated"


class Server:
    """A PostgreSQL server on a Unix socket in a directory of its own; it runs as an unprivileged user."""

    def __init__(self) -> None:
        self.cluster = postgres.Cluster(*FORGETFUL)
        self._numbers = itertools.count(1)
        self._has_template = False
        self._idle: list[PostgreSQL] = []

    def url(self, name: str) -> str:
        return f"postgresql:///{name}?host={self.cluster.directory}&user={USER}"

    def new(self, template: str = "template0", more: str = "") -> PostgreSQL:
        """An empty database, or a copy of another one."""
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self.ask("postgres", f'CREATE DATABASE "{name}" TEMPLATE {template} {more}')
        return PostgreSQL(self.url(name))

    def migrated(self) -> PostgreSQL:
        """A database with the tables of this version and no rows, in which nobody has led yet."""
        if self._idle:
            return self._idle.pop()
        if not self._has_template:
            self.ask("postgres", f"CREATE DATABASE {TEMPLATE} TEMPLATE template0")
            engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(self.url(TEMPLATE)))
            more = True
            while more:
                with engine.begin() as connection:
                    more = schema.migrate(connection)
            engine.dispose()
            self._has_template = True
        return self.new(TEMPLATE)

    def give_back(self, made: PostgreSQL) -> None:
        """One of `migrated` is done with. It is emptied for the next test: that takes less than another copy."""
        name = _name_of(made)
        sessions = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        self.ask("postgres", sessions)
        tables = ", ".join(table.name for table in schema.metadata.sorted_tables if table is not schema.counters)
        self.ask(name, f"TRUNCATE {tables} RESTART IDENTITY; UPDATE counters SET value = 0")
        self._idle.append(made)

    def drop(self, database: PostgreSQL) -> None:
        self.ask("postgres", f'DROP DATABASE "{_name_of(database)}" WITH (FORCE)')

    def ask(self, name: str, sql: str) -> list[tuple[Any, ...]]:
        return rows_of(PostgreSQL(self.url(name)), sql)

    def stop(self) -> None:
        self.cluster.stop()


class Stores:
    """The stores of one test by their directories: a file in each, or a database each on a server."""

    def __init__(self, server: Server | None) -> None:
        self._server = server
        self._made: dict[Path, PostgreSQL] = {}

    def __call__(self, directory: Path) -> Database:
        if self._server is None:
            return directory / "manager.sqlite"
        if directory not in self._made:
            self._made[directory] = self._server.migrated()
        return self._made[directory]

    def drop(self) -> None:
        for made in self._made.values():
            assert self._server is not None
            self._server.give_back(made)


def _name_of(database: PostgreSQL) -> str:
    return database.url.split("/")[3].split("?")[0]


def rows_of(database: Database, sql: str) -> list[tuple[Any, ...]]:
    """What another client of the database gets, by the same SQL."""
    if isinstance(database, PostgreSQL):
        with psycopg.connect(database.url, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []
    with closing(sqlite3.connect(database, isolation_level=None)) as connection_:
        return connection_.execute(sql).fetchall()
