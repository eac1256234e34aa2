"""Rows that every policy reads: what a VM was sold, its floor, and what it has now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ZERO, ResourceVector


class Priority(StrEnum):
    """How a VM was sold (Sharma et al. 2019, §3, Agarwal et al. 2023, §2.1)."""

    FIXED = "fixed"
    DEFLATABLE = "deflatable"
    HARVEST = "harvest"


#: CPU shares per nominal core: who gets how much of a host whose CPUs are wanted by more than there are. A harvest VM's
#: are nearly idle: beside a fixed VM of as many cores it has one per cent. Within the range that both control group
#: versions have (libvirt: cpu_shares; Linux: cgroup-v2, cpu.weight).
SHARES_PER_CORE: Final = {Priority.FIXED: 200, Priority.DEFLATABLE: 50, Priority.HARVEST: 2}
MOST_SHARES: Final = 10_000


def cpu_shares(priority: Priority, nominal_cores: float) -> int:
    """The weight of a VM's CPU time against that of its neighbours; a limit comes from quotas alone."""
    return max(2, min(round(SHARES_PER_CORE[priority] * nominal_cores), MOST_SHARES))


@dataclass(frozen=True, slots=True)
class Allocation:
    """One VM on one host.

    :raises InvalidField: the sizes contradict each other; the error names the field.
    """

    name: str
    priority: Priority
    #: What the VM was sold.
    nominal: ResourceVector
    #: The effective minimum, below which a VM is preempted instead.
    minimum: ResourceVector
    #: What the host lets it hold now (verified, never promised).
    current: ResourceVector
    #: Up to where a harvest VM may grow; for others the nominal size.
    ceiling: ResourceVector | None = None
    #: What the VM costs its host besides its size (emulator, page tables), in MiB of memory.
    overhead_mib: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self.priority, self.nominal, self.minimum, self.ceiling)
        if not self.current.fits_in(self.upper):
            raise InvalidField("current", f"({self.current}) exceeds what the VM may have ({self.upper})")

    @property
    def upper(self) -> ResourceVector:
        """The largest size: the ceiling of a harvest VM, the nominal size of any other."""
        return self.ceiling if self.ceiling is not None else self.nominal

    @property
    def deflatable(self) -> ResourceVector:
        """What can still be taken: all above the minimum, nothing of a fixed VM."""
        return ZERO if self.priority is Priority.FIXED else self.current.less(self.minimum)

    def keeping(self, size: ResourceVector) -> Allocation:
        """The same VM while it cannot be taken below a size; a harvest VM may have more than its nominal size."""
        return replace(self, minimum=size, nominal=self.nominal.larger(size))

    @property
    def charge(self) -> ResourceVector:
        """What the VM takes from its host's capacity: its size and its overhead."""
        return self.current + ResourceVector(memory_mib=self.overhead_mib)


def check_sizes(
    priority: Priority, nominal: ResourceVector, minimum: ResourceVector, ceiling: ResourceVector | None
) -> None:
    """Hold the sizes of one VM against each other.

    :raises InvalidField: names ``nominal``, ``minimum`` or ``ceiling`` with the component.
    """
    for component in ("cpu_cores", "memory_mib"):
        if nominal[component] < HARD_FLOOR[component]:
            raise InvalidField(f"nominal.{component}", f"must be at least {HARD_FLOOR[component]:g}")
    if (ceiling is not None) != (priority is Priority.HARVEST):
        raise InvalidField("ceiling", "is for harvest VMs, and they must have one")
    for component in COMPONENTS:
        if minimum[component] > nominal[component] + TOLERANCE:
            raise InvalidField(
                f"minimum.{component}", f"({minimum[component]:g}) exceeds nominal ({nominal[component]:g})"
            )
        if ceiling is not None and ceiling[component] < nominal[component] - TOLERANCE:
            raise InvalidField(
                f"ceiling.{component}", f"({ceiling[component]:g}) is below nominal ({nominal[component]:g})"
            )


def check_target(allocation: Allocation, target: ResourceVector) -> None:
    """Whether a VM may be brought to a size: within [effective minimum, nominal or ceiling].

    :raises InvalidField: names ``target`` with the component and the range; fixed VMs have only their nominal size.
    """
    lowest = allocation.nominal if allocation.priority is Priority.FIXED else allocation.minimum
    for component in COMPONENTS:
        low, high, value = lowest[component], allocation.upper[component], target[component]
        if not low - TOLERANCE <= value <= high + TOLERANCE:
            raise InvalidField(f"target.{component}", f"must be within [{low:g}, {high:g}], but is {value:g}")


def free_capacity(
    capacity: ResourceVector, allocations: Iterable[Allocation], memory_available_mib: float | None = None
) -> ResourceVector:
    """What a host has left: its slice less the charges, and no more memory than the machine really has.

    :param memory_available_mib: what the host's kernel calls available, less the reserve and what is spoken for
        (`untouched_mib`); VMs and processes that are not ours count through it. None where it was not measured
        (simulation).
    """
    free = capacity
    for allocation in allocations:
        free = free.less(allocation.charge)
    if memory_available_mib is not None:
        free = free.with_component("memory_mib", max(0.0, min(free.memory_mib, memory_available_mib)))
    return free


def untouched_mib(held: Iterable[tuple[Allocation, float | None]]) -> float:
    """What VMs are charged and may still touch, MiB: memory that their host has available and must not sell again.

    :param held: each VM with what it has in the host's memory, MiB; None where that is not known, so that it counts as
        having all.
    """
    return sum(max(vm.charge.memory_mib - has, 0.0) for vm, has in held if has is not None)


def undeclared(capacity: ResourceVector, size: ResourceVector) -> ResourceVector:
    """What a VM may ask for in disk and network where its host does not declare them: anything."""
    return ResourceVector(
        disk_mib_s=0.0 if capacity.disk_mib_s > 0 else size.disk_mib_s,
        network_mib_s=0.0 if capacity.network_mib_s > 0 else size.network_mib_s,
    )


def lack(allocations: Iterable[Allocation]) -> ResourceVector:
    """What VMs lack of what they may have, together."""
    return sum((allocation.upper.less(allocation.current) for allocation in allocations), ZERO)


def shareable(free: ResourceVector, capacity: ResourceVector, lacking: ResourceVector) -> ResourceVector:
    """What VMs can grow into: of what their host does not declare, all that they lack.

    :param free: what the host has free.
    """
    return free.larger(undeclared(capacity, lacking))


def deflatable_capacity(allocations: Iterable[Allocation]) -> ResourceVector:
    """What could still be reclaimed on a host by deflation (Sharma et al. 2019, Eq. 4)."""
    return sum((allocation.deflatable for allocation in allocations), ZERO)


def size_after(old: Allocation, new: Allocation) -> ResourceVector:
    """The size that a VM has after a change of what it was sold.

    Nominal that grows is given in full: the VM gets what was added on top of what it has. Then the size is brought into
    the new range. A fixed VM has its nominal size, whatever it had.
    """
    if new.priority is Priority.FIXED:
        return new.nominal
    size = old.current + new.nominal.less(old.nominal)
    return size.smaller(new.upper).larger(new.minimum)
