"""A definition holds disks and interfaces to the size at which its domain is to start, however it comes up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import libvirt
import pytest

from ebbtide.deflation.resources import ResourceVector
from hostagent.libvirt import disks
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.limits.bandwidth import GROUP
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.conftest import Command, low_vm
from tests.hostagent.libvirt_stand_in import StandIn, StandInDomain
from tests.waiting import until

CONFIG = libvirt.VIR_DOMAIN_AFFECT_CONFIG
MIB = 1 << 20
DISKS = "<disk device='disk'><source/><target dev='vda'/></disk><disk device='disk'><target dev='vdb'/></disk>"
DRIVE = "<disk device='cdrom'><target dev='sda'/></disk>"
PASSED = "<disk device='lun'><source/><target dev='vdc'/></disk>"
OURS = "<bandwidth><inbound average='1048'/><outbound average='1048'/></bandwidth>"
THEIRS = "<bandwidth><inbound average='9' peak='9'/></bandwidth>"


class Defined:
    """A domain that is off, and what is written into its definition."""

    def __init__(self, devices: str) -> None:
        self._devices = devices
        self.tuned: dict[str, dict[str, Any]] = {}
        self.averages: dict[str, dict[str, int]] = {}

    def isPersistent(self) -> bool:
        return True

    def XMLDesc(self, flags: int = 0) -> str:
        return f"<domain type='kvm'><vcpu>2</vcpu><devices>{self._devices}</devices></domain>"

    def schedulerParametersFlags(self, flag: int) -> dict[str, int]:
        return {}

    def setSchedulerParametersFlags(self, parameters: dict[str, int], flag: int) -> None:
        assert flag == CONFIG

    def setBlockIoTune(self, disk: str, parameters: dict[str, Any], flag: int) -> None:
        assert flag == CONFIG
        self.tuned[disk] = parameters

    def setInterfaceParameters(self, mac: str, parameters: dict[str, int], flag: int) -> None:
        assert flag == CONFIG
        self.averages[mac] = parameters


def interface(mac: str, limit: str, kind: str = "ethernet") -> str:
    return f"<interface type='{kind}'><mac address='{mac}'/>{limit}</interface>"


async def prepared(tmp_path: Path, devices: str, disk_mib_s: float, network_mib_s: float) -> Defined:
    domain, connection = Defined(devices), StandIn(tmp_path)
    connection._domains["web"] = cast(StandInDomain, domain)
    settings = LibvirtSettings("a", "stand-in", "kvm", tmp_path, tmp_path)
    hypervisor = LibvirtHypervisor(settings, lambda uri: connection)
    await hypervisor.prepare_start("web", ResourceVector(2.0, 1024.0, disk_mib_s, network_mib_s))
    await hypervisor.close()
    return domain


@pytest.mark.parametrize(("disk_mib_s", "held_mib_s"), [(40.5, 40.5), (0.25, 1.0)])
async def test_all_disks_of_a_definition_are_held_together_to_the_size_at_which_it_starts(
    tmp_path: Path, disk_mib_s: float, held_mib_s: float
) -> None:
    domain = await prepared(tmp_path, DISKS + DRIVE, disk_mib_s, 0.0)
    limit = {"group_name": GROUP, "total_bytes_sec": held_mib_s * MIB, "total_iops_sec": held_mib_s * 64}
    assert domain.tuned == {"vda": limit, "vdb": limit}


async def test_a_limit_of_ours_on_an_interface_follows_the_size_and_no_other_interface_gets_one(
    tmp_path: Path,
) -> None:
    devices = interface("mac0", OURS) + interface("mac1", "") + interface("mac2", THEIRS)
    domain = await prepared(tmp_path, devices, 0.0, 60.0)
    average = 20 * MIB // 1000
    assert domain.averages == {"mac0": {"inbound.average": average, "outbound.average": average}}


@pytest.mark.parametrize(
    ("devices", "bandwidth"),
    [
        (DISKS + interface("mac0", OURS), 0.0),
        (DISKS + PASSED, 40.0),
        (interface("mac0", OURS) + interface("mac1", "", "user"), 40.0),
    ],
    ids=["it is sold none, as an adopted one", "a disk cannot be limited", "an interface cannot be limited"],
)
async def test_a_definition_whose_bandwidth_is_not_ours_to_hold_is_left_as_it_is(
    tmp_path: Path, devices: str, bandwidth: float
) -> None:
    domain = await prepared(tmp_path, devices, bandwidth, bandwidth)
    assert (domain.tuned, domain.averages) == ({}, {})


@pytest.fixture
def libvirt_here(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


@pytest.fixture
async def agent(libvirt_here: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    """A host that hands out disk, over the stand-in for libvirt."""
    monkeypatch.setattr(disks, "create_overlay", lambda base, directory: directory / "disk.qcow2")
    part = Slice("host-a", "http://127.0.0.1:1", ResourceVector(6.0, 4000.0, 100.0), "qemu", 320.0)
    hypervisor = LibvirtHypervisor(
        LibvirtSettings("host-a", "stand-in", "qemu", tmp_path, tmp_path), lambda uri: libvirt_here
    )
    made = Agent(Host(part, hypervisor, Journal(tmp_path), lambda: 1e6), usable_boot_mib)
    await made.start()
    yield made
    await made.close()


async def test_mode_off_gives_a_stopped_vm_its_disk_back_in_its_definition(
    command: Command, libvirt_here: StandIn
) -> None:
    size = {"cpu_cores": 3.0, "memory_mib": 1024.0}
    vm = low_vm("low-1", nominal=size | {"disk_mib_s": 80.0})
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": vm})).state == "done"
    body = {"request_id": "t", "generation": 2, "target": size | {"disk_mib_s": 30.0}}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    defined = libvirt_here._domains["ebb-host-a.low-1"]._tuned[CONFIG]
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 0.0})).state == "done"
    assert defined["total_bytes_sec"] == 30 * MIB
    await command("PUT", "/v1/mode", {"request_id": "m", "mode": "off"})
    await until(lambda: defined["total_bytes_sec"] == 80 * MIB)
