"""What a placement waits for, without holding any host: one that other plans have, guests that cannot be deflated yet,
a VM that moves away.

All of that comes before anyone is preempted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeVar

from cluster_manager.plans.live_migrations import cannot_leave
from cluster_manager.plans.plans import (
    AwaitGuests,
    HostFailed,
    HostRead,
    HostsChosen,
    MoveAway,
    Moved,
    Note,
    Purpose,
    ReadHost,
    RoomPlan,
    Step,
    instruct,
)
from cluster_manager.plans.preemption import kept_for_notice
from cluster_manager.plans.report_queries import allocations_of, coming_mib, not_yet, shares_disk, silent_on
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.placement import waiting
from ebbtide.deflation.placement.rebalancing import HostRows, move_instead
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMSpec, VMStatus

#: VMs that a placement has moved away from one host, or has tried to.
MOST_MOVES: Final = 3
#: One host that others have is waited for so long, in parts of the deadline, where there are as many more to try.
HOST_SHARES: Final = 4
#: And no longer than this, seconds, where nobody has another one of them.
PATIENCE_S: Final = 2.0
#: Why the hosts behind are not tried.
LATE: Final = "the deadline has passed"


class WaitingPlan(RoomPlan):
    """State of a plan that may wait for guests on its way to a place."""

    vm: str
    spec: VMSpec
    purpose: Purpose = "place"
    #: Since when the deadline runs, as ``elapsed_s``.
    clock_from_s: float = 0.0
    #: Hosts still to try, best first; and those that were acted on for the present purpose.
    hosts_left: tuple[str, ...] = ()
    tried: int = 0
    #: Whether no host could be tried at all, when they were ranked last.
    none_ready: bool = False
    #: Whether it has looked for room again before it preempts.
    looked_again: bool = False
    #: Why hosts failed that it did not have in time, since others had them: these say nothing of room.
    kept_off: tuple[str, ...] = ()
    #: On the present host: who was stopped.
    victims: tuple[str, ...] = ()
    #: On the present host: the guests that were waited for, and since when, as ``elapsed_s``.
    waited_for: tuple[str, ...] = ()
    waits_from_s: float = 0.0
    #: For how long they were waited for so far.
    waited_s: float = 0.0
    #: On the present host: the VMs that were to move away, and those that did, with where they are.
    sent_away: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


W = TypeVar("W", bound=WaitingPlan)


def lined_up(state: W, event: HostsChosen) -> W:
    """The plan with the hosts to try, or why there are none. The deadline runs from here, unless it looks once more."""
    from_s = state.clock_from_s if state.looked_again else event.elapsed_s
    why = () if event.hosts or not event.sentence else (event.sentence,)
    return state.having(
        hosts_left=event.hosts,
        tried=0,
        clock_from_s=from_s,
        none_ready=not event.ready,
        failures=(*state.failures, *why),
    )


def hold_s(state: WaitingPlan, elapsed_s: float, others_free: bool) -> float:
    """For how long a host is waited for that another plan has, in seconds: it may have it for minutes.

    :param others_free: whether nobody has one of those that are still to be tried.
    """
    most_s = max(state.deadline_s, 1.0)
    left_s = max(state.clock_from_s + most_s - elapsed_s, 0.0)
    if state.purpose == "preempt":
        # What came before may have taken all of the time, and here the hosts behind are tried all the same.
        left_s = max(left_s, most_s / HOST_SHARES)
    back = state.host is not None and bool(state.waited_for or state.sent_away)
    if back or not state.hosts_left:
        return left_s
    share_s = most_s / min(len(state.hosts_left) + 1, HOST_SHARES)
    if others_free and state.purpose != "preempt":
        # Where one has to go it is not for the sake of a moment.
        share_s = min(share_s, PATIENCE_S)
    return min(share_s, left_s)


def kept_off(state: W, event: HostFailed) -> W:
    """The plan without a host that others have; as long as there is time it comes back to it after the others."""
    assert state.host is not None, "at a host"
    left = (*state.hosts_left, state.host) if time_left(state, event.elapsed_s) > 0 else state.hosts_left
    new = () if event.sentence in state.kept_off else (event.sentence,)
    return state.having(
        host=None,
        hosts_left=left,
        kept_off=(*state.kept_off, *new),
        failures=(*state.failures, *new),
        progress=(*state.progress, *new),
    )


def refusal_code(state: WaitingPlan) -> ReasonCode:
    """The code of a plan that no host has taken; where all that is known is that others had them, that is not room."""
    if state.kept_off and set(state.failures) <= {*state.kept_off, LATE}:
        return ReasonCode.FAILED
    return ReasonCode.NO_HOST_READY if state.none_ready else ReasonCode.NO_ROOM


def time_left(state: WaitingPlan, elapsed_s: float) -> float:
    """What is left of the deadline, in seconds."""
    return state.clock_from_s + state.deadline_s - elapsed_s


def time_to_reclaim(state: WaitingPlan, event: HostRead) -> float:
    """What of that a deflation may take."""
    left = time_left(state, event.elapsed_s)
    return left - kept_for_notice(event.sold.values(), left) if state.purpose == "preempt" else left


def wait_for_guests(
    state: WaitingPlan, event: HostRead, missing: ResourceVector, deflatable: ResourceVector
) -> Step | None:
    """Wait for guests that cannot be deflated yet, if that helps, before anyone is preempted; None: it does not wait.

    All of that within the deadline itself: what runs once more for a preemption is for those that have to go.
    """
    report, placing = event.report, state.purpose == "place"
    silent = not_yet(report, state.left_out)
    coming = ResourceVector(memory_mib=coming_mib(silent))
    if state.victims or not waiting.helps(missing, deflatable, coming, enough=placing):
        return None
    kept_s = kept_for_notice(event.sold.values(), state.deadline_s) if state.spec.priority is Priority.FIXED else 0.0
    until_s = state.deadline_s - kept_s
    in_s = max(vm.not_yet.in_s for vm in silent if vm.not_yet)
    seconds = waiting.waits_s(until_s - event.elapsed_s, in_s, placing and bool(state.hosts_left))
    if not seconds:
        return None
    names = tuple(vm.name for vm in silent)
    instruction = AwaitGuests(host=report.id, vms=names, until_s=until_s)
    # What fell short meanwhile is tried again.
    changes: dict[str, Any] = {"reclaimed": None, "failed_layer": None, "rounds": 0, "gave_less": ()}
    if set(names) <= set(state.waited_for):
        return instruct(state, instruction, **changes)
    sentence = f"{state.vm} waits up to {seconds:.0f} s on {report.id} for {silent_on(silent)}"
    from_s = state.waits_from_s if state.waited_for else event.elapsed_s
    changes |= {"waited_for": tuple(dict.fromkeys((*state.waited_for, *names))), "waits_from_s": from_s}
    return instruct(state, instruction, sentence, **changes).also(Note("waiting", state.vm, report.id, sentence))


def move_away(state: WaitingPlan, event: HostRead, missing: ResourceVector, left_s: float) -> Step | None:
    """Have a VM move to a host that has room for it, if that is enough here, before anyone is preempted; None: none is.

    All has been deflated that can be, so a VM moves at the size that it has.

    :param left_s: of the deadline; what those that may have to go all the same need for their end is kept.
    """
    report, rooms = event.report, event.rooms
    seconds = left_s - kept_for_notice(event.sold.values(), left_s)
    most_mib = waiting.movable_mib(seconds, event.move_mib_s)
    if rooms is None or state.victims or len(state.sent_away) >= MOST_MOVES or not most_mib:
        return None
    known = {row.name: row for row in allocations_of(report) if row.name in event.recorded}
    rows = [row.keeping(row.current) for row in known.values()]
    staying = {*state.left_out, *state.sent_away}
    staying |= {vm.name for vm in report.vms if _stays(event, vm)}
    source = HostRows.of(report.id, report.free.vector(), rows, report.vm_overhead_mib, staying)
    # A move ends what a target holds, which is less than an end: such a VM goes where no other one's leaving is enough.
    free_to_go = replace(source, staying=staying | {vm.name for vm in report.vms if vm.held})
    move = move_instead(free_to_go, rooms, missing, most_mib) or move_instead(source, rooms, missing, most_mib)
    if move is None:
        return None
    sentence = f"moving {move.vm} from {move.source} to {move.target}, so that nobody is preempted for {state.vm}"
    instruction = MoveAway(
        vm=move.vm,
        source=move.source,
        to=move.target,
        step=state.step,
        deadline_s=round(seconds / 2, 3),
        until_s=event.elapsed_s + seconds,
        copy_storage=not all(shares_disk(report, vm) for vm in report.vms if vm.name == move.vm),
    )
    sent_away = (*state.sent_away, move.vm)
    return instruct(state, instruction, sentence, sent_away=sent_away).also(
        Note("moving", move.vm, move.source, sentence)
    )


def moved_away(state: WaitingPlan, instruction: MoveAway, event: Moved) -> Step:
    """Whether it has moved or not, its host is read again."""
    moved = (*state.moved, f"{instruction.vm} to {instruction.to}") if event.done else state.moved
    return instruct(state, ReadHost(host=instruction.source), event.sentence, moved=moved)


def _stays(event: HostRead, vm: VMStatus) -> bool:
    """Whether a VM is not to move away, as far as is known before it is tried."""
    sold = event.sold.get(vm.name)
    has_disk = not (event.copies or shares_disk(event.report, vm))
    return has_disk or bool(cannot_leave(event.report, vm)) or (sold is not None and sold.xml is not None)
