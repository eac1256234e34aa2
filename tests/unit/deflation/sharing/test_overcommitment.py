"""What a host's VMs hold beyond its capacity."""

from __future__ import annotations

import pytest

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.overcommitment import may_do_more, overcommitment

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


@pytest.mark.parametrize(
    ("beyond", "deflatable", "may"),
    [
        (ResourceVector(memory_mib=300), ResourceVector(2.0, 500), False),
        (ResourceVector(memory_mib=300), ResourceVector(4.0, 500), False),
        (ResourceVector(memory_mib=300), ResourceVector(0.0, 600), True),
        (ResourceVector(memory_mib=400), ResourceVector(0.0, 200), True),
        (ResourceVector(1.0, 300), ResourceVector(0.0, 200), True),
        (ResourceVector(memory_mib=200), ResourceVector(0.0, 200), False),
        (ResourceVector(), ResourceVector(9.0, 9000), False),
    ],
    ids=["as at the last", "more cores", "more memory", "further beyond", "in cores, too", "nearer", "within"],
)
def test_a_deflation_may_do_more_than_the_last_by_what_the_host_is_beyond_its_capacity_in_alone(
    beyond: ResourceVector, deflatable: ResourceVector, may: bool
) -> None:
    assert may_do_more(beyond, deflatable, ResourceVector(memory_mib=300), ResourceVector(2.0, 500)) == may
