"""Gives `/dev/kvm` the group and mode that udev would, where no udev runs, and puts them back.

Where libvirt's QEMU user cannot open the device although libvirtd can, libvirt throws away what it knows of QEMU and
probes it again at every definition and start of a domain: seconds each, minutes on some machines
(docs/internals/decisions.md).
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

from pydantic import BaseModel, ConfigDict

KVM = Path("/dev/kvm")
#: What udev's own rules say (50-udev-default.rules).
GROUP = "kvm"
MODE = 0o660


class DeviceAccess(BaseModel):
    """Who may open the device."""

    model_config = ConfigDict(frozen=True)

    uid: int
    gid: int
    mode: int


def closed_to_guests(device: Path = KVM) -> bool:
    """Whether the device is there, but the group that libvirt's QEMU user belongs to cannot open it."""
    found, group = access_of(device), _group()
    if found is None or group is None:
        return False
    return not (found.mode & 0o006 == 0o006 or (found.gid == group and found.mode & 0o060 == 0o060))


def open_to_guests(device: Path = KVM) -> DeviceAccess | None:
    """Set group and mode. Returns what stood there before, for `restore`; None if nothing had to be done."""
    before, group = access_of(device), _group()
    if before is None or group is None or not closed_to_guests(device):
        return None
    os.chown(device, -1, group)
    device.chmod(MODE)
    return before


def restore(before: DeviceAccess, device: Path = KVM) -> None:
    """Put back what `open_to_guests` found."""
    if access_of(device) is not None:
        os.chown(device, before.uid, before.gid)
        device.chmod(before.mode)


def access_of(device: Path) -> DeviceAccess | None:
    """None if there is no such device."""
    try:
        found = device.stat()
    except OSError:
        return None
    return DeviceAccess(uid=found.st_uid, gid=found.st_gid, mode=stat.S_IMODE(found.st_mode))


def _group() -> int | None:
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None
