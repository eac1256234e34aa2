"""Plans of migrations, step by step, without any host."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_manager.execution.running_plans import defect
from cluster_manager.plans.host_wait import MovePlan
from cluster_manager.plans.migrations import start_migration
from cluster_manager.plans.plans import (
    AwaitHost,
    Event,
    Finish,
    HostBack,
    HostFailed,
    HostRead,
    HostsChosen,
    Plan,
    ReadHost,
    Remove,
    SetVM,
    SpawnFollowUp,
    Step,
    Stop,
    VMPhase,
)
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMState
from tests.manager.plan_events import chosen, ended, read, report_of, spec_of, status_of, unrecorded

SPEC = spec_of("low", "deflatable")
HOME = status_of(SPEC, "home")
OFF = HOME.model_copy(update={"state": VMState.STOPPED, "start_size": SPEC.nominal, "current": Vector()})


def begun(running: bool = True, deadline_s: float = 60.0, lose_disk: bool = True) -> MovePlan:
    state = start_migration(
        "plan",
        MigrateRequest(request_id="request", limit_s=1.0, deadline_s=deadline_s, lose_disk=lose_disk),
        SPEC,
        "home",
        running=running,
        policy=PlacementPolicy.FIRST_FIT,
    )
    return heard(state, chosen("away"), unrecorded("away"))


def heard(state: Plan, *events: Event) -> MovePlan:
    """The plan after these events."""
    for event in events:
        state = state.next_step(event).state
    assert isinstance(state, MovePlan)
    return state


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(
    ("there", "why"),
    [
        ({"can_create": False}, "away has no base image"),
        ({"templates": (HostTemplate(name="web"),)}, "away has no template lab"),
    ],
    ids=["no-image", "another"],
)
def test_a_vm_is_not_stopped_for_a_host_that_lacks_what_it_is_made_of(
    running: bool, there: dict[str, Any], why: str
) -> None:
    request = MigrateRequest(request_id="request", host="away", deadline_s=60.0, lose_disk=True)
    state: Plan = start_migration("plan", request, SPEC, "home", running=running, policy=PlacementPolicy.FIRST_FIT)
    step = state.next_step(HostRead(0.0, report_of("away").model_copy(update=there), frozenset()))
    assert isinstance(step.state.instruction, Finish)
    assert step.state.instruction.sentence.endswith(why)
    assert row_of(step).phase is (VMPhase.RUNNING if running else VMPhase.STOPPED)


def row_of(step: Step) -> SetVM:
    """What the one step makes of the VM's row."""
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    return row


def creating(**options: Any) -> MovePlan:
    """The start on the other host is commanded."""
    state = begun(**options)
    if state.instruction.do == "stop":
        state = heard(state, ended("stop"), unrecorded("away"))
    assert state.instruction.do == "create"
    return state


def clearing() -> MovePlan:
    """It runs on the other host, and the old one is read."""
    state = heard(creating(), ended("create"))
    assert state.instruction == ReadHost(host="home")
    return state


FULL = read("away", status_of(spec_of("other", cpu_cores=6.0), "away"))
NAMESAKE = read("away", status_of(SPEC, "away"))
SILENT = HostFailed(0.0, "it is silent", uncertain=True)
REFUSED = HostFailed(0.0, "it refuses", uncertain=False, code=ReasonCode.FAILED)


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((HostsChosen(0.0, (), "no host is ready", ready=False),), ReasonCode.NO_HOST_READY),
        ((HostsChosen(0.0, ()),), ReasonCode.NO_HOST_READY),
        ((HostsChosen(0.0, (), "no ready host has 4 cores"),), ReasonCode.NO_ROOM),
        ((chosen("away"), FULL), ReasonCode.NO_ROOM),
        ((chosen("away", "b"), FULL, SILENT), ReasonCode.NO_ROOM),
        ((chosen("away"), SILENT), ReasonCode.HOST_UNAVAILABLE),
        ((chosen("away"), NAMESAKE), ReasonCode.FAILED),
        ((chosen("away"), unrecorded("away"), SILENT), ReasonCode.HOST_UNAVAILABLE),
        ((chosen("away"), unrecorded("away"), REFUSED), ReasonCode.FAILED),
        ((chosen("away"), unrecorded("away"), ended("stop"), unrecorded("away"), REFUSED), ReasonCode.FAILED),
    ],
)
def test_why_a_vm_did_not_move_is_told_by_a_code(events: tuple[Event, ...], code: ReasonCode) -> None:
    request = MigrateRequest(request_id="request", lose_disk=True)
    state = start_migration("plan", request, SPEC, "home", running=True, policy=PlacementPolicy.FIRST_FIT)
    end = heard(state, *events).instruction
    assert isinstance(end, Finish), end
    assert end.reason is code, end.sentence


def test_the_old_host_is_read_before_anything_is_removed_there() -> None:
    state = clearing()
    removing = state.next_step(unrecorded("home", OFF)).state
    assert isinstance(removing.instruction, Remove)
    assert (removing.instruction.host, removing.instruction.vm) == ("home", "low")
    waiting = removing.next_step(HostFailed(1.0, "home is silent", uncertain=True)).state
    assert isinstance(waiting.instruction, AwaitHost)
    assert waiting.next_step(HostBack(2.0)).state.instruction == ReadHost(host="home")
    assert state.next_step(unrecorded("home")).state.finished, "it is gone"


@pytest.mark.parametrize("state_there", [VMState.RUNNING, VMState.STARTING])
def test_what_runs_at_home_is_not_what_was_left_there(state_there: VMState) -> None:
    step = clearing().next_step(unrecorded("home", HOME.model_copy(update={"state": state_there})))
    assert step.state.finished
    assert "left alone" in step.state.progress[-2]
    assert any(getattr(effect, "kind", "") == "failed" for effect in step.effects)


def test_what_the_store_has_at_home_by_a_later_request_stays() -> None:
    step = clearing().next_step(HostRead(1.0, report_of("home", OFF), frozenset({SPEC.name})))
    assert step.state.finished


def test_one_that_powered_off_by_itself_before_it_moved_is_removed_all_the_same() -> None:
    charged = HOME.model_copy(update={"state": VMState.STOPPED})
    assert isinstance(clearing().next_step(unrecorded("home", charged)).state.instruction, Remove)


def test_a_defect_while_it_clears_up_leaves_the_vm_where_it_runs() -> None:
    (row,) = [effect for effect in defect(clearing(), KeyError("x")).effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.RUNNING, "away")
    (row,) = [effect for effect in defect(creating(), KeyError("x")).effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.RUNNING, "home")


def test_a_host_is_waited_for_until_the_deadline_and_then_a_plan_of_the_managers_own_goes_on() -> None:
    state = creating().next_step(HostFailed(5.0, "away is silent", uncertain=True)).state
    assert state.instruction == AwaitHost(host="away", until_s=65.0)
    step = state.next_step(HostFailed(65.0, "away does not report", uncertain=True))
    assert isinstance(step.state.instruction, Finish)
    assert step.state.instruction.state is OperationState.FAILED
    (rest,) = [effect.state for effect in step.effects if isinstance(effect, SpawnFollowUp)]
    assert (rest.id, rest.instruction) == ("plan.rest", AwaitHost(host="away", until_s=3600.0))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.MIGRATING, "home")
    # It has all the time that its owner has, and decides for the old host: that is what the client was told.
    rest = rest.next_step(HostBack(1.0)).state
    assert isinstance(rest.instruction, Remove)
    again = rest.next_step(HostFailed(3000.0, "away is silent", uncertain=True)).state
    assert again.instruction == AwaitHost(host="away", until_s=3600.0)
    step = rest.next_step(ended("delete"))
    assert (step.state.finished, row_of(step).phase, row_of(step).host) == (True, VMPhase.STOPPED, "home")


def test_a_host_that_reports_and_does_not_answer_is_not_waited_for_beyond_the_deadline_either() -> None:
    state = creating(deadline_s=10.0).next_step(HostFailed(5.0, "away is silent", uncertain=True)).state
    state = state.next_step(HostBack(6.0)).state
    state = state.next_step(HostFailed(14.0, "away is silent", uncertain=True)).state
    assert state.instruction == AwaitHost(host="away", until_s=15.0)
    state = state.next_step(HostBack(14.5)).state
    step = state.next_step(HostFailed(22.0, "away is silent", uncertain=True))
    assert step.state.finished
    assert any(isinstance(effect, SpawnFollowUp) for effect in step.effects)


@pytest.mark.parametrize("running", [True, False])
def test_a_stop_whose_answer_is_lost_leaves_the_vm_on_its_host_and_its_next_report_says_whether_it_runs(
    running: bool,
) -> None:
    state = begun().having(was_running=running)
    step = state.next_step(HostFailed(1.0, "home is silent", uncertain=True))
    row = row_of(step)
    assert (step.state.finished, row.host) == (True, "home")
    assert row.phase is (VMPhase.RUNNING if running else VMPhase.STOPPED)
    assert "home's next report says" in row.sentence


def test_a_vm_that_does_not_start_elsewhere_is_off_on_its_host_where_its_owner_may_start_it() -> None:
    state = heard(creating(), ended("create", OperationState.FAILED))
    assert isinstance(state.instruction, Remove), "nothing half-made stays there"
    step = state.next_step(ended("delete"))
    row = row_of(step)
    assert (step.state.finished, row.phase, row.host) == (True, VMPhase.STOPPED, "home")
    assert "off on home, where it can be started: away: create failed" in row.sentence


def test_a_vm_that_was_stopped_for_a_host_that_takes_it_no_more_is_off_on_its_own() -> None:
    stopped = heard(begun(), ended("stop"))
    step = stopped.next_step(HostFailed(1.0, "away is silent", uncertain=True))
    row = row_of(step)
    assert (step.state.finished, row.phase, row.host) == (True, VMPhase.STOPPED, "home")
    assert row.sentence == "low stays off on home: away is silent"


def test_a_vm_that_has_come_up_elsewhere_and_is_paused_there_has_moved() -> None:
    lost = heard(creating(), HostFailed(1.0, "away is silent", uncertain=True), HostBack(2.0))
    step = lost.next_step(unrecorded("away", status_of(SPEC, "away", state=VMState.PAUSED)))
    row = row_of(step)
    assert (step.state.instruction, row.phase, row.host) == (ReadHost(host="home"), VMPhase.RUNNING, "away")
    off = lost.next_step(unrecorded("away", OFF.model_copy(update={"host": "away"}))).state
    assert isinstance(off.instruction, Remove), "it did not come up, and its disk is at home"


def test_one_that_is_still_being_started_elsewhere_is_waited_for_and_not_removed_there() -> None:
    starting = unrecorded("away", status_of(SPEC, "away", state=VMState.STARTING))
    lost = heard(creating(), HostFailed(1.0, "away is silent", uncertain=True), HostBack(2.0), starting)
    assert lost.instruction == AwaitHost(host="away", until_s=61.0)
    assert "low is starting on away: waiting for away" in lost.progress
    up = lost.next_step(HostBack(3.0)).state.next_step(unrecorded("away", status_of(SPEC, "away")))
    assert (row_of(up).phase, row_of(up).host) == (VMPhase.RUNNING, "away")


def test_one_that_is_still_being_started_when_the_time_is_over_is_looked_at_again_and_not_removed_unseen() -> None:
    starting = unrecorded("away", status_of(SPEC, "away", state=VMState.STARTING), at=61.0)
    lost = heard(creating(), HostFailed(1.0, "away is silent", uncertain=True), HostBack(61.0))
    step = lost.next_step(starting)
    assert isinstance(step.state.instruction, Finish)
    assert "low has not moved in time (low is starting on away)" in step.state.instruction.sentence
    (rest,) = [effect.state for effect in step.effects if isinstance(effect, SpawnFollowUp)]
    looking = rest.next_step(HostBack(1.0)).state
    assert looking.instruction == ReadHost(host="away")
    up = looking.next_step(unrecorded("away", status_of(SPEC, "away")))
    assert (row_of(up).phase, row_of(up).host) == (VMPhase.RUNNING, "away")
    off = looking.next_step(unrecorded("away", status_of(SPEC, "away", state=VMState.STOPPED)))
    assert isinstance(off.state.instruction, Remove)


def test_a_place_that_is_given_up_after_a_start_was_commanded_is_cleaned_first() -> None:
    forgotten = creating().having(instruction=ReadHost(host="away"))
    step = forgotten.next_step(HostFailed(1.0, "away is silent", uncertain=True))
    assert isinstance(step.state.instruction, Remove)


def test_one_that_was_off_stays_off_at_home() -> None:
    state = heard(creating(running=False), ended("create", OperationState.FAILED))
    step = state.next_step(ended("delete"))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (step.state.finished, row.phase, row.host) == (True, VMPhase.STOPPED, "home")


# --- a host that is gone for good ------------------------------------------------------------------------------------


def handed_over(state: Plan, why: str = "away is silent") -> MovePlan:
    """What goes on with a plan whose operation has waited until its deadline."""
    assert isinstance(state.instruction, AwaitHost)
    until_s = state.instruction.until_s
    assert until_s is not None
    step = state.next_step(HostFailed(until_s, why, uncertain=True))
    (rest,) = [effect.state for effect in step.effects if isinstance(effect, SpawnFollowUp)]
    assert isinstance(rest, MovePlan)
    return rest


def test_a_new_host_that_is_gone_for_good_gives_the_vm_back_to_its_owner() -> None:
    rest = handed_over(creating().next_step(HostFailed(5.0, "away is silent", uncertain=True)).state)
    step = rest.next_step(HostFailed(3600.0, "away does not report", uncertain=True))
    assert isinstance(step.state.instruction, Finish)
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.STOPPED, "home")
    assert "may run on away, which was waited for 3600 s" in row.sentence
    (left,) = [effect.state for effect in step.effects if isinstance(effect, SpawnFollowUp)]
    # No room is kept for it there, and nobody's row is its own.
    assert (left.id, left.reserved, left.instruction) == ("plan.left", None, AwaitHost(host="away"))


@pytest.mark.parametrize("there", [VMState.RUNNING, VMState.STOPPED])
def test_what_was_left_on_a_host_that_is_back_after_all_is_removed_there_whether_it_runs_or_not(
    there: VMState,
) -> None:
    left = heard(given_up(), HostBack(9000.0))
    assert left.instruction == ReadHost(host="away")
    found = status_of(SPEC, "away", state=there)
    removing = left.next_step(unrecorded("away", found)).state
    assert isinstance(removing.instruction, Remove)
    assert (removing.instruction.host, removing.instruction.vm) == ("away", "low")
    again = removing.next_step(HostFailed(9100.0, "away is silent", uncertain=True)).state
    assert again.instruction == AwaitHost(host="away"), "as long as it takes"
    step = removing.next_step(ended("delete"))
    assert step.state.finished
    assert not [effect for effect in step.effects if isinstance(effect, SetVM)]


def test_what_a_later_request_has_put_on_that_host_stays_there() -> None:
    left = heard(given_up(), HostBack(9000.0))
    found = HostRead(9000.0, report_of("away", status_of(SPEC, "away")), frozenset({SPEC.name}))
    assert left.next_step(found).state.finished
    fencing = left.next_step(unrecorded("away")).state.instruction
    assert isinstance(fencing, Remove), "its start may still be on its way"


def given_up() -> MovePlan:
    """What still waits for a host on which the VM may run, for nobody."""
    rest = handed_over(creating().next_step(HostFailed(5.0, "away is silent", uncertain=True)).state)
    return handed_over(rest)


def test_what_is_left_at_home_is_waited_for_as_long_as_it_takes() -> None:
    rest = handed_over(clearing().next_step(HostFailed(5.0, "home is silent", uncertain=True)).state)
    assert rest.instruction == AwaitHost(host="home")
    rest = heard(rest, HostBack(1e6))
    assert rest.next_step(HostFailed(1e6, "home is silent", uncertain=True)).state.instruction == AwaitHost(host="home")


def test_one_that_waits_for_room_after_a_preemption_goes_on_waiting_where_it_has_nowhere_to_go() -> None:
    request = MigrateRequest(request_id="request", limit_s=1.0, deadline_s=60.0)
    for waits, phase in ((True, VMPhase.PREEMPTED), (False, VMPhase.STOPPED)):
        state = start_migration(
            "plan", request, SPEC, "home", running=False, policy=PlacementPolicy.FIRST_FIT, waits=waits
        )
        assert row_of(state.next_step(chosen())).phase is phase


def test_one_that_ran_although_it_was_to_wait_waits_on_where_its_host_has_it_no_more() -> None:
    """It has been removed for another VM meanwhile: its way back finds that out."""
    request = MigrateRequest(request_id="request", host="away", limit_s=1.0, deadline_s=60.0)
    policy = PlacementPolicy.FIRST_FIT
    state = start_migration("plan", request, SPEC, "home", running=True, policy=policy, waits=True)
    stopping = heard(state, unrecorded("away"))
    assert isinstance(stopping.instruction, Stop)
    row = row_of(stopping.next_step(HostFailed(1.0, "home refused: no VM low", uncertain=False)))
    assert (row.phase, row.unless_preempted) == (VMPhase.RUNNING, True)


def test_what_was_saved_of_a_vm_while_room_was_made_for_it_is_not_left_behind() -> None:
    stopped = begun(lose_disk=False).next_step(ended("stop"))
    assert stopped.state.instruction == ReadHost(host="home"), "it may have been suspended meanwhile"
    suspended = OFF.model_copy(update={"saved_mib": 100.0})
    for event, why in (
        (read("home", suspended), "its memory was saved there meanwhile, and would stay behind"),
        (HostFailed(1.0, "home is silent", uncertain=True), "home is silent"),
    ):
        step = stopped.state.next_step(event)
        assert isinstance(step.state.instruction, Finish)
        assert step.state.instruction.sentence == f"low stays off on home: {why}"
        row = row_of(step)
        assert (row.phase, row.host, row.unless_preempted) == (VMPhase.STOPPED, "home", True)
    goes_on = heard(stopped.state, read("home", OFF))
    assert goes_on.instruction == ReadHost(host="away")
    assert heard(goes_on, unrecorded("away")).instruction.do == "create"
    assert begun().next_step(ended("stop")).state.instruction == ReadHost(host="away"), "it may be lost"
