"""Both kinds of stores for the manager's tests: whatever opens one runs once on each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

from cluster_manager.store.backup import back_up
from cluster_manager.store.database import Database
from cluster_manager.store.store import Store
from ebbtide.lab.state import write_private
from tests.manager import cluster
from tests.manager.databases import Server, Stores
from tests.manager.plan_events import happen

KINDS: Final = ("sqlite", pytest.param("postgresql", marks=pytest.mark.service))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """One real PostgreSQL server for all tests."""
    server = Server()
    yield server
    server.stop()


@contextlib.contextmanager
def stores_of(request: Any) -> Iterator[Stores]:
    """Stores of the kind that a fixture's parameter names."""
    stores = Stores(request.getfixturevalue("postgresql") if request.param == "postgresql" else None)
    yield stores
    stores.drop()


@pytest.fixture(autouse=True)
def no_store_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a store in a directory says that the test is for each kind of them."""

    def refuse(directory: Path) -> Database:
        raise AssertionError(f"no kind of store for {directory}: the test lacks the fixture each_store")

    monkeypatch.setattr(cluster, "database_in", refuse)


@pytest.fixture(params=KINDS)
def each_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs once on each kind of store: ``database_in`` makes them."""
    with stores_of(request) as stores:
        monkeypatch.setattr(cluster, "database_in", stores)
        yield


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database, without any table; the test runs once on each kind of store."""
    if request.param == "sqlite":
        yield tmp_path / "manager.sqlite"
        return
    server: Server = request.getfixturevalue("postgresql")
    made = server.new()
    yield made
    server.drop(made)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """The command configures the process's logs, which other tests share."""
    yield
    structlog.reset_defaults()


@pytest.fixture
async def stored(tmp_path: Path) -> Path:
    """A SQLite store at epoch 1, and a backup of it beside."""
    store = Store(database := tmp_path / "manager.sqlite", time.time)
    await store.open()
    await happen(store, "placed", "in the backup")
    (tmp_path / "backup").touch(0o600)
    await asyncio.to_thread(back_up, database, tmp_path / "backup")
    await happen(store, "deleted", "not in the backup")
    await store.close()
    write_private(tmp_path / "token", "clients\n")
    write_private(tmp_path / "key", "agents\n")
    return database
