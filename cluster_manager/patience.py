"""How long a migration waits for a host that does not answer, and who goes on with it afterwards.

An operation that is asked for ends: when a host has been waited for longer than the request's deadline, what is left to
do is handed over to a plan of the manager's own, which waits for as long as it takes. Nothing is started meanwhile that
may be running already.
"""

from __future__ import annotations

from typing import Final, Literal

from cluster_manager.making_room import life_of, vm_of
from cluster_manager.plans import AwaitHost, Handover, Life, Note, PlanState, SetVM, VMPhase
from cluster_manager.steps import Step, finish, instruct
from deflation.messages import OperationState

Stage = Literal["unsure", "clean", "home", "clear"]
#: At the end of the id of a plan that goes on with what an operation left.
REST: Final = ".rest"


def staged(state: PlanState, stage: Stage) -> Life:
    """What a plan knows, in another stage."""
    return life_of(state).model_copy(update={"stage": stage})


def wait(state: PlanState, why: str, stage: Stage, host: str, elapsed_s: float) -> Step:
    """Wait until a host reports, or hand over what is left.

    :param stage: what is gone on with then.
    """
    life = life_of(state)
    until_s = life.waits_until_s
    if until_s is None and not life.rest:
        until_s = elapsed_s + state.deadline_s
    state = state.model_copy(update={"life": life.model_copy(update={"stage": stage, "waits_until_s": until_s})})
    if until_s is not None and elapsed_s >= until_s:
        return hand_over(state, why)
    said = f"{why}: waiting for {host}"
    if state.progress and state.progress[-1] == said:
        said = ""  # said already: a host may be away for long
    return instruct(state, AwaitHost(host=host, until_s=until_s), said)


def hand_over(state: PlanState, why: str) -> Step:
    """The end of an operation that has waited for too long, with a plan that does the rest when the host is back."""
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


def _rest(state: PlanState, host: str, stage: Stage) -> PlanState:
    """A plan of the manager's own that goes on when a host reports."""
    new_id = f"{state.id}{REST}"
    life = life_of(state).model_copy(update={"stage": stage, "waits_until_s": None, "rest": True})
    begun = {"id": new_id, "request_id": new_id, "instruction": AwaitHost(host=host), "step": 1, "progress": ()}
    return state.model_copy(update={**begun, "life": life})
