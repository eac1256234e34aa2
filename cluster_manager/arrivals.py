"""The end of a migration that came off: what is left of the VM on the host that it came from goes.

The old host is read before anything is removed there: it may have been away for long, and the name may be another VM's.
"""

from __future__ import annotations

from cluster_manager.making_room import life_of, status_in, vm_of
from cluster_manager.patience import Stage, hand_over, staged, wait
from cluster_manager.plans import (
    AwaitHost,
    Event,
    HostBack,
    HostFailed,
    HostRead,
    Note,
    OperationEnded,
    OweReinflation,
    PlanState,
    ReadHost,
    Remove,
    SetVM,
    VMPhase,
)
from cluster_manager.steps import Step, finish, instruct, unexpected
from deflation.messages import OperationState, VMState

#: States of a VM that has come up.
UP = (VMState.RUNNING, VMState.DEFLATING, VMState.REINFLATING)


def arrived(state: PlanState, said: str) -> Step:
    """The VM runs elsewhere."""
    vm, life = vm_of(state), life_of(state)
    sentence = f"moved {vm} from {life.home} to {state.host}"
    clearing = staged(state, "clear").model_copy(update={"waits_until_s": None})
    step = instruct(state, ReadHost(host=life.home), said, spec=None, life=clearing, failures=())
    return step.also(SetVM(vm, VMPhase.RUNNING, state.host, sentence), Note("migrated", vm, state.host, sentence))


def advance_clearing(state: PlanState, event: Event) -> Step:
    """What is left of the VM where it does not belong: on its old host, or on one that was waited for no longer.

    See :func:`cluster_manager.transitions.advance`.
    """
    vm, (stage, host) = vm_of(state), _place(state)
    match state.instruction, event:
        case ReadHost(), HostRead():
            return _on_reading(state, event)
        case Remove(), OperationEnded(operation=operation) if operation.state is not OperationState.FAILED:
            return _cleared(state, operation.sentence)
        case ((Remove() | ReadHost()), (OperationEnded() | HostFailed())):
            why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
            return wait(state, f"{why}: what is left of {vm} there goes when it can", stage, host, event.elapsed_s)
        case AwaitHost(), HostBack():
            return instruct(state, ReadHost(host=host))
        case AwaitHost(), HostFailed(sentence=sentence):
            return hand_over(state, sentence)
    raise unexpected(state, event)


def _place(state: PlanState) -> tuple[Stage, str]:
    """What is cleared away, and on which host."""
    if life_of(state).stage == "left":
        assert state.host is not None, "at a host"
        return "left", state.host
    return "clear", life_of(state).home


def _on_reading(state: PlanState, event: HostRead) -> Step:
    vm, (stage, host) = vm_of(state), _place(state)
    found = status_in(event.report, vm)
    if event.kept:
        return _cleared(state, f"{vm} is on {host} by a later request: it stays")
    if stage == "left":
        # Also where it is not there yet: the removal fences a start that comes late.
        return instruct(state, Remove(host=host, step=state.step, vm=vm, reason="delete"))
    if found is None:
        return _cleared(state, f"{host} has no {vm} any more")
    if found.state is VMState.STOPPING:
        return wait(state, f"{vm} is being stopped on {host}", stage, host, event.elapsed_s)
    if found.state is not VMState.STOPPED:
        # It was off when it moved: somebody has started it past the manager, who would lose it without a word.
        said = f"{vm} runs on {host} too, where somebody has started it: it is left alone there"
        return _cleared(state, said).also(Note("failed", vm, host, said))
    return instruct(state, Remove(host=host, step=state.step, vm=vm, reason="delete"))


def _cleared(state: PlanState, said: str) -> Step:
    vm, (stage, host) = vm_of(state), _place(state)
    sentence = f"moved {vm} from {life_of(state).home} to {state.host}"
    if stage == "left":
        sentence = f"nothing of {vm} is left on {host}"
    state = state.model_copy(update={"progress": (*state.progress, said)})
    # That host shares what came free by itself; the operation still says where the VM is.
    return finish(state, OperationState.DONE, sentence).also(OweReinflation(host, True))
