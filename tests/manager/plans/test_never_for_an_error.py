"""Only lack of room that was measured preempts: whatever else a plan hears of a host, no VM is stopped for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from cluster_manager.execution.running_plans import defect
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    EndedTogether,
    Event,
    Finish,
    Forgotten,
    HostFailed,
    HostRead,
    Plan,
    Preempt,
    PreemptTogether,
    ReadHost,
    Reclaim,
    Reinflate,
    Remove,
)
from cluster_manager.plans.preemption import LEAST_S, REASONS, Evidence, PreemptionReason, evidence
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import DryRunReport
from ebbtide.messages.operations import OperationState, VMOutcome
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMSpec, VMState
from hostagent.api import routes
from tests.manager.outcomes import outcome_of
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of

LOW_1, LOW_2 = spec_of("low-1", "deflatable", 3.0, 1000.0), spec_of("low-2", "deflatable", 3.0, 1000.0)
HIGH = spec_of("high-1")
#: The minimums of the others leave too little for it.
HUGE = spec_of("high-1", cpu_cores=5.3)
FLOOR = Vector(cpu_cores=0.5, memory_mib=300.0)
FULL = read("a", status_of(LOW_1, "a"), status_of(LOW_2, "a"))
BROKEN = "internal error: unable to write to 'cpu.max'"
FAILED, PARTIAL = OperationState.FAILED, OperationState.PARTIAL


def outcome(name: str, *errors: str, after: ResourceVector | None = None) -> VMOutcome:
    """Of a VM that was to go to 1.5 cores and 650 MiB."""
    before, target = ResourceVector(3.0, 1000.0), ResourceVector(1.5, 650.0)
    return outcome_of(name, 2, before, after or before, target).model_copy(update={"errors": errors})


def run(*events: Event) -> PlacementPlan:
    """A fixed VM that finds room nowhere by deflation and looks where preemption would do."""
    return after(placement(HIGH), chosen(), chosen("a"), FULL, *events)


def after(state: PlacementPlan, *events: Event) -> PlacementPlan:
    for event in events:
        assert not isinstance(state.instruction, Remove | Preempt | PreemptTogether), "a VM was preempted"
        step = state.next_step(event).state
        assert isinstance(step, PlacementPlan)
        state = step
    return state


def test_every_piece_of_evidence_is_decided_and_only_two_are_reasons() -> None:
    assert set(REASONS) == set(Evidence)
    reasons = {kind: reason for kind, reason in REASONS.items() if reason is not None}
    assert reasons == {
        Evidence.MINIMUMS: PreemptionReason.MINIMUM,
        Evidence.MEASURED: PreemptionReason.SHORTFALL,
    }


def test_what_the_interfaces_take_for_a_reason_is_that_enumeration() -> None:
    words = {reason.value for reason in PreemptionReason}
    (offered, _) = get_args(DryRunReport.model_fields["reason"].annotation)
    assert set(get_args(get_args(offered)[0])) == words
    assert set(get_args(routes._REASON.kind)) == words | {"delete"}


@pytest.mark.parametrize(
    ("minimums", "rounds", "end", "failed", "nothing"),
    list(product((False, True), (0, 1), (None, *OperationState), (False, True), (False, True))),
)
def test_no_error_is_evidence_whatever_it_comes_with(
    minimums: bool, rounds: int, end: OperationState | None, failed: bool, nothing: bool
) -> None:
    found = REASONS[evidence(minimums, rounds, end, failed, nothing)]
    if end is FAILED:
        assert found is None
    elif found is PreemptionReason.SHORTFALL:
        assert not failed
        assert rounds or nothing
    elif found is PreemptionReason.MINIMUM:
        assert minimums
        assert not failed
        assert rounds or nothing, "what can be deflated is, so that no more have to go than need be"


def test_a_verified_shortfall_preempts() -> None:
    state = run(ended("reclaim", PARTIAL, vms=(outcome("low-1"),)), FULL)
    assert isinstance(state.instruction, Preempt)
    assert state.instruction.reason is PreemptionReason.SHORTFALL


def test_one_whose_preemption_never_left_the_manager_stays_what_it_was() -> None:
    state = run(ended("reclaim", PARTIAL, vms=(outcome("low-1"),)), FULL)
    assert isinstance(state.instruction, Preempt)
    step = state.next_step(HostFailed(5.0, "a refuses connections", uncertain=False, reached=False))
    assert {getattr(effect, "name", HIGH.name) for effect in step.effects} == {HIGH.name}
    assert isinstance(step.state.instruction, Finish)
    assert (step.state.instruction.state, step.state.instruction.reason) == (FAILED, ReasonCode.HOST_UNAVAILABLE)


@pytest.mark.parametrize("broken", [False, True], ids=["reinflated", "by a defect"])
def test_the_reason_of_a_refusal_stays_when_what_was_taken_has_been_given_back(broken: bool) -> None:
    state: Plan = run(ended("reclaim", PARTIAL, vms=(outcome("low-1"),)), FULL)
    state = state.next_step(HostFailed(5.0, "a refused", uncertain=False)).state
    assert state.instruction.do == "reinflate"
    state = defect(state, KeyError()).state if broken else state.next_step(ended("reinflate")).state
    assert isinstance(state.instruction, Finish)
    assert (state.instruction.state, state.instruction.reason) == (FAILED, ReasonCode.NO_ROOM)


def test_of_a_vm_whose_call_failed_nothing_is_asked_again_and_the_others_give() -> None:
    given = outcome("low-1", after=ResourceVector(1.5, 650.0))
    first = ended("reclaim", PARTIAL, vms=(given, outcome("low-2", BROKEN)))
    half = read("a", status_of(LOW_1, "a", Vector(cpu_cores=1.5, memory_mib=650.0)), status_of(LOW_2, "a"))
    state = run(first, half)
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.exclude == ("low-2",)
    # What low-1 has above its minimum, since low-2 is charged in full and given nothing.
    assert state.instruction.need == Vector(cpu_cores=1.0, memory_mib=350.0)


def test_a_call_that_failed_ends_in_a_refusal_that_names_it() -> None:
    first = ended("reclaim", PARTIAL, vms=(outcome("low-1", BROKEN), outcome("low-2", BROKEN)))
    state = run(first, FULL, ended("reinflate"))
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is FAILED
    assert f"low-1 could not be deflated ({BROKEN})" in state.instruction.sentence
    assert state.instruction.sentence.count(BROKEN) == 2, "once for each VM"
    assert "for an error no VM is preempted" in state.instruction.sentence


def test_what_a_failed_call_left_missing_preempts_no_other_vm() -> None:
    """The one whose call failed could give; that the others cannot is no lack of room."""
    first = ended("reclaim", PARTIAL, vms=(outcome("low-1"), outcome("low-2", BROKEN)))
    state = run(first, FULL)
    assert state.instruction.do == "reinflate"
    assert state.victims == ()


def test_a_failed_call_for_a_vm_that_is_not_on_record_preempts_no_other_vm_either() -> None:
    first = replace(ended("reclaim", PARTIAL, vms=(outcome("low-1"),)), failed=(("low-2", BROKEN),))
    state = run(first, FULL)
    assert state.instruction.do == "reinflate"
    assert (state.victims, state.left_out) == ((), ("low-2",))
    assert [told.name for told in state.outcomes] == ["low-1"], "its figures do not count"
    alone = run(replace(ended("reclaim", PARTIAL), failed=(("low-2", BROKEN),)), FULL)
    assert isinstance(alone.instruction, Reclaim), "the other one is asked"
    assert alone.instruction.exclude == ("low-2",)


@pytest.mark.parametrize("arriving", [HIGH, HUGE], ids=["minimums-allow-it", "minimums-do-not"])
@pytest.mark.parametrize(
    "trouble",
    [
        ended("reclaim", FAILED),
        Forgotten(0.0, lapse=True),
        HostFailed(0.0, "a does not answer", True),
        HostFailed(0.0, "a refused", False),
    ],
    ids=["failed", "forgotten", "unreachable", "refused"],
)
def test_a_deflation_that_was_not_carried_out_preempts_none(trouble: Event, arriving: VMSpec) -> None:
    state = after(placement(arriving), chosen(), chosen("a"), FULL)
    for _ in range(20):
        if state.finished:
            break
        assert not isinstance(state.instruction, Remove | Preempt | PreemptTogether)
        answer: Event = FULL
        if isinstance(state.instruction, Reclaim):
            answer = trouble
        elif state.instruction.do == "reinflate":
            answer = ended("reinflate")
        state = after(state, answer)
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is FAILED


def test_minimums_that_stood_in_the_way_before_are_no_reason_when_a_call_failed_and_they_do_not_any_more() -> None:
    """During the deflation room has come: what is missing now is what low-2, whose call failed, could give."""
    rigid = spec_of("rigid", "deflatable", 3.0, 400.0).with_minimum(ResourceVector(3.0, 300.0))
    small = Vector(cpu_cores=3.0, memory_mib=300.0)

    def there(low_1: Vector, cpu_cores: float) -> HostRead:
        vms = (status_of(LOW_1, "a", low_1), status_of(LOW_2, "a", small), status_of(rigid, "a", small))
        return read("a", *vms, cpu_cores=cpu_cores, memory_mib=4000.0)

    before = ResourceVector(3.0, 300.0)
    failed = outcome_of("low-2", 2, before, before, FLOOR.vector()).model_copy(update={"errors": (BROKEN,)})
    arriving = placement(spec_of("high-1", cpu_cores=5.5, memory_mib=300.0))
    state = after(arriving, chosen(), chosen("a"), there(small, 9.0))
    assert state.reason is PreemptionReason.MINIMUM
    state = after(state, ended("reclaim", PARTIAL, vms=(failed,)))
    state = after(state, there(FLOOR, 10.0), ended("reinflate"))
    assert isinstance(state.instruction, Finish)
    assert "for an error no VM is preempted" in state.instruction.sentence


def test_what_fell_short_where_minimums_do_not_stand_in_the_way_any_more_is_no_minimum() -> None:
    state = after(placement(HUGE), chosen(), chosen("a"), FULL)
    assert state.reason is PreemptionReason.MINIMUM
    stuck = ended("reclaim", PARTIAL, vms=(outcome("low-1"),))
    more = read("a", status_of(LOW_1, "a"), status_of(LOW_2, "a", FLOOR), cpu_cores=7.0)
    state = after(state, stuck, more)
    assert isinstance(state.instruction, Preempt)
    assert (state.instruction.vm, state.instruction.reason) == ("low-1", PreemptionReason.SHORTFALL)
    assert state.targets["low-1"].cpu_cores >= LOW_1.minimum.cpu_cores


def late(event: HostRead, at: float) -> HostRead:
    return replace(event, elapsed_s=at, sold={LOW_1.name: LOW_1, LOW_2.name: LOW_2})


@pytest.mark.parametrize("arriving", [HIGH, HUGE], ids=["minimums-allow-it", "minimums-do-not"])
def test_the_time_to_deflate_does_not_pass_while_others_have_the_hosts(arriving: VMSpec) -> None:
    for event in (chosen("a"), chosen("b", "a")):
        state = after(placement(arriving), chosen(), event)
        if state.host == "b":
            state = after(state, HostFailed(60.0, "b is busy with another plan", uncertain=False))
        state = after(state, late(FULL, 119.9))
        assert isinstance(state.instruction, Reclaim)
        assert state.instruction.deadline_s == 30.0, "as much is kept for the notice"


@pytest.mark.parametrize("at", [55.1, 59.9, 90.0])
@pytest.mark.parametrize("arriving", [HIGH, HUGE], ids=["minimums-allow-it", "minimums-do-not"])
def test_a_host_that_comes_too_late_to_be_deflated_is_left_and_none_is_preempted(arriving: VMSpec, at: float) -> None:
    broken = ended("reclaim", PARTIAL, at=1.0, vms=(outcome("low-1", BROKEN), outcome("low-2", BROKEN)))
    state = after(placement(arriving), chosen(), chosen("a", "b"), FULL, broken, FULL, ended("reinflate"))
    assert state.instruction == ReadHost(host="b")
    deflated = read("b", status_of(LOW_1, "b", FLOOR), status_of(LOW_2, "b", FLOOR), cpu_cores=3.9)
    for there in (read("b", status_of(LOW_1, "b"), status_of(LOW_2, "b")), deflated):
        left = after(state, late(there, at))
        assert isinstance(left.instruction, Finish)
        assert left.instruction.state is FAILED


def test_a_plan_that_goes_on_after_its_deadline_preempts_only_where_all_was_asked_and_with_notice() -> None:
    forgotten = after(run(), Forgotten(600.0, lapse=False), late(FULL, 600.0))
    assert isinstance(forgotten.instruction, Reinflate), "nobody knows what came of it"
    fell_short = after(run(), ended("reclaim", PARTIAL, at=600.0, vms=(outcome("low-1"),)))
    low_1, low_2 = Vector(cpu_cores=2.5, memory_mib=800.0), Vector(cpu_cores=1.5, memory_mib=650.0)
    spared = read("a", status_of(LOW_1, "a", low_1), status_of(LOW_2, "a", low_2))
    assert isinstance(after(fell_short, late(spared, 600.0)).instruction, Reinflate), (
        "low-2 has what low-1 did not give"
    )
    measured = after(fell_short, late(read("a", status_of(LOW_1, "a"), status_of(LOW_2, "a", FLOOR)), 600.0))
    assert isinstance(measured.instruction, Preempt)
    assert measured.instruction.notice_s == LEAST_S


@pytest.mark.parametrize(
    ("standing", "why"),
    [
        (VMState.PAUSED, "is paused"),
        (VMState.MIGRATING, "is moving"),
        (VMState.STARTING, "is being started"),
        (VMState.STOPPING, "is being stopped"),
        (VMState.STOPPED, "is off"),
    ],
)
def test_a_vm_whose_size_cannot_be_changed_gives_nothing_and_no_vm_is_preempted_for_it(
    standing: VMState, why: str
) -> None:
    paused = status_of(LOW_2, "a", state=standing)
    there = read("a", status_of(LOW_1, "a"), paused)
    state = after(placement(HIGH), chosen(), chosen("a"), there)
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.exclude == ("low-2",)
    shrunk = read("a", status_of(LOW_1, "a", FLOOR), paused)
    state = after(state, ended("reclaim"), shrunk, ended("reinflate"))
    assert isinstance(state.instruction, Finish)
    assert f"low-2 could not be deflated (it {why})" in state.instruction.sentence


def at_minimum(name: str) -> VMSpec:
    return spec_of(name, "deflatable", 1.0, 300.0).with_minimum(ResourceVector(1.0, 300.0))


@pytest.mark.parametrize("failing", [VMState.PAUSED, VMState.RUNNING], ids=["paused", "its calls fail"])
def test_the_minimums_of_others_are_no_reason_while_one_that_cannot_be_deflated_has_what_is_missing(
    failing: VMState,
) -> None:
    """13 cores: five VMs at their minimum, and one of 4 cores that could give all but half of one."""
    large, small = spec_of("large", "deflatable", 4.0, 400.0), [at_minimum(f"low-{at}") for at in range(5)]
    vms = (status_of(large, "a", state=failing), *(status_of(spec, "a") for spec in small))
    there = read("a", *vms, cpu_cores=13.0, memory_mib=4000.0)
    state = after(placement(spec_of("high-1", cpu_cores=9.0)), chosen(), chosen("a"), there)
    if isinstance(state.instruction, Reclaim):
        state = after(state, ended("reclaim", PARTIAL, vms=(outcome("large", BROKEN),)), there)
    while not isinstance(state.instruction, Finish):
        state = after(state, ended("reinflate"))
    assert state.victims == ()
    assert "large could not be deflated" in state.instruction.sentence
    assert "for an error no VM is preempted" in state.instruction.sentence


@pytest.mark.parametrize(
    "standing", [VMState.STARTING, VMState.STOPPING, VMState.MIGRATING, VMState.PAUSED, VMState.RUNNING]
)
def test_a_little_that_cannot_be_taken_is_no_error_where_the_same_ones_have_to_go_without_it(standing: VMState) -> None:
    """9 cores: eight VMs at their minimum, and one that could give a tenth of a core."""
    tiny = spec_of("tiny", "deflatable", 1.0, 300.0).with_minimum(ResourceVector(0.9, 300.0))
    small = [at_minimum(f"low-{at}") for at in range(8)]
    vms = (status_of(tiny, "a", state=standing), *(status_of(spec, "a") for spec in small))
    there = read("a", *vms, cpu_cores=9.0, memory_mib=4000.0)
    state = after(placement(spec_of("high-1", cpu_cores=5.0)), chosen(), chosen("a"), there)
    if isinstance(state.instruction, Reclaim):
        state = after(state, ended("reclaim", PARTIAL, vms=(outcome("tiny", BROKEN),)), there)
    assert isinstance(state.instruction, PreemptTogether)
    assert state.reason is PreemptionReason.MINIMUM
    assert len(state.victims) == 5
    assert "tiny" not in state.victims


def test_one_that_cannot_be_deflated_and_is_at_its_minimum_keeps_no_other_from_its_end() -> None:
    vms = (status_of(at_minimum("low-1"), "a"), status_of(at_minimum("low-2"), "a", state=VMState.PAUSED))
    there = read("a", *vms, cpu_cores=3.0)
    state = after(placement(spec_of("high-1", cpu_cores=2.0)), chosen(), chosen("a"), there)
    assert isinstance(state.instruction, Preempt)
    assert (state.instruction.vm, state.instruction.reason) == ("low-1", PreemptionReason.MINIMUM)


def test_one_that_was_stopped_on_command_holds_nothing_and_is_no_error() -> None:
    off = {"state": VMState.STOPPED, "start_size": LOW_2.nominal, "current": Vector()}
    there = read("a", status_of(LOW_1, "a"), status_of(LOW_2, "a").model_copy(update=off), cpu_cores=3.2)
    state = after(placement(HIGH), chosen(), chosen("a"), there)
    assert state.errors == ()


def test_a_paused_vm_hides_nothing_of_what_the_others_give() -> None:
    there = read("a", status_of(LOW_1, "a"), status_of(LOW_2, "a", state=VMState.PAUSED))
    assert there.report.deflatable.cpu_cores == 2.5, "its agent does not count the paused one"
    state = after(placement(spec_of("high-2", cpu_cores=2.0, memory_mib=500.0)), chosen("a"), there)
    assert isinstance(state.instruction, Reclaim)
    assert (state.instruction.need.cpu_cores, state.instruction.exclude) == (2.0, ("low-2",))


def test_a_host_that_became_overcommitted_since_it_was_chosen_is_left() -> None:
    over = FULL.report.model_copy(update={"overcommitted": Vector(cpu_cores=1.0)})
    state = after(placement(HIGH), chosen("a", "b"), replace(FULL, report=over))
    assert state.instruction == ReadHost(host="b")
    assert state.failures == ("a is overcommitted by 1 cores",)


def test_a_deflation_that_failed_is_tried_again() -> None:
    state = run(ended("reclaim", FAILED), FULL)
    assert isinstance(state.instruction, Reclaim)


def test_once_some_have_gone_no_more_go_in_the_place_of_what_one_whose_call_failed_could_give() -> None:
    """While the first ones end their work a guest under pressure grows by as much as `tiny` could give."""
    tiny = spec_of("tiny", "deflatable", 1.0, 300.0).with_minimum(ResourceVector(0.9, 300.0))
    small = {spec.name: spec for spec in (at_minimum(f"low-{at}") for at in range(8))}

    def there(*names: str, cpu_cores: float = 9.0) -> HostRead:
        vms = (status_of(tiny, "a"), *(status_of(small[name], "a") for name in names))
        return read("a", *vms, cpu_cores=cpu_cores, memory_mib=4000.0)

    broken = ended("reclaim", PARTIAL, vms=(outcome("tiny", BROKEN),))
    arriving = placement(spec_of("high-1", cpu_cores=5.0))
    state = after(arriving, chosen(), chosen("a"), there(*small), broken, there(*small))
    assert isinstance(state.instruction, PreemptTogether)
    step = state.next_step(EndedTogether(1.0, tuple(ended("delete") for _ in state.victims)))
    left = [name for name in small if name not in state.victims]
    assert isinstance(step.state.instruction, ReadHost)
    assert step.state.next_step(there(*left)).state.instruction.do == "create"
    short = step.state.next_step(there(*left, cpu_cores=8.95)).state
    assert isinstance(short, PlacementPlan)
    assert (short.instruction.do, short.victims) == ("reinflate", state.victims)
    end = short.next_step(ended("reinflate")).state.instruction
    assert isinstance(end, Finish)
    assert "tiny could not be deflated" in end.sentence
