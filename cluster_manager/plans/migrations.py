"""State machine that moves a VM: find a place, stop it on its host, start it elsewhere.

Never two running: it is started elsewhere only after its host has said that it is off, and is its owner's to start on
its old host only after the other host has said that it is not there, or has been waited for long enough
(`cluster_manager.plans.host_wait`). A migration that fails leaves the VM and its disk on its host, off if it had been
stopped for this, and says so.
"""

from __future__ import annotations

from typing import Literal

from cluster_manager.defaults import GONE_S
from cluster_manager.plans.host_wait import MovePlan, hand_over, wait
from cluster_manager.plans.migration_cleanup import UP, advance_clearing, arrived, stands
from cluster_manager.plans.plans import (
    MOST_HOSTS,
    MOST_LAPSES,
    AwaitHost,
    ChooseHosts,
    ClaimVM,
    Create,
    Event,
    Forgotten,
    HostBack,
    HostFailed,
    HostRead,
    HostsChosen,
    Note,
    OperationEnded,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    Remove,
    SetVM,
    Step,
    Stop,
    VMPhase,
    instruct,
    unexpected,
)
from cluster_manager.plans.reclaim_steps import (
    again,
    at,
    concluded,
    end,
    make_room,
    reclaimed,
    share_room,
    shared,
    status_in,
    why_no_room,
)
from cluster_manager.plans.report_queries import demand_of, lacks
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import is_known
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMSpec, VMState, VMStatus

DONE, FAILED = OperationState.DONE, OperationState.FAILED


class MigrationPlan(MovePlan):
    """State of the plan that moves a VM."""

    kind: Literal["migrate"] = "migrate"

    @property
    def claim(self) -> ClaimVM:
        return ClaimVM(VMPhase.MIGRATING)

    def next_step(self, event: Event) -> Step:
        return advance_migration(self, event)


def start_migration(
    plan_id: str,
    request: MigrateRequest,
    spec: VMSpec,
    home: str,
    *,
    running: bool,
    stopped: bool | None = None,
    policy: PlacementPolicy,
    gone_s: float = GONE_S,
    waits: bool = False,
) -> MigrationPlan:
    """A migration before its first instruction is carried out.

    :param stopped: whether it was stopped on command; None: if it does not run. One that powered off by itself may be
        started again at any moment, so its host is told to keep it off before it is started elsewhere.
    :param gone_s: for how long after the request's deadline the VM waits for a host that does not answer.
    :param waits: whether it waits for room after a preemption: where it does not come up it goes on waiting.
    """
    return MigrationPlan(
        id=plan_id,
        request_id=request.request_id,
        instruction=ChooseHosts(purpose="place") if request.host is None else ReadHost(host=request.host),
        vm=spec.name,
        host=request.host,
        bound_to=home,
        deadline_s=request.deadline_s,
        spec=spec,
        policy=policy,
        limit_s=request.limit_s,
        off=not running if stopped is None else stopped,
        was_running=running,
        lose_disk=request.lose_disk,
        gone_s=gone_s,
        waits=waits,
    )


def advance_migration(state: MovePlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    match state.instruction, event:
        case ChooseHosts(), HostsChosen():
            step = _next(state.having_chosen(event))
            if event.first is None or not isinstance(step.state.instruction, ReadHost):
                return step
            return step.state.next_step(event.first).also(*step.effects)
        case Stop(), (OperationEnded() | HostFailed()):
            return _on_stopped(state, event)
        case Reinflate(), (OperationEnded() | HostFailed()):
            if state.conclusion is not None:
                return concluded(state, event)
            said, owed = shared(state, event)
            return _next(state.having(progress=(*state.progress, said))).also(owed)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
    match state.stage:
        case "room":
            return _finding_room(state, event)
        case "unsure" | "clean":
            return _in_doubt(state, event)
        case "clear" | "left":
            return advance_clearing(state, event)
    raise unexpected(state, event)


def _next(state: MovePlan) -> Step:
    """The next host in line; else the end."""
    if state.hosts_left and state.tried < MOST_HOSTS:
        host, *rest = state.hosts_left
        return at(state, host, stage="room", hosts_left=tuple(rest), tried=state.tried + 1)
    why = "; ".join(dict.fromkeys(state.failures)) or "no other host is ready"
    return _give_up(state, why)


def _finding_room(state: MovePlan, event: Event) -> Step:
    match state.instruction, event:
        case ReadHost(host=asked), (HostRead() | HostFailed()) if asked == state.home:
            return _on_reading_home(state, event)
        case ReadHost(), HostRead(report=report):
            return _on_reading(state, report, event.elapsed_s)
        case ((ReadHost() | Reclaim()), HostFailed(uncertain=uncertain)):
            return _leave(state, event.sentence, reachable=not uncertain, code=event.code)
        case Create(), OperationEnded(operation=operation):
            if operation.state is DONE:
                return arrived(state, operation.sentence)
            return _clean(state, f"{state.host}: {operation.sentence}")
        case Create(), HostFailed(uncertain=False):
            # The only start was refused at once: nothing is there.
            unstarted = state.having(starts=state.starts - 1)
            return _leave(unstarted, event.sentence, code=event.code)
        case Create(host=host), HostFailed():
            return wait(state, event.sentence, "unsure", host, event.elapsed_s)
        case Create(), Forgotten(lapse=lapse):
            return again(state, f"{state.host} does not know of the start", lapses=state.lapses + lapse)
    raise unexpected(state, event)


def _on_reading(state: MovePlan, report: HostReport, elapsed_s: float) -> Step:
    spec = state.spec
    present = status_in(report, spec.name)
    if present is not None and not state.starts:
        return _leave(state, f"{report.id} has a VM named {spec.name} that is another one")
    if present is not None:
        return _found(state, present, elapsed_s)
    if state.starts and state.lapses >= MOST_LAPSES:
        return _clean(state, f"{report.id} forgets that it was told to start {spec.name}")
    if why := refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE):
        return _leave(state, why)
    if why := lacks(report, spec):
        return _leave(state, why)
    room = make_room(state, report, demand_of(spec, report), state.deadline_s - elapsed_s)
    if isinstance(room, Step):
        return room
    if room:
        return _leave(state, room, code=why_no_room(report))
    if not state.off:
        stop = Stop(host=state.home, step=state.step, vm=spec.name, limit_s=state.limit_s)
        return instruct(state, stop, f"{report.id} has room: stopping {spec.name} on {state.home}")
    said = f"starting {spec.name} on {report.id}"
    return instruct(state, Create(host=report.id, step=state.step), said, starts=state.starts + 1)


def _on_stopped(state: MovePlan, event: OperationEnded | HostFailed) -> Step:
    vm, home = state.vm, state.home
    if isinstance(event, OperationEnded) and event.operation.state is not FAILED:
        said = event.operation.sentence
        step = again(state, said, off=True, stage="room")
        if not state.lose_disk:
            step = instruct(state, ReadHost(host=home), said, off=True, stage="room")
        return step.also(SetVM(vm, VMPhase.MIGRATING, home, said), Note("stopped", vm, home, said))
    why = event.sentence
    sentence = f"{vm} stays on {home}: {why}"
    if isinstance(event, HostFailed) and event.uncertain:
        sentence = f"{vm} stays on {home} and may have been stopped: {why}; {home}'s next report says"
    phase = VMPhase.RUNNING if state.was_running else VMPhase.STOPPED
    return end(state, FAILED, sentence, _back(state, phase, sentence), reason=event.code)


def _on_reading_home(state: MovePlan, event: HostRead | HostFailed) -> Step:
    """It is off: whether it was suspended while room was made for it is for its host to say."""
    if isinstance(event, HostRead):
        found = status_in(event.report, state.vm)
        if found is None or found.saved_mib is None:
            return again(state)
        why, code = "its memory was saved there meanwhile, and would stay behind", None
    else:
        why, code = event.sentence, event.code
    sentence = f"{state.vm} stays off on {state.home}: {why}"
    return end(state, FAILED, sentence, _back(state, state.off_phase, sentence), reason=code)


def _back(state: MovePlan, phase: VMPhase, sentence: str) -> SetVM:
    """The row of a VM that did not move. One that was preempted meanwhile waits for room, and so does one that ran
    although it was waiting; one that was waiting already says why it still does.
    """
    return SetVM(state.vm, phase, state.home, sentence, unless_preempted=phase is not VMPhase.PREEMPTED)


def _leave(state: MovePlan, failure: str, reachable: bool = True, code: ReasonCode | None = None) -> Step:
    """Give this host up: undo what was reclaimed there, then the next one."""
    if state.starts:
        # A start that the host forgot may have been doubled on its way.
        return _clean(state, failure)
    state = state.failing(failure, code)
    if state.reclaims and reachable:
        return share_room(state, failure, None)
    step = _next(state.having(progress=(*state.progress, failure)))
    if not state.reclaims:
        return step
    assert state.host is not None, "at a host"
    return step.also(ReinflationPending(state.host, True))


def _give_up(state: MovePlan, why: str) -> Step:
    """Nowhere to go: it stays on its host, off if it has been stopped for this."""
    phase = VMPhase.RUNNING if state.was_running and not state.off else state.off_phase
    sentence = f"{state.vm} stays {'off ' if state.off else ''}on {state.home}: {why}"
    code = state.code or ReasonCode.NO_HOST_READY
    return end(state, FAILED, sentence, _back(state, phase, sentence), share=False, reason=code)


# --- unsure, or to be cleaned ----------------------------------------------------------------------------------------


def _in_doubt(state: MovePlan, event: Event) -> Step:
    """The VM may be on the new host: only when that is known it is its owner's to start on the old one."""
    assert state.host is not None, "at a host"
    vm, host = state.vm, state.host
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            present = status_in(report, vm)
            if present is not None:
                return _found(state, present, event.elapsed_s)
            return _clean(state, f"{host}: {vm} was not started")
        case ReadHost(), HostFailed():
            return wait(state, event.sentence, "unsure", host, event.elapsed_s)
        case AwaitHost(), HostBack():
            if state.stage == "unsure":
                return instruct(state, ReadHost(host=host))
            return instruct(state, Remove(host=host, step=state.step, vm=vm, reason="delete"))
        case AwaitHost(), HostFailed():
            return hand_over(state, event.sentence)
        case Remove(), OperationEnded(operation=operation) if operation.state is not FAILED:
            why = "; ".join(dict.fromkeys(state.failures)) or f"{vm} is not on {host}"
            sentence = f"{vm} did not move and is off on {state.home}, where it can be started: {why}"
            return end(state, FAILED, sentence, _back(state, state.off_phase, sentence))
        case Remove(), (OperationEnded() | HostFailed()):
            return wait(state, event.sentence, "clean", host, event.elapsed_s)
    raise unexpected(state, event)


def _found(state: MovePlan, present: VMStatus, elapsed_s: float) -> Step:
    """The VM is on the new host: it has come up there, or goes."""
    if not is_known(present.state) or present.state is VMState.STARTING:
        # Whatever it is, it may have come up when it is looked at next.
        return wait(state, stands(present), "unsure", present.host, elapsed_s, rest="unsure")
    if present.state in (*UP, VMState.PAUSED):
        return arrived(state, stands(present))
    return _clean(state, f"{present.host}: {present.name} did not come up")


def _clean(state: MovePlan, failure: str) -> Step:
    """A start that failed may leave a half-made VM, and one that was lost may come late: it goes before anything else.

    The removal is also the later command that fences such a start.
    """
    assert state.host is not None, "at a host"
    remove = Remove(host=state.host, step=state.step, vm=state.vm, reason="delete")
    return instruct(state, remove, failure, failures=(*state.failures, failure), stage="clean")
