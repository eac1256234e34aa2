"""The names of adopted domains outlive the agent, and what cannot be read is not taken for none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostagent.errors import HypervisorError
from hostagent.libvirt.adopted import AdoptedDomains


def test_names_are_on_the_disk_before_they_take_the_place_of_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "adopted.json", []
    sync = os.fsync

    def noted(file: int) -> None:
        sync(file)
        written.append((Path(f"/proc/self/fd/{file}").resolve().name, path.exists()))

    monkeypatch.setattr(os, "fsync", noted)
    AdoptedDomains(path).add("web")
    assert written == [("adopted.new", False)]
    assert AdoptedDomains(path).names() == {"web"}


def test_a_file_that_cannot_be_read_is_an_error_and_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "adopted.json"
    path.write_text("")
    with pytest.raises(HypervisorError, match="cannot be read"):
        AdoptedDomains(path).names()
    with pytest.raises(HypervisorError, match="cannot be read"):
        AdoptedDomains(path).add("web")
    assert path.read_text() == ""
