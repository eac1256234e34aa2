"""What a host's VMs hold beyond its capacity."""

from __future__ import annotations

import pytest

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.overcommitment import overcommitment

CAPACITY = ResourceVector(cpu_cores=4, memory_mib=2000)


@pytest.mark.parametrize(
    ("charged", "beyond"),
    [
        (ResourceVector(4, 2000), ZERO),
        (ResourceVector(5, 2000), ResourceVector(1)),
        (ResourceVector(3, 2300), ResourceVector(0, 300)),
        (ResourceVector(4.004, 2000.9), ZERO),
        (ResourceVector(1, 100, disk_mib_s=500), ZERO),
    ],
    ids=["just full", "cores", "memory", "rounding", "what is not declared"],
)
def test_only_what_is_charged_beyond_what_is_declared_counts(charged: ResourceVector, beyond: ResourceVector) -> None:
    assert overcommitment(CAPACITY, charged) == beyond
