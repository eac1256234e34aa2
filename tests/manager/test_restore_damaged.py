"""A restore in the place of a store that is damaged, or where none is: what is lost by that is said."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cluster_manager.store.engines import lock_path, mark_file
from cluster_manager.store.enrolled import Enrolled
from tests.manager.test_backup import command, kinds

pytestmark = pytest.mark.usefixtures("logging_as_before")

UNREAD = "no store of before was read: revoke again who was revoked since the backup\n"


def without_enrolment(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("INSERT OR REPLACE INTO knowledge VALUES ('enrolment', 0, 'junk')")


def cut(store: Path) -> None:
    """To nothing; that it has held a store is noted beside it."""
    lock_path(store).touch()
    mark_file(store)
    os.truncate(store, 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: store.write_bytes(b"junk"),
        without_enrolment,
        cut,
        # As on a new machine.
        Path.unlink,
        lambda store: store.write_bytes(b""),
    ],
)
def test_that_later_revocations_are_lost_is_said_where_the_store_of_before_is_damaged_or_not_there(
    stored: Path, damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(stored)
    assert command(stored, stored.parent / "backup") == 0
    assert UNREAD in capsys.readouterr().out


def test_nothing_is_said_to_be_lost_where_the_store_of_before_is_whole(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(stored, stored.parent / "backup") == 0
    assert UNREAD not in capsys.readouterr().out


def test_who_was_revoked_stays_so_also_where_the_epoch_of_the_store_of_before_cannot_be_read(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = Enrolled(revoked={"host-b": (1.0, "lost")}).model_dump_json()
    with closing(sqlite3.connect(stored)) as connection, connection:
        connection.execute("DROP TABLE counters")
        connection.execute("INSERT OR REPLACE INTO knowledge VALUES ('enrolment', 0, ?)", (body,))
    assert command(stored, stored.parent / "backup") == 0
    said = capsys.readouterr().out
    assert ("revoked hosts: host-b;" in said, UNREAD in said) == (True, False)


@pytest.mark.parametrize("damage", [cut, lambda store: os.truncate(store, 0)], ids=["noted", "not noted"])
def test_the_log_of_a_store_that_was_cut_to_nothing_is_put_aside_and_not_left_to_the_restored_one(
    stored: Path, damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    log, found = Path(f"{stored}-wal"), stored.parent / "log"
    with closing(sqlite3.connect(stored)) as connection:
        connection.execute("UPDATE events SET kind = 'in the log'")
        connection.commit()
        shutil.copy(log, found)
    damage(stored)
    shutil.copy(found, log)
    assert command(stored, stored.parent / "backup") == 0
    assert kinds(stored) == {"placed", "restored"}
    (aside,) = stored.parent.glob("manager.sqlite.before-*")
    assert aside.read_bytes() == found.read_bytes()
    assert f"the store of before is empty; its log is kept as {aside}\n" in capsys.readouterr().out


def test_where_no_second_name_can_be_given_to_the_store_of_before_nothing_has_changed(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some file systems have no hard links. What a damaged store has in its log is nowhere else."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    stored.write_bytes(b"junk" * 2000)
    Path(f"{stored}-wal").write_bytes(b"what was not written yet")
    before = {path.name for path in stored.parent.iterdir()}
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert command(stored, stored.parent / "backup") == 1
    assert "cannot restore" in capsys.readouterr().err
    assert before <= {path.name for path in stored.parent.iterdir()}
    assert not list(stored.parent.glob("*.before-*"))
    monkeypatch.undo()
    rename = Path.rename

    def no_room(path: Path, to: object) -> Path:
        if path.name.endswith("-wal"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, str(to))

    monkeypatch.setattr(Path, "rename", no_room)
    assert command(stored, stored.parent / "backup") == 1
    assert before <= {path.name for path in stored.parent.iterdir()}
    assert not list(stored.parent.glob("*.before-*"))
