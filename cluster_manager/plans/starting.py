"""Start of a VM that is off, on the host where it is: what a start that is asked for and a return have in common."""

from __future__ import annotations

from collections.abc import Callable

from cluster_manager.plans.plans import (
    Event,
    Forgotten,
    HostFailed,
    HostRead,
    OperationEnded,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    SetVM,
    Start,
    Step,
    VMPhase,
    unexpected,
)
from cluster_manager.plans.reclaim_steps import LifecyclePlan, concluded, end, reclaimed, status_in
from ebbtide.messages.common import is_known
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMState, VMStatus

DONE, FAILED = OperationState.DONE, OperationState.FAILED


def advance_starting(
    state: LifecyclePlan,
    event: Event,
    off: VMPhase,
    make_room: Callable[[HostReport, VMStatus], Step],
    began: str = "",
) -> Step:
    """The next step on its host.

    :param off: what the VM is as long as it does not run.
    :param make_room: what to do with a host where it is off, by its reading: make room, start it, or give up.
    :param began: what the sentence of a start that is done begins with.
    """
    vm, host = state.vm, state.home
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            if found is None:
                return stays_off(state, off, f"{report.id} has no VM {vm} any more")
            if found.state in (VMState.STOPPING, VMState.STARTING):
                doing = "stopped" if found.state is VMState.STOPPING else "started"
                return stays_off(state, off, f"it is still being {doing} on {report.id}")
            if not is_known(found.state):
                return stays_off(state, off, f"it is {found.state} on {report.id}, a state that is not known here")
            if found.state is not VMState.STOPPED:
                sentence = f"{vm} runs on {report.id}"
                return end(state, DONE, sentence, SetVM(vm, VMPhase.RUNNING, report.id, sentence))
            return make_room(report, found)
        case ReadHost() | Reclaim(), HostFailed(uncertain=uncertain):
            step = stays_off(state, off, event.sentence, share=False, reason=event.code)
            return step.also(ReinflationPending(host, True)) if uncertain and state.reclaims else step
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case Start(), OperationEnded(operation=operation) if operation.state is DONE:
            sentence = began + operation.sentence
            return end(state, DONE, sentence, SetVM(vm, VMPhase.RUNNING, host, sentence), share=False)
        case Start(), OperationEnded(operation=operation):
            return stays_off(state, off, operation.sentence)
        case Start(), HostFailed(uncertain=False):
            return stays_off(state, off, event.sentence, reason=event.code)
        case Start(), HostFailed():
            sentence = f"{vm} may have been started: {event.sentence}; {host}'s next report says"
            owed = ReinflationPending(host, True)
            # Of one that runs by the record the report counts. One that waits for room is looked for there anyway.
            row = SetVM(vm, VMPhase.RUNNING if off is VMPhase.STOPPED else off, host, sentence)
            return end(state, FAILED, sentence, row, owed, share=False, reason=event.code)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return concluded(state, event)
    raise unexpected(state, event)


def stays_off(
    state: LifecyclePlan, off: VMPhase, why: str, share: bool | None = None, reason: ReasonCode | None = None
) -> Step:
    """It is not started. One that was preempted meanwhile waits for room; one that was waiting already says why."""
    waits = off is VMPhase.PREEMPTED
    sentence = f"{state.vm} stays {'preempted' if waits else 'off'}: {why}"
    row = SetVM(state.vm, off, state.home, sentence, unless_preempted=not waits)
    return end(state, FAILED, sentence, row, share=share, reason=reason)
