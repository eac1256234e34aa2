"""What yields to the guests of a run is in a group of its own, and goes back to where it was started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import yielding


def test_the_group_that_a_process_was_started_in_is_that_of_the_cpu_controller() -> None:
    assert (
        yielding._started_in("9:name=systemd:/init\n2:cpu,cpuacct:/user.slice/a:b\n1:memory:/m\n") == "user.slice/a:b"
    )
    assert yielding._started_in("0::/init.scope\n") == ""


def test_a_process_goes_among_those_that_yield_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    for group in (run, home):
        group.mkdir()
    monkeypatch.setattr(yielding, "CONTROLLER", tmp_path)
    monkeypatch.setattr(yielding, "_STARTED_IN", "home")
    monkeypatch.setenv(yielding.VARIABLE, str(run))
    yielding.enter(True)
    assert (run / "cgroup.procs").read_text() == str(os.getpid())
    assert not (home / "cgroup.procs").exists()
    yielding.enter(False)
    assert (home / "cgroup.procs").read_text() == str(os.getpid())


def test_where_there_is_no_such_group_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(yielding.VARIABLE, raising=False)
    yielding.enter(True)
