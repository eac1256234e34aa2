"""A restore that is called off: it ends with its thread, and says whether the store was replaced."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster_manager import restoring
from cluster_manager.errors import StoreError
from cluster_manager.leadership.locks import FileLock, Taken
from cluster_manager.restoring import restore
from cluster_manager.store.backup import back_up
from cluster_manager.store.database import PostgreSQL
from cluster_manager.store.dump_scripts import carry_out
from cluster_manager.store.settling import EPOCHS
from cluster_manager.store.store import Store
from ebbtide.lab.state import write_private
from tests.manager.databases import Server
from tests.manager.test_backup import command, kinds

pytestmark = pytest.mark.usefixtures("logging_as_before")


def bytes_of(database: Path) -> bytes:
    return database.read_bytes()


async def test_a_cancelled_restore_ends_with_its_thread_under_the_lock_and_replaces_nothing(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, before = threading.Event(), threading.Event(), bytes_of(stored)
    settled = restoring._settled

    def slow(*words: Any) -> Any:
        begun.set()
        assert goes_on.wait(30)
        return settled(*words)

    monkeypatch.setattr(restoring, "_settled", slow)
    task = asyncio.create_task(restore(stored, stored.parent / "backup"), name="restore")
    try:
        assert await asyncio.to_thread(begun.wait, 30)
        for _ in range(2):
            task.cancel()
            assert not (await asyncio.wait([task], timeout=0.1))[0]
        with pytest.raises(Taken):
            await FileLock(stored).hold()
    finally:
        goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await (lock := FileLock(stored)).hold()
    await lock.release()
    assert bytes_of(stored) == before
    assert not list(stored.parent.glob("*.before-*")) + list(stored.parent.glob(".*restored*"))


@pytest.mark.parametrize(
    ("during", "said", "found"),
    [
        ("_settled", "ebb-manager: interrupted: nothing has changed\n", {"placed", "deleted"}),
        (
            "_sync",
            "ebb-manager: interrupted too late: the store was restored, as is said above\n",
            {"placed", "restored"},
        ),
    ],
)
def test_ctrl_c_of_a_restore_says_whether_the_store_was_replaced(
    stored: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    during: str,
    said: str,
    found: set[str],
) -> None:
    called_off, work = threading.Event(), getattr(restoring, during)

    def interrupted(*words: Any) -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert called_off.wait(30)
        return work(*words)

    monkeypatch.setattr(restoring, "Event", lambda: called_off)
    monkeypatch.setattr(restoring, during, interrupted)
    assert command(stored, stored.parent / "backup") == 130
    told = capsys.readouterr()
    assert told.err == said
    assert ("the store of before is kept as" in told.out) == (during == "_sync")
    assert kinds(stored) == found


@pytest.mark.service
@pytest.mark.parametrize("fails", [True, False])
async def test_a_dump_that_is_being_restored_is_waited_for_and_counts_if_it_was_whole(
    tmp_path: Path, postgresql: Server, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    database, restored = postgresql.new(), postgresql.new()
    store = Store(database, time.time)
    await store.open()
    await store.close()
    (file := tmp_path / "backup").touch(0o600)
    await asyncio.to_thread(back_up, database, file)
    begun, called_off = threading.Event(), threading.Event()

    def slow(*words: Any, **more: Any) -> Any:
        begun.set()
        assert called_off.wait(30)
        if fails:
            raise StoreError("pg_restore failed: Ctrl-C reached it")
        return carry_out(*words, **more)

    monkeypatch.setattr(restoring, "Event", lambda: called_off)
    monkeypatch.setattr(restoring, "carry_out", slow)
    task = asyncio.create_task(restore(restored, file), name="restore")
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    if fails:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert (await task).interrupted
    for made in (database, restored):
        postgresql.drop(made)


#: A pg_restore that waits before its work, and says when it has done it, whoever is there to hear that.
WAITING = """#!/bin/sh
case "$*" in *--use-list*) ;; *) exec {real} "$@" ;; esac
echo > {home}/begun
read -r _ < {home}/go
{real} "$@"
status=$?
echo > {home}/ended
exit $status
"""
COMMAND = """
import os, sys
from cluster_manager import main, restoring
{first}
sys.exit(main.main(sys.argv[1:]))
"""


async def opened(database: PostgreSQL) -> int:
    store = Store(database, time.time)
    try:
        return await store.open()
    finally:
        await store.close()


@pytest.mark.service
@pytest.mark.parametrize(
    ("first", "number", "code"),
    [
        ("", signal.SIGTERM, 130),
        ("", signal.SIGKILL, -signal.SIGKILL),
        ("restoring._settled = lambda *words, **more: os._exit(9)", None, 9),
    ],
)
def test_no_manager_begins_on_a_dump_whose_restore_was_killed_before_its_end(
    tmp_path: Path, postgresql: Server, first: str, number: signal.Signals | None, code: int
) -> None:
    database, restored, file = postgresql.migrated(), postgresql.new(), tmp_path / "backup"
    asyncio.run(opened(database))
    file.touch(0o600)
    back_up(database, file)
    (wrapper := tmp_path / "pg_restore").write_text(WAITING.format(real=shutil.which("pg_restore"), home=tmp_path))
    wrapper.chmod(0o755)
    pipes = {}
    for name in ("begun", "go", "ended"):
        os.mkfifo(tmp_path / name)
        pipes[name] = os.open(tmp_path / name, os.O_RDWR)
    write_private(tmp_path / "token", "clients\n")
    write_private(tmp_path / "key", "agents\n")
    options = ("--token-file", tmp_path / "token", "--hosts-key-file", tmp_path / "key", "--database", restored.url)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(first=first), "restore", file, *options],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
    )
    try:
        assert select.select([pipes["begun"]], [], [], 60)[0]
        if number is not None:
            process.send_signal(number)
        if number is signal.SIGKILL:
            assert process.wait(60) == code
        os.write(pipes["go"], b"\n")
        assert select.select([pipes["ended"]], [], [], 60)[0]
        said = process.communicate(timeout=60)[1].decode()
        assert process.returncode == code, said
        if number is signal.SIGTERM:
            assert "interrupted too late: the store was restored" in said
            assert asyncio.run(opened(restored)) > EPOCHS
        elif number is signal.SIGKILL:
            # Nothing of it is there.
            assert asyncio.run(opened(restored)) == 1
        else:
            with pytest.raises(StoreError, match="not restored to its end: drop it, and restore the backup again"):
                asyncio.run(opened(restored))
    finally:
        process.kill()
        process.communicate()
        for pipe in pipes.values():
            os.close(pipe)
        postgresql.give_back(database)
        postgresql.drop(restored)
