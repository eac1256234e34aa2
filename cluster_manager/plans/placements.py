"""State machine that places a VM: choose a host, reclaim what is missing, start the VM; undo, next host, then preempt.

Source: Sharma et al. 2019, §5. Splitting a need: docs/internals/contracts.md.
Low-priority VMs never preempt: they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from cluster_manager.plans.plans import (
    MOST_HOSTS,
    MOST_LAPSES,
    AddVM,
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
    Preempt,
    Purpose,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    Remove,
    RoomPlan,
    SetPreempted,
    SetVM,
    Step,
    VMPhase,
    finish,
    instruct,
    unexpected,
)
from cluster_manager.plans.preemption import REASONS, PreemptionReason, evidence, is_deleted, kept_for_notice, notice
from cluster_manager.plans.reclaim_steps import fresh_at_host, may_reclaim, reclaimed, short, without_paused
from cluster_manager.plans.report_queries import (
    allocations_of,
    asked_of_hosts,
    closed,
    deflatable_beside,
    demand_of,
    missing_on,
    pressed_on,
    reclaim_need,
    room_for_start,
    size_to_join,
)
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.proportional import CODES, choose_victims, sizes_to_reach
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec, VMState, VMStatus

#: How `deflation.placement.placement_step` calls the purposes.
_PURPOSES: Final[Mapping[Purpose, int]] = {
    "place": placement_step.PLACE,
    "deflated": placement_step.DEFLATED,
    "preempt": placement_step.PREEMPTING,
}


class PlacementPlan(RoomPlan):
    """State of the plan that places a VM."""

    kind: Literal["create"] = "create"
    vm: str
    spec: VMSpec
    policy: PlacementPolicy = PlacementPolicy.BEST_FIT
    purpose: Purpose = "place"
    #: Hosts still to try, best first.
    hosts_left: tuple[str, ...] = ()
    #: Hosts that were acted on for the present purpose.
    tried: int = 0
    #: Since when the deadline runs, as ``elapsed_s``.
    clock_from_s: float = 0.0
    #: On the present host, when preempting: why, the size that each VM should have reached, and who was stopped.
    reason: PreemptionReason | None = None
    targets: dict[str, Vector] = Field(default_factory=dict)
    victims: tuple[str, ...] = ()
    #: On the present host, when starting deflated: the size to start at.
    start_size: Vector | None = None

    @property
    def changed(self) -> bool:
        """Whether sizes on the present host may be smaller because of this plan."""
        return self.reclaims > 0 or bool(self.victims)

    @property
    def claim(self) -> AddVM:
        return AddVM(None, self.spec, "looking for a host")

    @property
    def reserved(self) -> ResourceVector:
        return asked_of_hosts(self.spec, self.purpose)

    def next_step(self, event: Event) -> Step:
        return advance_placement(self, event)


def start_placement(
    plan_id: str, request_id: str, spec: VMSpec, deadline_s: float, policy: PlacementPolicy
) -> PlacementPlan:
    """A placement before its first instruction is carried out.

    :param deadline_s: for finding a place for the nominal size without preemption; a fixed VM that has to preempt, and
        one that may start deflated, gets it once more.
    """
    return PlacementPlan(
        id=plan_id,
        request_id=request_id,
        instruction=ChooseHosts(purpose="place"),
        vm=spec.name,
        spec=spec,
        deadline_s=deadline_s,
        policy=policy,
    )


def advance_placement(state: PlacementPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
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
        case Preempt(), OperationEnded():
            return _on_preempted(state, event)
        case Preempt(), HostFailed():
            step = _give_up(state, event.sentence, reachable=not event.uncertain)
            return step.also(_perhaps_preempted(state, event.sentence)) if event.uncertain else step
        case Reinflate(), OperationEnded():
            owed = ReinflationPending(_host(state), event.operation.state is OperationState.FAILED)
            return _after_undo(state, f"{state.host}: {event.operation.sentence}", event.elapsed_s).also(owed)
        case Reinflate(), HostFailed():
            owed = ReinflationPending(_host(state), True)
            said = f"{event.sentence}; its VMs grow again when it is back"
            return _after_undo(state, said, event.elapsed_s).also(owed)
    raise unexpected(state, event)


# --- choosing hosts --------------------------------------------------------------------------------------------------


def _on_hosts(state: PlacementPlan, event: HostsChosen) -> Step:
    state = state.having(**{"hosts_left": event.hosts, "tried": 0, "clock_from_s": event.elapsed_s})
    if not event.hosts and event.sentence:
        state = state.having(**{"failures": (*state.failures, event.sentence)})
    step = _next_host(state, event.elapsed_s)
    if event.first is None or not isinstance(step.state.instruction, ReadHost):
        return step
    return step.state.next_step(event.first).also(*step.effects)


def _next_host(state: PlacementPlan, elapsed_s: float) -> Step:
    """The next host in line; then preemption, for a fixed VM; then the refusal."""
    late = bool(state.failures) and state.purpose != "preempt" and _time_left(state, elapsed_s) <= 0
    if state.hosts_left and state.tried < MOST_HOSTS and not late:
        host, *rest = state.hosts_left
        return instruct(state, ReadHost(host=host), **_arrival(host), hosts_left=tuple(rest))
    if late and state.hosts_left:
        state = state.having(**{"failures": (*state.failures, "the deadline has passed")})
    spec = state.spec
    purpose = placement_step.next_purpose(_PURPOSES[state.purpose], CODES[spec.priority], spec.start == "deflated")
    if purpose == placement_step.PREEMPTING:
        said = "no host can hold it by deflation alone: looking where preemption would do"
        return instruct(state, ChooseHosts(purpose="preempt"), said, host=None, purpose="preempt", hosts_left=())
    if purpose == placement_step.DEFLATED:
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
        **fresh_at_host(),
        "reason": None,
        "targets": {},
        "conclusion": None,
        "start_size": None,
    }


# --- at a host -------------------------------------------------------------------------------------------------------


def _read(state: PlacementPlan, said: str = "", **changes: Any) -> Step:
    return instruct(state, ReadHost(host=_host(state)), said, **changes)


def _on_reading(state: PlacementPlan, event: HostRead) -> Step:
    """Decide by what the agent says now, never by an earlier report."""
    report, spec = event.report, state.spec
    present = next((vm for vm in report.vms if vm.name == spec.name), None)
    if present is not None:
        return _on_present(state, present, event.elapsed_s)
    if why := refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE):
        return _leave(state, why, event.elapsed_s)
    if why := closed(report):
        return _leave(state, why, event.elapsed_s)
    state = without_paused(state, report)
    if state.purpose == "deflated":
        return _on_reading_deflated(state, report, event.elapsed_s)
    missing, deflatable = missing_on(report, demand_of(spec, report)), deflatable_beside(report, state.left_out)
    need, preempting = reclaim_need(missing, deflatable), state.purpose == "preempt"
    figures = (tuple(missing), tuple(deflatable), tuple(need))
    verdict = placement_step.decide(*figures, preempting, bool(state.victims), may_reclaim(state))
    if verdict == placement_step.START:
        return _start(state, report.id)
    if preempting and state.reclaims == 0 and not state.victims:
        state = _with_reason(state, report, missing)
    if verdict == placement_step.RECLAIM:
        left = _time_left(state, event.elapsed_s)
        if preempting:
            left -= kept_for_notice(event.sold.values(), left)
        if left > 0:
            return _reclaim(state, report.id, need, left)
        state = state.having(**{"failed_layer": state.failed_layer or "none: the deadline has passed"})
        verdict = placement_step.decide(*figures, preempting, bool(state.victims), may_reclaim=False)
    if verdict == placement_step.PREEMPT and (state.victims or _may_preempt(state, need)):
        return _preempt(state, event, missing)
    return _leave(state, short(state, report.id, missing, deflatable), event.elapsed_s)


def _may_preempt(state: PlacementPlan, need: ResourceVector) -> bool:
    """Whether what is known of this host is a reason to stop a VM on it."""
    known = evidence(
        minimums_in_the_way=state.reason is PreemptionReason.MINIMUM,
        rounds=state.rounds,
        ended=state.reclaimed,
        calls_failed=bool(state.errors),
        nothing_to_take=need.is_zero(),
    )
    return REASONS[known] is not None


def _on_present(state: PlacementPlan, present: VMStatus, elapsed_s: float) -> Step:
    """A VM of this name is there already: ours, if its start was commanded before."""
    if not state.starts:
        said = f"{present.host} has a VM named {present.name} that was not placed by this manager"
        return _leave(state, said, elapsed_s)
    if present.state in (VMState.STARTING, VMState.STOPPING, VMState.STOPPED):
        return _clean_up(state, f"{present.name} did not come up")
    return _placed(state, f"{present.name} runs on {present.host}")


def _start(state: PlacementPlan, host: str) -> Step:
    if state.starts and state.lapses >= MOST_LAPSES:
        return _clean_up(state, "the agent forgets that it was told to start the VM")
    tried = state.tried + (1 if state.reclaims == 0 and state.starts == 0 else 0)
    instruction = Create(host=host, step=state.step, start_size=state.start_size)
    said = f"starting {state.vm} on {host}"
    if state.start_size is not None:
        said += f" with {state.start_size.vector()}"
    return instruct(state, instruction, said, starts=state.starts + 1, tried=tried)


def _on_reading_deflated(state: PlacementPlan, report: HostReport, elapsed_s: float) -> Step:
    """Make the room that the VM gets as one of the host's VMs, then start it with what there is of that."""
    spec = state.spec
    if state.start_size is None:
        plan = size_to_join(spec, report)
        if plan is None:
            least = demand_of(spec, report, spec.least_start())
            why = short(state, report.id, missing_on(report, least), report.deflatable.vector())
            return _leave(state, why, elapsed_s)
        state = state.having(**{"start_size": Vector.of(plan.size)})
    assert state.start_size is not None
    missing = missing_on(report, demand_of(spec, report, state.start_size.vector()))
    deflatable = deflatable_beside(report, state.left_out)
    need = reclaim_need(missing, deflatable)
    left = _time_left(state, elapsed_s)
    if not need.is_zero() and may_reclaim(state) and left > 0:
        return _reclaim(state, report.id, need, left)
    # What the layers did not give it does without, as long as that is enough to start with.
    size = room_for_start(spec, report, state.start_size.vector())
    if not spec.least_start().fits_in(size):
        return _leave(state, short(state, report.id, missing, deflatable), elapsed_s)
    return _start(state.having(**{"start_size": Vector.of(size)}), report.id)


def _reclaim(state: PlacementPlan, host: str, need: ResourceVector, left_s: float) -> Step:
    instruction = Reclaim(
        host=host, step=state.step, need=Vector.of(need), deadline_s=round(left_s, 3), exclude=state.left_out
    )
    tried = state.tried + (1 if state.reclaims == 0 else 0)
    return instruct(state, instruction, f"reclaiming {need} on {host}", reclaims=state.reclaims + 1, tried=tried)


def _on_created(state: PlacementPlan, event: OperationEnded) -> Step:
    if event.operation.state is OperationState.DONE:
        return _placed(state, event.operation.sentence)
    return _clean_up(state, event.operation.sentence)


def _clean_up(state: PlacementPlan, why: str) -> Step:
    """A start that failed may leave a half-made VM: it goes before anything else happens."""
    vm = state.spec.name
    failure = f"{state.host}: {why}"
    return instruct(
        state,
        Remove(host=_host(state), step=state.step, vm=vm, reason="delete"),
        failure,
        failures=(*state.failures, failure),
    )


def _placed(state: PlacementPlan, said: str) -> Step:
    """The VM runs. What preemption freed beyond it goes back to the others first."""
    spec, host = state.spec, _host(state)
    how = f"after deflating {', '.join(vm.name for vm in state.outcomes)}" if state.reclaims else "in free room"
    if state.victims:
        how = f"after preempting {', '.join(state.victims)}"
    size = f"{spec.nominal.vector()}"
    if state.start_size is not None and not spec.nominal.vector().fits_in(state.start_size.vector()):
        size = f"deflated, {state.start_size.vector()} of {spec.nominal.vector()}"
    sentence = f"placed {spec.name} ({size}) on {host} {how}"
    effects = (SetVM(spec.name, VMPhase.RUNNING, host, sentence), Note("placed", spec.name, host, sentence))
    changes = {"shortfall": Vector(), "progress": (*state.progress, said)}
    state = state.having(**changes)
    if state.victims:
        conclusion = Finish(state=OperationState.DONE, sentence=sentence)
        return _undo(state, "sharing what the preemption freed beyond the need", conclusion).also(*effects)
    return finish(state, OperationState.DONE, sentence).also(*effects)


# --- preemption ------------------------------------------------------------------------------------------------------


def _preempt(state: PlacementPlan, event: HostRead, missing: ResourceVector) -> Step:
    """Stop one VM, the one farthest from its target, and read again. A victim is one that the record has there."""
    report, elapsed_s = event.report, event.elapsed_s
    # Those whose calls failed could not be relied on to go either.
    rows = [row for row in allocations_of(report) if row.name in event.recorded.difference(state.left_out)]
    targets = {name: target.vector() for name, target in state.targets.items()}
    names = choose_victims(rows, missing, targets)
    if not names:
        return _leave(state, f"{report.id}: preempting every low-priority VM would not free {missing}", elapsed_s)
    victim = next(row for row in rows if row.name == names[0])
    if victim.name in state.victims:
        return _give_up(state, f"{report.id} still shows {victim.name}, which it has stopped", reachable=True)
    reason = state.reason or PreemptionReason.SHORTFALL
    sentence = _why_preempted(state, victim.name, reason, missing)
    where: dict[str, Any] = {"host": report.id, "step": state.step, "vm": victim.name, "reason": reason}
    sold = event.sold.get(victim.name)
    instruction: Remove | Preempt
    if is_deleted(sold, adopted=any(vm.adopted for vm in report.vms if vm.name == victim.name)):
        instruction = Remove(**where)
    else:
        instruction = Preempt(**where, notice_s=notice(sold, _time_left(state, elapsed_s), len(names)))
        sentence += f"; it has {instruction.notice_s:g} s to end its work"
    return instruct(state, instruction, sentence, victims=(*state.victims, victim.name), reason=reason).also(
        Note("preempting", victim.name, report.id, sentence)
    )


def _on_preempted(state: PlacementPlan, event: OperationEnded) -> Step:
    assert isinstance(state.instruction, Preempt)
    vm, reason, operation = state.instruction.vm, state.instruction.reason, event.operation
    if operation.state is OperationState.FAILED:
        return _give_up(state, f"{vm} could not be stopped: {operation.sentence}", reachable=True)
    sentence = (
        f"preempted {vm} on {state.host} for {state.vm} (reason {reason}): {operation.sentence}; "
        "it keeps its disk and waits for room"
    )
    return _read(state, sentence).also(
        SetPreempted(vm, _host(state), reason, sentence), Note("preempted", vm, state.host, sentence)
    )


def _perhaps_preempted(state: PlacementPlan, failure: str) -> SetPreempted:
    """A victim that may have been stopped waits for room, too: where it runs, its host's next report says so."""
    assert isinstance(state.instruction, Preempt)
    vm, reason = state.instruction.vm, state.instruction.reason
    sentence = f"{vm} may have been preempted on {state.host} for {state.vm} (reason {reason}): {failure}"
    return SetPreempted(vm, _host(state), reason, sentence)


def _on_removed(state: PlacementPlan, event: OperationEnded) -> Step:
    assert isinstance(state.instruction, Remove)
    vm, operation = state.instruction.vm, event.operation
    if vm == state.vm:
        if operation.state is OperationState.FAILED:
            return _lose(state, operation.sentence)
        if state.victims:
            return _give_up(state, state.failures[-1], reachable=True)
        if state.changed:
            return _undo(state, f"giving back what was taken on {state.host}", None)
        return _next_host(state.having(host=None), event.elapsed_s)
    if operation.state is OperationState.FAILED:
        return _give_up(state, f"{vm} could not be stopped: {operation.sentence}", reachable=True)
    sentence = f"preempted {vm} on {state.host} for {state.vm} (reason {state.instruction.reason})"
    return _read(state, sentence).also(
        SetVM(vm, VMPhase.ENDED, state.host, sentence), Note("preempted", vm, state.host, sentence)
    )


def _with_reason(state: PlacementPlan, report: HostReport, missing: ResourceVector) -> PlacementPlan:
    """Why this host would have to preempt, and the sizes its VMs should reach, as they are before anything changes.

    The reason is ``minimum`` only where the minimums stand in the way. Where a guest under pressure does, from which
    nothing is taken, it is a ``shortfall`` like that of any other layer.
    """
    targets, in_the_way = sizes_to_reach(allocations_of(report), missing)
    reason = PreemptionReason.MINIMUM if in_the_way else PreemptionReason.SHORTFALL
    layer = state.failed_layer
    if not in_the_way and not missing.fits_in(report.deflatable.vector()):
        layer = layer or f"guest ({', '.join(sorted(pressed_on(report))) or 'one'} under pressure gives nothing)"
    wire = {name: Vector.of(target) for name, target in targets.items()}
    return state.having(reason=reason, targets=wire, failed_layer=layer)


def _why_preempted(state: PlacementPlan, victim: str, reason: PreemptionReason, missing: ResourceVector) -> str:
    """The sentence that stands in the record of a preemption."""
    too_little = reason is PreemptionReason.MINIMUM
    why = f"the minimums leave {missing} too little" if too_little else f"deflation fell short of {missing}"
    if state.failed_layer:
        why += f" in layer {state.failed_layer}"
    why += f" for {state.vm}"
    return f"preempting {victim} on {state.host} (reason {reason}): {why}"


# --- leaving a host --------------------------------------------------------------------------------------------------


def _leave(state: PlacementPlan, failure: str, elapsed_s: float, reachable: bool = True) -> Step:
    """Give this host up: undo what was changed, then the next host. After a preemption the plan ends here."""
    if state.victims:
        return _give_up(state, failure, reachable)
    host = _host(state)
    state = state.having(**{"failures": (*state.failures, failure), "progress": (*state.progress, failure)})
    if not state.changed:
        return _next_host(state.having(host=None), elapsed_s)
    if reachable:
        return _undo(state, f"giving back what was taken on {host}", None)
    return _next_host(state.having(host=None), elapsed_s).also(ReinflationPending(host, True))


def _give_up(state: PlacementPlan, failure: str, reachable: bool) -> Step:
    """End in failure, giving back first: no other VM is preempted for this VM on another host."""
    spec, host = state.spec, _host(state)
    sentence = f"refused {spec.name}: {failure}"
    effects = (SetVM(spec.name, VMPhase.FAILED, None, sentence), Note("refused", spec.name, host, sentence))
    if reachable and state.changed:
        conclusion = Finish(state=OperationState.FAILED, sentence=sentence)
        return _undo(state, f"giving back what was taken on {host}", conclusion).also(*effects)
    owed = (ReinflationPending(host, True),) if state.changed else ()
    return finish(state, OperationState.FAILED, sentence).also(*effects, *owed)


def _half_preempted(state: PlacementPlan, vm: str, failure: str) -> SetVM:
    """A victim that may have been stopped is, as soon as the host answers: it is not said to run for ever."""
    sentence = f"preempted on {state.host} for {state.vm}, but {failure}; it is removed as soon as the host answers"
    return SetVM(vm, VMPhase.FAILED, state.host, sentence, owed=True)


def _lose(state: PlacementPlan, failure: str) -> Step:
    """The VM may or may not be on the host: it is started nowhere else, so that it never runs twice."""
    spec, host = state.spec, _host(state)
    sentence = (
        f"{spec.name} may have been started on {host}, which cannot say ({failure}); "
        "it is removed there as soon as the host answers"
    )
    return finish(state, OperationState.FAILED, sentence).also(
        SetVM(spec.name, VMPhase.FAILED, host, sentence, owed=True),
        ReinflationPending(host, True),
        Note("lost", spec.name, host, sentence),
    )


def _undo(state: PlacementPlan, said: str, conclusion: Finish | None) -> Step:
    return instruct(state, Reinflate(host=_host(state), step=state.step), said, conclusion=conclusion)


def _after_undo(state: PlacementPlan, said: str, elapsed_s: float) -> Step:
    note = Note("reinflated" if state.conclusion else "undone", state.vm, state.host, said)
    state = state.having(**{"progress": (*state.progress, said)})
    if state.conclusion is not None:
        return finish(state, state.conclusion.state, state.conclusion.sentence).also(note)
    return _next_host(state.having(host=None), elapsed_s).also(note)


# --- sentences and figures --------------------------------------------------------------------------------------------


def _time_left(state: PlacementPlan, elapsed_s: float) -> float:
    return state.clock_from_s + state.deadline_s - elapsed_s


def _host(state: PlacementPlan) -> str:
    assert state.host is not None, "only at a host"
    return state.host
