"""Memory that is plugged into a domain besides what it boots with: its virtio-mem device and its DIMMs.

A DIMM goes and comes as a whole. Unplugged from the running domain it stays in the persistent configuration, which
tells what there is to plug again; a domain that was started with fewer than it is sold has room for new ones. One that
its owner has attached to the running domain only is not taken: nobody could give it back.
Sources: https://libvirt.org/formatdomain.html, memory devices; on QEMU 7.2 an idle DIMM left in 0.5 s, also under
emulation, where the guest had its memory movable.
"""

from __future__ import annotations

import asyncio
import math
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Any

import libvirt

from ebbtide.deflation.cascade.steps import dimms_to_plug, dimms_to_take
from hostagent.domain_xml.dimms import dimms_of, slot_of, takeable_dimms
from hostagent.domain_xml.templates import GUEST_BLOCK_MIB, MEMORY_ALIAS, dimm_element
from hostagent.errors import HypervisorError
from hostagent.libvirt.settling import settled
from hostagent.libvirt_connection import LibvirtConnection

Element = ElementTree.Element


@dataclass(frozen=True, slots=True)
class Plugged:
    """What a running domain has plugged now; sizes in MiB."""

    device: Element | None
    dimms: tuple[Element, ...]

    @classmethod
    def of(cls, root: Element) -> Plugged:
        """Out of a domain's live XML, in which libvirt writes all sizes in KiB."""
        devices = root.findall("./devices/memory[@model='virtio-mem']")
        named = [d for d in devices if (alias := d.find("alias")) is not None and alias.get("name") == MEMORY_ALIAS]
        return cls(next(iter(named or devices), None), tuple(dimms_of(root)))

    @property
    def virtio_mib(self) -> float:
        return _mib(self.device, "target/current")

    @property
    def dimms_mib(self) -> tuple[float, ...]:
        return tuple(size_mib(dimm) for dimm in self.dimms)

    @property
    def total_mib(self) -> float:
        """What the guest has now."""
        return self.virtio_mib + sum(self.dimms_mib)

    @property
    def requested_mib(self) -> float:
        """What the guest is asked to have of virtio-mem."""
        return _mib(self.device, "target/requested")

    @property
    def allowed_mib(self) -> float:
        """What the guest may have at any moment: all that it has, and all that it has been given."""
        return max(self.virtio_mib, self.requested_mib) + sum(self.dimms_mib)

    def whole_blocks(self, amount_mib: float) -> float:
        """So much of an amount as virtio-mem can be asked for."""
        return math.floor(amount_mib / self.block_mib + 1e-6) * self.block_mib

    @property
    def block_mib(self) -> float:
        """The granularity of virtio-mem; 1 where there is no device."""
        return _mib(self.device, "target/block") or 1.0


def size_mib(memory: Element) -> float:
    """The whole size of a memory device."""
    return _mib(memory, "target/size")


def missing_dimms(live: Element, config: Element) -> list[Element]:
    """The DIMMs of a domain's configuration that are not plugged now, told by their slots."""
    slots = {slot_of(dimm) for dimm in dimms_of(live)}
    return [dimm for dimm in dimms_of(config) if slot_of(dimm) not in slots]


def new_dimms(live: Element, grow_mib: float) -> list[Element]:
    """DIMMs that were never there, for a domain without virtio-mem that was started with fewer than it has room for.

    :param grow_mib: what they may hold together at the most.
    """
    memory, most, slots = live.find("memory"), live.find("maxMemory"), len(live.findall("./devices/memory"))
    if memory is None or most is None or Plugged.of(live).device is not None:
        return []
    room_mib = (float(most.text or 0) - float(memory.text or 0)) / 1024
    number = min(int(min(room_mib, grow_mib) // GUEST_BLOCK_MIB), int(most.get("slots", "0")) - slots)
    # Sizes in KiB, as libvirt writes all others.
    made = [ElementTree.fromstring(dimm_element(GUEST_BLOCK_MIB)) for _ in range(max(number, 0))]
    for dimm in made:
        size = dimm.find("target/size")
        assert size is not None
        size.set("unit", "KiB")
        size.text = str(GUEST_BLOCK_MIB * 1024)
    return made


async def bring(connection: LibvirtConnection, domain: str, goal_mib: float, limit_s: float) -> str:
    """Bring what is plugged to this size: virtio-mem as far as it goes, then whole DIMMs; backwards when it grows.

    What is not reached is no longer asked for; a DIMM that the guest has been asked for cannot be called off, so it may
    still leave later.

    :returns: why it did not get there; empty if it did.
    :raises HypervisorError: libvirt refused, or the domain has nothing that can be plugged.
    """
    until = time.monotonic() + limit_s
    # What is told from now on may not be in what is read.
    connection.told_of(domain).clear()
    held = Plugged.of(await _live(connection, domain))
    if goal_mib == held.total_mib == held.allowed_mib and held.device is not None:
        return ""
    if goal_mib < held.total_mib:
        return await _shrink(connection, domain, held, goal_mib, until)
    return await _grow(connection, domain, held, goal_mib, until)


async def _shrink(connection: LibvirtConnection, domain: str, held: Plugged, goal_mib: float, until: float) -> str:
    take = held.total_mib - goal_mib
    left = takeable_dimms(*await connection.read(domain, _both)) if held.dimms else []
    fixed = len(left) < len(held.dimms)
    dimms = dimms_to_take([size_mib(dimm) for dimm in left], held.virtio_mib, take, held.block_mib)
    reason = ""
    device_goal = max(held.virtio_mib - held.whole_blocks(take - sum(dimms)), 0.0)
    if held.device is not None and device_goal < held.virtio_mib:
        reason = await _bring_device(connection, domain, held, device_goal, until)
    for size in dimms:
        # The one that was plugged last: a kernel prefers the older ones.
        dimm = next(one for one in reversed(left) if size_mib(one) == size)
        left.remove(dimm)
        if failed := await _unplug(connection, domain, dimm, until):
            return "; ".join(filter(None, (reason, failed)))
    over = take - sum(dimms) - (held.virtio_mib - device_goal)
    if over >= held.block_mib and held.dimms and not reason:
        besides = ", and none that is not in the domain's definition" if fixed else ""
        return f"DIMMs can only be taken as a whole{besides}: {over:g} MiB are left"
    return reason


async def _grow(connection: LibvirtConnection, domain: str, held: Plugged, goal_mib: float, until: float) -> str:
    live, config = await connection.read(domain, _both)
    missing = missing_dimms(live, config)
    missing += new_dimms(live, goal_mib - held.total_mib - sum(size_mib(dimm) for dimm in missing))
    if held.device is None and not held.dimms and not missing:
        raise HypervisorError("the domain has neither a virtio-mem device nor DIMMs")
    chosen = dimms_to_plug([size_mib(dimm) for dimm in missing], goal_mib - held.total_mib)
    for size in chosen:
        dimm = next(one for one in missing if size_mib(one) == size)
        missing.remove(dimm)
        await _change(connection, domain, "attachDeviceFlags", dimm)
    rest = goal_mib - held.total_mib - sum(chosen)
    if held.device is not None and rest > 0:
        room = size_mib(held.device) - held.virtio_mib
        goal = held.virtio_mib + held.whole_blocks(min(rest, room))
        reason = await _bring_device(connection, domain, held, goal, until)
        return reason or (f"the virtio-mem device has room for {room:g} MiB only" if rest - room >= 1 else "")
    return f"DIMMs can only be plugged as a whole: {rest:g} MiB are left" if rest >= 1 else ""


async def _bring_device(
    connection: LibvirtConnection, domain: str, held: Plugged, goal_mib: float, until: float
) -> str:
    """:param held: as it was just read: it is neither read for the request again, nor looked at before it may move."""

    async def size() -> float:
        return Plugged.of(await _live(connection, domain)).virtio_mib

    told = connection.told_of(domain)
    try:
        if held.requested_mib != goal_mib:
            # Cancelled, the call itself goes on.
            await connection.adjust(domain, lambda found: _ask_for(found, held, goal_mib))
        left_s = max(until - time.monotonic(), 0.0)
        # QEMU tells libvirt of a size once a second at most, so that looking more often shows nothing new.
        reason = await settled(size, goal_mib, "virtio-mem", left_s, told, held.virtio_mib)
    except asyncio.CancelledError:
        await request(connection, domain, await size())
        raise
    if reason:
        await request(connection, domain, await size())
    return reason


async def request(connection: LibvirtConnection, domain: str, size_mib: float) -> None:
    """Ask the guest for this size of its virtio-mem device, without waiting for it.

    :raises HypervisorError: libvirt refused, or there is no device.
    """
    await connection.adjust(
        domain, lambda found: _ask_for(found, Plugged.of(ElementTree.fromstring(found.XMLDesc())), size_mib)
    )


def request_at_start(domain: Any, definition: Element, goal_mib: float) -> None:
    """Have a domain's definition ask for this size of its virtio-mem device, as far as there is one. Blocks."""
    held = Plugged.of(definition)
    if held.device is not None:
        goal = min(max(held.whole_blocks(goal_mib), 0.0), size_mib(held.device))
        _ask_for(domain, held, goal, libvirt.VIR_DOMAIN_AFFECT_CONFIG)


def _ask_for(domain: Any, held: Plugged, size_mib: float, flag: int = libvirt.VIR_DOMAIN_AFFECT_LIVE) -> None:
    """Ask the guest for this size of its virtio-mem device. Blocks."""
    requested = held.device.find("target/requested") if held.device is not None else None
    if held.device is None or requested is None:
        raise HypervisorError("the domain has no virtio-mem device")
    requested.set("unit", "KiB")
    requested.text = str(round(size_mib * 1024))
    domain.updateDeviceFlags(ElementTree.tostring(held.device, encoding="unicode"), flag)


def request_no_more(domain: Any) -> None:
    """Ask the guest for what its virtio-mem device has now, neither more nor less. Blocks."""
    device = Plugged.of(ElementTree.fromstring(domain.XMLDesc())).device
    requested = device.find("target/requested") if device is not None else None
    current = device.find("target/current") if device is not None else None
    if device is not None and requested is not None and current is not None and requested.text != current.text:
        requested.text = current.text
        domain.updateDeviceFlags(ElementTree.tostring(device, encoding="unicode"), libvirt.VIR_DOMAIN_AFFECT_LIVE)


async def _unplug(connection: LibvirtConnection, domain: str, dimm: Element, until: float) -> str:
    """One whole DIMM; gone is what the XML no longer has, whatever libvirt answered."""
    slot = slot_of(dimm)

    async def size() -> float:
        dimms = Plugged.of(await _live(connection, domain)).dimms
        return sum(size_mib(one) for one in dimms if slot_of(one) == slot)

    refused = ""
    try:
        await _change(connection, domain, "detachDeviceFlags", dimm)
    except HypervisorError as error:
        refused = f" ({error})"
    reason = await settled(size, 0.0, f"the DIMM in slot {slot}", max(until - time.monotonic(), 0.0))
    return f"{reason}{refused}" if reason else ""


async def _change(connection: LibvirtConnection, domain: str, method: str, dimm: Element) -> None:
    xml = ElementTree.tostring(dimm, encoding="unicode")
    await connection.call(
        lambda c: getattr(c.lookupByName(domain), method)(xml, libvirt.VIR_DOMAIN_AFFECT_LIVE), modifies=domain
    )


async def _live(connection: LibvirtConnection, domain: str) -> Element:
    return ElementTree.fromstring(await connection.read(domain, lambda d: d.XMLDesc()))


def _both(domain: Any) -> tuple[Element, Element]:
    return (
        ElementTree.fromstring(domain.XMLDesc()),
        ElementTree.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)),
    )


def _mib(element: Element | None, path: str) -> float:
    found = element.find(path) if element is not None else None
    return float(found.text or 0) / 1024 if found is not None else 0.0
