"""Plans of migrations, step by step, without any host."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_manager.migrations import start_migration
from cluster_manager.plans import (
    AwaitHost,
    Event,
    Finish,
    Handover,
    HostBack,
    HostFailed,
    HostRead,
    PlanState,
    ReadHost,
    Remove,
    SetVM,
    Start,
    VMPhase,
)
from cluster_manager.running_plans import defect
from cluster_manager.transitions import advance
from deflation.messages import OperationState, Vector, VMState
from deflation.placement_policies import PlacementPolicy
from tests.manager.plan_events import chosen, ended, read, report_of, spec_of, status_of

SPEC = spec_of("low", "deflatable")
HOME = status_of(SPEC, "home")
OFF = HOME.model_copy(update={"state": VMState.STOPPED, "start_size": SPEC.nominal, "current": Vector()})


def begun(running: bool = True, deadline_s: float = 60.0) -> PlanState:
    state = start_migration(
        "plan",
        "request",
        SPEC,
        "home",
        host=None,
        running=running,
        limit_s=1.0,
        deadline_s=deadline_s,
        policy=PlacementPolicy.FIRST_FIT,
    )
    state = advance(state, chosen("home", "away")).state
    return advance(state, read("away")).state


def creating(**options: Any) -> PlanState:
    """The start on the other host is commanded."""
    state = begun(**options)
    if state.instruction.do == "stop":
        state = advance(state, ended("stop")).state
        state = advance(state, read("away")).state
    assert state.instruction.do == "create"
    return state


def clearing() -> PlanState:
    """It runs on the other host, and the old one is read."""
    state = advance(creating(), ended("create")).state
    assert state.instruction == ReadHost(host="home")
    return state


def test_the_old_host_is_read_before_anything_is_removed_there() -> None:
    state = clearing()
    removing = advance(state, read("home", OFF)).state
    assert isinstance(removing.instruction, Remove)
    assert (removing.instruction.host, removing.instruction.vm) == ("home", "low")
    waiting = advance(removing, HostFailed(1.0, "home is silent", uncertain=True)).state
    assert isinstance(waiting.instruction, AwaitHost)
    assert advance(waiting, HostBack(2.0)).state.instruction == ReadHost(host="home")
    assert advance(state, read("home")).state.finished, "it is gone"


@pytest.mark.parametrize("state_there", [VMState.RUNNING, VMState.STARTING])
def test_what_runs_at_home_is_not_what_was_left_there(state_there: VMState) -> None:
    step = advance(clearing(), read("home", HOME.model_copy(update={"state": state_there})))
    assert step.state.finished
    assert "left alone" in step.state.progress[-2]
    assert any(getattr(effect, "kind", "") == "failed" for effect in step.effects)


def test_what_the_store_has_at_home_by_a_later_request_stays() -> None:
    step = advance(clearing(), HostRead(1.0, report_of("home", OFF), kept=True))
    assert step.state.finished


def test_one_that_powered_off_by_itself_before_it_moved_is_removed_all_the_same() -> None:
    charged = HOME.model_copy(update={"state": VMState.STOPPED})
    assert isinstance(advance(clearing(), read("home", charged)).state.instruction, Remove)


def test_a_defect_while_it_clears_up_leaves_the_vm_where_it_runs() -> None:
    (row,) = [effect for effect in defect(clearing(), KeyError("x")).effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.RUNNING, "away")
    (row,) = [effect for effect in defect(creating(), KeyError("x")).effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.RUNNING, "home")


def test_a_host_is_waited_for_until_the_deadline_and_then_a_plan_of_the_managers_own_goes_on() -> None:
    state = advance(creating(), HostFailed(5.0, "away is silent", uncertain=True)).state
    assert state.instruction == AwaitHost(host="away", until_s=65.0)
    step = advance(state, HostFailed(65.0, "away does not report", uncertain=True))
    assert isinstance(step.state.instruction, Finish)
    assert step.state.instruction.state is OperationState.FAILED
    (rest,) = [effect.state for effect in step.effects if isinstance(effect, Handover)]
    assert (rest.id, rest.instruction) == ("plan.rest", AwaitHost(host="away", until_s=3600.0))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.MIGRATING, "home")
    # It has all the time that its owner has, and decides for home: that is what the client was told.
    rest = advance(rest, HostBack(1.0)).state
    assert isinstance(rest.instruction, Remove)
    again = advance(rest, HostFailed(3000.0, "away is silent", uncertain=True)).state
    assert again.instruction == AwaitHost(host="away", until_s=3600.0)
    rest = advance(rest, ended("delete")).state
    assert rest.instruction == ReadHost(host="home")
    rest = advance(rest, read("home", OFF)).state
    assert isinstance(rest.instruction, Start)
    rest = advance(rest, ended("start")).state
    assert advance(rest, read("home", HOME)).state.finished


def test_a_host_that_reports_and_does_not_answer_is_not_waited_for_beyond_the_deadline_either() -> None:
    state = advance(creating(deadline_s=10.0), HostFailed(5.0, "away is silent", uncertain=True)).state
    state = advance(state, HostBack(6.0)).state
    state = advance(state, HostFailed(14.0, "away is silent", uncertain=True)).state
    assert state.instruction == AwaitHost(host="away", until_s=15.0)
    state = advance(state, HostBack(14.5)).state
    step = advance(state, HostFailed(22.0, "away is silent", uncertain=True))
    assert step.state.finished
    assert any(isinstance(effect, Handover) for effect in step.effects)


def test_a_lost_stop_is_fenced_by_a_start_before_the_vm_is_said_to_run() -> None:
    state = advance(begun(), HostFailed(1.0, "home is silent", uncertain=True)).state
    assert state.instruction == ReadHost(host="home")
    state = advance(state, read("home", HOME)).state
    assert isinstance(state.instruction, Start)
    # The stop was on its way: it is waited for, and the VM started again.
    state = advance(state, ended("start")).state
    stopping = HOME.model_copy(update={"state": VMState.STOPPING})
    state = advance(state, read("home", stopping)).state
    assert isinstance(state.instruction, AwaitHost)
    state = advance(state, HostBack(2.0)).state
    state = advance(state, read("home", OFF)).state
    assert isinstance(state.instruction, Start)
    state = advance(state, ended("start")).state
    step = advance(state, read("home", HOME))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (step.state.finished, row.phase) == (True, VMPhase.RUNNING)


def test_a_refused_start_at_home_is_tried_a_few_times_and_then_the_record_says_why_it_is_off() -> None:
    state = advance(creating(), ended("create", OperationState.FAILED)).state
    state = advance(state, ended("delete")).state
    for _ in range(20):
        event: Event = read("home", OFF) if isinstance(state.instruction, ReadHost) else HostBack(1.0)
        if isinstance(state.instruction, Start):
            event = HostFailed(1.0, "home refused", uncertain=False)
        step = advance(state, event)
        state = step.state
        if state.finished:
            break
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.STOPPED, "home")
    assert "home refused" in row.sentence


def test_a_vm_that_its_home_has_lost_is_on_no_host() -> None:
    state = advance(creating(), ended("create", OperationState.FAILED)).state
    state = advance(state, ended("delete")).state
    step = advance(state, read("home"))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.FAILED, None)


def test_a_place_that_is_given_up_after_a_start_was_commanded_is_cleaned_first() -> None:
    forgotten = creating().model_copy(update={"instruction": ReadHost(host="away")})
    step = advance(forgotten, HostFailed(1.0, "away is silent", uncertain=True))
    assert isinstance(step.state.instruction, Remove)


def test_one_that_was_off_stays_off_at_home() -> None:
    state = advance(creating(running=False), ended("create", OperationState.FAILED)).state
    step = advance(state, ended("delete"))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (step.state.finished, row.phase, row.host) == (True, VMPhase.STOPPED, "home")


# --- a host that is gone for good ------------------------------------------------------------------------------------


def handed_over(state: PlanState, why: str = "away is silent") -> PlanState:
    """What goes on with a plan whose operation has waited until its deadline."""
    assert isinstance(state.instruction, AwaitHost)
    until_s = state.instruction.until_s
    assert until_s is not None
    step = advance(state, HostFailed(until_s, why, uncertain=True))
    (rest,) = [effect.state for effect in step.effects if isinstance(effect, Handover)]
    return rest


def test_a_new_host_that_is_gone_for_good_gives_the_vm_back_to_its_owner() -> None:
    rest = handed_over(advance(creating(), HostFailed(5.0, "away is silent", uncertain=True)).state)
    step = advance(rest, HostFailed(3600.0, "away does not report", uncertain=True))
    assert isinstance(step.state.instruction, Finish)
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.STOPPED, "home")
    assert "may run on away, which was waited for 3600 s" in row.sentence
    (left,) = [effect.state for effect in step.effects if isinstance(effect, Handover)]
    # No room is kept for it there, and nobody's row is its own.
    assert (left.id, left.spec, left.instruction) == ("plan.left", None, AwaitHost(host="away"))


@pytest.mark.parametrize("there", [VMState.RUNNING, VMState.STOPPED])
def test_what_was_left_on_a_host_that_is_back_after_all_is_removed_there_whether_it_runs_or_not(
    there: VMState,
) -> None:
    left = given_up()
    left = advance(left, HostBack(9000.0)).state
    assert left.instruction == ReadHost(host="away")
    found = status_of(SPEC, "away", state=there)
    removing = advance(left, read("away", found)).state
    assert isinstance(removing.instruction, Remove)
    assert (removing.instruction.host, removing.instruction.vm) == ("away", "low")
    again = advance(removing, HostFailed(9100.0, "away is silent", uncertain=True)).state
    assert again.instruction == AwaitHost(host="away"), "as long as it takes"
    step = advance(removing, ended("delete"))
    assert step.state.finished
    assert not [effect for effect in step.effects if isinstance(effect, SetVM)]


def test_what_a_later_request_has_put_on_that_host_stays_there() -> None:
    left = advance(given_up(), HostBack(9000.0)).state
    assert advance(left, HostRead(9000.0, report_of("away", status_of(SPEC, "away")), kept=True)).state.finished
    fencing = advance(left, read("away")).state.instruction
    assert isinstance(fencing, Remove), "its start may still be on its way"


def given_up() -> PlanState:
    """What still waits for a host on which the VM may run, for nobody."""
    rest = handed_over(advance(creating(), HostFailed(5.0, "away is silent", uncertain=True)).state)
    return handed_over(rest)


@pytest.mark.parametrize(("off", "phase"), [(True, VMPhase.STOPPED), (False, VMPhase.RUNNING)])
def test_a_home_that_is_gone_for_good_gives_the_vm_back_to_its_owner(off: bool, phase: VMPhase) -> None:
    if off:
        state = advance(creating(), ended("create", OperationState.FAILED)).state
        state = advance(state, ended("delete")).state
    else:
        state = advance(begun(), HostFailed(1.0, "home is silent", uncertain=True)).state
    state = advance(state, HostFailed(2.0, "home is silent", uncertain=True)).state
    step = advance(handed_over(state), HostFailed(3600.0, "home does not report", uncertain=True))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (step.state.finished, row.phase, row.host) == (True, phase, "home")
    assert "nobody starts it but by request" in row.sentence
    assert not [effect for effect in step.effects if isinstance(effect, Handover)]


def test_what_is_left_at_home_is_waited_for_as_long_as_it_takes() -> None:
    rest = handed_over(advance(clearing(), HostFailed(5.0, "home is silent", uncertain=True)).state)
    assert rest.instruction == AwaitHost(host="home")
    rest = advance(rest, HostBack(1e6)).state
    assert advance(rest, HostFailed(1e6, "home is silent", uncertain=True)).state.instruction == AwaitHost(host="home")
