"""Adoption of domains that were not made here: found, examined, taken over and given back.

Their names do not begin like ours, so they stand in a file of the agent's: no other foreign domain is ever touched.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import libvirt
import structlog

from hostagent.errors import AdoptedUnknown, HypervisorError, HypervisorTimeout
from hostagent.libvirt.hypervisor import Candidate, HostSideReading, domain_name
from hostagent.libvirt.libvirt_readings import (
    affected,
    limit_cores,
    limit_cpu,
    periods_of,
    reading_of,
    restore_periods,
    state_of,
)
from hostagent.libvirt.plugged import Plugged, request_at_start
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.limits import burst, cgroups
from hostagent.mechanisms.layers import pins_memory
from hostagent.state import intents
from hostagent.state.files import replace
from hostagent.state.intents import Before, CpuLimits, Intent

_CONFIG: Final = libvirt.VIR_DOMAIN_AFFECT_CONFIG
_LIVE: Final = libvirt.VIR_DOMAIN_AFFECT_LIVE

_NODES: Final = Path("/sys/devices/system/node")
#: After a look that libvirt did not answer in time.
LOOK_AGAIN_S: Final = 60.0

log = structlog.get_logger()


class AdoptedDomains:
    """Names of domains, durably: of those that are adopted, or the UUIDs of released ones. All methods block: call them
    in a thread.

    :param path: None: they are remembered for as long as this process lives.
    """

    def __init__(self, path: Path | None, what: str = "adopted") -> None:
        self._path, self._what = path, what
        self._names: frozenset[str] | None = None if path is not None else frozenset()
        self._lock = threading.Lock()

    def names(self) -> frozenset[str]:
        """:raises AdoptedUnknown: the file cannot be read."""
        with self._lock:
            return self._read()

    def add(self, name: str) -> bool:
        """:returns: whether it was not among them."""
        with self._lock:
            if new := name not in self._read():
                self._write(self._read() | {name})
            return new

    def remove(self, name: str) -> bool:
        """:returns: whether it was among them."""
        with self._lock:
            if there := name in self._read():
                self._write(self._read() - {name})
            return there

    def _read(self) -> frozenset[str]:
        if self._names is None:
            assert self._path is not None
            try:
                self._names = frozenset(json.loads(self._path.read_text())) if self._path.exists() else frozenset()
            except (OSError, TypeError, ValueError) as error:
                raise AdoptedUnknown(
                    f"{self._path}, which names the {self._what} domains, cannot be read: {error}"
                ) from error
        return self._names

    def _write(self, names: frozenset[str]) -> None:
        if self._path is not None:
            try:
                replace(self._path, json.dumps(sorted(names)))
            except OSError as error:
                raise HypervisorError(f"{self._path} cannot be written: {error}") from error
        self._names = names


class LibvirtAdoption:
    """See `hostagent.libvirt.hypervisor.Adoption`.

    :param path: names the adopted domains; None: they are remembered for as long as this process lives.
    :param monotonic: seconds that never go back.
    """

    def __init__(
        self,
        host_id: str,
        connection: LibvirtConnection,
        path: Path | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._host_id = host_id
        self._connection = connection
        self.names = AdoptedDomains(path)
        #: UUIDs of those that were given back: a snapshot or backup that is put back holds our limits and metadata.
        self.released = AdoptedDomains(path.with_name("released.json") if path is not None else None, "released")
        #: A domain is taken over or given back, one at a time: its name and its metadata change together.
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: When to look for more of ours (monotonic seconds); never again once it was done, unless one is missed.
        self._look_at = 0.0
        #: Adopted domains that were not there when they were looked for.
        self._missing: frozenset[str] = frozenset()

    async def look_once(self, missing: frozenset[str] = frozenset()) -> bool:
        """Once: domains that bear our metadata under a name of their own, though our file does not name them.

        :param missing: adopted domains that are not there; once for each as well, as one that is renamed keeps them.
        :returns: whether one has come to light.
        """
        earlier, self._missing = self._missing, missing
        if missing <= earlier and self._monotonic() < self._look_at:
            return False
        prefix, found = domain_name(self._host_id, ""), False
        try:
            for name in await self._connection.call(
                lambda c: _bearing_our_metadata(c, self._host_id, prefix, self.names.names()), limit_s=5.0
            ):
                found |= await asyncio.to_thread(self.names.add, name)
            self._look_at = math.inf
        except HypervisorError as error:
            self._look_at = self._monotonic() + LOOK_AGAIN_S
            log.warning("it is not known whether domains of others bear our metadata", why=str(error))
        return found

    async def examine(self, domain: str) -> Candidate:
        if domain.startswith("ebb-"):
            return Candidate(0, 0.0, 0.0, Before(), "its name is one of those that host agents give")
        return await self._connection.call(lambda connection: _examine(connection, domain))

    async def take_over(self, domain: str, intent: Intent) -> None:
        async with self._lock(domain):
            there = domain in await asyncio.to_thread(self.names.names)
            await asyncio.to_thread(self.names.add, domain)
            try:
                await self._connection.call(lambda c: self._take(c, domain, intent), modifies=domain)
            except HypervisorTimeout:
                raise  # it may still happen: then the domain is found among ours
            except HypervisorError:
                # Where it was there, an earlier adoption may have come about though it timed out.
                if not there:
                    await asyncio.to_thread(self.names.remove, domain)
                raise

    async def give_back(self, domain: str, before: Before) -> None:
        async with self._lock(domain):
            await self._connection.call(lambda c: self._give(c, domain, before), modifies=domain)
            await asyncio.to_thread(self.names.remove, domain)

    def takes_back(self, domain: str, intent: Intent) -> bool:
        """Have a domain among ours again that was given back and bears our metadata all the same. Blocks."""
        if intent.adopted is None:
            return False
        try:
            self.names.add(domain)
        except HypervisorError as error:
            log.warning(
                "a domain that was given back has come back, and cannot be noted", domain=domain, why=str(error)
            )
            return False
        return True

    def _take(self, connection: Any, domain: str, intent: Intent) -> None:
        """Blocks."""
        uuid = str(connection.lookupByName(domain).UUIDString())
        # First: its adoption must not be taken for one of before its release.
        was_released = self.released.remove(uuid)
        try:
            _take_over(connection, domain, intent)
        except Exception:
            if was_released:
                self.released.add(uuid)
            raise

    def _give(self, connection: Any, domain: str, before: Before) -> None:
        """Blocks."""
        uuid = str(connection.lookupByName(domain).UUIDString())
        _give_back(connection, domain, before)
        try:
            self.released.add(uuid)
        except HypervisorError as error:
            what = "a release could not be noted: a snapshot of before may bring the domain back under our limits"
            log.warning(what, domain=domain, why=str(error))

    def _lock(self, domain: str) -> asyncio.Lock:
        return self._changing.setdefault(domain, asyncio.Lock())


def _bearing_our_metadata(connection: Any, owner: str, prefix: str, taken: frozenset[str]) -> list[str]:
    """Names of domains of other makers whose metadata say that this host has adopted them. Blocks.

    A copy of one is left alone: it was never adopted. Of those that have another owner the log tells: they have none at
    all where this host had another id before.

    :param taken: names of those that are known to be adopted.
    """
    found, known, copies, others = {}, set(), [], {}
    for domain in connection.listAllDomains():
        if domain.name().startswith(prefix):
            continue
        try:
            text = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE)
            original = intents.is_original(text, domain.UUIDString())
        except libvirt.libvirtError:
            continue
        intent = intents.from_element(text)
        if intent is not None and intent.owner != owner:
            others[domain.name()] = intent.owner
        elif intent is not None and intent.adopted is not None:
            if domain.name() in taken:
                known.add(intent.spec.name)
            elif original is False:
                copies.append(domain.name())
            else:
                found[domain.name()] = intent.spec.name
    copies += [name for name, vm in found.items() if vm in known]
    if copies:
        log.warning(
            "domains bear the metadata of an adopted one, as its copies: they are left alone, with the limits in them",
            domains=", ".join(sorted(copies)[:10]),
            count=len(copies),
        )
    if others:
        log.warning(
            "domains here belong to hosts of other ids: where no agent of theirs runs here, nobody gives back what was "
            "taken from them. If one of the ids was this host's: stop the agent, `ebb-hostagent release --id ID`",
            hosts=", ".join(sorted(set(others.values()))),
            domains=", ".join(sorted(others)[:10]),
            count=len(others),
        )
    return [name for name in found if name not in copies]


def _examine(connection: Any, name: str) -> Candidate:
    """What a domain is, and why it cannot be adopted. Blocks."""
    domain = connection.lookupByName(name)
    if state_of(domain) != "running":
        return Candidate(0, 0.0, 0.0, Before(), "it does not run")
    if not domain.isPersistent():
        return Candidate(0, 0.0, 0.0, Before(), "it has no persistent definition, so nothing of it outlives a stop")
    root = ElementTree.fromstring(domain.XMLDesc())
    reading, _ = reading_of(domain)
    defined = domain.schedulerParametersFlags(_CONFIG)
    defined_as = ElementTree.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    plugged = Plugged.of(defined_as)
    before = Before(
        cpu_shares=reading.cpu_shares,
        quota_per_cpu=reading.quota_per_cpu,
        cap_cores=reading.cap_cores,
        **periods_of(domain.schedulerParametersFlags(_LIVE)),
        stats_period_s=reading.stats_period_s,
        definition=CpuLimits(
            cpu_shares=defined.get("cpu_shares") or None,
            quota_per_cpu=limit_cores(defined, "vcpu"),
            cap_cores=limit_cores(defined, "global"),
            **periods_of(defined),
        ),
        requested_mib=plugged.requested_mib if plugged.device is not None else None,
    )
    memory_mib = reading.balloon_mib + reading.plugged_mib
    why = _why_not(root, reading.vcpus, memory_mib) or _limited(root, defined_as) or _cap_alone(reading)
    emulated = root.get("type") == "qemu"
    return Candidate(reading.vcpus, reading.balloon_mib, memory_mib, before, why, emulated)


def _cap_alone(reading: HostSideReading) -> str:
    """Why a domain cannot be kept as its owner limits it; empty if it can.

    Below a cap any vCPU may run alone; a size is held by the quota of each.
    """
    if reading.cap_cores is None or reading.cap_cores >= reading.vcpus * min(reading.quota_per_cpu or 1.0, 1.0):
        return ""
    return (
        f"its owner caps it at {reading.cap_cores:g} cores as a whole (global_quota), which the quotas of its vCPUs "
        "would not keep: limit these instead (vcpu_quota), or lift the cap"
    )


def _limited(*roots: ElementTree.Element) -> str:
    """Why a domain that its owner gives a memory limit cannot be looked after; empty if it has none.

    :param roots: what it is now, and what it is defined as.
    """
    if all(root.find("./memtune/hard_limit") is None for root in roots):
        return ""
    return "its owner limits its memory (memtune hard_limit), and giving memory back would lift that: lift it first"


def _why_not(root: ElementTree.Element, vcpus: int, memory_mib: float) -> str:
    """Why a running domain cannot be looked after; empty if it can."""
    if root.get("type") not in ("kvm", "qemu"):
        return f"a domain of type {root.get('type')} is no QEMU"
    metadata = root.find(f"./metadata/{{{intents.NAMESPACE}}}{intents.ELEMENT}")
    if metadata is not None:
        known = intents.from_element(ElementTree.tostring(metadata, encoding="unicode"))
        who = f"host {known.owner} looks after it already as VM {known.spec.name}" if known else "it is looked after"
        return f"{who}, as our metadata in it say"
    if vcpus < 1 or memory_mib < 1:
        return "its sizes cannot be read"
    backing = root.find("memoryBacking")
    if backing is not None and (backing.find("locked") is not None or backing.find("hugepages") is not None):
        return "its memory is locked or in huge pages, so none could ever be taken"
    if pins_memory(root):
        return "it has a device of the host, which pins its memory"
    if len(root.findall("./devices/memory[@model='virtio-mem']")) > 1:
        return "it has more than one virtio-mem device, of which only one could be looked after"
    if root.find("./launchSecurity") is not None:
        return "its memory is encrypted, which no balloon can return"
    if len(nodes()) > 1 and (mode := _bound(root)):
        return (
            f"its memory is bound to NUMA nodes (numatune, mode {mode}), and what is free is not known by node: others "
            "could not use what it gave, and it could be given what its own nodes have not"
        )
    return ""


def nodes(directory: Path = _NODES) -> list[Path]:
    """NUMA nodes of this host."""
    return sorted(directory.glob("node[0-9]*"))


def _bound(root: ElementTree.Element) -> str:
    """By which mode a domain's memory is kept to some nodes, whatever is free there; empty: by none."""
    rules = [*root.findall("./numatune/memory"), *root.findall("./numatune/memnode")]
    return next((mode for rule in rules if (mode := rule.get("mode", "strict")) in ("strict", "restrictive")), "")


def _take_over(connection: Any, name: str, intent: Intent) -> None:
    """Write the intent into a domain that has none. Blocks."""
    domain = connection.lookupByName(name)
    try:
        there = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            raise
    else:
        known = intents.from_element(there)
        if known is None or known.owner != intent.owner or known.spec.name != intent.spec.name:
            raise HypervisorError(f"domain {name} carries another agent's metadata already")
    flags = _CONFIG | (_LIVE if domain.isActive() else 0)
    text = intents.to_element(intent, domain.UUIDString())
    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, text, intents.PREFIX, intents.NAMESPACE, flags)


def _give_back(connection: Any, name: str, before: Before) -> None:
    """Shares, quota, memory at the start and statistics as they were, and our metadata out. Blocks.

    An owner may have limited the running domain only, or its definition only.
    """
    domain = connection.lookupByName(name)
    flags = affected(domain)
    burst.drop(name)
    version = cgroups.cpu_version(cgroups.own_mountinfo())
    # One after the other: the binding reads the present ones by the same flags, and only one may be read.
    for flag, was in ((_LIVE, before), (_CONFIG, before.definition or before)):
        if not flag & flags:
            continue
        limit_cpu(domain, was.quota_per_cpu, was.cap_cores, flag)
        restore_periods(domain, was, flag)
        # A definition without shares has none of ours either: they cannot be taken out again, so those of now stand.
        if (shares := was.cpu_shares or before.cpu_shares) is not None:
            domain.setSchedulerParametersFlags({"cpu_shares": _as_now(shares, before, version)}, flag)
    if before.requested_mib is not None and flags & _CONFIG:
        # Each size that it had was written there.
        definition = ElementTree.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        request_at_start(domain, definition, before.requested_mib)
    if before.stats_period_s is not None and flags & _LIVE:
        domain.setMemoryStatsPeriod(before.stats_period_s, _LIVE)
    try:
        domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, None, intents.PREFIX, intents.NAMESPACE, flags)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            raise


def _as_now(shares: int, before: Before, version: int | None) -> int:
    """Shares that were noted, perhaps under the other version of control groups, as they count under this one.

    :param version: None: the host has no such groups.
    """
    if version is None:
        return shares
    is_set = before.definition is not None and before.definition.cpu_shares is not None
    if not is_set and shares in cgroups.DEFAULT_SHARES.values():
        return cgroups.DEFAULT_SHARES[version]
    # What an owner has set libvirt takes as it stands, and refuses what is too much.
    return min(shares, cgroups.MOST_SHARES[version])
