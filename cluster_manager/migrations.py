"""The plan that moves a VM: find a place, stop it where it is, start it there; else start it again where it was.

Never two running: it is started elsewhere only after its host has said that it is off, and again at home only after
the other host has said that it is not there. Where a host cannot say, the plan waits for it.
"""

from __future__ import annotations

from cluster_manager.making_room import (
    again,
    at,
    concluded,
    end,
    growth,
    life_of,
    make_room,
    reclaimed,
    share_room,
    shared,
    status_in,
    vm_of,
)
from cluster_manager.plans import (
    MOST_HOSTS,
    MOST_LAPSES,
    AwaitHost,
    ChooseHosts,
    Create,
    Event,
    Forgotten,
    HostBack,
    HostFailed,
    HostRead,
    HostsChosen,
    Life,
    Note,
    OperationEnded,
    OweReinflation,
    PlanState,
    ReadHost,
    Reclaim,
    Reinflate,
    Remove,
    SetVM,
    Start,
    Stop,
    VMPhase,
)
from cluster_manager.readings import demand_of, has_template
from cluster_manager.steps import Step, finish, instruct, unexpected
from deflation.messages import HostReport, OperationState, VMSpec, VMState, VMStatus
from deflation.modes import HostEvent, refusal
from deflation.placement_policies import PlacementPolicy
from deflation.resources import ZERO

DONE, FAILED = OperationState.DONE, OperationState.FAILED
#: For deflations on the way back home, in seconds: whatever was left for the way out.
HOMEWARD_S = 60.0
#: States in which a VM has come up.
_UP = (VMState.RUNNING, VMState.DEFLATING, VMState.REINFLATING)


def start_migration(
    plan_id: str,
    request_id: str,
    spec: VMSpec,
    home: str,
    *,
    host: str | None,
    running: bool,
    limit_s: float,
    deadline_s: float,
    policy: PlacementPolicy,
) -> PlanState:
    """A migration before its first instruction is carried out.

    :param host: where to; None: where it fits best.
    :param limit_s: for the guest's own power-off; ``deadline_s``: for finding a place by deflation.
    """
    first = ChooseHosts(purpose="place") if host is None else ReadHost(host=host)
    return PlanState(
        kind="migrate",
        id=plan_id,
        request_id=request_id,
        instruction=first,
        vm=spec.name,
        spec=spec,
        host=host,
        deadline_s=deadline_s,
        policy=policy,
        life=Life(home=home, limit_s=limit_s, off=not running, was_running=running),
    )


def begin_moving(state: PlanState, said: str) -> Step:
    """A start that finds no room at home goes on as a migration of a VM that is off."""
    life = life_of(state)
    changes = {"host": None, "spec": life.spec, "reclaims": 0, "rounds": 0, "reclaimed": None, "failed_layer": None}
    moving = life.model_copy(update={"moving": True})
    return instruct(state, ChooseHosts(purpose="place"), said, **changes, life=moving)


def advance_migration(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    match state.instruction, event:
        case ChooseHosts(), HostsChosen(hosts=hosts):
            others = tuple(host for host in hosts if host != life_of(state).home)
            failures = (*state.failures, event.sentence) if event.sentence else state.failures
            return _next(state.model_copy(update={"hosts_left": others, "failures": failures}))
        case Stop(), (OperationEnded() | HostFailed()):
            return _on_stopped(state, event)
        case Reinflate(), (OperationEnded() | HostFailed()):
            if state.conclusion is not None:
                return concluded(state, event)
            said, owed = shared(state, event)
            if life_of(state).stage == "home":
                return _go_home(state, said).also(owed)
            return _next(state.model_copy(update={"progress": (*state.progress, said)})).also(owed)
        case Reclaim(), OperationEnded(operation=operation):
            return reclaimed(state, operation)
        case Reclaim(), Forgotten(lapse=lapse):
            return again(
                state, f"{state.host} does not know of the reclaim: reading it again", lapses=state.lapses + lapse
            )
    match life_of(state).stage:
        case "room":
            return _finding_room(state, event)
        case "unsure" | "clean":
            return _making_sure(state, event)
        case "home":
            return _going_home(state, event)
    return _clearing(state, event)


# --- a place elsewhere -----------------------------------------------------------------------------------------------


def _next(state: PlanState) -> Step:
    """The next host in line; else the way home."""
    if state.hosts_left and state.tried < MOST_HOSTS:
        host, *rest = state.hosts_left
        step = at(state, host, stage="room")
        return Step(step.state.model_copy(update={"hosts_left": tuple(rest), "tried": state.tried + 1}), step.effects)
    why = "; ".join(dict.fromkeys(state.failures)) or "no other host is ready"
    return _give_up(state, why)


def _finding_room(state: PlanState, event: Event) -> Step:
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            return _on_reading(state, report, event.elapsed_s)
        case ((ReadHost() | Reclaim()), HostFailed(uncertain=uncertain)):
            return _leave(state, event.sentence, reachable=not uncertain)
        case Create(), OperationEnded(operation=operation):
            if operation.state is DONE:
                return _arrived(state, operation.sentence)
            return _clean(state, f"{state.host}: {operation.sentence}")
        case Create(), HostFailed(uncertain=False):
            return _leave(state, event.sentence) if state.starts == 1 else _clean(state, event.sentence)
        case Create(), HostFailed():
            return _wait(state, event.sentence, "unsure")
        case Create(), Forgotten(lapse=lapse):
            return again(state, f"{state.host} does not know of the start", lapses=state.lapses + lapse)
    raise unexpected(state, event)


def _on_reading(state: PlanState, report: HostReport, elapsed_s: float) -> Step:
    spec, life = _spec(state), life_of(state)
    found = status_in(report, spec.name)
    if found is not None and not state.starts:
        return _leave(state, f"{report.id} has a VM named {spec.name} that is another one")
    if found is not None:
        return _found(state, found)
    if state.starts and state.lapses >= MOST_LAPSES:
        return _clean(state, f"{report.id} forgets that it was told to start {spec.name}")
    if why := refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE):
        return _leave(state, why)
    if not has_template(report, spec):
        return _leave(state, f"{report.id} has no template {spec.template}")
    room = make_room(state, report, demand_of(spec, report), state.deadline_s - elapsed_s)
    if isinstance(room, Step):
        return room
    if room:
        return _leave(state, room)
    if not life.off:
        stop = Stop(host=life.home, step=state.step, vm=spec.name, limit_s=life.limit_s)
        return instruct(state, stop, f"{report.id} has room: stopping {spec.name} on {life.home}")
    said = f"starting {spec.name} on {report.id}"
    return instruct(state, Create(host=report.id, step=state.step), said, starts=state.starts + 1)


def _on_stopped(state: PlanState, event: OperationEnded | HostFailed) -> Step:
    vm, life = vm_of(state), life_of(state)
    if isinstance(event, OperationEnded) and event.operation.state is not FAILED:
        said = event.operation.sentence
        step = again(state, said, life=life.model_copy(update={"off": True, "stage": "room"}))
        return step.also(SetVM(vm, VMPhase.MIGRATING, life.home, said), Note("stopped", vm, life.home, said))
    why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
    sentence = f"{vm} stays on {life.home}: {why}"
    if isinstance(event, HostFailed) and event.uncertain:
        sentence = f"{vm} stays on {life.home} and may have been stopped there: {why}"
    return end(state, FAILED, sentence, SetVM(vm, VMPhase.RUNNING, life.home, sentence))


def _leave(state: PlanState, failure: str, reachable: bool = True) -> Step:
    """Give this host up: undo what was reclaimed there, then the next one."""
    changes = {"failures": (*state.failures, failure)}
    if not state.reclaims:
        return _next(state.model_copy(update={**changes, "progress": (*state.progress, failure)}))
    if reachable:
        return share_room(state, failure, None, **changes)
    assert state.host is not None, "at a host"
    left = state.model_copy(update={**changes, "progress": (*state.progress, failure)})
    return _next(left).also(OweReinflation(state.host, True))


def _give_up(state: PlanState, why: str) -> Step:
    """Nowhere to go: it stays at home, and runs there again if it has been stopped for this."""
    vm, life = vm_of(state), life_of(state)
    if life.off and life.was_running:
        return _go_home(state, f"{why}: starting {vm} again on {life.home}")
    phase = VMPhase.RUNNING if life.was_running else VMPhase.STOPPED
    sentence = f"{vm} stays {'off ' if life.off else ''}on {life.home}: {why}"
    return end(state, FAILED, sentence, SetVM(vm, phase, life.home, sentence), share=False)


# --- it has arrived --------------------------------------------------------------------------------------------------


def _arrived(state: PlanState, said: str) -> Step:
    """It runs elsewhere; what is left of it at home goes."""
    vm, life = vm_of(state), life_of(state)
    sentence = f"moved {vm} from {life.home} to {state.host}"
    remove = Remove(host=life.home, step=state.step, vm=vm, reason="delete")
    changes = {"spec": None, "life": _staged(state, "clear"), "failures": ()}
    step = instruct(state, remove, said, **changes)
    return step.also(SetVM(vm, VMPhase.RUNNING, state.host, sentence), Note("migrated", vm, state.host, sentence))


def _clearing(state: PlanState, event: Event) -> Step:
    vm, life = vm_of(state), life_of(state)
    match state.instruction, event:
        case Remove(), OperationEnded(operation=operation) if operation.state is not FAILED:
            sentence = f"moved {vm} from {life.home} to {state.host}"
            at_home = state.model_copy(update={"progress": (*state.progress, operation.sentence)})
            # Its old host shares what came free by itself; the operation still says where the VM is.
            return finish(at_home, DONE, sentence).also(OweReinflation(life.home, True))
        case Remove(), (OperationEnded() | HostFailed()):
            why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
            return _wait(state, f"{why}: what is left of {vm} there goes when it can", "clear", life.home)
        case AwaitHost(), HostBack():
            return instruct(state, Remove(host=life.home, step=state.step, vm=vm, reason="delete"))
    raise unexpected(state, event)


# --- not sure, or to be cleaned --------------------------------------------------------------------------------------


def _making_sure(state: PlanState, event: Event) -> Step:
    """The VM may be on the new host: only when that is known it is started at home."""
    assert state.host is not None, "at a host"
    vm, host = vm_of(state), state.host
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            return _found(state, found) if found is not None else _clean(state, f"{host}: {vm} was not started")
        case ReadHost(), HostFailed():
            return _wait(state, event.sentence, "unsure")
        case AwaitHost(), HostBack():
            if life_of(state).stage == "unsure":
                return again(state)
            return instruct(state, Remove(host=host, step=state.step, vm=vm, reason="delete"))
        case Remove(), OperationEnded(operation=operation) if operation.state is not FAILED:
            return _back(state, f"{vm} is not on {host}")
        case Remove(), (OperationEnded() | HostFailed()):
            why = event.sentence if isinstance(event, HostFailed) else event.operation.sentence
            return _wait(state, why, "clean")
    raise unexpected(state, event)


def _found(state: PlanState, found: VMStatus) -> Step:
    """The VM is on the new host: it has come up there, or goes."""
    if found.state in _UP:
        return _arrived(state, f"{found.name} runs on {found.host}")
    return _clean(state, f"{found.host}: {found.name} did not come up")


def _clean(state: PlanState, failure: str) -> Step:
    """A start that failed may leave a half-made VM: it goes before anything else happens."""
    assert state.host is not None, "at a host"
    remove = Remove(host=state.host, step=state.step, vm=vm_of(state), reason="delete")
    failures = (*state.failures, failure)
    return instruct(state, remove, failure, failures=failures, life=_staged(state, "clean"))


def _back(state: PlanState, said: str) -> Step:
    """The start elsewhere failed: undo there, then home."""
    home = state.model_copy(update={"life": _staged(state, "home")})
    return share_room(home, said, None) if state.reclaims else _go_home(home, said)


def _wait(state: PlanState, why: str, stage: str, host: str | None = None) -> Step:
    host = host or state.host
    assert host is not None, "at a host"
    said = f"{why}: waiting for {host}"
    if state.progress and state.progress[-1] == said:
        said = ""  # said already: a host may be away for long
    return instruct(state, AwaitHost(host=host), said, life=_staged(state, stage))


# --- home again ------------------------------------------------------------------------------------------------------


def _go_home(state: PlanState, said: str) -> Step:
    life = life_of(state)
    if not life.was_running:
        why = "; ".join(dict.fromkeys(state.failures)) or said
        sentence = f"{vm_of(state)} stays off on {life.home}: {why}"
        row = SetVM(vm_of(state), VMPhase.STOPPED, life.home, sentence)
        return end(state, FAILED, sentence, row, share=False)
    return at(state, life.home, said, stage="home")


def _going_home(state: PlanState, event: Event) -> Step:
    vm, home = vm_of(state), life_of(state).home
    why = "; ".join(dict.fromkeys(state.failures))
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            if found is None:
                return _stranded(state, f"{home} has no VM {vm} any more")
            if found.state is not VMState.STOPPED:
                return _at_home(state, f"{vm} runs on {home} again: {why}")
            size = found.start_size.vector() if found.start_size is not None else ZERO
            demand = growth(size, ZERO, report.vm_overhead_mib) if found.start_size is not None else ZERO
            room = make_room(state, report, demand, HOMEWARD_S)
            if isinstance(room, Step):
                return room
            if room:
                return _stranded(state, room)
            return instruct(state, Start(host=home, step=state.step, vm=vm), f"starting {vm} again on {home}")
        case ((ReadHost() | Reclaim()), HostFailed()):
            return _stranded(state, event.sentence, share=False)
        case Start(), OperationEnded(operation=operation) if operation.state is DONE:
            return _at_home(state, f"{vm} runs on {home} again: {why}")
        case Start(), OperationEnded(operation=operation):
            return _stranded(state, operation.sentence)
        case Start(), HostFailed(uncertain=uncertain):
            return _stranded(state, event.sentence, share=not uncertain and state.reclaims > 0)
    raise unexpected(state, event)


def _at_home(state: PlanState, sentence: str) -> Step:
    row = SetVM(vm_of(state), VMPhase.RUNNING, life_of(state).home, sentence)
    return end(state, FAILED, sentence, row, share=False)


def _stranded(state: PlanState, why: str, share: bool | None = None) -> Step:
    vm, home = vm_of(state), life_of(state).home
    failures = "; ".join(dict.fromkeys((*state.failures, why)))
    sentence = f"{vm} is off on {home}, since it could be started neither elsewhere nor there: {failures}"
    owed = (OweReinflation(home, True),) if share is False and state.reclaims else ()
    return end(state, FAILED, sentence, SetVM(vm, VMPhase.STOPPED, home, sentence), *owed, share=share)


def _staged(state: PlanState, stage: str) -> Life:
    return life_of(state).model_copy(update={"stage": stage})


def _spec(state: PlanState) -> VMSpec:
    assert state.spec is not None, "as long as it has not arrived"
    return state.spec
