"""The state machine of plans alone: each path as a table, then random answers of agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    ChooseHosts,
    Commanding,
    Create,
    Effect,
    EndedTogether,
    Event,
    Finish,
    Forgotten,
    HostFailed,
    HostRead,
    HostsChosen,
    Note,
    OperationEnded,
    Plan,
    Preempt,
    PreemptTogether,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    Remove,
    SetPreempted,
    SetTarget,
    SetVM,
    Step,
    VMPhase,
    host_of,
)
from cluster_manager.plans.preemption import kept_for_notice, notice
from cluster_manager.plans.reading import read_plan
from cluster_manager.plans.removals import start_reinflation, start_removal, start_target
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.errors import ProtocolViolation
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import TargetRequest
from ebbtide.messages.vms import OnPreemption, VMSpec, VMState
from tests.manager.plan_events import chosen, ended, placement, read, report_of, spec_of, status_of

LOW_1, LOW_2 = spec_of("low-1", "deflatable", 3.0, 1000.0), spec_of("low-2", "deflatable", 3.0, 1000.0)
HIGH = spec_of("high-1")
SHRUNK = Vector(cpu_cores=1.5, memory_mib=650.0)
FLOOR = Vector(cpu_cores=0.5, memory_mib=300.0)


def run(state: Plan, *events: Event) -> tuple[list[str], Plan, list[Effect]]:
    """Feed events; what was instructed by name and host, the last state, all effects."""
    said = [_label(state)]
    effects: list[Effect] = []
    for event in events:
        step = state.next_step(event)
        state = step.state
        effects += step.effects
        said.append(_label(state))
    return said, state, effects


def _label(state: Plan) -> str:
    host = host_of(state.instruction)
    vm = getattr(state.instruction, "vm", None)
    return " ".join(part for part in (state.instruction.do, vm, host) if part)


def full(host: str) -> HostRead:
    return read(host, status_of(LOW_1, host), status_of(LOW_2, host))


def read_with(*hosts: str, first: HostRead | HostFailed | None = None) -> HostsChosen:
    """A choice, with what the first host says."""
    return HostsChosen(0.0, hosts, first=first or read(hosts[0]))


def shrunk(host: str) -> HostRead:
    return read(host, status_of(LOW_1, host, SHRUNK), status_of(LOW_2, host, SHRUNK))


def test_a_vm_that_fits_is_created_after_one_reading() -> None:
    said, state, effects = run(placement(HIGH), chosen("a", "b"), read("a"), ended("create"))
    assert said == ["choose-hosts", "read-host a", "create a", "finish"]
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.DONE
    assert state.instruction.sentence == "placed high-1 (3 cores, 800 MiB) on a in free room"
    assert SetVM("high-1", VMPhase.RUNNING, "a", state.instruction.sentence) in effects


def test_a_host_that_was_read_with_the_choice_is_not_read_again_before_the_start() -> None:
    said, state, effects = run(placement(HIGH), read_with("a", "b"), ended("create"))
    assert said == ["choose-hosts", "create a", "finish"]
    read_apart = run(placement(HIGH), chosen("a", "b"), read("a"), ended("create"))
    assert (state, effects) == read_apart[1:], "the same plan"


def test_what_the_first_host_lacks_by_its_reading_is_decided_with_the_choice() -> None:
    said, state, _ = run(placement(HIGH), read_with("a", "b", first=full("a")))
    assert said == ["choose-hosts", "reclaim a"]
    assert isinstance(state, PlacementPlan)
    assert (state.host, state.hosts_left) == ("a", ("b",))


def test_where_the_first_host_does_not_answer_the_choice_the_next_one_is_read() -> None:
    failed = HostFailed(1.0, "a is busy with another plan", uncertain=False)
    said, state, _ = run(placement(HIGH), read_with("a", "b", first=failed), read("b"), ended("create"))
    assert said == ["choose-hosts", "read-host b", "create b", "finish"]
    assert "a is busy with another plan" in state.progress


def test_the_host_is_read_before_the_reclaim_and_before_the_start() -> None:
    said, state, _ = run(
        placement(HIGH), chosen("a"), full("a"), ended("reclaim"), shrunk("a"), ended("create")
    )  # fmt: skip
    assert said == ["choose-hosts", "read-host a", "reclaim a", "read-host a", "create a", "finish"]
    assert state.host == "a"


def test_a_reclaim_asks_for_what_is_missing_with_what_is_left_of_the_deadline() -> None:
    _, state, _ = run(placement(HIGH, 30.0), chosen("a"), read("a", status_of(LOW_1, "a"), status_of(LOW_2, "a"), at=4))
    assert isinstance(state.instruction, Reclaim)
    assert (state.instruction.need, state.instruction.deadline_s) == (Vector(cpu_cores=3.0, memory_mib=700.0), 26.0)


def test_a_shortfall_is_undone_before_the_next_host_is_read() -> None:
    said, state, effects = run(
        placement(HIGH),
        chosen("a", "b"),
        full("a"),
        ended("reclaim", OperationState.PARTIAL, shortfall=Vector(memory_mib=200.0)),
        full("a"),
        ended("reinflate"),
        read("b"),
        ended("create"),
    )
    assert said[2:] == ["reclaim a", "read-host a", "reinflate a", "read-host b", "create b", "finish"]
    assert ReinflationPending("a", False) in effects
    assert state.host == "b"


def test_an_undo_that_fails_is_owed() -> None:
    partial = ended("reclaim", OperationState.PARTIAL)
    for trouble in (HostFailed(0.0, "a is away", True), ended("reinflate", OperationState.FAILED)):
        said, _, effects = run(placement(HIGH), chosen("a", "b"), full("a"), partial, full("a"), trouble)
        assert said[-1] == "read-host b"
        assert ReinflationPending("a", True) in effects


def test_what_rounding_left_is_reclaimed_again() -> None:
    nearly = Vector(cpu_cores=1.5, memory_mib=650.5)
    second = read("a", status_of(LOW_1, "a", nearly), status_of(LOW_2, "a", SHRUNK))
    said, state, _ = run(placement(HIGH), chosen("a"), full("a"), ended("reclaim"), second)
    assert said[-1] == "reclaim a"
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.need == Vector(memory_mib=1.0)


def test_a_host_whose_room_is_gone_by_now_is_left_untouched() -> None:
    low = [status_of(LOW_1, "a", FLOOR), status_of(spec_of("other", cpu_cores=5.0, memory_mib=1200.0), "a")]
    said, _, effects = run(placement(HIGH), chosen("a", "b"), read("a", *low))
    assert said[-1] == "read-host b"
    assert effects == []


def test_a_fixed_vm_preempts_when_minimums_leave_too_little_and_the_rest_is_shared() -> None:
    big = spec_of("high-1", cpu_cores=5.3)
    one_left = read("a", status_of(LOW_1, "a", FLOOR))
    said, state, effects = run(
        placement(big),
        chosen(),
        chosen("a"),
        full("a"),
        ended("reclaim"),
        read("a", status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR)),
        ended("stop"),
        one_left,
        ended("create"),
        ended("reinflate"),
    )
    assert said[3:] == [
        "reclaim a",
        "read-host a",
        "preempt low-2 a",
        "read-host a",
        "create a",
        "reinflate a",
        "finish",
    ]
    assert isinstance(state, PlacementPlan)
    assert state.reason == "minimum"
    (note,) = [effect for effect in effects if isinstance(effect, Note) and effect.kind == "preempted"]
    assert "(reason minimum)" in note.sentence
    (row,) = [effect for effect in effects if isinstance(effect, SetPreempted)]
    assert (row.name, row.host, row.reason) == ("low-2", "a", "minimum")


def test_only_a_vm_whose_owner_said_so_and_that_was_made_here_goes_with_its_disk() -> None:
    stateless = {vm.name: vm.model_copy(update={"on_preemption": OnPreemption.DELETE}) for vm in (LOW_1, LOW_2)}
    adopted = status_of(LOW_2, "a", FLOOR).model_copy(update={"adopted": True})
    floors = (status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR))
    for vms, sold, expected in (
        (floors, stateless, "remove low-2 a"),
        (floors, {}, "preempt low-2 a"),
        ((floors[0], adopted), {LOW_2.name: stateless[LOW_2.name]}, "preempt low-2 a"),
        ((floors[0], adopted), stateless, "remove low-1 a"),
    ):
        at_last = replace(read("a", *vms), sold=sold)
        events = (chosen(), chosen("a"), full("a"), ended("reclaim"), at_last)
        said, _, _ = run(placement(spec_of("high-1", cpu_cores=5.3)), *events)
        assert said[-1] == expected


ALONE = spec_of("high-1", cpu_cores=6.0, memory_mib=1200.0)


def both_must_go(*ends: Event) -> tuple[list[str], Plan, list[Effect]]:
    floors = read("a", status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR))
    sold = {LOW_1.name: LOW_1, LOW_2.name: LOW_2.model_copy(update={"on_preemption": OnPreemption.DELETE})}
    told = (chosen(), chosen("a"), full("a"), ended("reclaim"), replace(floors, sold=sold))
    return run(placement(ALONE), *told, *ends)


def test_those_that_have_to_go_together_have_their_notice_side_by_side() -> None:
    said, state, effects = both_must_go()
    assert said[-1] == "preempt-together a"
    instruction = state.instruction
    assert isinstance(instruction, PreemptTogether)
    assert [(type(victim), victim.vm, victim.notice_s) for victim in instruction.victims] == [
        (Remove, "low-2", 30.0),
        (Preempt, "low-1", 30.0),
    ]
    steps = [victim.step for victim in instruction.victims]
    assert steps == [instruction.step, instruction.step + 1], "each command has a request id of its own"
    assert state.step == steps[-1] + 1
    assert [effect.vm for effect in effects if isinstance(effect, Note) and effect.kind == "preempting"] == [
        "low-2",
        "low-1",
    ]
    assert read_plan(state.model_dump_json()) == state

    both = EndedTogether(30.0, (ended("delete"), ended("stop")))
    said, state, effects = both_must_go(both, read("a"), ended("create"), ended("reinflate"))
    assert said[-4:] == ["read-host a", "create a", "reinflate a", "finish"]
    assert isinstance(state, PlacementPlan)
    assert state.victims == ("low-2", "low-1")
    gone = {effect.name: effect.unsure for effect in effects if isinstance(effect, SetPreempted)}
    assert gone == {"low-2": False, "low-1": False}, "the one that was deleted, if another plan is at work on it"
    assert any(isinstance(e, SetVM) and (e.name, e.phase) == ("low-2", VMPhase.ENDED) for e in effects)


def test_where_one_of_two_cannot_go_the_other_is_recorded_and_the_arrival_refused() -> None:
    lost = HostFailed(9.0, "a does not answer", uncertain=True)
    said, state, effects = both_must_go(EndedTogether(30.0, (lost, ended("stop"))))
    assert said[-1] == "finish"
    gone = {effect.name: effect.unsure for effect in effects if isinstance(effect, SetPreempted)}
    assert gone == {"low-2": True, "low-1": False}, "also the one that was to be deleted: its host is asked first"
    assert not any(isinstance(effect, SetVM) and effect.name in gone for effect in effects)
    assert isinstance(state.instruction, Finish)
    assert "a does not answer" in state.instruction.sentence

    stuck = ended("stop", OperationState.FAILED)
    said, _, _ = both_must_go(EndedTogether(30.0, (ended("delete"), stuck)), ended("reinflate"))
    assert said[-2:] == ["reinflate a", "finish"], "what came free is given back"


def test_of_two_that_are_as_far_the_one_goes_that_loses_less() -> None:
    big, now = spec_of("high-1", cpu_cores=5.3), 1_000_000.0
    old, young = ({"started_at": now - age_s} for age_s in (86_400.0, 60.0))

    def first(changes: dict[str, Any], **on_preemption: OnPreemption) -> str:
        vms = [status_of(spec, "a", FLOOR).model_copy(update=changes[spec.name]) for spec in (LOW_1, LOW_2)]
        sold = {
            spec.name: spec.model_copy(update={"on_preemption": on_preemption.get(spec.name[-1:] + "_", "stop")})
            for spec in (LOW_1, LOW_2)
        }
        at_last = replace(read("a", *vms), sold=sold, at=now)
        return run(placement(big), chosen(), chosen("a"), full("a"), ended("reclaim"), at_last)[0][-1]

    assert first({"low-1": young, "low-2": old}) == "preempt low-1 a", "the younger work"
    assert first({"low-1": old, "low-2": young}) == "preempt low-2 a"
    assert first({"low-1": old, "low-2": old}) == "preempt low-2 a", "then by name"
    suspends, deletes = OnPreemption.SUSPEND, OnPreemption.DELETE
    assert first({"low-1": old, "low-2": old}, **{"1_": suspends}) == "preempt low-1 a", "nothing of it is lost"
    assert first({"low-1": young, "low-2": {"started_at": now}}, **{"1_": suspends}) == "preempt low-2 a"
    assert first({"low-1": old, "low-2": young}, **{"1_": deletes}) == "remove low-1 a", "it has nothing to lose"


def test_the_notice_is_what_was_promised_as_far_as_the_arriving_vm_can_wait() -> None:
    patient = LOW_1.model_copy(update={"preemption_notice_s": 300.0})
    assert notice(patient, 1000.0) == 300.0
    assert notice(patient, 60.0) == 60.0
    assert notice(None, 60.0) == 30.0
    assert notice(patient, -1.0) == 0.0
    assert kept_for_notice([patient, HIGH], 60.0) == 30.0, "half of the time is the deflation's"
    assert kept_for_notice([LOW_1, patient.model_copy(update={"priority": Priority.FIXED})], 600.0) == 30.0
    assert kept_for_notice([], 600.0) == 0.0


def test_a_vm_that_may_have_been_stopped_keeps_its_disk_and_waits() -> None:
    floors = read("a", status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR))
    lost = HostFailed(0.0, "a does not answer", uncertain=True)
    events = (chosen(), chosen("a"), full("a"), ended("reclaim"), floors, lost)
    _, state, effects = run(placement(spec_of("high-1", cpu_cores=5.3)), *events)
    assert state.finished
    (row,) = [effect for effect in effects if isinstance(effect, SetPreempted)]
    assert (row.name, row.host) == ("low-2", "a")
    assert not any(isinstance(effect, SetVM) and effect.owed for effect in effects), "nothing is to be removed"


def test_the_reason_of_a_preemption_is_recorded_before_the_vm_is_stopped() -> None:
    partial = ended("reclaim", OperationState.PARTIAL)
    said, state, effects = run(placement(HIGH), chosen(), chosen("a"), full("a"), partial, full("a"))
    assert said[-1].startswith("preempt low-")
    assert isinstance(state.instruction, Preempt)
    assert state.instruction.reason == "shortfall"
    assert [effect.kind for effect in effects if isinstance(effect, Note)] == ["deflated", "preempting"]


def test_a_low_priority_vm_is_refused_instead() -> None:
    said, state, effects = run(placement(spec_of("low-3", "deflatable")), chosen())
    assert said == ["choose-hosts", "finish"]
    assert isinstance(state.instruction, Finish)
    assert state.instruction.sentence.endswith("A deflatable VM preempts no other")
    assert SetVM("low-3", VMPhase.FAILED, None, state.instruction.sentence) in effects


def test_a_start_that_may_have_happened_is_owed_and_tried_nowhere_else() -> None:
    said, _, effects = run(placement(HIGH), chosen("a", "b"), read("a"), HostFailed(0.0, "no answer", True))
    assert said[-1] == "finish"
    assert any(isinstance(effect, SetVM) and effect.host == "a" and effect.owed for effect in effects)


def test_a_start_that_was_refused_is_tried_elsewhere() -> None:
    said, _, _ = run(placement(HIGH), chosen("a", "b"), read("a"), HostFailed(0.0, "409", False))
    assert said[-1] == "read-host b"


def test_a_failed_start_is_cleaned_up_before_the_undo() -> None:
    said, _, _ = run(
        placement(HIGH),
        chosen("a", "b"),
        full("a"),
        ended("reclaim"),
        shrunk("a"),
        ended("create", OperationState.FAILED),
        ended("delete"),
        ended("reinflate"),
    )
    assert said[4:] == ["create a", "remove high-1 a", "reinflate a", "read-host b"]


def test_a_forgotten_start_that_happened_is_found() -> None:
    there = read("a", status_of(HIGH, "a"))
    said, _, effects = run(placement(HIGH), chosen("a"), read("a"), Forgotten(0.0, lapse=True), there)
    assert said[-1] == "finish"
    assert any(isinstance(effect, SetVM) and effect.phase is VMPhase.RUNNING for effect in effects)


def test_a_forgotten_reclaim_is_decided_anew_by_a_reading() -> None:
    said, _, _ = run(placement(HIGH), chosen("a"), full("a"), Forgotten(0.0, lapse=False), shrunk("a"))
    assert said[-2:] == ["read-host a", "create a"]


def test_an_agent_that_keeps_forgetting_the_start_is_left() -> None:
    lapse = Forgotten(0.0, lapse=True)
    said, _, _ = run(placement(HIGH), chosen("a"), read("a"), lapse, read("a"), lapse, read("a"))
    assert said[-1] == "remove high-1 a"


def test_a_vm_of_that_name_which_is_not_ours_is_left_alone() -> None:
    said, _, _ = run(placement(HIGH), chosen("a", "b"), read("a", status_of(HIGH, "a")))
    assert said[-1] == "read-host b"


def test_past_the_deadline_nobody_is_deflated_but_free_room_is_taken() -> None:
    late = placement(HIGH, 10.0)
    said, _, _ = run(late, chosen("a", "b"), read("a", status_of(LOW_1, "a"), status_of(LOW_2, "a"), at=11.0))
    assert said[-1] == "choose-hosts"
    said, _, _ = run(late, chosen("a", "b"), read("a", at=11.0))
    assert said[-1] == "create a"


def test_a_deletion_reinflates_and_owes_what_it_could_not() -> None:
    start = start_removal("plan", "request", "low-1", "a")
    said, _, effects = run(start, ended("delete"), ended("reinflate"))
    assert said == ["remove low-1 a", "reinflate a", "finish"]
    assert ReinflationPending("a", False) in effects
    said, state, effects = run(start, ended("delete"), HostFailed(0.0, "a is away", True))
    assert ReinflationPending("a", True) in effects
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.DONE


@pytest.mark.parametrize(
    ("trouble", "phase", "owed"),
    [
        (HostFailed(0.0, "away", True), VMPhase.FAILED, True),
        (HostFailed(0.0, "refused", False), VMPhase.RUNNING, False),
        (ended("delete", OperationState.FAILED), VMPhase.FAILED, False),
    ],
    ids=["unreachable", "refused", "failed"],
)
def test_a_deletion_that_did_not_happen_says_so(trouble: Event, phase: VMPhase, owed: bool) -> None:
    _, state, effects = run(start_removal("plan", "request", "low-1", "a"), trouble)
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.FAILED
    (row,) = [effect for effect in effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host, row.owed) == (phase, "a", owed)


def test_a_target_ends_as_its_operation_does() -> None:
    target = TargetRequest(request_id="request", target=SHRUNK, deadline_s=5.0, mode=Mode.ASK)
    start = start_target("plan", "low-1", "a", target, 2)
    assert isinstance(start.instruction, SetTarget)
    _, state, _ = run(start, ended("target", OperationState.PARTIAL))
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.PARTIAL
    _, state, _ = run(start, HostFailed(0.0, "away", True))
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.FAILED


def test_a_reinflation_settles_the_debt_or_keeps_it() -> None:
    _, _, effects = run(start_reinflation("plan", "a"), ended("reinflate"))
    assert ReinflationPending("a", False) in effects
    _, _, effects = run(start_reinflation("plan", "a"), HostFailed(0.0, "away", True))
    assert ReinflationPending("a", True) in effects


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (placement(HIGH), ended("create")),
        (start_removal("p", "r", "v", "a"), chosen("a")),
        (start_reinflation("p", "a"), chosen("a")),
        (run(placement(spec_of("low-3", "deflatable")), chosen())[1], chosen()),
    ],
    ids=["placement", "removal", "reinflation", "after-the-end"],
)
def test_an_event_that_answers_nothing_is_an_error(state: Plan, event: Event) -> None:
    with pytest.raises(ProtocolViolation):
        state.next_step(event)


# --- random answers --------------------------------------------------------------------------------------------------

HOSTS = ("a", "b", "c", "d")
NAMES = ("v1", "v2", "v3", "v4", "v5")
STATES = st.sampled_from([OperationState.DONE, OperationState.PARTIAL, OperationState.FAILED])


class Watch:
    """What must hold of every run, told instruction by instruction."""

    def __init__(self, spec: VMSpec) -> None:
        self.spec = spec
        self.report: Any = None
        self.steps: set[int] = set()
        #: Hosts whose sizes this plan lowered and has not given back, owed or used.
        self.unsettled: set[str] = set()
        #: Where the VM may be.
        self.perhaps: set[str] = set()

    def instruct(self, state: Plan, effects: Sequence[Effect]) -> None:
        now = state.instruction
        self.unsettled -= {e.host for e in effects if isinstance(e, ReinflationPending)}
        for one in now.victims if isinstance(now, PreemptTogether) else (now,):
            if isinstance(one, Commanding):
                assert one.step not in self.steps, "a request id is used for one command only"
                self.steps.add(one.step)
            if isinstance(one, Remove | Preempt) and one.vm != self.spec.name:
                victim = next(vm for vm in self.report.vms if vm.name == one.vm)
                assert victim.priority.value != "fixed", "a fixed VM is never preempted"
                assert self.spec.priority.value == "fixed", "a low-priority VM preempts nobody"
                assert one.reason in ("minimum", "shortfall")
                notes = [e for e in effects if isinstance(e, Note) and (e.kind, e.vm) == ("preempting", one.vm)]
                assert any(one.reason in note.sentence for note in notes)
        if isinstance(now, Create):
            assert not self.perhaps - {now.host}, "never started while it may be elsewhere"
        host = host_of(now)
        if host is not None and not isinstance(now, Reinflate):
            assert not self.unsettled - {host}, "a host is left only when it is undone or owed"
        if isinstance(now, Finish):
            placed = any(isinstance(e, SetVM) and e.name == self.spec.name for e in effects)
            assert placed or (isinstance(state, PlacementPlan) and state.conclusion is not None)
            if now.state is not OperationState.DONE:
                assert not self.unsettled
                owed = {e.host for e in effects if isinstance(e, SetVM) and e.owed and e.name == self.spec.name}
                assert self.perhaps <= owed, "a VM that may be somewhere is owed there"

    def heard(self, state: Plan, event: Event) -> None:
        now = state.instruction
        if isinstance(event, HostsChosen) and event.first is not None:
            event = event.first
        if isinstance(event, HostRead):
            self.report = event.report
            if not any(vm.name == self.spec.name for vm in event.report.vms):
                self.perhaps.discard(event.report.id)
        certain = isinstance(event, HostFailed) and not event.uncertain
        match now:
            case Reclaim(host=host) if not certain:
                self.unsettled.add(host)
            case Create(host=host) if not certain:
                self.perhaps.add(host)
            case Remove(vm=vm, host=host) if vm == self.spec.name:
                if isinstance(event, OperationEnded) and event.operation.state is not OperationState.FAILED:
                    self.perhaps.discard(host)
            case Remove(host=host) | Preempt(host=host) | PreemptTogether(host=host) if not certain:
                self.unsettled.add(host)
            case Reinflate(host=host):
                self.unsettled.discard(host)


@st.composite
def readings(draw: st.DrawFn, host: str, own: VMSpec) -> HostRead:
    vms = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)):
        spec = spec_of(name, draw(st.sampled_from(["fixed", "deflatable"])), 2.0, 600.0)
        size = Vector(cpu_cores=draw(st.floats(0.5, 2.0)), memory_mib=draw(st.floats(300, 600)))
        vms.append(status_of(spec, host, None if spec.priority.value == "fixed" else size))
    if draw(st.integers(0, 9)) == 0:
        vms.append(status_of(own, host, state=draw(st.sampled_from(list(VMState)))))
    report = report_of(host, *vms, cpu_cores=draw(st.floats(1, 10)), memory_mib=draw(st.floats(500, 5000)))
    stateless = spec_of("any", "deflatable").model_copy(update={"on_preemption": OnPreemption.DELETE})
    sold = {vm.name: stateless for vm in vms if draw(st.booleans())}
    return HostRead(0.0, report, frozenset(vm.name for vm in vms), sold)


@st.composite
def looks_at(draw: st.DrawFn, host: str, own: VMSpec, at: float) -> HostRead | HostFailed:
    if draw(st.integers(0, 4)) == 0:
        return HostFailed(at, "trouble", draw(st.booleans()))
    return draw(readings(host, own))


@st.composite
def answers(draw: st.DrawFn, state: Plan, own: VMSpec, forgetful: int) -> Event:
    """Anything that could answer the instruction; ``forgetful``: how often a restart may still have lost a command."""
    now, at = state.instruction, draw(st.floats(0, 100))
    if isinstance(now, ChooseHosts):
        hosts = draw(st.lists(st.sampled_from(HOSTS), unique=True))
        reads = draw(st.booleans())
        first = draw(looks_at(hosts[0], own, at)) if hosts and reads else None
        return HostsChosen(at, tuple(hosts), "" if hosts else "none", first)
    if isinstance(now, ReadHost):
        return draw(looks_at(now.host, own, at))
    if isinstance(now, PreemptTogether):
        sides = [state.having(instruction=victim) for victim in now.victims]
        return EndedTogether(at, tuple(draw(answers(side, own, 0)) for side in sides))
    if draw(st.integers(0, 4)) == 0:
        return HostFailed(at, "trouble", draw(st.booleans()))
    if isinstance(now, Reclaim | Create) and draw(st.integers(0, 4)) == 0:
        return Forgotten(at, lapse=forgetful <= 0 or draw(st.booleans()))
    kind = {"remove": "delete", "set-target": "target", "preempt": "stop"}.get(now.do, now.do)
    return ended(kind, draw(STATES), at)


@settings(max_examples=600, deadline=None)
@given(
    data=st.data(),
    priority=st.sampled_from(["fixed", "deflatable"]),
    cpu_cores=st.floats(0.2, 8.0),
    memory_mib=st.floats(300, 3000),
)
def test_whatever_agents_answer_a_placement_ends_undoes_and_spares_fixed_vms(
    data: st.DataObject, priority: str, cpu_cores: float, memory_mib: float
) -> None:
    spec = spec_of("own", priority, max(cpu_cores, 0.5), memory_mib)
    state, watch, forgetful = placement(spec), Watch(spec), 5
    step = Step(state)
    for _ in range(400):
        watch.instruct(step.state, step.effects)
        if step.state.finished:
            break
        event = data.draw(answers(step.state, spec, forgetful))
        forgetful -= isinstance(event, Forgotten) and not event.lapse
        watch.heard(step.state, event)
        step = step.state.next_step(event)
        assert read_plan(step.state.model_dump_json()) == step.state
    assert step.state.finished
    with pytest.raises(ProtocolViolation):
        step.state.next_step(HostFailed(0.0, "late", True))
