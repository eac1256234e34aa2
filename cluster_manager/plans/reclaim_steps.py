"""Steps that several plans share: find room on a host by deflation, give it back, come to an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from cluster_manager.plans.plans import (
    MOST_LAPSES,
    Effect,
    Event,
    Finish,
    Forgotten,
    HostFailed,
    Note,
    OperationEnded,
    Plan,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    RoomPlan,
    Step,
    finish,
    instruct,
    unexpected,
)
from cluster_manager.plans.report_queries import (
    closed,
    deflatable_beside,
    demand_of,
    failed_layer,
    missing_on,
    not_yet,
    reclaim_need,
    silent_on,
    size_to_join,
    why_still,
)
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMSpec, VMStatus

R = TypeVar("R", bound=RoomPlan)
_PAST: Final[Mapping[str, EventKind]] = {
    "stop": "stopped",
    "start": "started",
    "resize": "resized",
    "migrate": "migrated",
    "adopt": "adopted",
    "release": "released",
    "return": "returned",
    "live-migrate": "migrated",
}


class LifecyclePlan(RoomPlan):
    """State of a plan about a VM that exists."""

    vm: str
    #: The host that the VM is bound to.
    bound_to: str

    @property
    def home(self) -> str:
        return self.bound_to


def fresh_at_host() -> dict[str, Any]:
    """What a plan knows of a host that it has come to just now."""
    counts = dict.fromkeys(("reclaims", "rounds", "lapses", "starts"), 0)
    return counts | {
        "reclaimed": None,
        "failed_layer": None,
        "errors": (),
        "left_out": (),
        "gave_less": (),
        "alone": False,
    }


def status_in(report: HostReport, name: str) -> VMStatus | None:
    """The VM of a name in a host's report."""
    return next((vm for vm in report.vms if vm.name == name), None)


def at(state: RoomPlan, host: str, said: str = "", **changes: Any) -> Step:
    """Read a host that the plan goes to; what was done on another one is over."""
    changes = {"host": host, **fresh_at_host(), **changes}
    return instruct(state, ReadHost(host=host), said, **changes)


def again(state: RoomPlan, said: str = "", **changes: Any) -> Step:
    """Read the plan's host again."""
    assert state.host is not None, "at a host"
    return instruct(state, ReadHost(host=state.host), said, **changes)


def make_room(
    state: RoomPlan, report: HostReport, demand: ResourceVector, left_s: float, exclude: tuple[str, ...] = ()
) -> Step | str:
    """The reclaim that is needed before a host has room.

    :param left_s: what is left for deflations, in seconds.
    :param exclude: VMs that give nothing, since the room is for them.
    :returns: empty if there is room, a sentence if there cannot be.
    """
    if report.unavailable:
        return closed(report)
    missing = missing_on(report, demand)
    if missing.is_zero():
        return ""
    state = without_paused(state, report)
    beside = (*exclude, *state.left_out, *state.gave_less)
    deflatable = deflatable_beside(report, beside)
    need = reclaim_need(missing, deflatable)
    figures = (tuple(missing), tuple(deflatable), tuple(need))
    in_vain = bool(state.failed_layer) or not may_reclaim(state)
    if placement_step.decide(*figures, False, False, may_reclaim=not in_vain) != placement_step.RECLAIM:
        gave_less, need = others_give(state, report, missing, exclude)
        if need.is_zero() and state.failed_layer:
            return f"{report.id}: short of {missing} in layer {state.failed_layer}"
        if need.is_zero():
            why, silent = short(state, report.id, missing, deflatable), silent_on(not_yet(report, beside))
            return f"{why}; {silent}, cannot be deflated yet" if silent else why
        state = state.having(gave_less=gave_less, failed_layer=None)
    if left_s <= 0:
        return f"{report.id}: short of {missing}, and the deadline has passed"
    exclude = tuple(dict.fromkeys((*exclude, *state.left_out, *state.gave_less)))
    reclaim = Reclaim(
        host=report.id, step=state.step, need=Vector.of(need), deadline_s=round(left_s, 3), exclude=exclude
    )
    return instruct(state, reclaim, f"reclaiming {need} on {report.id}", reclaims=state.reclaims + 1)


def reclaimed(state: RoomPlan, event: OperationEnded | Forgotten) -> Step:
    """A reclaim has ended, or its host has forgotten it: what it came to is seen by reading the host."""
    if isinstance(event, Forgotten):
        said = f"{state.host} does not know of the reclaim: reading it again"
        return again(state, said, lapses=state.lapses + event.lapse)
    operation = event.operation
    # What was too much for several arrivals may be enough for one: that is tried without the others.
    alone = isinstance(state.instruction, Reclaim) and state.instruction.others > 0
    alone = alone and operation.state is OperationState.PARTIAL
    layer = failed_layer(operation) if operation.state is not OperationState.DONE and not alone else None
    failed = [(outcome.name, outcome.errors[0]) for outcome in operation.vms if outcome.errors] + [*event.failed]
    errors = tuple(f"{name} could not be deflated ({error})" for name, error in failed)
    if operation.state is OperationState.FAILED:
        errors = (operation.sentence,)
    return again(
        state,
        f"{state.host}: {operation.sentence}",
        outcomes=operation.vms,
        shortfall=operation.shortfall,
        rounds=state.rounds + 1,
        # The others are asked for what those did not give whose calls failed.
        reclaimed=None if alone or (failed and layer is None) else operation.state,
        failed_layer=layer or state.failed_layer,
        alone=state.alone or alone,
        errors=tuple(dict.fromkeys((*state.errors, *errors))),
        left_out=tuple(dict.fromkeys((*state.left_out, *(name for name, _ in failed)))),
    ).also(*resize_notes("deflated", state, operation))


def without_paused(state: R, report: HostReport) -> R:
    """The plan, which does not count on low-priority VMs whose size cannot be changed now: charged in full, given
    nothing. One that was stopped on command is not charged.
    """
    still = {
        vm.name: why
        for vm in report.vms
        if (why := why_still(vm))
        and vm.start_size is None
        and vm.priority is not Priority.FIXED
        and vm.name not in state.left_out
    }
    if not still:
        return state
    errors = tuple(f"{name} could not be deflated (it {why})" for name, why in still.items())
    return state.having(left_out=(*state.left_out, *still), errors=(*state.errors, *errors))


def forgiving(state: R, report: HostReport) -> R:
    """The plan, to which a deflation was not in vain that fell short of guests which have stopped to answer."""
    silent = {vm.name for vm in not_yet(report)}
    return state.having(reclaimed=None, failed_layer=None) if state.reclaims and _fell_short(state) & silent else state


def others_give(
    state: RoomPlan, report: HostReport, missing: ResourceVector, exclude: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], ResourceVector]:
    """What the other VMs are to give in the place of those that gave less than they were asked for.

    :param exclude: VMs that give nothing, since the room is for them.
    :returns: all of those so far, and the need; nothing where the others do not have what is missing, or after
        ``MOST_RECLAIMS`` deflations.
    """
    new = sorted(_fell_short(state).difference(state.gave_less))
    gave_less = (*state.gave_less, *new)
    others = deflatable_beside(report, (*exclude, *state.left_out, *gave_less))
    if not new or not 0 < state.rounds < placement_step.MOST_RECLAIMS or not missing.fits_in(others):
        return gave_less, ZERO
    return gave_less, reclaim_need(missing, others)


def joins_others(state: R, spec: VMSpec, report: HostReport) -> tuple[R, ResourceVector]:
    """The plan of a VM that cannot start with what it was given, at the size that it gets beside those that gave less.

    :returns: with it the need of the others; nothing where they do not have what it can start with.
    """
    gave_less = (*state.left_out, *state.gave_less, *_fell_short(state))
    joining = size_to_join(spec, report, gave_less)
    if joining is None:
        return state, ZERO
    gave_less, need = others_give(state, report, missing_on(report, demand_of(spec, report, joining.size)))
    return state.having(gave_less=gave_less, start_size=Vector.of(joining.size)), need


def _fell_short(state: RoomPlan) -> set[str]:
    return {outcome.name for outcome in state.outcomes if not outcome.shortfall.vector().is_zero()}


def may_reclaim(state: RoomPlan) -> bool:
    """Whether deflation has not been tried in vain on the plan's host; what only failed is tried once more."""
    in_vain = state.reclaimed is OperationState.PARTIAL or state.rounds >= placement_step.MOST_RECLAIMS
    return not in_vain and state.lapses < MOST_LAPSES


def short(state: RoomPlan, host: str, missing: ResourceVector, deflatable: ResourceVector) -> str:
    """Why a host has no room."""
    if state.errors:
        return f"{host}: short of {missing}, because {'; '.join(state.errors)}; for an error no VM is preempted"
    if state.failed_layer:
        return f"{host}: short of {missing} in layer {state.failed_layer}"
    return f"{host}: short of {missing}, with {deflatable} deflatable"


def end(
    state: RoomPlan,
    how: OperationState,
    sentence: str,
    *effects: Effect,
    share: bool | None = None,
    reason: ReasonCode | None = None,
    **changes: Any,
) -> Step:
    """The end of a plan; first its host's room is shared where sizes may be smaller than they need be.

    :param share: whether to; None: if the plan has reclaimed something there.
    :param reason: see `finish`.
    """
    kind = _PAST[state.kind] if how is OperationState.DONE else "failed"
    note = Note(kind, state.vm, state.host, sentence)
    if (state.reclaims > 0) if share is None else share:
        conclusion = Finish(state=how, sentence=sentence, reason=reason)
        return share_room(state, sentence, conclusion, **changes).also(*effects, note)
    return finish(state, how, sentence, reason=reason, **changes).also(*effects, note)


def why_no_room(report: HostReport) -> ReasonCode:
    """The code of what `make_room` says."""
    return ReasonCode.HOST_UNAVAILABLE if report.unavailable else ReasonCode.NO_ROOM


def share_room(state: RoomPlan, said: str, conclusion: Finish | None, **changes: Any) -> Step:
    """Let the VMs of the plan's host grow into what it has free."""
    assert state.host is not None, "at a host"
    reinflate = Reinflate(host=state.host, step=state.step)
    return instruct(state, reinflate, said, conclusion=conclusion, **changes)


def shared(state: RoomPlan, event: Event) -> tuple[str, ReinflationPending]:
    """What a reinflation came to, and whether one is still owed."""
    assert state.host is not None, "at a host"
    match event:
        case OperationEnded(operation=operation):
            failed = operation.state is OperationState.FAILED
            return f"{state.host}: {operation.sentence}", ReinflationPending(state.host, failed)
        case HostFailed(sentence=sentence):
            return f"{sentence}; its VMs grow again when it is back", ReinflationPending(state.host, True)
    raise unexpected(state, event)


def concluded(state: RoomPlan, event: Event) -> Step:
    """The end of a plan whose last step was to share room."""
    conclusion = state.conclusion
    assert conclusion is not None, "a reinflation at the end"
    said, owed = shared(state, event)
    state = state.having(progress=(*state.progress, said))
    return finish(state, conclusion.state, conclusion.sentence, reason=conclusion.reason).also(owed)


def growth(wanted: ResourceVector, has: ResourceVector, overhead_mib: float = 0.0) -> ResourceVector:
    """What has to be free so that a VM may have a size."""
    return wanted.less(has) + ResourceVector(memory_mib=overhead_mib)


def resize_notes(kind: EventKind, state: Plan, operation: Operation) -> tuple[Note, ...]:
    """A line of the event log for each VM that an operation resized, or one if there is none."""
    purpose = f" for {state.vm}" if state.vm is not None and state.kind == "create" else ""
    return tuple(
        Note(kind, outcome.name, state.host, f"{kind} {outcome.name} on {state.host}{purpose}: {outcome.sentence}")
        for outcome in operation.vms
    ) or (Note(kind, state.vm, state.host, operation.sentence),)
