"""What a host's VMs hold beyond its capacity."""

from __future__ import annotations

import pytest

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.overcommitment import SHORT_FOR_S, MemoryWatch, may_do_more, overcommitment

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


def test_a_host_is_short_of_memory_once_its_reserve_has_been_spoken_for_for_a_while_and_until_it_is_there_again() -> (
    None
):
    watch, told = MemoryWatch(), []
    readings = [
        (0.0, 10.0),
        (1.0, -1.0),
        (2.0, 0.0),
        (3.0, -1.0),
        (3.0 + SHORT_FOR_S, -100.0),
        (14.0, 400.0),
        (15.0, 512.0),
    ]
    for now, left_mib in [*readings, (16.0, 1.0)]:
        watch.observe(now, left_mib, 512.0)
        told.append(watch.short_mib)
    assert told == [0.0, 0.0, 0.0, 0.0, 640.0, 128.0, 0.0, 0.0]


def test_a_host_without_a_reserve_is_short_of_what_is_missing() -> None:
    watch = MemoryWatch()
    for now in (0.0, SHORT_FOR_S):
        watch.observe(now, -1.0, 0.0)
    assert watch.short_mib == 64.0
    watch.observe(SHORT_FOR_S + 1.0, 0.0, 0.0)
    assert watch.short_mib == 0.0
