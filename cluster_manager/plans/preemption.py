"""Reasons for which a VM may be preempted: lack of room that was measured, never a call that failed.

Whatever a plan comes to know of a host that lacks room is one of `Evidence`; what may follow stands in one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from ebbtide.deflation import kernels
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.placement import waiting
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import NOTICE_S, OnPreemption, VMSpec, VMState, VMStatus


class PreemptionReason(StrEnum):
    """Why a VM was preempted, as it stands in the record."""

    MINIMUM = "minimum"
    SHORTFALL = "shortfall"


class Evidence(StrEnum):
    """What a plan knows of a host on which room is lacking."""

    #: All VMs at their minimums would leave too little.
    MINIMUMS = "minimums"
    #: What can be deflated was, or nothing can be, and a verified reading says that room is missing. Guests that do not
    #: answer yet have been waited for (`waits.wait_for_guests`).
    MEASURED = "measured"
    #: A VM could not be deflated: calls of the hypervisor failed, or it is paused.
    CALLS_FAILED = "calls-failed"
    #: The deflation as a whole could not be carried out.
    RECLAIM_FAILED = "reclaim-failed"
    #: No deflation has come to its end: its host forgot it, or there was no time for one.
    UNTRIED = "untried"


#: What may follow from each; None: no VM is preempted for it.
REASONS: Final[Mapping[Evidence, PreemptionReason | None]] = {
    Evidence.MINIMUMS: PreemptionReason.MINIMUM,
    Evidence.MEASURED: PreemptionReason.SHORTFALL,
    Evidence.CALLS_FAILED: None,
    Evidence.RECLAIM_FAILED: None,
    Evidence.UNTRIED: None,
}


def evidence(
    minimums_in_the_way: bool, rounds: int, ended: OperationState | None, calls_failed: bool, nothing_to_take: bool
) -> Evidence:
    """What is known of a host on which room is lacking.

    :param rounds: deflations there that have come to an end.
    :param ended: how the last one did.
    :param calls_failed: whether others would go for what VMs could give that are left out, since calls failed.
    :param nothing_to_take: whether the host's agent says, while there is time, that nothing can be deflated now.
    """
    if ended is OperationState.FAILED:
        return Evidence.RECLAIM_FAILED
    if not (rounds or nothing_to_take):
        return Evidence.UNTRIED
    if calls_failed:
        return Evidence.CALLS_FAILED
    return Evidence.MINIMUMS if minimums_in_the_way else Evidence.MEASURED


def is_deleted(sold: VMSpec | None, adopted: bool) -> bool:
    """Whether a VM goes with its disk when it is preempted: only where its owner said so, and it was made here.

    :param sold: as what, by the manager's record; None: it does not say.
    """
    return sold is not None and sold.on_preemption is OnPreemption.DELETE and not adopted


#: See `least_s`.
LEAST_S: Final = 5.0
#: For a VM of which its host does not say since when it runs, seconds.
UNKNOWN_S: Final = 1e9
#: A host's clock may be ahead of the manager's by so much, seconds. A start that is to come later was dated by a clock
#: that was wrong then: when it was is not known.
AHEAD_S: Final = 60.0


def costs(vms: Iterable[VMStatus], sold: Mapping[str, VMSpec], now: float) -> dict[str, float]:
    """What the preemption of each VM would cost, in seconds of its work (`kernels.preemption_cost`).

    :param sold: as what, by the manager's record.
    :param now: seconds since the epoch.
    """
    found = {}
    for vm in vms:
        spec, choice = sold.get(vm.name), kernels.STOPS
        if is_deleted(spec, vm.adopted):
            choice = kernels.DELETES
        elif spec is not None and spec.on_preemption is OnPreemption.SUSPEND:
            choice = kernels.SUSPENDS
        # Work of which it is not known how old it is counts as older than any other; one that is off has none to lose.
        known = vm.started_at is not None and vm.started_at <= now + AHEAD_S
        work_s = max(now - vm.started_at, 0.0) if known and vm.started_at is not None else UNKNOWN_S
        if vm.state is VMState.STOPPED:
            work_s = 0.0
        found[vm.name] = kernels.preemption_cost(choice, vm.current.memory_mib, work_s)
    return found


def notice(sold: VMSpec | None, left_s: float) -> float:
    """How long a VM has to end its work, in seconds: what it was promised, as far as the arriving VM can wait.

    Those that have to go together have theirs at the same time.

    :param left_s: of the arriving VM's deadline.
    """
    wished_s = NOTICE_S if sold is None else sold.preemption_notice_s
    return round(min(wished_s, max(left_s, 0.0)), 3)


def least_s(deadline_s: float) -> float:
    """The least time that a deflation has to have had for its shortfall to be a reason, and that those have for their
    end that are preempted then: of a short deadline a tenth.
    """
    return min(LEAST_S, deadline_s / 10)


def kept_for_notice(sold: Iterable[VMSpec], left_s: float) -> float:
    """What a deflation leaves of the deadline to those that may have to go all the same: half of it at the most."""
    longest_s = max((vm.preemption_notice_s for vm in sold if vm.priority is not Priority.FIXED), default=0.0)
    return waiting.kept_for_notice_s(longest_s, left_s)


def why_preempted(reason: PreemptionReason, missing: ResourceVector, failed_layer: str | None, arriving: str) -> str:
    """What stands in the record of a preemption: what was missing, and for whom."""
    too_little = reason is PreemptionReason.MINIMUM
    why = f"the minimums leave {missing} too little" if too_little else f"deflation fell short of {missing}"
    return why + (f" in layer {failed_layer}" if failed_layer else "") + f" for {arriving}"
