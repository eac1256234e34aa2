"""libvirt's default network goes with the lab if it came with the lab's libvirtd, and stays if it was there before."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ebbtide.lab import kvm_device, processes, services
from ebbtide.lab.state import LabState, Process


class Machine:
    """One without systemd, whose libvirtd brings the bridge up."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bridge = directory / "virbr0"
        self.state = LabState()
        #: What stands in the lab's file.
        self.saved = LabState()
        self.interrupted = False
        self.running = set[int]()
        self._pids = itertools.count(1)
        monkeypatch.setattr(services, "SYSTEMD", directory / "systemd")
        monkeypatch.setattr(services, "BRIDGE", self.bridge)
        monkeypatch.setattr(services, "open_libvirt", lambda uri: self)
        monkeypatch.setattr(services.Service, "answers", lambda service: False)
        monkeypatch.setattr(services, "make_open_directory", lambda path: None)
        monkeypatch.setattr(services, "_program", lambda service: service.name)
        monkeypatch.setattr(services, "_await", self._await)
        monkeypatch.setattr(kvm_device, "open_to_guests", lambda: None)
        monkeypatch.setattr(processes, "start", self._start)
        monkeypatch.setattr(processes, "running", lambda process: process.pid in self.running)
        monkeypatch.setattr(processes, "stop", lambda ours: self.running.difference_update(one.pid for one in ours))

    def ensure(self) -> None:
        services.ensure_services(self.state, Path("/none"), self._save, lambda sentence: None)

    def stop(self, state: LabState) -> None:
        services.stop_services(state, lambda sentence: None)

    def _save(self) -> None:
        self.saved = self.state.model_copy(deep=True)

    def _start(self, name: str, argv: Any, log: Path) -> Process:
        process = Process(name=name, pid=next(self._pids))
        self.running.add(process.pid)
        return process

    def _await(self, service: services.Service, process: Process, log: Path) -> None:
        if service is services.LIBVIRTD:
            self.bridge.touch()
            if self.interrupted:
                raise KeyboardInterrupt

    # --- as libvirt, and as its network

    def listAllDomains(self) -> list[Any]:
        return []

    def listAllNetworks(self) -> list[Machine]:
        return [self]

    def name(self) -> str:
        return "default"

    def isActive(self) -> bool:
        return self.bridge.exists()

    def destroy(self) -> None:
        self.bridge.unlink()

    def close(self) -> None:
        pass


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("was_there", [False, True])
def test_a_network_that_came_with_the_labs_libvirtd_goes_with_it_though_that_was_started_again(
    machine: Machine, was_there: bool
) -> None:
    if was_there:
        machine.bridge.touch()
    machine.ensure()
    machine.running.clear()
    machine.ensure()
    assert machine.bridge.exists()
    machine.stop(machine.saved)
    assert machine.bridge.exists() is was_there


def test_a_network_that_came_up_before_ctrl_c_goes_with_the_lab(machine: Machine) -> None:
    machine.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        machine.ensure()
    machine.stop(machine.saved)
    assert not machine.bridge.exists()


def test_a_network_that_a_lab_of_an_earlier_version_has_started_goes_with_it(machine: Machine) -> None:
    machine.state.network_started = True
    machine.bridge.touch()
    machine.ensure()
    machine.stop(machine.saved)
    assert not machine.bridge.exists()
