"""The real hypervisor: QEMU domains through libvirt.

What each call reads and sets was checked on libvirt 9.0 with QEMU 7.2 (docs/contracts.md, concurrency with libvirt).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import libvirt
import structlog

from deflation.allocations import cpu_shares
from deflation.lifecycle_messages import TemplateInfo
from deflation.mechanisms import Finding, Mechanism
from deflation.messages import VMSpec
from deflation.reconcile import quota_of
from deflation.resources import ResourceVector
from hostagent import adopted, bandwidth, cgroups, disks, host_facts, intents, plugged, power, vcpus
from hostagent.adopted import AdoptedDomains
from hostagent.definitions import Definitions, inactive_xml, most_of
from hostagent.definitions import usable_boot_mib as usable_boot_mib
from hostagent.errors import DomainGone, HostAgentError, HypervisorError, HypervisorTimeout
from hostagent.footprints import qemu_pid
from hostagent.hypervisor import Candidate, DomainState, DomainSummary, HostSideReading, domain_name
from hostagent.intents import Before, Intent
from hostagent.libvirt_connection import LibvirtConnection, start_event_thread
from hostagent.libvirt_readings import balloon_mib_of, kib, quota_parameters, reading_of, state_of, summary_of
from hostagent.memory_limit import MemoryLimits
from hostagent.network import Networks, interfaces_of
from hostagent.settling import settled
from hostagent.template_library import TemplateLibrary
from hostagent.templates import PACKAGED, TemplateError

GUEST_CHANNEL: Final = "io.ebbtide.guest.0"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LibvirtSettings:
    """Where the hypervisor finds what it needs."""

    host_id: str
    uri: str
    accelerator: Literal["kvm", "qemu"]
    #: Holds base.qcow2, vmlinuz and initrd.
    image_dir: Path
    #: Below it, each VM has a directory of its own.
    disk_dir: Path
    template_dirs: tuple[Path, ...] = (PACKAGED,)
    #: What `ebb doctor --probe-acpi` found.
    acpi_verdict: Path = host_facts.ACPI_VERDICT
    #: The templates, where they have been read already.
    library: TemplateLibrary | None = None
    #: Below these the files of XML in requests must lie; none: no XML is taken.
    image_prefixes: tuple[Path, ...] = ()
    #: Names the adopted domains; None: they are remembered for as long as this process lives.
    adopted: Path | None = None


class LibvirtHypervisor:
    """See :class:`hostagent.hypervisor.Hypervisor`."""

    def __init__(self, settings: LibvirtSettings, opener: Callable[[str], Any] = libvirt.open) -> None:
        start_event_thread()
        self._settings = settings
        self._connection = LibvirtConnection(settings.uri, opener)
        self._limits = MemoryLimits(self._connection)
        self._loop = asyncio.get_running_loop()
        self._callbacks: list[Callable[[str], None]] = []
        #: Of the connection that is open now.
        self._versions: host_facts.Versions | None = None
        self._connection.on_open(self._register)
        self._networks = Networks(self._connection)
        self._definitions = Definitions(settings)
        self._adopted = AdoptedDomains(settings.adopted)
        self._looked_for_adopted = False

    # --- domains -------------------------------------------------------------------------------------------------

    async def domains(self) -> list[DomainState]:
        prefix = domain_name(self._settings.host_id, "")
        await self._look_for_adopted(prefix)

        def find(connection: Any) -> list[DomainState]:
            found, taken = [], self._adopted.names()
            for domain in connection.listAllDomains():
                # By name first: a reading of a foreign domain would wait for whatever its owner does with it.
                if not domain.name().startswith(prefix) and domain.name() not in taken:
                    continue
                try:
                    text = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE)
                    intent = intents.from_element(text)
                    if intent is not None and intent.owner == self._settings.host_id:
                        found.append(DomainState(domain.name(), state_of(domain), intent))
                except libvirt.libvirtError as error:
                    if error.get_error_code() not in (
                        libvirt.VIR_ERR_NO_DOMAIN,
                        libvirt.VIR_ERR_NO_DOMAIN_METADATA,
                    ):
                        raise
            return found

        return await self._connection.call(find)

    async def _look_for_adopted(self, prefix: str) -> None:
        """Once: domains that bear our metadata under a name of their own, though our file does not name them."""
        if not self._looked_for_adopted:
            try:
                for name in await self._connection.call(
                    lambda c: adopted.bearing_our_metadata(c, self._settings.host_id, prefix), limit_s=5.0
                ):
                    await asyncio.to_thread(self._adopted.add, name)
            except HypervisorTimeout as error:
                log.warning("it is not known whether domains of others bear our metadata", why=str(error))
            self._looked_for_adopted = True

    async def survey(self) -> dict[str, DomainSummary]:
        prefix = domain_name(self._settings.host_id, "")
        what = libvirt.VIR_DOMAIN_STATS_STATE | libvirt.VIR_DOMAIN_STATS_BALLOON | libvirt.VIR_DOMAIN_STATS_VCPU
        # NOWAIT: a domain that is busy says less instead of holding up all others.
        flags = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT

        def look(connection: Any) -> dict[str, DomainSummary]:
            rows, taken = connection.getAllDomainStats(what, flags), self._adopted.names()
            ours = ((d, stats) for d, stats in rows if d.name().startswith(prefix) or d.name() in taken)
            return {d.name(): summary_of(d, stats) for d, stats in ours}

        return await self._connection.call(look)

    async def sweep(self) -> None:
        # By name, whoever owns the domain and whether or not its intent can be read: a disk in use is never removed.
        names = await self._connection.call(lambda c: {domain.name() for domain in c.listAllDomains()})

        def remove() -> None:
            for directory in self._settings.disk_dir.glob(domain_name(self._settings.host_id, "*")):
                if directory.name not in names:
                    disks.remove(directory)

        await asyncio.to_thread(remove)
        await self._definitions.library()
        await self._networks.sweep()

    async def check(self, spec: VMSpec) -> None:
        await self._definitions.check(spec)

    def templates(self) -> tuple[TemplateInfo, ...]:
        return self._definitions.templates()

    async def create(self, domain: str, intent: Intent, xml: str | None = None) -> None:
        spec = intent.spec
        directory = self._settings.disk_dir / domain
        disk = await asyncio.to_thread(disks.create_overlay, self._settings.image_dir / "base.qcow2", directory)
        identity = str(uuid.uuid4())
        try:
            definition = await self._definitions.fresh(domain, identity, intent, disk, xml)

            def start(connection: Any) -> None:
                defined = connection.defineXML(definition)
                shares = cpu_shares(spec.priority, spec.nominal.cpu_cores)
                defined.setSchedulerParametersFlags({"cpu_shares": shares}, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
                defined.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)

            await self._connection.call(start, modifies=domain, limit_s=60.0)
        except HostAgentError as error:
            # Only what this call has defined: a domain of that name may be somebody else's.
            await self._remove(domain, lambda connection: connection.lookupByUUIDString(identity))
            raise HypervisorError(f"domain {domain} could not be started: {error}") from error

    async def start(self, domain: str, intent: Intent) -> None:
        if intent.redefine:
            await self.redefine(domain, intent)
        await self.prepare_start(domain, intent.committed.vector())
        await self._on(domain, lambda d: d.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED), 60.0)

    async def redefine(self, domain: str, intent: Intent) -> None:
        present = await self._connection.call(lambda connection: inactive_xml(connection.lookupByName(domain)))
        try:
            definition = await self._definitions.again(domain, intent, present)
        except TemplateError as error:
            raise HypervisorError(f"domain {domain} cannot be defined anew: {error}") from error
        shares = {"cpu_shares": cpu_shares(intent.spec.priority, intent.spec.nominal.cpu_cores)}

        def define(connection: Any) -> None:
            connection.defineXML(definition).setSchedulerParametersFlags(shares, libvirt.VIR_DOMAIN_AFFECT_CONFIG)

        await self._connection.call(define, modifies=domain)
        await self.prepare_start(domain, intent.committed.vector())

    async def shut_down(self, domain: str, limit_s: float) -> str:
        how = await power.shut_down(self._connection, domain, limit_s)
        await self._networks.forget(how.devices)
        return how.sentence

    async def most(self, domain: str) -> ResourceVector:
        plugs = any(f.mechanism is Mechanism.CPU_UNPLUG and f.available for f in await self.findings(domain))
        return most_of(ElementTree.fromstring(await self._on(domain, lambda d: d.XMLDesc())), plugs)

    async def examine(self, domain: str) -> Candidate:
        if domain.startswith("ebb-"):
            return Candidate(0, 0.0, 0.0, Before(), "its name is one of those that host agents give")
        return await self._connection.call(lambda connection: adopted.examine(connection, domain))

    async def take_over(self, domain: str, intent: Intent) -> None:
        await asyncio.to_thread(self._adopted.add, domain)
        try:
            await self._connection.call(lambda c: adopted.take_over(c, domain, intent), modifies=domain)
        except HypervisorTimeout:
            raise  # it may still happen: then the domain is found among ours
        except HypervisorError:
            await asyncio.to_thread(self._adopted.remove, domain)
            raise

    async def give_back(self, domain: str, before: Before) -> None:
        await self._connection.call(lambda c: adopted.give_back(c, domain, before), modifies=domain)
        await asyncio.to_thread(self._adopted.remove, domain)

    async def resume(self, domain: str) -> None:
        await self._on(domain, lambda d: d.resume())

    async def suspend(self, domain: str) -> None:
        await self._on(domain, lambda d: d.suspend())

    async def prepare_start(self, domain: str, size: ResourceVector) -> None:
        def prepare(d: Any) -> None:
            root = ElementTree.fromstring(d.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
            vcpu = root.find("vcpu")
            vcpus = int(vcpu.get("current") or vcpu.text or 1) if vcpu is not None else 1
            quota = quota_parameters(quota_of(size.cpu_cores, vcpus))
            d.setSchedulerParametersFlags(quota, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
            device = plugged.Plugged.of(root).device
            requested = device.find("target/requested") if device is not None else None
            if device is None or requested is None:
                return
            boot_mib = sum(kib(cell, "memory") for cell in root.findall("./cpu/numa/cell")) / 1024
            block_mib = kib(device.find("target/block")) / 1024 or 2.0
            plugged_mib = max(math.floor((size.memory_mib - boot_mib) / block_mib) * block_mib, 0.0)
            requested.set("unit", "KiB")
            requested.text = str(round(plugged_mib * 1024))
            d.updateDeviceFlags(ElementTree.tostring(device, encoding="unicode"), libvirt.VIR_DOMAIN_AFFECT_CONFIG)

        await self._on(domain, prepare)

    async def destroy(self, domain: str) -> None:
        if not domain.startswith(domain_name(self._settings.host_id, "")):
            raise HypervisorError(f"domain {domain} was not made here, so it is not removed")
        await self._remove(domain, lambda connection: connection.lookupByName(domain))

    async def _remove(self, domain: str, find: Callable[[Any], Any]) -> None:
        def remove(connection: Any) -> list[str]:
            found = find(connection)
            devices = [i.device for i in interfaces_of(ElementTree.fromstring(found.XMLDesc()))]
            if found.isActive():
                try:
                    found.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_GRACEFUL)
                except libvirt.libvirtError:
                    # SIGTERM did not end it in libvirt's time: SIGKILL does.
                    found.destroy()
            found.undefineFlags(
                libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
            )
            return devices

        with contextlib.suppress(DomainGone):
            await self._networks.forget(await self._connection.call(remove, modifies=domain, limit_s=60.0))
        self._connection.forget(domain)
        await asyncio.to_thread(disks.remove, self._settings.disk_dir / domain)

    async def write_intent(self, domain: str, intent: Intent) -> None:
        element = intents.to_element(intent)

        def write(d: Any) -> None:
            there = intents.from_element(d.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE))
            if there is not None and there.owner != intent.owner:
                raise DomainGone(f"domain {domain} belongs to {there.owner} now")
            flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG
            if d.isActive():
                flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE
            d.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, element, intents.PREFIX, intents.NAMESPACE, flags)

        await self._on(domain, write)

    async def guest_channel(self, domain: str) -> Path | None:
        def find(connection: Any) -> Path | None:
            root = ElementTree.fromstring(connection.lookupByName(domain).XMLDesc())
            for channel in root.findall("./devices/channel[@type='unix']"):
                target, source = channel.find("target"), channel.find("source")
                if target is not None and target.get("name") == GUEST_CHANNEL and source is not None:
                    path = source.get("path")
                    return Path(path) if path else None
            return None

        return await self._connection.call(find)

    # --- readings and limits -------------------------------------------------------------------------------------

    async def read(self, domain: str) -> HostSideReading:
        reading, xml = await self._connection.call(lambda connection: reading_of(connection.lookupByName(domain)))
        return replace(reading, network_mib_s=await self._networks.read(xml))

    async def findings(self, domain: str) -> tuple[Finding, ...]:
        def find(connection: Any) -> tuple[Finding, ...]:
            versions = self._versions = self._versions or host_facts.Versions.of(connection)
            facts = host_facts.host_facts(versions, self._settings.acpi_verdict)
            found = host_facts.findings_of(connection.lookupByName(domain), facts)
            if domain.startswith("ebb-"):
                return found
            # Limits are looked after by our domains' names.
            why = "an adopted domain gets no memory limit"
            return tuple(
                replace(f, available=False, reason=why) if f.mechanism is Mechanism.MEMORY_LIMIT else f for f in found
            )

        return await self._connection.call(find)

    async def set_quota(self, domain: str, cores_per_cpu: float | None) -> None:
        await self._on(
            domain,
            lambda d: d.setSchedulerParametersFlags(quota_parameters(cores_per_cpu), libvirt.VIR_DOMAIN_AFFECT_LIVE),
        )

    async def set_shares(self, domain: str, shares: int) -> None:
        def set_shares(found: Any) -> None:
            # One after the other: the binding reads the present ones by the same flags, and only one may be read.
            for flag in (libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG):
                found.setSchedulerParametersFlags({"cpu_shares": shares}, flag)

        await self._on(domain, set_shares)

    async def throttled(self, domain: str) -> tuple[int, int]:
        def count() -> tuple[int, int]:
            try:
                times = [group.times() for group in cgroups.vcpu_groups(qemu_pid(domain)).values()]
            except (cgroups.CgroupError, OSError) as error:
                raise HypervisorError(f"the throttling of {domain} cannot be read: {error}") from error
            return sum(each.periods for each in times), sum(each.throttled for each in times)

        return await asyncio.to_thread(count)

    async def set_balloon(self, domain: str, balloon_mib: float, limit_s: float) -> str:
        async def size() -> float:
            return await self._connection.call(lambda connection: balloon_mib_of(connection.lookupByName(domain)))

        await self._request_balloon(domain, balloon_mib)
        try:
            reason = await settled(size, balloon_mib, "the balloon", limit_s)
        except asyncio.CancelledError:
            await self._request_balloon(domain, await size())
            raise
        if reason:
            await self._request_balloon(domain, await size())
        return reason

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        return await plugged.bring(self._connection, domain, plugged_mib, limit_s)

    async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
        return await vcpus.bring(self._connection, domain, count, limit_s)

    async def call_off(self, domain: str) -> None:
        def call_off(d: Any) -> None:
            device = plugged.Plugged.of(ElementTree.fromstring(d.XMLDesc())).device
            requested = device.find("target/requested") if device is not None else None
            current = device.find("target/current") if device is not None else None
            if device is not None and requested is not None and current is not None and requested.text != current.text:
                requested.text = current.text
                d.updateDeviceFlags(ElementTree.tostring(device, encoding="unicode"), libvirt.VIR_DOMAIN_AFFECT_LIVE)
            d.setMemoryFlags(d.memoryStats()["actual"], libvirt.VIR_DOMAIN_AFFECT_LIVE)

        await self._on(domain, call_off)

    async def set_disk(self, domain: str, disk_mib_s: float | None) -> str:
        return await _in_words(self._on(domain, lambda d: bandwidth.limit_disks(d, disk_mib_s)))

    async def set_network(self, domain: str, network_mib_s: float | None) -> str:
        return await _in_words(self._networks.limit(domain, network_mib_s))

    async def set_limit(self, domain: str, limit_mib: float | None, limit_s: float) -> str:
        return await self._limits.set(domain, limit_mib, limit_s)

    async def check_limits(self) -> dict[str, str]:
        return await self._limits.check(domain_name(self._settings.host_id, ""))

    async def _request_balloon(self, domain: str, balloon_mib: float) -> None:
        def request(d: Any) -> None:
            # setMemory takes boot memory and DIMMs together, although currentMemory reads the sum with virtio-mem.
            dimms_mib = sum(plugged.Plugged.of(ElementTree.fromstring(d.XMLDesc())).dimms_mib)
            d.setMemoryFlags(round((balloon_mib + dimms_mib) * 1024), libvirt.VIR_DOMAIN_AFFECT_LIVE)

        await self._on(domain, request)

    # --- events and end ------------------------------------------------------------------------------------------

    def on_lifecycle(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    def _register(self, connection: Any) -> None:
        """Runs in a pool thread; the callbacks below run in libvirt's event thread."""
        self._versions = None
        for event in (libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, libvirt.VIR_DOMAIN_EVENT_ID_REBOOT):
            connection.domainEventRegisterAny(None, event, self._lifecycle, None)

    def _lifecycle(self, _connection: Any, domain: Any, *_details: Any) -> None:
        name = domain.name()
        for callback in self._callbacks:
            self._loop.call_soon_threadsafe(callback, name)

    async def close(self) -> None:
        # libvirt's thread may still bring an event; by then there may be no loop to hand it to.
        self._callbacks.clear()
        await self._connection.close()

    async def _on(self, domain: str, function: Callable[[Any], Any], limit_s: float = 15.0) -> Any:
        return await self._connection.call(
            lambda connection: function(connection.lookupByName(domain)), modifies=domain, limit_s=limit_s
        )


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
