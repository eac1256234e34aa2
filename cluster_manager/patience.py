"""How long a plan waits for a host that does not answer, and who goes on with it afterwards.

An operation that is asked for ends: when a host has been waited for longer than the request's deadline, what is left to
do is handed over to a plan of the manager's own. That one waits for ``gone_s``; a host that has not come back by then
may be gone for good, and the VM is its owner's again, with a sentence that says what is not known. Nothing is started
meanwhile that may be running already, and what may have been left elsewhere is waited for as long as it takes.
"""

from __future__ import annotations

from typing import Final, Literal

from cluster_manager.making_room import life_of, vm_of
from cluster_manager.plans import (
    AwaitHost,
    Effect,
    Handover,
    Life,
    Note,
    OweReinflation,
    PlanState,
    SetVM,
    VMPhase,
)
from cluster_manager.steps import Step, finish, instruct
from deflation.messages import OperationState

Stage = Literal["unsure", "clean", "home", "clear", "left"]
#: At the end of the id of a plan that goes on with what an operation left; and of one that clears up after that.
REST: Final = ".rest"
LEFT: Final = ".left"
#: Nobody's VM depends on these: they wait for as long as it takes.
TIMELESS: Final = ("clear", "left")


def staged(state: PlanState, stage: Stage) -> Life:
    """What a plan knows, in another stage."""
    return life_of(state).model_copy(update={"stage": stage})


def wait(state: PlanState, why: str, stage: Stage, host: str, elapsed_s: float) -> Step:
    """Wait until a host reports, or hand over what is left.

    :param stage: what is gone on with then.
    """
    life = life_of(state)
    until_s = life.waits_until_s
    if until_s is None and not (life.rest and stage in TIMELESS):
        until_s = elapsed_s + (life.gone_s if life.rest else state.deadline_s)
    state = state.model_copy(update={"life": life.model_copy(update={"stage": stage, "waits_until_s": until_s})})
    if until_s is not None and elapsed_s >= until_s:
        return hand_over(state, why)
    said = f"{why}: waiting for {host}"
    if said in state.progress[-8:]:
        said = ""  # said already: a host may be away for long
    return instruct(state, AwaitHost(host=host, until_s=until_s), said)


def hand_over(state: PlanState, why: str) -> Step:
    """The end of a plan that has waited for too long, with one that does the rest when the host is back."""
    if life_of(state).rest:
        return _give_back(state, why)
    vm, life = vm_of(state), life_of(state)
    if life.stage == "clear":
        left = f"what is left on {life.home} goes when that answers"
        sentence = f"moved {vm} from {life.home} to {state.host}; {left}"
        rest = _rest(state, life.home, "clear")
        return finish(state, OperationState.DONE, sentence).also(Handover(rest))
    again = f"is started again on {life.home}" if life.was_running else f"stays off on {life.home}"
    if life.stage == "home":
        sentence = f"{vm} did not move and may be off ({why}): it {again} when {life.home} answers"
        rest = _rest(state, life.home, "home")
    else:
        assert state.host is not None, "at a host"
        sentence = (
            f"{vm} did not move, and may have been started on {state.host}, which does not say ({why}): when "
            f"{state.host} answers it is removed there and {again}"
        )
        rest = _rest(state, state.host, "clean")
    phase = VMPhase.STARTING if state.kind == "start" else VMPhase.MIGRATING
    effects = (SetVM(vm, phase, life.home, sentence), Note("failed", vm, state.host, sentence), Handover(rest))
    return finish(state, OperationState.FAILED, sentence).also(*effects)


def _give_back(state: PlanState, why: str) -> Step:
    """The end of the waiting itself: whoever owns the VM decides what comes next, and is told what is not known."""
    vm, life = vm_of(state), life_of(state)
    assert state.host is not None, "at a host"
    waited = f"waited for {life.gone_s:g} s"
    effects: tuple[Effect, ...] = (OweReinflation(state.host, True),) if state.reclaims else ()
    if life.stage == "home":
        phase = VMPhase.STOPPED if life.off else VMPhase.RUNNING
        sentence = (
            f"{vm} may be off: {life.home} was {waited} ({why}) and is waited for no longer; its next report says "
            f"whether {vm} runs, and nobody starts it but by request"
        )
    else:
        phase = VMPhase.STOPPED
        sentence = (
            f"{vm} is off on {life.home}, and may run on {state.host}, which was {waited} ({why}) and is waited for no "
            f"longer: before it is started, make sure that {state.host} is off or has no {vm}; there it is removed as "
            f"soon as {state.host} answers"
        )
        left = _rest(state, state.host, "left", LEFT)
        effects += (Handover(left.model_copy(update={"spec": None, "reclaims": 0})),)
    effects = (SetVM(vm, phase, life.home, sentence), Note("failed", vm, state.host, sentence), *effects)
    return finish(state, OperationState.FAILED, sentence).also(*effects)


def _rest(state: PlanState, host: str, stage: Stage, suffix: str = REST) -> PlanState:
    """A plan of the manager's own that goes on when a host reports."""
    new_id = f"{state.id.removesuffix(REST)}{suffix}"
    life = life_of(state)
    until_s = None if stage in TIMELESS else life.gone_s
    life = life.model_copy(update={"stage": stage, "waits_until_s": until_s, "rest": True})
    waiting = AwaitHost(host=host, until_s=until_s)
    begun = {"id": new_id, "request_id": new_id, "instruction": waiting, "step": 1, "progress": ()}
    return state.model_copy(update={**begun, "life": life})
