"""Words that only host agents of a later version know: no plan takes, removes or gives up anything because of them."""

from __future__ import annotations

from cluster_manager.inventory.report_news import has_room_to_share, news_in
from cluster_manager.plans.lifecycle import start_start
from cluster_manager.plans.plans import (
    AwaitHost,
    Event,
    Finish,
    HostBack,
    HostFailed,
    HostRead,
    Plan,
    ReadHost,
    Reclaim,
    SetVM,
)
from cluster_manager.plans.reading import read_plan
from ebbtide.messages.common import Vector, as_sent
from ebbtide.messages.operations import OperationState, VMOutcome
from ebbtide.messages.requests import StartRequest
from tests.manager.outcomes import outcome_of
from tests.manager.plan_events import chosen, ended, hibernating, placement, read, report_of, spec_of, status_of
from tests.manager.plans import test_live_migration_plans as live
from tests.manager.plans import test_migration_plans as cold

LOW_1, LOW_2 = spec_of("low-1", "deflatable", 3.0, 1000.0), spec_of("low-2", "deflatable", 3.0, 1000.0)
FLOOR = Vector(cpu_cores=0.5, memory_mib=300.0)
ODD = hibernating(status_of(LOW_2, "a"))


def after(state: Plan, *events: Event) -> Plan:
    for event in events:
        state = state.next_step(event).state
    return state


def test_a_vm_in_a_state_that_is_not_known_gives_nothing_and_no_vm_is_preempted_for_it() -> None:
    state = after(placement(spec_of("high-1")), chosen(), chosen("a"), read("a", status_of(LOW_1, "a"), ODD))
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.exclude == ("low-2",)
    shrunk = read("a", status_of(LOW_1, "a", FLOOR), ODD)
    state = after(state, ended("reclaim"), shrunk, ended("reinflate"))
    assert isinstance(state.instruction, Finish)
    said = "low-2 could not be deflated (it is hibernating, a state that is not known here)"
    assert said in state.instruction.sentence


def test_a_vm_that_may_have_come_up_where_it_was_sent_is_waited_for_and_not_removed() -> None:
    doubt = after(cold.creating(), HostFailed(1.0, "away is silent", uncertain=True), HostBack(2.0))
    assert doubt.instruction == ReadHost(host="away")
    there = HostRead(3.0, report_of("away", hibernating(status_of(cold.SPEC, "away"))), frozenset())
    state = after(doubt, there)
    assert isinstance(state.instruction, AwaitHost)
    assert "low is hibernating on away" in state.progress[-1]
    assert after(state, HostBack(4.0)).instruction == ReadHost(host="away")


def test_what_is_left_at_home_in_a_state_that_is_not_known_stays_until_more_is_known() -> None:
    state = after(cold.clearing(), HostRead(1.0, report_of("home", hibernating(cold.HOME)), frozenset()))
    assert isinstance(state.instruction, AwaitHost)
    assert not state.finished


def test_a_live_migration_is_not_undone_while_the_state_at_home_is_not_known() -> None:
    doubt = after(live.sent(), ended("depart", OperationState.FAILED))
    assert doubt.instruction == ReadHost(host="home")
    state = after(doubt, live.read("home", hibernating(live.HERE)))
    assert isinstance(state.instruction, AwaitHost)
    assert state.instruction.host == "home"


def test_a_vm_in_a_state_that_is_not_known_is_not_started_and_not_said_to_run() -> None:
    state = start_start("p", StartRequest(request_id="r", deadline_s=10.0), LOW_2, "a")
    step = state.next_step(read("a", ODD))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (step.state.finished, row.phase.value) == (True, "stopped")
    assert "it is hibernating on a, a state that is not known here" in row.sentence


def test_a_vm_in_a_state_that_is_not_known_is_not_news_of_a_vm_that_went_off() -> None:
    odd = ODD.model_copy(update={"off_reason": "it sleeps"})
    report, before = report_of("a", odd), report_of("a", status_of(LOW_2, "a"))
    assert news_in(report, before) == []
    assert not has_room_to_share(report, before)


def test_a_plan_is_read_again_whose_outcomes_have_a_layer_of_a_later_version() -> None:
    size = LOW_1.nominal.vector()
    done = outcome_of("low-1", 1, size, size, size).model_dump()
    row = {"resource": "cpu_cores", "asked": 1, "promised": 1, "verified": 1, "seconds": 1, "reason": ""}
    done["ledger"] = [{**row, "layer": "firmware"}]
    outcome = VMOutcome.model_validate(done, context=as_sent)
    plan = placement(LOW_1).having(outcomes=(outcome,))
    assert read_plan(plan.model_dump_json()) == plan
