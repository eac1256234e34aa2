"""VMs that were made while their host had no KVM, on a host that has it by now."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.rest.settings import AccessSettings
from hostagent import running
from hostagent.libvirt import disks
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.options import HostAgentOptions
from tests.hostagent.libvirt.test_disks import INTENT, VM
from tests.hostagent.libvirt_stand_in import StandIn


@pytest.mark.parametrize(("made_under", "overhead_mib"), [("qemu", 320.0), ("kvm", 160.0)])
async def test_while_a_vm_of_a_host_is_still_emulated_vms_cost_what_emulated_ones_do_and_move_by_command_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_under: str, overhead_mib: float
) -> None:
    monkeypatch.setattr(disks, "create_overlay", lambda _, directory: directory / "disk.qcow2")
    domains = StandIn(tmp_path)
    monkeypatch.setattr(running, "LibvirtHypervisor", lambda settings: LibvirtHypervisor(settings, lambda uri: domains))
    options = HostAgentOptions(
        id="host-a",
        capacity="cpu_cores=6,memory_mib=3600",
        token_file=tmp_path / "token",
        state_dir=tmp_path,
        disk_dir=tmp_path / "disks",
        accelerator="kvm",
        migration_uri="qemu+tls://host-a.example/system",
    )
    agent = await running._agent(options, AccessSettings())
    host = agent.host
    await host.hypervisor.create(VM, INTENT)
    domains.lookupByName(VM)._root.set("type", made_under)
    await agent.start()
    try:
        report = host.report()
        assert (report.vm_overhead_mib, bool(report.moves_by_command_only)) == (overhead_mib, made_under == "qemu")
        assert {vm.allocation().overhead_mib for vm in host.vms.values()} == {overhead_mib}
    finally:
        await agent.close()
