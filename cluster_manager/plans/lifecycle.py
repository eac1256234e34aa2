"""The plans of a VM's lifecycle on its host: stop, start, resize, adopt, release (docs/reference/lifecycle.md).

Notify on decrease, ask on increase: what grows finds room first, what shrinks is told afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final, Literal

from pydantic import ValidationError

from cluster_manager.defaults import GONE_S
from cluster_manager.plans.claims import AddVM
from cluster_manager.plans.host_wait import MovePlan
from cluster_manager.plans.migrations import advance_migration
from cluster_manager.plans.plans import (
    Adopt,
    AwaitHost,
    ChooseHosts,
    ClaimVM,
    Event,
    Forgotten,
    HostBack,
    HostFailed,
    HostRead,
    OperationEnded,
    ReadHost,
    Reclaim,
    Reinflate,
    ReinflationPending,
    Release,
    Respec,
    SetSpec,
    SetVM,
    Start,
    Step,
    Stop,
    VMPhase,
    instruct,
    unexpected,
)
from cluster_manager.plans.reclaim_steps import (
    LifecyclePlan,
    again,
    concluded,
    end,
    growth,
    make_room,
    reclaimed,
    share_room,
    shared,
    status_in,
    why_no_room,
)
from cluster_manager.plans.report_queries import closed, for_start_of
from cluster_manager.plans.starting import advance_starting, stays_off
from ebbtide.deflation.allocations import Priority, size_after
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import AdoptRequest, StartRequest
from ebbtide.messages.vms import ADOPTED_TEMPLATE, VMSpec, VMState, VMStatus

#: For how long a host that does not say whether it has adopted a domain is waited for, in seconds.
ADOPTION_S = 60.0
#: What its host does not tell of a VM.
MADE_AS: Final = ("xml", "template", "start", "on_preemption", "preemption_notice_s", "steady")
_LEAST: Final = Vector.of(HARD_FLOOR.with_component("disk_mib_s", 0.0).with_component("network_mib_s", 0.0))
#: While a VM is one of these, its host and whether it runs stay what they are.
_STAYING: Final = (VMState.RUNNING, VMState.DEFLATING, VMState.REINFLATING, VMState.PAUSED, VMState.STOPPED)
DONE, FAILED = OperationState.DONE, OperationState.FAILED


class StopPlan(LifecyclePlan):
    """State of the plan that powers a VM off."""

    kind: Literal["stop"] = "stop"
    #: Whether it is off already and waits for room after a preemption: it goes on waiting if this comes to nothing.
    waits: bool = False

    @property
    def claim(self) -> ClaimVM:
        return ClaimVM(VMPhase.STOPPING)

    def next_step(self, event: Event) -> Step:
        return advance_stop(self, event)


class StartPlan(MovePlan):
    """State of the plan that starts a VM; where its host has no room it may go on as a migration."""

    kind: Literal["start"] = "start"
    #: Whether another host will do; and whether one is looked for now.
    anywhere: bool = False
    moving: bool = False

    @property
    def reserved(self) -> ResourceVector | None:
        return super().reserved if self.moving else None

    @property
    def claim(self) -> ClaimVM:
        return ClaimVM(VMPhase.STARTING)

    def next_step(self, event: Event) -> Step:
        return advance_start(self, event)


class ResizePlan(LifecyclePlan):
    """State of the plan that sells a VM as something else."""

    kind: Literal["resize"] = "resize"
    spec: VMSpec

    @property
    def claim(self) -> ClaimVM:
        return ClaimVM()

    def next_step(self, event: Event) -> Step:
        return advance_resize(self, event)


class AdoptionPlan(LifecyclePlan):
    """State of the plan that adopts a domain."""

    kind: Literal["adopt"] = "adopt"
    domain: str
    priority: Priority
    minimum: Vector
    #: Until when a host that does not say is waited for, as ``elapsed_s``.
    waits_until_s: float | None = None

    @property
    def claim(self) -> AddVM:
        return AddVM(
            self.host,
            # Its sizes are read on its host; until then the row only holds the name.
            VMSpec(name=self.vm, nominal=_LEAST, template=ADOPTED_TEMPLATE),
            f"being adopted on {self.host}",
        )

    def next_step(self, event: Event) -> Step:
        return advance_adoption(self, event)


class ReleasePlan(LifecyclePlan):
    """State of the plan that gives an adopted VM back."""

    kind: Literal["release"] = "release"

    @property
    def claim(self) -> ClaimVM:
        return ClaimVM()

    def next_step(self, event: Event) -> Step:
        return advance_release(self, event)


def start_stop(plan_id: str, request_id: str, vm: str, host: str, limit_s: float, *, waits: bool = False) -> StopPlan:
    """A VM is to power off and stay where it is.

    :param waits: whether it waits for room after a preemption.
    """
    first = Stop(host=host, step=0, vm=vm, limit_s=limit_s)
    return StopPlan(id=plan_id, request_id=request_id, instruction=first, vm=vm, host=host, bound_to=host, waits=waits)


def start_start(
    plan_id: str,
    request: StartRequest,
    spec: VMSpec,
    host: str,
    *,
    gone_s: float = GONE_S,
    waits: bool = False,
    off: bool = True,
) -> StartPlan:
    """A VM that is off is to run again, on its host or, where that has no room, anywhere.

    :param off: whether its host keeps it off: one that powered off by itself is stopped before it starts elsewhere.
    :param gone_s: see `cluster_manager.plans.migrations.start_migration`.
    :param waits: whether it waits for room after a preemption.
    """
    return StartPlan(
        id=plan_id,
        request_id=request.request_id,
        instruction=ReadHost(host=host),
        vm=spec.name,
        host=host,
        bound_to=host,
        deadline_s=request.deadline_s,
        spec=spec,
        anywhere=request.anywhere,
        waits=waits,
        off=off,
        was_running=False,
        lose_disk=request.lose_disk,
        gone_s=gone_s,
    )


def start_resize(plan_id: str, request_id: str, host: str, spec: VMSpec, deadline_s: float) -> ResizePlan:
    """A VM is sold as something else."""
    return ResizePlan(
        id=plan_id,
        request_id=request_id,
        instruction=ReadHost(host=host),
        vm=spec.name,
        host=host,
        bound_to=host,
        deadline_s=deadline_s,
        spec=spec,
    )


def start_adoption(plan_id: str, name: str, request: AdoptRequest) -> AdoptionPlan:
    """A domain that was made outside Ebbtide is to be looked after."""
    return AdoptionPlan(
        id=plan_id,
        request_id=request.request_id,
        instruction=ReadHost(host=request.host),
        vm=name,
        host=request.host,
        bound_to=request.host,
        deadline_s=ADOPTION_S,
        domain=request.domain,
        priority=request.priority,
        minimum=request.minimum,
    )


def start_release(plan_id: str, request_id: str, vm: str, host: str, deadline_s: float) -> ReleasePlan:
    """An adopted VM is to be given back."""
    first = ReadHost(host=host)
    return ReleasePlan(
        id=plan_id, request_id=request_id, instruction=first, vm=vm, host=host, bound_to=host, deadline_s=deadline_s
    )


# --- stop ------------------------------------------------------------------------------------------------------------


def advance_stop(state: StopPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    vm, host = state.vm, state.home
    before = VMPhase.PREEMPTED if state.waits else VMPhase.RUNNING
    match state.instruction, event:
        case Stop(), OperationEnded(operation=operation) if operation.state is not FAILED:
            row = SetVM(vm, VMPhase.STOPPED, host, operation.sentence)
            return end(state, DONE, operation.sentence, row, share=True)
        case Stop(), OperationEnded(operation=operation):
            sentence = f"{vm} could not be stopped: {operation.sentence}"
            return end(state, FAILED, sentence, SetVM(vm, before, host, sentence))
        case Stop(), HostFailed(uncertain=uncertain):
            sentence = f"{vm} stays, since {event.sentence}"
            if uncertain:
                sentence = f"{vm} may have been stopped: {event.sentence}; {host}'s next report says"
            # A debt that is there already is not paid by a stop that came to nothing.
            owed = (ReinflationPending(host, True),) if uncertain else ()
            return end(state, FAILED, sentence, SetVM(vm, before, host, sentence), *owed, reason=event.code)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return concluded(state, event)
    raise unexpected(state, event)


# --- start -----------------------------------------------------------------------------------------------------------


def advance_start(state: StartPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    if state.moving:
        return advance_migration(state, event)
    if isinstance(state.instruction, Reinflate) and state.conclusion is None:
        said, owed = shared(state, event)
        return begin_moving(state, said).also(owed)

    def make_room_at_home(report: HostReport, found: VMStatus) -> Step:
        if report.unavailable:
            # Whether it is off there is not known: it starts nowhere else either.
            return stays_off(state, state.off_phase, closed(report), reason=why_no_room(report))
        why: Step | str = refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE)
        reason = None if why else why_no_room(report)
        if not why:
            demand = start_demand(for_start_of(found, report).vm_overhead_mib, found)
            why = make_room(state, report, demand, state.deadline_s - event.elapsed_s)
        if isinstance(why, Step):
            return why
        if not why:
            start = Start(host=report.id, step=state.step, vm=state.vm)
            return instruct(state, start, f"starting {state.vm} on {report.id}")
        if state.anywhere:
            said = f"{why}: looking elsewhere"
            return share_room(state, said, None) if state.reclaims else begin_moving(state, said)
        return stays_off(state, state.off_phase, why, reason=reason)

    return advance_starting(state, event, state.off_phase, make_room_at_home)


def begin_moving(state: StartPlan, said: str) -> Step:
    """A start that finds no room on its host goes on as a migration of a VM that is off."""
    changes = {"host": None, "reclaims": 0, "rounds": 0, "reclaimed": None, "failed_layer": None, "moving": True}
    return instruct(state, ChooseHosts(purpose="place"), said, **changes)


def start_demand(overhead_mib: float, status: VMStatus) -> ResourceVector:
    """What has to be free for a VM that is off; one that powered off by itself is charged already."""
    return growth(status.start_size.vector(), ZERO, overhead_mib) if status.start_size is not None else ZERO


# --- resize ----------------------------------------------------------------------------------------------------------


def advance_resize(state: ResizePlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    vm, spec, host = state.vm, state.spec, state.home
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            if found is None:
                return end(state, FAILED, f"{host} has no VM {vm} any more")
            room = make_room(state, report, _growth_of(found, spec), state.deadline_s - event.elapsed_s, exclude=(vm,))
            if isinstance(room, Step):
                return room
            if room:
                return end(state, FAILED, f"{vm} stays what it is: {room}", reason=why_no_room(report))
            left_s = max(state.deadline_s - event.elapsed_s, 1.0)
            respec = Respec(host=host, step=state.step, vm=vm, spec=spec, deadline_s=round(left_s, 3))
            return instruct(state, respec, f"changing {vm} on {host}")
        case ((ReadHost() | Reclaim()), HostFailed(uncertain=uncertain)):
            owed = (ReinflationPending(host, True),) if uncertain and state.reclaims else ()
            said = f"{vm} stays what it is: {event.sentence}"
            return end(state, FAILED, said, *owed, share=False, reason=event.code)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case Respec(), OperationEnded(operation=operation):
            # What came free, and what was reclaimed and not needed, goes to the others: they are told afterwards.
            if operation.state is DONE:
                return end(state, DONE, operation.sentence, SetSpec(vm, spec), share=True, outcomes=operation.vms)
            return end(state, operation.state, operation.sentence, share=True, outcomes=operation.vms)
        case Respec(), HostFailed(uncertain=uncertain):
            sentence = f"{vm} stays what it is: {event.sentence}"
            if uncertain:
                sentence = f"{vm} may have been changed: {event.sentence}; {host}'s next report says"
            return end(state, FAILED, sentence, ReinflationPending(host, True), share=False, reason=event.code)
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


def advance_adoption(state: AdoptionPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    vm, host = state.vm, state.home
    match state.instruction, event:
        case ReadHost(), HostRead(report=report):
            found = status_in(report, vm)
            if found is not None and found.adopted and found.domain == state.domain:
                sentence = f"{state.domain} on {host} is looked after as {vm}"
                effects = (SetSpec(vm, spec_of(found)), SetVM(vm, VMPhase.RUNNING, host, sentence))
                return end(state, DONE, sentence, *effects, share=False)
            if found is not None and not state.starts and state.domain in (vm, found.domain):
                return _taken_back(state, found)
            if found is not None:
                return _not_adopted(state, f"{host} has a VM {vm} already")
            if state.starts:
                return _not_adopted(state, f"{host} has not adopted {state.domain}")
            adopt = Adopt(
                host=host, step=state.step, vm=vm, domain=state.domain, priority=state.priority, minimum=state.minimum
            )
            return instruct(state, adopt, f"adopting {state.domain} on {host}", starts=1)
        case ReadHost(), HostFailed() if not state.starts:
            return _not_adopted(state, event.sentence, event.code)
        case AwaitHost(), HostFailed():
            return _not_adopted(state, _unknown(state, event.sentence), event.code)
        case Adopt(), OperationEnded(operation=operation) if operation.state is DONE:
            return again(state, operation.sentence)
        case Adopt(), OperationEnded(operation=operation):
            return _not_adopted(state, operation.sentence)
        case Adopt(), HostFailed(uncertain=False):
            return _not_adopted(state, event.sentence, event.code)
        case ((Adopt() | ReadHost()), HostFailed()):
            until_s = state.waits_until_s if state.waits_until_s is not None else event.elapsed_s + state.deadline_s
            if event.elapsed_s >= until_s:
                return _not_adopted(state, _unknown(state, event.sentence), event.code)
            said = f"{event.sentence}: waiting for {host} to say"
            return instruct(state, AwaitHost(host=host, until_s=until_s), said, waits_until_s=until_s)
        case AwaitHost(), HostBack():
            return again(state)
    raise unexpected(state, event)


def _taken_back(state: AdoptionPlan, found: VMStatus) -> Step:
    """Its host looks after it already, as after the store was restored: it is recorded as it is there."""
    if found.state not in _STAYING:
        return _not_adopted(state, f"it is {found.state} on {found.host}; ask again when that has ended")
    spec, off = spec_of(found), found.start_size is not None
    sentence = f"{state.vm} on {state.home} is on the record again, {spec.priority} with {spec.nominal.vector()}"
    phase = VMPhase.STOPPED if off else VMPhase.RUNNING
    effects = (SetSpec(state.vm, spec), SetVM(state.vm, phase, state.home, sentence))
    return end(state, DONE, sentence, *effects, share=False)


def _not_adopted(state: AdoptionPlan, why: str, code: ReasonCode | None = None) -> Step:
    sentence = f"{state.domain} is not adopted: {why}"
    return end(state, FAILED, sentence, SetVM(state.vm, VMPhase.ENDED, None, sentence), share=False, reason=code)


def _unknown(state: AdoptionPlan, why: str) -> str:
    """Not our VM: an adoption that was carried out all the same is found by the next one."""
    host = state.home
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
    untold = {field: getattr(spec, field) for field in (*MADE_AS, "boot_memory_mib")}
    try:
        return spec_of(status).model_copy(update=untold)
    except (ValidationError, InvalidField):
        return spec  # What the host says contradicts itself.


def was_asked_for(sold: VMSpec, asked: Sequence[VMSpec]) -> bool:
    """Whether what a host says that a VM is sold as lies within what was ever asked for: else a host that was taken
    over could have its VM take more from the next one than was ever sold.

    :param asked: at least one.
    """
    rows, told = [spec.allocation(ZERO) for spec in asked], sold.allocation(ZERO)
    most = reduce(ResourceVector.larger, (row.upper for row in rows))
    floor = reduce(ResourceVector.larger, (row.minimum for row in rows))
    within = told.upper.larger(told.nominal).fits_in(most) and told.minimum.fits_in(floor)
    return within and any(told.priority is row.priority for row in rows)


def advance_release(state: ReleasePlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    vm, host = state.vm, state.home
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
                return end(state, FAILED, f"{vm} stays adopted: {room}", reason=why_no_room(report))
            return instruct(state, Release(host=host, step=state.step, vm=vm), f"giving {vm} back on {host}")
        case ((ReadHost() | Reclaim()), HostFailed(uncertain=uncertain)):
            owed = (ReinflationPending(host, True),) if uncertain and state.reclaims else ()
            said = f"{vm} stays adopted: {event.sentence}"
            return end(state, FAILED, said, *owed, share=False, reason=event.code)
        case Reclaim(), (OperationEnded() | Forgotten()):
            return reclaimed(state, event)
        case Release(), OperationEnded(operation=operation) if operation.state is DONE:
            row = SetVM(vm, VMPhase.ENDED, host, operation.sentence)
            return end(state, DONE, operation.sentence, row, share=True, outcomes=operation.vms)
        case Release(), OperationEnded(operation=operation):
            return end(state, operation.state, operation.sentence, share=True, outcomes=operation.vms)
        case Release(), HostFailed(uncertain=uncertain):
            sentence = f"{vm} may have been given back: {event.sentence}" if uncertain else event.sentence
            owed = (ReinflationPending(host, True),) if uncertain else ()
            return end(state, FAILED, sentence, *owed, share=False, reason=event.code)
        case Reinflate(), (OperationEnded() | HostFailed()):
            return concluded(state, event)
    raise unexpected(state, event)
