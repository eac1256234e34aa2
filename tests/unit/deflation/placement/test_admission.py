"""What a placement does next, by numbers alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from ebbtide.deflation.allocations import Allocation, Priority, deflatable_capacity
from ebbtide.deflation.kernels import DEFLATABLE, FIXED, HARVEST
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.placement.placement_step import (
    DEFLATED,
    LEAVE,
    PLACE,
    PREEMPT,
    PREEMPTING,
    RECLAIM,
    REFUSE,
    START,
    decide,
    next_purpose,
)
from ebbtide.deflation.resources import QUANTUM, ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import sizes_to_reach, split_need
from tests.unit.deflation.strategies import hosts, needs, runs

NOTHING = (0.0, 0.0, 0.0, 0.0)


def two_cores(cores: float = 2.0) -> tuple[float, ...]:
    return (cores, 0.0, 0.0, 0.0)


def test_where_nothing_is_missing_the_vm_is_started() -> None:
    for preempting, has_preempted, may_reclaim in itertools.product((False, True), repeat=3):
        assert decide(NOTHING, two_cores(), NOTHING, preempting, has_preempted, may_reclaim) == START


def test_deflation_comes_first_where_it_covers_what_is_missing() -> None:
    assert decide(two_cores(), two_cores(), two_cores(), False, False, True) == RECLAIM
    assert decide(two_cores(), two_cores(1.9), two_cores(1.9), False, False, True) == LEAVE


def test_who_may_preempt_deflates_what_there_is_and_stops_vms_for_the_rest() -> None:
    assert decide(two_cores(), two_cores(1.9), two_cores(1.9), True, False, True) == RECLAIM
    assert decide(two_cores(), two_cores(1.9), two_cores(1.9), True, False, False) == PREEMPT
    assert decide(two_cores(), NOTHING, NOTHING, True, False, True) == PREEMPT


def test_what_deflation_could_not_do_is_not_tried_again() -> None:
    assert decide(two_cores(), two_cores(), two_cores(), False, False, False) == LEAVE
    assert decide(two_cores(), two_cores(), two_cores(), True, True, True) == PREEMPT


@pytest.mark.parametrize(
    ("purpose", "priority", "deflated", "then"),
    [
        (PLACE, FIXED, False, PREEMPTING),
        (PLACE, FIXED, True, PREEMPTING),
        (PLACE, DEFLATABLE, False, REFUSE),
        (PLACE, DEFLATABLE, True, DEFLATED),
        (PLACE, HARVEST, False, REFUSE),
        (PREEMPTING, FIXED, False, REFUSE),
        (DEFLATED, DEFLATABLE, True, REFUSE),
    ],
)
def test_only_a_fixed_vm_preempts_and_nothing_is_looked_for_twice(
    purpose: int, priority: int, deflated: bool, then: int
) -> None:
    assert next_purpose(purpose, priority, deflated) == then


def test_what_a_host_does_not_declare_is_not_missing() -> None:
    missing = [9.0] * 4
    placement_step.missing_of((4, 2048, 100, 100), (1.5, 4096, 0, 0), (8, 8192, 0, 500), missing)
    assert missing == [2.5, 0.0, 0.0, 100.0]


def test_what_rounding_leaves_on_the_wire_is_missing_to_nobody() -> None:
    missing = [9.0] * 4
    placement_step.missing_of((4.0009, 2048.002, 0, 0), (4, 2048, 0, 0), (8, 8192, 0, 0), missing)
    assert missing == [0.0, pytest.approx(0.002), 0.0, 0.0]


def test_a_need_is_in_whole_steps_and_no_more_than_can_be_deflated() -> None:
    need = [0.0] * 4
    placement_step.need_of((1.234, 100.2, 7.0, 0.0), (9.0, 100.5, 9.0, 9.0), need)
    assert need == [1.24, 100.5, 7.0, 0.0]


@runs(200)
@given(needs, needs)
def test_a_need_covers_what_is_missing_by_less_than_a_step(missing: ResourceVector, deflatable: ResourceVector) -> None:
    need = [0.0] * 4
    placement_step.need_of(tuple(missing), tuple(deflatable), need)
    for amount, lacks, most, quantum in zip(need, missing, deflatable, QUANTUM, strict=True):
        assert amount <= most
        assert amount >= min(lacks, most) - 1e-5
        assert amount < lacks + quantum


@runs(200)
@given(hosts(), needs)
def test_targets_go_below_the_minimums_only_where_those_stand_in_the_way(
    vms: list[Allocation], missing: ResourceVector
) -> None:
    targets, in_the_way = sizes_to_reach(vms, missing)
    assert set(targets) == {a.name for a in vms}
    assert in_the_way != missing.fits_in(deflatable_capacity(vms))
    for a in vms:
        assert targets[a.name].fits_in(a.current)
        if a.priority is Priority.FIXED:
            assert targets[a.name] == a.current
        elif not in_the_way:
            assert a.minimum.fits_in(targets[a.name])
    if not in_the_way:
        split = split_need(vms, missing)
        assert targets == {a.name: split.targets.get(a.name, a.current) for a in vms}


def test_sizes_below_the_minimums_share_what_is_missing_in_proportion() -> None:
    nominal, minimum = ResourceVector(4, 4096), ResourceVector(3, 4096)
    vms = [Allocation(name, Priority.DEFLATABLE, nominal, minimum, nominal) for name in "ab"]
    targets, in_the_way = sizes_to_reach(vms, ResourceVector(4))
    assert in_the_way
    assert {name: size.cpu_cores for name, size in targets.items()} == {"a": 2.0, "b": 2.0}
    assert sizes_to_reach(vms, ZERO) == ({"a": nominal, "b": nominal}, False)
