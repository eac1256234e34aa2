"""Both kinds of stores for the manager's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_manager.database import Database
from tests.manager import cluster
from tests.manager.databases import Server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """One real PostgreSQL server for all tests."""
    server = Server()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database; the test runs once on each kind of store."""
    if request.param == "sqlite":
        yield tmp_path / "manager.sqlite"
        return
    server: Server = request.getfixturevalue("postgresql")
    made = server.new()
    yield made
    server.drop(made)


@pytest.fixture
def each_store(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clusters of this test have their store there."""
    monkeypatch.setattr(cluster, "database_in", lambda path: database)
