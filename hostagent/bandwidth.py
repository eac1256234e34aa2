"""Disk and network bandwidth of a domain: what can be limited, and the limit on its disks through libvirt.

Network limits are in :mod:`hostagent.network`, our own ``tc`` for them in :mod:`hostagent.tc`; docs/bandwidth.md says
what each limits and how to see it. Sources: https://libvirt.org/formatdomain.html (``iotune``), CONTRACTS in
docs/contracts.md (safety of the guest, network).
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

#: Interfaces that have a device on the host which carries all their traffic.
WITH_DEVICE = ("bridge", "direct", "ethernet", "network")
_NO_DEVICE = {
    "user": "is of type user, which has no device on the host that could be limited",
    "hostdev": "is a device passed through, whose traffic the host does not see",
    "vdpa": "is of type vdpa, whose traffic the host's kernel does not see",
    "vhostuser": "is of type vhostuser, whose traffic goes past the host's kernel",
}
_PAST_QEMU = {
    "vhostuser": "is of type vhostuser, whose data goes past QEMU",
    "vhostvdpa": "is of type vhostvdpa, whose data goes past QEMU",
}


def disk_blocked(domain_xml: str) -> str:
    """Why the bandwidth of a domain's disks cannot be limited, in words; empty if it can.

    One disk that cannot be limited is enough: the limit is on all of them together.
    """
    disks = limitable_disks(ElementTree.fromstring(domain_xml))
    for disk in disks:
        kind = disk.get("type", "")
        if disk.get("device") == "lun":
            return f"disk {target_of(disk)} is passed through as a whole (device lun), so its data goes past QEMU"
        if kind in _PAST_QEMU:
            return f"disk {target_of(disk)} {_PAST_QEMU[kind]}"
    return "" if disks else "the domain has no disk"


def network_blocked(domain_xml: str) -> str:
    """Why the bandwidth of a domain's interfaces cannot be limited, in words; empty if it can.

    One interface that cannot be limited is enough: the limit is on all of them together.
    """
    interfaces = ElementTree.fromstring(domain_xml).findall("./devices/interface")
    for number, interface in enumerate(interfaces, 1):
        kind = interface.get("type", "")
        if kind not in WITH_DEVICE:
            mac = interface.find("mac")
            name = mac.get("address") if mac is not None else f"number {number}"
            return f"interface {name} {_NO_DEVICE.get(kind, f'is of type {kind}, which we cannot limit')}"
    return "" if interfaces else "the domain has no network interface"


def limitable_disks(root: ElementTree.Element) -> list[ElementTree.Element]:
    """All disks of a domain that can move data: not a drive without a medium, which QEMU refuses to limit."""
    disks = root.findall("./devices/disk")
    return [disk for disk in disks if disk.find("source") is not None or disk.get("device") in (None, "disk", "lun")]


def target_of(disk: ElementTree.Element) -> str:
    """What libvirt calls a disk: ``vda``."""
    target = disk.find("target")
    return target.get("dev", "") if target is not None else ""
