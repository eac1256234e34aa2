"""The plans of a VM's lifecycle on its host: stop, start, resize, adopt, release (docs/lifecycle.md).

Notify on decrease, ask on increase: what grows finds room first, what shrinks is told afterwards.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from cluster_manager.making_room import (
    again,
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
from cluster_manager.migrations import advance_migration, begin_moving
from cluster_manager.plans import (
    GONE_S,
    Adopt,
    AwaitHost,
    Event,
    Forgotten,
    HostBack,
    HostFailed,
    HostRead,
    Life,
    OperationEnded,
    OweReinflation,
    PlanKind,
    PlanState,
    ReadHost,
    Reclaim,
    Reinflate,
    Release,
    Respec,
    SetSpec,
    SetVM,
    Start,
    Stop,
    VMPhase,
)
from cluster_manager.steps import Step, instruct, unexpected
from deflation.errors import InvalidField
from deflation.lifecycle_messages import ADOPTED_TEMPLATE, AdoptRequest
from deflation.messages import OperationState, Vector, VMSpec, VMState, VMStatus
from deflation.modes import HostEvent, refusal
from deflation.resources import ZERO, ResourceVector
from deflation.respec import size_after

#: For how long a host that does not say whether it has adopted a domain is waited for, in seconds.
ADOPTION_S = 60.0
DONE, FAILED, PARTIAL = OperationState.DONE, OperationState.FAILED, OperationState.PARTIAL


def start_stop(plan_id: str, request_id: str, vm: str, host: str, limit_s: float) -> PlanState:
    """A VM is to power off and stay where it is."""
    first = Stop(host=host, step=0, vm=vm, limit_s=limit_s)
    return _begun("stop", plan_id, request_id, vm, host, first, life=Life(home=host, limit_s=limit_s))


def start_start(
    plan_id: str,
    request_id: str,
    vm: str,
    host: str,
    spec: VMSpec,
    anywhere: bool,
    deadline_s: float,
    gone_s: float = GONE_S,
) -> PlanState:
    """A VM that is off is to run again, on its host or, where that has no room, anywhere.

    :param gone_s: see :func:`cluster_manager.migrations.start_migration`.
    """
    life = Life(home=host, anywhere=anywhere, off=True, was_running=False, spec=spec, gone_s=gone_s)
    return _begun("start", plan_id, request_id, vm, host, ReadHost(host=host), life=life, deadline_s=deadline_s)


def start_resize(plan_id: str, request_id: str, vm: str, host: str, spec: VMSpec, deadline_s: float) -> PlanState:
    """A VM is sold as something else."""
    life = Life(home=host, spec=spec)
    return _begun("resize", plan_id, request_id, vm, host, ReadHost(host=host), life=life, deadline_s=deadline_s)


def start_adoption(plan_id: str, name: str, request: AdoptRequest) -> PlanState:
    """A domain that somebody else has made is to be looked after."""
    life = Life(home=request.host, domain=request.domain, priority=request.priority, minimum=request.minimum)
    first = ReadHost(host=request.host)
    return _begun("adopt", plan_id, request.request_id, name, request.host, first, life=life, deadline_s=ADOPTION_S)


def start_release(plan_id: str, request_id: str, vm: str, host: str, deadline_s: float) -> PlanState:
    """An adopted VM is to be given back."""
    life, first = Life(home=host), ReadHost(host=host)
    return _begun("release", plan_id, request_id, vm, host, first, life=life, deadline_s=deadline_s)


def _begun(kind: PlanKind, plan_id: str, request_id: str, vm: str, host: str, first: Any, **more: Any) -> PlanState:
    return PlanState(kind=kind, id=plan_id, request_id=request_id, instruction=first, vm=vm, host=host, **more)


# --- stop ------------------------------------------------------------------------------------------------------------


def advance_stop(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    vm, host = vm_of(state), life_of(state).home
    match state.instruction, event:
        case Stop(), OperationEnded(operation=operation) if operation.state is not FAILED:
            row = SetVM(vm, VMPhase.STOPPED, host, operation.sentence)
            return end(state, DONE, operation.sentence, row, share=True)
        case Stop(), OperationEnded(operation=operation):
            sentence = f"{vm} could not be stopped: {operation.sentence}"
            return end(state, FAILED, sentence, SetVM(vm, VMPhase.RUNNING, host, sentence))
        case Stop(), HostFailed(uncertain=uncertain):
            sentence = f"{vm} stays, since {event.sentence}"
            if uncertain:
                sentence = f"{vm} may have been stopped: {event.sentence}; {host}'s next report says"
            # A debt that is there already is not paid by a stop that came to nothing.
            owed = (OweReinflation(host, True),) if uncertain else ()
            return end(state, FAILED, sentence, SetVM(vm, VMPhase.RUNNING, host, sentence), *owed)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return concluded(state, event)
    raise unexpected(state, event)


# --- start -----------------------------------------------------------------------------------------------------------


def advance_start(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    if life_of(state).moving:
        return advance_migration(state, event)
    vm, host = vm_of(state), life_of(state).home
    match state.instruction, event:
        case ReadHost(), HostRead():
            return _start_where_it_is(state, event)
        case ReadHost() | Reclaim(), HostFailed(uncertain=uncertain):
            step = _stays_off(state, event.sentence, share=False)
            return step.also(OweReinflation(host, True)) if uncertain and state.reclaims else step
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case Start(), OperationEnded(operation=operation) if operation.state is DONE:
            return end(
                state, DONE, operation.sentence, SetVM(vm, VMPhase.RUNNING, host, operation.sentence), share=False
            )
        case Start(), OperationEnded(operation=operation):
            return _stays_off(state, operation.sentence)
        case Start(), HostFailed(uncertain=False):
            return _stays_off(state, event.sentence)
        case Start(), HostFailed():
            sentence = f"{vm} may have been started: {event.sentence}; {host}'s next report says"
            row = SetVM(vm, VMPhase.STOPPED, host, sentence)
            return end(state, FAILED, sentence, row, OweReinflation(host, True), share=False)
        case Reinflate(), (OperationEnded() | HostFailed()) if state.conclusion is None:
            said, owed = shared(state, event)
            return begin_moving(state, said).also(owed)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return concluded(state, event)
    raise unexpected(state, event)


def _start_where_it_is(state: PlanState, event: HostRead) -> Step:
    vm, report = vm_of(state), event.report
    found = status_in(report, vm)
    if found is None:
        return _stays_off(state, f"{report.id} has no VM {vm} any more")
    if found.state is VMState.STOPPING:
        return _stays_off(state, f"it is still being stopped on {report.id}")
    if found.state is not VMState.STOPPED:
        sentence = f"{vm} runs on {report.id}"
        return end(state, DONE, sentence, SetVM(vm, VMPhase.RUNNING, report.id, sentence))
    why: Step | str = refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE)
    if not why:
        why = make_room(state, report, start_demand(report.vm_overhead_mib, found), state.deadline_s - event.elapsed_s)
    if isinstance(why, Step):
        return why
    if not why:
        return instruct(state, Start(host=report.id, step=state.step, vm=vm), f"starting {vm} on {report.id}")
    if life_of(state).anywhere:
        said = f"{why}: looking elsewhere"
        return share_room(state, said, None) if state.reclaims else begin_moving(state, said)
    return _stays_off(state, why)


def start_demand(overhead_mib: float, status: VMStatus) -> ResourceVector:
    """What has to be free for a VM that is off; one that powered off by itself is charged already."""
    return growth(status.start_size.vector(), ZERO, overhead_mib) if status.start_size is not None else ZERO


def _stays_off(state: PlanState, why: str, share: bool | None = None) -> Step:
    vm, host = vm_of(state), life_of(state).home
    sentence = f"{vm} stays off: {why}"
    return end(state, FAILED, sentence, SetVM(vm, VMPhase.STOPPED, host, sentence), share=share)


# --- resize ----------------------------------------------------------------------------------------------------------


def advance_resize(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    vm, life = vm_of(state), life_of(state)
    spec, host = life.spec, life.home
    assert spec is not None, "a resize has a spec"
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            if found is None:
                return end(state, FAILED, f"{host} has no VM {vm} any more")
            room = make_room(state, report, _growth_of(found, spec), state.deadline_s - event.elapsed_s, exclude=(vm,))
            if isinstance(room, Step):
                return room
            if room:
                return end(state, FAILED, f"{vm} stays what it is: {room}")
            left_s = max(state.deadline_s - event.elapsed_s, 1.0)
            respec = Respec(host=host, step=state.step, vm=vm, spec=spec, deadline_s=round(left_s, 3))
            return instruct(state, respec, f"changing {vm} on {host}")
        case ((ReadHost() | Reclaim()), HostFailed(uncertain=uncertain)):
            owed = (OweReinflation(host, True),) if uncertain and state.reclaims else ()
            return end(state, FAILED, f"{vm} stays what it is: {event.sentence}", *owed, share=False)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case Respec(), OperationEnded(operation=operation):
            changes = {"outcomes": operation.vms}
            # What came free, and what was reclaimed and not needed, goes to the others: they are told afterwards.
            if operation.state is DONE:
                return end(state, DONE, operation.sentence, SetSpec(vm, spec), share=True, **changes)
            return end(state, operation.state, operation.sentence, share=True, **changes)
        case Respec(), HostFailed(uncertain=uncertain):
            sentence = f"{vm} stays what it is: {event.sentence}"
            if uncertain:
                sentence = f"{vm} may have been changed: {event.sentence}; {host}'s next report says"
            return end(state, FAILED, sentence, OweReinflation(host, True), share=False)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return concluded(state, event)
    raise unexpected(state, event)


def _growth_of(status: VMStatus, spec: VMSpec) -> ResourceVector:
    """What a VM needs besides what it has, to be sold as the spec says; one that is off needs nothing."""
    if status.start_size is not None:
        return ZERO
    old = status.allocation()
    return growth(size_after(old, spec.allocation(spec.nominal.vector())), old.current)


# --- adopt and release -----------------------------------------------------------------------------------------------


def advance_adoption(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    vm, life = vm_of(state), life_of(state)
    host = life.home
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            if found is not None and found.adopted and found.domain == life.domain:
                sentence = f"{life.domain} on {host} is looked after as {vm}"
                effects = (SetSpec(vm, spec_of(found)), SetVM(vm, VMPhase.RUNNING, host, sentence))
                return end(state, DONE, sentence, *effects, share=False)
            if found is not None:
                return _not_adopted(state, f"{host} has a VM {vm} already")
            if state.starts:
                return _not_adopted(state, f"{host} has not adopted {life.domain}")
            adopt = Adopt(
                host=host, step=state.step, vm=vm, domain=life.domain, priority=life.priority, minimum=life.minimum
            )
            return instruct(state, adopt, f"adopting {life.domain} on {host}", starts=1)
        case ReadHost(), HostFailed() if not state.starts:
            return _not_adopted(state, event.sentence)
        case AwaitHost(), HostFailed():
            return _not_adopted(state, _unknown(state, event.sentence))
        case Adopt(), OperationEnded(operation=operation) if operation.state is DONE:
            return again(state, operation.sentence)
        case Adopt(), OperationEnded(operation=operation):
            return _not_adopted(state, operation.sentence)
        case Adopt(), HostFailed(uncertain=False):
            return _not_adopted(state, event.sentence)
        case ((Adopt() | ReadHost()), HostFailed()):
            until_s = life.waits_until_s if life.waits_until_s is not None else event.elapsed_s + state.deadline_s
            if event.elapsed_s >= until_s:
                return _not_adopted(state, _unknown(state, event.sentence))
            life = life.model_copy(update={"waits_until_s": until_s})
            said = f"{event.sentence}: waiting for {host} to say"
            return instruct(state, AwaitHost(host=host, until_s=until_s), said, life=life)
        case AwaitHost(), HostBack():
            return again(state)
    raise unexpected(state, event)


def _not_adopted(state: PlanState, why: str) -> Step:
    sentence = f"{life_of(state).domain} is not adopted: {why}"
    return end(state, FAILED, sentence, SetVM(vm_of(state), VMPhase.ENDED, None, sentence), share=False)


def _unknown(state: PlanState, why: str) -> str:
    """Nobody's VM: an adoption that was carried out all the same is found by the next one."""
    host = life_of(state).home
    return f"{host} does not say whether it has adopted it ({why}); ask again when {host} answers"


def spec_of(status: VMStatus) -> VMSpec:
    """What a VM is sold as, by what its host says."""
    template = ADOPTED_TEMPLATE if status.adopted else status.template
    return VMSpec(
        name=status.name,
        priority=status.priority,
        nominal=status.nominal,
        minimum=status.minimum if status.priority.value != "fixed" else status.nominal,
        ceiling=status.ceiling,
        template=template,
    )


def sold_as(spec: VMSpec, status: VMStatus | None) -> VMSpec:
    """What a VM is sold as: its host's word counts where the answer to a change was lost.

    What its host does not tell stays as it was asked for.
    """
    if status is None:
        return spec
    told = {"nominal": status.nominal, "priority": status.priority, "ceiling": status.ceiling}
    if all(getattr(spec, field) == value for field, value in told.items()):
        return spec
    try:
        same = VMSpec.model_validate({**spec.model_dump(), **told})
        if Vector.of(same.allocation(status.current.vector()).minimum) == status.minimum:
            return same
    except (ValidationError, InvalidField):
        pass  # What was asked for contradicts what the host says.
    untold = {field: getattr(spec, field) for field in ("xml", "template", "boot_memory_mib", "start")}
    try:
        return spec_of(status).model_copy(update=untold)
    except (ValidationError, InvalidField):
        return spec  # What the host says contradicts itself.


def advance_release(state: PlanState, event: Event) -> Step:
    """See :func:`cluster_manager.transitions.advance`."""
    vm, host = vm_of(state), life_of(state).home
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            room: Step | str = ""
            if found is not None:
                # Everything that was taken goes back first.
                demand = growth(found.nominal.vector(), found.current.vector()) if found.start_size is None else ZERO
                room = make_room(state, report, demand, state.deadline_s - event.elapsed_s, exclude=(vm,))
            if isinstance(room, Step):
                return room
            if room:
                return end(state, FAILED, f"{vm} stays adopted: {room}")
            return instruct(state, Release(host=host, step=state.step, vm=vm), f"giving {vm} back on {host}")
        case ((ReadHost() | Reclaim()), HostFailed(uncertain=uncertain)):
            owed = (OweReinflation(host, True),) if uncertain and state.reclaims else ()
            return end(state, FAILED, f"{vm} stays adopted: {event.sentence}", *owed, share=False)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case Release(), OperationEnded(operation=operation) if operation.state is DONE:
            row = SetVM(vm, VMPhase.ENDED, host, operation.sentence)
            return end(state, DONE, operation.sentence, row, share=True, outcomes=operation.vms)
        case Release(), OperationEnded(operation=operation):
            return end(state, operation.state, operation.sentence, share=True, outcomes=operation.vms)
        case Release(), HostFailed(uncertain=uncertain):
            sentence = f"{vm} may have been given back: {event.sentence}" if uncertain else event.sentence
            owed = (OweReinflation(host, True),) if uncertain else ()
            return end(state, FAILED, sentence, *owed, share=False)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return concluded(state, event)
    raise unexpected(state, event)
