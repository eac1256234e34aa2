"""Who may open /dev/kvm: as udev would have it, and back; on a file that stands for the device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.lab import kvm_device
from ebbtide.lab.kvm_device import access_of, closed_to_guests, open_to_guests, restore


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group of the test stands for `kvm`: changing to a foreign one would need root."""
    monkeypatch.setattr(kvm_device, "_group", os.getgid)
    path = tmp_path / "kvm"
    path.touch(mode=0o600)
    return path


def test_a_closed_device_is_opened_as_udev_would_and_put_back(device: Path) -> None:
    assert closed_to_guests(device)
    before = open_to_guests(device)
    assert before is not None
    opened = access_of(device)
    assert opened is not None
    assert (opened.gid, opened.mode) == (os.getgid(), 0o660)
    assert not closed_to_guests(device)
    restore(before, device)
    assert access_of(device) == before


@pytest.mark.parametrize("mode", [0o660, 0o666])
def test_a_device_that_guests_can_open_is_left_alone(device: Path, mode: int) -> None:
    device.chmod(mode)
    assert open_to_guests(device) is None
    found = access_of(device)
    assert found is not None
    assert found.mode == mode


def test_a_machine_without_the_device_is_left_alone(tmp_path: Path) -> None:
    assert not closed_to_guests(tmp_path / "kvm")
    assert open_to_guests(tmp_path / "kvm") is None
