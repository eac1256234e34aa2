"""What the log says of a plan's step: where, for which request, and in the end how it ended."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from cluster_manager.plans.plans import Finish, SetPreempted, Step
from ebbtide.messages.operations import OperationState

log = structlog.get_logger()


def tell(step: Step, sentences: Sequence[str]) -> None:
    """Log what a step has come to; a failure and a preemption as warnings.

    :param sentences: of its progress that were not told before.
    """
    state, end = step.state, step.state.instruction
    plan = {"plan": state.id, "request_id": state.request_id, "kind": state.kind, "vm": state.vm, "host": state.host}
    for effect in step.effects:
        if isinstance(effect, SetPreempted):
            log.warning("preempted", vm=effect.name, host=effect.host, plan=state.id, why=effect.sentence)
    last = len(sentences) - 1
    for number, sentence in enumerate(sentences):
        if number < last or not isinstance(end, Finish):
            log.info("plan", **plan, why=sentence)
        else:
            level = log.warning if end.state is OperationState.FAILED else log.info
            level("plan", **plan, state=end.state.value, why=sentence)
