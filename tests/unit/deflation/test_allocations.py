from __future__ import annotations

import pytest
from hypothesis import given

from ebbtide.deflation.allocations import (
    Allocation,
    Priority,
    check_sizes,
    check_target,
    cpu_shares,
    deflatable_capacity,
    free_capacity,
    untouched_mib,
)
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.floors import HARD_FLOOR, effective_minimum
from ebbtide.deflation.resources import TOLERANCE, ZERO, ResourceVector
from tests.unit.deflation.strategies import hosts, runs, vectors

NOMINAL = ResourceVector(4, 1024, 100)
MINIMUM = ResourceVector(0.5, 320, 1)


def make(
    priority: Priority = Priority.DEFLATABLE,
    current: ResourceVector = NOMINAL,
    ceiling: ResourceVector | None = None,
    overhead_mib: float = 0.0,
) -> Allocation:
    return Allocation("vm", priority, NOMINAL, MINIMUM, current, ceiling, overhead_mib)


@runs()
@given(vectors, vectors)
def test_an_effective_minimum_lies_between_floor_and_nominal(minimum: ResourceVector, nominal: ResourceVector) -> None:
    effective = effective_minimum(minimum, nominal)
    assert effective.fits_in(nominal)
    for low, asked, floor, most in zip(effective, minimum, HARD_FLOOR, nominal, strict=True):
        assert low >= min(asked, most)
        assert low >= min(floor, most)


def test_a_minimum_of_nothing_is_raised_to_the_hard_floor() -> None:
    assert effective_minimum(ZERO, NOMINAL) == ResourceVector(0.1, 192, 1, 0)


@pytest.mark.parametrize(
    ("priority", "nominal", "minimum", "ceiling", "field"),
    [
        (Priority.DEFLATABLE, ResourceVector(0.05, 1024), ZERO, None, "nominal.cpu_cores"),
        (Priority.DEFLATABLE, ResourceVector(1, 191), ZERO, None, "nominal.memory_mib"),
        (Priority.DEFLATABLE, NOMINAL, ResourceVector(5), None, "minimum.cpu_cores"),
        (Priority.DEFLATABLE, NOMINAL, ResourceVector(memory_mib=1025), None, "minimum.memory_mib"),
        (Priority.DEFLATABLE, NOMINAL, ResourceVector(network_mib_s=1), None, "minimum.network_mib_s"),
        (Priority.DEFLATABLE, NOMINAL, ZERO, NOMINAL, "ceiling"),
        (Priority.FIXED, NOMINAL, ZERO, NOMINAL, "ceiling"),
        (Priority.HARVEST, NOMINAL, ZERO, None, "ceiling"),
        (Priority.HARVEST, NOMINAL, ZERO, ResourceVector(4, 1023, 100), "ceiling.memory_mib"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_by_name(
    priority: Priority, nominal: ResourceVector, minimum: ResourceVector, ceiling: ResourceVector | None, field: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        check_sizes(priority, nominal, minimum, ceiling)
    assert caught.value.field == field


def test_a_vm_cannot_hold_more_than_its_upper_size() -> None:
    with pytest.raises(InvalidField, match="current"):
        make(current=NOMINAL + ResourceVector(0.01))
    ceiling = NOMINAL * 2
    assert make(Priority.HARVEST, ceiling, ceiling).upper == ceiling


@pytest.mark.parametrize(
    ("priority", "target", "field"),
    [
        (Priority.DEFLATABLE, ResourceVector(0.4, 1024, 100), "target.cpu_cores"),
        (Priority.DEFLATABLE, ResourceVector(4.01, 1024, 100), "target.cpu_cores"),
        (Priority.DEFLATABLE, ResourceVector(4, 319, 100), "target.memory_mib"),
        (Priority.DEFLATABLE, ResourceVector(4, 1024), "target.disk_mib_s"),
        (Priority.DEFLATABLE, ResourceVector(4, 1024, 100, 1), "target.network_mib_s"),
        (Priority.FIXED, ResourceVector(3.99, 1024, 100), "target.cpu_cores"),
    ],
)
def test_a_target_outside_its_range_is_refused_by_name(priority: Priority, target: ResourceVector, field: str) -> None:
    with pytest.raises(InvalidField, match="within") as caught:
        check_target(make(priority), target)
    assert caught.value.field == field


def test_targets_at_both_ends_of_the_range_are_taken() -> None:
    check_target(make(), MINIMUM)
    check_target(make(), NOMINAL)
    check_target(make(Priority.FIXED), NOMINAL)
    check_target(make(Priority.HARVEST, ceiling=NOMINAL * 3), NOMINAL * 3)
    check_target(make(), NOMINAL + ResourceVector(TOLERANCE / 2))


def test_a_fixed_vm_has_nothing_to_give() -> None:
    assert make(Priority.FIXED).deflatable == ZERO
    assert make().deflatable == NOMINAL.less(MINIMUM)


def test_what_a_vm_is_charged_and_has_not_touched_is_spoken_for_and_one_of_unknown_memory_has_all() -> None:
    idle, full, unknown = (make(overhead_mib=320) for _ in range(3))
    assert untouched_mib([(idle, 200.0), (full, 2000.0), (unknown, None)]) == 1344 - 200
    assert untouched_mib([(idle, 0.0), (full, 1300.0)]) == 1344 + 44


def test_free_capacity_counts_overheads_and_what_is_not_ours() -> None:
    capacity = ResourceVector(8, 4096, 200)
    vms = [make(overhead_mib=320)]
    assert free_capacity(capacity, vms) == ResourceVector(4, 4096 - 1344, 100)
    assert free_capacity(capacity, vms, memory_available_mib=500).memory_mib == 500
    assert free_capacity(capacity, vms, memory_available_mib=-20).memory_mib == 0
    assert free_capacity(capacity, vms, memory_available_mib=1e9).memory_mib == 4096 - 1344


@runs()
@given(hosts())
def test_free_and_charges_never_exceed_the_capacity(vms: list[Allocation]) -> None:
    capacity = ResourceVector(64, 65_536, 1000, 1000)
    charges = sum((vm.charge for vm in vms), ZERO)
    free = free_capacity(capacity, vms)
    assert free.less(capacity.less(charges)).less(ResourceVector(1e-6, 1e-6, 1e-6, 1e-6)) == ZERO


@runs()
@given(hosts())
def test_what_is_deflatable_leaves_minimums_and_fixed_vms(vms: list[Allocation]) -> None:
    total = deflatable_capacity(vms)
    by_hand = sum((vm.current.less(vm.minimum) for vm in vms if vm.priority is not Priority.FIXED), ZERO)
    assert total == by_hand


def test_shares_rank_the_priorities_and_stay_in_the_range_of_both_control_group_versions() -> None:
    fixed, deflatable, harvest = (cpu_shares(priority, 4) for priority in Priority)
    assert fixed > deflatable > harvest
    assert cpu_shares(Priority.FIXED, 8) == 2 * fixed
    assert cpu_shares(Priority.FIXED, 1000) == 10_000
    assert cpu_shares(Priority.HARVEST, 0.1) == 2
