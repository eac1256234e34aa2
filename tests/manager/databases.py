"""Databases for tests: a SQLite file each, or a database each on one real PostgreSQL server."""

from __future__ import annotations

import itertools
import os
import sqlite3
from contextlib import closing
from typing import Any

import psycopg

from cluster_manager.database import Database, PostgreSQL
from tests.adapters import postgres

#: How the manager connects, and psql.
USER = postgres.OWNER


class Server:
    """A PostgreSQL server on a Unix socket in a directory of its own; it runs as an unprivileged user."""

    def __init__(self) -> None:
        self.cluster = postgres.Cluster("shared_buffers = 16MB", "max_connections = 200")
        self._numbers = itertools.count(1)

    def url(self, name: str) -> str:
        return f"postgresql:///{name}?host={self.cluster.directory}&user={USER}"

    def new(self) -> PostgreSQL:
        """An empty database."""
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self.ask("postgres", f'CREATE DATABASE "{name}" TEMPLATE template0')
        return PostgreSQL(self.url(name))

    def drop(self, database: PostgreSQL) -> None:
        name = database.url.split("/")[3].split("?")[0]
        self.ask("postgres", f'DROP DATABASE "{name}" WITH (FORCE)')

    def ask(self, name: str, sql: str) -> list[tuple[Any, ...]]:
        return rows_of(PostgreSQL(self.url(name)), sql)

    def stop(self) -> None:
        self.cluster.stop()


def rows_of(database: Database, sql: str) -> list[tuple[Any, ...]]:
    """What another client of the database gets, by the same SQL."""
    if isinstance(database, PostgreSQL):
        with psycopg.connect(database.url, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []
    with closing(sqlite3.connect(database, isolation_level=None)) as connection_:
        return connection_.execute(sql).fetchall()
