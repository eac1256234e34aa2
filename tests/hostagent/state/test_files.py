"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostagent.state.files import replace


def test_a_file_that_could_not_be_written_leaves_nothing_beside_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        beside.update(path.name for path in tmp_path.iterdir())
        raise OSError(28, "No space left on device")

    replace(tmp_path / "host.key", "old")
    beside: set[str] = set()
    monkeypatch.setattr(os, "fsync", full)
    for name in ("host.key", "host.pem"):
        with pytest.raises(OSError, match="No space left"):
            replace(tmp_path / name, "new")
    assert beside == {"host.key", "host.key.new", "host.pem.new"}, "no two files share what they are written to"
    assert [path.name for path in tmp_path.iterdir()] == ["host.key"]
    assert (tmp_path / "host.key").read_text() == "old"
