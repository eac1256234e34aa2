"""What a placement waits for, without holding any host: guests that cannot be deflated yet, a VM that moves away.

Both come before anyone is preempted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from cluster_manager.plans.live_migrations import cannot_leave
from cluster_manager.plans.plans import (
    AwaitGuests,
    HostRead,
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
from ebbtide.messages.vms import VMSpec, VMStatus

#: VMs that a placement has moved away from one host, or has tried to.
MOST_MOVES: Final = 3
#: What is copied of a VM in a second at the least, on a link of 1 Gbit/s; and the shortest time for a move, seconds.
MOVE_MIB_S: Final = 100.0
SHORTEST_MOVE_S: Final = 5.0


class WaitingPlan(RoomPlan):
    """State of a plan that may wait for guests on its way to a place."""

    vm: str
    spec: VMSpec
    purpose: Purpose = "place"
    #: Since when the deadline runs, as ``elapsed_s``.
    clock_from_s: float = 0.0
    #: Hosts still to try, best first.
    hosts_left: tuple[str, ...] = ()
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
    if rooms is None or state.victims or len(state.sent_away) >= MOST_MOVES or seconds < SHORTEST_MOVE_S:
        return None
    known = {row.name: row for row in allocations_of(report) if row.name in event.recorded}
    rows = [row.keeping(row.current) for row in known.values()]
    staying = {*state.left_out, *state.sent_away}
    staying |= {vm.name for vm in report.vms if _stays(event, vm)}
    source = HostRows.of(report.id, report.free.vector(), rows, report.vm_overhead_mib, staying)
    # A move ends what a target holds, which is less than an end: such a VM goes where no other one's leaving is enough.
    free_to_go = replace(source, staying=staying | {vm.name for vm in report.vms if vm.held})
    most_mib = MOVE_MIB_S * seconds / 2
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
