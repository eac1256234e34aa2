"""A domain whose guest has panicked and whose QEMU is kept (on_crash preserve): it holds all that it had."""

from __future__ import annotations

from pathlib import Path

import libvirt
import pytest

from hostagent.errors import HypervisorError
from hostagent.libvirt import disks
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from tests.hostagent.libvirt.test_disks import INTENT, VM
from tests.hostagent.libvirt_stand_in import StandIn


async def test_a_domain_that_is_kept_after_its_guests_panic_is_not_off_and_is_stopped_by_cutting_its_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "create_overlay", lambda _, directory: directory / "disk.qcow2")
    domains = StandIn(tmp_path)
    hypervisor = LibvirtHypervisor(LibvirtSettings("host-a", "", "qemu", tmp_path, tmp_path), lambda uri: domains)
    await hypervisor.create(VM, INTENT)
    domain = domains.lookupByName(VM)
    domain._state = libvirt.VIR_DOMAIN_CRASHED
    assert [found.state for found in await hypervisor.domains()] == ["paused"]
    assert (await hypervisor.survey())[VM].state == "paused"
    assert await hypervisor.shut_down(VM, 60.0) == "its power was cut: it was paused"
    assert not domain.isActive()
    with pytest.raises(HypervisorError, match="its domain is off"):
        await hypervisor.guest_channel(VM)
    await hypervisor.start(VM, INTENT)
    assert domain.isActive()
    assert await hypervisor.guest_channel(VM) is not None
    await hypervisor.close()
