"""A backup is restored by client programs of another version than the server's."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from cluster_manager import restoring
from cluster_manager.errors import StoreError
from cluster_manager.restoring import restore
from cluster_manager.store.backup import back_up, run
from cluster_manager.store.settling import Settled, settle
from cluster_manager.store.store import Store
from tests.manager.databases import Server, rows_of

REAL = shutil.which("pg_restore")
#: As of a later version: it begins all that it sends, and every script, with a setting that this server does not know.
LATER = """#!/bin/sh
case "$*" in
*--dbname=*)
    for word; do case "$word" in --dbname=*) database="${{word#--dbname=}}" ;; esac; done
    psql -X -q -v ON_ERROR_STOP=1 -d "$database" -c "SET {setting} = 0" || exit 1 ;;
*--file=-*) printf '\\\\restrict key\nSET {setting} = 0;\n' ;;
esac
{real} "$@"
"""
TRUNCATED = """#!/bin/sh
case "$*" in *--use-list*) {real} "$@" | head -c {bytes}; exit 1 ;; *) exec {real} "$@" ;; esac
"""


async def backed_up(server: Server, file: Path) -> None:
    database = server.new()
    store = Store(database, time.time)
    await store.open()
    await store.save_knowledge("words", "8\N{EN DASH}10\\\n\t\\.\n")
    await store.close()
    await asyncio.to_thread(file.touch, 0o600)
    await asyncio.to_thread(back_up, database, file)
    server.drop(database)


def put_first(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str, **words: object) -> None:
    """Have a script be the pg_restore that is found."""
    assert REAL is not None
    (wrapper := directory / "pg_restore").write_text(script.format(real=REAL, **words))
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@pytest.mark.service
async def test_programs_of_a_later_version_than_the_servers_restore_a_backup(
    tmp_path: Path, postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backed_up(postgresql, tmp_path / "backup")
    put_first(monkeypatch, tmp_path, LATER, setting="timeout_of_a_later_version")
    restored = postgresql.new()
    assert (await restore(restored, tmp_path / "backup")).settled.epoch == 1
    store = Store(restored, time.time)
    assert await store.open() > 1
    assert await store.knowledge("words") == "8\N{EN DASH}10\\\n\t\\.\n"
    await store.close()
    assert rows_of(restored, "SELECT count(*) FROM pg_indexes WHERE indexname = 'events_kind'") == [(1,)]
    postgresql.drop(restored)


@pytest.mark.service
async def test_a_script_that_ends_too_early_leaves_nothing(
    tmp_path: Path, postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backed_up(postgresql, tmp_path / "backup")
    whole = run(["pg_restore", "--file=-", str(tmp_path / "backup")])
    restored = postgresql.new()
    for size in (len(whole) // 4, whole.index(b"FROM stdin;") + 20, whole.rindex(b"\n--\n")):
        put_first(monkeypatch, tmp_path, TRUNCATED, bytes=size)
        with pytest.raises(StoreError):
            await restore(restored, tmp_path / "backup")
        assert rows_of(restored, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]
    postgresql.drop(restored)


@pytest.mark.service
async def test_what_is_restored_is_on_the_disk_whatever_the_servers_default(
    tmp_path: Path, postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backed_up(postgresql, tmp_path / "backup")
    restored, seen = postgresql.new(), []
    name = rows_of(restored, "SELECT current_database()")[0][0]
    rows_of(restored, f'ALTER DATABASE "{name}" SET synchronous_commit = off')

    def looked(connection: Connection, *words: Any) -> Settled:
        seen.append(connection.exec_driver_sql("SHOW synchronous_commit").scalar_one())
        return settle(connection, *words)

    monkeypatch.setattr(restoring, "settle", looked)
    await restore(restored, tmp_path / "backup")
    assert seen == ["on"]
    postgresql.drop(restored)
