"""State machine that moves a VM while it runs: find room at its size, keep it there, have its host send it.

The VM's size is fixed while it moves. Its hosts' hypervisors let it run on the one only once it does not run on the
other; this plan never has anything started, and has nothing removed on the new host before the old one has said that
the VM runs there. What is not known is asked: the old host, and if that says that it is off or does not answer, also
where it only does not say how the move ended, the new one. A move that is called off leaves the VM where it runs.
"""

from __future__ import annotations

from typing import Final, Literal, Self
from urllib.parse import urlsplit

from cluster_manager.defaults import GONE_S
from cluster_manager.plans.host_wait import CLEARING, MovePlan, once
from cluster_manager.plans.migration_cleanup import advance_clearing, arrived, has_arrived, stands
from cluster_manager.plans.plans import (
    MOST_HOSTS,
    Arrive,
    AwaitHost,
    ChooseHosts,
    ClaimVM,
    Depart,
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
    SpawnFollowUp,
    Step,
    VMPhase,
    finish,
    instruct,
    unexpected,
)
from cluster_manager.plans.reclaim_steps import (
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
from cluster_manager.plans.report_queries import demand_of, lacks, missing_on, without_image
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector, is_known
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.migrations import MigrationAddress, is_own
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMSpec, VMState, VMStatus

DONE, FAILED = OperationState.DONE, OperationState.FAILED
#: How often the new host is asked while the old one is silent, seconds.
LOOK_S: Final = 10.0


class LiveMigrationPlan(MovePlan):
    """State of the plan that moves a running VM."""

    kind: Literal["live-migrate"] = "live-migrate"
    copy_storage: bool = False
    bandwidth_mib_s: float = 0.0
    #: Whether VMs of its new host may shrink for it.
    shrinks: bool = True
    #: Since when the deadline runs, as ``elapsed_s``.
    clock_from_s: float = 0.0
    #: What its host says of it: it is the same on both.
    size: Vector = Vector()
    boot_memory_mib: float = 0.0
    generation: int = 0
    uuid: str = ""
    #: Where its new host takes it, once that has been read.
    address: MigrationAddress | None = None
    #: The step of the command to its host to send it, which is repeated under the same request id; 0: not given yet.
    sent: int = 0
    #: Whether that command has been answered; and whether its old host has said that the VM is off there.
    answered: bool = False
    off_at_home: bool = False
    #: Whether its new host was to remove it then, and did not say that it has: that it is off there proves nothing now.
    not_removed: bool = False

    @property
    def claim(self) -> ClaimVM:
        return ClaimVM(VMPhase.MIGRATING)

    @property
    def reserved(self) -> ResourceVector | None:
        return self.size.vector() if self.stage == "room" and self.conclusion is None else None

    def left_there(self) -> Self:
        """The plan that removes what was kept for it on its new host, when its old one is gone for good: there is no
        VM there any more.
        """
        assert self.host is not None, "at a host"
        return self.continuation(self.host, "left", CLEARING).having(reclaims=0, off_at_home=True)

    def lost_there(self, why: str) -> Step:
        """Its end when its new host is gone for good, after its old one has said that the VM is off: its owner's."""
        sentence = f"{self.vm} is off on {self.home}, where it can be started: {why}"
        row = SetVM(self.vm, VMPhase.STOPPED, self.home, sentence, unless_preempted=True)
        return finish(self, FAILED, sentence).also(row, Note("failed", self.vm, self.home, sentence))

    def next_step(self, event: Event) -> Step:
        return advance_live_migration(self, event)


def start_live_migration(
    plan_id: str,
    request: MigrateRequest,
    spec: VMSpec,
    home: str,
    *,
    policy: PlacementPolicy,
    gone_s: float = GONE_S,
    why: str = "",
    shrinks: bool = True,
) -> LiveMigrationPlan:
    """A live migration before its first instruction is carried out.

    :param why: the manager moves it by itself.
    :param shrinks: whether VMs of its new host may shrink for it.
    """
    return LiveMigrationPlan(
        id=plan_id,
        request_id=request.request_id,
        instruction=ReadHost(host=home),
        vm=spec.name,
        bound_to=home,
        hosts_left=() if request.host is None else (request.host,),
        deadline_s=request.deadline_s,
        spec=spec,
        policy=policy,
        stage="source",
        copy_storage=request.copy_storage,
        bandwidth_mib_s=request.bandwidth_mib_s,
        gone_s=gone_s,
        why=why,
        shrinks=shrinks,
        progress=(why if shrinks else f"rebalancing: {why}",) if why else (),
    )


def advance_live_migration(state: LiveMigrationPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    match state.instruction, event:
        case ChooseHosts(), HostsChosen():
            # The first one is read again, as the others are.
            return _next(state.having_chosen(event))
        case Reinflate(), (OperationEnded() | HostFailed()):
            if state.conclusion is not None:
                return concluded(state, event)
            said, owed = shared(state, event)
            return _next(state.having(progress=(*state.progress, said))).also(owed)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
    match state.stage:
        case "left" if state.off_at_home and isinstance(event, HostRead) and _came_up(state, event):
            return _left_alone(state, event.report)
        case "source":
            return _on_source(state, event)
        case "room":
            return _finding_room(state, event)
        case "moving":
            return _moving(state, event)
        case "doubt":
            return _in_doubt(state, event)
        case "abort":
            return _aborting(state, event)
        case _:
            return advance_clearing(state, event)


# --- before it moves -------------------------------------------------------------------------------------------------


def _on_source(state: LiveMigrationPlan, event: Event) -> Step:
    match event:
        case HostRead(report=report):
            found = status_in(report, state.vm)
            if why := cannot_leave(report, found) if state.why else cannot_move(report, found):
                return _stays(state, why)
            assert found is not None, "it can move"
            assert found.uuid is not None, "it can move"
            if not found.current.vector().fits_in(most := _most(state)):
                # Its new host's VMs would shrink for it.
                return _stays(state, f"{report.id} says that it has {found.current.vector()}, but {most} were sold")
            # Its host sends one VM after the other. What an arrival waits for has its time from the start.
            clock_from_s = 0.0 if state.why else event.elapsed_s
            state = _as_it_is(state, found).having(clock_from_s=clock_from_s, uuid=found.uuid)
            if state.hosts_left:
                return _next(state)
            return instruct(state, ChooseHosts(purpose="deflated"), stage="room")
        case HostFailed():
            return _stays(state, event.sentence, event.code)
    raise unexpected(state, event)


def _most(state: LiveMigrationPlan) -> ResourceVector:
    return (state.spec.ceiling or state.spec.nominal).vector()


def _as_it_is(state: LiveMigrationPlan, found: VMStatus) -> LiveMigrationPlan:
    return state.having(size=found.current, boot_memory_mib=found.boot_memory_mib, generation=found.generation)


def cannot_move(report: HostReport, found: VMStatus | None) -> str:
    """Why a VM cannot leave its host while it runs; empty if it can."""
    if found is None or found.state is not VMState.RUNNING:
        return f"it does not run on {report.id} now ({found.state if found is not None else 'not there'})"
    if found.adopted:
        return "it is adopted: its domain stays where it is"
    if report.migration is None:
        return f"{report.id} takes part in no live migration"
    if found.at_next_start is not None:
        return "what it was sold last takes effect at its next start"
    return "" if found.uuid else f"{report.id} has not looked at it yet"


def cannot_leave(report: HostReport, found: VMStatus | None) -> str:
    """Why the manager does not move a VM by itself; empty if it does."""
    if why := cannot_move(report, found):
        return why
    if report.moves_by_command_only:
        return report.moves_by_command_only
    if found is not None and found.pressure:
        return f"it is under pressure ({found.pressure})"
    return refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE)


def _next(state: LiveMigrationPlan) -> Step:
    """The next host in line; else the end."""
    if state.hosts_left and state.tried < MOST_HOSTS:
        host, *rest = state.hosts_left
        return at(state, host, stage="room", hosts_left=tuple(rest), tried=state.tried + 1)
    why = "; ".join(dict.fromkeys(state.failures)) or "no other host is ready"
    return _stays(state, why, state.code or ReasonCode.NO_HOST_READY)


def _finding_room(state: LiveMigrationPlan, event: Event) -> Step:
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            return _on_reading(state, report, event.elapsed_s)
        case ((ReadHost() | Reclaim()), HostFailed(uncertain=uncertain)):
            return _leave(state, event.sentence, reachable=not uncertain, code=event.code)
        case Arrive(), OperationEnded(operation=operation) if operation.state is DONE:
            return _depart(state, operation.sentence)
        case Arrive(), (OperationEnded() | HostFailed()):
            # Also where it was refused: the removal fences an arrival that comes late.
            return _abort(state.failing(event.sentence, event.code), event.sentence)
    raise unexpected(state, event)


def _on_reading(state: LiveMigrationPlan, report: HostReport, elapsed_s: float) -> Step:
    spec = state.spec
    if status_in(report, spec.name) is not None:
        return _leave(state, f"{report.id} has a VM named {spec.name} that is another one")
    if why := refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE):
        return _leave(state, why)
    if why := cannot_take(report):
        return _leave(state, why)
    if why := lacks(report, spec):
        return _leave(state, why)
    demand = demand_of(spec, report, state.size.vector())
    if not state.shrinks and not (missing := missing_on(report, demand)).is_zero():
        said = f"{report.id}: short of {missing}, and nobody shrinks to rebalance"
        return _leave(state, said, code=ReasonCode.NO_ROOM)
    room = make_room(state, report, demand, state.clock_from_s + state.deadline_s - elapsed_s)
    if isinstance(room, Step):
        return room
    if room:
        return _leave(state, room, code=why_no_room(report))
    arrive = Arrive(
        host=report.id,
        step=state.step,
        spec=spec,
        size=state.size,
        boot_memory_mib=state.boot_memory_mib,
        generation=state.generation,
        uuid=state.uuid,
    )
    return instruct(state, arrive, f"{report.id} has room for {spec.name}", address=report.migration)


def cannot_take(report: HostReport) -> str:
    """Why a host takes no VM that runs: another host is sent to no address but that of its own agent."""
    if why := without_image(report):
        return why
    address = report.migration
    if address is None:
        return f"{report.id} takes part in no live migration"
    if is_own(report.url, address.uri, address.listen):
        return ""
    registered, named = urlsplit(report.url).hostname, urlsplit(address.uri)
    if named.scheme.endswith("+unix"):
        return f"{report.id} is on another machine, and has no socket here"
    return f"{report.id} is at {registered}, and wants VMs to be sent to {named.hostname} and {address.listen}"


def _depart(state: LiveMigrationPlan, said: str) -> Step:
    assert state.address is not None, "its new host was read"
    assert state.host is not None, "at a host"
    step = state.sent or state.step
    depart = Depart(
        host=state.home,
        step=step,
        vm=state.vm,
        to=state.host,
        address=state.address,
        copy_storage=state.copy_storage,
        bandwidth_mib_s=state.bandwidth_mib_s,
        deadline_s=state.deadline_s,
        size=state.size,
    )
    return instruct(state, depart, progress=once(state.progress, said), stage="moving", sent=step)


def _leave(state: LiveMigrationPlan, failure: str, reachable: bool = True, code: ReasonCode | None = None) -> Step:
    """Give this host up: undo what was reclaimed there, then the next one."""
    state = state.failing(failure, code)
    if state.reclaims and reachable:
        return share_room(state, failure, None)
    step = _next(state.having(progress=(*state.progress, failure)))
    if not state.reclaims:
        return step
    assert state.host is not None, "at a host"
    return step.also(ReinflationPending(state.host, True))


def _stays(state: LiveMigrationPlan, why: str, code: ReasonCode | None = None) -> Step:
    """It never began to move."""
    sentence = f"{state.vm} stays on {state.home}: {why}"
    row = SetVM(state.vm, VMPhase.RUNNING, state.home, sentence, unless_preempted=True)
    return end(state, FAILED, sentence, row, share=False, reason=code)


# --- while it moves --------------------------------------------------------------------------------------------------


def _moving(state: LiveMigrationPlan, event: Event) -> Step:
    match event:
        case OperationEnded(operation=operation) if operation.state is DONE:
            return arrived(state, operation.sentence)
        case OperationEnded() | HostFailed(uncertain=False):
            # Where it is now its host says itself.
            why = event.sentence
            failures = once(state.failures, why)
            return instruct(state, ReadHost(host=state.home), why, failures=failures, stage="doubt", answered=True)
        case HostFailed():
            # The command may never be answered, although the old host reports.
            assert state.host is not None, "at a host"
            progress = once(state.progress, event.sentence)
            return instruct(state, ReadHost(host=state.host), progress=progress, stage="doubt")
    raise unexpected(state, event)


def _in_doubt(state: LiveMigrationPlan, event: Event) -> Step:
    """Where is it? Its old host is asked first; as long as that has not answered the command, by the command itself,
    and after each time the new one.
    """
    assert state.host is not None, "at a host"
    vm, host, home = state.vm, state.host, state.home
    match state.instruction, event:
        case AwaitHost(host=asked), HostBack():
            if asked == home and not state.answered:
                return _depart(state, f"{home} is back")
            return instruct(state, ReadHost(host=asked))
        case AwaitHost(), HostFailed():
            return instruct(state, ReadHost(host=host))
        case ReadHost(host=asked), HostRead(report=report) if asked == home:
            found = status_in(report, vm)
            if found is not None and found.state is VMState.MIGRATING:
                return _await(state, f"{vm} is still moving", home, event.elapsed_s)
            if found is not None and not is_known(found.state):
                return _await(state, stands(found), home, event.elapsed_s)
            if found is not None and found.state is not VMState.STOPPED:
                if _has_grown(state, found, event.elapsed_s):
                    # Not sent: when what was kept there has gone, the same host is asked for more.
                    line, tried = (host, *state.hosts_left), state.tried - 1
                    state = _as_it_is(state, found).having(sent=0, answered=False, hosts_left=line, tried=tried)
                return _abort(state, f"{vm} runs on {home}")
            progress = once(state.progress, f"{vm} is off on {home}")
            return instruct(state, ReadHost(host=host), progress=progress, off_at_home=True)
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            off = found is not None and found.state is VMState.STOPPED
            if found is not None and has_arrived(found) and not (off and state.not_removed):
                return arrived(state, stands(found))
            if not state.off_at_home:
                return _await(state, f"{vm} does not run on {host}", home, event.elapsed_s)
            if found is None or found.state is VMState.MIGRATING:
                return _abort(state, f"{vm} is off on {home}, and did not move")
            # It may have come up there: nothing is removed before that host says more.
            return _await(state, stands(found), host, event.elapsed_s)
        case ReadHost(host=asked), HostFailed():
            return _await(state, event.sentence, asked if state.answered else home, event.elapsed_s)
    raise unexpected(state, event)


def _has_grown(state: LiveMigrationPlan, found: VMStatus, elapsed_s: float) -> bool:
    """Whether a VM was not sent since it has more by now than room was made for, and there is time to make more.

    On a draining host VMs grow as others leave. Each time it has more, at most what it was sold, so this ends.
    """
    now = found.current.vector()
    in_time = elapsed_s < state.clock_from_s + state.deadline_s
    return state.answered and in_time and not now.fits_in(state.size.vector()) and now.fits_in(_most(state))


def _await(state: LiveMigrationPlan, why: str, host: str, elapsed_s: float) -> Step:
    """Wait until a host reports; now and then the new one is asked whether the VM runs there.

    For as long as it takes: the VM is on one of the two, and only they can say on which.
    """
    wait = AwaitHost(host=host, until_s=elapsed_s + LOOK_S)
    return instruct(state, wait, progress=once(state.progress, f"{why}: waiting for {host}"), stage="doubt")


def _came_up(state: LiveMigrationPlan, read: HostRead) -> bool:
    """Whether it is on its new host after all, and on no record: its old one was forgotten with it meanwhile."""
    found = status_in(read.report, state.vm)
    arrived_there = found is not None and found.uuid == state.uuid and has_arrived(found)
    return arrived_there and state.vm not in read.recorded


def _left_alone(state: LiveMigrationPlan, report: HostReport) -> Step:
    vm, host, found = state.vm, state.host, status_in(report, state.vm)
    assert found is not None, "it came up"
    said = (
        f"{stands(found)}, where it came up when {state.home} was forgotten with it: it is left alone there, on no "
        f"record; `ebb vm adopt {vm} --host {host}` puts it back"
    )
    return finish(state, DONE, said).also(Note("failed", vm, host, said))


# --- called off ------------------------------------------------------------------------------------------------------


def _abort(state: LiveMigrationPlan, why: str) -> Step:
    """It does not move to this host: what was kept for it there goes."""
    assert state.host is not None, "at a host"
    remove = Remove(host=state.host, step=state.step, vm=state.vm, reason="delete")
    progress, failures = once(state.progress, why), once(state.failures, why)
    return instruct(state, remove, progress=progress, failures=failures, stage="abort")


def _aborting(state: LiveMigrationPlan, event: Event) -> Step:
    assert state.host is not None, "at a host"
    match event:
        case OperationEnded(operation=operation) if operation.state is not FAILED:
            if state.sent:
                return _called_off(state)
            return share_room(state, "", None) if state.reclaims else _next(state)
        case OperationEnded() | HostFailed():
            if state.off_at_home:
                # It may have come up there after all.
                return _await(state.having(not_removed=True), event.sentence, state.host, event.elapsed_s)
            left = state.continuation(state.host, "left").having(reclaims=0)
            return _called_off(state.having(reclaims=0)).also(SpawnFollowUp(left))
    raise unexpected(state, event)


def _called_off(state: LiveMigrationPlan) -> Step:
    vm, home = state.vm, state.home
    phase = VMPhase.STOPPED if state.off_at_home else VMPhase.RUNNING
    stands = f"{vm} {'is off' if state.off_at_home else 'stays'} on {home}"
    why = "; ".join(dict.fromkeys(failure.removeprefix(f"{stands}: ") for failure in state.failures))
    sentence = f"{stands}: {why}"
    return end(state, FAILED, sentence, SetVM(vm, phase, home, sentence, unless_preempted=True))
