"""Bandwidth of a domain: what of it can be limited, and the limit on its disks, through libvirt.

Network limits are in `hostagent.limits.network`, our own ``tc`` for them in `hostagent.limits.tc`;
docs/internals/bandwidth.md says what each limits and how to see it. Sources: https://libvirt.org/formatdomain.html
(``iotune``), docs/internals/contracts.md (safety of the guest, network).
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any, Final

import libvirt

from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.resources import ResourceVector

#: All disks of a domain are members of it and share one limit.
GROUP: Final = "ebbtide"
#: Operations a second for each MiB/s. Operations of 16 KiB reach both limits at once: larger ones are held by bytes,
#: smaller ones by number, since each costs the host's device a turn. 1 MiB/s still lets a guest boot.
IOPS_PER_MIB_S: Final = 64
MIB: Final = 1 << 20
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
    return _disk_blocked_in(ElementTree.fromstring(domain_xml))


def _disk_blocked_in(root: ElementTree.Element) -> str:
    disks = limitable_disks(root)
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
    return network_blocked_in(ElementTree.fromstring(domain_xml))


def network_blocked_in(root: ElementTree.Element) -> str:
    """As `network_blocked`, of XML that has been read already."""
    interfaces = root.findall("./devices/interface")
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


def disk_parameters(disk_mib_s: float | None) -> dict[str, Any]:
    """libvirt's ``iotune`` for the disks of a domain together; None lifts the limit.

    libvirt reads 0 as unlimited, so a limit is never below 1 MiB/s. ``size_iops_sec`` is left out: the limit on bytes
    holds large operations already.
    """
    if disk_mib_s is None:
        return {"group_name": GROUP, "total_bytes_sec": 0, "total_iops_sec": 0}
    mib_s = max(disk_mib_s, HARD_FLOOR.disk_mib_s)
    return {"group_name": GROUP, "total_bytes_sec": int(mib_s * MIB), "total_iops_sec": int(mib_s * IOPS_PER_MIB_S)}


def limit_disks(domain: Any, disk_mib_s: float | None) -> str:
    """Limit all disks of a domain together, now and whenever it is started again. Blocks: runs in the pool.

    A limit that was set from outside is replaced by ours, but never lifted.

    :returns: why it is not as asked for; empty if it is.
    :raises libvirt.libvirtError: libvirt refused.
    """
    text = domain.XMLDesc()
    if why := disk_blocked(text):
        return "" if disk_mib_s is None else why
    wanted = disk_parameters(disk_mib_s)
    for flag, xml in _definitions(domain):
        root = ElementTree.fromstring(xml)
        if disk_mib_s is None and all(name.text != GROUP for name in root.iterfind("./devices/disk/iotune/group_name")):
            continue
        names = [target_of(disk) for disk in limitable_disks(root)]
        for name in names:
            domain.setBlockIoTune(name, wanted, flag)
        for name in names:
            found = domain.blockIoTune(name, flag)
            for key in ("total_bytes_sec", "total_iops_sec"):
                if found[key] != wanted[key]:
                    return f"disk {name} has {key} {found[key]} instead of {wanted[key]}"
    return ""


def limit_disks_at_start(domain: Any, root: ElementTree.Element, disk_mib_s: float) -> None:
    """Write into a domain's definition what its disks are held to by any start. Blocks: runs in the pool.

    :param root: its definition.
    :param disk_mib_s: 0: it is sold no bandwidth, and nothing is touched.
    """
    if disk_mib_s <= 0 or _disk_blocked_in(root):
        return
    for disk in limitable_disks(root):
        domain.setBlockIoTune(target_of(disk), disk_parameters(disk_mib_s), libvirt.VIR_DOMAIN_AFFECT_CONFIG)


def undeclare(root: ElementTree.Element, nominal: ResourceVector) -> None:
    """Take the limits of ours out of a definition that its VM is not sold with: nobody would lift them later."""
    if not nominal.disk_mib_s:
        for disk in root.iterfind("./devices/disk"):
            limit = disk.find("iotune")
            if limit is not None and limit.findtext("group_name") == GROUP:
                disk.remove(limit)
    if not nominal.network_mib_s:
        for interface in root.iterfind("./devices/interface"):
            limit = interface.find("bandwidth")
            if limit is not None and is_ours(limit):
                interface.remove(limit)


def is_ours(bandwidth: ElementTree.Element) -> bool:
    """Whether it is the same average each way and nothing else: libvirt has no name for who has set it."""
    ways = {way.tag: way.attrib for way in bandwidth}
    average = {"average": ways.get("inbound", {}).get("average")}
    return ways == {"inbound": average, "outbound": average}


def disk_limit(domain: Any, root: ElementTree.Element) -> float | None:
    """What a domain's disks can move together, MiB/s, as QEMU says; None without a limit. Blocks: runs in the pool.

    :param root: the domain's XML: QEMU is asked only where libvirt has set something.
    """
    if root.find("./devices/disk/iotune") is None:
        return None
    groups: dict[str, int] = {}
    for disk in limitable_disks(root):
        found = domain.blockIoTune(target_of(disk), _reading_flags(domain))
        total = found["total_bytes_sec"] or (
            found["read_bytes_sec"] + found["write_bytes_sec"]
            if found["read_bytes_sec"] and found["write_bytes_sec"]
            else 0
        )
        if not total:
            return None
        # Disks outside of a group have a limit of their own each.
        groups[found.get("group_name") or target_of(disk)] = total
    return sum(groups.values()) / MIB if groups else None


def _definitions(domain: Any) -> list[tuple[int, str]]:
    """The running domain and the one that the next start takes, as far as there are such, as (flag, XML)."""
    found = []
    if domain.isActive():
        found.append((libvirt.VIR_DOMAIN_AFFECT_LIVE, domain.XMLDesc()))
    if domain.isPersistent():
        found.append((libvirt.VIR_DOMAIN_AFFECT_CONFIG, domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)))
    return found


def _reading_flags(domain: Any) -> int:
    return int(libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else libvirt.VIR_DOMAIN_AFFECT_CONFIG)
