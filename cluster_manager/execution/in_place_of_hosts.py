"""What is said in the place of a host that has nothing to say of a command."""

from __future__ import annotations

from cluster_manager.plans.plans import Preempt, Release, Remove
from ebbtide.messages.operations import Operation, OperationState


def gone(request_id: str, instruction: Remove | Release) -> Operation:
    """What an agent would say of a VM that is not there."""
    return Operation(
        request_id=request_id,
        kind="delete" if isinstance(instruction, Remove) else "release",
        state=OperationState.DONE,
        sentence=f"{instruction.vm} was not on {instruction.host}",
        vm=instruction.vm,
        host=instruction.host,
        started_at=0.0,
    )


def spared(request_id: str, instruction: Preempt | Remove, why: str) -> Operation:
    """What an agent would say of a VM whose preemption is called off, of one that was never told."""
    return Operation(
        request_id=request_id,
        kind="delete" if isinstance(instruction, Remove) else "stop",
        state=OperationState.PARTIAL,
        sentence=f"{instruction.vm} runs on: {why}",
        vm=instruction.vm,
        host=instruction.host,
        started_at=0.0,
    )
