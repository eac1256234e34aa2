"""A plan under way, what clients see of it, and how one ends that met a defect."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from cluster_manager.patience import TIMELESS
from cluster_manager.plans import (
    AwaitHost,
    ChooseHosts,
    Finish,
    Note,
    OweReinflation,
    PlanKind,
    PlanState,
    ReadHost,
    SetVM,
    VMPhase,
    host_of,
)
from cluster_manager.rows import StoredPlan, StoredVM
from cluster_manager.steps import Step, finish
from deflation.messages import Operation, OperationState


@dataclass(slots=True)
class RunningPlan:
    """A plan under way."""

    plan: StoredPlan
    #: Set after each step; replaced by a new one.
    news: asyncio.Event = field(default_factory=asyncio.Event)
    #: The host whose lock it holds.
    holds: str | None = None

    @property
    def state(self) -> PlanState:
        return self.plan.state


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan before its first action, with what becomes of its VM's row."""

    state: PlanState
    #: A new row; None: the VM has one.
    row: StoredVM | None = None
    phase: VMPhase | None = None


def plan_id(kind: PlanKind, subject: str) -> str:
    """Readable, since it stands in the agents' logs and as the cause of core changes."""
    return f"{kind}-{subject}-{uuid.uuid4().hex[:12]}"


def clears(state: PlanState) -> bool:
    """Whether a plan only clears away what its VM has left on a host: nobody's VM depends on it."""
    return state.life is not None and state.life.rest and state.life.stage in TIMELESS


def is_at(state: PlanState, host: str) -> bool:
    """Whether a plan acts on a host, waits for it, or may come back to it."""
    if state.finished:
        return False
    now = state.instruction.host if isinstance(state.instruction, AwaitHost) else host_of(state.instruction)
    if clears(state):
        return now == host
    return host in (now, state.host, state.life.home if state.life is not None else None)


def looks(state: PlanState) -> bool:
    """Whether a plan looks at a host that it may leave for another: not for longer than it looks for a place.

    There is nothing else to look for where a VM has arrived, is to run at home again, or may have been started already.
    """
    if not isinstance(state.instruction, ReadHost) or (state.kind == "create" and (state.changed or state.starts)):
        return False
    return state.life is None or state.life.stage == "room"


def defect(state: PlanState, error: Exception) -> Step:
    """The end of a plan that met a defect: whatever it may have left behind is owed."""
    sentence = f"the manager failed at {state.instruction.do}: {type(error).__name__}"
    step = finish(state, OperationState.FAILED, sentence)
    if state.life is not None:
        # Its host's reports say what became of it; what it has is never removed for a defect of ours.
        where = state.host if state.life.stage == "clear" else state.life.home
        step = step.also(SetVM(state.vm or "", VMPhase.RUNNING, where, sentence))
    elif state.vm is not None and state.kind != "target":
        # Before its start was commanded, what has its name there is somebody else's.
        there = state.host if state.kind != "create" or state.starts else None
        step = step.also(SetVM(state.vm, VMPhase.FAILED, there, sentence, owed=there is not None))
    if state.host is not None and not isinstance(state.instruction, ChooseHosts):
        step = step.also(OweReinflation(state.host, True))
    return step.also(Note("failed", state.vm, state.host, sentence))


def operation_of(plan: StoredPlan, now: float) -> Operation:
    """A plan as clients see it.

    :param now: seconds since the epoch.
    """
    state = plan.state
    end = state.instruction if isinstance(state.instruction, Finish) else None
    last = state.progress[-1] if state.progress else "not begun yet"
    return Operation(
        request_id=state.request_id,
        kind=state.kind,
        state=end.state if end is not None else OperationState.RUNNING,
        sentence=end.sentence if end is not None else last,
        vm=state.vm,
        host=state.host,
        vms=state.outcomes,
        shortfall=state.shortfall,
        started_at=plan.started_at,
        seconds=round((plan.updated_at if end is not None else now) - plan.started_at, 3),
        progress=state.progress,
    )
