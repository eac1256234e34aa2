"""Plans of live migrations, step by step, without any host."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_manager.execution.lifecycle_commands import lifecycle_command
from cluster_manager.execution.running_plans import ended_after, operation_of
from cluster_manager.plans.live_migrations import LiveMigrationPlan, start_live_migration
from cluster_manager.plans.plans import (
    Arrive,
    AwaitHost,
    Depart,
    Event,
    Finish,
    HostBack,
    HostFailed,
    HostRead,
    ReadHost,
    Remove,
    SetVM,
    VMPhase,
)
from cluster_manager.settings import AgentLimits
from cluster_manager.store.rows import StoredPlan
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import Vector
from ebbtide.messages.migrations import DepartureCommand
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMState, VMStatus
from tests.hostagent.fake_moves import ADDRESS
from tests.manager.plan_events import ended, report_of, spec_of, status_of

SPEC = spec_of("low", "deflatable")
HERE = status_of(SPEC, "home").model_copy(update={"uuid": "1ef55480-f362-464d-a514-abdb24d9b8ff"})
COMING = status_of(SPEC, "away", state=VMState.MIGRATING)
THERE = status_of(SPEC, "away")
LOST = HostFailed(0.0, "home answered with no Operation", uncertain=True)
OFF: dict[str, Any] = {"state": VMState.STOPPED, "start_size": SPEC.nominal, "current": Vector()}
OFF_AT_HOME = HERE.model_copy(update=OFF)
PAUSED = {"state": VMState.PAUSED, "off_reason": "another program has paused it"}
WENT_OFF = {**OFF, "off_reason": "its domain has ended, and not by a command"}


def read(host: str, *vms: VMStatus) -> HostRead:
    return HostRead(0.0, report_of(host, *vms).model_copy(update={"migration": ADDRESS}))


def begun(**changes: Any) -> LiveMigrationPlan:
    request = MigrateRequest(request_id="request", live=True, host="away", deadline_s=60.0)
    return start_live_migration("plan", request, SPEC, "home", policy=PlacementPolicy.FIRST_FIT, **changes)


def heard(state: LiveMigrationPlan, *events: Event) -> LiveMigrationPlan:
    """The plan after these events."""
    for event in events:
        step = state.next_step(event).state
        assert isinstance(step, LiveMigrationPlan)
        state = step
    return state


def sent() -> LiveMigrationPlan:
    """Its new host has room for it, and its old one is to send it."""
    state = heard(begun(), read("home", HERE), read("away"), ended("arrive"))
    assert isinstance(state.instruction, Depart)
    return state


def test_its_old_host_hears_for_which_size_there_is_room() -> None:
    state = sent()
    assert isinstance(state.instruction, Depart)
    command = lifecycle_command(state.instruction, "d", 1, 1, AgentLimits()).body
    assert isinstance(command, DepartureCommand)
    assert command.size == HERE.current


def small(cpu_cores: float) -> VMStatus:
    return HERE.model_copy(update={"current": Vector(cpu_cores=cpu_cores, memory_mib=500.0)})


def test_a_vm_that_has_grown_since_room_was_made_for_it_moves_at_the_size_that_it_has_then() -> None:
    """As those do that share what others leave on a draining host."""
    state = heard(begun(), read("home", small(1.0)))
    for has in (2.0, 3.0):
        state = heard(state, read("away"), ended("arrive"))
        assert isinstance(state.instruction, Depart)
        before = state.instruction
        state = heard(state, ended("depart", OperationState.FAILED), read("home", small(has)))
        assert isinstance(state.instruction, Remove)
        assert state.instruction.host == "away"
        state = heard(state, ended("delete"))
        assert state.instruction == ReadHost(host="away")
    state = heard(state, read("away"))
    assert isinstance(state.instruction, Arrive)
    assert state.instruction.size == small(3.0).current
    state = heard(state, ended("arrive"))
    assert isinstance(state.instruction, Depart)
    assert (state.instruction.size, state.instruction.step > before.step) == (small(3.0).current, True)


@pytest.mark.parametrize(("has", "at_s"), [(1.0, 1.0), (2.0, 60.0)], ids=["as-before", "too-late"])
def test_a_vm_whose_move_failed_and_which_has_not_grown_in_time_stays(has: float, at_s: float) -> None:
    state = heard(begun(), read("home", small(1.0)), read("away"), ended("arrive"))
    found = HostRead(at_s, report_of("home", small(has)).model_copy(update={"migration": ADDRESS}))
    state = heard(state, ended("depart", OperationState.FAILED), found, ended("delete"))
    assert isinstance(state.instruction, Finish)
    assert state.instruction.sentence.startswith("low stays on home")


def test_a_grown_vm_for_which_there_is_no_room_any_more_stays() -> None:
    full = read("away", status_of(spec_of("other", cpu_cores=4.0, memory_mib=500.0), "away"))
    state = heard(begun(), read("home", small(2.0)), full, ended("arrive"), ended("depart", OperationState.FAILED))
    state = heard(state, read("home", small(3.0)), ended("delete"), full)
    assert isinstance(state.instruction, Finish)
    assert "away: short of 1 cores" in state.instruction.sentence


def test_a_move_of_whose_end_the_old_host_tells_nothing_is_seen_on_the_new_one() -> None:
    state = heard(sent(), LOST)
    assert state.instruction == ReadHost(host="away")
    # It had not moved yet; the old host reports, and its next answer cannot be read either.
    state = heard(state, read("away", COMING), HostBack(0.0))
    assert isinstance(state.instruction, Depart)
    state = heard(state, LOST)
    assert state.instruction == ReadHost(host="away")
    step = state.next_step(read("away", THERE))
    assert isinstance(step.state, LiveMigrationPlan)
    assert step.state.stage == "clear"
    assert [(row.phase, row.host) for row in step.effects if isinstance(row, SetVM)] == [(VMPhase.RUNNING, "away")]


def test_why_a_vm_did_not_begin_to_move_is_told_by_a_code() -> None:
    here, silent = read("home", HERE), HostFailed(0.0, "it is silent", uncertain=True)
    full = read("away", status_of(spec_of("other", cpu_cores=6.0), "away"))
    bare = HostRead(0.0, full.report.model_copy(update={"vms": (), "can_create": False}))
    for events, code in (
        ((silent,), ReasonCode.HOST_UNAVAILABLE),
        ((read("home", OFF_AT_HOME),), None),
        ((here, silent), ReasonCode.HOST_UNAVAILABLE),
        ((here, full), ReasonCode.NO_ROOM),
        ((here, bare), ReasonCode.FAILED),
        ((here, read("away", THERE)), ReasonCode.FAILED),
        ((here, read("away"), ended("arrive", OperationState.FAILED), ended("delete")), ReasonCode.FAILED),
    ):
        end = heard(begun(), *events).instruction
        assert isinstance(end, Finish), end
        assert end.reason is code, end.sentence


def off_at_home() -> LiveMigrationPlan:
    """Its old host has forgotten how the move ended, and says that it is off there."""
    state = heard(sent(), ended("depart", OperationState.FAILED), read("home", OFF_AT_HOME))
    assert state.instruction == ReadHost(host="away")
    return state


@pytest.mark.parametrize("there", [PAUSED, WENT_OFF], ids=["paused", "off"])
def test_a_vm_that_has_arrived_and_is_paused_or_off_by_itself_is_not_removed_there(there: dict[str, Any]) -> None:
    for state in (off_at_home(), heard(sent(), LOST)):
        step = state.next_step(read("away", THERE.model_copy(update=there)))
        assert step.state.instruction == ReadHost(host="home"), "what is left there goes"
        assert [(row.phase, row.host) for row in step.effects if isinstance(row, SetVM)] == [(VMPhase.RUNNING, "away")]
        assert step.state.progress[-1] == f"low is {there['state']} on away"


@pytest.mark.parametrize("state_there", [VMState.STARTING, VMState.STOPPING, VMState.STOPPED])
def test_what_may_have_arrived_is_looked_at_again_before_anything_is_removed(state_there: VMState) -> None:
    unclear = THERE.model_copy(update={"state": state_there})
    state = heard(off_at_home(), read("away", unclear))
    assert isinstance(state.instruction, AwaitHost)
    state = heard(state, HostBack(0.0))
    assert state.instruction == ReadHost(host="away")
    assert isinstance(heard(state, read("away", COMING)).instruction, Remove), "it is still to come"
    assert isinstance(heard(state, read("away")).instruction, Remove), "also one that comes late"


def test_that_it_is_off_where_it_was_to_be_removed_proves_nothing() -> None:
    """A removal that failed may have been written down, and the agent that finds it takes the VM for one that ran."""
    state = heard(off_at_home(), read("away", COMING), ended("delete", OperationState.FAILED), HostBack(0.0))
    assert isinstance(heard(state, read("away", THERE.model_copy(update=WENT_OFF))).instruction, AwaitHost)
    assert heard(state, read("away", THERE.model_copy(update=PAUSED))).stage == "clear"


def test_what_is_asked_again_for_days_is_said_and_kept_once() -> None:
    nobody_says = heard(sent(), *(LOST, read("away", COMING), HostBack(0.0)) * 200)
    assert len(nobody_says.progress) < 10, nobody_says.progress
    # It has ended on the one host, and the other one does not give up what was kept for it.
    state = heard(sent(), ended("depart", OperationState.FAILED), read("home", OFF_AT_HOME))
    state = heard(state, *(read("away", COMING), HostFailed(0.0, "away is away", uncertain=True), HostBack(0.0)) * 200)
    assert len(state.progress) < 10, state.progress
    assert len(state.failures) == 2, state.failures


def test_the_operation_of_a_plan_with_many_sentences_tells_the_last_of_them() -> None:
    said = tuple(f"{number}" for number in range(1001))
    plan = StoredPlan(begun().having(progress=said), "", 0.0, 0.0)
    assert operation_of(plan, 1.0).progress == said[1:]
    told = operation_of(plan, 1.0, 1000, ("half of it is there",)).progress
    assert (len(told), told[-2:]) == (1000, ("half of it is there", "1000"))


def test_how_long_an_operation_takes_does_not_go_by_a_clock_that_is_set() -> None:
    plan = StoredPlan(begun(), "", 1000.0, 1000.0)
    assert operation_of(plan, 400.0).seconds == 0.0
    plan.elapsed_s = lambda: 12.0
    assert operation_of(plan, 400.0).seconds == 12.0
    end = Finish(state=OperationState.DONE, sentence="it is there")
    over = StoredPlan(begun().having(instruction=end), "", 1000.0, 400.0)
    assert operation_of(over, 500.0).seconds == 0.0, "as an earlier version has stored it"
    over.state = ended_after(over.state, 15.0)
    assert operation_of(over, 500.0).seconds == 15.0
    assert ended_after(plan.state, 15.0) is plan.state
