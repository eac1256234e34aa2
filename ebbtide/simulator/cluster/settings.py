"""Rules of a cluster by name, and what they are in numbers for the compiled loop."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from ebbtide.deflation.kernels import STOPS
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.simulator.cluster.placing import PLACEMENTS
from ebbtide.simulator.cluster.state import LOW, Arrivals, Rules


class ClusterPolicy(StrEnum):
    """How a cluster gets more VMs than it has room for."""

    #: Low-priority VMs are deflated; where minimums are in the way of a high-priority VM, preempted.
    DEFLATION = "deflation"
    #: Low-priority VMs have their nominal size until a high-priority VM preempts them.
    PREEMPTION_ONLY = "preemption_only"
    #: No VM gives way to another: what does not fit is refused.
    NO_OVERCOMMIT = "no_overcommit"
    #: Memory of low-priority VMs is ballooned, CPU is shared by all: `simulator.cluster.ballooning`.
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
        placement=PLACEMENTS.index(placement),
        preempts=int(policy in (ClusterPolicy.DEFLATION, ClusterPolicy.PREEMPTION_ONLY)),
        start_deflated=int(start_deflated and policy is ClusterPolicy.DEFLATION),
        balloons=int(policy is ClusterPolicy.MEMORY_BALLOONING),
        validate=int(validate),
        choice=STOPS,
        overhead_mib=float(overhead_mib),
    )


def under(policy: ClusterPolicy, arrivals: Arrivals) -> Arrivals:
    """The same VMs as a policy knows them: only deflation and ballooning make use of minimums."""
    if policy in (ClusterPolicy.DEFLATION, ClusterPolicy.MEMORY_BALLOONING):
        low = (arrivals.sold_as == LOW)[:, None]
        return arrivals._replace(minimum=np.where(low, arrivals.minimum, arrivals.upper))
    return arrivals._replace(minimum=arrivals.upper.copy())
