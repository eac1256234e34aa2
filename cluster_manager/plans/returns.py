"""Way back of a preempted VM: the queues of all hosts, and the plan that starts a VM again on the host of its disk.

On another host it is started by a start that may go anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Literal

from cluster_manager.plans.lifecycle import StartPlan, sold_as, start_start
from cluster_manager.plans.plans import (
    ClaimVM,
    Event,
    HostRead,
    Note,
    ReadHost,
    Reclaim,
    SetPreempted,
    SetVM,
    Start,
    Step,
    VMPhase,
    finish,
    instruct,
)
from cluster_manager.plans.preemption import PreemptionReason
from cluster_manager.plans.reclaim_steps import (
    LifecyclePlan,
    joins_others,
    may_reclaim,
    short,
    status_in,
    without_paused,
)
from cluster_manager.plans.report_queries import (
    closed,
    deflatable_beside,
    demand_of,
    for_start_of,
    missing_on,
    reclaim_need,
    room_for_start,
    seen_elsewhere,
    size_to_join,
)
from cluster_manager.plans.starting import advance_starting, stays_off
from ebbtide.deflation.allocations import undeclared
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.return_queue import DEFAULT_PACE, ReturnPace, ReturnQueue, Waiting
from ebbtide.messages.common import Vector, is_known
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import StartRequest
from ebbtide.messages.vms import OnPreemption, VMSpec, VMState, VMStatus

#: For the deflations that make room for one return, seconds.
RETURN_DEADLINE_S = 60.0
#: Of one that is only on its way it is not known whether it comes up.
_NOT_UP: Final = (VMState.STOPPED, VMState.STOPPING, VMState.STARTING)


class ReturnPlan(LifecyclePlan):
    """State of the plan that starts a preempted VM again, deflated if that is all there is. The manager's own."""

    kind: Literal["return"] = "return"
    spec: VMSpec
    #: The size to start at, once it is known.
    start_size: Vector | None = None
    #: Why it was to be preempted, as long as nobody has said that it was.
    perhaps: PreemptionReason | None = None

    @property
    def claim(self) -> ClaimVM:
        return ClaimVM(VMPhase.STARTING)

    def next_step(self, event: Event) -> Step:
        return advance_return(self, event)


def start_return(plan_id: str, spec: VMSpec, host: str, perhaps: PreemptionReason | None = None) -> ReturnPlan:
    """A preempted VM is to run again on its host.

    :param spec: what it is sold as, by the manager's record.
    :param perhaps: why it was to be preempted, where the answer to that was lost.
    """
    return ReturnPlan(
        id=plan_id,
        request_id=plan_id,
        instruction=ReadHost(host=host),
        vm=spec.name,
        host=host,
        bound_to=host,
        deadline_s=RETURN_DEADLINE_S,
        spec=spec,
        perhaps=perhaps,
    )


def start_return_elsewhere(plan_id: str, spec: VMSpec, host: str, gone_s: float) -> StartPlan:
    """A preempted VM is to run again on another host that sees its disk, if its own still lacks room.

    :param gone_s: see `cluster_manager.plans.migrations.start_migration`.
    """
    request = StartRequest(request_id=plan_id, anywhere=True, deadline_s=RETURN_DEADLINE_S)
    return start_start(plan_id, request, spec, host, gone_s=gone_s, waits=True)


def advance_return(state: ReturnPlan, event: Event) -> Step:
    """See `Plan.next_step`."""
    match event:
        case HostRead(report=report) if not state.reclaims and is_gone(state.spec, report):
            said = f"{state.vm} is not on {report.id} any more after its preemption"
            gone = SetVM(state.vm, VMPhase.ENDED, report.id, said)
            # Of one that certainly was preempted that was told when it was.
            told = () if state.perhaps is None else (Note("preempted", state.vm, report.id, said),)
            return finish(state, OperationState.DONE, said).also(gone, *told)
        case HostRead(report=report) if state.perhaps is not None and is_off(state.vm, report):
            said = f"{state.vm} was preempted on {report.id} (reason {state.perhaps}): it is off, as its host now says"
            known = SetPreempted(state.vm, report.id, state.perhaps, said)
            waits = SetVM(state.vm, VMPhase.PREEMPTED, report.id, said)
            noted = Note("preempted", state.vm, report.id, said)
            return finish(state, OperationState.DONE, said).also(known, waits, noted)
    back = f"{state.vm} is back on {state.home} after its preemption: "
    make_room = partial(_on_reading, state, event.elapsed_s)
    return advance_starting(state, event, VMPhase.PREEMPTED, make_room, back)


def _on_reading(state: ReturnPlan, elapsed_s: float, report: HostReport, found: VMStatus) -> Step:
    vm = state.vm
    if why := refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE) or closed(report):
        return stays_off(state, VMPhase.PREEMPTED, why)
    state, report = without_paused(state, report), for_start_of(found, report)
    spec = to_start(state.spec, found)
    if state.start_size is None:
        plan = size_to_join(spec, report)
        if plan is None:
            missing = missing_on(report, demand_of(spec, report, spec.least_start()))
            return stays_off(state, VMPhase.PREEMPTED, short(state, report.id, missing, report.deflatable.vector()))
        state = state.having(start_size=Vector.of(plan.size))
    assert state.start_size is not None
    missing = missing_on(report, demand_of(spec, report, state.start_size.vector()))
    deflatable = deflatable_beside(report, (*state.left_out, *state.gave_less))
    need, left_s = reclaim_need(missing, deflatable), state.deadline_s - elapsed_s
    # What the layers did not give it does without, as long as that is enough to start with.
    size = room_for_start(spec, report, state.start_size.vector())
    enough = spec.least_start().fits_in(size)
    if not may_reclaim(state):
        state, need = (state, ZERO) if enough else joins_others(state, spec, report)
    if not need.is_zero() and left_s > 0:
        reclaim = Reclaim(
            host=report.id,
            step=state.step,
            need=Vector.of(need),
            deadline_s=round(left_s, 3),
            exclude=tuple(dict.fromkeys((vm, *state.left_out, *state.gave_less))),
        )
        said = f"reclaiming {need} on {report.id}, so that {vm} comes back"
        return instruct(state, reclaim, said, reclaims=state.reclaims + 1)
    if not enough:
        return stays_off(state, VMPhase.PREEMPTED, short(state, report.id, missing, deflatable))
    start = Start(host=report.id, step=state.step, vm=vm, start_size=Vector.of(size))
    return instruct(state, start, f"starting {vm} on {report.id} with {size}", start_size=Vector.of(size))


def to_start(spec: VMSpec, found: VMStatus) -> VMSpec:
    """What a VM that is off is sold as, with the memory that its host has it boot with.

    One that is suspended comes up with the memory that was saved, no more and no less.
    """
    sold = sold_as(spec, found)
    if found.saved_mib is not None and found.start_size is not None:
        size = sold.nominal.model_copy(update={"memory_mib": found.start_size.memory_mib})
        minimum = sold.asked_minimum().smaller(size.vector())
        return sold.with_minimum(minimum).model_copy(update={"nominal": size, "boot_memory_mib": size.memory_mib})
    return sold.model_copy(update={"boot_memory_mib": min(found.boot_memory_mib, sold.nominal.memory_mib)})


def least_to_return(spec: VMSpec, found: VMStatus, report: HostReport) -> ResourceVector:
    """What has to be free, or deflatable, for a preempted VM to come back: no more than it can start with at all."""
    least = demand_of(spec, for_start_of(found, report), to_start(spec, found).least_start())
    return least.less(undeclared(report.capacity.vector(), least))


def is_gone(spec: VMSpec, report: HostReport) -> bool:
    """Whether a VM that may have been preempted was, and deleted, as its owner wished. A host whose hypervisor does not
    answer cannot say that.
    """
    there = status_in(report, spec.name) is not None or bool(report.unavailable)
    return spec.on_preemption is OnPreemption.DELETE and not there


def is_off(name: str, report: HostReport) -> bool:
    """Whether a VM is off, as its host says, if its hypervisor answers."""
    found = status_in(report, name)
    return found is not None and found.state is VMState.STOPPED and not report.unavailable


def room_to_return(report: HostReport, reserved: ResourceVector) -> ResourceVector:
    """What preempted VMs can come back into: what is free but for other plans, and what others can be deflated by."""
    if closed(report) or refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE):
        return ResourceVector()
    return report.free.vector().less(reserved) + report.deflatable.vector()


class Returns:
    """The queues of all hosts, as their reports show them.

    :param pace: how long returns wait.
    """

    def __init__(self, pace: ReturnPace = DEFAULT_PACE) -> None:
        self._pace = pace
        self._queues: dict[str, ReturnQueue] = {}

    def forget(self, host: str) -> None:
        """Drop the queue of a host that does not come back."""
        self._queues.pop(host, None)

    def observe(
        self,
        report: HostReport,
        reserved: ResourceVector,
        waiting: Sequence[VMSpec],
        now: float,
        fits_elsewhere: Callable[[VMSpec], bool] = lambda spec: False,
        unsure: Collection[str] = (),
    ) -> ReturnQueue | None:
        """Take in a report; None: nobody waits there, nor did lately.

        :param waiting: the VMs in its queue, oldest first.
        :param now: seconds of one monotonic clock.
        :param fits_elsewhere: whether another host has room for all of a VM.
        :param unsure: those of which nobody has said yet that they were preempted.
        """
        queue = self._queues.get(report.id)
        if queue is None:
            if not waiting:
                return None
            queue = self._queues[report.id] = ReturnQueue(self._pace)
        found = {vm.name: vm for vm in report.vms}
        rows = []
        for spec in waiting:
            if is_gone(spec, report) or (spec.name in unsure and is_off(spec.name, report)):
                # No room is needed to write that down.
                rows.append(Waiting(spec.name, ZERO))
            elif (status := found.get(spec.name)) is not None:
                try:
                    # One that runs all the same needs no more than that this is written down.
                    off = status.state in _NOT_UP or not is_known(status.state)
                    least = least_to_return(spec, status, report) if off else ZERO
                    elsewhere = off and seen_elsewhere(report, spec, status) and fits_elsewhere(spec)
                    rows.append(Waiting(spec.name, least, elsewhere))
                except InvalidField:
                    continue  # Its host says of it what cannot be.
        queue.observe(now, rows, room_to_return(report, reserved))
        return queue
