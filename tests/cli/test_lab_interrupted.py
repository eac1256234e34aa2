"""A start of the lab that is broken off leaves no process that the lab's file does not know."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ebbtide.lab import cluster, domains, processes, services
from ebbtide.lab.cluster import HostSlice, Lab
from ebbtide.lab.image import Image
from ebbtide.lab.state import Daemon, LabState, Process, StateFile
from ebbtide.messages.common import Vector
from hostagent.mechanisms.accelerator import Accelerator

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    """What is started in place of daemons; the first note of one in the lab's file is broken off by Ctrl-C."""
    begun = list[Process]()
    start, save = processes.start, StateFile.save

    def begin(name: str, argv: Any, log: Path) -> Process:
        begun.append(start(name, SLEEPER, log))
        return begun[-1]

    def interrupted(file: StateFile, state: LabState) -> None:
        if begun:
            monkeypatch.setattr(StateFile, "save", save)
            raise KeyboardInterrupt
        save(file, state)

    image = Image("key", tmp_path / "base", tmp_path / "kernel", tmp_path / "initrd", 1.0)
    for place, name, value in (
        (cluster, "build_image", lambda *_, **__: image),
        (cluster, "probe_accelerator", lambda *_: Accelerator("qemu", "it is a test", datetime.now(UTC), False)),
        (cluster, "program", lambda name: name),
        (services, "ensure_services", lambda *_: None),
        (services.Service, "answers", lambda service: True),
        (domains, "domains_of", lambda *_: []),
        (domains, "adopted_by", lambda *_: []),
        (domains, "remove_domains", lambda *_: []),
        (domains, "remove_logs", lambda hosts: None),
        (processes, "start", begin),
        (StateFile, "save", interrupted),
    ):
        monkeypatch.setattr(place, name, value)
    yield begun
    processes.stop(begun)


def up(lab: Lab) -> None:
    lab.up([HostSlice("host-a", Vector(cpu_cores=1, memory_mib=512).vector())])


def resumed(lab: Lab) -> None:
    lab.up()


def one_daemon(lab: Lab) -> None:
    lab.start_daemon("manager")


def test_ctrl_c_before_a_daemon_is_noted_leaves_neither_it_nor_the_lab(tmp_path: Path, started: list[Process]) -> None:
    lab = Lab(tmp_path / "lab")
    with pytest.raises(KeyboardInterrupt):
        up(lab)
    assert [process.name for process in started] == ["manager"]
    assert not processes.running(started[0])
    assert not lab.directory.exists()


@pytest.mark.parametrize("again", [resumed, one_daemon])
def test_ctrl_c_before_a_daemon_that_was_started_again_is_noted_ends_it_and_leaves_the_lab(
    tmp_path: Path, started: list[Process], again: Callable[[Lab], None]
) -> None:
    lab = Lab(tmp_path / "lab")
    lab.directory.mkdir()
    known = LabState(phase="up", daemons=[Daemon(name="manager", argv=SLEEPER, log=tmp_path / "log")])
    lab.file.save(known)
    with pytest.raises(KeyboardInterrupt):
        again(lab)
    assert [process.name for process in started] == ["manager"]
    assert not processes.running(started[0])
    assert lab.state() == known
