"""The store: migrations, durability settings, and what it refuses."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from cluster_manager import schema
from cluster_manager.errors import StoreError
from cluster_manager.store import Store


async def test_the_migrations_make_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    store = Store(tmp_path / "db", time.time)
    await store.open()
    await store.close()
    with sqlite3.connect(tmp_path / "db") as connection:
        for table in schema.metadata.sorted_tables:
            made = {
                (name, bool(required) or bool(key))
                for _, name, _, required, _, key in connection.execute(f"PRAGMA table_info({table.name})")
            }
            assert made == {(column.name, not column.nullable) for column in table.columns}, table.name
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT max(number) FROM migrations").fetchone() == (len(schema.MIGRATIONS),)


async def test_the_epoch_rises_with_each_opening(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        store = Store(tmp_path / "db", time.time)
        assert await store.open() == expected
        await store.close()


async def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "db", time.time)
    await store.open()
    await store.close()
    with sqlite3.connect(tmp_path / "db") as connection:
        connection.execute("INSERT INTO migrations (number) VALUES (99)")
    store = Store(tmp_path / "db", time.time)
    with pytest.raises(StoreError, match="version 99"):
        await store.open()
    await store.close()


async def test_what_is_no_database_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "db").write_text("this is no database, " * 100)
    for path in (tmp_path / "db", tmp_path / "missing" / "db"):
        store = Store(path, time.time)
        with pytest.raises(StoreError, match="cannot use the database"):
            await store.open()
        await store.close()
