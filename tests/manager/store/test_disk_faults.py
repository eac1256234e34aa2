"""Faults of the file under the store: no room, cut to nothing, known by two names."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_manager.errors import StoreError
from cluster_manager.leadership.locks import FileLock, Taken
from cluster_manager.store import backup
from cluster_manager.store.store import Store
from ebbtide.client import ManagerClient, ManagerRefused
from tests.manager.cluster import TOKEN, cluster_of
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.service
async def test_a_full_disk_under_the_store_is_said_to_clients_until_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.manager.cluster.database_in", lambda directory: directory / "manager.sqlite")
    async with cluster_of(small_disk, FakeAgent("host-a")) as cluster:
        url = cluster.url
        filler = small_disk / "filler"
        _fill(filler)

        requests = itertools.count()

        async def is_said() -> bool:
            # Until what is left of the log that SQLite writes ahead is full.
            spec = {"name": f"vm-{next(requests)}", "nominal": {"cpu_cores": 1000.0, "memory_mib": 1024.0}}
            body = {"request_id": spec["name"], "vm": spec}
            status, answer = await cluster.call("POST", "/v1/vms", json=body)
            return status == 503 and answer["detail"].startswith("the disk under the store is full")

        await until(is_said)

        async def is_said_to_the_command_line() -> bool:
            async with ManagerClient(url, TOKEN) as client:
                with pytest.raises(ManagerRefused) as refused:
                    await client.readiness()
            return "does not lead: the disk under the store is full" in str(refused.value)

        await until(is_said_to_the_command_line)
        filler.unlink()

        async def leads() -> bool:
            return (await cluster.call("GET", "/readyz"))[0] == 200

        await until(leads)


@pytest.mark.service
async def test_a_backup_is_refused_where_it_would_take_the_room_that_the_store_needs(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of the manager that finds no room ends its term."""
    monkeypatch.setattr("tests.manager.cluster.database_in", lambda directory: directory / "manager.sqlite")
    async with cluster_of(small_disk, FakeAgent("host-a")) as cluster:
        status, answer = await cluster.call("GET", "/v1/backup")
        assert status == 500
        assert re.match(
            r"no backup was made: no room for it beside the store: it takes up to 6\d MiB, 1 are free", answer["detail"]
        )
        monkeypatch.setattr(backup, "RESERVE", 0)
        async with ManagerClient(cluster.url, TOKEN) as client:
            with (small_disk / "backup").open("w+b") as file:
                assert await client.backup(file) > 0


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def _modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


async def test_one_database_has_one_manager_by_whatever_name_it_is_called(tmp_path: Path) -> None:
    database = tmp_path / "manager.sqlite"
    first = FileLock(database)
    await first.hold()
    (tmp_path / "elsewhere").mkdir()
    for name, make in (("link", os.symlink), ("hard", os.link)):
        other = tmp_path / "elsewhere" / name
        make(database, other)
        second = FileLock(other)
        with pytest.raises(Taken, match="another manager"):
            await second.hold()
    store = Store(database, time.time)
    # SQLite's own locks and ours do not meet.
    assert await store.open() == 1
    await store.close()
    await first.hold()
    await first.release()
    await second.hold()
    await second.release()


@pytest.fixture
def mounted_twice(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One directory by two paths, none of them a link."""
    places = tmp_path / "store", tmp_path / "elsewhere"
    for place in places:
        place.mkdir()
    subprocess.run(["mount", "--bind", *map(str, places)], check=True)
    yield places
    subprocess.run(["umount", str(places[1])], check=True)


@pytest.mark.service
async def test_a_database_has_one_manager_where_its_directory_is_mounted_twice(
    mounted_twice: tuple[Path, Path],
) -> None:
    first, second = (FileLock(place / "manager.sqlite") for place in mounted_twice)
    await first.hold()
    with pytest.raises(Taken, match="another manager"):
        await second.hold()
    await first.release()
    await second.hold()
    await second.release()


async def test_a_database_that_was_cut_to_nothing_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    database = tmp_path / "manager.sqlite"
    for cut, opens in ((False, True), (False, True), (True, False)):
        lock, store = FileLock(database), Store(database, time.time)
        await lock.hold()
        if cut:
            os.truncate(database, 0)
        if opens:
            await store.open()
        else:
            with pytest.raises(StoreError, match="is empty, but it has held a store: restore it from a backup"):
                await store.open()
            assert database.stat().st_size == 0
        await store.close()
        await lock.release()
    for name in _modes(tmp_path):
        os.unlink(tmp_path / name)
    lock, store = FileLock(database), Store(database, time.time)
    await lock.hold()
    assert await store.open() == 1
    await store.close()
    await lock.release()


async def test_a_manager_that_died_before_its_first_store_was_made_begins_anew(tmp_path: Path) -> None:
    database = tmp_path / "manager.sqlite"
    lock = FileLock(database)
    await lock.hold()
    await lock.release()
    assert database.stat().st_size == 0
    store = Store(database, time.time)
    await lock.hold()
    assert await store.open() == 1
    await store.close()
    await lock.release()


async def test_the_files_of_a_store_are_their_owners_only(tmp_path: Path) -> None:
    database = tmp_path / "manager.sqlite"
    database.touch(0o644)
    lock, store = FileLock(database), Store(database, time.time)
    await lock.hold()
    await store.open()
    assert await store.answers()
    found = _modes(tmp_path)
    assert set(found) == {f"manager.sqlite{end}" for end in ("", "-wal", "-shm", ".lock")}
    assert set(found.values()) == {0o600}
    await store.close()
    await lock.release()


@pytest.mark.parametrize("path", ["/dev/null", "fifo"])
async def test_what_is_no_file_is_no_database(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    place = tmp_path / path
    lock = FileLock(place)
    lock._path = tmp_path / "lock"
    with pytest.raises(StoreError, match="is no regular file"):
        await lock.hold()
