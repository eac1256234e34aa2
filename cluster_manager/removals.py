"""The plans without a choice of host: delete a VM and reinflate the others, bring a VM to a size, reinflate a host."""

from __future__ import annotations

from cluster_manager.plans import (
    Event,
    Finish,
    HostFailed,
    Note,
    OperationEnded,
    OweReinflation,
    PlanState,
    Reinflate,
    Remove,
    SetTarget,
    SetVM,
    Target,
    VMPhase,
)
from cluster_manager.steps import Step, finish, instruct, resize_notes, unexpected
from deflation.messages import OperationState, Vector


def start_removal(plan_id: str, request_id: str, vm: str, host: str) -> PlanState:
    """The deletion of a VM, then reinflation in the room that came free."""
    remove = Remove(host=host, step=0, vm=vm, reason="delete")
    return PlanState(kind="delete", id=plan_id, request_id=request_id, instruction=remove, vm=vm, host=host)


def removed_already(plan_id: str, request_id: str, vm: str) -> PlanState:
    """The deletion of a VM that is on no host: it ends as it begins."""
    done = Finish(state=OperationState.DONE, sentence=f"forgot {vm}, which was on no host")
    return PlanState(kind="delete", id=plan_id, request_id=request_id, instruction=done, vm=vm)


def advance_removal(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    vm, host = state.vm or "", state.host or ""
    match state.instruction, event:
        case Remove(), OperationEnded(operation=operation) if operation.state is not OperationState.FAILED:
            sentence = f"deleted {vm} on {host}"
            return instruct(state, Reinflate(host=host, step=state.step), sentence).also(
                SetVM(vm, VMPhase.ENDED, host, sentence), Note("deleted", vm, host, sentence)
            )
        case Remove(), (OperationEnded() | HostFailed()) if _is_owed(state):
            why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
            return _not_removed(state, f"{vm} is still to be removed: {why}", VMPhase.FAILED, owed=True)
        case Remove(), OperationEnded(operation=operation):
            return _not_removed(state, f"{vm} could not be deleted: {operation.sentence}", VMPhase.FAILED)
        case Remove(), HostFailed(uncertain=True):
            said = f"{event.sentence}; {vm} is removed as soon as {host} answers"
            return _not_removed(state, said, VMPhase.FAILED, owed=True)
        case Remove(), HostFailed():
            return _not_removed(state, f"{vm} stays, since {event.sentence}", VMPhase.RUNNING)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return _reinflated(state, event, f"deleted {vm} on {host}")
    raise unexpected(state, event)


def _is_owed(state: PlanState) -> bool:
    """Whether this is the manager's own removal, of what must not be there: one refusal does not pay the debt."""
    return state.request_id == state.id


def _not_removed(state: PlanState, sentence: str, phase: VMPhase, owed: bool = False) -> Step:
    return finish(state, OperationState.FAILED, sentence).also(
        SetVM(state.vm or "", phase, state.host, sentence, owed=owed),
        Note("failed", state.vm, state.host, sentence),
    )


def start_target(plan_id: str, request_id: str, vm: str, host: str, target: Target) -> PlanState:
    """One VM to a size that the operator asks for."""
    instruction = SetTarget(host=host, step=0, vm=vm, **dict(target))
    return PlanState(
        kind="target", id=plan_id, request_id=request_id, instruction=instruction, vm=vm, host=host, target=target
    )


def advance_target(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    match state.instruction, event:
        case SetTarget(), OperationEnded(operation=operation):
            note = Note("resized", state.vm, state.host, operation.sentence)
            changes = {"outcomes": operation.vms, "shortfall": operation.shortfall}
            return finish(state, operation.state, operation.sentence, **changes).also(note)
        case SetTarget(), HostFailed():
            return finish(state, OperationState.FAILED, event.sentence).also(
                Note("failed", state.vm, state.host, event.sentence)
            )
    raise unexpected(state, event)


def start_reinflation(plan_id: str, host: str, vms: tuple[str, ...] = (), room: Vector | None = None) -> PlanState:
    """A host whose VMs may be smaller than they need be. The manager's own plan: nobody asked for it.

    :param vms: those that are to grow; none named: all that lack something.
    :param room: what they are to share; default: all that is free.
    """
    instruction = Reinflate(host=host, step=0, vms=vms, room=room)
    return PlanState(kind="reinflate", id=plan_id, request_id=plan_id, instruction=instruction, host=host)


def advance_reinflation(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    if not isinstance(event, OperationEnded | HostFailed):
        raise unexpected(state, event)
    return _reinflated(state, event, f"reinflated {state.host}")


def _reinflated(state: PlanState, event: OperationEnded | HostFailed, done: str) -> Step:
    """The end of a plan whose last step is to share room; what cannot be shared now is owed."""
    host = state.host or ""
    if isinstance(event, OperationEnded) and event.operation.state is not OperationState.FAILED:
        said = event.operation.sentence
        return finish(state, OperationState.DONE, f"{done}; {said}", outcomes=event.operation.vms).also(
            OweReinflation(host, False), *resize_notes("reinflated", state, event.operation)
        )
    why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
    how = OperationState.DONE if state.kind == "delete" else OperationState.FAILED
    return finish(state, how, f"{done}, but its VMs were not reinflated: {why}").also(
        OweReinflation(host, True), Note("failed", state.vm, host, why)
    )
