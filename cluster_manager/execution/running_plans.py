"""A plan under way, what clients see of it, and how one ends that met a defect."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeGuard

from cluster_manager.errors import busy
from cluster_manager.execution.plan_spans import place_of
from cluster_manager.plans.host_wait import UNLIMITED, MovePlan
from cluster_manager.plans.lifecycle import StopPlan
from cluster_manager.plans.live_migrations import LiveMigrationPlan
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    Arrival,
    AwaitGuests,
    AwaitHost,
    ChooseHosts,
    Finish,
    Note,
    Plan,
    PlanEnded,
    PlanKind,
    Purpose,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    RoomPlan,
    SetVM,
    Step,
    VMPhase,
    finish,
    host_of,
)
from cluster_manager.plans.reading import UnreadPlan
from cluster_manager.plans.reclaim_steps import LifecyclePlan
from cluster_manager.plans.removals import RemovalPlan
from cluster_manager.plans.report_queries import asked_of_hosts
from cluster_manager.plans.returns import ReturnPlan
from cluster_manager.plans.victims import notices_of
from cluster_manager.store.rows import StoredPlan, StoredVM
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import MOST_VMS, Vector
from ebbtide.messages.operations import Operation, OperationState, Reason
from ebbtide.messages.problem_codes import ReasonCode

#: Phases in which a plan is at work on a VM that nothing else may begin beside.
BUSY: Final = (VMPhase.PLACING, VMPhase.DELETING, VMPhase.STOPPING, VMPhase.STARTING, VMPhase.MIGRATING)


def check_free(row: StoredVM, changing: str | None) -> None:
    """:raises RequestError: 409, a plan is at work on a VM.

    :param changing: the request whose plan changes it without a phase of its own (`Operations.changing`).
    """
    by = row.request_id if row.phase in BUSY else changing
    if by is not None:
        doing = row.phase if row.phase in BUSY else "being changed"
        raise busy(f"{row.name} is {doing}: wait for operation {by}", "name")


def check_readable(plan: StoredPlan | None) -> None:
    """:raises RequestError: 409, what a plan under way has done cannot be read, so that nothing can go on from it."""
    if plan is not None and isinstance(plan.state, UnreadPlan) and not plan.state.finished:
        sentence = f"{plan.state.request_id} is at work on {plan.state.vm}, and {plan.state.progress[-1]}"
        raise busy(sentence, "name")


def is_repeated(stored: str, asked: str) -> bool:
    """Whether two fingerprints are of one request: labels may come in another order."""
    (kind, _, body), (other_kind, _, other) = stored.partition("{"), asked.partition("{")
    try:
        return stored == asked or (kind == other_kind and json.loads(f"{{{body}") == json.loads(f"{{{other}"))
    except ValueError:
        return False


def plan_id(kind: PlanKind | Literal["rebalance"], subject: str) -> str:
    """Readable, since it stands in the agents' logs and as the cause of core changes."""
    return f"{kind}-{subject}-{uuid.uuid4().hex[:12]}"


def stopwatch(started_at: float, clock: Callable[[], float]) -> Callable[[], float]:
    """How long a plan has been running. The clock, which may be set at any time, is read only now: it alone knows of
    an earlier run of the manager.

    :param started_at: seconds since the epoch, as ``clock``.
    """
    earlier_s, taken_up = max(clock() - started_at, 0.0), time.monotonic()
    return lambda: earlier_s + time.monotonic() - taken_up


def ended_after(state: Plan, seconds: float) -> Plan:
    """A plan; with how long it took, if it has ended now."""
    end = state.instruction
    if not isinstance(end, Finish):
        return state
    return state.having(instruction=end.model_copy(update={"seconds": round(seconds, 3)}))


def clears(state: Plan) -> bool:
    """Whether a plan only clears away what its VM has left on a host: no VM depends on it."""
    return isinstance(state, MovePlan) and state.only_clears


def clears_up(state: Plan) -> bool:
    """Whether a plan clears away what its VM has left on a host, also where that is the end of a move."""
    return isinstance(state, MovePlan) and state.stage in UNLIMITED


def is_stranded(state: Plan, host: str) -> TypeGuard[LiveMigrationPlan]:
    """Whether a plan waits for a host to say what became of a VM that it was to send, or that has left for it."""
    if not isinstance(state, LiveMigrationPlan) or state.stage not in ("moving", "doubt"):
        return False
    return state.home == host or (state.host == host and state.off_at_home)


def is_at(state: Plan, host: str, held: str | None) -> bool:
    """Whether a plan acts on a host, waits for it, or may come back to it.

    :param held: the host that it holds.
    """
    return host in places(state, held)


def places(state: Plan, held: str | None) -> frozenset[str | None]:
    """The hosts on which a plan acts, for which it waits, or to which it may come back."""
    if state.finished:
        return frozenset()
    now = state.instruction.host if isinstance(state.instruction, AwaitHost) else host_of(state.instruction)
    return frozenset((now,) if clears(state) else (now, held, state.host, state.home)) - {None}


def arrival_of(state: Plan, started_at: float) -> Arrival | None:
    """The room that a plan has chosen where it is; None: none.

    :param started_at: seconds since the epoch.
    """
    size = state.reserved
    if size is None or not isinstance(state, RoomPlan) or state.vm is None:
        return None
    from_s = state.clock_from_s if isinstance(state, PlacementPlan | LiveMigrationPlan) else 0.0
    until_s = started_at + from_s + state.deadline_s
    if not isinstance(state, PlacementPlan) or state.spec.priority is Priority.FIXED:
        return Arrival(state.vm, size, size, until_s)
    return Arrival(state.vm, size, state.spec.allocation(ZERO).minimum.smaller(size), until_s)


def wanted(state: PlacementPlan | MovePlan, purpose: Purpose) -> ResourceVector:
    """The size that a host must be able to hold to be tried: a VM that runs keeps its own."""
    return state.size.vector() if isinstance(state, LiveMigrationPlan) else asked_of_hosts(state.spec, purpose)


def may_be_on(state: Plan) -> str | None:
    """Where the VM of a placement that has ended is, or may be."""
    may = isinstance(state, UnreadPlan) or (isinstance(state, PlacementPlan) and state.starts)
    return state.host if may else None


def how_ended(elapsed_s: float, placement: StoredPlan | None) -> PlanEnded:
    """What is heard of a placement that has ended, or of which nothing is known."""
    if placement is None:
        return PlanEnded(elapsed_s, None)
    end = placement.state.instruction
    done = isinstance(end, Finish) and end.state is OperationState.DONE
    return PlanEnded(elapsed_s, may_be_on(placement.state), done)


def acts(state: Plan, vm: str, host: str | None, holds: bool) -> str:
    """What a plan does now to a VM, or to its host, in one sentence.

    :param host: where the VM is.
    :param holds: whether the plan has that host to itself.
    """
    who = f"{state.kind} {state.request_id}" + (f" (of {state.vm})" if state.vm not in (vm, None) else "")
    match state.instruction:
        case AwaitGuests(vms=vms) if vm in vms:
            return f"{who} waits until its guest answers and it can be deflated"
        case _ if state.vm == vm and (host is None or holds or host_of(state.instruction) != host):
            return f"{who} is at work on it: {state.progress[-1] if state.progress else 'not begun yet'}"
        case _ if not holds:
            return f"{who} waits for {host}"
        case Reclaim(need=need, exclude=exclude, others=others):
            more = f", also for {others} that wait" if others else ""
            among = "this one not" if vm in exclude else "this one among them"
            return f"{who} takes {need.vector()} from the low-priority VMs of {host}{more}: {among}"
        case Reinflate(vms=vms):
            return f"{who} shares the free room of {host} among {', '.join(vms) or 'the VMs that lack something'}"
        case instruction if vm in (gone := notices_of(instruction)):
            return f"{who} preempts it, with {gone[vm]:g} s of notice"
    return f"{who} has {host}: {state.progress[-1] if state.progress else 'not begun yet'}"


def looks(state: Plan) -> bool:
    """Whether a plan looks at a host that it may leave for another: not for longer than it looks for a place.

    There is nothing else to look for where a VM has arrived, or may have been started already.
    """
    if isinstance(state.instruction, ChooseHosts):
        return True
    if not isinstance(state.instruction, ReadHost):
        return False
    if isinstance(state, PlacementPlan):
        return not (state.changed or state.starts)
    return not isinstance(state, MovePlan) or state.stage == "room"


def defect(state: Plan, error: Exception) -> Step:
    """The end of a plan that met a defect: whatever it may have left behind is owed."""
    sentence = f"the manager failed at {state.instruction.do}: {type(error).__name__}"
    if state.host is not None and (end := _settled(state)) is not None:
        owed = ReinflationPending(state.host, True)
        return finish(state, end.state, end.sentence, reason=end.reason).also(
            owed, Note("failed", state.vm, state.host, sentence)
        )
    step = finish(state, OperationState.FAILED, sentence, reason=ReasonCode.INTERNAL)
    if isinstance(state, LifecyclePlan):
        # Its host's reports say what became of it; what it has is never removed for a defect of ours.
        arrived = isinstance(state, MovePlan) and state.stage == "clear"
        where = state.host if arrived else state.home
        waits = isinstance(state, ReturnPlan) or (isinstance(state, MovePlan | StopPlan) and state.waits)
        phase = VMPhase.PREEMPTED if waits else VMPhase.RUNNING
        step = step.also(SetVM(state.vm, phase, where, sentence))
    elif state.vm is not None and state.kind != "target":
        # Before its start was commanded, what has its name there is another VM.
        there = None if isinstance(state, PlacementPlan) and not state.starts else state.host
        step = step.also(SetVM(state.vm, VMPhase.FAILED, there, sentence, owed=there is not None))
    if state.host is not None and not isinstance(state.instruction, ChooseHosts):
        step = step.also(ReinflationPending(state.host, True))
    return step.also(Note("failed", state.vm, state.host, sentence))


def _settled(state: Plan) -> Finish | None:
    """The end of a plan that only has room left to share: what became of its VM is stored, and stands."""
    if isinstance(state, RemovalPlan) and isinstance(state.instruction, Reinflate):
        return Finish(state=OperationState.DONE, sentence=state.progress[-1])
    return state.conclusion if isinstance(state, RoomPlan) else None


def operation_of(plan: StoredPlan, now: float, at: int = 0, told: Sequence[str] = ()) -> Operation:
    """A plan as clients see it, with the last of its sentences.

    :param now: seconds since the epoch.
    :param at: after how many of its own sentences those come which its host has ``told``.
    """
    state = plan.state
    progress = (*state.progress[:at], *told, *state.progress[at:])
    end = state.instruction if isinstance(state.instruction, Finish) else None
    took_s = end.seconds if end is not None else plan.elapsed_s() if plan.elapsed_s is not None else None
    if took_s is None:
        took_s = max((plan.updated_at if end is not None else now) - plan.started_at, 0.0)
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
        seconds=round(took_s, 3),
        progress=progress[-MOST_VMS:],
        reason=_reason(state),
        trace_id=trace.trace if (trace := place_of(state)) is not None and trace.sampled else None,
    )


def _reason(state: Plan) -> Reason | None:
    """Why a plan did not do all that it was asked for; None: it did, or has not ended."""
    end = state.instruction
    if not isinstance(end, Finish) or end.state not in (OperationState.FAILED, OperationState.PARTIAL):
        return None
    missing = state.shortfall
    known = ReasonCode.SHORTFALL if missing != Vector() else ReasonCode.FAILED
    asked = state.spec.nominal if isinstance(state, PlacementPlan) else None
    return Reason(code=end.reason or known, asked=asked, missing=missing)


def may_have_waited(state: Plan) -> int:
    """How likely a plan that an earlier run left was waiting for its host instead of holding it: 0 not at all.

    One that is past its first instruction had a host before; one that goes from host to host may wait for the next.
    """
    if state.step == 1:
        return 2
    return int(isinstance(state, MovePlan | RemovalPlan))
