"""What a cluster does, by name, and what that is in numbers for the compiled loop."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import numpy as np

from deflation.placement_policies import PlacementPolicy
from simulator.cluster.placing import BEST_FIT, FIRST_FIT, TWO_CHOICES
from simulator.cluster.state import LOW, Arrivals, Rules

_PLACEMENTS: Final = {
    PlacementPolicy.BEST_FIT: BEST_FIT,
    PlacementPolicy.FIRST_FIT: FIRST_FIT,
    PlacementPolicy.TWO_CHOICES: TWO_CHOICES,
}


class ClusterPolicy(StrEnum):
    """How a cluster gets more VMs than it has room for."""

    #: Low-priority VMs are deflated; where minimums are in the way of a high-priority VM, preempted.
    DEFLATION = "deflation"
    #: Low-priority VMs have their nominal size until a high-priority VM preempts them.
    PREEMPTION_ONLY = "preemption_only"
    #: Nobody gives way to anybody: what does not fit is refused.
    NO_OVERCOMMIT = "no_overcommit"
    #: Memory of low-priority VMs is ballooned, CPU is shared by all: :mod:`simulator.cluster.ballooning`.
    MEMORY_BALLOONING = "memory_ballooning"


def rules_of(
    policy: ClusterPolicy,
    placement: PlacementPolicy = PlacementPolicy.BEST_FIT,
    *,
    overhead_mib: float = 0.0,
    start_deflated: bool = False,
    validate: bool = False,
) -> Rules:
    """A policy in numbers.

    :param overhead_mib: memory that a VM costs its node besides its size.
    :param start_deflated: whether low-priority VMs for which no node has room start with what they can get.
    :param validate: check everything after every event; several times as slow.
    """
    return Rules(
        placement=_PLACEMENTS[placement],
        preempts=int(policy in (ClusterPolicy.DEFLATION, ClusterPolicy.PREEMPTION_ONLY)),
        start_deflated=int(start_deflated and policy is ClusterPolicy.DEFLATION),
        balloons=int(policy is ClusterPolicy.MEMORY_BALLOONING),
        validate=int(validate),
        overhead_mib=float(overhead_mib),
    )


def under(policy: ClusterPolicy, arrivals: Arrivals) -> Arrivals:
    """The same VMs as a policy knows them: only deflation and ballooning make use of minimums."""
    if policy in (ClusterPolicy.DEFLATION, ClusterPolicy.MEMORY_BALLOONING):
        low = (arrivals.sold_as == LOW)[:, None]
        return arrivals._replace(minimum=np.where(low, arrivals.minimum, arrivals.upper))
    return arrivals._replace(minimum=arrivals.upper.copy())
