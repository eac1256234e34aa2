"""End of a migration that succeeded: what is left of the VM on the host that it came from is removed.

The old host is read before anything is removed there: it may have been away for long, and the name may be another VM's.
"""

from __future__ import annotations

from cluster_manager.plans.host_wait import MovePlan, Stage, hand_over, wait
from cluster_manager.plans.plans import (
    AwaitHost,
    Event,
    HostBack,
    HostFailed,
    HostRead,
    Note,
    OperationEnded,
    ReadHost,
    ReinflationPending,
    Remove,
    SetVM,
    Step,
    VMPhase,
    finish,
    instruct,
    unexpected,
)
from cluster_manager.plans.reclaim_steps import status_in
from ebbtide.messages.common import is_known
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState, VMStatus

#: States of a VM that has come up.
UP = (VMState.RUNNING, VMState.DEFLATING, VMState.REINFLATING)
_DOING = {VMState.STOPPING: "being stopped", VMState.MIGRATING: "still leaving"}


def has_arrived(found: VMStatus | None) -> bool:
    """Whether a VM has come up on the host to which it was sent while it ran: it may be paused, or off again, by now.

    Until it has, that host calls it ``migrating``. One that is off by a command, or just going, says nothing of that.
    """
    if found is None:
        return False
    went_off = found.state is VMState.STOPPED and found.off_reason is not None
    return found.state in (*UP, VMState.PAUSED) or went_off


def stands(found: VMStatus) -> str:
    """What a VM does on a host, in words."""
    return f"{found.name} {'runs' if found.state in UP else f'is {found.state}'} on {found.host}"


def arrived(state: MovePlan, said: str) -> Step:
    """The VM has come up elsewhere."""
    vm, home, sentence = state.vm, state.home, state.moved
    step = instruct(state, ReadHost(host=home), said, stage="clear", waits_until_s=None, failures=())
    kind: EventKind = "returned" if state.waits else "migrated"
    return step.also(SetVM(vm, VMPhase.RUNNING, state.host, sentence), Note(kind, vm, state.host, sentence))


def advance_clearing(state: MovePlan, event: Event) -> Step:
    """What is left of the VM where it does not belong: on its old host, or on one that was waited for no longer.

    See `Plan.next_step`.
    """
    vm, (stage, host) = state.vm, _place(state)
    match state.instruction, event:
        case ReadHost(), HostRead():
            return _on_reading(state, event)
        case Remove(), OperationEnded(operation=operation) if operation.state is not OperationState.FAILED:
            return _cleared(state, operation.sentence)
        case ((Remove() | ReadHost()), (OperationEnded() | HostFailed())):
            said = f"{event.sentence}: what is left of {vm} there goes when it can"
            return wait(state, said, stage, host, event.elapsed_s)
        case AwaitHost(), HostBack():
            return instruct(state, ReadHost(host=host))
        case AwaitHost(), HostFailed(sentence=sentence):
            return hand_over(state, sentence)
    raise unexpected(state, event)


def _place(state: MovePlan) -> tuple[Stage, str]:
    """What is cleared away, and on which host."""
    if state.stage == "left":
        assert state.host is not None, "at a host"
        return "left", state.host
    return "clear", state.home


def _on_reading(state: MovePlan, event: HostRead) -> Step:
    vm, (stage, host) = state.vm, _place(state)
    found = status_in(event.report, vm)
    if vm in event.recorded:
        return _cleared(state, f"{vm} is on {host} by a later request: it stays")
    if stage == "left":
        # Also where it is not there yet: the removal fences a start that comes late.
        return instruct(state, Remove(host=host, step=state.step, vm=vm, reason="delete"))
    if found is None:
        return _cleared(state, f"{host} has no {vm} any more")
    if found.state in (VMState.STOPPING, VMState.MIGRATING) or not is_known(found.state):
        doing = _DOING.get(found.state, found.state)
        return wait(state, f"{vm} is {doing} on {host}", stage, host, event.elapsed_s)
    if found.state is not VMState.STOPPED:
        # It was off when it moved: an operator has started it past the manager, and must not lose it.
        said = f"{vm} runs on {host} too, where it was started past the manager: it is left alone there"
        return _cleared(state, said).also(Note("failed", vm, host, said))
    return instruct(state, Remove(host=host, step=state.step, vm=vm, reason="delete"))


def _cleared(state: MovePlan, said: str) -> Step:
    vm, (stage, host) = state.vm, _place(state)
    sentence = state.moved
    if stage == "left":
        sentence = f"nothing of {vm} is left on {host}"
    state = state.having(progress=(*state.progress, said))
    # That host shares what came free by itself; the operation still says where the VM is.
    return finish(state, OperationState.DONE, sentence).also(ReinflationPending(host, True))
