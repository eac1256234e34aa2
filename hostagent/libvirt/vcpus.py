"""ACPI unplug and plug of vCPUs: one per step, the count read again after each.

Only where a throw-away guest has passed it on this host (`hostagent.mechanisms.acpi_probe`): the findings say so.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import libvirt

from hostagent.errors import HypervisorError
from hostagent.libvirt.settling import LOOK_S
from hostagent.libvirt_connection import LibvirtConnection

#: For one step; libvirt itself gives up after 5 s.
STEP_LIMIT_S: Final = 8.0


async def bring(connection: LibvirtConnection, domain: str, count: int, limit_s: float) -> str:
    """Bring the running domain to this many vCPUs, as far as it goes.

    libvirt takes those with the highest numbers, and gives those with the lowest.

    :returns: why it did not get there; empty if it did.
    :raises HypervisorError: the count cannot be read.
    """
    until = time.monotonic() + limit_s
    has = await _count(connection, domain)
    while has != count:
        if time.monotonic() >= until:
            return f"the domain has {has} vCPUs instead of {count}: no time is left"
        goal = has + (1 if count > has else -1)
        if reason := await _step(connection, domain, goal, until):
            return reason
        has = goal
    return ""


async def _step(connection: LibvirtConnection, domain: str, goal: int, until: float) -> str:
    """One vCPU. What libvirt answers does not count: it has timed out on what came about, and the reverse."""
    refused = ""
    try:
        await connection.call(
            lambda c: c.lookupByName(domain).setVcpusFlags(goal, libvirt.VIR_DOMAIN_AFFECT_LIVE), modifies=domain
        )
    except HypervisorError as error:
        refused = f": {error}"
    until = min(until, time.monotonic() + STEP_LIMIT_S)
    while (has := await _count(connection, domain)) != goal:
        if time.monotonic() >= until:
            return f"the domain has {has} vCPUs instead of {goal}{refused}"
        await asyncio.sleep(LOOK_S)
    return ""


async def _count(connection: LibvirtConnection, domain: str) -> int:
    return await connection.read(domain, lambda d: int(d.vcpusFlags(libvirt.VIR_DOMAIN_AFFECT_LIVE)))
