"""The end of a migration that came off: what is left of the VM on the host that it came from goes.

The old host is read before anything is removed there: it may have been away for long, and the name may be another VM's.
"""

from __future__ import annotations

from cluster_manager.making_room import life_of, status_in, vm_of
from cluster_manager.patience import hand_over, staged, wait
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
    """See :func:`cluster_manager.transitions.advance`."""
    vm, life = vm_of(state), life_of(state)
    match state.instruction, event:
        case ReadHost(), HostRead():
            return _on_reading(state, event)
        case Remove(), OperationEnded(operation=operation) if operation.state is not OperationState.FAILED:
            return _cleared(state, operation.sentence)
        case ((Remove() | ReadHost()), (OperationEnded() | HostFailed())):
            why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
            return wait(
                state, f"{why}: what is left of {vm} there goes when it can", "clear", life.home, event.elapsed_s
            )
        case AwaitHost(), HostBack():
            return instruct(state, ReadHost(host=life.home))
        case AwaitHost(), HostFailed(sentence=sentence):
            return hand_over(state, sentence)
    raise unexpected(state, event)


def _on_reading(state: PlanState, event: HostRead) -> Step:
    vm, home = vm_of(state), life_of(state).home
    found = status_in(event.report, vm)
    if found is None:
        return _cleared(state, f"{home} has no {vm} any more")
    if event.kept:
        return _cleared(state, f"{vm} is on {home} by a later request: it stays")
    if found.state is VMState.STOPPING:
        return wait(state, f"{vm} is being stopped on {home}", "clear", home, event.elapsed_s)
    if found.state is not VMState.STOPPED:
        # It was off when it moved: somebody has started it past the manager, who would lose it without a word.
        said = f"{vm} runs on {home} too, where somebody has started it: it is left alone there"
        return _cleared(state, said).also(Note("failed", vm, home, said))
    return instruct(state, Remove(host=home, step=state.step, vm=vm, reason="delete"))


def _cleared(state: PlanState, said: str) -> Step:
    life = life_of(state)
    sentence = f"moved {vm_of(state)} from {life.home} to {state.host}"
    state = state.model_copy(update={"progress": (*state.progress, said)})
    # Its old host shares what came free by itself; the operation still says where the VM is.
    return finish(state, OperationState.DONE, sentence).also(OweReinflation(life.home, True))
