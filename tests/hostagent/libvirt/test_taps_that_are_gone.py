"""What limits a tap that has gone with its domain is removed, also where no command has ended the domain."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import libvirt
import pytest

from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.limits.tc import ALIAS, Tap
from tests.hostagent.libvirt.test_disks import INTENT, VM
from tests.hostagent.libvirt_stand_in import StandIn

TAP = Tap("ebb-no-such-tap")


@pytest.mark.parametrize("gone", [False, True], ids=["powered off", "moved away"])
async def test_an_ifb_device_goes_when_its_domain_has_ended_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    devices = {TAP.ifb}
    looks = 0

    def run(argv: Any, **_: Any) -> subprocess.CompletedProcess[bytes]:
        nonlocal looks
        if "show" in argv:
            looks += "ifb" in argv
        elif argv[:3] == ("ip", "link", "del"):
            devices.remove(argv[3])
        rows = [{"ifname": name, "ifalias": f"{ALIAS}{TAP.name}"} for name in devices]
        return subprocess.CompletedProcess(argv, 0, json.dumps(rows).encode(), b"")

    (tmp_path / "base.qcow2").touch()
    monkeypatch.setattr(subprocess, "run", run)
    domains = StandIn(tmp_path)
    settings = LibvirtSettings("host-a", "stand-in", "qemu", tmp_path, tmp_path / "disks")
    hypervisor = LibvirtHypervisor(settings, lambda uri: domains)
    await hypervisor.create(VM, INTENT)
    for _ in range(2):
        await hypervisor.survey()
    assert (devices, looks) == ({TAP.ifb}, 0), "it is not looked for as long as all go on"
    if gone:
        domains._domains.clear()
    else:
        domains._domains[VM]._state = libvirt.VIR_DOMAIN_SHUTOFF
    for _ in range(2):
        await hypervisor.survey()
    assert (devices, looks) == (set(), 1)
