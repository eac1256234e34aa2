"""Metrics of a host agent: what each means, and their values from what the agent knows. Asks no hypervisor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from ebbtide.messages.guest import MemoryState
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMStatus
from ebbtide.rest.metrics.sheet import MIB, Amounts, Metric, Sheet, amounts, counter, declared_in, gauge
from ebbtide.rest.metrics.totals import Calls, Distribution, Reports
from hostagent.control.usage import SAID_FOR_S
from hostagent.state.tallies import DIRECTIONS, ENDINGS, Tally

#: How many values each label can have.
LABELS: Final[Mapping[str, str]] = {
    "vm": "the VMs of the host, 1,000 at the most; those that are gone leave",
    "layer": "4: application, cold, guest, hypervisor",
    "direction": "2: deflate, reinflate",
    "resource": "4: cpu_cores, memory_mib, disk_mib_s, network_mib_s",
    "outcome": "up to 4, named in the metric's row",
    "reason": "5: the layer that fell short, error, unasked",
    "kind": "the words of an enumeration: 18 kinds of decisions, 14 of operations",
    "state": "8 states of a VM, of which one stands at a time; 3 of an operation",
    "mode": "4: active, paused, draining, off",
    "priority": "3: fixed, deflatable, harvest",
    "guest_kind": "3: agent, qemu-guest-agent, balloon",
    "template": "the host's templates",
    "stall": "2: some, full",
    "directory": "3: state, disks, saved",
    "id": "1",
    "accelerator": "1",
    "version": "1",
    "le": "up to 11",
}

_VM: Final = ("vm",)
_LAYER: Final = ("direction", "layer")
_BY_LAYER: Final = ("vm", *_LAYER)


class _Host:
    """Of the host and its agent."""

    info: Metric = gauge("host_info", "1; which host.", "id", "accelerator")
    mode: Metric = gauge("host_mode", "1 for the mode that the host has, 0 for the others.", "mode")
    hypervisor_up: Metric = gauge("host_hypervisor_up", "Whether the hypervisor answers.")
    capacity: Amounts = amounts("ebbtide_host_capacity", "What the agent may hand out")
    free: Amounts = amounts("ebbtide_host_free", "What could be given away now")
    deflatable: Amounts = amounts("ebbtide_host_deflatable", "What could be taken from VMs now")
    beyond: Amounts = amounts(
        "ebbtide_host_overcommitted", "What VMs are charged beyond the capacity, or what is there"
    )
    budget: Amounts = amounts("ebbtide_host_harvest_budget", "What harvest VMs may hold above their minimums, together")
    reserve: Metric = gauge("host_reserve_bytes", "Memory that steady mode keeps free for arrivals; 0: it is off.")
    trimmed: Metric = counter("host_trimmed_bytes", "Idle memory that steady mode has taken from VMs.")
    given_back: Metric = counter("host_trimmed_back_bytes", "Memory that steady mode has given back to VMs.")
    available: Metric = gauge("host_memory_available_bytes", "Memory that the host's kernel calls available.")
    untouched: Metric = gauge(
        "host_untouched_memory_bytes", "Memory that VMs are charged and have not touched yet: it is not free."
    )
    swap_size: Metric = gauge("host_swap_size_bytes", "Swap of the host.")
    swap_free: Metric = gauge("host_swap_free_bytes", "Swap of the host that is free.")
    disk_size: Metric = gauge("host_disk_size_bytes", "Size of the disk of a directory of the agent.", "directory")
    disk_free: Metric = gauge("host_disk_free_bytes", "Free room on the disk of a directory.", "directory")
    vms: Metric = gauge("host_vms", "VMs of the host.", "state", "priority")
    decisions: Metric = counter("host_decisions", "Decisions of the agent, repetitions included.", "kind")
    operations: Metric = gauge("host_operations", "Operations under way.", "kind")
    operation: Metric = Metric(
        "ebbtide_host_operation_duration_seconds",
        "histogram",
        "How long operations took that have ended; state: done, partial or failed.",
        ("kind", "state"),
    )
    reports: Metric = counter("host_reports", "Reports to the manager; outcome: taken or failed.", "outcome")
    reported_at: Metric = gauge("host_last_report_timestamp_seconds", "When the manager took a report last.")
    changes: Metric = gauge("host_core_changes_waiting", "Core changes that the manager has not acknowledged.")
    epoch: Metric = gauge("host_epoch", "The epoch of the manager that the agent follows.")
    certificate_end: Metric = gauge(
        "host_certificate_expiry_timestamp_seconds", "When the host's own certificate ends to be valid; with TLS."
    )
    certificate_begin: Metric = gauge(
        "host_certificate_start_timestamp_seconds", "When the host's own certificate began to be valid; with TLS."
    )
    calls: Metric = counter("libvirt_calls", "Calls to libvirt; outcome: ok, error, timeout or gone.", "outcome")
    call: Metric = Metric(
        "ebbtide_libvirt_call_duration_seconds",
        "histogram",
        "How long calls to libvirt took, the wait for a turn included.",
    )
    resizes: Metric = counter(
        "host_resizes", "Resizes of all VMs, gone ones included; outcome: done, short or error.", "direction", "outcome"
    )
    asked: Amounts = amounts(
        "ebbtide_host_layer_asked", "What a layer of all VMs was asked for, gone ones included", _LAYER, "counter"
    )
    verified: Amounts = amounts(
        "ebbtide_host_layer_verified",
        "What a layer of all VMs verifiably gave, gone ones included; application and cold are never added",
        _LAYER,
        "counter",
    )
    seconds: Metric = counter("host_layer_seconds", "How long a layer of all VMs worked, gone ones included.", *_LAYER)
    shortfalls: Metric = counter(
        "host_shortfalls",
        "How often a resize of any VM did not reach its target, gone ones included.",
        "direction",
        "resource",
        "reason",
    )


class _VMs:
    """Of each VM."""

    info: Metric = gauge("vm_info", "1; what the VM is.", "vm", "priority", "guest_kind", "template")
    state: Metric = gauge("vm_state", "1 for the state that the VM is in; the others are left out.", "vm", "state")
    nominal: Amounts = amounts("ebbtide_vm_nominal", "What the VM was sold", _VM)
    minimum: Amounts = amounts("ebbtide_vm_minimum", "Below which the VM is preempted instead", _VM)
    ceiling: Amounts = amounts("ebbtide_vm_ceiling", "Up to where a harvest VM may grow", _VM)
    bound: Amounts = amounts("ebbtide_vm_bound", "What the host lets the VM hold, as committed", _VM)
    asks: Amounts = amounts("ebbtide_vm_asks", "What the VM wants under pressure and its host cannot spare", _VM)
    resident: Metric = gauge(
        "vm_resident_memory_bytes",
        "What the VM's process has in the host's memory, the emulator too; no mapped files.",
        "vm",
    )
    pressure: Metric = gauge("vm_under_pressure", "Whether the guest is under pressure.", "vm")
    claims: Metric = gauge("vm_pressure_budget_seconds", "For how long the guest's claims still count.", "vm")
    throttled: Metric = gauge(
        "vm_throttled_ratio",
        "Share of periods in which its quota stopped a vCPU, lately; without quota left out.",
        "vm",
    )
    connected: Metric = gauge("vm_guest_connected", "Whether the guest's agent answers.", "vm")
    held: Metric = gauge("vm_held", "Whether a target has set the size: it grows by command only.", "vm")
    started_at: Metric = gauge("vm_start_timestamp_seconds", "Since when the VM's work is under way.", "vm")
    drift: Metric = counter("vm_drift_repairs", "What was put right that another program had changed.", "vm")
    broken: Metric = counter(
        "vm_broken_offline", "How often a vCPU ran that the guest called off line, and still does.", "vm"
    )
    contended: Metric = gauge("vm_contended", "Whether another program undoes what is put right.", "vm")
    resizes: Metric = counter(
        "vm_resizes",
        "Resizes that have ended, steps of steady mode only where they failed; outcome: done, short or error.",
        "vm",
        "direction",
        "outcome",
    )
    asked: Amounts = amounts(
        "ebbtide_vm_layer_asked", "What a layer was asked for, over all resizes", _BY_LAYER, "counter"
    )
    verified: Amounts = amounts(
        "ebbtide_vm_layer_verified",
        "What a layer verifiably gave; those of application and cold are parts of the guest's and never added",
        _BY_LAYER,
        "counter",
    )
    seconds: Metric = counter("vm_layer_seconds", "How long a layer worked, over all resizes.", *_BY_LAYER)
    shortfalls: Metric = counter(
        "vm_shortfalls", "How often a resize did not reach its target.", "vm", "direction", "resource", "reason"
    )


class _Guests:
    """Of each guest, in its agent's own words: untrusted."""

    memory: Metric = gauge("guest_memory_size_bytes", "Memory that the guest's kernel has.", "vm")
    available: Metric = gauge("guest_memory_available_bytes", "Memory that the guest's kernel calls available.", "vm")
    floor: Metric = gauge("guest_memory_floor_bytes", "What the guest says it needs at the least.", "vm")
    cpus: Metric = gauge("guest_cpus_online", "CPUs that the guest says are on line.", "vm")
    memory_stall: Metric = gauge(
        "guest_memory_pressure_ratio", "Share of time stalled for memory (PSI, 10 s).", "vm", "stall"
    )
    cpu_stall: Metric = gauge("guest_cpu_pressure_ratio", "Share of time in which tasks waited for a CPU (PSI).", "vm")
    stalled: Metric = counter(
        "guest_memory_stalled_seconds", "Time stalled for memory since the guest's boot (PSI).", "vm", "stall"
    )
    faults: Metric = counter("guest_major_faults", "Faults that waited for a disk, since the guest's boot.", "vm")
    age: Metric = gauge(
        "guest_status_age_seconds",
        f"How old the guest's figures are; after {SAID_FOR_S:g} s they are left out, as are CPUs while it is silent.",
        "vm",
    )


HOST: Final = _Host
VMS: Final = _VMs
GUESTS: Final = _Guests
#: What the VMs of a host may declare together, whatever the host itself declares.
_ANY: Final = ResourceVector(1.0, 1.0, 1.0, 1.0)


def declared() -> Iterator[Metric]:
    """All metrics of an agent."""
    return declared_in(HOST, VMS, GUESTS)


@dataclass(frozen=True, slots=True)
class VMFacts:
    """What is known of one VM besides its status.

    :param said: the guest's last word, and its age in seconds; None: none.
    """

    status: VMStatus
    resident_mib: float | None
    tally: Tally
    said: tuple[MemoryState, float] | None = None
    online: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What an agent knows.

    :param changes: core changes that wait; the report has the first of them.
    """

    report: HostReport
    vms: tuple[VMFacts, ...]
    tally: Tally
    decisions: Counter[str]
    operations: Counter[str]
    durations: Mapping[tuple[str, str], Distribution]
    reports: Reports
    calls: Calls
    changes: int
    epoch: int
    available_mib: float
    untouched_mib: float
    #: What steady mode has taken and given back, MiB.
    trimmed_mib: float = 0.0
    given_back_mib: float = 0.0
    certificate_end: float | None = None
    certificate_begin: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine has, in bytes; rooms of directories as size and free room."""

    swap: tuple[float, float]
    rooms: Mapping[str, tuple[float, float]]


def sheet_of(facts: HostFacts) -> Sheet:
    """The values of all metrics but the machine's. Pure."""
    sheet = Sheet(declared())
    report = facts.report
    sheet.put(HOST.info, 1.0, report.id, report.accelerator)
    for mode in HostMode:
        sheet.put(HOST.mode, report.mode is mode, mode.value)
    sheet.put(HOST.hypervisor_up, not report.unavailable)
    own = report.capacity.vector()
    # VMs may have bandwidths of which their host declares none.
    sold = sum((vm.nominal.vector() for vm in report.vms), own)
    for metrics, vector, declared_by in (
        (HOST.capacity, report.capacity, own),
        (HOST.free, report.free, own),
        (HOST.deflatable, report.deflatable, sold),
        (HOST.beyond, report.overcommitted, own),
        (HOST.budget, report.budget, own),
    ):
        sheet.put_amounts(metrics, vector.vector(), declared_by)
    sheet.put(HOST.reserve, report.reserve_mib * MIB)
    sheet.put(HOST.trimmed, facts.trimmed_mib * MIB)
    sheet.put(HOST.given_back, facts.given_back_mib * MIB)
    sheet.put(HOST.available, facts.available_mib * MIB)
    sheet.put(HOST.untouched, facts.untouched_mib * MIB)
    for (state, priority), count in Counter((vm.state.value, vm.priority.value) for vm in report.vms).items():
        sheet.put(HOST.vms, count, state, priority)
    for kind, count in facts.decisions.items():
        sheet.put(HOST.decisions, count, kind)
    for kind, count in facts.operations.items():
        sheet.put(HOST.operations, count, kind)
    for (kind, state), found in facts.durations.items():
        sheet.put_spread(HOST.operation, found, kind, state)
    sheet.put(HOST.reports, facts.reports.taken, "taken")
    sheet.put(HOST.reports, facts.reports.failed, "failed")
    sheet.put(HOST.reported_at, facts.reports.taken_at)
    sheet.put(HOST.changes, facts.changes)
    sheet.put(HOST.epoch, facts.epoch)
    sheet.put(HOST.certificate_end, facts.certificate_end)
    sheet.put(HOST.certificate_begin, facts.certificate_begin)
    for outcome in ("ok", "error", "timeout", "gone"):
        sheet.put(HOST.calls, facts.calls.outcomes[outcome], outcome)
    sheet.put_spread(HOST.call, facts.calls.seconds)
    _put_tally(sheet, HOST, facts.tally, _ANY)
    for vm in facts.vms:
        _put_vm(sheet, vm)
        _put_tally(sheet, VMS, vm.tally, vm.status.nominal.vector(), vm.status.name)
        if vm.said is not None:
            _put_guest(sheet, vm.status.name, *vm.said)
        sheet.put(GUESTS.cpus, vm.online, vm.status.name)
    return sheet


def put_machine(sheet: Sheet, machine: Machine) -> None:
    """Write down what the machine has."""
    sheet.put(HOST.swap_size, machine.swap[0])
    sheet.put(HOST.swap_free, machine.swap[1])
    for directory, (size, free) in machine.rooms.items():
        sheet.put(HOST.disk_size, size, directory)
        sheet.put(HOST.disk_free, free, directory)


def _put_vm(sheet: Sheet, facts: VMFacts) -> None:
    vm, sold = facts.status, facts.status.nominal.vector()
    sheet.put(VMS.info, 1.0, vm.name, vm.priority.value, vm.guest_kind.value, vm.template)
    sheet.put(VMS.state, 1.0, vm.name, vm.state.value)
    for metrics, vector in (
        (VMS.nominal, vm.nominal),
        (VMS.minimum, vm.minimum),
        (VMS.ceiling, vm.ceiling),
        (VMS.bound, vm.current),
        (VMS.asks, vm.asks),
    ):
        if vector is not None:
            sheet.put_amounts(metrics, vector.vector(), sold, vm.name)
    sheet.put(VMS.resident, _bytes(facts.resident_mib), vm.name)
    sheet.put(VMS.pressure, vm.pressure is not None, vm.name)
    sheet.put(VMS.claims, vm.pressure_budget_s, vm.name)
    sheet.put(VMS.throttled, vm.throttled_share, vm.name)
    sheet.put(VMS.connected, vm.guest_connected, vm.name)
    sheet.put(VMS.held, vm.held, vm.name)
    sheet.put(VMS.started_at, vm.started_at, vm.name)
    sheet.put(VMS.drift, vm.drift_total, vm.name)
    sheet.put(VMS.broken, vm.broken_offline_total, vm.name)
    sheet.put(VMS.contended, vm.contention is not None, vm.name)


def _put_tally(
    sheet: Sheet, metrics: type[_Host] | type[_VMs], tally: Tally, declared_by: ResourceVector, *vm: str
) -> None:
    for direction, ending in product(DIRECTIONS, ENDINGS):
        # There from the beginning, so that the first one is an increase.
        sheet.put(metrics.resizes, tally.resizes[direction, ending], *vm, direction, ending)
    for vectors, found in ((metrics.asked, tally.asked), (metrics.verified, tally.verified)):
        for direction, layer in dict.fromkeys((way, layer) for way, layer, _ in found):
            amount = ResourceVector(
                *(max(found.get((direction, layer, component), 0.0), 0.0) for component in COMPONENTS)
            )
            sheet.put_amounts(vectors, amount, declared_by, *vm, direction, layer)
    for (direction, layer), seconds in tally.seconds.items():
        sheet.put(metrics.seconds, seconds, *vm, direction, layer)
    for (direction, component, reason), count in tally.shortfalls.items():
        sheet.put(metrics.shortfalls, count, *vm, direction, component, reason)


def _put_guest(sheet: Sheet, name: str, said: MemoryState, age_s: float) -> None:
    sheet.put(GUESTS.age, age_s, name)
    if age_s >= SAID_FOR_S:
        return
    sheet.put(GUESTS.memory, _bytes(said.memory.total_mib), name)
    sheet.put(GUESTS.available, _bytes(said.memory.available_mib), name)
    sheet.put(GUESTS.floor, _bytes(said.memory.floor_mib), name)
    sheet.put(GUESTS.faults, said.major_faults, name)
    if (psi := said.pressure) is None:
        return
    sheet.put(GUESTS.memory_stall, psi.memory_some_avg10 / 100, name, "some")
    sheet.put(GUESTS.memory_stall, psi.memory_full_avg10 / 100, name, "full")
    sheet.put(GUESTS.cpu_stall, psi.cpu_some_avg10 / 100, name)
    for stall, spent_us in (("some", psi.memory_some_total_us), ("full", psi.memory_full_total_us)):
        sheet.put(GUESTS.stalled, None if spent_us is None else spent_us / 1e6, name, stall)


def _bytes(mib: float | None) -> float | None:
    return None if mib is None or not math.isfinite(mib) else mib * MIB
