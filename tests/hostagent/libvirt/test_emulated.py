"""VMs that were made while their host had no KVM, on a host that has it by now."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostagent.libvirt import disks
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY
from tests.hostagent.libvirt.test_disks import INTENT, VM
from tests.hostagent.libvirt_stand_in import StandIn


@pytest.mark.parametrize(("made_under", "overhead_mib"), [("qemu", 320.0), ("kvm", 160.0)])
async def test_while_a_vm_of_a_host_is_still_emulated_vms_cost_what_emulated_ones_do_and_move_by_command_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_under: str, overhead_mib: float
) -> None:
    monkeypatch.setattr(disks, "create_overlay", lambda _, directory: directory / "disk.qcow2")
    domains, uri = StandIn(tmp_path), "qemu+tls://host-a.example/system"
    settings = LibvirtSettings("host-a", uri, "kvm", tmp_path, tmp_path / "disks", migration_uri=uri)
    hypervisor = LibvirtHypervisor(settings, lambda uri: domains)
    await hypervisor.create(VM, INTENT)
    domains.lookupByName(VM)._root.set("type", made_under)
    part = Slice("host-a", "http://127.0.0.1:1", CAPACITY, "kvm", 160.0, emulated_overhead_mib=320.0)
    host = Host(part, hypervisor, Journal(tmp_path))
    agent = Agent(host, usable_boot_mib)
    await agent.start()
    try:
        report = host.report()
        assert (report.vm_overhead_mib, bool(report.moves_by_command_only)) == (overhead_mib, made_under == "qemu")
        assert {vm.allocation().overhead_mib for vm in host.vms.values()} == {overhead_mib}
    finally:
        await agent.close()
