"""Reasons for which a VM may be preempted: lack of room that was measured, never a call that failed.

Whatever a plan comes to know of a host that lacks room is one of `Evidence`; what may follow stands in one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from ebbtide.messages.operations import OperationState


class PreemptionReason(StrEnum):
    """Why a VM was preempted, as it stands in the record."""

    MINIMUM = "minimum"
    SHORTFALL = "shortfall"


class Evidence(StrEnum):
    """What a plan knows of a host on which room is lacking."""

    #: All VMs at their minimums would leave too little.
    MINIMUMS = "minimums"
    #: What can be deflated was, or nothing can be, and a verified reading says that room is missing.
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
    :param calls_failed: whether VMs are left out because calls failed.
    :param nothing_to_take: whether the host's agent says that nothing can be deflated now.
    """
    if ended is OperationState.FAILED:
        return Evidence.RECLAIM_FAILED
    if minimums_in_the_way:
        return Evidence.MINIMUMS
    if calls_failed:
        return Evidence.CALLS_FAILED
    return Evidence.MEASURED if rounds or nothing_to_take else Evidence.UNTRIED
