"""Dry runs of plans over any hosts: they end, keep to the rules, and change nothing of what they were given."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.plans.dry_run_plan import dry_run_plan
from cluster_manager.plans.placements import PlacementPlan, start_placement
from cluster_manager.plans.plans import ChooseHosts, HostsChosen, Plan
from cluster_manager.plans.removals import start_removal
from ebbtide.deflation.allocations import Priority, deflatable_capacity, free_capacity
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.placement.fitness import HostView, rank_hosts
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import DryRunReport
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMSpec, VMState, VMStatus
from tests.manager.plan_events import gives, placement, report_of, spec_of, status_of

OVERHEAD_MIB = 100.0
STATES = st.sampled_from([*[VMState.RUNNING] * 4, VMState.PAUSED])
PRESSURE = st.sampled_from([*[None] * 4, "its kernel waits for memory"])


@st.composite
def vm_status(draw: st.DrawFn, name: str) -> VMStatus:
    """A VM somewhere between its minimum and what it may have."""
    priority = draw(st.sampled_from(Priority))
    nominal = Vector(cpu_cores=draw(st.integers(1, 4)), memory_mib=draw(st.integers(4, 16)) * 64)
    share = draw(st.sampled_from([0.25, 0.5, 1.0]))
    minimum = nominal if priority is Priority.FIXED else Vector.of(nominal.vector() * share)
    fill = 1.0 if priority is Priority.FIXED else draw(st.sampled_from([share, 1.0]))
    spec = VMSpec(
        name=name,
        priority=priority,
        nominal=nominal,
        minimum=minimum,
        ceiling=Vector.of(nominal.vector() * 2) if priority is Priority.HARVEST else None,
    )
    floor = spec.allocation(ResourceVector()).minimum
    return VMStatus(
        name=name, host="", domain="", state=draw(STATES), priority=priority, nominal=nominal,
        minimum=Vector.of(floor), ceiling=spec.ceiling,
        current=Vector.of(floor.larger(nominal.vector() * fill)), overhead_mib=OVERHEAD_MIB, generation=1,
        guest_connected=True, boot_memory_mib=64.0, pressure=draw(PRESSURE),
    )  # fmt: skip


@st.composite
def host_report(draw: st.DrawFn, number: int) -> HostReport:
    """A host whose VMs fit, with some room."""
    count = draw(st.integers(0, 4))
    vms = tuple(draw(vm_status(f"vm-{number}-{n}")).model_copy(update={"host": f"host-{number}"}) for n in range(count))
    held = sum((vm.allocation().charge for vm in vms), ResourceVector())
    room = ResourceVector(cpu_cores=draw(st.integers(0, 3)), memory_mib=draw(st.integers(1, 20)) * 64.0)
    capacity = held + room
    rows = [vm.allocation() for vm in vms]
    return HostReport(
        id=f"host-{number}", url="http://a", incarnation="one", capacity=Vector.of(capacity),
        free=Vector.of(free_capacity(capacity, rows)),
        deflatable=Vector.of(deflatable_capacity(vm.allocation() for vm in vms if gives(vm))),
        vm_overhead_mib=OVERHEAD_MIB, accelerator="qemu", vms=vms,
        mode=draw(st.sampled_from([HostMode.ACTIVE, HostMode.ACTIVE, HostMode.DRAINING])),
    )  # fmt: skip


HOSTS = st.integers(1, 3).flatmap(lambda count: st.tuples(*(host_report(number) for number in range(count))))


def choose_among(reports: tuple[HostReport, ...]) -> Any:
    """As the manager chooses."""

    def choose(state: Plan, instruction: ChooseHosts) -> HostsChosen:
        assert isinstance(state, PlacementPlan)
        preempting = instruction.purpose == "preempt"
        views = []
        for report in reports:
            low = [vm.allocation().charge for vm in report.vms if vm.priority is not Priority.FIXED]
            gives = sum(low, ResourceVector()) if preempting else report.deflatable.vector()
            views.append(HostView(report.id, report.capacity.vector(), report.free.vector(), gives))
        return HostsChosen(0.0, tuple(rank_hosts(state.spec.nominal.vector(), views)))

    return choose


def ended(steps: Generator[None, None, DryRunReport]) -> DryRunReport:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            report: DryRunReport = end.value
            return report


@given(HOSTS, st.sampled_from([Priority.FIXED, Priority.DEFLATABLE]), st.integers(1, 8), st.integers(4, 40))
def test_a_creation_keeps_to_the_rules(
    reports: tuple[HostReport, ...], priority: Priority, cores: int, memory: int
) -> None:
    spec = VMSpec(name="new", priority=priority, nominal=Vector(cpu_cores=cores, memory_mib=memory * 64))
    plan = start_placement("dry-run", "r", spec, 60.0, PlacementPolicy.BEST_FIT)
    given_reports = {report.id: report for report in reports}
    copies = {name: report.model_copy() for name, report in given_reports.items()}
    told = ended(dry_run_plan(plan, given_reports, choose_among(reports)))
    assert given_reports == copies
    if told.would == "failed":
        return
    assert told.host is not None
    report = given_reports[told.host]
    before = {vm.name: vm for vm in report.vms}
    assert report.mode is HostMode.ACTIVE
    assert not (told.preempted and priority is not Priority.FIXED)
    after = {name: vm.current for name, vm in before.items() if name not in told.preempted}
    assert all(gives(before[change.name]) for change in told.deflated)
    for change in (*told.deflated, *told.grown):
        assert before[change.name].priority is not Priority.FIXED
        assert before[change.name].current == change.before
        assert before[change.name].minimum.vector().fits_in(change.after.vector())
        after[change.name] = change.after
    charges = [size.vector() + ResourceVector(memory_mib=OVERHEAD_MIB) for size in after.values()]
    charges.append(spec.nominal.vector() + ResourceVector(memory_mib=OVERHEAD_MIB))
    assert sum(charges, ResourceVector()).fits_in(report.capacity.vector() + ResourceVector(1e-3, 1e-3))


@given(HOSTS, st.data())
def test_a_deletion_lets_others_grow_and_takes_nothing(reports: tuple[HostReport, ...], data: st.DataObject) -> None:
    report = data.draw(st.sampled_from(reports))
    if not report.vms:
        return
    gone = data.draw(st.sampled_from(report.vms)).name
    removal = start_removal("dry-run", "r", gone, report.id)
    told = ended(dry_run_plan(removal, {report.id: report}, choose_among(reports)))
    assert (told.would, told.host, told.deflated, told.preempted) == ("done", report.id, (), ())
    assert gone not in {change.name for change in told.grown}
    rows = {vm.name: vm.allocation() for vm in report.vms}
    for change in told.grown:
        assert change.after.vector().fits_in(rows[change.name].upper)


def test_nobody_is_told_to_grow_into_the_reserve_nor_one_that_stands_still_or_is_held() -> None:
    small, half = Vector(cpu_cores=1.0, memory_mib=400.0), Vector(cpu_cores=2.0, memory_mib=600.0)
    gone, low, paused, held = (spec_of(name, "deflatable", 2.0, 600.0) for name in ("gone", "low", "paused", "held"))
    vms = (
        status_of(gone, "a"),
        status_of(low, "a", small),
        status_of(paused, "a", small, VMState.PAUSED),
        status_of(held, "a", small).model_copy(update={"held": True}),
    )
    report = report_of("a", *vms, cpu_cores=8.0, memory_mib=2200.0)
    removal = start_removal("dry-run", "r", "gone", "a")

    def grown(reserve_mib: float) -> dict[str, Vector]:
        there = report.model_copy(update={"reserve_mib": reserve_mib})
        told = ended(dry_run_plan(removal, {"a": there}, choose_among((there,))))
        return {change.name: change.after for change in told.grown}

    assert grown(0.0) == {"low": half}
    assert grown(600.0) == {"low": half.model_copy(update={"memory_mib": 500.0})}, "700 MiB come free"
    assert grown(700.0) == {"low": half.model_copy(update={"memory_mib": 400.0})}


def test_a_vm_that_gives_nothing_is_not_told_to_shrink() -> None:
    low = [spec_of(f"low-{number}", "deflatable", 2.0, 600.0) for number in (1, 2, 3)]
    pressed = status_of(low[0], "host-a").model_copy(update={"pressure": "its kernel waits for memory"})
    paused = status_of(low[1], "host-a", state=VMState.PAUSED)
    report = report_of("host-a", pressed, paused, status_of(low[2], "host-a"))
    plan = placement(spec_of("high-1", "fixed", 1.0, 200.0))
    told = ended(dry_run_plan(plan, {"host-a": report}, choose_among((report,))))
    assert (told.would, [change.name for change in told.deflated]) == ("done", ["low-3"]), told.sentence
