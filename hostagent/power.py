"""Powers a domain off and keeps it: the guest is asked, and when it has not ended in time its power is cut."""

from __future__ import annotations

import asyncio
import contextlib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Any, Final

import libvirt

from hostagent.errors import HypervisorError
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.libvirt_readings import state_of
from hostagent.network import interfaces_of

#: How often it is looked whether the guest has ended, in seconds.
LOOK_S: Final = 0.5
#: How much of its time a guest has for the power button, before its agent is asked.
BUTTON_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Ended:
    """How a domain came to its end, and the devices of its interfaces on the host."""

    sentence: str
    devices: list[str]


async def shut_down(connection: LibvirtConnection, domain: str, limit_s: float) -> Ended:
    """See :meth:`hostagent.hypervisor.Hypervisor.shut_down`."""

    def look(c: Any) -> tuple[str, list[str]]:
        found = c.lookupByName(domain)
        return state_of(found), [i.device for i in interfaces_of(ElementTree.fromstring(found.XMLDesc()))]

    state, devices = await connection.call(look)
    if state == "stopped":
        return Ended("it was off already", devices)
    loop = asyncio.get_running_loop()
    began = loop.time()
    # A guest that is paused hears nothing.
    if limit_s > 0 and state == "running":
        for flags, until in (
            (libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN, began + limit_s * BUTTON_SHARE),
            (libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT, began + limit_s),
        ):
            with contextlib.suppress(HypervisorError):
                await connection.call(_asking(domain, flags), limit_s=max(min(limit_s, 15.0), 1.0))
            while loop.time() < until:
                if (await connection.call(look))[0] == "stopped":
                    return Ended(f"its guest powered off after {loop.time() - began:.1f} s", devices)
                await asyncio.sleep(min(LOOK_S, max(until - loop.time(), 0.0)))

    def cut(c: Any) -> None:
        found = c.lookupByName(domain)
        if found.isActive():
            try:
                found.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_GRACEFUL)
            except libvirt.libvirtError:
                if found.isActive():  # SIGTERM did not end it in libvirt's time: SIGKILL does
                    found.destroy()

    await connection.call(cut, modifies=domain, limit_s=60.0)
    why = (
        f"its guest had not powered off after {limit_s:g} s"
        if limit_s > 0 and state == "running"
        else f"it was {state}"
    )
    return Ended(f"its power was cut: {why}", devices)


def _asking(domain: str, flags: int) -> Any:
    return lambda connection: connection.lookupByName(domain).shutdownFlags(flags)
