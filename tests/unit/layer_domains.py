"""Domains of which one thing or another is missing, as XML, for the tests of layers."""

from __future__ import annotations

import re

from ebbtide.deflation.cascade.mechanisms import Finding, Mechanism
from hostagent.mechanisms.layers import HostFacts, examine

CHANNEL = "<channel type='unix'><target type='virtio' name='io.ebbtide.guest.0' state='connected'/></channel>"
BALLOON = "<memballoon model='virtio' freePageReporting='on'><stats period='1'/></memballoon>"
VIRTIO_MEM = """<memory model='virtio-mem'><target><size unit='KiB'>1048576</size><node>0</node>
<block unit='KiB'>2048</block><requested unit='KiB'>1048576</requested><current unit='KiB'>1048576</current></target>
</memory>"""
DIMM = "<memory model='dimm'><target><size unit='KiB'>262144</size><node>0</node></target></memory>"
DISK = "<disk type='file' device='disk'><source file='/a'/><target dev='vda'/></disk>"
INTERFACE = "<interface type='network'><mac address='52:54:00:00:00:01'/><source network='default'/></interface>"
VCPUS = "<vcpus>" + "".join(f"<vcpu id='{n}' enabled='yes' hotpluggable='{'yes' if n else 'no'}'/>" for n in range(4))
HEALTHY = f"""<domain type='kvm' id='7'>
<name>web</name><memory unit='KiB'>2097152</memory>
<vcpu placement='static'>4</vcpu>{VCPUS}</vcpus>
<os><type arch='x86_64' machine='q35'>hvm</type><cmdline>memhp_default_state=online_movable</cmdline></os>
<devices>{CHANNEL}{BALLOON}{VIRTIO_MEM}{DIMM}{DISK}{INTERFACE}</devices></domain>"""
FACTS = HostFacts(2048, 2000, cgroups="v2", acpi_unplug="", qemu_version=7_002_000, cold_first=True)


def without(part: str) -> str:
    """The healthy domain less a part of its XML."""
    assert part in HEALTHY
    return HEALTHY.replace(part, "")


def with_(part: str) -> str:
    """The healthy domain with something more below <domain>."""
    return HEALTHY.replace("<devices>", f"{part}<devices>")


def with_device(part: str) -> str:
    return HEALTHY.replace("<devices>", f"<devices>{part}")


def finding(mechanism: Mechanism, xml: str, facts: HostFacts = FACTS, config: str = "") -> Finding:
    return next(found for found in examine(xml, facts, config) if found.mechanism is mechanism)


def shortened(xml: str) -> str:
    """Without the white space that stands between elements."""
    return re.sub(r">\s+<", "><", xml)
