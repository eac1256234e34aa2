"""The means by which a layer takes and gives: which of them a VM has now, and why not where it has not.

A layer (Sharma et al. 2019, Fig. 3) has several means, each for one resource; what blocks one of them does
not block the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from ebbtide.deflation.ledger import Layer


class Mechanism(StrEnum):
    """One means of one layer."""

    APPLICATION = "application"
    #: Cold pages made free inside the guest, by its kernel's own reclaim.
    COLD = "cold-reclaim"
    #: CPUs off line inside the guest, by explicit map.
    CPU_OFFLINE = "cpu-offline"
    #: ACPI hot-unplug of vCPUs: only where a throw-away guest on the host has passed it.
    CPU_UNPLUG = "cpu-unplug"
    VIRTIO_MEM = "virtio-mem"
    #: Unplug of whole DIMMs.
    DIMM = "dimm"
    #: Quota on each vCPU thread.
    QUOTA = "quota"
    BALLOON = "balloon"
    #: A limit on QEMU's memory that the host's swap backs.
    MEMORY_LIMIT = "memory-limit"
    DISK = "disk-bandwidth"
    NETWORK = "network-bandwidth"


LAYER_OF: Final[Mapping[Mechanism, Layer]] = {
    Mechanism.APPLICATION: Layer.APPLICATION,
    Mechanism.COLD: Layer.COLD,
    Mechanism.CPU_OFFLINE: Layer.GUEST,
    Mechanism.CPU_UNPLUG: Layer.GUEST,
    Mechanism.VIRTIO_MEM: Layer.GUEST,
    Mechanism.DIMM: Layer.GUEST,
    Mechanism.QUOTA: Layer.HYPERVISOR,
    Mechanism.BALLOON: Layer.HYPERVISOR,
    Mechanism.MEMORY_LIMIT: Layer.HYPERVISOR,
    Mechanism.DISK: Layer.HYPERVISOR,
    Mechanism.NETWORK: Layer.HYPERVISOR,
}


#: What most VMs do not have, and is not missed where the other means of the layer are there.
RARE: Final = (Mechanism.CPU_UNPLUG, Mechanism.DIMM)


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one mechanism can be used on one VM."""

    mechanism: Mechanism
    available: bool
    #: Why not; where it is available: what is used.
    reason: str
    #: What would make it available (or better), to be copied; empty where nothing can.
    fix: str = ""
    #: The smallest amount that it moves, MiB; 0 where that is of no account.
    step_mib: float = 0.0
    #: Whether it can give although it cannot take: a guest's kernel takes memory without the guest agent.
    gives: bool = False

    @property
    def layer(self) -> Layer:
        return LAYER_OF[self.mechanism]


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """What can be used on one VM now. The reasons stand in the ledger."""

    #: What cannot be used, and why, in words; all others can.
    blocked: Mapping[Mechanism, str] = field(default_factory=dict)
    #: Granularity of virtio-mem in MiB.
    block_mib: float = 2.0

    def has(self, mechanism: Mechanism) -> bool:
        """Whether it can be used."""
        return mechanism not in self.blocked

    def reason(self, mechanism: Mechanism) -> str:
        """Why it cannot be used; empty if it can."""
        return self.blocked.get(mechanism, "")

    def why_not(self, layer: Layer) -> str:
        """Why nothing of a layer can be used; empty if something can."""
        members = [mechanism for mechanism, its in LAYER_OF.items() if its is layer]
        if any(self.has(mechanism) for mechanism in members):
            return ""
        usual = [mechanism for mechanism in members if mechanism not in RARE]
        return "; ".join(dict.fromkeys(self.reason(mechanism) for mechanism in usual))

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Mechanisms:
        """What was found, as the machines take it; a mechanism that nothing was found about can be used."""
        found = {finding.mechanism: finding for finding in findings}
        device = found.get(Mechanism.VIRTIO_MEM)
        blocked = {mechanism: finding.reason for mechanism, finding in found.items() if not finding.available}
        return cls(blocked, device.step_mib) if device is not None and device.step_mib else cls(blocked)

    @classmethod
    def to_give(cls, findings: Iterable[Finding]) -> Mechanisms:
        """As `of`, where nothing is to be taken."""
        return cls.of(replace(finding, available=finding.available or finding.gives) for finding in findings)

    def without(self, mechanisms: Iterable[Mechanism], why: str) -> Mechanisms:
        """A copy with some more blocked; what is blocked already keeps its reason."""
        return replace(self, blocked=dict.fromkeys(mechanisms, why) | dict(self.blocked))
