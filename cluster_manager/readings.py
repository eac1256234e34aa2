"""What is read out of agents' answers: what a host lacks for a VM, what to reclaim, which layer failed."""

from __future__ import annotations

import math

from deflation.allocations import Allocation
from deflation.messages import HostReport, Operation, VMSpec
from deflation.resources import COMPONENTS, QUANTUM, TOLERANCE, ResourceVector

#: Figures travel with four decimals; less than that is missing to nobody.
_WIRE_ROUNDING = 1e-3


def demand_of(spec: VMSpec, report: HostReport) -> ResourceVector:
    """The nominal size and, in memory, what a VM costs that host besides."""
    return spec.nominal.vector() + ResourceVector(memory_mib=report.vm_overhead_mib)


def missing_on(report: HostReport, demand: ResourceVector) -> ResourceVector:
    """``max(demand - free, 0)``; disk and network only where the host declares them."""
    missing = demand.less(report.free.vector())
    for component in COMPONENTS:
        if missing[component] <= _WIRE_ROUNDING or report.capacity.vector()[component] <= TOLERANCE:
            missing = missing.with_component(component, 0.0)
    return missing


def reclaim_need(missing: ResourceVector, report: HostReport) -> ResourceVector:
    """The need to send: what is missing, in whole steps of a size, and never more than can be deflated."""
    steps = (math.ceil(value / quantum - TOLERANCE) * quantum for value, quantum in zip(missing, QUANTUM, strict=True))
    return ResourceVector(*(round(step, 6) for step in steps)).smaller(report.deflatable.vector())


def allocations_of(report: HostReport) -> list[Allocation]:
    """The rows that policies read; a stopped VM holds its room too."""
    return [vm.allocation() for vm in report.vms]


def failed_layer(operation: Operation) -> str | None:
    """The last layer that was asked and gave less, of a VM that fell short, with its reason."""
    for outcome in operation.vms:
        if outcome.shortfall.vector().is_zero():
            continue
        for row in reversed(outcome.ledger):
            if row.asked > row.verified:
                return f"{row.layer.value} ({row.reason})" if row.reason else row.layer.value
    return None


def has_template(report: HostReport, spec: VMSpec) -> bool:
    """Whether a host has what a VM is made of; one that does not say may have any template."""
    if spec.xml is not None or report.templates is None:
        return True
    return any(template.name == spec.template for template in report.templates)
