"""What the kinds of plans share: the next state with its effects, and how one is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster_manager.plans import Effect, Event, Finish, Instruction, Note, PlanState
from deflation.errors import ProtocolViolation
from deflation.messages import Operation, OperationState


@dataclass(frozen=True, slots=True)
class Step:
    """The next state, and what is to be stored with it."""

    state: PlanState
    effects: tuple[Effect, ...] = ()

    def also(self, *effects: Effect) -> Step:
        """The same step with more effects, ahead of its own."""
        return Step(self.state, effects + self.effects)


def instruct(state: PlanState, instruction: Instruction, said: str = "", **changes: Any) -> Step:
    """The state with its next instruction, and a sentence of progress."""
    progress = (*state.progress, said) if said else state.progress
    update = {"instruction": instruction, "step": state.step + 1, "progress": progress, **changes}
    return Step(state.model_copy(update=update))


def finish(state: PlanState, how: OperationState, sentence: str, **changes: Any) -> Step:
    """The end of a plan."""
    return instruct(state, Finish(state=how, sentence=sentence), sentence, **changes)


def unexpected(state: PlanState, event: Event) -> ProtocolViolation:
    """An event that does not answer the plan's instruction."""
    return ProtocolViolation("event", f"{type(event).__name__} does not answer {state.instruction.do}")


def resize_notes(kind: str, state: PlanState, operation: Operation) -> tuple[Note, ...]:
    """A line of the event log for each VM that an operation resized, or one if there is none."""
    purpose = f" for {state.vm}" if state.vm is not None and state.kind == "create" else ""
    return tuple(
        Note(kind, outcome.name, state.host, f"{kind} {outcome.name} on {state.host}{purpose}: {outcome.sentence}")
        for outcome in operation.vms
    ) or (Note(kind, state.vm, state.host, operation.sentence),)
