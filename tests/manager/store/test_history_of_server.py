"""A store that was put back or failed over: no epoch is used twice, and what may be lost is said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster_manager.errors import StoreError
from cluster_manager.leadership import locks
from cluster_manager.leadership.locks import AdvisoryLock, Taken
from cluster_manager.store.database import PostgreSQL
from cluster_manager.store.store import Store
from cluster_manager.store.transactions import LOST_EPOCHS
from tests.manager import cluster as clusters
from tests.manager.cluster import cluster_of
from tests.manager.databases import USER, Server, rows_of


async def opened(database: PostgreSQL, above: int = 0, led: int = 0) -> int:
    store = Store(database, time.time)
    try:
        return await store.open(above=above, led=led)
    finally:
        await store.close()


@pytest.mark.service
async def test_a_store_in_another_history_of_its_server_goes_on_far_above_the_epochs_that_may_be_lost(
    postgresql: Server,
) -> None:
    database = postgresql.migrated()
    assert [await opened(database) for _ in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not rows_of(database, "SELECT * FROM events")
    # A replica is promoted that had not got the last commit.
    rows_of(database, "UPDATE counters SET value = 7 WHERE name = 'epoch'")
    rows_of(database, "UPDATE knowledge SET body = replace(body, ' ', ' 9') WHERE name = 'server history'")
    assert await opened(database) == 8 + LOST_EPOCHS
    ((kind, said),) = rows_of(database, "SELECT kind, sentence FROM events")
    assert kind == "restored"
    assert "has another history" in said
    assert "may be lost" in said
    assert await opened(database) == 9 + LOST_EPOCHS
    assert len(rows_of(database, "SELECT * FROM events")) == 1
    postgresql.give_back(database)


@pytest.mark.service
async def test_a_term_has_an_epoch_above_the_one_that_hosts_follow_and_not_the_last_one_of_its_process(
    postgresql: Server,
) -> None:
    database = postgresql.migrated()
    assert await opened(database) == 1
    assert await opened(database, above=9) == 10
    assert "follow a later manager" in rows_of(database, "SELECT sentence FROM events")[0][0]
    assert await opened(database, above=10, led=10) == 11
    assert len(rows_of(database, "SELECT * FROM events")) == 1
    # The last term of this process was lost.
    assert await opened(database, led=12) == 13
    assert len(rows_of(database, "SELECT * FROM events")) == 2
    postgresql.give_back(database)


@pytest.mark.service
async def test_a_process_that_comes_to_a_store_far_behind_its_last_term_takes_no_epoch_of_the_other_store(
    postgresql: Server,
) -> None:
    old, new = postgresql.migrated(), postgresql.migrated()
    rows_of(new, "UPDATE counters SET value = 1008 WHERE name = 'epoch'")
    led = await opened(new)
    # It comes to the old primary, and another manager leads on the new one.
    assert await opened(old, led=led) < await opened(new)
    for database in (old, new):
        postgresql.give_back(database)


@pytest.mark.service
async def test_a_server_that_does_not_tell_its_history_is_led_on(postgresql: Server) -> None:
    database = postgresql.new()
    rows_of(database, "CREATE ROLE plain LOGIN")
    rows_of(database, "GRANT CREATE ON SCHEMA public TO plain")
    rows_of(database, "REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    plain = PostgreSQL(database.url.replace(f"user={USER}", "user=plain"))
    assert [await opened(plain) for _ in range(2)] == [1, 2]
    # Any role may ask where nobody has changed that.
    rows_of(database, "GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC")
    assert await opened(plain) == 3
    assert len(rows_of(database, "SELECT * FROM knowledge WHERE name = 'server history'")) == 1
    postgresql.drop(database)
    postgresql.ask("postgres", "DROP ROLE plain")


@pytest.mark.service
async def test_nothing_is_written_at_another_server_than_the_one_at_which_the_lock_is_held(
    postgresql: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a name, or a pooler, is turned to the server that comes into the place of this one."""
    here, second = postgresql.migrated(), Server()
    there = second.migrated()
    name = second.ask("postgres", "SELECT datname FROM pg_database WHERE datname LIKE 'test%'")[0][0]
    (link := tmp_path / "server").symlink_to(postgresql.cluster.directory)
    url = here.url.replace(str(postgresql.cluster.directory), str(link))
    if (wanted := rows_of(here, "SELECT current_database()")[0][0]) != name:
        second.ask("postgres", f'ALTER DATABASE "{name}" RENAME TO "{wanted}"')
        there = PostgreSQL(there.url.replace(name, wanted))
    monkeypatch.setattr(clusters, "database_in", lambda _: PostgreSQL(url))
    try:
        async with cluster_of(tmp_path) as cluster:
            manager = cluster.manager
            assert manager is not None
            await manager.store.save_knowledge("words", "before")
            link.unlink()
            link.symlink_to(second.cluster.directory)
            # What is open stays where it is; a new connection leads elsewhere.
            await manager.store._engine.dispose()
            with pytest.raises(StoreError, match="at another server than the one at which the lock is held"):
                await manager.store.save_knowledge("words", "after")
            assert not manager.leadership.leads()
            assert rows_of(here, "SELECT body FROM knowledge WHERE name = 'words'") == [("before",)]
            assert rows_of(there, "SELECT body FROM knowledge WHERE name = 'words'") == []
    finally:
        second.stop()
        postgresql.drop(here)


@pytest.mark.service
async def test_a_standby_asks_the_server_to_which_the_name_leads_by_now(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgresql.new()
    leader, standby = AdvisoryLock(database, 3.0, 5.0), AdvisoryLock(database, 3.0, 5.0)
    await leader.hold()
    monkeypatch.setattr(locks, "ANEW_S", 0.0)
    asked = set()
    for _ in range(3):
        with pytest.raises(Taken):
            await standby.hold()
        assert standby._connection is not None
        asked.add(standby._connection.info.backend_pid)
        await leader.hold()
    assert len(asked) == 3
    for lock in (standby, leader):
        await lock.release()
    postgresql.drop(database)
