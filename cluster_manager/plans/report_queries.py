"""Queries of agents' reports: what a host lacks for a VM, what to reclaim, which layer failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from cluster_manager.plans.plans import Arrival, Purpose
from cluster_manager.plans.preemption import LEAST_S, PreemptionReason
from ebbtide.deflation.allocations import Allocation, Priority, shareable, undeclared
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.resources import COMPONENTS, ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import Joining, joining, sizes_to_reach
from ebbtide.messages.common import Vector, is_known
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import VMSpec, VMState, VMStatus

_MEMORY: Final = COMPONENTS.index("memory_mib")
#: What keeps the agent of a VM in each of these states from taking anything from it.
STANDS: Final[Mapping[VMState, str]] = {
    VMState.STARTING: "is being started",
    VMState.STOPPING: "is being stopped",
    VMState.PAUSED: "is paused",
    VMState.STOPPED: "is off",
    VMState.MIGRATING: "is moving",
}


def demand_of(spec: VMSpec, report: HostReport, size: ResourceVector | None = None) -> ResourceVector:
    """The nominal size, or the one that is given, and, in memory, what a VM costs that host besides."""
    return (size or spec.nominal.vector()) + ResourceVector(memory_mib=report.vm_overhead_mib)


def for_start_of(found: VMStatus, report: HostReport) -> HostReport:
    """The report, where a VM costs besides its size what the start of this one does, which is off."""
    overhead_mib = found.start_overhead_mib
    if overhead_mib is None or overhead_mib == report.vm_overhead_mib:
        return report
    return report.model_copy(update={"vm_overhead_mib": overhead_mib})


def asked_of_hosts(spec: VMSpec, purpose: Purpose) -> ResourceVector:
    """The size that a host must be able to hold to be tried."""
    return spec.least_start() if purpose == "deflated" else spec.nominal.vector()


def size_to_join(spec: VMSpec, report: HostReport, left_out: Collection[str] = ()) -> Joining | None:
    """At what size a VM that may start deflated joins a host, and what the others give; None: it does not fit.

    :param left_out: names of VMs that give nothing.
    """
    newcomer = spec.allocation(spec.nominal.vector(), report.vm_overhead_mib)
    free = report.free.vector().larger(undeclared(report.capacity.vector(), newcomer.charge))
    return joining(rows_of_split(report, left_out), newcomer, free, spec.least_start())


def room_for_start(spec: VMSpec, report: HostReport, wished: ResourceVector) -> ResourceVector:
    """As much of the wished size as is free on the host, on the grid of sizes."""
    size = [0.0] * len(COMPONENTS)
    free, capacity = tuple(report.free.vector()), tuple(report.capacity.vector())
    placement_step.room_to_start(free, capacity, tuple(wished), report.vm_overhead_mib, size)
    return ResourceVector(*size)


def pressed_on(report: HostReport) -> set[str]:
    """Names of the VMs under pressure."""
    return {vm.name for vm in report.vms if vm.pressure}


def missing_on(report: HostReport, demand: ResourceVector) -> ResourceVector:
    """``max(demand - free, 0)``; disk and network only where the host declares them.

    Where its VMs hold more than the host has, that is missing before anything else.
    """
    missing = [0.0] * len(COMPONENTS)
    placement_step.missing_of(tuple(demand), tuple(report.free.vector()), tuple(report.capacity.vector()), missing)
    beyond = report.overcommitted.vector()
    return ResourceVector(*(lacks + over if lacks > 0 else 0.0 for lacks, over in zip(missing, beyond, strict=True)))


def closed(report: HostReport) -> str:
    """Why a host takes no new VM, whatever it may have free; empty if it does."""
    if report.unavailable:
        return f"the hypervisor of {report.id} does not answer ({report.unavailable})"
    beyond = report.overcommitted.vector()
    return "" if beyond.is_zero() else f"{report.id} is overcommitted by {beyond}"


def reclaim_need(missing: ResourceVector, deflatable: ResourceVector) -> ResourceVector:
    """The need to send: what is missing, in whole steps of a size, and never more than can be deflated."""
    need = [0.0] * len(COMPONENTS)
    placement_step.need_of(tuple(missing), tuple(deflatable), need)
    return ResourceVector(*need)


def to_come(report: HostReport, arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Those that a host does not charge yet: from its agent's taking a start on, what is free is without that VM."""
    if not (arrivals := list(arrivals)):
        return []
    charged = {vm.name for vm in report.vms if vm.start_size is None}
    return [arrival for arrival in arrivals if arrival.vm not in charged]


def need_together(
    report: HostReport,
    demand: ResourceVector,
    deflatable: ResourceVector,
    left_s: float,
    queue: Sequence[Arrival],
    now: float,
) -> tuple[ResourceVector, float, int]:
    """What to reclaim for an arrival and, at the same time, for those that wait for the host behind it.

    Each of them in its turn, as long as deflation can give enough for all: nobody waits for what only a preemption
    would free, and one that would cut the time to less than a quarter, or than ``LEAST_S``, is left out.

    :param demand: of the arrival that has the host, with its overhead.
    :param left_s: its time, in seconds.
    :param now: seconds since the epoch.
    :returns: the need, the time of the one that can wait least, and how many others it is for.
    """
    others, least_s = 0, min(left_s, max(LEAST_S, left_s / 4))
    for arrival in to_come(report, queue):
        both = demand + arrival.size + ResourceVector(memory_mib=report.vm_overhead_mib)
        if arrival.until_s - now >= least_s and missing_on(report, both).fits_in(deflatable):
            demand, left_s, others = both, min(left_s, arrival.until_s - now), others + 1
    return reclaim_need(missing_on(report, demand), deflatable), left_s, others


def room_to_share(report: HostReport, queue: Sequence[Arrival], room: Vector | None) -> Vector | None:
    """What a host's VMs may grow into: not what arrivals would have to take again that wait for it, or will come.

    :param room: what was meant for them; None: all that is free.
    """
    kept, coming = kept_free(report), to_come(report, queue)
    if not coming and kept.is_zero():
        return room
    free = report.free.vector().less(kept)
    for arrival in coming:
        free = free.less(arrival.size + ResourceVector(memory_mib=report.vm_overhead_mib))
    lacking = sum(((vm.ceiling or vm.nominal).vector().less(vm.current.vector()) for vm in report.vms), ZERO)
    free = shareable(free, report.capacity.vector(), lacking)
    return Vector.of(free if room is None else free.smaller(room.vector()))


def kept_free(report: HostReport) -> ResourceVector:
    """What steady mode keeps free on a host: only guests under pressure grow into it."""
    return ResourceVector(memory_mib=report.reserve_mib)


def still_silent(before: HostReport, now: HostReport, vms: Collection[str]) -> bool:
    """Whether guests have to be waited for still: none of them answers, and no other room has appeared meanwhile.

    :param before: when the waiting began.
    :param vms: those that are waited for.
    """
    silent = {vm.name for vm in now.vms if vm.not_yet is not None}
    room, had = (report.free.vector() + report.deflatable.vector() for report in (now, before))
    return silent.issuperset(vms) and room.fits_in(had)


def low_priority(report: HostReport) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a host's low-priority VMs are charged, and what they have above their minimums, in ``COMPONENTS``' order.

    The same as of `allocations_of`, without making those rows: every report is read for this.
    """
    charged, above = [0.0] * len(COMPONENTS), [0.0] * len(COMPONENTS)
    for vm in report.vms:
        if vm.priority is Priority.FIXED:
            continue
        current, minimum = vm.current.__dict__, vm.minimum.__dict__
        for at, component in enumerate(COMPONENTS):
            has = current[component]
            charged[at] += has
            above[at] += max(has - minimum[component], 0.0)
        charged[_MEMORY] += vm.overhead_mib
    return tuple(charged), tuple(above)


def allocations_of(report: HostReport) -> list[Allocation]:
    """The rows that policies read: not those of VMs that were stopped on command, which hold no room."""
    return [vm.allocation() for vm in report.vms if vm.start_size is None]


def why_still(vm: VMStatus) -> str:
    """What keeps a VM's agent from taking anything from it; empty: nothing."""
    unknown = "" if is_known(vm.state) else f"is {vm.state}, a state that is not known here"
    return STANDS.get(vm.state, unknown)


def gives_nothing(vm: VMStatus) -> bool:
    """Whether a VM's agent takes nothing from it: it is under pressure, or its size cannot be changed now."""
    return bool(vm.pressure) or bool(why_still(vm))


def not_yet(report: HostReport, left_out: Collection[str] = ()) -> list[VMStatus]:
    """The low-priority VMs that cannot be deflated yet, but probably can be soon."""
    return [
        vm
        for vm in report.vms
        if vm.not_yet is not None
        and vm.priority is not Priority.FIXED
        and not gives_nothing(vm)
        and vm.name not in left_out
    ]


def coming_mib(vms: Iterable[VMStatus]) -> float:
    """The memory that VMs can probably be deflated by besides, once their guests answer; no more than they have."""
    return sum(min(vm.not_yet.memory_mib, vm.allocation().deflatable.memory_mib) for vm in vms if vm.not_yet)


def silent_on(vms: Iterable[VMStatus]) -> str:
    """Guests that do not answer yet, and why, in words."""
    named: dict[str, list[str]] = {}
    for vm in vms:
        if vm.not_yet is not None:
            named.setdefault(vm.not_yet.why, []).append(vm.name)
    return " and ".join(
        f"{', '.join(names)}, which {'is' if len(names) == 1 else 'are'} {why}" for why, names in named.items()
    )


def row_now(vm: VMStatus) -> Allocation:
    """A VM's row, with what cannot be taken from it now as its minimum."""
    row = vm.allocation()
    if gives_nothing(vm):
        return row.keeping(row.current)
    return row.keeping(row.minimum + ResourceVector(memory_mib=coming_mib([vm])))


def rows_of_split(report: HostReport, left_out: Collection[str] = ()) -> list[Allocation]:
    """The rows by which a host's agent splits a need.

    :param left_out: names of VMs that give nothing.
    """
    rows = [row_now(vm) for vm in report.vms if vm.start_size is None]
    return [row.keeping(row.current) if row.name in left_out else row for row in rows]


def failed_layer(operation: Operation) -> str | None:
    """The last layer that was asked and gave less, of a VM that fell short, with its reason.

    What the guest's cold pages did not give is no lack: whatever they leave is unplugged all the same.
    """
    for outcome in operation.vms:
        if outcome.errors or outcome.shortfall.vector().is_zero():
            continue
        for row in reversed(outcome.ledger):
            if row.asked > row.verified and row.layer is not Layer.COLD:
                return f"{row.layer.value} ({row.reason})" if row.reason else row.layer.value
    return None


def deflatable_beside(report: HostReport, left_out: Collection[str]) -> ResourceVector:
    """What can be deflated on a host without some VMs; of those that give nothing its report counts nothing anyway."""
    counted = (vm for vm in report.vms if vm.name in left_out)
    return report.deflatable.vector().less(sum((row_now(vm).deflatable for vm in counted), ZERO))


def withheld_by(report: HostReport, left_out: Collection[str]) -> ResourceVector:
    """What VMs that are left out have above their minimums."""
    return sum((row.deflatable for row in allocations_of(report) if row.name in left_out), ZERO)


def room_by_deflation(report: HostReport) -> ResourceVector:
    """What a host has for one more VM if its low-priority VMs give what they can; of what it does not declare there is
    as much as anybody asks for.
    """
    room = report.free.vector() + report.deflatable.vector()
    room = room.less(ResourceVector(memory_mib=report.vm_overhead_mib))
    return room.larger(undeclared(report.capacity.vector(), ResourceVector(disk_mib_s=1e12, network_mib_s=1e12)))


def room_for(spec: VMSpec, report: HostReport) -> str:
    """That a host has room for a VM, whoever else stays, so that nobody has to go; empty if it has not."""
    if closed(report) or not missing_on(report, demand_of(spec, report)).is_zero():
        return ""
    return f"{report.id} has room for {spec.name}"


def shares_disk(report: HostReport, vm: VMStatus) -> bool:
    """Whether a VM's disk is on other hosts, too, by its template."""
    return any(template.shared_disk for template in report.templates or () if template.name == vm.template)


def seen_elsewhere(report: HostReport, spec: VMSpec, vm: VMStatus) -> bool:
    """Whether other hosts see all that a VM which is off needs: what was saved of its memory is on its host's disk."""
    return spec.xml is None and vm.saved_mib is None and not vm.adopted and shares_disk(report, vm)


def without_image(report: HostReport) -> str:
    """That a host has no base image, without which no VM is made there; empty: it has one, or does not say."""
    return "" if report.can_create else f"{report.id} has no base image"


def lacks(report: HostReport, spec: VMSpec) -> str:
    """What a host lacks that a VM is made of; empty: nothing. One that does not say may have any template."""
    if why := without_image(report):
        return why
    return "" if has_template(report, spec) else f"{report.id} has no template {spec.template}"


def has_template(report: HostReport, spec: VMSpec) -> bool:
    """Whether a host has what a VM is made of; one that does not say may have any template."""
    if not report.can_create or spec.xml is not None or report.templates is None:
        return report.can_create
    return any(template.name == spec.template for template in report.templates)


def reason_to_preempt(
    report: HostReport, missing: ResourceVector, left_out: Collection[str]
) -> tuple[dict[str, Vector], PreemptionReason, str | None]:
    """Why a host would have to preempt, as it is now.

    The reason is ``minimum`` only where the minimums stand in the way. Where a guest under pressure does, from which
    nothing is taken, it is a ``shortfall`` like that of any other layer.

    :returns: the size that each VM should reach, the reason, and the layer that falls short, where that is known.
    """
    targets, in_the_way = sizes_to_reach(allocations_of(report), missing)
    layer = None
    if not in_the_way and not missing.fits_in(report.deflatable.vector()):
        pressed, silent = ", ".join(sorted(pressed_on(report))), not_yet(report, left_out)
        why = [f"{pressed or 'one'} under pressure gives nothing"] if pressed or not silent else []
        why += [f"no answer of {silent_on(silent)}"] if silent else []
        layer = f"guest ({'; '.join(why)})"
    wire = {name: Vector.of(target) for name, target in targets.items()}
    return wire, PreemptionReason.MINIMUM if in_the_way else PreemptionReason.SHORTFALL, layer
