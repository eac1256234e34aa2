"""State machines without a choice of host: deletion, target, the reinflation of a host, the calling off of a plan."""

from __future__ import annotations

from typing import Final, Literal

from cluster_manager.plans.claims import ClaimRemoval, SetGeneration
from cluster_manager.plans.plans import (
    OFF,
    AwaitPlan,
    Event,
    Finish,
    HostFailed,
    Note,
    OperationEnded,
    Plan,
    PlanEnded,
    Reinflate,
    ReinflationPending,
    Remove,
    SetTarget,
    SetVM,
    Step,
    VMPhase,
    finish,
    instruct,
    unexpected,
)
from cluster_manager.plans.reclaim_steps import resize_notes
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import TargetRequest

#: What a target has waited for its host for so long is told, seconds.
TOLD_WAIT_S: Final = 1.0


class RemovalPlan(Plan):
    """State of the plan that deletes a VM and lets the others grow."""

    kind: Literal["delete"] = "delete"
    vm: str
    #: What it was before, and is again where its host refuses: one that was preempted keeps its place in the queue.
    before: VMPhase = VMPhase.RUNNING
    #: Whether the manager owes its removal anyway: it is no VM that its owner could have again.
    owed: bool = False

    @property
    def claim(self) -> ClaimRemoval:
        return ClaimRemoval(VMPhase.ENDED if self.finished else VMPhase.DELETING)

    def next_step(self, event: Event) -> Step:
        return advance_removal(self, event)


class CancelPlan(Plan):
    """State of the plan that calls a placement off. Its VM's row stays the placement's."""

    kind: Literal["cancel"] = "cancel"
    vm: str

    def next_step(self, event: Event) -> Step:
        return advance_cancel(self, event)


class TargetPlan(Plan):
    """State of the plan that brings a VM to a size; its instruction says which."""

    kind: Literal["target"] = "target"

    @property
    def claim(self) -> SetGeneration | None:
        return SetGeneration(self.instruction.generation) if isinstance(self.instruction, SetTarget) else None

    def next_step(self, event: Event) -> Step:
        return advance_target(self, event)


class ReinflationPlan(Plan):
    """State of the plan that shares a host's free room."""

    kind: Literal["reinflate"] = "reinflate"

    def next_step(self, event: Event) -> Step:
        return advance_reinflation(self, event)


def start_removal(
    plan_id: str, request_id: str, vm: str, host: str, phase: VMPhase = VMPhase.RUNNING, *, owed: bool = False
) -> RemovalPlan:
    """The deletion of a VM, then reinflation in the room that came free.

    :param phase: what it is by the manager's record; and whether its removal is ``owed``.
    """
    remove = Remove(host=host, step=0, vm=vm, reason="delete")
    before = phase if phase in OFF else VMPhase.RUNNING
    return RemovalPlan(
        id=plan_id, request_id=request_id, instruction=remove, vm=vm, host=host, before=before, owed=owed
    )


def start_calling_off(plan_id: str, request_id: str, vm: str, placement: str) -> RemovalPlan:
    """The deletion of a VM that is being placed.

    :param placement: the request that it was asked for by.
    """
    return RemovalPlan(id=plan_id, request_id=request_id, instruction=AwaitPlan(request_id=placement), vm=vm)


def start_cancel(plan_id: str, request_id: str, vm: str, placement: str) -> CancelPlan:
    """The calling off of a VM's placement; what was taken for it is given back.

    :param placement: the request that it was asked for by.
    """
    return CancelPlan(id=plan_id, request_id=request_id, instruction=AwaitPlan(request_id=placement), vm=vm)


def advance_cancel(state: CancelPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    match state.instruction, event:
        case AwaitPlan(), PlanEnded(host=None):
            return finish(state, OperationState.DONE, f"called off the placement of {state.vm}, which is on no host")
        case AwaitPlan(), PlanEnded(host=str(where)):
            said = f"the placement of {state.vm} had come too far: it is on {where}, and deleting it takes it away"
            return finish(state, OperationState.FAILED, said, host=where)
    raise unexpected(state, event)


#: Why a plan of a kind cannot be called off.
_NOT_CALLED_OFF: Final = {
    "delete": "what is deleted does not come back",
    "cancel": "it calls off another one itself",
    "target": "it ends by its deadline; a target of its own takes its place",
    "resize": "its host is at work on it; another resize takes its place",
    "live-migrate": "at its deadline the VM stays where it is, unless it has left by then: then it ends when its hosts "
    "have said where it is, or one of them is forgotten",
}


def why_not_cancelled(state: Plan, starts: int) -> str:
    """Why a plan that is under way cannot be called off; empty if it can.

    :param starts: how often its VM has been started, for a placement.
    """
    if state.kind != "create":
        return _NOT_CALLED_OFF.get(state.kind, f"only a placement can be called off, and this is a {state.kind}")
    return f"{state.vm} is being started on {state.host} already: delete it instead" if starts else ""


def cancelled_already(plan_id: str, request_id: str, vm: str, said: str) -> CancelPlan:
    """The calling off of a plan that has ended by that: it ends as it begins."""
    done = Finish(state=OperationState.DONE, sentence=said)
    return CancelPlan(id=plan_id, request_id=request_id, instruction=done, vm=vm)


def removed_already(plan_id: str, request_id: str, vm: str) -> RemovalPlan:
    """The deletion of a VM that is on no host: it ends as it begins."""
    done = Finish(state=OperationState.DONE, sentence=f"forgot {vm}, which was on no host")
    return RemovalPlan(id=plan_id, request_id=request_id, instruction=done, vm=vm)


def advance_removal(state: RemovalPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    vm, host = state.vm, state.host or ""
    match state.instruction, event:
        case AwaitPlan(), PlanEnded(host=None):
            sentence = f"called off the placement of {vm}, which is on no host"
            return finish(state, OperationState.DONE, sentence).also(SetVM(vm, VMPhase.ENDED, None, sentence))
        case AwaitPlan(), PlanEnded(host=str(where), done=done):
            # It had come too far, or could not be asked: its removal is owed then, which the placement cannot record.
            remove = Remove(host=where, step=state.step, vm=vm, reason="delete")
            said = f"the placement of {vm} has ended on {where}: deleting it there"
            return instruct(state, remove, said, host=where, owed=not done)
        case Remove(), OperationEnded(operation=operation) if operation.state is not OperationState.FAILED:
            sentence = f"deleted {vm} on {host}"
            return instruct(state, Reinflate(host=host, step=state.step), sentence).also(
                SetVM(vm, VMPhase.ENDED, host, sentence), Note("deleted", vm, host, sentence)
            )
        case Remove(), (OperationEnded() | HostFailed()) if state.internal or state.owed:
            # What must not be there: one refusal does not pay the debt.
            said = f"{vm} is still to be removed: {event.sentence}"
            return _not_removed(state, event, said, VMPhase.FAILED, owed=True)
        case Remove(), OperationEnded(operation=operation):
            return _not_removed(state, event, f"{vm} could not be deleted: {operation.sentence}", VMPhase.FAILED)
        case Remove(), HostFailed(uncertain=True):
            said = f"{event.sentence}; {vm} is removed as soon as {host} answers"
            return _not_removed(state, event, said, VMPhase.FAILED, owed=True)
        case Remove(), HostFailed():
            return _not_removed(state, event, f"{vm} stays, since {event.sentence}", state.before)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return _reinflated(state, event, f"deleted {vm} on {host}")
    raise unexpected(state, event)


def _not_removed(
    state: RemovalPlan, event: OperationEnded | HostFailed, sentence: str, phase: VMPhase, owed: bool = False
) -> Step:
    return finish(state, OperationState.FAILED, sentence, reason=event.code).also(
        SetVM(state.vm, phase, state.host, sentence, owed=owed, unless_preempted=phase is VMPhase.RUNNING),
        Note("failed", state.vm, state.host, sentence),
    )


def start_target(plan_id: str, vm: str, host: str, wanted: TargetRequest, generation: int) -> TargetPlan:
    """One VM to a size that the operator asks for."""
    instruction = SetTarget(
        host=host,
        step=0,
        vm=vm,
        generation=generation,
        unnumbered=wanted.generation is None,
        target=wanted.target,
        deadline_s=wanted.deadline_s,
        mode=wanted.mode,
    )
    return TargetPlan(id=plan_id, request_id=wanted.request_id, instruction=instruction, vm=vm, host=host)


def advance_target(state: TargetPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    match state.instruction, event:
        case SetTarget(), OperationEnded(operation=operation):
            said = operation.sentence
            if event.waited_s >= TOLD_WAIT_S:
                said += f"; {event.waited_s:.0f} s of its deadline were over before {state.host} was free"
            note = Note("resized", state.vm, state.host, said)
            state = state.having(outcomes=operation.vms, shortfall=operation.shortfall)
            return finish(state, operation.state, said).also(note)
        case SetTarget(), HostFailed():
            unknown = f"; whether {state.vm} was resized is not known, and its size is as reported"
            sentence = event.sentence + (unknown if event.uncertain else "")
            return finish(state, OperationState.FAILED, sentence, reason=event.code).also(
                Note("failed", state.vm, state.host, sentence)
            )
    raise unexpected(state, event)


def start_reinflation(
    plan_id: str, host: str, vms: tuple[str, ...] = (), room: Vector | None = None
) -> ReinflationPlan:
    """A host whose VMs may be smaller than they need be. The manager's own plan, which no client asked for.

    :param vms: those that are to grow; none named: all that lack something.
    :param room: what they are to share; default: all that is free.
    """
    instruction = Reinflate(host=host, step=0, vms=vms, room=room)
    return ReinflationPlan(id=plan_id, request_id=plan_id, instruction=instruction, host=host)


def advance_reinflation(state: ReinflationPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    match state.instruction, event:
        case Reinflate(), (OperationEnded() | HostFailed()):
            return _reinflated(state, event, f"reinflated {state.host}")
    raise unexpected(state, event)


def _reinflated(state: Plan, event: OperationEnded | HostFailed, done: str) -> Step:
    """The end of a plan whose last step is to share room; what cannot be shared now is owed."""
    host = state.host or ""
    if isinstance(event, OperationEnded) and event.operation.state is not OperationState.FAILED:
        said = event.operation.sentence
        return finish(state, OperationState.DONE, f"{done}; {said}", outcomes=event.operation.vms).also(
            ReinflationPending(host, False), *resize_notes("reinflated", state, event.operation)
        )
    why = event.sentence
    how = OperationState.DONE if state.kind == "delete" else OperationState.FAILED
    return finish(state, how, f"{done}, but its VMs were not reinflated: {why}", reason=event.code).also(
        ReinflationPending(host, True), Note("failed", state.vm, host, why)
    )
