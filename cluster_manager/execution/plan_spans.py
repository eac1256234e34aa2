"""Spans of plans. Where a plan stands in its trace is stored with it, so that whoever leads goes on with the same one.

The span of the whole plan is recorded once, by the manager that stores its end; those of its steps as they are done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from cluster_manager.plans.plans import (
    Effect,
    EndedTogether,
    Event,
    Finish,
    HostFailed,
    HostsChosen,
    Moved,
    OperationEnded,
    Plan,
    SpawnFollowUp,
    host_of,
)
from cluster_manager.store.rows import StoredPlan
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.tracing.context import TraceContext, read_context
from ebbtide.tracing.spans import Ended, Kind, Span, begin_trace, described, is_on, logged, record, span, within

_NS = 10**9


def traced(state: Plan) -> Plan:
    """A new plan with its place in a trace: beneath what asks for it, if that has one."""
    if not is_on():
        return state
    context, above = begin_trace(_name(state))
    return state.having(trace=tuple(one.header() for one in (context, above) if one is not None))


def place_of(state: Plan) -> TraceContext | None:
    """Where a plan stands; None: in no trace."""
    return read_context(state.trace[0]) if state.trace else None


def with_follow_ups(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """The effects of a step; a plan that goes on with what is left belongs to the same trace."""
    return tuple(replace(e, state=traced(e.state)) if isinstance(e, SpawnFollowUp) else e for e in effects)


async def of_plan(running: StoredPlan, resumed: bool, drive: Callable[[StoredPlan, bool], Awaitable[None]]) -> None:
    """Drive a plan within its trace; its span is recorded if its end has been stored by then."""
    context, began = place_of(running.state), running.state.trace
    with within(context), logged():
        await drive(running, resumed)
    end = running.state.instruction
    if context is None or not isinstance(end, Finish):
        return
    state, missing = running.state, running.state.shortfall
    said = {
        "kind": state.kind,
        "request_id": state.request_id,
        "plan": state.id,
        "vm": state.vm or "",
        "host": state.host or "",
        "state": end.state.value,
        "sentence": end.sentence,
        "steps": state.step,
        "resumed": resumed,
        "shortfall": str(missing.vector()) if missing != Vector() else "",
    }
    record(
        Ended(
            _name(state),
            context,
            read_context(began[1]) if len(began) > 1 else None,
            Kind.SERVER,
            int(running.started_at * _NS),
            int(running.updated_at * _NS),
            described(said),
            failure=end.sentence if end.state is OperationState.FAILED else "",
        )
    )


def of_step(state: Plan, resumed: bool) -> Span:
    """The span of a plan's present instruction."""
    do, host = state.instruction.do, host_of(state.instruction) or ""
    return span(f"step {do}", step=state.step, host=host, vm=state.vm or "", resumed=resumed)


def tell(one: Span, event: Event) -> None:
    """What came of a step."""
    match event:
        case OperationEnded(operation=ended):
            one.set(state=ended.state.value, sentence=ended.sentence)
            if ended.shortfall != Vector():
                one.set(shortfall=str(ended.shortfall.vector()))
        case HostFailed(sentence=sentence):
            one.failure = sentence
        case HostsChosen(hosts=hosts, sentence=sentence):
            one.set(hosts=len(hosts), sentence=sentence)
        case EndedTogether(ended=ended_all):
            for each in ended_all:
                tell(one, each)
        case Moved(sentence=sentence):
            one.set(sentence=sentence)
        case _:
            one.set(answer=type(event).__name__)


def _name(state: Plan) -> str:
    return f"operation {state.kind}"
