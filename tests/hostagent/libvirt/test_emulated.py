"""VMs that were made while their host had no KVM, on a host that has it by now."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import libvirt
import pytest

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.commands import AdoptCommand, StartCommand
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.settings import AccessSettings
from hostagent import running
from hostagent.control import start_admission
from hostagent.errors import RequestRefused
from hostagent.libvirt import disks
from hostagent.libvirt.adopted import LibvirtAdoption
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.operations.agent import Agent
from hostagent.options import HostAgentOptions
from hostagent.state.intents import Phase
from tests.hostagent.conftest import low_vm
from tests.hostagent.libvirt.test_disks import INTENT, VM
from tests.hostagent.libvirt_stand_in import StandIn

EMULATED = "ebb-host-a.low-2"
#: Room for both of 1024 MiB with 160 MiB each, and for less than the 320 MiB of an emulated one.
CAPACITY_MIB = 2 * (1024 + 160) + 100


@pytest.fixture
def domains(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


@pytest.fixture
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domains: StandIn) -> AsyncIterator[Agent]:
    """One VM runs under KVM; the agent is not started."""
    monkeypatch.setattr(disks, "create_overlay", lambda _, directory: directory / "disk.qcow2")
    monkeypatch.setattr(running, "LibvirtHypervisor", lambda settings: LibvirtHypervisor(settings, lambda uri: domains))
    options = HostAgentOptions(
        id="host-a",
        capacity=f"cpu_cores=6,memory_mib={CAPACITY_MIB}",
        token_file=tmp_path / "token",
        state_dir=tmp_path,
        disk_dir=tmp_path / "disks",
        accelerator="kvm",
        migration_uri="qemu+tls://host-a.example/system",
    )
    made = await running._agent(options, AccessSettings())
    made.host.memory_available_mib = lambda: 1e6
    await made.host.hypervisor.create(VM, INTENT)
    yield made
    await made.close()


async def add_emulated(agent: Agent, domains: StandIn, phase: Phase) -> None:
    intent = INTENT.changed(spec=VMSpec.model_validate(low_vm("low-2")), phase=phase)
    await agent.host.hypervisor.create(EMULATED, intent)
    domain = domains.lookupByName(EMULATED)
    domain._root.set("type", "qemu")
    if phase is Phase.STOPPED:
        domain.destroyFlags(0)


async def test_of_a_hosts_vms_only_the_emulated_one_costs_what_such_do_and_while_it_is_on_none_moves_by_itself(
    agent: Agent, domains: StandIn
) -> None:
    await add_emulated(agent, domains, Phase.CREATING)
    await agent.start()
    report = agent.host.report()
    assert {vm.name: vm.overhead_mib for vm in report.vms} == {"low-1": 160.0, "low-2": 320.0}
    assert report.vm_overhead_mib == 160.0, "new VMs run under KVM"
    assert report.moves_by_command_only


async def test_an_emulated_vm_that_is_off_changes_no_other_and_its_start_is_admitted_with_what_it_costs(
    agent: Agent, domains: StandIn
) -> None:
    await add_emulated(agent, domains, Phase.STOPPED)
    await agent.start()
    host, off = agent.host, agent.host.vms["low-2"]
    report = host.report()
    assert {vm.name: vm.overhead_mib for vm in report.vms} == {"low-1": 160.0, "low-2": 0.0}
    assert report.overcommitted.vector() == ResourceVector()
    assert not report.moves_by_command_only
    assert report.vm_overhead_mib == 160.0, "new VMs run under KVM"
    told = {vm.name: vm.start_overhead_mib for vm in report.vms}
    assert told == {"low-1": None, "low-2": 320.0}, "the manager makes that much room for its start"
    with pytest.raises(RequestRefused, match="needs more than what is free"):
        await agent.lifecycle.start("low-2", StartCommand(request_id="start"))
    domains.lookupByName(EMULATED).createWithFlags(0)
    await host.hypervisor.survey()
    assert host.report().moves_by_command_only
    assert not await start_admission._charged(host, off), "as little where another program has started it"


@pytest.mark.parametrize(("kind", "overhead_mib"), [("qemu", 320.0), ("kvm", 160.0)])
async def test_an_adopted_domain_costs_what_its_own_type_does(
    agent: Agent, domains: StandIn, monkeypatch: pytest.MonkeyPatch, kind: str, overhead_mib: float
) -> None:
    async def take_over(self: LibvirtAdoption, domain: str, intent: object) -> None:
        pass

    monkeypatch.setattr(LibvirtAdoption, "take_over", take_over)
    domain = domains.lookupByName(VM)
    domains._domains = {"old-web": domain}
    domain._name, domain._state = "old-web", libvirt.VIR_DOMAIN_RUNNING
    domain._root.set("type", kind)
    for metadata in domain._root.findall("metadata"):
        domain._root.remove(metadata)
    await agent.start()
    part = agent.host.slice
    agent.host.slice = replace(part, capacity=ResourceVector(cpu_cores=6.0, memory_mib=1024.0 + overhead_mib - 1))
    with pytest.raises(RequestRefused, match="does not fit into what the slice has left"):
        await agent.adoptions.adopt(AdoptCommand(request_id="tight", domain="old-web", name="web"))
    agent.host.slice = part
    await agent.adoptions.adopt(AdoptCommand(request_id="adopt", domain="old-web", name="web"))
    assert agent.host.vms["web"].allocation().overhead_mib == overhead_mib
