"""The rule of Proxmox VE's automatic ballooning as a rival.

Read in PVE/AutoBalloon.pm and PVE/Service/pvestatd.pm of pve-manager; none of its code is here. Every 10 s: where the
host's memory in use is off 80 % by more than 10 MiB, each VM with a balloon goes by at most 100 MiB to its minimum and
an equal part of what is left. Coming down, VMs go first whose free memory is above a quarter of their minimum; going
up, the others. Only where those cannot move at all do all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GOAL: Final = 0.8
DEAD_MIB: Final = 10.0
STEP_MIB: Final = 100.0
FREE_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Ballooned:
    """A VM with a balloon, MiB."""

    name: str
    current: float
    minimum: float
    nominal: float
    #: What its guest does not use at all.
    free: float


def ballooned(vms: Sequence[Ballooned], used_mib: float, capacity_mib: float) -> dict[str, float]:
    """The sizes that VMs get now, by name; those that stay as they are are left out.

    :param used_mib: of the host's memory.
    """
    goal_mib = GOAL * capacity_mib - used_mib
    if abs(goal_mib) <= DEAD_MIB:
        return {}
    roomy = [vm for vm in vms if vm.free > FREE_SHARE * vm.minimum]
    tight = [vm for vm in vms if vm.free <= FREE_SHARE * vm.minimum]
    return _moved(roomy if goal_mib < 0 else tight, goal_mib) or _moved(vms, goal_mib)


def _moved(vms: Sequence[Ballooned], goal_mib: float) -> dict[str, float]:
    together = max(sum(vm.current - vm.minimum for vm in vms) + goal_mib, 0.0)
    level = _level([vm.nominal - vm.minimum for vm in vms], together)
    moved = {}
    for vm in vms:
        wanted = min(vm.minimum + level, vm.nominal)
        size = min(max(wanted, vm.current - STEP_MIB), vm.current + STEP_MIB)
        if (size - vm.current) * goal_mib > 0:
            moved[vm.name] = size
    return moved


def _level(spans: Sequence[float], together: float) -> float:
    """What each has above its minimum so that all have so much together, none more than its span."""
    left, others = together, len(spans)
    for span in sorted(spans):
        if span * others >= left:
            return left / others
        left, others = left - span, others - 1
    return max(spans, default=0.0)
