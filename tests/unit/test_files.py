from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.files import replacing


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_that_could_not_be_written_leaves_what_was_there_and_nothing_beside_it(
    durable: bool, tmp_path: Path
) -> None:
    path = tmp_path / "kept"
    path.write_text("before")

    def broken_off() -> None:
        with replacing(path, durable=durable) as file:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        broken_off()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("kept", "before")]
    with replacing(path, durable=durable) as file:
        file.write(b"whole")
        assert path.read_text() == "before"
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("kept", "whole")]


def test_a_replaced_file_is_for_its_owner_alone_or_as_the_umask_lets_it_be(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for name, mode in (("private", 0o600), ("shared", 0o666)):
            with replacing(tmp_path / name, mode):
                pass
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "shared")] == [0o600, 0o640]
