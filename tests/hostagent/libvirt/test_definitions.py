"""Definitions that are made again: what a VM is not sold any more is not in them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import XML_TEMPLATE, VMSpec
from hostagent.libvirt.definitions import Definitions
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.state.intents import ELEMENT, NAMESPACE, Intent, Phase

OURS = "<iotune><total_bytes_sec>52428800</total_bytes_sec><group_name>ebbtide</group_name></iotune>"
OWN = "<iotune><total_bytes_sec>52428800</total_bytes_sec></iotune>"
EVEN = "<bandwidth><inbound average='10485'/><outbound average='10485'/></bandwidth>"
UNEVEN = "<bandwidth><inbound average='10485'/><outbound average='99'/></bandwidth>"
PEAK = "<bandwidth><inbound average='9' peak='9'/><outbound average='9' peak='9'/></bandwidth>"
ONE_WAY = "<bandwidth><inbound average='10485'/></bandwidth>"


async def again(tmp_path: Path, disk: str, network: str, **nominal: float) -> ElementTree.Element:
    """The definition of a VM made from XML, with limits on a disk and an interface, that is sold ``nominal``."""
    settings = LibvirtSettings(
        host_id="host-a",
        uri="test:///default",
        accelerator="qemu",
        image_dir=tmp_path,
        disk_dir=tmp_path,
    )
    size = Vector(cpu_cores=1.0, memory_mib=512.0, **nominal)
    spec = VMSpec(name="web", priority=Priority.DEFLATABLE, nominal=size, template=XML_TEMPLATE)
    intent = Intent(owner="host-a", spec=spec, boot_mib=256.0, phase=Phase.STOPPED, target=size, committed=size)
    present = (
        "<domain type='qemu'><uuid>6f7c5a3e-4a2e-4d0b-9b6f-0d1c2b3a4f5e</uuid><devices>"
        f"<disk type='file' device='disk'><source file='/a'/>{disk}<target dev='vda'/></disk>"
        f"<interface type='network'><mac address='52:54:00:00:00:01'/>{network}</interface></devices></domain>"
    )
    return ElementTree.fromstring(await Definitions(settings).again("ebb-host-a.web", intent, present))


async def test_limits_of_ours_go_with_what_is_not_sold_any_more(tmp_path: Path) -> None:
    made = await again(tmp_path, OURS, EVEN)
    assert made.find("./devices/disk/iotune") is None
    assert made.find("./devices/interface/bandwidth") is None
    assert made.find("./devices/disk/source") is not None


async def test_limits_stay_while_it_is_sold(tmp_path: Path) -> None:
    made = await again(tmp_path, OURS, EVEN, disk_mib_s=50.0, network_mib_s=10.0)
    assert made.find("./devices/disk/iotune") is not None
    assert made.find("./devices/interface/bandwidth") is not None


@pytest.mark.parametrize("network", [UNEVEN, PEAK, ONE_WAY])
async def test_limits_of_others_stay(tmp_path: Path, network: str) -> None:
    made = await again(tmp_path, OWN, network)
    assert made.find("./devices/disk/iotune") is not None
    assert made.find("./devices/interface/bandwidth") is not None


OVERLAY = "/images/web.after-snapshot"
MAC = "52:54:00:5a:17:c0"
OTHERS = "{urn:others}note"


def sold(cpu_cores: float, memory_mib: float, template: str) -> Intent:
    size = Vector(cpu_cores=cpu_cores, memory_mib=memory_mib)
    spec = VMSpec(name="web", priority=Priority.DEFLATABLE, nominal=size, template=template)
    boot_mib = memory_mib / 2
    return Intent(owner="host-a", spec=spec, boot_mib=boot_mib, phase=Phase.STOPPED, target=size, committed=size)


def by_hand(definition: str) -> str:
    """A definition after a snapshot of its disk, with another disk, an address and a note of somebody else."""
    root = ElementTree.fromstring(definition)
    source, devices, metadata = root.find("./devices/disk/source"), root.find("devices"), root.find("metadata")
    assert source is not None
    assert devices is not None
    assert metadata is not None
    source.set("file", OVERLAY)
    second = "<disk type='file' device='disk'><source file='/images/second'/><target dev='vdb' bus='virtio'/></disk>"
    devices.append(ElementTree.fromstring(second))
    for interface in root.findall("./devices/interface"):
        ElementTree.SubElement(interface, "mac", address=MAC)
    ElementTree.SubElement(metadata, OTHERS)
    return ElementTree.tostring(root, encoding="unicode")


@pytest.mark.parametrize("template", ["lab", "lab-net", "lab-dimm"])
async def test_a_vm_of_a_template_is_made_again_with_the_disks_and_interfaces_that_it_has_now(
    tmp_path: Path, template: str
) -> None:
    definitions = Definitions(LibvirtSettings("host-a", "test:///default", "qemu", tmp_path, tmp_path))
    place = "ebb-host-a.web", "6f7c5a3e-4a2e-4d0b-9b6f-0d1c2b3a4f5e"
    small, large = sold(1.0, 768.0, template), sold(3.0, 1536.0, template)
    disk = tmp_path / place[0] / "disk.qcow2"
    present = by_hand(await definitions.fresh(*place, small, disk, None))
    made = ElementTree.fromstring(await definitions.again(place[0], large, present))
    assert [one.get("file") for one in made.findall("./devices/disk/source")] == [OVERLAY, "/images/second"]
    assert [one.get("address") for one in made.findall("./devices/interface/mac")] == [MAC] * (template == "lab-net")
    assert made.find(f"./metadata/{OTHERS}") is not None
    wanted = ElementTree.fromstring(await definitions.fresh(*place, large, disk, None))
    sized = (*("maxMemory", "memory", "currentMemory", "vcpu", "vcpus"), *("./cpu/numa", "./devices/memory"))
    for path in (*sized, "./os/cmdline", f"./metadata/{{{NAMESPACE}}}{ELEMENT}"):
        texts = [[ElementTree.tostring(one).strip() for one in root.findall(path)] for root in (made, wanted)]
        assert texts[0] == texts[1] != [], path
