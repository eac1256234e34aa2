"""Over-commitment of a host: what its VMs are charged beyond what it may hand out, as after its capacity has shrunk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.resources import TOLERANCE, ResourceVector

#: How long a host has to be short of memory before its VMs are deflated for it, seconds: what others of its processes
#: take for a moment is no reason.
SHORT_FOR_S: Final = 10.0
#: What is missing is told in whole steps, MiB: it changes with every breath of the machine.
_STEP_MIB: Final = 64.0

#: Less than one step of a size is none.
_STEPS = ResourceVector(cpu_cores=0.005, memory_mib=1.0, disk_mib_s=0.5, network_mib_s=0.5)


def overcommitment(capacity: ResourceVector, charged: ResourceVector) -> ResourceVector:
    """What is charged beyond the capacity; of disk and network only where the host declares them."""
    return ResourceVector(
        *(
            taken - has if has > 0 and taken - has > step else 0.0
            for has, taken, step in zip(capacity, charged, _STEPS, strict=True)
        )
    )


def may_do_more(
    beyond: ResourceVector, deflatable: ResourceVector, was_beyond: ResourceVector, could_give: ResourceVector
) -> bool:
    """Whether a deflation towards the capacity may do more than the last one did; what is not beyond it cannot matter.

    :param was_beyond: what the last one left.
    :param could_give: the most that was deflatable, before it or after.
    """
    return any(
        over > 0 and (over > was + TOLERANCE or gives > gave + TOLERANCE)
        for over, gives, was, gave in zip(beyond, deflatable, was_beyond, could_give, strict=True)
    )


@dataclass(slots=True)
class MemoryWatch:
    """Whether a host is short of memory, whatever it declares: others on it have taken what its VMs were promised.

    It is once the reserve, too, is spoken for, for a while; and until all of the reserve is there again.
    """

    #: What the VMs have to give back, MiB.
    short_mib: float = 0.0
    _since: float | None = None

    def observe(self, now: float, left_mib: float, reserve_mib: float) -> None:
        """Take in one reading.

        :param now: monotonic seconds.
        :param left_mib: what is available less what VMs may still touch (`untouched_mib`).
        """
        if left_mib >= (reserve_mib if self.short_mib else 0.0):
            self._since, self.short_mib = None, 0.0
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= SHORT_FOR_S:
            self.short_mib = math.ceil((reserve_mib - left_mib) / _STEP_MIB) * _STEP_MIB
