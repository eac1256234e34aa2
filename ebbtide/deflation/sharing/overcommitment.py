"""Over-commitment of a host: what its VMs are charged beyond what it may hand out, as after its capacity has shrunk."""

from __future__ import annotations

from ebbtide.deflation.resources import TOLERANCE, ResourceVector

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
