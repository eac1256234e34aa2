"""libvirt's test driver, which is one for the whole process for as long as anything holds a connection to it."""

from __future__ import annotations

import contextlib
from typing import Any

import libvirt

from hostagent.state import intents

_DOMAIN = "<domain type='test'><name>test</name><memory>8388608</memory><os><type>hvm</type></os></domain>"


def opened() -> Any:
    """A connection to it as it begins, whatever an earlier test has left there: `test` runs, and is nobody's."""
    connection = libvirt.open("test:///default")
    for domain in connection.listAllDomains():
        if domain.name() == "test":
            for flags in (libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG):
                with contextlib.suppress(libvirt.libvirtError):
                    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, None, None, intents.NAMESPACE, flags)
            continue
        defined = domain.isPersistent()
        if domain.isActive():
            domain.destroy()
        if defined:
            domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE)
    if not connection.listAllDomains():
        connection.defineXML(_DOMAIN).create()
    return connection
