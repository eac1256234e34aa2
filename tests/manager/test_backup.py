"""Backup and restore of the manager's store: consistent while it is written, and a manager that goes on from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager import privileges, restoring
from cluster_manager.api import backup as backup_route
from cluster_manager.errors import StoreError
from cluster_manager.execution import operations
from cluster_manager.leadership.locks import FileLock
from cluster_manager.main import main
from cluster_manager.plans.plans import VMPhase
from cluster_manager.plans.removals import start_removal
from cluster_manager.plans.returns import Returns
from cluster_manager.restoring import restore
from cluster_manager.store import backup, schema
from cluster_manager.store.backup import back_up
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.enrolled import Enrolled, read_enrolled
from cluster_manager.store.settling import BUSY, EPOCH_S, EPOCHS, MOST_EPOCHS, rise, settled_phase
from cluster_manager.store.store import Store
from ebbtide.client.errors import ManagerRefused
from ebbtide.deflation.fencing import MOST_STEP
from ebbtide.deflation.sharing.return_queue import ReturnPace
from ebbtide.lab.state import write_private
from ebbtide.messages.operations import OperationState
from tests.adapters import postgres
from tests.manager import cluster as clusters
from tests.manager import fake_engine
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.conftest import KINDS, stores_of
from tests.manager.databases import FORGETFUL, Server, rows_of
from tests.manager.fake_agent import FakeAgent
from tests.manager.two_agents import two_hosts
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("logging_as_before")

VERSION = len(schema.MIGRATIONS)
Empty = Callable[[], Database]


@pytest.fixture(params=KINDS)
def empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Empty]:
    """As ``each_store``, with what makes databases without a table beside the test's own."""
    made: list[PostgreSQL] = []

    def new() -> Database:
        if request.param == "sqlite":
            return tmp_path / f"restored-{time.monotonic_ns()}.sqlite"
        server: Server = request.getfixturevalue("postgresql")
        made.append(server.new())
        return made[-1]

    with stores_of(request) as stores:
        monkeypatch.setattr(clusters, "database_in", stores)
        yield new
    for database in made:
        request.getfixturevalue("postgresql").drop(database)


async def backup_of(cluster: Cluster, file: Path, token: str = TOKEN) -> int:
    """What `ebb backup` asks for."""
    async with cluster.client(token) as client:
        with file.open("w+b") as opened:
            return await client.backup(opened)


async def test_a_backup_under_writes_holds_whole_transactions_only(tmp_path: Path, empty: Empty) -> None:
    database = clusters.database_in(tmp_path)
    store = Store(database, time.time)
    await store.open()
    written, enough = 0, asyncio.Event()

    async def pair(connection: AsyncConnection) -> None:
        for number in range(2):
            row = {"at": 0.0, "plan": None, "vm": None, "host": None, "kind": "pair", "sentence": str(number)}
            await connection.execute(insert(schema.events).values(**row))

    async def write() -> None:
        nonlocal written
        while not enough.is_set():
            await store._write(pair)
            written += 1

    writing = asyncio.create_task(write(), name="writer")
    found = []
    try:
        for number in range(3):
            (file := tmp_path / f"backup-{number}").touch(0o600)
            before = written
            await asyncio.to_thread(back_up, database, file)
            await restore(restored := empty(), file)
            ((count, pairs),) = rows_of(
                restored,
                "SELECT count(*), sum(CASE sentence WHEN '0' THEN 1 ELSE 0 END) FROM events WHERE kind = 'pair'",
            )
            assert before * 2 <= count == 2 * (pairs or 0)
            found.append(count)
    finally:
        enough.set()
        await writing
        await store.close()
    assert found == sorted(found)
    assert found[-1] > found[0], "it was written meanwhile"


async def test_a_new_manager_goes_on_from_a_backup_while_the_agents_run(
    tmp_path: Path, empty: Empty, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = ReturnPace(hold_s=0.2, rest_s=0.2, pause_s=0.2, longest_s=0.4)
    monkeypatch.setattr(operations, "Returns", lambda: Returns(pace))
    async with two_hosts(tmp_path, **fake_engine.settings()) as hosts:
        cluster = hosts.cluster
        for name in ("low-1", "low-2", "low-3", "low-4"):
            assert (await cluster.create(vm(name), deadline_s=60.0)).state is OperationState.DONE
        for name in ("high-1", "high-2"):
            made = await cluster.create(vm(name, "fixed", 5.3, 600.0), deadline_s=60.0)
            assert made.state is OperationState.DONE, made.sentence
        task = {"request_id": "t", "task": {"name": "train", "command": ["true"], "cores": 4, "duration_s": 60.0}}
        assert (await cluster.call("POST", "/v1/tasks", json=task))[0] in (200, 201, 202)

        async def seen() -> Any:
            vms = (await cluster.get("/v1/vms"))["vms"]
            return (
                [(row["name"], row["host"], row["state"], (row["preempted"] or {}).get("position")) for row in vms],
                [row["name"] for row in (await cluster.get("/v1/tasks"))["tasks"]],
                [row["id"] for row in (await cluster.get("/v1/hosts"))["hosts"]],
            )

        before = await seen()
        (waiting, home), *_ = [(name, host) for name, host, _, position in before[0] if position == 1]
        await backup_of(cluster, file := tmp_path / "backup")
        # The agents have come to follow later managers than the backup knows of.
        for _ in range(2):
            await hosts.kill("manager")
            await hosts.start("manager")
            await hosts.ready()
        assert cluster.manager is not None
        last = cluster.manager.epoch
        await hosts.kill("manager")
        restored = empty()
        done = await restore(restored, file)
        assert (done.settled.hosts, done.settled.ended, done.aside, done.unread) == (2, (), None, True)

        cluster.settings = replace(cluster.settings, database=restored)
        await hosts.start("manager")
        await hosts.ready()
        assert await seen() == before
        assert last < cluster.manager.epoch == done.settled.epoch_now + 1 < MOST_STEP
        now = cluster.manager.epoch

        async def followed() -> bool:
            """From then on no manager of before is heard."""
            return {host.agent.host.journal.epoch for host in hosts.hosts.values() if host.agent} == {now}

        await until(followed)
        (high,) = [name for name, host, _, _ in before[0] if host == home and name.startswith("high")]
        assert (await cluster.delete(high)).state is OperationState.DONE

        async def is_back() -> bool:
            return bool((await cluster.get(f"/v1/vms/{waiting}"))["state"] == "running")

        await until(is_back)
        assert hosts.running(waiting) == [home]
        (event,) = await cluster.events("restored")
        assert "restored from a backup of epoch 1," in event["sentence"]


async def test_what_was_under_way_at_the_backup_is_not_done_again_by_a_restored_manager(
    tmp_path: Path, empty: Empty
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("web", "owed"):
            assert (await cluster.create(vm(name))).state is OperationState.DONE
        await cluster.stop_manager()
        store = Store(cluster.settings.database, time.time)
        await store.open()
        await store.add_plan(start_removal("delete-web-1", "gone", "web", "host-a"), "delete web")

        async def owe(connection: AsyncConnection) -> None:
            await connection.execute(update(schema.vms).where(schema.vms.c.name == "owed").values(owes_removal=1))

        await store._write(owe)
        await store.close()
        (file := tmp_path / "backup").touch(0o600)
        await asyncio.to_thread(back_up, cluster.settings.database, file)
        # Both were removed then, and have been made anew since: to the hosts they are VMs of these names.
        done = await restore(restored := empty(), file)
        assert [sentence.split(":")[0] for sentence in done.settled.ended] == ["web", "owed"]

        cluster.settings = replace(cluster.settings, database=restored)
        await cluster.start_manager()
        await cluster.ready()
        ended = await cluster.ended("gone")
        assert ended.state is OperationState.FAILED
        assert "what came of it is not known" in ended.sentence
        for name in ("web", "owed"):
            assert (await cluster.get(f"/v1/vms/{name}"))["state"] == "running"
        assert {event["vm"] for event in await cluster.events("restored")} == {"web", "owed", None}
        assert not [done for done in agent.done if done[0] in ("delete", "remove")]
        assert agent.running == {"web", "owed"}
        assert (await cluster.delete("web", "again")).state is OperationState.DONE
        assert agent.running == {"owed"}


async def test_a_vm_that_was_made_after_the_backup_is_put_back_on_the_record(tmp_path: Path, empty: Empty) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        await backup_of(cluster, file := tmp_path / "backup")
        assert (await cluster.create(vm("late", on_preemption="delete"))).state is OperationState.DONE
        await cluster.stop_manager()
        await restore(restored := empty(), file)
        cluster.settings = replace(cluster.settings, database=restored)
        await cluster.start_manager()
        await cluster.ready()
        assert (await cluster.call("GET", "/v1/vms/late"))[0] == 404

        assert (await cluster.get("/v1/adoptions?host=host-a&domain=late"))["known_as"] == "late"
        body = {"request_id": "back", "host": "host-a", "domain": "late"}
        assert (await cluster.call("POST", "/v1/adoptions", json=body))[0] == 202
        ended = await cluster.ended("back")
        assert ended.state is OperationState.DONE, ended.sentence
        row = await cluster.get("/v1/vms/late")
        assert (row["state"], row["host"], row["nominal"]["cpu_cores"], row["on_preemption"]) == (
            "running",
            "host-a",
            3.0,
            "stop",
        )
        status, problem = await cluster.call("POST", "/v1/adoptions", json={**body, "request_id": "again"})
        assert (status, "late exists already" in problem["detail"]) == (409, True)
        assert not [done for done in agent.done if done[0] == "adopt"], "its host is asked for nothing"
        assert (await cluster.delete("late")).state is OperationState.DONE
        assert agent.running == set()


async def test_managers_on_a_backup_that_is_used_twice_are_above_those_on_its_first_use(
    tmp_path: Path, empty: Empty
) -> None:
    now = time.time()

    def clock() -> float:
        return now

    store = Store(database := clusters.database_in(tmp_path), clock)
    await store.open()
    await store.close()
    (file := tmp_path / "backup").touch(0o600)
    await asyncio.to_thread(back_up, database, file)
    epochs = []
    for _ in range(3):
        now += 10 * EPOCH_S
        await restore(restored := empty(), file, clock)
        for _ in range(10):
            store = Store(restored, clock)
            epochs.append(await store.open())
            await store.close()
    assert epochs == sorted(set(epochs))


def test_a_host_follows_an_old_backup_and_one_from_the_future() -> None:
    assert rise(0.0) == rise(-1e9) == EPOCHS
    assert rise(86_400.0) > EPOCHS
    assert rise(1e12) == MOST_EPOCHS < MOST_STEP


@pytest.mark.parametrize("phase", VMPhase)
def test_no_phase_of_a_restored_vm_is_one_that_a_plan_would_have_to_end(phase: VMPhase) -> None:
    for on_a_host in (True, False):
        for waited in (True, False):
            after = settled_phase(phase, on_a_host, waited)
            assert after not in BUSY
            assert phase in BUSY or after is phase
    # Who was being deleted or stopped is not started again by the queue.
    assert settled_phase(VMPhase.DELETING, True, True) is settled_phase(VMPhase.STOPPING, True, True) is VMPhase.STOPPED
    assert settled_phase(VMPhase.STARTING, True, True) is VMPhase.PREEMPTED
    assert settled_phase(VMPhase.PLACING, False, False) is VMPhase.FAILED


async def test_a_backup_is_for_admins_and_one_is_made_at_a_time(tmp_path: Path, empty: Empty) -> None:
    async with cluster_of(tmp_path) as cluster:
        with pytest.raises(ManagerRefused, match="token"):
            await backup_of(cluster, tmp_path / "b", "nobody")
        assert cluster.manager is not None
        async with cluster.manager.backing_up:
            with pytest.raises(ManagerRefused, match="another backup is under way"):
                await backup_of(cluster, tmp_path / "b")
        assert await backup_of(cluster, tmp_path / "b") > 0
    assert not [name for name in os.listdir(tmp_path) if ".backup." in name]


async def test_what_a_killed_backup_or_restore_has_left_beside_a_store_is_gone_with_the_next_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "database_in", lambda directory: directory / "manager.sqlite")
    async with cluster_of(tmp_path) as cluster:
        assert cluster.manager is not None
        await cluster.stop_manager()
        names = (".manager.sqlite.backup.k1", ".manager.sqlite.backup.k1-journal", ".manager.sqlite.restored.k2")
        # Of another store's manager, which may be at work on it.
        other = tmp_path / ".other.sqlite.backup.k3"
        for name in (*names, other.name):
            (tmp_path / name).write_bytes(b"x")
        await cluster.start_manager()
        assert not [name for name in names if (tmp_path / name).exists()]
        assert other.exists()
        # One that is being sent while a term ends and the next begins.
        assert cluster.manager is not None
        await cluster.manager.end_term()
        async with cluster.manager.backing_up:
            (tmp_path / names[0]).write_bytes(b"x")
            await cluster.manager.begin_term()
            assert (tmp_path / names[0]).exists()


@pytest.mark.service
async def test_a_postgresql_store_is_restored_into_an_empty_database_only(tmp_path: Path, postgresql: Server) -> None:
    database = postgresql.new()
    store = Store(database, time.time)
    await store.open()
    await store.close()
    (file := tmp_path / "backup").touch(0o600)
    await asyncio.to_thread(back_up, database, file)
    with pytest.raises(StoreError, match="holds a store already"):
        await restore(database, file)
    with pytest.raises(StoreError, match="is a backup of a PostgreSQL store, but --database names a SQLite one"):
        await restore(tmp_path / "m.sqlite", file)
    with pytest.raises(StoreError, match="cannot use"):
        await restore(PostgreSQL("postgresql://nobody@127.0.0.1:1/none"), file)
    postgresql.drop(database)


@pytest.mark.service
async def test_of_several_hosts_the_one_that_can_be_written_to_is_backed_up_and_restored_to(
    tmp_path: Path, postgresql: Server
) -> None:
    stale = postgres.Cluster(*FORGETFUL)
    written, restored = postgresql.migrated(), postgresql.new()
    try:
        second = str(postgresql.cluster.directory)
        for database in (written, restored):
            first = PostgreSQL(database.url.replace(second, str(stale.directory)))
            name = database.url.split("/")[3].split("?")[0]
            stale.ask(f'CREATE DATABASE "{name}"')
            if database is written:
                store = Store(first, time.time)
                await store.open()
                await store.close()
            stale.ask(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        for _ in range(3):
            store = Store(written, time.time)
            assert await store.open() > 0
            await store.close()
        both = [replace(one, url=one.url.replace("host=", f"host={stale.directory},")) for one in (written, restored)]
        (file := tmp_path / "backup").touch(0o600)
        await asyncio.to_thread(back_up, both[0], file)
        assert (await restore(both[1], file)).settled.epoch == 3
        assert rows_of(restored, "SELECT count(*) FROM counters") == [(1,)]
    finally:
        stale.stop()
        postgresql.give_back(written)
        postgresql.drop(restored)


def test_a_backup_that_cannot_be_made_is_no_matter_of_room_where_it_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manager.sqlite"
    with pytest.raises(StoreError, match=r"^it cannot be made beside the store: No such file or directory$"):
        backup_route._made(path)
    with closing(sqlite3.connect(path)) as store:
        store.execute("CREATE TABLE vms (name TEXT)")
    # The log may go at any moment.
    monkeypatch.setattr(Path, "exists", lambda _: True)
    file, size = backup_route._made(path)
    with file:
        assert size == len(file.read()) > 0


def test_a_client_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "PROGRAM_S", 0.1)
    with pytest.raises(StoreError, match=r"sleep did not end within 0\.1 s"):
        backup.run(["sleep", "60"])


# --- the command, on files -------------------------------------------------------------------------------------------


def command(database: Path, file: Path | str) -> int:
    home = database.parent
    options = {"--token-file": home / "token", "--hosts-key-file": home / "key", "--database": database}
    return main(["restore", str(file), *(str(word) for pair in options.items() for word in pair)])


def next_epoch(said: str) -> int:
    found = re.search(r"the next manager has epoch (\d+)", said)
    assert found is not None, said
    return int(found[1])


def kinds(database: Path) -> set[str]:
    return {row[0] for row in rows_of(database, "SELECT kind FROM events")}


def test_the_store_of_before_is_kept_beside_the_restored_one(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(stored, stored.parent / "backup") == 0
    said = capsys.readouterr().out
    (aside,) = [path for path in stored.parent.glob("manager.sqlite.before-*") if "-wal" not in path.name]
    assert f"the store of before is kept as {aside}" in said
    first = next_epoch(said)
    assert EPOCHS + 2 <= first < EPOCHS + 100
    assert kinds(stored) == {"placed", "restored"}
    assert kinds(aside) == {"placed", "deleted"}
    for path in (stored, aside, stored.parent / "backup"):
        assert path.stat().st_mode & 0o777 == 0o600
    # The same once more: no other one is overwritten, and the epoch rises above that of the store in its place.
    assert command(stored, stored.parent / "backup") == 0
    assert len(set(stored.parent.glob("manager.sqlite.before-*"))) == 2
    assert EPOCHS <= next_epoch(capsys.readouterr().out) - first < EPOCHS + 100


def test_a_damaged_store_is_put_aside_with_its_log(stored: Path) -> None:
    stored.write_bytes(b"SQLite format 3\x00" + os.urandom(5000))
    Path(f"{stored}-wal").write_bytes(b"what was not written yet")
    assert command(stored, stored.parent / "backup") == 0
    assert kinds(stored) == {"placed", "restored"}
    assert not Path(f"{stored}-wal").exists()


def newer(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT INTO migrations (number) VALUES (99)")


def older(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("DELETE FROM migrations WHERE number = (SELECT max(number) FROM migrations)")


def strange(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE t (x)")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            newer,
            f"version 99 of the store, and this manager version {VERSION}: restore it with a later version of",
        ),
        (
            older,
            f"version {VERSION - 1} of the store, and this manager version {VERSION}: restore it with an earlier",
        ),
        (strange, "is no backup of a store"),
        (lambda file: file.write_text("words"), "is no backup of a store: neither a SQLite file nor a custom dump"),
        (lambda file: os.truncate(file, file.stat().st_size // 2), "is damaged"),
        (lambda file: file.unlink(), "cannot read the backup"),
        (lambda file: shutil.copy(file, f"{file}-wal"), "it is a database in use"),
        (
            lambda file: file.write_bytes(b"PGDMP"),
            "is a backup of a PostgreSQL store, but --database names a SQLite one",
        ),
    ],
)
def test_what_is_no_backup_of_this_version_is_refused_and_the_store_stays(
    stored: Path, change: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(file := stored.parent / "backup")
    assert command(stored, file) == 1
    assert said in capsys.readouterr().err
    assert kinds(stored) == {"placed", "deleted"}
    assert not list(stored.parent.glob("*.before-*")) + list(stored.parent.glob(".*restored*"))


def test_a_store_that_a_manager_uses_is_not_replaced(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FileLock(stored)

    async def held() -> None:
        await lock.hold()

    asyncio.run(held())
    try:
        assert command(stored, stored.parent / "backup") == 1
    finally:
        asyncio.run(lock.release())
    assert "another manager" in (said := capsys.readouterr().err)
    assert "stop it first" in said
    assert kinds(stored) == {"placed", "deleted"}


def test_restore_without_a_file_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", "--database", "m.sqlite"]) == 2
    assert "restore needs the FILE of a backup" in capsys.readouterr().err


# --- what a backup, or whoever owns the store's directory, must not bring about ---------------------------------------


async def test_who_was_revoked_since_the_backup_stays_so_and_no_invitation_counts_again(stored: Path) -> None:
    """Else a host that is lost would be heard again, and an invitation that a stranger has seen be good once more."""

    async def keep(revoked: tuple[str, ...], invited: str) -> None:
        store = Store(stored, time.time)
        await store.open()
        one = {"sha256": "0" * 64, "host": None, "expires_at": 1e12, "used_by": invited or None}
        kept = {"invitations": [one], "revoked": {host: [1.0, "lost"] for host in revoked}}
        await store.save_knowledge("enrolment", json.dumps(kept))
        await store.close()

    await keep(("host-a",), "")
    await asyncio.to_thread(back_up, stored, stored.parent / "backup")
    await keep(("host-b",), "host-c")
    done = await restore(stored, stored.parent / "backup")
    assert done.settled.revoked == ("host-a", "host-b")
    ((body,),) = rows_of(stored, "SELECT body FROM knowledge WHERE name = 'enrolment'")
    assert read_enrolled(body) == Enrolled(revoked={"host-a": (1.0, "lost"), "host-b": (1.0, "lost")})


@pytest.mark.service
@pytest.mark.parametrize("planted", ["manager.sqlite.lock", "manager.sqlite-wal", "manager.sqlite"])
async def test_root_who_restores_follows_no_link_that_the_managers_user_has_left(planted: str) -> None:
    """Else a manager that was taken over would be root on its machine as soon as somebody restores a backup."""
    nobody = 65534
    with TemporaryDirectory(prefix="ebb") as place:
        home = Path(place)
        os.chmod(home, 0o755)
        secret = home / "secret"
        write_private(secret, "root's\n" * 10)
        before = secret.stat()
        (made := home / "made").mkdir()
        store = Store(made / "manager.sqlite", time.time)
        await store.open()
        (home / "backup").touch(0o600)
        await asyncio.to_thread(back_up, made / "manager.sqlite", home / "backup")
        await store.close()
        made.rename(directory := home / "manager")
        for path in (directory, *directory.iterdir()):
            os.chown(path, nobody, nobody)
        (directory / planted).unlink(missing_ok=True)
        (directory / planted).symlink_to(secret)
        os.chown(directory / planted, nobody, nobody, follow_symlinks=False)
        with contextlib.suppress(StoreError):
            await restore(directory / "manager.sqlite", home / "backup")
        after = secret.stat()
        assert (after.st_uid, after.st_mode, after.st_nlink) == (before.st_uid, before.st_mode, before.st_nlink)
        assert secret.read_text() == "root's\n" * 10
        assert os.geteuid() == 0
        # Without the link it is restored, and belongs to who owns the directory.
        (directory / planted).unlink(missing_ok=True)
        await restore(directory / "manager.sqlite", home / "backup")
        assert {path.lstat().st_uid for path in directory.iterdir()} == {nobody}


@pytest.mark.service
@pytest.mark.parametrize("umask", [0o022, 0o077])
async def test_on_a_machine_where_no_manager_has_run_a_restore_makes_the_directory_of_its_service(
    stored: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    nobody = 65534
    with TemporaryDirectory(prefix="ebb") as place:
        os.chmod(place, 0o755)
        directory = Path(place) / "ebbtide/manager"
        monkeypatch.setattr(restoring, "SERVICE_DIRECTORY", directory)
        monkeypatch.setattr(privileges, "SERVICE_USER", "nobody")
        monkeypatch.setattr(privileges, "SYSTEMD", Path("/nowhere"))
        before = os.umask(umask)
        try:
            await restore(directory / "manager.sqlite", stored.parent / "backup")
        finally:
            os.umask(before)
        assert {path.stat().st_uid for path in (directory, *directory.iterdir())} == {nobody}
        assert directory.stat().st_mode & 0o777 == 0o700
        assert directory.parent.stat().st_mode & 0o001
        with pytest.raises(StoreError, match="there is no directory"):
            await restore(Path(place) / "srv/manager.sqlite", stored.parent / "backup")
