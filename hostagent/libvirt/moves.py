"""Live migration through libvirt: a domain goes to another host's libvirt while it runs.

The source's libvirtd does it all (peer to peer), so that a move neither needs this process nor ends with it. A domain
runs on the other side only once it does not run here any more.
https://libvirt.org/migration.html; https://libvirt.org/html/libvirt-libvirt-domain.html#virDomainMigrateToURI3
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import libvirt

from ebbtide.deflation.allocations import cpu_shares
from ebbtide.messages.migrations import MigrationAddress
from hostagent.domain_xml.templates import tap_name
from hostagent.errors import DomainGone, HostAgentError, HypervisorError
from hostagent.libvirt import disks
from hostagent.libvirt.definitions import Definitions, inactive_xml
from hostagent.libvirt.hypervisor import Departure, Whereabouts
from hostagent.libvirt.jobs import call_off, held_by, job_of
from hostagent.libvirt.libvirt_readings import state_of
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.state import intents
from hostagent.threads import DISKS

#: How often it is looked how far a move is, seconds.
LOOK_S: Final = 1.0
#: For how long libvirt may take to end a move that was called off, seconds.
CALL_OFF_S: Final = 60.0
#: For how long a definition that was given up is waited for, to be undone, seconds.
UNDO_S: Final = 60.0
#: The first QEMU that loses no write of an emulated guest which moves (its commit 03bfc2188f).
SAFE_EMULATED: Final = 9_000_000
_OUT: Final = libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT
_MIB: Final = 2**20


class LibvirtMoves:
    """See `hostagent.libvirt.hypervisor.Moves`."""

    def __init__(self, settings: LibvirtSettings, connection: LibvirtConnection, definitions: Definitions) -> None:
        self._settings = settings
        self._connection = connection
        self._definitions = definitions
        #: As libvirt counts; 0: it has not been asked yet.
        self.qemu_version = 0
        #: Whether one of this host's domains that are on is emulated, though new ones may not be.
        self.emulated = False
        connection.on_open(self._ask_version)
        self._image = _fingerprint(settings.image_dir / "base.qcow2") if settings.migration_uri is not None else ""

    def _ask_version(self, connection: Any) -> None:
        """Runs in a pool thread. Another libvirtd may bring another QEMU."""
        self.qemu_version = connection.getVersion()

    @property
    def address(self) -> MigrationAddress | None:
        settings = self._settings
        if settings.migration_uri is None:
            return None
        return MigrationAddress(
            uri=settings.migration_uri,
            listen=settings.migration_listen,
            disk_dir=str(settings.disk_dir),
            image_dir=str(settings.image_dir),
            image=self._image,
        )

    @property
    def by_command_only(self) -> str:
        settings = self._settings
        if settings.migration_uri is None or settings.migration_emulated:
            return ""
        return risk_of("qemu" if self.emulated else settings.accelerator, self.qemu_version)

    async def receive(self, domain: str, identity: str, intent: intents.Intent) -> None:
        directory = self._settings.disk_dir / domain
        if await DISKS.run(directory.exists):
            await self._sweep(domain, directory)
        disk = await DISKS.run(disks.create_overlay, self._settings.image_dir / "base.qcow2", directory)
        try:
            definition = await self._definitions.fresh(domain, identity, intent, disk, None)
            shares = {"cpu_shares": cpu_shares(intent.spec.priority, intent.spec.nominal.cpu_cores)}

            def define(connection: Any) -> None:
                with contextlib.suppress(libvirt.libvirtError):
                    raise HypervisorError(f"there is a domain {connection.lookupByUUIDString(identity).name()} already")
                connection.defineXML(definition).setSchedulerParametersFlags(shares, libvirt.VIR_DOMAIN_AFFECT_CONFIG)

            await self._connection.call(define, modifies=domain)
        except HostAgentError as error:
            why = f"domain {domain} could not be defined: {error}"
            try:
                await self._undo(domain, identity, intent)
            except HypervisorError as left:
                why += f"; what may still come of it could not be undone yet: {left}"
            raise HypervisorError(why) from error
        await DISKS.run(disks.kept, directory)

    async def _sweep(self, domain: str, directory: Path) -> None:
        """Remove what an earlier try has left that could not be undone in time."""
        names = await self._connection.call(lambda connection: {one.name() for one in connection.listAllDomains()})
        if domain not in names:
            await DISKS.run(disks.sweep, [directory], names)

    async def _undo(self, domain: str, identity: str, intent: intents.Intent) -> None:
        """Have nothing left of a VM that is not to come, neither of a definition that was made after its time.

        :raises HypervisorError: its domain may still come about; its disk stays, to be swept.
        """

        def undefine(connection: Any) -> None:
            found = connection.lookupByUUIDString(identity)
            # Only what was defined for this very request: the identity is that of the VM, wherever it is.
            there = _intent_of(found)
            if there is not None and there.cause == intent.cause and found.name() == domain and not found.isActive():
                found.undefineFlags(0)

        with contextlib.suppress(DomainGone):
            await self._connection.call(undefine, modifies=domain, limit_s=UNDO_S)
        self._connection.forget(domain)
        await DISKS.run(disks.remove_disk, self._settings.disk_dir / domain)

    async def send(self, domain: str, move: Departure, told: Callable[[str], None]) -> str:
        began = asyncio.get_running_loop().time()
        flags = libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PEER2PEER
        if move.copies:
            # Where both have the same base image, what the disk holds besides is all that goes.
            same = bool(self._image) and move.address.image == self._image
            flags |= libvirt.VIR_MIGRATE_NON_SHARED_INC if same else libvirt.VIR_MIGRATE_NON_SHARED_DISK

        def migrate(d: Any) -> None:
            live = d.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_MIGRATABLE)
            parameters: dict[str, Any] = {
                libvirt.VIR_MIGRATE_PARAM_DEST_NAME: move.domain,
                libvirt.VIR_MIGRATE_PARAM_DEST_XML: _text(self._as_there(live, domain, move)),
                libvirt.VIR_MIGRATE_PARAM_URI: f"tcp://{move.address.listen}",
                libvirt.VIR_MIGRATE_PARAM_LISTEN_ADDRESS: move.address.listen,
            }
            if move.bandwidth_mib_s > 0:
                parameters[libvirt.VIR_MIGRATE_PARAM_BANDWIDTH] = max(round(move.bandwidth_mib_s), 1)
            how = flags
            if d.isPersistent():  # else it starts there by the definition that was made for its coming
                how |= libvirt.VIR_MIGRATE_PERSIST_DEST
                parameters[libvirt.VIR_MIGRATE_PARAM_PERSIST_XML] = self._definition_there(d, domain, move)
            d.migrateToURI3(move.address.uri, parameters, how)

        if risk := await self._connection.call(lambda connection: _risk(connection, domain)):
            told(risk)
        watching = asyncio.create_task(self._watch(domain, began + move.deadline_s, told), name=f"move:{domain}")
        try:
            await self._connection.change(domain, migrate, move.deadline_s + CALL_OFF_S)
        except HypervisorError as error:
            seconds = asyncio.get_running_loop().time() - began
            late = f"it had not converged after {move.deadline_s:g} s" if seconds >= move.deadline_s else ""
            raise HypervisorError(f"{late}: {error}" if late else str(error)) from error
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        took_s = asyncio.get_running_loop().time() - began
        return f"it moved in {took_s:.1f} s{await self._stood_still(domain)}"

    async def whereabouts(self, domain: str) -> Whereabouts:
        def look(connection: Any) -> Whereabouts:
            found = connection.lookupByName(domain)
            state, reason = found.state()
            if state == libvirt.VIR_DOMAIN_SHUTOFF:
                return "left" if reason == libvirt.VIR_DOMAIN_SHUTOFF_MIGRATED else "off"
            if state_of(found) == "stopped":
                return "off"
            stats = found.jobStats()
            return "here" if job_of(stats) is None else "held" if held_by(stats) else "moving"

        return await self._connection.call(look)

    async def stop_move(self, domain: str) -> None:
        await self._connection.call(lambda c: call_off(c.lookupByName(domain), _OUT))

    async def _watch(self, domain: str, until: float, told: Callable[[str], None]) -> None:
        """Say how far a move is; call it off when its time is up."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(HypervisorError):
                if asyncio.get_running_loop().time() >= until:
                    await self.stop_move(domain)
                    continue
                said = await self._connection.call(lambda c: _progress(c.lookupByName(domain).jobStats()))
                if said:
                    told(said)

    async def _stood_still(self, domain: str) -> str:
        """For how long its vCPUs did, where libvirt says."""
        flags = libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED
        with contextlib.suppress(HypervisorError):
            stats = await self._connection.call(lambda c: c.lookupByName(domain).jobStats(flags))
            if "downtime" in stats:
                return f", and stood still for {stats['downtime']} ms"
        return ""

    def _definition_there(self, domain: Any, name: str, move: Departure) -> str:
        """The domain's own definition as the other host is to have it in place of the one made for its coming. Blocks.

        What no template brings is in it alone: an overlay that a snapshot has made, devices attached by hand, MACs.
        """
        root = self._as_there(inactive_xml(domain), name, move)
        named = root.find("name")
        assert named is not None, "libvirt writes it"
        named.text = move.domain
        for target in root.iterfind("./devices/interface/target"):
            if target.get("dev") == tap_name(name):
                target.set("dev", tap_name(move.domain))
        return _text(root)

    def _as_there(self, xml: str, name: str, move: Departure) -> ElementTree.Element:
        """XML of a domain with the other host's paths and its intent there; other programs' metadata stays."""
        root = ElementTree.fromstring(xml)
        metadata = root.find("metadata")
        if metadata is None:
            metadata = ElementTree.SubElement(root, "metadata")
        for ours in metadata.findall(f"{{{intents.NAMESPACE}}}{intents.ELEMENT}"):
            metadata.remove(ours)
        metadata.append(ElementTree.fromstring(intents.to_qualified_element(move.intent)))
        places = (
            (self._settings.disk_dir / name, Path(move.address.disk_dir) / move.domain),
            (self._settings.image_dir, Path(move.address.image_dir)),
        )
        for element in root.iter():
            for attribute in ("file", "path"):
                if attribute in element.attrib:
                    element.set(attribute, _moved(element.attrib[attribute], places))
            if element.tag in ("kernel", "initrd") and element.text:
                element.text = _moved(element.text, places)
        return root


def _intent_of(domain: Any) -> intents.Intent | None:
    """What stands in a definition; None: nothing of ours. Blocks."""
    try:
        return intents.from_element(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE))
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            raise
        return None


def _text(root: ElementTree.Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")


def risk_of(accelerator: str | None, qemu_version: int) -> str:
    """What a move may do to a guest; empty: nothing that is known.

    :param accelerator: the type of its domain.
    """
    if accelerator != "qemu" or qemu_version >= SAFE_EMULATED:
        return ""
    return "QEMU before 9.0 may lose writes of an emulated guest while it moves: its kernel may crash afterwards"


def _risk(connection: Any, domain: str) -> str:
    root = ElementTree.fromstring(connection.lookupByName(domain).XMLDesc())
    return risk_of(root.get("type"), connection.getVersion())


def _moved(path: str, places: tuple[tuple[Path, Path], ...]) -> str:
    """A path as it is on the other host."""
    for here, there in places:
        if Path(path).is_relative_to(here):
            return str(there / Path(path).relative_to(here))
    return path


def _progress(stats: dict[str, Any]) -> str:
    """How far a move is, in words; empty before it has begun."""
    total, left = stats.get("data_total", 0), stats.get("data_remaining", 0)
    if not total:
        return ""
    rate = max(stats.get("memory_bps", 0), stats.get("disk_bps", 0)) / _MIB
    done = 100 * (total - left) / total
    said = f"{done:.0f} % of {total / _MIB:.0f} MiB, {rate:.0f} MiB/s"
    rounds = stats.get("memory_iteration", 0)
    return f"{said}, round {rounds}" if rounds > 1 else said


def _fingerprint(base: Path) -> str:
    """Differs for every file of this and other machines that is not the very same one; empty where there is none."""
    try:
        found = base.stat()
    except OSError:
        return ""
    said = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
    return hashlib.sha256(said.encode()).hexdigest()
