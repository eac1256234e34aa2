"""``--database``: files and URLs, and no password where anybody could read it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import event, text

from cluster_manager.defaults import LeadershipTimes
from cluster_manager.errors import SettingsError, StoreError
from cluster_manager.leadership.locks import AdvisoryLock
from cluster_manager.store.database import PostgreSQL, database_of
from cluster_manager.store.engines import MOST_READS
from cluster_manager.store.postgresql import ONE_HOST_S, connect
from cluster_manager.store.schema import MIGRATIONS
from cluster_manager.store.store import Store
from ebbtide.lab.state import write_private
from tests.adapters import postgres
from tests.manager.databases import USER, Server, rows_of
from tests.waiting import until

SECRET = "correct horse"


def test_a_path_is_a_file_and_a_url_is_a_server(tmp_path: Path) -> None:
    assert database_of("a/b.sqlite") == Path("a/b.sqlite")
    write_private(tmp_path / "password", f"{SECRET}\n")
    made = database_of("postgresql://ebb@db-1,db-2/ebb?sslmode=verify-full", tmp_path / "password")
    assert isinstance(made, PostgreSQL)
    assert made.password == SECRET
    assert SECRET not in repr(made)
    assert str(made) == "PostgreSQL database ebb at db-1,db-2"
    assert str(database_of("postgresql:///ebb?host=/run/pg")) == "PostgreSQL database ebb at /run/pg"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"postgresql://ebb:{SECRET}@db/ebb", "must not hold a password"),
        (f"postgresql://ebb@db/ebb?password={SECRET}", "must not hold a password"),
        (f"postgresql://ebb@db/ebb?sslkey=a&sslpassword={SECRET}", "must not hold a password"),
        (f"mysql://ebb:{SECRET}@db/ebb", "must be a file or begin with postgresql://"),
    ],
)
def test_a_url_with_a_password_or_of_another_kind_is_refused_and_not_repeated(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        database_of(text)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("text", ["", "\n", "two\nlines\n"])
def test_a_password_file_has_one_line(tmp_path: Path, text: str) -> None:
    write_private(tmp_path / "password", text)
    with pytest.raises(SettingsError, match="must hold one line"):
        database_of("postgresql:///ebb", tmp_path / "password")
    with pytest.raises(SettingsError, match="cannot read the password file"):
        database_of("postgresql:///ebb", tmp_path / "none")
    with pytest.raises(SettingsError, match="a file has no password"):
        database_of("manager.sqlite", tmp_path / "password")


def test_a_password_file_that_every_user_of_the_machine_can_read_is_refused(tmp_path: Path) -> None:
    write_private(file := tmp_path / "password", f"{SECRET}\n")
    for mode in (0o644, 0o602):
        file.chmod(mode)
        with pytest.raises(SettingsError, match=f"the password file {file} .*: chmod o-rwx {file}$"):
            database_of("postgresql:///ebb", file)
    # The manager's own user reads it by its group.
    file.chmod(0o640)
    assert database_of("postgresql:///ebb", file) == PostgreSQL("postgresql:///ebb", SECRET, file)


@pytest.fixture(scope="module")
def guarded() -> Iterator[PostgreSQL]:
    """A server on loopback that asks its user ``ebb`` for a password."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    cluster = postgres.Cluster("listen_addresses = '127.0.0.1'", f"port = {port}", "shared_buffers = 16MB")
    try:
        local = f"postgresql:///postgres?host={cluster.directory}&port={port}&user={postgres.OWNER}"
        rows_of(PostgreSQL(local), f"CREATE ROLE ebb LOGIN PASSWORD '{SECRET}'")
        rows_of(PostgreSQL(local), "CREATE DATABASE ebb OWNER ebb")
        (cluster.data / "pg_hba.conf").write_text(
            f"local all {postgres.OWNER} trust\nhost ebb ebb 127.0.0.1/32 scram-sha-256\n"
        )
        rows_of(PostgreSQL(local), "SELECT pg_reload_conf()")
        yield PostgreSQL(f"postgresql://ebb@127.0.0.1:{port}/ebb", SECRET)
    finally:
        cluster.stop()


@pytest.mark.service
async def test_the_password_opens_the_database_and_a_wrong_one_is_refused_without_being_told(
    guarded: PostgreSQL,
) -> None:
    store = Store(guarded, time.time)
    assert await store.open() == 1
    await store.close()
    for wrong in ("wrong horse", None):
        store = Store(replace(guarded, password=wrong), time.time)
        with pytest.raises(StoreError, match=r"cannot use the PostgreSQL database ebb at 127\.0\.0\.1") as raised:
            await store.open()
        assert "horse" not in str(raised.value)
        await store.close()


@pytest.mark.service
async def test_libpqs_passfile_is_honoured(
    guarded: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:*:ebb:ebb:{SECRET}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    store = Store(replace(guarded, password=None), time.time)
    assert await store.open() >= 1
    await store.close()


@pytest.mark.service
async def test_hosts_that_are_silent_do_not_keep_the_lead_from_the_one_that_answers(guarded: PostgreSQL) -> None:
    limit_s = LeadershipTimes().limit_s
    with contextlib.ExitStack() as stack:
        # They take connections, and answer nothing.
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        for count in (1, 2):
            dead = "".join(f"127.0.0.1:{one.getsockname()[1]}," for one in silent[:count])
            lock = AdvisoryLock(replace(guarded, url=guarded.url.replace("@", f"@{dead}")), limit_s, 5.0)
            for _ in range(count - 1):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await lock.hold()
            asked_of(silent, stack)
            # On a busy machine an answer may be late: by those that were asked before it, it is in time.
            async with asyncio.timeout(20):
                await lock.hold()
            assert 0 < asked_of(silent, stack) * ONE_HOST_S < limit_s
            await lock.release()
            # The one that has answered is asked first from now on.
            async with asyncio.timeout(20):
                await lock.hold()
            assert asked_of(silent, stack) == 0
            await lock.release()


def asked_of(silent: list[socket.socket], stack: contextlib.ExitStack) -> int:
    """How many connections they have got since the last time; all stay open."""
    count = 0
    for one in silent:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stack.enter_context(one.accept()[0])
                count += 1
    return count


@pytest.mark.service
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_a_database_that_cannot_hold_every_text_is_refused(postgresql: Server, encoding: str) -> None:
    database = postgresql.new(more=f"ENCODING {encoding} LOCALE 'C'")
    store = Store(database, time.time)
    with pytest.raises(StoreError, match=f"its encoding is {encoding}, not UTF8 .createdb --encoding UTF8"):
        await store.open()
    await store.close()
    postgresql.drop(database)


@pytest.mark.service
async def test_every_text_is_stored_whatever_the_environments_encoding(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    store = Store(database := postgresql.migrated(), time.time)
    await store.open()
    await store.save_knowledge("words", "8\N{EN DASH}10")
    assert await store.knowledge("words") == "8\N{EN DASH}10"
    await store.close()
    postgresql.give_back(database)


@pytest.mark.service
async def test_a_role_without_rights_is_told_so(postgresql: Server) -> None:
    database = postgresql.new()
    rows_of(database, "CREATE ROLE poor LOGIN")
    rows_of(database, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    store = Store(PostgreSQL(database.url.replace(f"user={USER}", "user=poor")), time.time)
    with pytest.raises(StoreError, match="permission denied for schema public"):
        await store.open()
    await store.close()
    postgresql.drop(database)
    postgresql.ask("postgres", "DROP ROLE poor")


async def test_many_reads_make_no_more_connections_than_are_kept(postgresql: Server) -> None:
    made = postgresql.new()
    store, connects = Store(made, time.time), [0]
    event.listen(store._engine.sync_engine, "connect", lambda *_: connects.append(1))
    await store.open()
    found = await asyncio.gather(*(store.rows(text("SELECT pg_sleep(0.005)")) for _ in range(100)))
    await store.close()
    assert len(found) == 100
    assert sum(connects) <= MOST_READS + 1


async def test_a_server_that_is_not_there_is_said_in_one_line() -> None:
    store = Store(PostgreSQL("postgresql://ebb@127.0.0.1:1/ebb"), time.time)
    with pytest.raises(StoreError, match=r"cannot use the PostgreSQL database ebb at 127\.0\.0\.1:1") as raised:
        await store.open()
    assert "\n" not in str(raised.value)
    await store.close()


def test_a_manager_on_sqlite_loads_no_driver_of_postgresql() -> None:
    code = "import sys, cluster_manager.main; print('psycopg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.service
async def test_a_store_that_another_schema_would_hide_is_not_begun_anew(postgresql: Server) -> None:
    database = postgresql.migrated()
    store = Store(database, time.time)
    assert await store.open() == 1
    await store.close()
    rows_of(database, f"CREATE SCHEMA AUTHORIZATION {USER}")
    store = Store(database, time.time)
    with pytest.raises(StoreError, match=f"there is a store in schema public, but a new one would be .* schema {USER}"):
        await store.open()
    await store.close()
    assert rows_of(database, f"SELECT * FROM pg_tables WHERE schemaname = '{USER}'") == []
    # One that has a store of its own, and one that does not look there.
    for path in ("public", "other"):
        rows_of(database, f"CREATE SCHEMA IF NOT EXISTS {path}")
        store = Store(PostgreSQL(f"{database.url}&options=-csearch_path%3D{path}"), time.time)
        assert await store.open() == (2 if path == "public" else 1)
        await store.close()
    store = Store(PostgreSQL(f"{database.url}&options=-csearch_path%3Dother,public"), time.time)
    assert await store.open() == 2
    await store.close()
    postgresql.drop(database)


@pytest.mark.service
async def test_a_process_that_has_led_begins_no_new_store_in_an_empty_database(postgresql: Server) -> None:
    database = postgresql.new()
    store = Store(database, time.time)
    with pytest.raises(StoreError, match="is empty, but it has held a store of epoch 8: restore it from a backup"):
        await store.open(led=8)
    await store.close()
    assert rows_of(database, "SELECT * FROM pg_tables WHERE schemaname = 'public'") == []
    postgresql.drop(database)


@pytest.mark.service
@pytest.mark.parametrize(
    ("default", "found"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
async def test_a_commit_waits_for_its_disks_whatever_the_roles_default(
    postgresql: Server, default: str, found: str
) -> None:
    database = PostgreSQL(f"{postgresql.url('postgres')}&options=-csynchronous_commit%3D{default}")
    connection = await connect(database, "test")
    assert (await (await connection.execute("SHOW synchronous_commit")).fetchone()) == (found,)
    await connection.close()


@pytest.mark.service
async def test_a_migration_waits_for_a_lock_as_long_as_it_needs_whatever_the_roles_limit(postgresql: Server) -> None:
    database = postgresql.migrated()
    rows_of(database, "ALTER TABLE vms DROP COLUMN preemption_unsure")
    rows_of(database, f"DELETE FROM migrations WHERE number = {len(MIGRATIONS)}")
    limited = PostgreSQL(f"{database.url}&options=-clock_timeout%3D50ms")
    reader = await connect(database, "pg_dump")
    async with reader.transaction():
        await reader.execute("LOCK TABLE vms IN ACCESS SHARE MODE")
        store = Store(limited, time.time)
        opening = asyncio.create_task(store.open(), name="open")
        waits = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND age(now(), query_start) > '1s'"
        )
        await until(lambda: opening.done() or rows_of(database, waits) != [(0,)])
        assert not opening.done()
    assert await opening == 1
    await store.close()
    await reader.close()
    postgresql.drop(database)


@pytest.mark.service
async def test_a_password_that_was_changed_counts_from_the_next_connection_on(
    guarded: PostgreSQL, tmp_path: Path
) -> None:
    write_private(file := tmp_path / "password", f"{SECRET}\n")
    database = database_of(guarded.url, file)
    assert isinstance(database, PostgreSQL)
    lock = AdvisoryLock(database, 3.0, 5.0)
    await lock.hold()
    try:
        rows_of(PostgreSQL(_with_password(guarded)), "ALTER ROLE ebb PASSWORD 'battery staple'")
        write_private(file, "battery staple\n")
        await lock.hold()
        await lock.release()
        await lock.hold()
        await lock.release()
        # Where the file is gone, what was read last is tried.
        file.unlink()
        with pytest.raises(StoreError, match="password authentication failed"):
            await lock.hold()
    finally:
        changed = PostgreSQL(_with_password(replace(guarded, password="battery staple")))
        with contextlib.suppress(Exception):
            rows_of(changed, f"ALTER ROLE ebb PASSWORD '{SECRET}'")
        await lock.release()


def _with_password(database: PostgreSQL) -> str:
    return database.url.replace("ebb@", f"ebb:{quote(database.password or '')}@")


@pytest.mark.service
async def test_an_address_of_a_name_that_is_silent_does_not_keep_the_lead_from_the_next_one(
    guarded: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(guarded.url.rpartition(":")[2].partition("/")[0])
    loop, limit_s = asyncio.get_running_loop(), LeadershipTimes().limit_s
    known = loop.getaddrinfo

    async def found(host: str, *words: Any, **more: Any) -> Any:
        if host != "pg.example.com":
            return await known(host, *words, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(loop, "getaddrinfo", found)
    with contextlib.ExitStack() as stack:
        # It takes connections, and answers nothing.
        silent = stack.enter_context(socket.create_server(("127.0.0.2", port)))
        lock = AdvisoryLock(replace(guarded, url=guarded.url.replace("127.0.0.1", "pg.example.com")), limit_s, 5.0)
        async with asyncio.timeout(20):
            await lock.hold()
        assert 0 < asked_of([silent], stack) * ONE_HOST_S < limit_s
        await lock.release()
        # The one that has answered is asked first from now on.
        await lock.hold()
        assert asked_of([silent], stack) == 0
        await lock.release()
