"""DIMMs in the XML of a domain, as libvirt writes it: sizes in KiB."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from hostagent.domain_xml.templates import GUEST_BLOCK_MIB

Element = ElementTree.Element
_DIMMS = "./devices/memory[@model='dimm']"


def dimms_of(root: Element) -> list[Element]:
    return root.findall(_DIMMS)


def slot_of(dimm: Element) -> str:
    address = dimm.find("address")
    return address.get("slot", "") if address is not None else ""


def takeable_dimms(live: Element, config: Element) -> list[Element]:
    """The DIMMs of a running domain that could be plugged again: those that its configuration has, too, in the same
    slot and size, and those that are like the new ones that a domain without virtio-mem is given.

    What its owner has attached to the running domain only would be lost.
    """
    known = {(slot_of(dimm), _kib(dimm)) for dimm in dimms_of(config)}
    given_anew = live.find("maxMemory") is not None and live.find("./devices/memory[@model='virtio-mem']") is None
    return [
        dimm
        for dimm in dimms_of(live)
        if (slot_of(dimm), _kib(dimm)) in known or (given_anew and _kib(dimm) == GUEST_BLOCK_MIB * 1024)
    ]


def _kib(dimm: Element) -> float:
    return float(dimm.findtext("target/size") or 0)
