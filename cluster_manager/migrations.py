"""The plan that moves a VM: find a place, stop it where it is, start it there; else start it again where it was.

Never two running: it is started elsewhere only after its host has said that it is off, and again at home only after
the other host has said that it is not there. Where a host cannot say, the plan waits for it (:mod:`.patience`).
"""

from __future__ import annotations

from cluster_manager.arrivals import advance_clearing, arrived
from cluster_manager.homecomings import advance_doubt, advance_homecoming, back, clean, found, go_home
from cluster_manager.making_room import (
    again,
    at,
    concluded,
    end,
    life_of,
    make_room,
    reclaimed,
    share_room,
    shared,
    status_in,
    vm_of,
)
from cluster_manager.patience import wait
from cluster_manager.plans import (
    GONE_S,
    MOST_HOSTS,
    MOST_LAPSES,
    ChooseHosts,
    Create,
    Event,
    Forgotten,
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
    SetVM,
    Stop,
    VMPhase,
)
from cluster_manager.readings import demand_of, has_template
from cluster_manager.steps import Step, instruct, unexpected
from deflation.messages import HostReport, OperationState, VMSpec
from deflation.modes import HostEvent, refusal
from deflation.placement_policies import PlacementPolicy

DONE, FAILED = OperationState.DONE, OperationState.FAILED


def start_migration(
    plan_id: str,
    request_id: str,
    spec: VMSpec,
    home: str,
    *,
    host: str | None,
    running: bool,
    stopped: bool | None = None,
    limit_s: float,
    deadline_s: float,
    policy: PlacementPolicy,
    gone_s: float = GONE_S,
) -> PlanState:
    """A migration before its first instruction is carried out.

    :param host: where to; None: where it fits best.
    :param stopped: whether it was stopped on command; None: if it does not run. One that powered off by itself may be
        started again at any moment, so its host is told to keep it off before it is started elsewhere.
    :param limit_s: for the guest's own power-off; ``deadline_s``: for finding a place by deflation, and for how long a
        host that does not answer is waited for; ``gone_s``: for how long after that the VM waits for it.
    """
    first = ChooseHosts(purpose="place") if host is None else ReadHost(host=host)
    off = not running if stopped is None else stopped
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
        life=Life(home=home, limit_s=limit_s, off=off, was_running=running, gone_s=gone_s),
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
                return go_home(state, said).also(owed)
            return _next(state.model_copy(update={"progress": (*state.progress, said)})).also(owed)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
    match life_of(state).stage:
        case "room":
            return _finding_room(state, event)
        case "unsure" | "clean":
            return advance_doubt(state, event)
        case "home":
            return advance_homecoming(state, event)
    return advance_clearing(state, event)


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
                return arrived(state, operation.sentence)
            return clean(state, f"{state.host}: {operation.sentence}")
        case Create(), HostFailed(uncertain=False):
            # The only start was refused at once: nothing is there.
            unstarted = state.model_copy(update={"starts": state.starts - 1})
            return _leave(unstarted, event.sentence)
        case Create(host=host), HostFailed():
            return wait(state, event.sentence, "unsure", host, event.elapsed_s)
        case Create(), Forgotten(lapse=lapse):
            return again(state, f"{state.host} does not know of the start", lapses=state.lapses + lapse)
    raise unexpected(state, event)


def _on_reading(state: PlanState, report: HostReport, elapsed_s: float) -> Step:
    spec, life = _spec(state), life_of(state)
    present = status_in(report, spec.name)
    if present is not None and not state.starts:
        return _leave(state, f"{report.id} has a VM named {spec.name} that is another one")
    if present is not None:
        return found(state, present)
    if state.starts and state.lapses >= MOST_LAPSES:
        return clean(state, f"{report.id} forgets that it was told to start {spec.name}")
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
    if isinstance(event, HostFailed) and not event.uncertain:
        sentence = f"{vm} stays on {life.home}: {why}"
        return end(state, FAILED, sentence, SetVM(vm, VMPhase.RUNNING, life.home, sentence))
    # It may be off, or still go off: it is to run where it was.
    return back(state, f"{vm} stays on {life.home}: {why}", failures=(*state.failures, why))


def _leave(state: PlanState, failure: str, reachable: bool = True) -> Step:
    """Give this host up: undo what was reclaimed there, then the next one."""
    changes = {"failures": (*state.failures, failure)}
    if state.starts:
        # A start that the host forgot may have been doubled on its way.
        return clean(state, failure)
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
        return go_home(state, f"{why}: starting {vm} again on {life.home}")
    phase = VMPhase.RUNNING if life.was_running else VMPhase.STOPPED
    sentence = f"{vm} stays {'off ' if life.off else ''}on {life.home}: {why}"
    return end(state, FAILED, sentence, SetVM(vm, phase, life.home, sentence), share=False)


def _spec(state: PlanState) -> VMSpec:
    assert state.spec is not None, "as long as it has not arrived"
    return state.spec
