"""Makes the events that plans hear, for tests of the state machine alone."""

from __future__ import annotations

from typing import Any

from cluster_manager.plans.placements import PlacementPlan, start_placement
from cluster_manager.plans.plans import HostRead, HostsChosen, OperationEnded, SetVM, VMPhase, finish
from cluster_manager.store.store import Store
from cluster_manager.store.tasks import TaskNote
from ebbtide.deflation.allocations import Allocation, Priority, deflatable_capacity, free_capacity
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector, as_sent
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMSpec, VMState, VMStatus

OVERHEAD_MIB = 100.0


def spec_of(name: str, priority: str = "fixed", cpu_cores: float = 3.0, memory_mib: float = 800.0) -> VMSpec:
    minimum = Vector() if priority == "fixed" else Vector(cpu_cores=0.5, memory_mib=300.0)
    nominal = Vector(cpu_cores=cpu_cores, memory_mib=memory_mib)
    return VMSpec(name=name, priority=Priority(priority), nominal=nominal, minimum=minimum)


def placement(spec: VMSpec, deadline_s: float = 60.0) -> PlacementPlan:
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


def hibernating(vm: VMStatus) -> VMStatus:
    """A VM in a state that only a later version knows."""
    return VMStatus.model_validate({**vm.model_dump(), "state": "hibernating"}, context=as_sent)


def gives(vm: VMStatus) -> bool:
    """Whether what a VM has above its minimum is deflatable by its agent's word (`ManagedVM.row`)."""
    return vm.state in (VMState.RUNNING, VMState.DEFLATING, VMState.REINFLATING) and not vm.pressure


def row_of(vm: VMStatus) -> Allocation:
    """The row by which a VM's agent splits a need (`ManagedVM.row`)."""
    row = vm.allocation()
    if not gives(vm):
        return row.keeping(row.current)
    later_mib = min(vm.not_yet.memory_mib, row.deflatable.memory_mib) if vm.not_yet is not None else 0.0
    return row.keeping(row.minimum + ResourceVector(memory_mib=later_mib))


def report_of(host: str, *vms: VMStatus, cpu_cores: float = 6.0, memory_mib: float = 2400.0) -> HostReport:
    capacity, rows = ResourceVector(cpu_cores=cpu_cores, memory_mib=memory_mib), [vm.allocation() for vm in vms]
    return HostReport(
        id=host,
        url="http://127.0.0.1:1",
        incarnation="one",
        capacity=Vector.of(capacity),
        free=Vector.of(free_capacity(capacity, rows)),
        deflatable=Vector.of(deflatable_capacity(row_of(vm) for vm in vms)),
        vm_overhead_mib=OVERHEAD_MIB,
        accelerator="qemu",
        vms=vms,
    )


def chosen(*hosts: str, at: float = 0.0) -> HostsChosen:
    return HostsChosen(at, hosts, "" if hosts else "no host is ready")


def read(host: str, *vms: VMStatus, at: float = 0.0, **capacity: float) -> HostRead:
    return HostRead(at, report_of(host, *vms, **capacity), frozenset(vm.name for vm in vms))


def unrecorded(host: str, *vms: VMStatus, at: float = 0.0) -> HostRead:
    """A host of whose VMs the manager's record has none there."""
    return HostRead(at, report_of(host, *vms))


def ended(kind: Any, state: OperationState = OperationState.DONE, at: float = 0.0, **more: Any) -> OperationEnded:
    return OperationEnded(at, operation(kind, state, **more))


async def record(store: Store, name: str, host: str, phase: VMPhase = VMPhase.RUNNING) -> None:
    """The manager's record of a VM that no request of the test has made."""
    spec = spec_of(name, "deflatable")
    state = start_placement(f"plan-{name}", f"plan-{name}", spec, 1.0, PlacementPolicy.BEST_FIT)
    await store.add_plan(state, "")
    await store.save_step(finish(state, OperationState.DONE, "").state, [SetVM(name, phase, host, "")])


async def happen(store: Store, kind: EventKind, sentence: str = "", vm: str | None = None) -> None:
    """An event of a store, which no plan of the test is behind."""
    await store.save_tasks((), [TaskNote(kind, vm, sentence)])


def operation(kind: Any, state: OperationState = OperationState.DONE, **more: Any) -> Operation:
    return Operation(request_id="plan.1", kind=kind, state=state, sentence=f"{kind} {state}", started_at=0.0, **more)
