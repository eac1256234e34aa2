"""State machine that places a VM: choose a host, reclaim what is missing, start the VM; undo, next host, then preempt.

Source: Sharma et al. 2019, §5. Splitting a need: docs/internals/contracts.md.
Low-priority VMs never preempt: they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import Field

from cluster_manager.plans.claims import AddVM
from cluster_manager.plans.plans import (
    MOST_HOSTS,
    MOST_LAPSES,
    AwaitGuests,
    CalledOff,
    ChooseHosts,
    Create,
    EndedTogether,
    Event,
    Finish,
    Forgotten,
    HostBack,
    HostFailed,
    HostRead,
    HostsChosen,
    MoveAway,
    Moved,
    Note,
    OperationEnded,
    Preempt,
    PreemptTogether,
    Purpose,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    Remove,
    SetVM,
    Step,
    VMPhase,
    finish,
    instruct,
    preempted_by,
    unexpected,
)
from cluster_manager.plans.preemption import REASONS, PreemptionReason, evidence, least_s, why_preempted
from cluster_manager.plans.reclaim_steps import (
    forgiving,
    fresh_at_host,
    joins_others,
    may_reclaim,
    others_give,
    reclaimed,
    short,
    without_paused,
)
from cluster_manager.plans.report_queries import (
    asked_of_hosts,
    closed,
    deflatable_beside,
    demand_of,
    missing_on,
    need_together,
    reason_to_preempt,
    reclaim_need,
    room_for_start,
    size_to_join,
)
from cluster_manager.plans.victims import Victim, go_for_an_error, going, outcome, victims_for
from cluster_manager.plans.waits import (
    LATE,
    WaitingPlan,
    kept_off,
    lined_up,
    move_away,
    moved_away,
    refusal_code,
    time_left,
    time_to_reclaim,
    wait_for_guests,
)
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import CODES
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMSpec, VMState, VMStatus

#: How `deflation.placement.placement_step` calls the purposes.
_PURPOSES: Final[Mapping[Purpose, int]] = {
    "place": placement_step.PLACE,
    "deflated": placement_step.DEFLATED,
    "preempt": placement_step.PREEMPTING,
}


class PlacementPlan(WaitingPlan):
    """State of the plan that places a VM."""

    kind: Literal["create"] = "create"
    policy: PlacementPolicy = PlacementPolicy.BEST_FIT
    #: On the present host, when preempting: why by the last reading before, and the size each VM should have reached.
    reason: PreemptionReason | None = None
    targets: dict[str, Vector] = Field(default_factory=dict)
    #: Those that were told and stay, since their preemption was called off.
    withdrawn: tuple[str, ...] = ()
    #: On the present host, when starting deflated: the size to start at.
    start_size: Vector | None = None
    #: Hosts whose VMs gave too little.
    short_on: tuple[str, ...] = ()
    #: Whether its owner does not want it any more: nothing new is begun.
    called_off: bool = False
    #: Of the VM's record; hosts get none.
    labels: dict[str, str] = Field(default_factory=dict)
    #: Whether the acquirer asks for it.
    acquired: bool = False

    @property
    def changed(self) -> bool:
        """Whether sizes on the present host may be smaller because of this plan."""
        # A VM whose preemption was called off may have been deflated during its notice.
        return self.reclaims > 0 or bool(self.victims) or bool(self.withdrawn)

    @property
    def claim(self) -> AddVM:
        return AddVM(None, self.spec, "looking for a host", self.labels, self.acquired)

    @property
    def reserved(self) -> ResourceVector | None:
        # What is shared at the end is not for it: it is there, or does not come.
        return asked_of_hosts(self.spec, self.purpose) if self.conclusion is None else None

    def next_step(self, event: Event) -> Step:
        return advance_placement(self, event)


def start_placement(
    plan_id: str, request_id: str, spec: VMSpec, deadline_s: float, policy: PlacementPolicy, acquired: bool = False
) -> PlacementPlan:
    """A placement before its first instruction is carried out.

    :param deadline_s: for finding a place for the nominal size without preemption; a fixed VM that has to preempt, and
        one that may start deflated, gets it once more.
    :param acquired: whether the acquirer asks for it.
    """
    return PlacementPlan(
        id=plan_id,
        request_id=request_id,
        instruction=ChooseHosts(purpose="place"),
        vm=spec.name,
        spec=spec.model_copy(update={"labels": {}}),
        labels=spec.labels,
        deadline_s=deadline_s,
        policy=policy,
        acquired=acquired,
    )


def advance_placement(state: PlacementPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    match state.instruction, event:
        case ChooseHosts(), HostsChosen():
            return _on_hosts(state, event)
        case ((ChooseHosts() | ReadHost() | AwaitGuests() | MoveAway()), CalledOff()):
            return _on_called_off(state, event.elapsed_s)
        case ReadHost(), HostRead():
            return _on_reading(state, event)
        case ReadHost(), HostFailed() if state.starts:
            return _lose(state, event.sentence)
        case ReadHost(), HostFailed(busy=True):
            return _next_host(kept_off(state, event), event.elapsed_s)
        case ((ReadHost() | Reclaim()), HostFailed()):
            return _leave(state, event.sentence, event.elapsed_s, reachable=not event.uncertain)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case MoveAway() as move, Moved():
            return moved_away(state, move, event)
        case AwaitGuests(), HostBack():
            return _read(state, waited_s=event.elapsed_s - state.waits_from_s)
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
            return _leave(state.having(starts=0), event.sentence, event.elapsed_s)
        case Remove(vm=vm), OperationEnded() if vm == state.vm:
            return _on_removed(state, event)
        case Remove(vm=vm), HostFailed() if vm == state.vm:
            return _lose(state, event.sentence)
        case (Preempt() | Remove()) as victim, (OperationEnded() | HostFailed()):
            return _on_gone(state, (victim,), (event,))
        case PreemptTogether(victims=victims), EndedTogether(ended=ended):
            return _on_gone(state, victims, ended)
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
    step = _next_host(lined_up(state, event), event.elapsed_s)
    if event.first is None or not isinstance(step.state.instruction, ReadHost):
        return step
    return step.state.next_step(event.first).also(*step.effects)


def _on_called_off(state: PlacementPlan, elapsed_s: float) -> Step:
    """Give back what was taken, have those stay that can, leave nothing behind."""
    said, state = f"the placement of {state.vm} is called off", state.having(called_off=True)
    if state.host is not None and (state.starts or state.changed):
        return _clean_up(state, said) if state.starts else _undo(state, said, None)
    return _next_host(state.having(host=None), elapsed_s)


def _next_host(state: PlacementPlan, elapsed_s: float) -> Step:
    """The next host in line; then preemption, for a fixed VM; then the refusal."""
    if state.called_off:
        sentence = f"the placement of {state.vm} was called off"
        end = SetVM(state.vm, VMPhase.FAILED, None, sentence)
        return finish(state, OperationState.FAILED, sentence, reason=ReasonCode.CALLED_OFF).also(
            end, Note("called-off", state.vm, None, sentence)
        )
    late = bool(state.failures) and state.purpose != "preempt" and time_left(state, elapsed_s) <= 0
    if state.hosts_left and state.tried < MOST_HOSTS and not late:
        host, *rest = state.hosts_left
        return instruct(state, ReadHost(host=host), **_arrival(host), hosts_left=tuple(rest))
    if late and state.hosts_left:
        state = state.having(**{"failures": (*state.failures, LATE)})
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
    return finish(state, OperationState.FAILED, sentence, reason=refusal_code(state)).also(
        SetVM(spec.name, VMPhase.FAILED, None, sentence), Note("refused", spec.name, None, sentence)
    )


def _arrival(host: str) -> dict[str, Any]:
    """What is forgotten of the host before."""
    return {
        "host": host,
        **fresh_at_host(),
        "reason": None,
        "targets": {},
        "withdrawn": (),
        "conclusion": None,
        "start_size": None,
        "waited_for": (),
        "waited_s": 0.0,
        "sent_away": (),
        "moved": (),
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
    state = forgiving(without_paused(state, report), report)
    if state.purpose == "deflated":
        return _on_reading_deflated(state, report, event.elapsed_s)
    missing, deflatable = missing_on(report, demand_of(spec, report)), deflatable_beside(report, state.left_out)
    need, preempting = reclaim_need(missing, deflatable), state.purpose == "preempt"
    if preempting and not (state.tried or state.changed or state.sent_away or state.looked_again):
        # The time is for deflating, and for those that have to go: it does not pass while others have the hosts.
        state = state.having(clock_from_s=event.elapsed_s)
    figures = (tuple(missing), tuple(deflatable), tuple(need))
    verdict = placement_step.decide(*figures, preempting, bool(state.victims), may_reclaim(state))
    if verdict == placement_step.START:
        return _start(state, report.id)
    if (wait := wait_for_guests(state, event, missing, deflatable)) is not None:
        return wait
    if preempting and not state.victims:
        targets, reason, layer = reason_to_preempt(report, missing, state.left_out)
        # The sizes are those before anything changes, as long as that is for the same reason; who came since has none.
        if state.reclaims == 0 or reason is not state.reason:
            state = state.having(reason=reason, targets=targets, failed_layer=state.failed_layer or layer)
        state = state.having(targets={**targets, **state.targets})
    if verdict == placement_step.RECLAIM:
        left = time_to_reclaim(state, event)
        if left > 0 and not (preempting and left < least_s(state.deadline_s)):
            queue = () if state.alone else event.queue
            demand = demand_of(spec, report)
            return _reclaim(state, report.id, *need_together(report, demand, deflatable, left, queue, event.at))
        state = state.having(**{"failed_layer": state.failed_layer or "none: the deadline has passed"})
    elif (others := _ask_others(state, event, missing)) is not None:
        return others
    elif verdict == placement_step.PREEMPT and _may_preempt(state, event, missing, need):
        if event.elsewhere is not None and not state.victims and not state.looked_again:
            return _look_again(state, event.elsewhere, event.elapsed_s)
        if (move := move_away(state, event, missing, time_left(state, event.elapsed_s))) is not None:
            return move
        return _preempt(state, event, missing)
    return _leave(state, short(state, report.id, missing, deflatable), event.elapsed_s)


def _ask_others(state: PlacementPlan, event: HostRead, missing: ResourceVector) -> Step | None:
    """Have other VMs give what some did not, where they have that much, or leave when it is too late; None: they have
    not.
    """
    gave_less, need = others_give(state, event.report, missing)
    if state.victims or need.is_zero():
        return None
    if (left := time_to_reclaim(state, event)) <= 0:
        deflatable = deflatable_beside(event.report, state.left_out)
        return _leave(state, short(state, event.report.id, missing, deflatable), event.elapsed_s)
    return _reclaim(state.having(gave_less=gave_less), event.report.id, need, left)


def _look_again(state: PlacementPlan, host: str, elapsed_s: float) -> Step:
    """Room has come on another host since the hosts were chosen: nobody is preempted before that was tried."""
    said = f"{host} has room by now: nobody is preempted on {state.host}"
    state = state.having(purpose="place", hosts_left=(host,), tried=0, looked_again=True)
    if state.starts:
        return _remove(state, said)
    if state.changed:
        return _undo(state, said, None)
    return _next_host(state.having(**{"host": None, "progress": (*state.progress, said)}), elapsed_s)


def _may_preempt(state: PlacementPlan, event: HostRead, missing: ResourceVector, need: ResourceVector) -> bool:
    """Whether what is known of this host is a reason to stop a VM on it."""
    minimums = state.reason is PreemptionReason.MINIMUM
    calls_failed = go_for_an_error(event, missing, state.targets, state.left_out, minimums)
    if state.victims:
        # All else was looked at before the first of them went; what is missing may have grown since.
        return not calls_failed
    known = evidence(
        minimums_in_the_way=minimums,
        rounds=state.rounds,
        ended=state.reclaimed,
        calls_failed=calls_failed,
        nothing_to_take=need.is_zero() and time_left(state, event.elapsed_s) >= least_s(state.deadline_s),
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
    deflatable = deflatable_beside(report, (*state.left_out, *state.gave_less))
    need, left = reclaim_need(missing, deflatable), time_left(state, elapsed_s)
    # What the layers did not give it does without, as long as that is enough to start with.
    size = room_for_start(spec, report, state.start_size.vector())
    enough = spec.least_start().fits_in(size)
    if not may_reclaim(state):
        state, need = (state, ZERO) if enough else joins_others(state, spec, report)
    if not need.is_zero() and left > 0:
        return _reclaim(state, report.id, need, left)
    if not enough:
        return _leave(state, short(state, report.id, missing, deflatable), elapsed_s)
    return _start(state.having(**{"start_size": Vector.of(size)}), report.id)


def _reclaim(state: PlacementPlan, host: str, need: ResourceVector, left_s: float, others: int = 0) -> Step:
    instruction = Reclaim(
        host=host,
        step=state.step,
        need=Vector.of(need),
        deadline_s=round(left_s, 3),
        exclude=tuple(dict.fromkeys((*state.left_out, *state.gave_less))),
        others=others,
    )
    tried = state.tried + (1 if state.reclaims == 0 else 0)
    said = f"reclaiming {need} on {host}" + (f", also for {others} that wait for it" if others else "")
    return instruct(state, instruction, said, reclaims=state.reclaims + 1, tried=tried)


def _on_created(state: PlacementPlan, event: OperationEnded) -> Step:
    if event.operation.state is OperationState.DONE:
        return _placed(state, event.operation.sentence)
    return _clean_up(state, event.operation.sentence)


def _clean_up(state: PlacementPlan, why: str) -> Step:
    """A start that failed may leave a half-made VM: it goes before anything else happens."""
    return _remove(state, f"{state.host}: {why}")


def _remove(state: PlacementPlan, failure: str) -> Step:
    """Remove what may be left of the VM's own start, which the host may have forgotten: one that comes late, or
    doubled, is refused after that. What else there is to give back follows (`_on_removed`).
    """
    remove = Remove(host=_host(state), step=state.step, vm=state.vm, reason="delete")
    return instruct(state, remove, failure, failures=(*state.failures, failure))


def _placed(state: PlacementPlan, said: str) -> Step:
    """The VM runs. What preemption freed beyond it goes back to the others first."""
    spec, host = state.spec, _host(state)
    how = f"after deflating {', '.join(vm.name for vm in state.outcomes)}" if state.reclaims else "in free room"
    if state.victims:
        how = f"after preempting {', '.join(state.victims)}"
    if state.moved:
        how += f" and moving {', '.join(state.moved)}"
    if state.waited_for:
        how += f", having waited {state.waited_s:.0f} s for {', '.join(state.waited_for)}"
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
    """Have the victims go, side by side, and read again."""
    report, elapsed_s = event.report, event.elapsed_s
    if not (names := victims_for(event, missing, state.targets, state.left_out)):
        return _leave(state, f"{report.id}: preempting every low-priority VM would not free {missing}", elapsed_s)
    if again := [name for name in names if name in state.victims]:
        return _give_up(state, f"{report.id} still shows {again[0]}, which it has stopped", reachable=True)
    if again := [name for name in names if name in state.withdrawn]:
        return _leave(state, f"{report.id}: the preemption of {again[0]} was called off already", elapsed_s)
    reason = state.reason or PreemptionReason.SHORTFALL
    # A deflation may have taken longer than it should, and the manager may have been away meanwhile.
    left_s = max(time_left(state, elapsed_s), least_s(state.deadline_s))
    instruction = going(report, event.sold, names, reason, left_s, state.step)
    why = why_preempted(reason, missing, state.failed_layer, state.vm)
    sentences = [
        f"preempting {one.vm} on {state.host} (reason {reason}): {why}; it has {one.notice_s:g} s to end its work"
        for one in preempted_by(instruction)
    ]
    notes = (Note("preempting", name, report.id, said) for name, said in zip(names, sentences, strict=True))
    changes = {"victims": (*state.victims, *names), "reason": reason, "step": state.step + len(names)}
    return instruct(state, instruction, "; ".join(sentences), **changes).also(*notes)


def _on_gone(state: PlacementPlan, victims: Sequence[Victim], ended: Sequence[Event]) -> Step:
    """What became of those that were to go, together: read again, or give up where one could not."""
    outcomes = [outcome(state.vm, victim, event) for victim, event in zip(victims, ended, strict=True)]
    effects = [effect for one in outcomes for effect in one.effects]
    stay = tuple(victim.vm for victim, one in zip(victims, outcomes, strict=True) if one.stays)
    left = tuple(name for name in state.victims if name not in stay)
    state = state.having(victims=left, withdrawn=(*state.withdrawn, *stay))
    if failures := dict.fromkeys(one.failure for one in outcomes if one.failure):
        return _give_up(state, "; ".join(failures), all(one.reachable for one in outcomes)).also(*effects)
    return _read(state, "; ".join(one.said for one in outcomes)).also(*effects)


def _on_removed(state: PlacementPlan, event: OperationEnded) -> Step:
    """What may have been left of the VM's own start is gone."""
    if event.operation.state is OperationState.FAILED:
        return _lose(state, event.operation.sentence)
    state = state.having(starts=0)
    if state.victims and not state.called_off:
        return _give_up(state, state.failures[-1], reachable=True)
    if state.changed:
        return _undo(state, f"giving back what was taken on {state.host}", None)
    return _next_host(state.having(host=None), event.elapsed_s)


# --- leaving a host --------------------------------------------------------------------------------------------------


def _leave(state: PlacementPlan, failure: str, elapsed_s: float, reachable: bool = True) -> Step:
    """Give this host up: undo what was changed, then the next host. After a preemption the plan ends here."""
    host = _host(state)
    if state.starts:
        return _remove(state.having(short_on=(*state.short_on, host)) if state.changed else state, failure)
    if state.victims:
        return _give_up(state, failure, reachable)
    state = state.having(**{"failures": (*state.failures, failure), "progress": (*state.progress, failure)})
    if not state.changed:
        return _next_host(state.having(host=None), elapsed_s)
    state = state.having(short_on=(*state.short_on, host))
    if reachable:
        return _undo(state, f"giving back what was taken on {host}", None)
    return _next_host(state.having(host=None), elapsed_s).also(ReinflationPending(host, True))


def _give_up(state: PlacementPlan, failure: str, reachable: bool) -> Step:
    """End in failure, giving back first: no other VM is preempted for this VM on another host."""
    if state.starts:
        return _remove(state, failure)
    spec, host = state.spec, _host(state)
    sentence = f"refused {spec.name}: {failure}"
    reason = ReasonCode.NO_ROOM if reachable else ReasonCode.HOST_UNAVAILABLE
    effects = (SetVM(spec.name, VMPhase.FAILED, None, sentence), Note("refused", spec.name, host, sentence))
    if reachable and state.changed:
        conclusion = Finish(state=OperationState.FAILED, sentence=sentence, reason=reason)
        return _undo(state, f"giving back what was taken on {host}", conclusion).also(*effects)
    owed = (ReinflationPending(host, True),) if state.changed else ()
    return finish(state, OperationState.FAILED, sentence, reason=reason).also(*effects, *owed)


def _lose(state: PlacementPlan, failure: str) -> Step:
    """The VM may or may not be on the host: it is started nowhere else, so that it never runs twice."""
    spec, host = state.spec, _host(state)
    sentence = (
        f"{spec.name} may have been started on {host}, which cannot say ({failure}); "
        "it is removed there as soon as the host answers"
    )
    return finish(state, OperationState.FAILED, sentence, reason=ReasonCode.HOST_UNAVAILABLE).also(
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
        end = state.conclusion
        return finish(state, end.state, end.sentence, reason=end.reason).also(note)
    return _next_host(state.having(host=None), elapsed_s).also(note)


def _host(state: PlacementPlan) -> str:
    assert state.host is not None, "only at a host"
    return state.host
