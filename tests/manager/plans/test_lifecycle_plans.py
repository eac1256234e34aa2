"""Plans of a VM's lifecycle, step by step, without any host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster_manager.plans.lifecycle import (
    sold_as,
    start_adoption,
    start_release,
    start_resize,
    start_start,
    start_stop,
)
from cluster_manager.plans.plans import (
    AwaitHost,
    Finish,
    HostBack,
    HostFailed,
    HostRead,
    Plan,
    ReadHost,
    ReinflationPending,
    Release,
    SetSpec,
    SetVM,
    VMPhase,
)
from cluster_manager.plans.removals import start_reinflation, start_removal
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import AdoptRequest, StartRequest
from ebbtide.messages.vms import VMSpec, VMState
from tests.manager.plan_events import read, report_of, spec_of, status_of


def test_a_vm_is_sold_as_its_host_says_and_what_it_does_not_tell_stays() -> None:
    size = {name: Vector(cpu_cores=cores, memory_mib=800.0) for name, cores in (("low", 2.0), ("high", 4.0))}
    spec = VMSpec(
        name="h", priority=Priority.HARVEST, nominal=size["low"], ceiling=size["low"], start="deflated", template="x"
    )
    status = status_of(spec, "host-a").model_copy(update={"ceiling": size["low"]})
    assert sold_as(spec, None) == sold_as(spec, status) == spec
    grown = status.model_copy(update={"ceiling": size["high"], "current": size["high"]})
    assert sold_as(spec, grown) == spec.model_copy(update={"ceiling": size["high"]})
    raised = grown.model_copy(update={"minimum": Vector(cpu_cores=1.5, memory_mib=500.0)})
    sold = sold_as(spec, raised)
    assert (sold.ceiling, sold.minimum, sold.start) == (size["high"], raised.minimum, "deflated")


@pytest.mark.parametrize("uncertain", [False, True])
def test_a_stop_or_release_that_came_to_nothing_pays_no_debt(uncertain: bool) -> None:
    stop = start_stop("p", "r", "v", "host-a", 1.0)
    release = start_release("p", "r", "v", "host-a", 60.0)
    release = release.model_copy(update={"instruction": Release(host="host-a", step=1, vm="v")})
    for state in (stop, release):
        effects = state.next_step(HostFailed(0.0, "host-a is silent", uncertain=uncertain)).effects
        owed = [effect for effect in effects if isinstance(effect, ReinflationPending)]
        assert owed == ([ReinflationPending("host-a", True)] if uncertain else [])


@pytest.mark.parametrize("report", ["full", "unavailable"])
def test_what_a_vms_own_host_has_no_room_for_ends_with_that_code(report: str) -> None:
    smaller, fixed = spec_of("v", "deflatable", cpu_cores=2.0), spec_of("other", "fixed", cpu_cores=5.0)
    larger = smaller.model_copy(update={"nominal": Vector(cpu_cores=4.0, memory_mib=1000.0)})
    taken = status_of(smaller, "a").model_copy(update={"current": smaller.minimum})
    off = status_of(larger, "a").model_copy(update={"state": VMState.STOPPED, "start_size": larger.nominal})
    start = StartRequest(request_id="r")
    for plan, vm in (
        (start_resize("p", "r", "a", larger, 60.0), taken),
        (start_release("p", "r", "v", "a", 60.0), taken),
        (start_start("p", start, larger, "a"), off),
    ):
        told = report_of("a", vm, status_of(fixed, "a"))
        if report == "unavailable":
            told = told.model_copy(update={"unavailable": "its hypervisor does not answer"})
        end = plan.next_step(HostRead(0.0, told, frozenset({"v", "other"}))).state.instruction
        assert isinstance(end, Finish), end
        code = ReasonCode.NO_ROOM if report == "full" else ReasonCode.HOST_UNAVAILABLE
        assert end.reason is code, end


@pytest.mark.parametrize("code", [ReasonCode.HOST_UNAVAILABLE, ReasonCode.FAILED, ReasonCode.NO_ROOM])
def test_what_ends_by_its_host_has_the_code_of_that(code: ReasonCode) -> None:
    failed = HostFailed(0.0, "host-a says so", uncertain=False, code=code)
    adoption = start_adoption("p", "v", AdoptRequest(request_id="r", host="host-a", domain="d"))
    adopting = adoption.next_step(read("host-a")).state
    for plan, event in (
        (start_removal("p", "r", "v", "host-a"), failed),
        (start_removal("p", "r", "v", "host-a"), replace(failed, uncertain=True)),
        (start_removal("p", "r", "v", "host-a", owed=True), failed),
        (start_reinflation("p", "host-a"), failed),
        (adoption, failed),
        (adopting, failed),
        (adopting.having(waits_until_s=0.0), replace(failed, uncertain=True)),
    ):
        end = plan.next_step(event).state.instruction
        assert isinstance(end, Finish), end
        assert end.reason is code, end


def test_an_adoption_waits_for_a_busy_host() -> None:
    request = AdoptRequest(request_id="r", host="host-a", domain="d")
    assert start_adoption("p", "v", request).deadline_s == 60.0


def test_an_adoption_whose_host_is_gone_ends_and_its_name_is_free() -> None:
    state: Plan = start_adoption("p", "v", AdoptRequest(request_id="r", host="host-a", domain="d"))
    state = state.next_step(read("host-a")).state.next_step(HostFailed(5.0, "host-a is silent", uncertain=True)).state
    assert state.instruction == AwaitHost(host="host-a", until_s=65.0)
    # It answers once and is silent again: the time goes on.
    state = state.next_step(HostBack(20.0)).state
    assert state.instruction == ReadHost(host="host-a")
    state = state.next_step(HostFailed(25.0, "host-a is silent", uncertain=True)).state
    assert state.instruction == AwaitHost(host="host-a", until_s=65.0)
    step = state.next_step(HostFailed(65.0, "host-a does not report", uncertain=True))
    assert isinstance(step.state.instruction, Finish)
    assert step.state.instruction.state is OperationState.FAILED
    assert "does not say whether it has adopted it" in step.state.instruction.sentence
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.owed) == (VMPhase.ENDED, False), "nobody else's domain is ever removed"


@pytest.mark.parametrize(("domain", "start_size"), [("v", None), ("ebb-v", Vector(cpu_cores=0.5, memory_mib=400.0))])
def test_a_vm_that_its_host_has_and_the_record_has_not_is_recorded_as_it_is(
    domain: str, start_size: Vector | None
) -> None:
    spec = spec_of("v", "deflatable")
    there = status_of(spec, "host-a").model_copy(update={"start_size": start_size})
    step = start_adoption("p", "v", AdoptRequest(request_id="r", host="host-a", domain=domain)).next_step(
        read("host-a", there)
    )
    assert isinstance(step.state.instruction, Finish)
    assert step.state.instruction.state is OperationState.DONE
    (sold,) = [effect.spec for effect in step.effects if isinstance(effect, SetSpec)]
    assert (sold.priority, sold.nominal, sold.template) == (spec.priority, spec.nominal, "lab")
    assert Vector.of(sold.allocation(ZERO).minimum) == there.minimum
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host) == (VMPhase.RUNNING if start_size is None else VMPhase.STOPPED, "host-a")


@pytest.mark.parametrize(
    ("domain", "state", "why"),
    [
        ("v", VMState.MIGRATING, "it is migrating on host-a; ask again when that has ended"),
        ("v", VMState.STOPPING, "it is stopping on host-a"),
        ("web", VMState.RUNNING, "host-a has a VM v already"),
    ],
)
def test_a_vm_that_is_being_changed_or_another_one_of_its_name_is_not_recorded(
    domain: str, state: VMState, why: str
) -> None:
    there = status_of(spec_of("v", "deflatable"), "host-a", state=state)
    step = start_adoption("p", "v", AdoptRequest(request_id="r", host="host-a", domain=domain)).next_step(
        read("host-a", there)
    )
    assert isinstance(step.state.instruction, Finish)
    assert step.state.instruction.state is OperationState.FAILED
    assert why in step.state.instruction.sentence
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.owed) == (VMPhase.ENDED, False), "it stays on its host"


def test_a_vm_that_is_still_being_stopped_is_not_said_to_run() -> None:
    spec = spec_of("low", "deflatable")
    state = start_start("p", StartRequest(request_id="r", deadline_s=10.0), spec, "host-a")
    step = state.next_step(read("host-a", status_of(spec, "host-a", state=VMState.STOPPING)))
    assert isinstance(step.state.instruction, Finish)
    assert step.state.instruction.state is OperationState.FAILED
    assert "still being stopped" in step.state.instruction.sentence


@pytest.mark.parametrize("waits", [False, True])
def test_a_vm_whose_host_cannot_say_whether_it_is_off_is_started_nowhere_else(waits: bool) -> None:
    spec = spec_of("low", "deflatable")
    request = StartRequest(request_id="r", anywhere=True, deadline_s=10.0)
    state = start_start("p", request, spec, "host-a", waits=waits)
    there = read("host-a", status_of(spec, "host-a", state=VMState.STOPPED))
    silent = replace(there, report=there.report.model_copy(update={"unavailable": "no answer for 30 s"}))
    step = state.next_step(silent)
    assert isinstance(step.state.instruction, Finish)
    assert "the hypervisor of host-a does not answer (no answer for 30 s)" in step.state.instruction.sentence
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert row.phase is (VMPhase.PREEMPTED if waits else VMPhase.STOPPED)
