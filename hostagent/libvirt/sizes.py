"""Sizes and limits of running domains, read and set through libvirt.

What each call reads and sets was checked on libvirt 9.0 with QEMU 7.2 (docs/internals/contracts.md, concurrency with
libvirt).
"""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, Final

import libvirt
import structlog

from ebbtide.deflation.cascade.mechanisms import Finding, Mechanism
from ebbtide.deflation.resources import ResourceVector
from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout
from hostagent.libvirt import plugged, vcpus
from hostagent.libvirt.definitions import most_of
from hostagent.libvirt.hypervisor import GuestCpus, HostSideReading, domain_name
from hostagent.libvirt.libvirt_readings import (
    affected,
    balloon_mib_of,
    cpu_seconds_of,
    dimms_mib_of,
    limit_cpu,
    reading_of,
)
from hostagent.libvirt.qemu_agent import QemuAgents
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt.settling import settled
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.limits import bandwidth, burst, cgroups
from hostagent.limits.footprints import qemu_pid
from hostagent.limits.memory_limit import MemoryLimits
from hostagent.limits.network import Networks
from hostagent.mechanisms import host_facts

#: Limits are looked after by our domains' names.
NO_LIMIT: Final = "an adopted domain gets no memory limit"

log = structlog.get_logger()


class LibvirtSizes:
    """See `hostagent.libvirt.hypervisor.DomainSizes`."""

    def __init__(
        self, settings: LibvirtSettings, connection: LibvirtConnection, networks: Networks, agents: QemuAgents
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._networks = networks
        self._agents = agents
        self._limits = MemoryLimits(connection)
        #: Of the connection that is open now.
        self._versions: host_facts.Versions | None = None
        connection.on_open(self._forget_versions)

    async def close(self) -> None:
        await self._limits.close()

    def _forget_versions(self, _connection: Any) -> None:
        self._versions = None

    async def read(self, domain: str) -> HostSideReading:
        reading, root = await self._connection.read(domain, reading_of)
        # Its owner's limit is no size of ours, to be charged or put right: what it holds counts.
        limit_mib = reading.limit_mib if _made_here(domain) else None
        return replace(reading, network_mib_s=await self._networks.read(root), limit_mib=limit_mib)

    async def cpu_seconds(self, domain: str) -> float:
        return await self._connection.read(domain, cpu_seconds_of)

    async def findings(self, domain: str) -> tuple[Finding, ...]:
        def find(connection: Any) -> tuple[Finding, ...]:
            versions = self._versions = self._versions or host_facts.Versions.of(connection)
            facts = host_facts.host_facts(versions, self._settings.acpi_verdict, cold_first=self._settings.cold_first)
            found: tuple[Finding, ...] = connection.read(domain, lambda d: host_facts.findings_of(d, facts))
            if _made_here(domain):
                return found
            return tuple(
                replace(f, available=False, reason=NO_LIMIT) if f.mechanism is Mechanism.MEMORY_LIMIT else f
                for f in found
            )

        return await self._connection.call(find)

    async def most(self, domain: str) -> ResourceVector:
        plugs = any(f.mechanism is Mechanism.CPU_UNPLUG and f.available for f in await self.findings(domain))
        return most_of(ElementTree.fromstring(await self._connection.change(domain, lambda d: d.XMLDesc())), plugs)

    async def set_quota(self, domain: str, cores_per_cpu: float | None, cap_cores: float | None) -> None:
        live = libvirt.VIR_DOMAIN_AFFECT_LIVE
        await asyncio.to_thread(burst.drop, domain)
        try:
            await self._connection.adjust(domain, lambda d: limit_cpu(d, cores_per_cpu, cap_cores, live))
        finally:
            await asyncio.to_thread(burst.give, domain)

    async def set_shares(self, domain: str, shares: int) -> None:
        def set_shares(found: Any) -> None:
            # One after the other: the binding reads the present ones by the same flags, and only one may be read.
            for flag in (libvirt.VIR_DOMAIN_AFFECT_LIVE, affected(found) & libvirt.VIR_DOMAIN_AFFECT_CONFIG):
                if flag:
                    found.setSchedulerParametersFlags({"cpu_shares": shares}, flag)

        await self._connection.change(domain, set_shares)

    async def throttled(self, domain: str) -> tuple[int, int]:
        def count() -> tuple[int, int]:
            try:
                times = [group.times() for group in cgroups.vcpu_groups(qemu_pid(domain)).values()]
            except (cgroups.CgroupError, OSError) as error:
                raise HypervisorError(f"the throttling of {domain} cannot be read: {error}") from error
            return sum(each.periods for each in times), sum(each.throttled for each in times)

        return await asyncio.to_thread(count)

    async def set_balloon(self, domain: str, balloon_mib: float, limit_s: float) -> str:
        # They stay as they are meanwhile: memory is moved by one call at a time.
        dimms_mib = await self._connection.read(domain, dimms_mib_of)

        async def size() -> float:
            return await self._connection.read(domain, lambda d: balloon_mib_of(d, dimms_mib))

        try:
            # Cancelled, the call itself goes on.
            await self._request_balloon(domain, balloon_mib + dimms_mib)
            reason = await settled(size, balloon_mib, "the balloon", limit_s)
        except asyncio.CancelledError:
            await self._request_balloon(domain, await size() + dimms_mib)
            raise
        if reason:
            await self._request_balloon(domain, await size() + dimms_mib)
        return reason

    async def _request_balloon(self, domain: str, mib: float) -> None:
        # setMemory takes boot memory and DIMMs together, although currentMemory reads the sum with virtio-mem.
        live = libvirt.VIR_DOMAIN_AFFECT_LIVE
        await self._connection.adjust(domain, lambda d: d.setMemoryFlags(round(mib * 1024), live))

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        return await plugged.bring(self._connection, domain, plugged_mib, limit_s)

    async def ask_plugged(self, domain: str, plugged_mib: float) -> None:
        await plugged.request(self._connection, domain, plugged_mib)

    async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
        return await vcpus.bring(self._connection, domain, count, limit_s)

    async def hold_back(self, domain: str) -> None:
        await self._connection.change(domain, plugged.request_no_more)

    async def call_off(self, domain: str) -> None:
        def call_off(d: Any) -> None:
            plugged.request_no_more(d)
            if (balloon_kib := d.memoryStats().get("actual")) is not None:  # else it has no balloon
                d.setMemoryFlags(balloon_kib, libvirt.VIR_DOMAIN_AFFECT_LIVE)

        await self._connection.adjust(domain, call_off)

    async def set_disk(self, domain: str, disk_mib_s: float | None) -> str:
        return await _in_words(self._connection.change(domain, lambda d: bandwidth.limit_disks(d, disk_mib_s)))

    async def set_network(self, domain: str, network_mib_s: float | None) -> str:
        return await _in_words(self._networks.limit(domain, network_mib_s))

    async def set_limit(self, domain: str, limit_mib: float | None, limit_s: float) -> str:
        return await self._limits.set(domain, limit_mib, limit_s) if _made_here(domain) else NO_LIMIT

    async def ask_statistics(self, domain: str, period_s: int) -> None:
        live = libvirt.VIR_DOMAIN_AFFECT_LIVE
        await self._connection.change(domain, lambda d: d.setMemoryStatsPeriod(period_s, live))

    async def guest_cpus(self, domain: str) -> GuestCpus | None:
        return await self._agents.cpus(domain)

    async def set_guest_cpus(self, domain: str, online: tuple[int, ...]) -> str:
        return await self._agents.bring(domain, online)

    async def check_limits(self) -> dict[str, str]:
        return await self._limits.check(domain_name(self._settings.host_id, ""))


def _made_here(domain: str) -> bool:
    """Whether an agent has made it, so that a memory limit is ours; else it is its owner's."""
    return domain.startswith("ebb-")


async def _in_words(limiting: Awaitable[str]) -> str:
    """Why a bandwidth is not limited as asked for, errors included: the other resources are to be had all the same.

    :raises DomainGone: there is nothing to limit.
    :raises HypervisorTimeout: it may still happen.
    """
    try:
        why = str(await limiting)
    except (DomainGone, HypervisorTimeout):
        raise
    except HypervisorError as error:
        why = str(error)
    if why:
        log.warning("a bandwidth is not limited as asked for", why=why)
    return why
