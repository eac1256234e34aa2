"""The plan that places a VM: choose a host, reclaim what is missing, start the VM; undo, next host, at last preempt.

Source: seed 004 §5; docs/contracts.md, splitting a need. Low-priority VMs never preempt: they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cluster_manager.making_room import reclaimed
from cluster_manager.plans import (
    MOST_HOSTS,
    MOST_LAPSES,
    ChooseHosts,
    Create,
    Event,
    Finish,
    Forgotten,
    HostFailed,
    HostRead,
    HostsChosen,
    Note,
    OperationEnded,
    OweReinflation,
    PlanState,
    Purpose,
    ReadHost,
    Reason,
    Reclaim,
    Reinflate,
    Remove,
    SetVM,
    VMPhase,
)
from cluster_manager.preemption import why_preempted, with_reason
from cluster_manager.readings import (
    allocations_of,
    demand_of,
    missing_on,
    reclaim_need,
    room_for_start,
    start_size,
)
from cluster_manager.steps import Step, finish, instruct, unexpected
from deflation import admission
from deflation.allocations import Priority
from deflation.messages import HostReport, OperationState, Vector, VMSpec, VMState, VMStatus
from deflation.modes import HostEvent, refusal
from deflation.placement_policies import PlacementPolicy
from deflation.proportional import CODES, choose_victims
from deflation.resources import ResourceVector

#: How :mod:`deflation.admission` calls the purposes.
_PURPOSES: Final[Mapping[Purpose, int]] = {
    "place": admission.PLACE,
    "deflated": admission.DEFLATED,
    "preempt": admission.PREEMPTING,
}


def start_placement(
    plan_id: str, request_id: str, spec: VMSpec, deadline_s: float, policy: PlacementPolicy
) -> PlanState:
    """A placement before its first instruction is carried out.

    :param deadline_s: for finding a place for the nominal size without preemption; a fixed VM that has to preempt, and
        one that may start deflated, gets it once more.
    """
    return PlanState(
        kind="create",
        id=plan_id,
        request_id=request_id,
        instruction=ChooseHosts(purpose="place"),
        vm=spec.name,
        spec=spec,
        deadline_s=deadline_s,
        policy=policy,
    )


def advance_placement(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    match state.instruction, event:
        case ChooseHosts(), HostsChosen():
            return _on_hosts(state, event)
        case ReadHost(), HostRead():
            return _on_reading(state, event)
        case ReadHost(), HostFailed() if state.starts:
            return _lose(state, event.sentence)
        case ((ReadHost() | Reclaim()), HostFailed()):
            return _leave(state, event.sentence, event.elapsed_s, reachable=not event.uncertain)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case Create(), Forgotten():
            said = f"{state.host} does not know of the start: reading it again"
            return _read(state, said, lapses=state.lapses + event.lapse)
        case Create(), OperationEnded():
            return _on_created(state, event)
        case Create(), HostFailed():
            if event.uncertain:
                return _lose(state, event.sentence)
            # Refused at once: nothing is there, unless an earlier command of ours has made it.
            if state.starts > 1:
                return _clean_up(state, event.sentence)
            return _leave(state, event.sentence, event.elapsed_s)
        case Remove(), OperationEnded():
            return _on_removed(state, event)
        case Remove(vm=vm), HostFailed():
            if vm == state.vm:
                return _lose(state, event.sentence)
            step = _give_up(state, event.sentence, reachable=not event.uncertain)
            return step.also(_half_preempted(state, vm, event.sentence)) if event.uncertain else step
        case Reinflate(), OperationEnded():
            owed = OweReinflation(_host(state), event.operation.state is OperationState.FAILED)
            return _after_undo(state, f"{state.host}: {event.operation.sentence}", event.elapsed_s).also(owed)
        case Reinflate(), HostFailed():
            owed = OweReinflation(_host(state), True)
            said = f"{event.sentence}; its VMs grow again when it is back"
            return _after_undo(state, said, event.elapsed_s).also(owed)
    raise unexpected(state, event)


# --- choosing hosts --------------------------------------------------------------------------------------------------


def _on_hosts(state: PlanState, event: HostsChosen) -> Step:
    state = state.model_copy(update={"hosts_left": event.hosts, "tried": 0, "clock_from_s": event.elapsed_s})
    if not event.hosts and event.sentence:
        state = state.model_copy(update={"failures": (*state.failures, event.sentence)})
    return _next_host(state, event.elapsed_s)


def _next_host(state: PlanState, elapsed_s: float) -> Step:
    """The next host in line; then preemption, for a fixed VM; then the refusal."""
    late = bool(state.failures) and state.purpose != "preempt" and _time_left(state, elapsed_s) <= 0
    if state.hosts_left and state.tried < MOST_HOSTS and not late:
        host, *rest = state.hosts_left
        return instruct(state, ReadHost(host=host), **_arrival(host), hosts_left=tuple(rest))
    if late and state.hosts_left:
        state = state.model_copy(update={"failures": (*state.failures, "the deadline has passed")})
    spec = _spec(state)
    purpose = admission.next_purpose(_PURPOSES[state.purpose], CODES[spec.priority], spec.start == "deflated")
    if purpose == admission.PREEMPTING:
        said = "no host can hold it by deflation alone: looking where preemption would do"
        return instruct(state, ChooseHosts(purpose="preempt"), said, host=None, purpose="preempt", hosts_left=())
    if purpose == admission.DEFLATED:
        said = "no host can hold its nominal size: looking where it can start deflated"
        return instruct(state, ChooseHosts(purpose="deflated"), said, host=None, purpose="deflated", hosts_left=())
    why = "; ".join(dict.fromkeys(state.failures)) or "no host is ready"
    rule = "" if spec.priority is Priority.FIXED else f". A {spec.priority.value} VM preempts no other"
    if state.purpose == "deflated":
        rule = f", and {spec.least_start()} are the least that it can start with{rule}"
    sentence = f"refused {spec.name} ({spec.nominal.vector()}): {why}{rule}"
    return finish(state, OperationState.FAILED, sentence).also(
        SetVM(spec.name, VMPhase.FAILED, None, sentence), Note("refused", spec.name, None, sentence)
    )


def _arrival(host: str) -> dict[str, Any]:
    """What is forgotten of the host before."""
    return {
        "host": host,
        "reclaims": 0,
        "rounds": 0,
        "reclaimed": None,
        "failed_layer": None,
        "starts": 0,
        "lapses": 0,
        "reason": None,
        "targets": {},
        "conclusion": None,
        "initial": None,
    }


# --- at a host -------------------------------------------------------------------------------------------------------


def _read(state: PlanState, said: str = "", **changes: Any) -> Step:
    return instruct(state, ReadHost(host=_host(state)), said, **changes)


def _on_reading(state: PlanState, event: HostRead) -> Step:
    """Decide by what the agent says now, never by an earlier report."""
    report, spec = event.report, _spec(state)
    present = next((vm for vm in report.vms if vm.name == spec.name), None)
    if present is not None:
        return _on_present(state, present, event.elapsed_s)
    if why := refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE):
        return _leave(state, why, event.elapsed_s)
    if state.purpose == "deflated":
        return _on_reading_deflated(state, report, event.elapsed_s)
    missing = missing_on(report, demand_of(spec, report))
    need, preempting = reclaim_need(missing, report), state.purpose == "preempt"
    figures = (tuple(missing), tuple(report.deflatable.vector()), tuple(need))
    verdict = admission.decide(*figures, preempting, bool(state.victims), _may_reclaim(state))
    if verdict == admission.START:
        return _start(state, report.id)
    if preempting and state.reclaims == 0 and not state.victims:
        state = with_reason(state, report, missing)
    if verdict == admission.RECLAIM:
        left = _time_left(state, event.elapsed_s)
        if left > 0:
            return _reclaim(state, report.id, need, left)
        state = state.model_copy(update={"failed_layer": state.failed_layer or "none: the deadline has passed"})
        verdict = admission.decide(*figures, preempting, bool(state.victims), may_reclaim=False)
    if verdict == admission.PREEMPT:
        return _preempt(state, report, missing, event.elapsed_s)
    return _leave(state, _short(state, report, missing), event.elapsed_s)


def _may_reclaim(state: PlanState) -> bool:
    """Whether deflation has not been tried in vain on this host."""
    complete = state.reclaimed in (None, OperationState.DONE) and state.rounds < admission.MOST_RECLAIMS
    return complete and state.lapses < MOST_LAPSES


def _on_present(state: PlanState, present: VMStatus, elapsed_s: float) -> Step:
    """A VM of this name is there already: ours, if its start was commanded before."""
    if not state.starts:
        said = f"{present.host} has a VM named {present.name} that was not placed by this manager"
        return _leave(state, said, elapsed_s)
    if present.state in (VMState.STARTING, VMState.STOPPING, VMState.STOPPED):
        return _clean_up(state, f"{present.name} did not come up")
    return _placed(state, f"{present.name} runs on {present.host}")


def _start(state: PlanState, host: str) -> Step:
    if state.starts and state.lapses >= MOST_LAPSES:
        return _clean_up(state, "the agent forgets that it was told to start the VM")
    tried = state.tried + (1 if state.reclaims == 0 and state.starts == 0 else 0)
    instruction = Create(host=host, step=state.step, initial=state.initial)
    said = f"starting {state.vm} on {host}"
    if state.initial is not None:
        said += f" with {state.initial.vector()}"
    return instruct(state, instruction, said, starts=state.starts + 1, tried=tried)


def _on_reading_deflated(state: PlanState, report: HostReport, elapsed_s: float) -> Step:
    """Make the room that the VM gets as one of the host's VMs, then start it with what there is of that."""
    spec = _spec(state)
    if state.initial is None:
        plan = start_size(spec, report)
        if plan is None:
            least = demand_of(spec, report, spec.least_start())
            return _leave(state, _short(state, report, missing_on(report, least)), elapsed_s)
        state = state.model_copy(update={"initial": Vector.of(plan.size)})
    assert state.initial is not None
    missing = missing_on(report, demand_of(spec, report, state.initial.vector()))
    need = reclaim_need(missing, report)
    left = _time_left(state, elapsed_s)
    if not need.is_zero() and _may_reclaim(state) and left > 0:
        return _reclaim(state, report.id, need, left)
    # What the layers did not give it does without, as long as that is enough to start with.
    size = room_for_start(spec, report, state.initial.vector())
    if not spec.least_start().fits_in(size):
        return _leave(state, _short(state, report, missing), elapsed_s)
    return _start(state.model_copy(update={"initial": Vector.of(size)}), report.id)


def _reclaim(state: PlanState, host: str, need: ResourceVector, left_s: float) -> Step:
    instruction = Reclaim(host=host, step=state.step, need=Vector.of(need), deadline_s=round(left_s, 3))
    tried = state.tried + (1 if state.reclaims == 0 else 0)
    return instruct(state, instruction, f"reclaiming {need} on {host}", reclaims=state.reclaims + 1, tried=tried)


def _on_created(state: PlanState, event: OperationEnded) -> Step:
    if event.operation.state is OperationState.DONE:
        return _placed(state, event.operation.sentence)
    return _clean_up(state, event.operation.sentence)


def _clean_up(state: PlanState, why: str) -> Step:
    """A start that failed may leave a half-made VM: it goes before anything else happens."""
    vm = _spec(state).name
    failure = f"{state.host}: {why}"
    return instruct(
        state,
        Remove(host=_host(state), step=state.step, vm=vm, reason="delete"),
        failure,
        failures=(*state.failures, failure),
    )


def _placed(state: PlanState, said: str) -> Step:
    """The VM runs. What preemption freed beyond it goes back to the others first."""
    spec, host = _spec(state), _host(state)
    how = f"after deflating {', '.join(vm.name for vm in state.outcomes)}" if state.reclaims else "in free room"
    if state.victims:
        how = f"after preempting {', '.join(state.victims)}"
    size = f"{spec.nominal.vector()}"
    if state.initial is not None and not spec.nominal.vector().fits_in(state.initial.vector()):
        size = f"deflated, {state.initial.vector()} of {spec.nominal.vector()}"
    sentence = f"placed {spec.name} ({size}) on {host} {how}"
    effects = (SetVM(spec.name, VMPhase.RUNNING, host, sentence), Note("placed", spec.name, host, sentence))
    changes = {"shortfall": Vector(), "progress": (*state.progress, said)}
    state = state.model_copy(update=changes)
    if state.victims:
        conclusion = Finish(state=OperationState.DONE, sentence=sentence)
        return _undo(state, "sharing what the preemption freed beyond the need", conclusion).also(*effects)
    return finish(state, OperationState.DONE, sentence).also(*effects)


# --- preemption ------------------------------------------------------------------------------------------------------


def _preempt(state: PlanState, report: HostReport, missing: ResourceVector, elapsed_s: float) -> Step:
    """Stop one VM, the one farthest from its target, and read again."""
    rows = allocations_of(report)
    targets = {name: target.vector() for name, target in state.targets.items()}
    names = choose_victims(rows, missing, targets)
    if not names:
        return _leave(state, f"{report.id}: preempting every low-priority VM would not free {missing}", elapsed_s)
    victim = next(row for row in rows if row.name == names[0])
    if victim.name in state.victims:
        return _give_up(state, f"{report.id} still shows {victim.name}, which it has stopped", reachable=True)
    reason: Reason = state.reason or "shortfall"
    sentence = why_preempted(state, victim.name, reason, missing)
    remove = Remove(host=report.id, step=state.step, vm=victim.name, reason=reason)
    return instruct(state, remove, sentence, victims=(*state.victims, victim.name), reason=reason).also(
        Note("preempting", victim.name, report.id, sentence)
    )


def _on_removed(state: PlanState, event: OperationEnded) -> Step:
    assert isinstance(state.instruction, Remove)
    vm, operation = state.instruction.vm, event.operation
    if vm == state.vm:
        if operation.state is OperationState.FAILED:
            return _lose(state, operation.sentence)
        if state.victims:
            return _give_up(state, state.failures[-1], reachable=True)
        if state.changed:
            return _undo(state, f"giving back what was taken on {state.host}", None)
        return _next_host(state.model_copy(update={"host": None}), event.elapsed_s)
    if operation.state is OperationState.FAILED:
        return _give_up(state, f"{vm} could not be stopped: {operation.sentence}", reachable=True)
    sentence = f"preempted {vm} on {state.host} for {state.vm} (reason {state.instruction.reason})"
    return _read(state, sentence).also(
        SetVM(vm, VMPhase.ENDED, state.host, sentence), Note("preempted", vm, state.host, sentence)
    )


# --- leaving a host --------------------------------------------------------------------------------------------------


def _leave(state: PlanState, failure: str, elapsed_s: float, reachable: bool = True) -> Step:
    """Give this host up: undo what was changed, then the next host. After a preemption the plan ends here."""
    if state.victims:
        return _give_up(state, failure, reachable)
    host = _host(state)
    state = state.model_copy(update={"failures": (*state.failures, failure), "progress": (*state.progress, failure)})
    if not state.changed:
        return _next_host(state.model_copy(update={"host": None}), elapsed_s)
    if reachable:
        return _undo(state, f"giving back what was taken on {host}", None)
    return _next_host(state.model_copy(update={"host": None}), elapsed_s).also(OweReinflation(host, True))


def _give_up(state: PlanState, failure: str, reachable: bool) -> Step:
    """End in failure, giving back first: nobody else is preempted for this VM on another host."""
    spec, host = _spec(state), _host(state)
    sentence = f"refused {spec.name}: {failure}"
    effects = (SetVM(spec.name, VMPhase.FAILED, None, sentence), Note("refused", spec.name, host, sentence))
    if reachable and state.changed:
        conclusion = Finish(state=OperationState.FAILED, sentence=sentence)
        return _undo(state, f"giving back what was taken on {host}", conclusion).also(*effects)
    owed = (OweReinflation(host, True),) if state.changed else ()
    return finish(state, OperationState.FAILED, sentence).also(*effects, *owed)


def _half_preempted(state: PlanState, vm: str, failure: str) -> SetVM:
    """A victim that may have been stopped is, as soon as the host answers: it is not said to run for ever."""
    sentence = f"preempted on {state.host} for {state.vm}, but {failure}; it is removed as soon as the host answers"
    return SetVM(vm, VMPhase.FAILED, state.host, sentence, owed=True)


def _lose(state: PlanState, failure: str) -> Step:
    """The VM may or may not be on the host: it is started nowhere else, so that it never runs twice."""
    spec, host = _spec(state), _host(state)
    sentence = (
        f"{spec.name} may have been started on {host}, which cannot say ({failure}); "
        "it is removed there as soon as the host answers"
    )
    return finish(state, OperationState.FAILED, sentence).also(
        SetVM(spec.name, VMPhase.FAILED, host, sentence, owed=True),
        OweReinflation(host, True),
        Note("lost", spec.name, host, sentence),
    )


def _undo(state: PlanState, said: str, conclusion: Finish | None) -> Step:
    return instruct(state, Reinflate(host=_host(state), step=state.step), said, conclusion=conclusion)


def _after_undo(state: PlanState, said: str, elapsed_s: float) -> Step:
    note = Note("reinflated" if state.conclusion else "undone", state.vm, state.host, said)
    state = state.model_copy(update={"progress": (*state.progress, said)})
    if state.conclusion is not None:
        return finish(state, state.conclusion.state, state.conclusion.sentence).also(note)
    return _next_host(state.model_copy(update={"host": None}), elapsed_s).also(note)


# --- sentences and figures --------------------------------------------------------------------------------------------


def _short(state: PlanState, report: HostReport, missing: ResourceVector) -> str:
    if state.failed_layer:
        return f"{report.id}: short of {missing} in layer {state.failed_layer}"
    return f"{report.id}: short of {missing}, with {report.deflatable.vector()} deflatable"


def _time_left(state: PlanState, elapsed_s: float) -> float:
    return state.clock_from_s + state.deadline_s - elapsed_s


def _spec(state: PlanState) -> VMSpec:
    assert state.spec is not None, "a placement has a spec"
    return state.spec


def _host(state: PlanState) -> str:
    assert state.host is not None, "only at a host"
    return state.host
