"""Wait of a placement for guests that cannot be deflated yet."""

from __future__ import annotations

from typing import Any

from cluster_manager.plans.plans import AwaitGuests, HostRead, Note, Purpose, RoomPlan, Step, instruct
from cluster_manager.plans.preemption import kept_for_notice
from cluster_manager.plans.report_queries import coming_mib, not_yet, silent_on
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.placement import waiting
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.vms import VMSpec


class WaitingPlan(RoomPlan):
    """State of a plan that may wait for guests on its way to a place."""

    vm: str
    spec: VMSpec
    purpose: Purpose = "place"
    #: Hosts still to try, best first.
    hosts_left: tuple[str, ...] = ()
    #: On the present host: who was stopped.
    victims: tuple[str, ...] = ()
    #: On the present host: the guests that were waited for, and since when, as ``elapsed_s``.
    waited_for: tuple[str, ...] = ()
    waits_from_s: float = 0.0
    #: For how long they were waited for so far.
    waited_s: float = 0.0


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
