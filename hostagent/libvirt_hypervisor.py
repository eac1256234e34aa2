"""The real hypervisor: QEMU domains through libvirt.

What each call reads and sets was checked on libvirt 9.0 with QEMU 7.2 (docs/contracts.md, concurrency with libvirt).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import libvirt
import structlog

from deflation.allocations import cpu_shares
from deflation.mechanisms import Finding
from deflation.messages import VMSpec
from deflation.reconcile import quota_of
from deflation.resources import ResourceVector
from hostagent import bandwidth, disks, host_facts, intents
from hostagent.errors import DomainGone, HypervisorError, RequestRefused
from hostagent.hypervisor import DomainState, DomainSummary, HostSideReading, domain_name
from hostagent.intents import Intent
from hostagent.libvirt_connection import LibvirtConnection, start_event_thread
from hostagent.memory_limit import MemoryLimits, read_limit_mib
from hostagent.network import Networks, interfaces_of
from hostagent.templates import (
    MEMORY_ALIAS,
    PACKAGED,
    DomainParameters,
    DomainTemplate,
    TemplateError,
    render_domain,
)

#: Quota periods in us; the longer one is for shares so small that the quota would fall under libvirt's 1000 us.
PERIODS_US: Final = (100_000, 1_000_000)
LEAST_QUOTA_US: Final = 1_000
GUEST_CHANNEL: Final = "io.ebbtide.guest.0"
#: How often a moving balloon or virtio-mem device is looked at, and after how long without progress we give up.
LOOK_S: Final = 0.2
STALLED_S: Final = 4.0

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

    # --- domains -------------------------------------------------------------------------------------------------

    async def domains(self) -> list[DomainState]:
        prefix = domain_name(self._settings.host_id, "")

        def find(connection: Any) -> list[DomainState]:
            found = []
            for domain in connection.listAllDomains():
                # By name first: a reading of a foreign domain would wait for whatever its owner does with it.
                if not domain.name().startswith(prefix):
                    continue
                try:
                    text = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE)
                    intent = intents.from_element(text)
                    if intent is not None and intent.owner == self._settings.host_id:
                        found.append(DomainState(domain.name(), _state(domain), intent))
                except libvirt.libvirtError as error:
                    if error.get_error_code() not in (
                        libvirt.VIR_ERR_NO_DOMAIN,
                        libvirt.VIR_ERR_NO_DOMAIN_METADATA,
                    ):
                        raise
            return found

        return await self._connection.call(find)

    async def survey(self) -> dict[str, DomainSummary]:
        prefix = domain_name(self._settings.host_id, "")
        what = libvirt.VIR_DOMAIN_STATS_STATE | libvirt.VIR_DOMAIN_STATS_BALLOON | libvirt.VIR_DOMAIN_STATS_VCPU
        # NOWAIT: a domain that is busy says less instead of holding up all others.
        flags = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT

        def look(connection: Any) -> dict[str, DomainSummary]:
            rows = connection.getAllDomainStats(what, flags)
            return {d.name(): _summary(d, stats) for d, stats in rows if d.name().startswith(prefix)}

        return await self._connection.call(look)

    async def sweep(self) -> None:
        # By name, whoever owns the domain and whether or not its intent can be read: a disk in use is never removed.
        names = await self._connection.call(lambda c: {domain.name() for domain in c.listAllDomains()})

        def remove() -> None:
            for directory in self._settings.disk_dir.glob(domain_name(self._settings.host_id, "*")):
                if directory.name not in names:
                    disks.remove(directory)

        await asyncio.to_thread(remove)
        await self._networks.sweep()

    async def check(self, spec: VMSpec) -> None:
        try:
            template = await asyncio.to_thread(DomainTemplate.load, spec.template, self._settings.template_dirs)
            xml = render_domain(template, _sample(spec.nominal.memory_mib, None))
        except TemplateError as error:
            raise RequestRefused(400, str(error), "vm.template") from error
        nominal = spec.nominal.vector()
        for name, why in (
            ("disk_mib_s", bandwidth.disk_blocked(xml)),
            ("network_mib_s", bandwidth.network_blocked(xml)),
        ):
            if nominal[name] > 0 and why:
                sentence = f"{name} cannot be held with template {spec.template}: {why}"
                raise RequestRefused(400, sentence, f"vm.nominal.{name}")

    async def create(self, domain: str, intent: Intent) -> None:
        spec = intent.spec
        directory = self._settings.disk_dir / domain
        disk = await asyncio.to_thread(disks.create_overlay, self._settings.image_dir / "base.qcow2", directory)
        identity = str(uuid.uuid4())
        try:
            xml = render_domain(
                DomainTemplate.load(spec.template, self._settings.template_dirs),
                DomainParameters(
                    name=domain,
                    uuid=identity,
                    cpu_cores=spec.nominal.cpu_cores,
                    memory_mib=int(spec.nominal.memory_mib),
                    accelerator=self._settings.accelerator,
                    kernel=self._settings.image_dir / "vmlinuz",
                    initrd=self._settings.image_dir / "initrd",
                    disk=disk,
                    console=directory / "console.log",
                    ceiling_cpu_cores=spec.ceiling.cpu_cores if spec.ceiling else None,
                    ceiling_memory_mib=int(spec.ceiling.memory_mib) if spec.ceiling else None,
                    boot_memory_mib=int(intent.boot_mib),
                    metadata=intents.to_qualified_element(intent),
                ),
            )

            def start(connection: Any) -> None:
                defined = connection.defineXML(xml)
                shares = cpu_shares(spec.priority, spec.nominal.cpu_cores)
                defined.setSchedulerParametersFlags({"cpu_shares": shares}, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
                defined.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)

            await self._connection.call(start, modifies=domain, limit_s=60.0)
        except (HypervisorError, TemplateError) as error:
            # Only what this call has defined: a domain of that name may be somebody else's.
            await self._remove(domain, lambda connection: connection.lookupByUUIDString(identity))
            raise HypervisorError(f"domain {domain} could not be started: {error}") from error

    async def resume(self, domain: str) -> None:
        await self._on(domain, lambda d: d.resume())

    async def suspend(self, domain: str) -> None:
        await self._on(domain, lambda d: d.suspend())

    async def prepare_start(self, domain: str, size: ResourceVector) -> None:
        def prepare(d: Any) -> None:
            root = ElementTree.fromstring(d.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
            vcpu = root.find("vcpu")
            plugged = int(vcpu.get("current") or vcpu.text or 1) if vcpu is not None else 1
            quota = quota_parameters(quota_of(size.cpu_cores, plugged))
            d.setSchedulerParametersFlags(quota, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
            device = _memory_device(root)
            requested = device.find("target/requested") if device is not None else None
            if device is None or requested is None:
                return
            boot_mib = sum(_kib(cell, "memory") for cell in root.findall("./cpu/numa/cell")) / 1024
            block_mib = _kib(device.find("target/block")) / 1024 or 2.0
            plugged_mib = max(math.floor((size.memory_mib - boot_mib) / block_mib) * block_mib, 0.0)
            requested.set("unit", "KiB")
            requested.text = str(round(plugged_mib * 1024))
            d.updateDeviceFlags(ElementTree.tostring(device, encoding="unicode"), libvirt.VIR_DOMAIN_AFFECT_CONFIG)

        await self._on(domain, prepare)

    async def destroy(self, domain: str) -> None:
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
        await asyncio.to_thread(disks.remove, self._settings.disk_dir / domain)

    async def write_intent(self, domain: str, intent: Intent) -> None:
        element = intents.to_element(intent)

        def write(d: Any) -> None:
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
        reading, xml = await self._connection.call(lambda connection: _read(connection.lookupByName(domain)))
        return replace(reading, network_mib_s=await self._networks.read(xml))

    async def findings(self, domain: str) -> tuple[Finding, ...]:
        def find(connection: Any) -> tuple[Finding, ...]:
            versions = self._versions = self._versions or host_facts.Versions.of(connection)
            facts = host_facts.host_facts(versions, self._settings.acpi_verdict)
            return host_facts.findings_of(connection.lookupByName(domain), facts)

        return await self._connection.call(find)

    async def set_quota(self, domain: str, cores_per_cpu: float | None) -> None:
        await self._on(
            domain,
            lambda d: d.setSchedulerParametersFlags(quota_parameters(cores_per_cpu), libvirt.VIR_DOMAIN_AFFECT_LIVE),
        )

    async def set_shares(self, domain: str, shares: int) -> None:
        flags = libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
        await self._on(domain, lambda d: d.setSchedulerParametersFlags({"cpu_shares": shares}, flags))

    async def set_balloon(self, domain: str, balloon_mib: float, limit_s: float) -> str:
        await self._request_balloon(domain, balloon_mib)
        try:
            reason = await self._settled(domain, lambda r: r.balloon_mib, balloon_mib, "the balloon", limit_s)
        except asyncio.CancelledError:
            await self._request_balloon(domain, (await self.read(domain)).balloon_mib)
            raise
        if reason:
            await self._request_balloon(domain, (await self.read(domain)).balloon_mib)
        return reason

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        await self._request_plugged(domain, plugged_mib)
        try:
            reason = await self._settled(domain, lambda r: r.plugged_mib, plugged_mib, "virtio-mem", limit_s)
        except asyncio.CancelledError:
            await self._request_plugged(domain, (await self.read(domain)).plugged_mib)
            raise
        if reason:
            await self._request_plugged(domain, (await self.read(domain)).plugged_mib)
        return reason

    async def set_disk(self, domain: str, disk_mib_s: float | None) -> str:
        return str(await self._on(domain, lambda d: bandwidth.limit_disks(d, disk_mib_s)))

    async def set_network(self, domain: str, network_mib_s: float | None) -> str:
        return await self._networks.limit(domain, network_mib_s)

    async def set_limit(self, domain: str, limit_mib: float | None, limit_s: float) -> str:
        return await self._limits.set(domain, limit_mib, limit_s)

    async def check_limits(self) -> dict[str, str]:
        return await self._limits.check(domain_name(self._settings.host_id, ""))

    async def _request_balloon(self, domain: str, balloon_mib: float) -> None:
        # setMemory takes the boot part alone, although the domain's currentMemory reads the sum with virtio-mem.
        await self._on(domain, lambda d: d.setMemoryFlags(round(balloon_mib * 1024), libvirt.VIR_DOMAIN_AFFECT_LIVE))

    async def _request_plugged(self, domain: str, plugged_mib: float) -> None:
        def request(d: Any) -> None:
            device = _memory_device(ElementTree.fromstring(d.XMLDesc()))
            requested = device.find("target/requested") if device is not None else None
            if device is None or requested is None:
                raise HypervisorError("the domain has no virtio-mem device")
            requested.set("unit", "KiB")
            requested.text = str(round(plugged_mib * 1024))
            d.updateDeviceFlags(ElementTree.tostring(device, encoding="unicode"), libvirt.VIR_DOMAIN_AFFECT_LIVE)

        await self._on(domain, request)

    async def _settled(
        self, domain: str, what: Callable[[HostSideReading], float], goal_mib: float, device: str, limit_s: float
    ) -> str:
        """Wait until a size has reached its goal, has stopped moving, or time is up."""
        began = moved_at = time.monotonic()
        size = what(await self.read(domain))
        while abs(size - goal_mib) >= 0.5:
            now = time.monotonic()
            if now - moved_at > STALLED_S:
                return f"{device} stopped at {size:g} MiB instead of {goal_mib:g}"
            if now - began > limit_s:
                return f"{device} was at {size:g} MiB instead of {goal_mib:g} when its time was up"
            await asyncio.sleep(LOOK_S)
            latest = what(await self.read(domain))
            if latest != size:
                size, moved_at = latest, time.monotonic()
        return ""

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
        await self._connection.close()

    async def _on(self, domain: str, function: Callable[[Any], Any], limit_s: float = 15.0) -> Any:
        return await self._connection.call(
            lambda connection: function(connection.lookupByName(domain)), modifies=domain, limit_s=limit_s
        )


def quota_parameters(cores_per_cpu: float | None) -> dict[str, int]:
    """libvirt's scheduler parameters for a limit per vCPU thread; None and a whole core lift the limit.

    libvirt refuses a quota under 1000 us and silently ignores 0, so small shares get a longer period.
    """
    if cores_per_cpu is None or cores_per_cpu >= 1.0:
        return {"vcpu_period": PERIODS_US[0], "vcpu_quota": -1}
    for period in PERIODS_US:
        quota = int(cores_per_cpu * period)
        if quota >= LEAST_QUOTA_US:
            break
    return {"vcpu_period": period, "vcpu_quota": max(quota, LEAST_QUOTA_US)}


def usable_boot_mib(memory_mib: float, boot_mib: float | None) -> float:
    """The boot memory that :func:`hostagent.templates.DomainParameters.memory` settles on."""
    return float(_sample(memory_mib, boot_mib).memory().boot_mib)


def _sample(memory_mib: float, boot_mib: float | None) -> DomainParameters:
    """A VM that is never started, to see what a template makes of it."""
    return DomainParameters(
        name="x",
        uuid=str(uuid.UUID(int=0)),
        cpu_cores=1,
        memory_mib=int(memory_mib),
        accelerator="qemu",
        kernel=Path(),
        initrd=Path(),
        disk=Path(),
        console=Path(),
        boot_memory_mib=int(boot_mib) if boot_mib is not None else None,
    )


def _read(domain: Any) -> tuple[HostSideReading, str]:
    """What libvirt knows, and the domain's XML; limits on interfaces are read by ``tc``."""
    xml = domain.XMLDesc()
    root = ElementTree.fromstring(xml)
    device = _memory_device(root)
    current = device.find("target/current") if device is not None else None
    vcpu = root.find("vcpu")
    scheduler = domain.schedulerParametersFlags(libvirt.VIR_DOMAIN_AFFECT_LIVE)
    quota, period = scheduler.get("vcpu_quota", -1), scheduler.get("vcpu_period", PERIODS_US[0])
    reading = HostSideReading(
        vcpus=int(vcpu.get("current") or vcpu.text or 0) if vcpu is not None else 0,
        quota_per_cpu=quota / period if quota > 0 and period > 0 else None,
        balloon_mib=domain.memoryStats()["actual"] / 1024,
        plugged_mib=_kib(current) / 1024,
        vcpu_seconds=tuple(row[2] / 1e9 for row in domain.vcpus()[0]),
        cpu_shares=scheduler.get("cpu_shares"),
        disk_mib_s=bandwidth.disk_limit(domain, root),
        limit_mib=read_limit_mib(domain, root),
    )
    return reading, xml


def _memory_device(root: ElementTree.Element) -> ElementTree.Element | None:
    devices = root.findall("./devices/memory[@model='virtio-mem']")
    named = [d for d in devices if (alias := d.find("alias")) is not None and alias.get("name") == MEMORY_ALIAS]
    return next(iter(named or devices), None)


def _kib(element: ElementTree.Element | None, attribute: str | None = None) -> float:
    """libvirt always writes sizes in KiB, as an element's text or in an attribute."""
    if element is None:
        return 0.0
    return float((element.text if attribute is None else element.get(attribute)) or 0)


def _summary(domain: Any, stats: dict[str, Any]) -> DomainSummary:
    vcpus = int(stats.get("vcpu.current", 0))
    state = stats.get("state.state", libvirt.VIR_DOMAIN_NOSTATE)
    return DomainSummary(
        domain.UUIDString(),
        _STATES.get(state, "stopped"),
        vcpus,
        tuple(stats.get(f"vcpu.{cpu}.time", 0) / 1e9 for cpu in range(vcpus)),
        stats.get("balloon.current", 0) / 1024,
    )


#: States in which vCPUs run, or would if nobody had paused them (virDomainState); all others are "stopped".
_STATES: Final = {
    libvirt.VIR_DOMAIN_RUNNING: "running",
    libvirt.VIR_DOMAIN_BLOCKED: "running",
    libvirt.VIR_DOMAIN_SHUTDOWN: "running",
    libvirt.VIR_DOMAIN_PAUSED: "paused",
    libvirt.VIR_DOMAIN_PMSUSPENDED: "paused",
}


def _state(domain: Any) -> str:
    return _STATES.get(domain.state()[0], "stopped")
