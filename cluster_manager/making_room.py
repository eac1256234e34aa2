"""What several plans of a VM's lifecycle do: find room on a host by deflation, give it back, come to an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cluster_manager.plans import (
    MOST_LAPSES,
    Effect,
    Event,
    Finish,
    Forgotten,
    HostFailed,
    Life,
    Note,
    OperationEnded,
    OweReinflation,
    PlanState,
    ReadHost,
    Reclaim,
    Reinflate,
)
from cluster_manager.readings import failed_layer, missing_on, reclaim_need
from cluster_manager.steps import Step, finish, instruct, resize_notes, unexpected
from deflation import admission
from deflation.messages import HostReport, OperationState, Vector, VMStatus
from deflation.resources import ResourceVector

_PAST: Final[Mapping[str, str]] = {
    "stop": "stopped",
    "start": "started",
    "resize": "resized",
    "migrate": "migrated",
    "adopt": "adopted",
    "release": "released",
}


def life_of(state: PlanState) -> Life:
    """What a plan of the lifecycle knows besides."""
    assert state.life is not None, "a plan of the lifecycle"
    return state.life


def vm_of(state: PlanState) -> str:
    assert state.vm is not None, "plans of the lifecycle have a VM"
    return state.vm


def status_in(report: HostReport, name: str) -> VMStatus | None:
    """The VM of a name in a host's report."""
    return next((vm for vm in report.vms if vm.name == name), None)


def at(state: PlanState, host: str, said: str = "", **life: Any) -> Step:
    """Read a host that the plan goes to; what was done on another one is over."""
    fresh = dict.fromkeys(("reclaims", "rounds", "lapses", "starts"), 0)
    changes = {"host": host, **fresh, "reclaimed": None, "failed_layer": None}
    return instruct(state, ReadHost(host=host), said, **changes, life=life_of(state).model_copy(update=life))


def again(state: PlanState, said: str = "", **changes: Any) -> Step:
    """Read the plan's host again."""
    assert state.host is not None, "at a host"
    return instruct(state, ReadHost(host=state.host), said, **changes)


def make_room(
    state: PlanState, report: HostReport, demand: ResourceVector, left_s: float, exclude: tuple[str, ...] = ()
) -> Step | str:
    """The reclaim that is needed before a host has room.

    :param left_s: what is left for deflations, in seconds.
    :param exclude: VMs that give nothing, since the room is for them.
    :returns: empty if there is room, a sentence if there cannot be.
    """
    missing = missing_on(report, demand)
    if missing.is_zero():
        return ""
    deflatable = report.deflatable.vector()
    for name in exclude:
        if (vm := status_in(report, name)) is not None:
            deflatable = deflatable.less(vm.allocation().deflatable)
    if state.failed_layer:
        return f"{report.id}: short of {missing} in layer {state.failed_layer}"
    tired = state.rounds >= admission.MOST_RECLAIMS or state.lapses >= MOST_LAPSES
    tired = tired or state.reclaimed not in (None, OperationState.DONE)
    need = reclaim_need(missing, report)
    verdict = admission.decide(
        tuple(missing), tuple(deflatable), tuple(need), preempting=False, has_preempted=False, may_reclaim=not tired
    )
    if verdict != admission.RECLAIM:
        return f"{report.id}: short of {missing}, with {deflatable} deflatable"
    if left_s <= 0:
        return f"{report.id}: short of {missing}, and the deadline has passed"
    reclaim = Reclaim(
        host=report.id, step=state.step, need=Vector.of(need), deadline_s=round(left_s, 3), exclude=exclude
    )
    return instruct(state, reclaim, f"reclaiming {need} on {report.id}", reclaims=state.reclaims + 1)


def reclaimed(state: PlanState, event: OperationEnded | Forgotten) -> Step:
    """A reclaim has ended, or its host has forgotten it: what it came to is seen by reading the host."""
    if isinstance(event, Forgotten):
        said = f"{state.host} does not know of the reclaim: reading it again"
        return again(state, said, lapses=state.lapses + event.lapse)
    operation = event.operation
    layer = failed_layer(operation) if operation.state is not OperationState.DONE else None
    return again(
        state,
        f"{state.host}: {operation.sentence}",
        outcomes=operation.vms,
        shortfall=operation.shortfall,
        rounds=state.rounds + 1,
        reclaimed=operation.state,
        failed_layer=layer or state.failed_layer,
    ).also(*resize_notes("deflated", state, operation))


def end(
    state: PlanState, how: OperationState, sentence: str, *effects: Effect, share: bool | None = None, **changes: Any
) -> Step:
    """The end of a plan; first its host's room is shared where sizes may be smaller than they need be.

    :param share: whether to; None: if the plan has reclaimed something there.
    """
    kind = _PAST[state.kind] if how is OperationState.DONE else "failed"
    note = Note(kind, state.vm, state.host, sentence)
    if (state.reclaims > 0) if share is None else share:
        return share_room(state, sentence, Finish(state=how, sentence=sentence), **changes).also(*effects, note)
    return finish(state, how, sentence, **changes).also(*effects, note)


def share_room(state: PlanState, said: str, conclusion: Finish | None, **changes: Any) -> Step:
    """Let the VMs of the plan's host grow into what it has free."""
    assert state.host is not None, "at a host"
    reinflate = Reinflate(host=state.host, step=state.step)
    return instruct(state, reinflate, said, conclusion=conclusion, **changes)


def shared(state: PlanState, event: Event) -> tuple[str, OweReinflation]:
    """What a reinflation came to, and whether one is still owed."""
    assert state.host is not None, "at a host"
    match event:
        case OperationEnded(operation=operation):
            failed = operation.state is OperationState.FAILED
            return f"{state.host}: {operation.sentence}", OweReinflation(state.host, failed)
        case HostFailed(sentence=sentence):
            return f"{sentence}; its VMs grow again when it is back", OweReinflation(state.host, True)
    raise unexpected(state, event)


def concluded(state: PlanState, event: Event) -> Step:
    """The end of a plan whose last step was to share room."""
    conclusion = state.conclusion
    assert conclusion is not None, "a reinflation at the end"
    said, owed = shared(state, event)
    state = state.model_copy(update={"progress": (*state.progress, said)})
    return finish(state, conclusion.state, conclusion.sentence).also(owed)


def growth(wanted: ResourceVector, has: ResourceVector, overhead_mib: float = 0.0) -> ResourceVector:
    """What has to be free so that a VM may have a size."""
    return wanted.less(has) + ResourceVector(memory_mib=overhead_mib)
