"""The guest agent's channel, added to a domain on this machine: live where libvirt can, else from its next start on.

Works for any domain, managed or not. A host agent looks for the channel of each VM every two seconds, so it talks to
the guest as soon as somebody answers there.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Any, Final

from ebbtide.cli.doctor_vm import find_domain
from ebbtide.errors import EbbError
from ebbtide.lab.services import open_libvirt
from hostagent.mechanisms.fixes import CHANNEL

DEVICE: Final = f"<channel type='unix'><source mode='bind'/><target type='virtio' name='{CHANNEL}'/></channel>"


@dataclass(frozen=True)
class Enabled:
    """What has become of a domain.

    :param live: whether its running guest has the channel.
    :param at_next_start: whether it will have it whenever it is started.
    """

    domain: str
    live: bool
    at_next_start: bool
    sentence: str


def has_channel(domain_xml: str) -> bool:
    """Whether a domain has the channel.

    :raises EbbError: it is none that could have it.
    """
    root = ElementTree.fromstring(domain_xml)
    if root.get("type") not in ("kvm", "qemu"):
        raise EbbError(f"a domain of type {root.get('type')} is no QEMU, and has no virtio-serial")
    return root.find(f"./devices/channel[@type='unix']/target[@name='{CHANNEL}']") is not None


def enable(name: str, uri: str) -> Enabled:
    """Add the channel to a domain, or to the managed VM of that name. What is there already is left as it is.

    :raises LabError: libvirt does not answer.
    :raises EbbError: there is no such VM or more than one, or the channel cannot be added; nothing has changed.
    """
    connection = open_libvirt(uri)
    try:
        import libvirt

        try:
            return _enable(find_domain(connection, name))
        except libvirt.libvirtError as error:
            raise EbbError(f"{name} cannot have the channel: {error}") from error
    finally:
        connection.close()


def _enable(domain: Any) -> Enabled:
    import libvirt

    name, running, persistent = domain.name(), bool(domain.isActive()), bool(domain.isPersistent())
    if not running and domain.hasManagedSaveImage():
        raise EbbError(f"{name} goes on from saved memory, in which there is no channel: start it first")
    live = running and has_channel(domain.XMLDesc())
    later = persistent and has_channel(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    if live and later:
        return Enabled(name, True, True, f"{name} has the channel {CHANNEL} already")
    if persistent and not later:
        # First: where this fails nothing has changed.
        domain.attachDeviceFlags(DEVICE, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
    why = ""
    if running and not live:
        try:
            domain.attachDeviceFlags(DEVICE, libvirt.VIR_DOMAIN_AFFECT_LIVE)
            live = True
        except libvirt.libvirtError as error:
            if not persistent:
                raise
            why = str(error)
    if not running:
        return Enabled(name, False, True, f"{name} does not run: it has the channel {CHANNEL} from its next start on")
    if not live:
        return Enabled(name, False, True, f"{name} takes a restart (off and on): it cannot be plugged live, {why}")
    lasting = "" if persistent else " until it is off: it has no persistent definition"
    return Enabled(name, True, persistent, f"{name} has the channel {CHANNEL} now, without a restart{lasting}")
