"""What an adapter keeps for its next start: whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from app_adapters.errors import ApplicationError
from app_adapters.processes.state_file import StateFile


def test_what_was_saved_is_there_again_and_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "below" / "state.json"
    state = StateFile(str(path))
    assert state.load() is None
    state.save({"a": 1})
    state.save({"a": 2})
    assert StateFile(str(path)).load() == {"a": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["state.json"]
    state.remove()
    state.remove()
    assert state.load() is None


def test_what_an_earlier_version_left_elsewhere_is_found_and_goes_to_its_place_when_it_is_saved(tmp_path: Path) -> None:
    earlier, path = tmp_path / "run" / "state.json", tmp_path / "lib" / "state.json"
    for ends in ("saved", "removed"):
        StateFile(str(earlier)).save({"a": 1})
        state = StateFile(str(path), str(earlier))
        assert state.load() == {"a": 1}
        if ends == "saved":
            state.save({"a": 2})
            assert (earlier.exists(), state.load()) == (False, {"a": 2})
        state.remove()
        assert (earlier.exists(), state.load()) == (False, None)


def test_where_the_earlier_place_is_read_only_and_empty_the_state_is_saved_and_removed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only file system says so before it looks for the name."""
    earlier, unlink = str(tmp_path / "run" / "state.json"), os.unlink

    def read_only(path: str) -> None:
        if path == earlier:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path)

    monkeypatch.setattr(os, "unlink", read_only)
    state = StateFile(str(tmp_path / "state.json"), earlier)
    state.save({"a": 1})
    state.remove()
    assert state.load() is None


@pytest.mark.parametrize("call", ["lstat", "unlink"])
def test_what_cannot_be_looked_for_or_removed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It would be taken for what was there before, at the next start."""

    def fails(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    state = StateFile(str(tmp_path / "state.json"))
    state.save({"a": 1})
    with monkeypatch.context() as disk:
        disk.setattr(os, call, fails)
        with pytest.raises(ApplicationError, match=r"state\.json cannot be removed: Input/output error"):
            state.remove()
    assert state.load() == {"a": 1}


def test_a_save_that_fails_half_way_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateFile(str(tmp_path / "state.json"))
    state.save({"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ApplicationError, match="cannot be written: No space left"):
        state.save({"a": 2})
    assert state.load() == {"a": 1}
    monkeypatch.undo()
    state.save({"a": 3})  # what the failed one left is no obstacle
    assert state.load() == {"a": 3}


def test_a_link_in_its_place_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "state.json.new").symlink_to(tmp_path / "other")
    (tmp_path / "state.json").symlink_to(tmp_path / "other")
    state = StateFile(str(tmp_path / "state.json"))
    state.save({"a": 1})
    assert state.load() == {"a": 1}
    assert (tmp_path / "other").read_text() == "precious"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a":', "\udcff"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ApplicationError, match=r"state\.json is damaged"):
        StateFile(str(path)).load()


def test_a_directory_that_cannot_be_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ApplicationError, match="cannot be written"):
        StateFile(str(tmp_path / "file" / "state.json")).save({})
