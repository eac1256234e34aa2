"""Hypervisor over libvirt: the QEMU domains of one host, their power and their disks.

What each call reads and sets was checked on libvirt 9.0 with QEMU 7.2 (docs/internals/contracts.md, concurrency with
libvirt).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import libvirt
import structlog

from ebbtide.deflation.allocations import cpu_shares
from ebbtide.deflation.cascade.reconcile import cap_of, quota_of
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.suspension import RESTORE_MIB_S
from ebbtide.messages.hosts import TemplateInfo
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.metrics.totals import Calls
from hostagent.domain_xml.templates import TemplateError
from hostagent.errors import DomainGone, HostAgentError, HypervisorError
from hostagent.libvirt import disks, plugged, saving
from hostagent.libvirt.adopted import LibvirtAdoption
from hostagent.libvirt.definitions import Definitions, inactive_xml
from hostagent.libvirt.hypervisor import DomainState, DomainSummary, Saved, ToSave, domain_name
from hostagent.libvirt.libvirt_readings import STATES, affected, limit_cpu, summary_of
from hostagent.libvirt.moves import LibvirtMoves
from hostagent.libvirt.qemu_agent import QemuAgents
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt.sizes import LibvirtSizes
from hostagent.libvirt_connection import LibvirtConnection, start_event_thread
from hostagent.limits.bandwidth import limit_disks_at_start
from hostagent.limits.cgroups import CgroupError
from hostagent.limits.footprints import resident_mib
from hostagent.limits.network import Networks, interfaces_of, limit_interfaces_at_start
from hostagent.state import intents
from hostagent.state.intents import Intent
from hostagent.threads import DISKS, LIMITS

_ELEMENT: Final = libvirt.VIR_DOMAIN_METADATA_ELEMENT
#: With all that libvirt keeps of a domain: what it has of these, it is not undefined without.
_UNDEFINE: Final = (
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
)
GUEST_CHANNEL: Final = "io.ebbtide.guest.0"
#: A start may take so long, and longer for each MiB of saved memory that is read (`RESTORE_MIB_S`), seconds.
START_S: Final = 60.0
#: Why a domain is paused only for a moment (virDomainPausedReason). Not for a migration: one that was started paused
#: from saved memory stays with that reason (libvirt 9.0, qemuProcessStart).
_HELD: Final = (libvirt.VIR_DOMAIN_PAUSED_SAVE, libvirt.VIR_DOMAIN_PAUSED_DUMP, libvirt.VIR_DOMAIN_PAUSED_SNAPSHOT)
#: How often it is checked whether the guest has powered off, in seconds.
LOOK_S: Final = 0.5
#: How much of its time a guest has for the power button, before its agent is asked.
BUTTON_SHARE: Final = 0.5

log = structlog.get_logger()


class _LifecycleEvents:
    """Tells the event loop of domains that started, stopped or rebooted."""

    def __init__(self, connection: LibvirtConnection) -> None:
        self._loop = asyncio.get_running_loop()
        self.callbacks: list[Callable[[str, bool], None]] = []
        connection.on_open(self._register)

    def _register(self, connection: Any) -> None:
        """Runs in a pool thread; the callbacks below run in libvirt's event thread."""
        for event, tell in (
            (libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, partial(self._tell, False)),
            (libvirt.VIR_DOMAIN_EVENT_ID_REBOOT, partial(self._tell, True)),
        ):
            connection.domainEventRegisterAny(None, event, tell, None)

    def _tell(self, rebooted: bool, _connection: Any, domain: Any, *_details: Any) -> None:
        name = domain.name()
        for callback in self.callbacks:
            self._loop.call_soon_threadsafe(callback, name, rebooted)


class LibvirtHypervisor:
    """See `hostagent.libvirt.hypervisor.Hypervisor`."""

    def __init__(self, settings: LibvirtSettings, opener: Callable[[str], Any] = libvirt.open) -> None:
        start_event_thread()
        self._settings = settings
        self._connection = LibvirtConnection(settings.uri, opener)
        self._events = _LifecycleEvents(self._connection)
        self._networks = Networks(self._connection)
        #: Domains that were on at the last survey.
        self._on: set[str] = set()
        #: Those that are emulated, off ones too.
        self._emulated: set[str] = set()
        #: Whether there was a base image, and the look under way.
        self._has_base = True
        self._base_look: asyncio.Task[None] | None = None
        self._definitions = Definitions(settings)
        self._agents = QemuAgents(settings.uri, opener)
        self._sizes = LibvirtSizes(settings, self._connection, self._networks, self._agents)
        self._moves = LibvirtMoves(settings, self._connection, self._definitions)
        #: Domains with metadata that cannot be read.
        self._unread: set[str] = set()
        self._adoption = LibvirtAdoption(settings.host_id, self._connection, settings.adopted)

    @property
    def sizes(self) -> LibvirtSizes:
        return self._sizes

    @property
    def adoption(self) -> LibvirtAdoption:
        return self._adoption

    @property
    def moves(self) -> LibvirtMoves:
        return self._moves

    @property
    def calls(self) -> Calls:
        return self._connection.calls

    async def domains(self) -> list[DomainState]:
        prefix = domain_name(self._settings.host_id, "")

        def find(connection: Any) -> tuple[list[DomainState], list[str], frozenset[str]]:
            found, undefined, taken, there = [], [], self._adoption.names.names(), set()
            released = self._adoption.released.names()
            for domain in connection.listAllDomains():
                name, returns = domain.name(), bool(released) and domain.UUIDString() in released
                there.add(name)
                # By name first: a reading of a foreign domain would wait for whatever its owner does with it.
                if not (name.startswith(prefix) or name in taken or returns):
                    continue
                try:
                    intent, text, defined = self._ours(domain)
                    if intent is None or (returns and not self._adoption.takes_back(name, intent)):
                        continue
                    emulated = ElementTree.fromstring(domain.XMLDesc()).get("type") == "qemu"
                    state, reason = domain.state()
                    goes_on = (state, reason) == (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_RESTORED)
                    original = intents.is_original(text, domain.UUIDString())
                    said = STATES.get(state, "stopped")
                    found.append(DomainState(name, said, intent, emulated, goes_on, original, returns))
                    undefined += [] if defined else [name]
                except libvirt.libvirtError as error:
                    if error.get_error_code() not in (
                        libvirt.VIR_ERR_NO_DOMAIN,
                        libvirt.VIR_ERR_NO_DOMAIN_METADATA,
                    ):
                        raise
            return found, undefined, taken.difference(there)

        found, undefined, missing = await self._connection.call(find)
        if await self._adoption.look_once(missing):
            found, undefined, _ = await self._connection.call(find)
        self._emulated = {domain.name for domain in found if domain.emulated}
        self._moves.emulated = any(domain.emulated and domain.state != "stopped" for domain in found)
        for name in undefined:
            await self._define_intent(name)
        return found

    def _ours(self, domain: Any) -> tuple[Intent | None, str, bool]:
        """The intent of a domain, if this host is its owner, as it is stored, and whether it need not be written there
        again. Blocks."""
        text, defined = _metadata_of(domain)
        intent = intents.from_element(text)
        name = domain.name()
        if intent is None and name not in self._unread:
            log.warning(
                "a domain's metadata of Ebbtide cannot be read: it is left alone as another owner's, with the limits "
                "that it has, and its cores count as free. A later version wrote it, perhaps: install that one again",
                domain=name,
            )
        (self._unread.add if intent is None else self._unread.discard)(name)
        ours = intent is not None and intent.owner == self._settings.host_id
        return (intent if ours else None), text, defined

    async def _define_intent(self, domain: str) -> None:
        """Write the intent of a running domain into its definition, which its owner has made anew without it."""

        def write(d: Any) -> None:
            intent, _, defined = self._ours(d)
            if intent is not None and not defined:
                element = intents.to_element(intent, d.UUIDString())
                stored = libvirt.VIR_DOMAIN_AFFECT_CONFIG
                d.setMetadata(_ELEMENT, element, intents.PREFIX, intents.NAMESPACE, stored)

        why = "a running domain of ours was defined anew without our metadata"
        try:
            await self._connection.change(domain, write)
            log.warning(f"{why}, which is written there again", domain=domain)
        except HypervisorError as error:
            log.warning(f"{why}, which could not be written there yet", domain=domain, why=str(error))

    async def survey(self) -> dict[str, DomainSummary]:
        prefix = domain_name(self._settings.host_id, "")
        what = libvirt.VIR_DOMAIN_STATS_STATE | libvirt.VIR_DOMAIN_STATS_BALLOON | libvirt.VIR_DOMAIN_STATS_VCPU
        # NOWAIT: a domain that is busy says less instead of holding up all others.
        flags = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT

        def look(connection: Any) -> dict[str, DomainSummary]:
            rows, taken = connection.getAllDomainStats(what, flags), self._adoption.names.names()
            ours = ((d, stats) for d, stats in rows if d.name().startswith(prefix) or d.name() in taken)
            return {d.name(): summary_of(d, stats) for d, stats in ours}

        found = await self._connection.call(look)
        on = {name for name, summary in found.items() if summary.state != "stopped"}
        ended, self._on = self._on - on, on
        self._moves.emulated = bool(on & self._emulated)
        if ended:
            # Of one that powered off by itself or moved away nobody else removes what was beside its taps.
            await self._networks.sweep()
        if self._base_look is None or self._base_look.done():
            # Not waited for: it may be on storage that hangs.
            self._base_look = asyncio.create_task(self._look_for_base(), name="base-image")
        return found

    async def _look_for_base(self) -> None:
        try:
            await DISKS.run(os.stat, self._settings.image_dir / "base.qcow2")
            self._has_base = True
        except FileNotFoundError:
            self._has_base = False
        except OSError:
            pass  # storage that fails says nothing of what is on it

    async def resident_mib(self, domains: Iterable[str]) -> dict[str, float]:
        def read() -> dict[str, float]:
            found = {}
            for domain in domains:
                try:
                    found[domain] = resident_mib(domain)
                except CgroupError:
                    if domain not in self._on:
                        found[domain] = 0.0
            return found

        return await LIMITS.run(read)

    @property
    def can_create(self) -> bool:
        return self._has_base

    async def sweep(self, creating: Collection[str] = ()) -> None:
        names = await self._connection.call(lambda c: {domain.name() for domain in c.listAllDomains()})
        ours = domain_name(self._settings.host_id, "*")
        await DISKS.run(lambda: disks.sweep(list(self._settings.disk_dir.glob(ours)), names, creating))
        await self._definitions.library()
        await self._look_for_base()
        await self._networks.sweep()

    async def check(self, spec: VMSpec) -> None:
        await self._definitions.check(spec)

    def templates(self) -> tuple[TemplateInfo, ...]:
        return self._definitions.templates()

    async def create(self, domain: str, intent: Intent, xml: str | None = None) -> None:
        spec = intent.spec
        directory = self._settings.disk_dir / domain
        disk = await DISKS.run(disks.create_overlay, self._settings.image_dir / "base.qcow2", directory)
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
            # Only what this call has defined: a domain of that name may have another owner.
            await self._remove(domain, lambda connection: connection.lookupByUUIDString(identity))
            raise HypervisorError(f"domain {domain} could not be started: {error}") from error

    async def keep(self, domain: str) -> None:
        await DISKS.run(disks.kept, self._settings.disk_dir / domain)

    async def is_new(self, domain: str) -> bool:
        return await DISKS.run(disks.is_new, self._settings.disk_dir / domain)

    async def start(self, domain: str, intent: Intent) -> None:
        saved_mib = await self.saved_mib(domain)
        if saved_mib is None:
            if intent.redefine:
                await self.redefine(domain, intent)
            await self.prepare_start(domain, intent.committed.vector())
        else:
            await saving.lift_limit(self._connection, domain)
        limit_s = START_S + (saved_mib or 0.0) / RESTORE_MIB_S
        await self._connection.change(domain, lambda d: d.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED), limit_s)

    async def redefine(self, domain: str, intent: Intent) -> None:
        present = await self._connection.call(lambda connection: inactive_xml(connection.lookupByName(domain)))
        try:
            definition = await self._definitions.again(domain, intent, present)
        except TemplateError as error:
            raise HypervisorError(f"domain {domain} cannot be defined again: {error}") from error
        shares = {"cpu_shares": cpu_shares(intent.spec.priority, intent.spec.nominal.cpu_cores)}

        def define(connection: Any) -> None:
            connection.defineXML(definition).setSchedulerParametersFlags(shares, libvirt.VIR_DOMAIN_AFFECT_CONFIG)

        await self._connection.call(define, modifies=domain)
        await self.prepare_start(domain, intent.committed.vector())

    async def shut_down(self, domain: str, limit_s: float) -> str:
        how = await _shut_down(self._connection, domain, limit_s)
        await self._networks.forget(how.devices)
        return how.sentence

    async def to_save(self, domain: str) -> ToSave:
        return await saving.to_save(self._connection, domain, self._settings.save_dir)

    async def save(self, domain: str, limit_s: float) -> Saved:
        devices = await self._connection.call(
            lambda c: [i.device for i in interfaces_of(ElementTree.fromstring(c.lookupByName(domain).XMLDesc()))]
        )
        saved = await saving.save(self._connection, domain, self._settings.save_dir, limit_s)
        await self._networks.forget(devices)
        return saved

    async def saved_mib(self, domain: str) -> float | None:
        return await saving.saved_mib(self._connection, domain, self._settings.save_dir)

    async def resume(self, domain: str) -> None:
        await self._connection.change(domain, lambda d: d.resume())

    async def suspend(self, domain: str) -> None:
        await self._connection.change(domain, lambda d: d.suspend())

    async def prepare_start(self, domain: str, size: ResourceVector) -> None:
        def prepare(d: Any) -> None:
            if not d.isPersistent():
                return  # it runs, and has nothing left to be started by
            root = ElementTree.fromstring(d.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
            vcpu = root.find("vcpu")
            vcpus = int(vcpu.get("current") or vcpu.text or 1) if vcpu is not None else 1
            quota, cap = quota_of(size.cpu_cores, vcpus), cap_of(size.cpu_cores, vcpus)
            limit_cpu(d, quota, cap, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
            # libvirt always writes sizes in KiB.
            boot_mib = sum(float(cell.get("memory") or 0) for cell in root.findall("./cpu/numa/cell")) / 1024
            dimms_mib = sum(plugged.Plugged.of(root).dimms_mib)
            plugged.request_at_start(d, root, size.memory_mib - boot_mib - dimms_mib)
            limit_disks_at_start(d, root, size.disk_mib_s)
            limit_interfaces_at_start(d, root, size.network_mib_s)

        await self._connection.change(domain, prepare)

    async def destroy(self, domain: str) -> None:
        if not domain.startswith(domain_name(self._settings.host_id, "")):
            raise HypervisorError(f"domain {domain} was not made here, so it is not removed")
        await self._remove(domain, lambda connection: connection.lookupByName(domain))

    async def _remove(self, domain: str, find: Callable[[Any], Any]) -> None:
        def remove(connection: Any) -> list[str]:
            found = find(connection)
            devices = [i.device for i in interfaces_of(ElementTree.fromstring(found.XMLDesc()))]
            defined = found.isPersistent()
            _cut_power(found)
            if defined:
                found.undefineFlags(_UNDEFINE)
            return devices

        directory = self._settings.disk_dir / domain
        await DISKS.run(disks.doomed, directory)
        devices: list[str] = []
        with contextlib.suppress(DomainGone):
            devices = await self._connection.call(remove, modifies=domain, limit_s=60.0)
        self._connection.forget(domain)
        # At once: a VM of the same name may come, with a disk of its own.
        await DISKS.run(disks.remove_disk, directory)
        if devices:
            await self._networks.forget(devices)

    async def write_intent(self, domain: str, intent: Intent) -> None:
        def write(d: Any) -> None:
            there = intents.from_element(d.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE))
            if there is not None and there.owner != intent.owner:
                raise DomainGone(f"domain {domain} belongs to {there.owner} now")
            both = libvirt.VIR_DOMAIN_AFFECT_CONFIG | libvirt.VIR_DOMAIN_AFFECT_LIVE
            element = intents.to_element(intent, d.UUIDString())
            arguments = libvirt.VIR_DOMAIN_METADATA_ELEMENT, element, intents.PREFIX, intents.NAMESPACE
            try:
                d.setMetadata(*arguments, both)
            except libvirt.libvirtError as error:
                # Tried rather than asked for: nearly all of them run, and have a definition.
                if error.get_error_code() != libvirt.VIR_ERR_OPERATION_INVALID or (where := affected(d)) == both:
                    raise
                d.setMetadata(*arguments, where)

        await self._connection.change(domain, write)

    async def guest_channel(self, domain: str) -> Path | None:
        def find(connection: Any) -> Path | None:
            found = connection.lookupByName(domain)
            if not found.isActive():
                raise HypervisorError("its domain is off")  # only one that runs has the paths of its sockets
            root = ElementTree.fromstring(found.XMLDesc())
            for channel in root.findall("./devices/channel[@type='unix']"):
                target, source = channel.find("target"), channel.find("source")
                if target is not None and target.get("name") == GUEST_CHANNEL and source is not None:
                    path = source.get("path")
                    return Path(path) if path else None
            return None

        return await self._connection.call(find)

    def on_lifecycle(self, callback: Callable[[str, bool], None]) -> None:
        self._events.callbacks.append(callback)

    async def close(self) -> None:
        # libvirt's thread may still bring an event; by then there may be no loop to hand it to.
        self._events.callbacks.clear()
        if self._base_look is not None:
            self._base_look.cancel()
            await asyncio.gather(self._base_look, return_exceptions=True)
        await self._sizes.close()
        await self._connection.close()
        await self._agents.close()


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a domain came to its end, and the devices of its interfaces on the host."""

    sentence: str
    devices: list[str]


def _hears(state: int, reason: int) -> str:
    """Whether a guest can hear that it is to power off: running, asleep, held (for a moment), paused or stopped."""
    if state == libvirt.VIR_DOMAIN_PMSUSPENDED:
        return "asleep"
    if state == libvirt.VIR_DOMAIN_PAUSED and reason in _HELD:
        return "held"
    return STATES.get(state, "stopped")


async def _shut_down(connection: LibvirtConnection, domain: str, limit_s: float) -> _Ended:
    """Ask the guest to power off by button and by agent, and cut its power when it has not ended in time."""

    def look(c: Any) -> tuple[str, list[str]]:
        found = c.lookupByName(domain)
        return _hears(*found.state()), [i.device for i in interfaces_of(ElementTree.fromstring(found.XMLDesc()))]

    async def state_now() -> str:
        try:
            return (await connection.call(look))[0]
        except DomainGone:  # with its end, as it had no definition any more
            return "stopped"

    state, devices = await connection.call(look)
    loop = asyncio.get_running_loop()
    began = loop.time()
    while state == "held" and loop.time() < began + limit_s:
        await asyncio.sleep(LOOK_S)
        state = await state_now()
    if state == "stopped":
        return _Ended("it was off already", devices)
    # A guest that is paused hears nothing.
    if limit_s > 0 and state in ("running", "asleep"):
        asked, button = loop.time(), libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN
        ways = [(button, BUTTON_SHARE), (libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT, 1.0)]
        if state == "asleep":
            with contextlib.suppress(HypervisorError):
                await connection.change(domain, lambda d: d.pMWakeup(0))
            ways.insert(0, (button, BUTTON_SHARE / 2))  # while it wakes it may miss one
        for flags, share in ways:
            until = asked + max(began + limit_s - asked, 0.0) * share
            with contextlib.suppress(HypervisorError):
                await connection.call(_asking(domain, flags), limit_s=max(min(limit_s, 15.0), 1.0))
            while loop.time() < until:
                if await state_now() == "stopped":
                    return _Ended(f"its guest powered off after {loop.time() - began:.1f} s", devices)
                await asyncio.sleep(min(LOOK_S, max(until - loop.time(), 0.0)))

    with contextlib.suppress(DomainGone):
        await connection.change(domain, _cut_power, 60.0)
    why = f"it was {'held paused by a save, a dump or a snapshot' if state == 'held' else state}"
    if limit_s > 0 and state in ("running", "asleep"):
        why = f"its guest{', which was asleep,' if state == 'asleep' else ''} had not powered off after {limit_s:g} s"
    return _Ended(f"its power was cut: {why}", devices)


def _metadata_of(domain: Any) -> tuple[str, bool]:
    """The intent as it is stored: one that goes on where it was saved has, while it runs, the one of that time.

    :returns: also whether it is in the domain's definition, or there is no definition.
    """
    try:
        return str(domain.metadata(_ELEMENT, intents.NAMESPACE, libvirt.VIR_DOMAIN_AFFECT_CONFIG)), True
    except libvirt.libvirtError as error:
        code = error.get_error_code()
        if code not in (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN_METADATA):
            raise
        # Its definition was removed, or made anew, while it runs.
        return str(domain.metadata(_ELEMENT, intents.NAMESPACE)), code == libvirt.VIR_ERR_OPERATION_INVALID


def _asking(domain: str, flags: int) -> Any:
    return lambda connection: connection.lookupByName(domain).shutdownFlags(flags)


def _cut_power(domain: Any) -> None:
    if not domain.isActive():
        return
    try:
        domain.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_GRACEFUL)
    except libvirt.libvirtError:
        if domain.isActive():  # SIGTERM did not end it in libvirt's time: SIGKILL does
            domain.destroy()
