"""What is said in the place of a host that has nothing to say of a command."""

from __future__ import annotations

from cluster_manager.plans.plans import Preempt, Release, Remove
from ebbtide.messages.operations import Operation, OperationState


def was_gone(request_id: str, instruction: Remove | Release) -> Operation:
    """What an agent would say of a VM that is not there."""
    return _said(request_id, instruction, OperationState.DONE, f"{instruction.vm} was not on {instruction.host}")


def runs_on(request_id: str, instruction: Preempt | Remove, why: str) -> Operation:
    """What an agent would say of a VM whose preemption is called off, of one that was never told."""
    return _said(request_id, instruction, OperationState.PARTIAL, f"{instruction.vm} runs on: {why}")


def _said(request_id: str, instruction: Preempt | Release | Remove, state: OperationState, sentence: str) -> Operation:
    kind = instruction.do
    return Operation(
        request_id=request_id,
        kind="stop" if kind == "preempt" else "delete" if kind == "remove" else kind,
        state=state,
        sentence=sentence,
        vm=instruction.vm,
        host=instruction.host,
        started_at=0.0,
    )
