"""Makes the events that plans hear, for tests of the state machine alone."""

from __future__ import annotations

from typing import Any

from cluster_manager.placements import start_placement
from cluster_manager.plans import HostRead, HostsChosen, OperationEnded, PlanState
from deflation.allocations import Priority, deflatable_capacity, free_capacity
from deflation.messages import HostReport, Operation, OperationState, Vector, VMSpec, VMState, VMStatus
from deflation.placement_policies import PlacementPolicy
from deflation.resources import ZERO, ResourceVector

OVERHEAD_MIB = 100.0


def spec_of(name: str, priority: str = "fixed", cpu_cores: float = 3.0, memory_mib: float = 800.0) -> VMSpec:
    minimum = Vector() if priority == "fixed" else Vector(cpu_cores=0.5, memory_mib=300.0)
    nominal = Vector(cpu_cores=cpu_cores, memory_mib=memory_mib)
    return VMSpec(name=name, priority=Priority(priority), nominal=nominal, minimum=minimum)


def placement(spec: VMSpec, deadline_s: float = 60.0) -> PlanState:
    return start_placement("plan", "request", spec, deadline_s, PlacementPolicy.BEST_FIT)


def status_of(spec: VMSpec, host: str, current: Vector | None = None, state: VMState = VMState.RUNNING) -> VMStatus:
    return VMStatus(
        name=spec.name,
        host=host,
        domain=f"ebb-{spec.name}",
        state=state,
        priority=spec.priority,
        nominal=spec.nominal,
        minimum=Vector.of(spec.allocation(ZERO).minimum),
        current=current or spec.nominal,
        overhead_mib=OVERHEAD_MIB,
        generation=1,
        guest_connected=True,
        boot_memory_mib=384,
    )


def report_of(host: str, *vms: VMStatus, cpu_cores: float = 6.0, memory_mib: float = 2400.0) -> HostReport:
    capacity, rows = ResourceVector(cpu_cores=cpu_cores, memory_mib=memory_mib), [vm.allocation() for vm in vms]
    return HostReport(
        id=host,
        url="http://127.0.0.1:1",
        incarnation="one",
        capacity=Vector.of(capacity),
        free=Vector.of(free_capacity(capacity, rows)),
        deflatable=Vector.of(deflatable_capacity(rows)),
        vm_overhead_mib=OVERHEAD_MIB,
        accelerator="qemu",
        vms=vms,
    )


def chosen(*hosts: str, at: float = 0.0) -> HostsChosen:
    return HostsChosen(at, hosts, "" if hosts else "no host is ready")


def read(host: str, *vms: VMStatus, at: float = 0.0, **capacity: float) -> HostRead:
    return HostRead(at, report_of(host, *vms, **capacity))


def ended(kind: Any, state: OperationState = OperationState.DONE, at: float = 0.0, **more: Any) -> OperationEnded:
    return OperationEnded(at, operation(kind, state, **more))


def operation(kind: Any, state: OperationState = OperationState.DONE, **more: Any) -> Operation:
    return Operation(request_id="plan.1", kind=kind, state=state, sentence=f"{kind} {state}", started_at=0.0, **more)
