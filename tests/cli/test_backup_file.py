"""Where `ebb backup` puts what the manager sends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import typer

from ebbtide.cli.commands.cluster import backup
from ebbtide.cli.commands.options import Asking
from ebbtide.errors import EbbError


class _Client:
    async def backup(self, opened: Any) -> int:
        return int(opened.write(b"whole"))


class Told(Asking):
    """Conversations with a manager that has a backup to send."""

    def ask(self, question: Any) -> Any:
        return asyncio.run(question(_Client()))


@pytest.mark.parametrize("by_link", [False, True])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, by_link: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(EbbError, match="is no regular file"):
        backup(tmp_path / ("link" if by_link else "pipe"), to=Told())
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_to_a_file_goes_on_pointing_there(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    file, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    link.symlink_to(file)
    if is_there:
        file.write_text("before")
    backup(link, to=Told())
    assert link.is_symlink()
    assert file.read_text() == "whole"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_backup_does_not_go_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match="give a file"):
        backup(Path("-"), to=Told())
    assert list(tmp_path.iterdir()) == []


def test_a_backup_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    class Terminated(Asking):
        def ask(self, question: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            backup(tmp_path / "file", to=Terminated())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []
