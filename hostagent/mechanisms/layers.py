"""Findings of a domain: mechanisms that can be used, those that cannot, and what would help. Pure.

Sources: https://libvirt.org/formatdomain.html; QEMU: ``virtio-mem`` refuses locked memory ("Incompatible with mlock")
and works beside VFIO since 6.1 (RamDiscardManager), which disables the balloon's discards; docs/internals/contracts.md,
safety of the guest. docs/reference/layers.md has the table; a test holds it to this module.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.cascade.mechanisms import Finding, Mechanism
from hostagent.domain_xml.dimms import dimms_of, takeable_dimms
from hostagent.limits import burst
from hostagent.limits.bandwidth import disk_blocked, network_blocked
from hostagent.mechanisms import fixes
from hostagent.mechanisms.fixes import CHANNEL, MOVABLE, QEMU_AGENT, DomainFacts

#: libvirt's number of the first QEMU whose virtio-mem works beside VFIO.
VIRTIO_MEM_BESIDE_VFIO: Final = 6_001_000
#: Swap of which less than this is free backs nothing, MiB.
LEAST_SWAP_MIB: Final = 64.0
#: Devices that have all of the guest's memory pinned.
_PINNING: Final = (
    "hostdev[@type='pci']",
    "hostdev[@type='mdev']",
    "interface[@type='hostdev']",
    "interface[@type='vdpa']",
    "disk[@type='nvme']",
    "disk[@type='vhostvdpa']",
)
#: Why vCPUs are not unplugged under emulation (docs/internals/contracts.md: seen two times of two).
NO_UNPLUG_EMULATED: Final = (
    "ACPI vCPU unplug is off under emulation: libvirt timed out, could not plug again, and a reset crashed QEMU"
)
#: MiB of each unit that libvirt reads (formatdomain, memory allocation).
_MIB: Final = {
    **dict.fromkeys(("b", "bytes"), 2.0**-20),
    **{"KB": 1e3 / 2**20, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20, "TB": 1e12 / 2**20},
    **dict.fromkeys(("k", "KiB"), 2.0**-10),
    **dict.fromkeys(("M", "MiB"), 1.0),
    **dict.fromkeys(("G", "GiB"), 2.0**10),
    **dict.fromkeys(("T", "TiB"), 2.0**20),
}


def pins_memory(root: ElementTree.Element) -> bool:
    """Whether VFIO or vDPA maps a guest's memory; a USB device that is passed through does not."""
    return any(root.find(f"./devices/{path}") is not None for path in _PINNING)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What of the host decides which mechanisms its domains have."""

    swap_total_mib: float
    swap_free_mib: float
    #: v1, hybrid, v2 or none.
    cgroups: str
    #: Why vCPUs may not be unplugged on this host; empty where a throw-away guest has passed it.
    acpi_unplug: str
    #: As libvirt counts: 7.2.11 is 7002011; 0 is not known.
    qemu_version: int = 0
    #: Why vCPUs under a quota have no bursts; empty where they have.
    no_burst: str = ""
    #: Why the kernel limits the CPU time of no VM; empty where it does.
    no_quota: str = ""
    #: Why the kernel limits the memory of no VM as it must be; empty where it does.
    no_limit: str = ""
    #: Sizes of huge pages, KiB, that it has a pool of: what comes back to that does not become free memory. 0: of the
    #: default size.
    huge_pools: frozenset[int] = frozenset()
    #: Whether its VMs' cold pages become free first.
    cold_first: bool = False


@dataclass(frozen=True, slots=True)
class _Obstacle:
    why: str
    fix: str = ""


def examine(domain_xml: str, facts: HostFacts, config_xml: str = "") -> tuple[Finding, ...]:
    """One finding for each mechanism, in their order.

    :param domain_xml: of a running domain its live XML; else what it would be started with.
    :param config_xml: what the domain will be at its next start: its DIMMs that are unplugged now.
    :raises xml.etree.ElementTree.ParseError: no XML.
    """
    return _Domain(domain_xml, facts, config_xml).findings()


def kind_of(domain_xml: str) -> tuple[GuestKind, int]:
    """What of a domain's guest answers, or would; a channel of ours counts though it is silent."""
    domain = _Domain(domain_xml, HostFacts(0, 0, "none", ""), "")
    if domain.channel:
        return GuestKind.AGENT, domain.vcpus
    return GuestKind.QEMU_GUEST_AGENT if domain.by_qemu_agent else GuestKind.BALLOON, domain.vcpus


class _Domain:
    def __init__(self, xml: str, facts: HostFacts, config_xml: str) -> None:
        self.xml, self.facts = xml, facts
        self.root = ElementTree.fromstring(xml)
        self.config = ElementTree.fromstring(config_xml) if config_xml else self.root
        self.running = self.root.get("id") is not None
        self.vcpus = self._vcpus()
        memory = self.root.find("memory")
        self.names = DomainFacts(self.root.findtext("name", ""), self.vcpus, int(_mib(memory)))
        targets = self.root.findall("./devices/channel/target")
        self.channel = any(target.get("name") == CHANNEL for target in targets)
        self.agent = self._agent()
        self.pinned = self._pinned()

    def findings(self) -> tuple[Finding, ...]:
        found = {
            Mechanism.APPLICATION: ("asked through the guest agent", self.agent),
            Mechanism.COLD: ("asked of the guest's kernel through the guest agent", [*self._cold(), *self.agent]),
            Mechanism.CPU_OFFLINE: (
                f"up to {self.vcpus - 1} of {self.vcpus} vCPUs, by "
                f"{'the guest agent' if self.channel else 'qemu-guest-agent'}",
                [*([] if self.by_qemu_agent else self.agent), *self._single()],
            ),
            Mechanism.CPU_UNPLUG: (f"{self._hotpluggable()} of {self.vcpus} vCPUs, one at a time", self._unplug()),
            Mechanism.VIRTIO_MEM: (self._device_words(), [*self.agent, *self._virtio_mem()]),
            Mechanism.DIMM: (self._dimm_words(), [*self.agent, *self._dimm()]),
            Mechanism.QUOTA: (self._quota_words(), self._quota()),
            # Of a guest without our agent it takes by the balloon's own statistics.
            Mechanism.BALLOON: (self._balloon_words(), [*(self.agent if self.channel else []), *self._balloon()]),
            Mechanism.MEMORY_LIMIT: (
                f"backed by {self.facts.swap_total_mib:.0f} MiB of swap, {self.facts.swap_free_mib:.0f} MiB free",
                [*self.agent, *self._limit()],
            ),
            Mechanism.DISK: ("on all disks together", self._bandwidth(disk_blocked(self.xml), "")),
            Mechanism.NETWORK: (
                "on all interfaces together, each way",
                self._bandwidth(network_blocked(self.xml), fixes.interfaces(self.names)),
            ),
        }
        return tuple(self._finding(mechanism, words, obstacles) for mechanism, (words, obstacles) in found.items())

    def _finding(self, mechanism: Mechanism, words: str, obstacles: list[_Obstacle]) -> Finding:
        step = self._block_mib() if mechanism is Mechanism.VIRTIO_MEM else 0.0
        if not obstacles:
            return Finding(mechanism, True, words, self._hint(mechanism), step)
        texts = dict.fromkeys(obstacle.fix for obstacle in obstacles if obstacle.fix)
        gives = mechanism in (Mechanism.VIRTIO_MEM, Mechanism.DIMM) and {*obstacles} <= {*self.agent, *self._pool()}
        return Finding(mechanism, False, "; ".join(o.why for o in obstacles), "\n\n".join(texts), step, gives)

    # --- what the domain is ----------------------------------------------------------------------------------------

    def _vcpus(self) -> int:
        vcpu = self.root.find("vcpu")
        return int(vcpu.get("current") or vcpu.text or 1) if vcpu is not None else 1

    def _hotpluggable(self) -> int:
        return sum(
            1
            for vcpu in self.root.findall("./vcpus/vcpu")
            if vcpu.get("enabled") == "yes" and vcpu.get("hotpluggable") == "yes"
        )

    def _devices(self, model: str) -> list[ElementTree.Element]:
        return self.root.findall(f"./devices/memory[@model='{model}']")

    def _dimms(self) -> list[ElementTree.Element]:
        """Those that can be taken or given."""
        return max(takeable_dimms(self.root, self.config), dimms_of(self.config), key=len)

    def _agent(self) -> list[_Obstacle]:
        """What stands between us and the guest agent."""
        for target in self.root.findall("./devices/channel/target"):
            if target.get("name") == CHANNEL:
                if self.running and target.get("state") != "connected":
                    why = f"no guest agent has opened the channel {CHANNEL}"
                    return [_Obstacle(why, fixes.guest_agent(self.names))]
                return []
        return [_Obstacle(f"the domain has no channel {CHANNEL} for the guest agent", fixes.channel(self.names))]

    def _cold(self) -> list[_Obstacle]:
        return [] if self.facts.cold_first else [_Obstacle("off unless the host agent is told", fixes.cold_first())]

    @property
    def by_qemu_agent(self) -> bool:
        """Whether a qemu-guest-agent is there to stand in for ours."""
        target = self.root.find(f"./devices/channel/target[@name='{QEMU_AGENT}']")
        return not self.channel and target is not None and (not self.running or target.get("state") == "connected")

    def _pinned(self) -> list[_Obstacle]:
        """What keeps all of the guest's memory where it is."""
        found = []
        if pins_memory(self.root):
            why = "a passed-through device (hostdev) pins the guest's memory"
            found.append(_Obstacle(why, fixes.no_passthrough(self.names)))
        if self.root.find("./memoryBacking/locked") is not None:
            found.append(_Obstacle("the guest's memory is locked", fixes.no_locked(self.names)))
        return found + self._encrypted()

    def _encrypted(self) -> list[_Obstacle]:
        launch = self.root.find("launchSecurity")
        if launch is None:
            return []
        kind = (launch.get("type") or "").upper()
        why = f"the guest is confidential ({kind}): its encrypted memory cannot be taken or swapped"
        return [_Obstacle(why, fixes.not_confidential(self.names))]

    # --- mechanisms ------------------------------------------------------------------------------------------------

    def _single(self) -> list[_Obstacle]:
        if self.vcpus > 1:
            return []
        return [_Obstacle("the domain has one vCPU, which stays", fixes.more_vcpus(self.names))]

    def _unplug(self) -> list[_Obstacle]:
        found = self._single()
        if not found and not self._hotpluggable():
            why = "the domain booted with vCPUs that are not hotpluggable"
            found.append(_Obstacle(why, fixes.hotpluggable_vcpus(self.names)))
        if self.root.get("type") == "qemu":
            found.append(_Obstacle(NO_UNPLUG_EMULATED))
        elif self.facts.acpi_unplug:
            found.append(_Obstacle(self.facts.acpi_unplug, fixes.acpi_probe()))
        return found

    def _pool(self) -> list[_Obstacle]:
        if not self.facts.huge_pools & self._page_sizes():
            return []
        why = "huge pages that are given back go to the host's pool of them, which is no free memory"
        return [_Obstacle(why, fixes.no_hugepages(self.names))]

    def _virtio_mem(self) -> list[_Obstacle]:
        found = self._pool() + self._encrypted()
        if not self._devices("virtio-mem"):
            found.append(_Obstacle("the domain has no virtio-mem device", fixes.virtio_mem(self.names)))
        if self.root.find("./memoryBacking/locked") is not None:
            why = "QEMU refuses virtio-mem with locked memory"
            found.append(_Obstacle(why, fixes.no_locked(self.names)))
        if pins_memory(self.root) and 0 < self.facts.qemu_version < VIRTIO_MEM_BESIDE_VFIO:
            why = "virtio-mem beside a passed-through device (hostdev) needs QEMU 6.1"
            found.append(_Obstacle(why, fixes.no_passthrough(self.names)))
        return found

    def _device_words(self) -> str:
        devices = self._devices("virtio-mem")
        if not devices:
            return ""
        size = sum(_mib(device.find("target/size")) for device in devices)
        return f"up to {size:g} MiB, in blocks of {self._block_mib():g} MiB"

    def _block_mib(self) -> float:
        return max((_mib(device.find("target/block")) for device in self._devices("virtio-mem")), default=0.0)

    def _dimm(self) -> list[_Obstacle]:
        found = self._pool() + self._encrypted()
        if not self._dimms() and self._devices("dimm"):
            found.append(_Obstacle("the domain's DIMMs are not in its definition, so they could not be given back"))
        elif not self._dimms():
            also = "; virtio-mem gives the same in smaller steps" if self._devices("virtio-mem") else ""
            found.append(_Obstacle(f"the domain has no DIMM{also}"))
        return found

    def _dimm_words(self) -> str:
        sizes = [f"{_mib(dimm.find('target/size')):g}" for dimm in self._dimms()]
        return f"{len(sizes)} of {', '.join(dict.fromkeys(sizes))} MiB, each as a whole" if sizes else ""

    def _quota_words(self) -> str:
        lacks = self.facts.no_burst
        bursts = f"without bursts: {lacks}" if lacks else f"with bursts of {100 * burst.SHARE:g} % of it"
        return f"on {self.vcpus} vCPU threads, cgroup {self.facts.cgroups}, {bursts}"

    def _quota(self) -> list[_Obstacle]:
        if self.facts.cgroups != "none":
            return [_Obstacle(self.facts.no_quota)] if self.facts.no_quota else []
        return [_Obstacle("no cgroup file system is mounted on the host", fixes.cgroups())]

    def _balloon(self) -> list[_Obstacle]:
        found = []
        device = self.root.find("./devices/memballoon")
        if device is None or device.get("model") == "none":
            found.append(_Obstacle("the domain has no balloon", fixes.balloon(self.names)))
        if self._hugepages():
            why = "the balloon hands back pages of 4 KiB, the host frees huge pages only as a whole"
            found.append(_Obstacle(why, fixes.no_hugepages(self.names)))
        return found + self.pinned

    def _balloon_words(self) -> str:
        device = self.root.find("./devices/memballoon")
        if device is None:
            return ""
        words = [f"model {device.get('model')}"]
        if not self.channel:
            words.append("by its statistics alone")
        if device.find("stats[@period]") is None:
            words.append("without statistics")
        words.append(
            "with free page reporting" if device.get("freePageReporting") == "on" else "without page reporting"
        )
        return ", ".join(words)

    def _hugepages(self) -> bool:
        return self.root.find("./memoryBacking/hugepages") is not None

    def _page_sizes(self) -> set[int]:
        """Of its huge pages, KiB; 0: the host's default."""
        if not self._hugepages():
            return set()
        pages = self.root.findall("./memoryBacking/hugepages/page")
        named = [(page.get("size", "0"), page.get("unit", "KiB")) for page in pages] or [("0", "KiB")]
        devices = self.root.findall("./devices/memory/source/pagesize")
        named += [(size.text or "0", size.get("unit", "KiB")) for size in devices]
        return {round(float(size) * _MIB.get(unit, _MIB["KiB"]) * 1024) for size, unit in named}

    def _limit(self) -> list[_Obstacle]:
        found = [_Obstacle(self.facts.no_limit)] if self.facts.no_limit else []
        if self.facts.swap_total_mib <= 0:
            why = "the host has no swap, so the kernel would kill QEMU at the limit"
            found.append(_Obstacle(why, fixes.swap(self.names)))
        elif self.facts.swap_free_mib < LEAST_SWAP_MIB:
            found.append(_Obstacle("the host's swap is full", fixes.swap(self.names)))
        if self._hugepages():
            found.append(_Obstacle("huge pages are never swapped", fixes.no_hugepages(self.names)))
        if self._shared():
            # A page that vhost-user or virtiofsd touches first is charged to them: QEMU's limit does not hold it.
            why = "the guest's memory is shared, so pages may be charged to other processes than QEMU"
            found.append(_Obstacle(why, fixes.no_shared(self.names)))
        return found + self.pinned

    def _shared(self) -> bool:
        access, source = self.root.find("./memoryBacking/access"), self.root.find("./memoryBacking/source")
        mode = access.get("mode") if access is not None else ""
        cells = self.root.findall("./cpu/numa/cell[@memAccess='shared']")
        backed = source is not None and source.get("type") in ("file", "memfd")
        return mode == "shared" or bool(cells) or (backed and mode != "private")

    def _bandwidth(self, why: str, fix: str) -> list[_Obstacle]:
        return [_Obstacle(why, fix)] if why else []

    def _hint(self, mechanism: Mechanism) -> str:
        """What would make an available mechanism better."""
        if mechanism is Mechanism.BALLOON and "without" in self._balloon_words():
            return fixes.balloon(self.names)
        # Without one its boot loader has it, which cannot be read from here.
        cmdline = self.root.findtext("./os/cmdline")
        if mechanism in (Mechanism.VIRTIO_MEM, Mechanism.DIMM) and MOVABLE not in (cmdline or ""):
            return fixes.movable(cmdline is not None)
        return ""


def _mib(element: ElementTree.Element | None) -> float:
    """A size of libvirt's; without a unit it is in KiB."""
    if element is None:
        return 0.0
    return float(element.text or 0) * _MIB.get(element.get("unit", "KiB"), _MIB["KiB"])
