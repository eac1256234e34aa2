"""The plan that brings a preempted VM back, alone: whatever happens, it runs or keeps its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster_manager.execution.plan_totals import PlanTotals
from cluster_manager.plans.lifecycle import start_start
from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.migrations import start_migration
from cluster_manager.plans.plans import (
    ClaimVM,
    Effect,
    Event,
    Finish,
    HostFailed,
    Note,
    Plan,
    Reclaim,
    ReinflationPending,
    Remove,
    SetPreempted,
    SetVM,
    Start,
    Step,
    Stop,
    VMPhase,
)
from cluster_manager.plans.preemption import PreemptionReason
from cluster_manager.plans.reading import read_plan
from cluster_manager.plans.removals import start_removal
from cluster_manager.plans.returns import Returns, start_return
from cluster_manager.plans.victims import outcome
from cluster_manager.store import queries
from cluster_manager.store.database import Database
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import MigrateRequest, StartRequest
from ebbtide.messages.vms import OnPreemption, VMState, VMStatus
from tests.manager.plan_events import OVERHEAD_MIB, ended, placement, read, record, report_of, spec_of, status_of

LOW, OTHER = spec_of("low-1", "deflatable", 3.0, 1000.0), spec_of("low-2", "deflatable", 3.0, 1000.0)


def off(state: VMState = VMState.STOPPED) -> VMStatus:
    gone = {"current": Vector(), "overhead_mib": 0.0, "start_size": LOW.nominal}
    return status_of(LOW, "a", state=state).model_copy(update=gone)


def run(*events: Event) -> tuple[Plan, list[Effect]]:
    state: Plan = start_return("return-low-1", LOW, "a")
    effects: list[Effect] = []
    for event in events:
        step = state.next_step(event)
        state = step.state
        effects += step.effects
        assert read_plan(state.model_dump_json()) == state
    return state, effects


def rows(effects: list[Effect]) -> list[tuple[VMPhase, str | None]]:
    return [(effect.phase, effect.host) for effect in effects if isinstance(effect, SetVM)]


def test_one_that_was_to_be_deleted_ends_where_its_host_does_not_have_it_any_more() -> None:
    spec = LOW.model_copy(update={"on_preemption": OnPreemption.DELETE})
    for perhaps, told in ((PreemptionReason.MINIMUM, ["preempted"]), (None, [])):
        step = start_return("return-low-1", spec, "a", perhaps).next_step(read("a"))
        assert rows(list(step.effects)) == [(VMPhase.ENDED, "a")]
        assert [effect.kind for effect in step.effects if isinstance(effect, Note)] == told
        assert step.state.finished
    mute = report_of("a").model_copy(update={"unavailable": "libvirt is gone"})
    step = start_return("return-low-1", spec, "a").next_step(replace(read("a"), report=mute))
    assert rows(list(step.effects)) == [(VMPhase.PREEMPTED, "a")], "such a host cannot say"
    for waiting, report, due in ((LOW, report_of("a"), None), (spec, mute, None), (spec, report_of("a"), "low-1")):
        queues = Returns()
        for now in range(0, 40, 2):
            queue = queues.observe(report, ZERO, [waiting], float(now))
        assert queue is not None
        assert queue.due(38.0) == due


def test_one_whose_preemption_was_not_answered_and_that_is_off_was_preempted_and_that_is_said_once() -> None:
    full = read("a", off(), status_of(spec_of("high-1", cpu_cores=5.8), "a"))
    begun = start_return("return-low-1", LOW, "a", PreemptionReason.SHORTFALL)
    totals = PlanTotals()
    for event in (full, read("a", off())):
        step = begun.next_step(event)
        totals.add(begun, step, 0.0)
        notes = [effect for effect in step.effects if isinstance(effect, Note)]
        assert [(note.kind, note.vm, note.host) for note in notes] == [("preempted", "low-1", "a")]
        (said,) = (effect for effect in step.effects if isinstance(effect, SetPreempted))
        assert (said.reason, said.unsure) == (PreemptionReason.SHORTFALL, False)
        assert step.state.finished
        assert rows(list(step.effects)) == [(VMPhase.PREEMPTED, "a")]
    assert totals.preempted == {"shortfall": 2}
    deleted = start_return("r", LOW.model_copy(update={"on_preemption": OnPreemption.DELETE}), "a", begun.perhaps)
    totals.add(deleted, deleted.next_step(read("a")), 0.0)
    assert totals.preempted == {"shortfall": 3}, "also one that is not there any more, as its owner wished"
    for unknown in (read("a", off(VMState.STOPPING)), read("a", status_of(LOW, "a")), read("a")):
        notes = [effect for effect in begun.next_step(unknown).effects if isinstance(effect, Note)]
        assert "preempted" not in [note.kind for note in notes]
    # No room is needed to write that down.
    for names, due in (((), None), (("low-1",), "low-1")):
        queues = Returns()
        for now in range(0, 40, 2):
            queue = queues.observe(full.report, ZERO, [LOW], float(now), unsure=names)
        assert queue is not None
        assert queue.due(38.0) == due


def test_in_free_room_it_starts_at_its_nominal_size() -> None:
    state, effects = run(read("a", off()), ended("start"))
    assert rows(effects) == [(VMPhase.RUNNING, "a")]
    assert isinstance(state.instruction, Finish)
    state, _ = run(read("a", off()))
    assert isinstance(state.instruction, Start)
    assert state.instruction.start_size == LOW.nominal


def test_room_is_made_for_what_the_start_of_this_very_vm_costs_besides_its_size() -> None:
    """One that is emulated on a host of others costs more than a new one there."""
    request = StartRequest(request_id="start-low-1", deadline_s=60.0)
    for plan in (start_return("return-low-1", LOW, "a"), start_start("start-low-1", request, LOW, "a")):
        for overhead_mib, does in ((None, Start), (OVERHEAD_MIB, Start), (OVERHEAD_MIB + 200.0, Reclaim)):
            emulated = off().model_copy(update={"start_overhead_mib": overhead_mib})
            memory_mib = 2 * (LOW.nominal.memory_mib + OVERHEAD_MIB)
            crowded = read("a", emulated, status_of(OTHER, "a"), memory_mib=memory_mib)
            assert isinstance(plan.next_step(crowded).state.instruction, does), (plan.kind, overhead_mib)


def test_where_there_is_less_the_others_and_it_share_and_none_is_preempted() -> None:
    crowded = read("a", off(), status_of(OTHER, "a"), cpu_cores=4.0)
    state, _ = run(crowded)
    assert isinstance(state.instruction, Reclaim)
    shrunk = status_of(OTHER, "a", Vector(cpu_cores=2.0, memory_mib=1000.0))
    state, _ = run(crowded, ended("reclaim"), read("a", off(), shrunk, cpu_cores=4.0))
    assert isinstance(state.instruction, Start)
    assert state.instruction.start_size is not None
    assert state.instruction.start_size.cpu_cores == pytest.approx(2.0)


@pytest.mark.parametrize(
    "events",
    [
        (HostFailed(0.0, "a does not answer", uncertain=True),),
        (read("a"),),
        (read("a", off(VMState.STOPPING)),),
        (read("a", off(VMState.STARTING)),),
        (read("a", off(), status_of(spec_of("high-1", cpu_cores=5.8), "a")),),
        (read("a", off()), ended("start", OperationState.FAILED)),
        (read("a", off()), HostFailed(0.0, "refused", uncertain=False)),
        (read("a", off()), HostFailed(0.0, "no answer", uncertain=True)),
    ],
    ids=["silent", "gone", "stopping", "starting", "full", "failed", "refused", "lost"],
)
def test_whatever_is_in_its_way_it_keeps_its_place(events: tuple[Event, ...]) -> None:
    state, effects = run(*events)
    assert rows(effects) == [(VMPhase.PREEMPTED, "a")]
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.FAILED


def test_what_was_taken_for_a_return_that_may_have_begun_is_given_back_later() -> None:
    crowded = read("a", off(), status_of(OTHER, "a"), cpu_cores=4.0)
    _, effects = run(crowded, HostFailed(0.0, "no answer", uncertain=True))
    assert ReinflationPending("a", True) in effects


def test_one_that_runs_all_the_same_is_written_down_without_any_room() -> None:
    full = report_of("a", status_of(LOW, "a"), status_of(OTHER, "a"), cpu_cores=6.0, memory_mib=2200.0)
    queues = Returns()
    for now in range(0, 40, 2):
        queue = queues.observe(full.model_copy(update={"deflatable": Vector()}), ZERO, [LOW], float(now))
    assert queue is not None
    assert queue.due(38.0) == LOW.name
    _, effects = run(read("a", status_of(LOW, "a")))
    assert rows(effects) == [(VMPhase.RUNNING, "a")]


def test_one_that_is_only_being_started_is_not_written_down_as_running() -> None:
    full = report_of("a", off(VMState.STARTING), status_of(OTHER, "a"), cpu_cores=3.2)
    queues = Returns()
    for now in range(0, 40, 2):
        queue = queues.observe(full.model_copy(update={"deflatable": Vector()}), ZERO, [LOW], float(now))
    assert queue is not None
    assert queue.due(38.0) is None
    state, effects = run(read("a", off(VMState.STARTING)))
    assert rows(effects) == [(VMPhase.PREEMPTED, "a")]
    assert isinstance(state.instruction, Finish)
    assert "is still being started on a" in state.instruction.sentence


@pytest.mark.parametrize("moved", [False, True], ids=["it stays", "it moves"])
async def test_a_vm_that_is_preempted_while_a_move_looks_for_room_keeps_its_place(
    database: Database, moved: bool
) -> None:
    now = 5.0
    store = Store(database, lambda: now)
    await store.open()
    await record(store, "low-1", "a")
    request = MigrateRequest(request_id="move", live=True)
    move = start_live_migration("move", request, LOW, "a", policy=PlacementPolicy.FIRST_FIT)
    await store.add_plan(move, "")
    other = start_return("return-x", spec_of("x", "deflatable"), "a")
    await store.save_step(other, [SetPreempted("low-1", "a", PreemptionReason.MINIMUM, "preempted low-1")])
    (row,) = await store.vms("low-1")
    assert row.phase is VMPhase.MIGRATING, "it is its move's"
    now = 9.0
    if moved:
        # That it was preempted was not certain.
        await store.save_step(move, [SetVM("low-1", VMPhase.RUNNING, "b", "moved low-1")])
        (row,) = await store.vms("low-1")
        assert (row.phase, row.host, row.preempted_at) == (VMPhase.RUNNING, "b", None)
    else:
        step = move.next_step(HostFailed(0.0, "a does not answer", uncertain=True))
        await store.save_step(step.state, step.effects)
        (row,) = await store.preempted()
        assert (row.name, row.host, row.preempted_at, row.sentence) == ("low-1", "a", 5.0, "preempted low-1")
    await store.close()


@pytest.mark.parametrize(
    "events",
    [
        (ended("stop"), read("b", status_of(OTHER, "b"), cpu_cores=3.0)),
        (HostFailed(70.0, "a does not answer", uncertain=True),),
        (ended("stop"), read("b"), ended("create", OperationState.FAILED), ended("delete")),
    ],
    ids=["its next host is full", "its host does not answer", "it does not come up"],
)
async def test_a_vm_that_is_preempted_before_its_move_has_its_host_waits_for_room_where_it_did_not_move(
    database: Database, events: tuple[Event, ...]
) -> None:
    store = Store(database, lambda: 5.0)
    await store.open()
    await record(store, "low-1", "a")
    request, policy = MigrateRequest(request_id="move", host="b", lose_disk=True), PlacementPolicy.FIRST_FIT
    plan: Plan = start_migration("migrate", request, LOW, "a", running=True, policy=policy)
    await store.add_plan(plan, "")
    plan = plan.next_step(read("b")).state
    assert isinstance(plan.instruction, Stop)
    other = start_return("return-x", spec_of("x", "deflatable"), "a")
    await store.save_step(other, [SetPreempted("low-1", "a", PreemptionReason.MINIMUM, "preempted low-1")])
    for event in events:
        step = plan.next_step(event)
        plan = step.state
        await store.save_step(plan, step.effects)
    assert plan.finished
    (row,) = await store.preempted()
    assert (row.name, row.host, row.preempted_at) == ("low-1", "a", 5.0)
    await store.close()


@pytest.mark.parametrize("refused", [False, True], ids=["it is deleted", "its host refuses"])
async def test_a_vm_that_is_preempted_before_its_deletion_has_its_host_waits_for_room_where_it_is_not_deleted(
    database: Database, refused: bool
) -> None:
    store = Store(database, lambda: 5.0)
    await store.open()
    await record(store, "low-1", "a")
    plan = start_removal("delete", "request", "low-1", "a")
    await store.add_plan(plan, "")
    other = start_return("return-x", spec_of("x", "deflatable"), "a")
    await store.save_step(other, [SetPreempted("low-1", "a", PreemptionReason.MINIMUM, "preempted low-1")])
    (row,) = await store.vms("low-1")
    assert row.phase is VMPhase.DELETING, "it is its deletion's"
    answer = HostFailed(1.0, "a is paused", uncertain=False) if refused else ended("delete")
    step = plan.next_step(answer)
    await store.save_step(step.state, step.effects)
    waiting = [(row.name, row.host, row.preempted_at, row.sentence) for row in await store.preempted()]
    assert waiting == ([("low-1", "a", 5.0, "preempted low-1")] if refused else [])
    if refused:
        (row,) = await store.rows(queries.vms(1, None, host=None, phases=None, prefix=None))
        assert not row.deleted_by_owner, "what takes its cores next is not its deletion"
    await store.close()


async def test_a_removal_for_another_vm_is_told_and_counted_once_though_a_move_had_its_name(database: Database) -> None:
    store, totals = Store(database, lambda: 5.0), PlanTotals()
    await store.open()
    await record(store, "low-1", "a")
    move = start_live_migration(
        "move", MigrateRequest(request_id="move", live=True), LOW, "a", policy=PlacementPolicy.FIRST_FIT
    )
    victim = Remove(host="a", step=1, vm="low-1", reason=PreemptionReason.MINIMUM, notice_s=30.0)
    arrival = placement(spec_of("high-1"))
    for plan in (arrival, move):
        await store.add_plan(plan, "")
    arrival = arrival.model_copy(update={"instruction": victim})
    gone = Step(arrival, outcome("high-1", victim, ended("delete")).effects)
    failed = move.next_step(HostFailed(0.0, "a does not answer", uncertain=True))
    for before, step in ((arrival, gone), (move, failed)):
        await store.save_step(step.state, step.effects)
        totals.add(before, step, 0.0)
    (row,) = await store.preempted()
    back = start_return("r", LOW.model_copy(update={"on_preemption": OnPreemption.DELETE}), "a", row.perhaps)
    await store.add_plan(back, "")
    step = back.next_step(read("a"))
    await store.save_step(step.state, step.effects)
    totals.add(back, step, 0.0)
    assert await store.vms("low-1") == [], "its name is free"
    events = await store.rows(queries.events_after(0, 100))
    assert [event.vm for event in events if event.kind == "preempted"] == ["low-1"]
    assert totals.preempted == {"minimum": 1}
    await store.close()


async def test_a_vm_that_a_plan_is_at_work_on_stays_that_plans(database: Database) -> None:
    """Its owner's stop, or its move, says what becomes of it."""
    store = Store(database, lambda: 5.0)
    await store.open()
    for name, phase in (("low-1", VMPhase.STOPPING), ("low-2", VMPhase.RUNNING)):
        await record(store, name, "a", phase)
    plan = start_return("return-x", spec_of("x", "deflatable"), "a")
    assert plan.claim == ClaimVM(VMPhase.STARTING)
    await store.add_plan(plan, "")
    gone = [SetPreempted(name, "a", PreemptionReason.MINIMUM, "") for name in ("low-1", "low-2")]
    await store.save_step(plan, gone)
    phases = {row.name: (row.phase, row.preempted_at) for row in await store.vms()}
    assert phases == {"low-1": (VMPhase.STOPPING, None), "low-2": (VMPhase.PREEMPTED, 5.0)}
    assert [row.name for row in await store.preempted()] == ["low-2"]
    await store.close()
