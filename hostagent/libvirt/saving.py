"""Saved memory of domains, through libvirt's managed save: what it takes, and what there is for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Final

import libvirt

from hostagent.errors import HypervisorError, HypervisorTimeout
from hostagent.libvirt.hypervisor import Saved, ToSave
from hostagent.libvirt.jobs import call_off, held_by
from hostagent.libvirt.libvirt_readings import reading_of, state_of
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.limits.cgroups import MIB, CgroupError
from hostagent.limits.footprints import guest_resident_mib
from hostagent.limits.memory_limit import OURS

#: How long a save that was called off may take to end, seconds.
ABORT_S: Final = 60.0
#: How often one that has not ended is called off: it may have waited behind another program's job, and begin only now.
CALL_OFF_EVERY_S: Final = 1.0


async def to_save(connection: LibvirtConnection, domain: str, directory: Path) -> ToSave:
    """What saving a running domain's memory takes.

    :raises HypervisorError: it cannot be saved now, or that is not known.
    """

    def look(c: Any) -> ToSave:
        found = c.lookupByName(domain)
        if not found.isPersistent():
            raise HypervisorError("its definition was removed while it ran, so that nothing of it outlives its end")
        if why := held_by(found.jobStats()):
            raise HypervisorError(why)
        reading, root = reading_of(found)
        memory_mib = reading.balloon_mib + reading.plugged_mib
        try:
            state_mib = min(guest_resident_mib(domain, root) or memory_mib, memory_mib)
        except CgroupError:
            state_mib = memory_mib
        return ToSave(state_mib, memory_mib, _free_mib(directory))

    return await connection.call(look)


async def save(connection: LibvirtConnection, domain: str, directory: Path, limit_s: float) -> Saved:
    """Save a domain's memory and end it; called off after ``limit_s``.

    :raises HypervisorError: it is not saved, and runs on where libvirt has let it.
    """
    began = time.monotonic()
    try:
        await connection.change(domain, lambda d: d.managedSave(0), limit_s)
    except HypervisorError as error:
        late = isinstance(error, HypervisorTimeout)
        name = f"call off the save of {domain}"
        calling_off = [asyncio.create_task(_keep_calling_off(connection, domain), name=name)] if late else []
        try:
            # An earlier agent's call, or this one in its last moment, may have saved it. One under way is waited for.
            if not await connection.call(lambda c: _is_saved(c.lookupByName(domain)), modifies=domain, limit_s=ABORT_S):
                raise
        finally:
            for task in calling_off:
                task.cancel()
            await asyncio.gather(*calling_off, return_exceptions=True)
    saved = Saved(_size_mib(directory, domain), time.monotonic() - began)
    # For a start past us: ours does it again.
    with contextlib.suppress(HypervisorError):
        await lift_limit(connection, domain)
    return saved


async def lift_limit(connection: LibvirtConnection, domain: str) -> None:
    """Take a memory limit of ours out of what is saved of a domain.

    libvirt saves the limit of that time with it, and sets it before the memory is read: the swap that backed it may be
    another's by then, or not be there.

    :raises HypervisorError: what is saved could not be read or changed.
    """

    def lift(d: Any) -> None:
        root = ElementTree.fromstring(d.managedSaveGetXMLDesc(libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE))
        memtune = root.find("memtune")
        if memtune is None or (limit := memtune.find("hard_limit")) is None:
            return
        memtune.remove(limit)
        d.managedSaveDefineXML(ElementTree.tostring(root, encoding="unicode"))

    # That of a domain which was not made here is its owner's.
    if domain.startswith(OURS):
        await connection.change(domain, lift)


async def _keep_calling_off(connection: LibvirtConnection, domain: str) -> None:
    while True:
        with contextlib.suppress(HypervisorError):
            await connection.call(lambda c: call_off(c.lookupByName(domain), libvirt.VIR_DOMAIN_JOB_OPERATION_SAVE))
        await asyncio.sleep(CALL_OFF_EVERY_S)


async def saved_mib(connection: LibvirtConnection, domain: str, directory: Path) -> float | None:
    """What the saved memory of a domain that is off takes; None: it has none."""
    if not await connection.call(lambda c: _is_saved(c.lookupByName(domain))):
        return None
    return _size_mib(directory, domain)


def _is_saved(domain: Any) -> bool:
    return state_of(domain) == "stopped" and bool(domain.hasManagedSaveImage())


def _free_mib(directory: Path) -> float | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize / MIB


def _size_mib(directory: Path, domain: str) -> float:
    """0 where libvirt keeps it elsewhere."""
    try:
        return (directory / f"{domain}.save").stat().st_size / MIB
    except OSError:
        return 0.0
