"""Records of tasks: kept while the store knows the task, removed when it has forgotten it."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from cluster_manager.defaults import DAY_S
from cluster_manager.store.database import Database
from cluster_manager.store.store import Store
from cluster_manager.store.tasks import TaskNote
from cluster_manager.tasks.old_records import OldRecords
from ebbtide.matcher.engines.records import CLAIM, END, OUTPUT, Records
from ebbtide.matcher.match.tasks import Task, TaskOrder
from tests.manager.fake_engine import SETTINGS

NOW = 200 * DAY_S


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    made = Store(database, lambda: NOW)
    await made.open()
    yield made
    await made.close()


async def attempt(directory: Path, task: str, key: str, age_days: float, label: str = SETTINGS.label) -> str:
    name = f"{label}.{task}.{key}.1"
    await Records(directory).prepare(name)
    await Records(directory).tell(name, "preempted soon")
    Records(directory).held_path(name).touch()
    (directory / name / OUTPUT).write_text("what it printed")
    at = NOW - age_days * DAY_S
    os.utime(directory / name, (at, at))
    return name


def removal(store: Store, directory: Path | None) -> OldRecords:
    return OldRecords(store, SETTINGS.model_copy(update={"directory": directory}), 90 * DAY_S, lambda: NOW)


async def test_only_what_is_old_and_of_tasks_that_the_store_has_forgotten_is_removed(
    store: Store, tmp_path: Path
) -> None:
    directory, precious = tmp_path / "tasks", tmp_path / "precious"
    directory.mkdir()
    precious.write_text("not the task's")
    known = Task(TaskOrder("known", ("true",)), "ab1", 0.0)
    await store.add_task(known, "request", "", TaskNote("task-submitted", None, "submitted"))
    kept = [
        await attempt(directory, "known", "ab1", 100),
        await attempt(directory, "young", "ab1", 80),
        await attempt(directory, "forgotten", "ab1", 100, label="other"),
    ]
    forgotten = await attempt(directory, "forgotten", "ab1", 100)
    (directory / forgotten / "link").symlink_to(precious)
    os.utime(directory / forgotten, (0, 0))
    await attempt(directory, "known", "ab0", 100)  # a task that had the name before
    (directory / "held").mkdir()
    assert await removal(store, directory).remove() == 2
    beside = {f"{name}.{kind}" for name in kept for kind in ("told", "held")}
    assert {path.name for path in directory.iterdir()} == {"held", *kept, *beside}
    assert precious.read_text() == "not the task's"
    assert await removal(store, directory).remove() == 0


async def test_an_attempt_that_is_at_work_stays_whatever_the_store_knows(store: Store, tmp_path: Path) -> None:
    running = await attempt(tmp_path, "unknown", "ab1", 100)
    (tmp_path / running / CLAIM).write_text("begun 1.0 n1\n")
    os.utime(tmp_path / running, (0, 0))
    assert await removal(store, tmp_path).remove() == 0
    (tmp_path / running / END).write_text("0 2.0\n")
    os.utime(tmp_path / running, (0, 0))
    assert await removal(store, tmp_path).remove() == 1


async def test_a_directory_that_is_away_is_tried_again_and_none_is_none(store: Store, tmp_path: Path) -> None:
    assert await removal(store, None).remove() == 0
    with structlog.testing.capture_logs() as logs:
        assert await removal(store, tmp_path / "away").remove() == 0
    assert [(log["event"], log["log_level"]) for log in logs] == [("records of old tasks were not removed", "warning")]


async def test_an_attempt_whose_records_cannot_be_removed_keeps_no_other(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [await attempt(tmp_path, f"old-{number}", "ab1", 100) for number in range(3)]
    remove = Records._remove

    def fails(records: Records, name: str) -> None:
        if name == names[1]:
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(records, name)

    monkeypatch.setattr(Records, "_remove", fails)
    with structlog.testing.capture_logs() as logs:
        assert await removal(store, tmp_path).remove() == 2
    assert [log["attempt"] for log in logs if log["log_level"] == "warning"] == [names[1]]
    assert [name for name in names if name in os.listdir(tmp_path)] == [names[1]]
