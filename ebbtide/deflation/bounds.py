"""The bound: what a host lets a VM hold, measured, and which layer brought its fall about.

Accounting as in docs/internals/contracts.md: only a fall of the bound counts as reclaimed, the guest layer's part and
the hypervisor layer's part add up to it, and what the application says it freed is never added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ebbtide.deflation.resources import ResourceVector

#: What a whole domain may use above its size: QEMU's own threads, whose work an honest guest's vCPUs, held to the size
#: by quotas of their own, leave room for. What a guest that lies about its CPUs can gain at the most.
EMULATOR_SHARE: Final = 0.03


@dataclass(frozen=True, slots=True)
class Bound:
    """One reading of what a VM can hold, taken from outside wherever outside can see it."""

    #: vCPUs that the guest has on line.
    cpus_online: int
    #: Quota of one vCPU, in cores; None where there is no limit.
    quota_per_cpu: float | None
    #: Boot memory less what the balloon holds (libvirt's ``actual``), MiB.
    balloon_mib: float
    #: Memory plugged through virtio-mem (``<current>``) and DIMMs, MiB.
    plugged_mib: float
    #: Disk and network limits as read back, MiB/s; 0 where none is declared.
    disk_mib_s: float = 0.0
    network_mib_s: float = 0.0
    #: Limit on the guest's whole memory that swap backs, MiB; None where there is none.
    limit_mib: float | None = None
    #: Of what is plugged, the DIMMs that can be taken, MiB each: they go as a whole only.
    dimms_mib: tuple[float, ...] = ()
    #: Cap of the whole domain, QEMU's own threads included, in cores; None where there is none.
    cap_cores: float | None = None
    #: vCPUs plugged, on line or not; 0: those on line.
    vcpus: int = 0
    #: Of what is plugged, DIMMs that could not be given back and so are not taken, MiB.
    fixed_mib: float = 0.0

    @property
    def virtio_mib(self) -> float:
        """Of what is plugged, virtio-mem's part."""
        return self.plugged_mib - sum(self.dimms_mib) - self.fixed_mib

    @property
    def cpu_cores(self) -> float:
        """min(CPUs on line, sum of quotas, cap of the domain), in cores."""
        limits = [float(self.cpus_online)]
        if self.quota_per_cpu is not None:
            limits.append(round(self.quota_per_cpu * self.cpus_online, 4))
        if self.cap_cores is not None:
            limits.append(round(self.cap_cores / (1 + EMULATOR_SHARE), 4))
        return min(limits)

    @property
    def held_mib(self) -> float:
        """Balloon actual and plugged memory together: what the guest sees, in MiB."""
        return self.balloon_mib + self.plugged_mib

    @property
    def memory_mib(self) -> float:
        """What the guest sees, or a lower limit that swap backs, in MiB."""
        return self.held_mib if self.limit_mib is None else min(self.held_mib, self.limit_mib)

    @property
    def size(self) -> ResourceVector:
        """The bound as a vector: the size that capacity accounting uses."""
        return ResourceVector(self.cpu_cores, self.memory_mib, self.disk_mib_s, self.network_mib_s)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The fall of a bound, split by the layer that caused it."""

    guest: ResourceVector
    hypervisor: ResourceVector

    @property
    def total(self) -> ResourceVector:
        return self.guest + self.hypervisor


def reclaimed(before: Bound, after: Bound) -> Reclaimed:
    """Split ``before - after`` into what unplugging gave and what throttling and ballooning gave.

    A CPU off line counts for the guest layer as far as the bound was above what stays on line; quota takes the rest.
    Unplugged memory counts as far as it alone would have lowered the bound: below a limit that was there already, it
    does not.
    A component that grew counts as nothing reclaimed.
    """
    cpu_fall = max(before.cpu_cores - after.cpu_cores, 0.0)
    cpu_guest = min(cpu_fall, max(before.cpu_cores - after.cpus_online, 0.0))
    memory_fall = max(before.memory_mib - after.memory_mib, 0.0)
    unplugged = replace(before, plugged_mib=min(before.plugged_mib, after.plugged_mib))
    memory_guest = min(memory_fall, before.memory_mib - unplugged.memory_mib)
    return Reclaimed(
        guest=ResourceVector(cpu_cores=cpu_guest, memory_mib=memory_guest),
        hypervisor=ResourceVector(
            cpu_cores=cpu_fall - cpu_guest,
            memory_mib=memory_fall - memory_guest,
            disk_mib_s=max(before.disk_mib_s - after.disk_mib_s, 0.0),
            network_mib_s=max(before.network_mib_s - after.network_mib_s, 0.0),
        ),
    )


def held_by_guest(nominal: ResourceVector, size: ResourceVector, bound: Bound, boot_mib: float) -> ResourceVector:
    """What of the difference between nominal and present size the guest layer keeps away: CPUs off line, memory that is
    not plugged. The rest is the hypervisor layer's.

    :param bound: as it was read last; its CPUs on line by the guest's word.
    :param boot_mib: memory that cannot be unplugged, MiB.
    """
    return ResourceVector(
        cpu_cores=max(min(nominal.cpu_cores - size.cpu_cores, nominal.cpu_cores - bound.cpus_online), 0.0),
        memory_mib=max(
            min(nominal.memory_mib - size.memory_mib, nominal.memory_mib - boot_mib - bound.plugged_mib), 0.0
        ),
    )
