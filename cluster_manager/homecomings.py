"""The end of a migration that failed: nothing of the VM stays elsewhere, and it runs again where it was.

It is started at home only after the other host has said that it is not there. Whoever does not say is waited for.
"""

from __future__ import annotations

from typing import Any, Final

from cluster_manager.arrivals import UP, arrived
from cluster_manager.making_room import at, end, growth, life_of, make_room, share_room, status_in, vm_of
from cluster_manager.patience import hand_over, staged, wait
from cluster_manager.plans import (
    AwaitHost,
    Event,
    HostBack,
    HostFailed,
    HostRead,
    OperationEnded,
    OweReinflation,
    PlanState,
    ReadHost,
    Reclaim,
    Remove,
    SetVM,
    Start,
    VMPhase,
)
from cluster_manager.steps import Step, instruct, unexpected
from deflation.messages import OperationState, VMState, VMStatus
from deflation.resources import ZERO

DONE, FAILED = OperationState.DONE, OperationState.FAILED
#: For deflations on the way back home, in seconds: whatever was left for the way out.
HOMEWARD_S: Final = 60.0
#: How often a start at home is tried that was refused or whose answer was lost.
MOST_STARTS: Final = 5


# --- not sure, or to be cleaned --------------------------------------------------------------------------------------


def advance_doubt(state: PlanState, event: Event) -> Step:
    """The VM may be on the new host: only when that is known it is started at home."""
    assert state.host is not None, "at a host"
    vm, host = vm_of(state), state.host
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            present = status_in(report, vm)
            return found(state, present) if present is not None else clean(state, f"{host}: {vm} was not started")
        case ReadHost(), HostFailed():
            return wait(state, event.sentence, "unsure", host, event.elapsed_s)
        case AwaitHost(), HostBack():
            if life_of(state).stage == "unsure":
                return instruct(state, ReadHost(host=host))
            return instruct(state, Remove(host=host, step=state.step, vm=vm, reason="delete"))
        case AwaitHost(), HostFailed():
            return hand_over(state, event.sentence)
        case Remove(), OperationEnded(operation=operation) if operation.state is not FAILED:
            return back(state, f"{vm} is not on {host}")
        case Remove(), (OperationEnded() | HostFailed()):
            why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
            return wait(state, why, "clean", host, event.elapsed_s)
    raise unexpected(state, event)


def found(state: PlanState, present: VMStatus) -> Step:
    """The VM is on the new host: it has come up there, or goes."""
    if present.state in UP:
        return arrived(state, f"{present.name} runs on {present.host}")
    return clean(state, f"{present.host}: {present.name} did not come up")


def clean(state: PlanState, failure: str) -> Step:
    """A start that failed may leave a half-made VM, and one that was lost may come late: it goes before anything else.

    The removal is also the later command that fences such a start.
    """
    assert state.host is not None, "at a host"
    remove = Remove(host=state.host, step=state.step, vm=vm_of(state), reason="delete")
    return instruct(state, remove, failure, failures=(*state.failures, failure), life=staged(state, "clean"))


def back(state: PlanState, said: str, **changes: object) -> Step:
    """Undo what was done elsewhere, then home."""
    life = staged(state, "home").model_copy(update={"waits_until_s": None})
    home = state.model_copy(update={"life": life, **changes})
    return share_room(home, said, None) if state.reclaims else go_home(home, said)


# --- home again ------------------------------------------------------------------------------------------------------


def go_home(state: PlanState, said: str) -> Step:
    """Start the VM again where it was, if it ran there."""
    life = life_of(state)
    if not life.was_running:
        why = "; ".join(dict.fromkeys(state.failures)) or said
        sentence = f"{vm_of(state)} stays off on {life.home}: {why}"
        row = SetVM(vm_of(state), VMPhase.STOPPED, life.home, sentence)
        return end(state, FAILED, sentence, row, share=False)
    return at(state, life.home, said, stage="home")


def advance_homecoming(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    home = life_of(state).home
    match state.instruction, event:
        case ReadHost(), HostRead():
            return _on_reading(state, event)
        case AwaitHost(), HostBack():
            return instruct(state, ReadHost(host=home))
        case AwaitHost(), HostFailed():
            return hand_over(state, event.sentence)
        case ReadHost(), HostFailed():
            return wait(state, event.sentence, "home", home, event.elapsed_s)
        case Reclaim(), HostFailed(uncertain=uncertain):
            if uncertain:
                return wait(state, event.sentence, "home", home, event.elapsed_s)
            return _stranded(state, event.sentence)
        case Start(), OperationEnded(operation=operation):
            # Whatever stop was still to come is fenced by now: what the host says next counts.
            changes: dict[str, Any] = {"life": life_of(state).model_copy(update={"off": True})}
            if operation.state is not DONE:
                changes |= {"starts": MOST_STARTS, "failures": (*state.failures, operation.sentence)}
            return instruct(state, ReadHost(host=home), operation.sentence, **changes)
        case Start(), HostFailed(uncertain=uncertain):
            life = life_of(state)
            # Also a refusal comes after whatever the host had taken on before.
            life = life.model_copy(update={"off": life.off or not uncertain})
            refused = state.model_copy(update={"life": life, "failures": (*state.failures, event.sentence)})
            return wait(refused, event.sentence, "home", home, event.elapsed_s)
    raise unexpected(state, event)


def _on_reading(state: PlanState, event: HostRead) -> Step:
    vm, report, life = vm_of(state), event.report, life_of(state)
    present = status_in(report, vm)
    if present is None:
        return _gone(state)
    if present.state in (VMState.STOPPING, VMState.STARTING):
        return wait(state, f"{vm} is {present.state} on {life.home}", "home", life.home, event.elapsed_s)
    # A stop whose answer was lost may still come: the start of a VM that runs changes nothing, and fences it.
    if present.state is not VMState.STOPPED and life.off:
        sentence = f"{vm} runs on {life.home} again: {'; '.join(dict.fromkeys(state.failures))}"
        return end(state, FAILED, sentence, SetVM(vm, VMPhase.RUNNING, life.home, sentence), share=False)
    if state.starts >= MOST_STARTS and present.state is VMState.STOPPED:
        return _stranded(state, f"{life.home} has not started it, and its next report says whether it does so late")
    # One that runs or powered off by itself is charged already.
    size = present.start_size.vector() if present.start_size is not None else ZERO
    demand = growth(size, ZERO, report.vm_overhead_mib) if present.start_size is not None else ZERO
    room = make_room(state, report, demand, HOMEWARD_S)
    if isinstance(room, Step):
        return room
    if room:
        return _stranded(state, room)
    start = Start(host=life.home, step=state.step, vm=vm)
    return instruct(state, start, f"starting {vm} again on {life.home}", starts=state.starts + 1)


def _stranded(state: PlanState, why: str, share: bool | None = None) -> Step:
    vm, home = vm_of(state), life_of(state).home
    failures = "; ".join(dict.fromkeys((*state.failures, why)))
    sentence = f"{vm} is off on {home}, since it could be started neither elsewhere nor there: {failures}"
    owed = (OweReinflation(home, True),) if share is False and state.reclaims else ()
    return end(state, FAILED, sentence, SetVM(vm, VMPhase.STOPPED, home, sentence), *owed, share=share)


def _gone(state: PlanState) -> Step:
    vm, home = vm_of(state), life_of(state).home
    failures = "; ".join(dict.fromkeys(state.failures))
    sentence = f"{vm} is on no host: {home} has it no more, and it could not be started elsewhere ({failures})"
    return end(state, FAILED, sentence, SetVM(vm, VMPhase.FAILED, None, sentence))
