"""Harvest VMs take up what is left, in proportion, within budget and room, by whole cores where need be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ZERO, ResourceVector
from ebbtide.deflation.sharing.harvest import (
    HARVEST_PACE,
    grant,
    harvest_targets,
    harvested,
    is_worth_granting,
)
from ebbtide.deflation.sharing.hysteresis import RoomWatch
from ebbtide.deflation.sharing.proportional import share_room
from tests.unit.deflation.strategies import hosts, needs, runs

EVERYTHING = ResourceVector(1000, 1e6, 1e5, 1e5)
CAPACITY = ResourceVector(16, 16_384)


def harvest(name: str, cores: float, ceiling: float = 8.0, minimum: float = 1.0) -> Allocation:
    nominal = ResourceVector(2, 1024)
    most = ResourceVector(ceiling, 1024)
    least = ResourceVector(minimum, 1024)
    return Allocation(name, Priority.HARVEST, nominal, least, ResourceVector(cores, 1024), most)


def low(name: str, cores: float, memory_mib: float = 4096.0) -> Allocation:
    size = ResourceVector(cores, memory_mib)
    return Allocation(name, Priority.DEFLATABLE, ResourceVector(4, 4096), ResourceVector(0.5, 512), size)


def patient(rows: list[Allocation], room: ResourceVector) -> RoomWatch:
    """A watch that has seen this room for long."""
    watch = RoomWatch(HARVEST_PACE)
    for second in range(0, 102, 2):
        watch.observe(float(second), rows, room)
    return watch


def targets(rows: list[Allocation], room: ResourceVector, budget: ResourceVector = EVERYTHING, whole: str = "") -> dict[str, ResourceVector]:  # fmt: skip  # noqa: E501
    return harvest_targets(rows, room, budget, patient(rows, room), 100.0, whole.split())


def cores(found: dict[str, ResourceVector]) -> dict[str, float]:
    return {name: size.cpu_cores for name, size in found.items()}


def test_room_is_shared_in_proportion_to_ceiling_less_minimum() -> None:
    rows = [harvest("a", 1, ceiling=9), harvest("b", 1, ceiling=5)]
    assert cores(targets(rows, ResourceVector(6))) == {"a": 5, "b": 3}


def test_the_budget_counts_what_is_held_already() -> None:
    rows = [harvest("a", 3), harvest("b", 3)]
    assert harvested(rows) == ResourceVector(4)
    assert cores(targets(rows, ResourceVector(8), ResourceVector(6))) == {"a": 4, "b": 4}
    assert targets(rows, ResourceVector(8), ResourceVector(4)) == {}
    # A budget that became smaller takes nothing from anybody.
    assert targets(rows, ResourceVector(8), ResourceVector(1)) == {}
    assert targets(rows, ResourceVector(8), ZERO) == {}


def test_other_vms_do_not_grow_by_it() -> None:
    rows = [low("low", 1), harvest("a", 2)]
    assert cores(targets(rows, ResourceVector(3))) == {"a": 5}


def test_where_a_guest_cannot_use_fractions_cores_are_whole() -> None:
    rows = [harvest("a", 1), harvest("b", 1), harvest("c", 1)]
    assert cores(targets(rows, ResourceVector(5), whole="a b c")) in (
        {"a": 3, "b": 3, "c": 2},
        {"b": 3, "c": 3, "a": 2},
    )
    assert cores(targets(rows[:1], ResourceVector(0.9), whole="a")) == {}
    assert cores(targets([harvest("a", 1.5)], ResourceVector(1.2), whole="a")) == {"a": 2}


def test_it_waits_for_room_that_stays_and_after_a_shrink() -> None:
    rows, room = [harvest("a", 2)], ResourceVector(1)
    watch = RoomWatch(HARVEST_PACE)
    watch.observe(0.0, rows, room)
    assert harvest_targets(rows, room, EVERYTHING, watch, 0.0) == {}
    watch = patient([harvest("a", 4)], room)
    watch.observe(102.0, rows, ResourceVector(6))
    assert harvest_targets(rows, ResourceVector(6), EVERYTHING, watch, 102.0) == {}


def test_what_deflated_vms_lack_is_theirs_before_any_of_it_is_granted() -> None:
    rows = [low("low", 2), harvest("a", 3)]
    free = ResourceVector(5, 100)
    assert grant(rows, free, CAPACITY, reserve_share=0.0) == ResourceVector(2 + 3)
    assert grant(rows, free, CAPACITY, held=["low"], reserve_share=0.0) == ResourceVector(2 + 5)
    assert grant(rows, free, CAPACITY, reserve_share=0.05).cpu_cores == pytest.approx(2 + 3 - 0.8)
    assert grant(rows, ZERO, CAPACITY) == ResourceVector(2)
    assert grant([low("low", 2)], free, CAPACITY) == ZERO


def test_only_a_budget_that_is_worth_it_is_sent() -> None:
    assert is_worth_granting(ResourceVector(1), ResourceVector(2))
    assert not is_worth_granting(ResourceVector(2), ResourceVector(1))
    assert not is_worth_granting(ResourceVector(2, 100), ResourceVector(2.01, 110))


@runs(200)
@given(hosts(), needs, needs, st.sets(st.integers(0, 6)), st.booleans())
def test_growth_stays_within_room_and_budget_and_ceilings(
    rows: list[Allocation], room: ResourceVector, budget: ResourceVector, whole: set[int], long: bool
) -> None:
    watch = patient(rows, room) if long else RoomWatch(HARVEST_PACE)
    watch.observe(102.0, rows, room)
    names = [f"vm-{number}" for number in whole]
    found = harvest_targets(rows, room, budget, watch, 102.0, names)
    by_name = {row.name: row for row in rows}
    grown = ZERO
    for name, size in found.items():
        row = by_name[name]
        assert row.priority is Priority.HARVEST
        assert row.current.fits_in(size)
        assert size.fits_in(row.upper)
        grown += size.less(row.current)
        if name in names and size.cpu_cores > row.current.cpu_cores + TOLERANCE:
            assert size.cpu_cores == pytest.approx(round(size.cpu_cores), abs=TOLERANCE)
    left = budget.less(harvested(rows))
    for component in COMPONENTS:
        assert grown[component] <= min(room[component], left[component]) + 1e-5
    # The whole is never above the budget by its doing.
    after = harvested(rows) + grown
    assert all(has <= max(most, had) + 1e-5 for has, most, had in zip(after, budget, harvested(rows), strict=True))


@runs(100)
@given(hosts(on_grid=True), needs)
def test_steady_room_is_shared_as_among_all_harvest_vms(rows: list[Allocation], room: ResourceVector) -> None:
    mine = [row for row in rows if row.priority is Priority.HARVEST]
    found = harvest_targets(rows, room, EVERYTHING, patient(rows, room), 100.0)
    fair = share_room(mine, room)
    # What is left out is a flutter; what grows, grows to its share.
    assert {name: fair[name] for name in found} == found


@runs(100)
@given(hosts(), needs, st.integers(0, 100))
def test_a_grant_leaves_the_claims_of_deflated_vms_and_the_reserve(
    rows: list[Allocation], free: ResourceVector, percent: int
) -> None:
    granted = grant(rows, free, CAPACITY, reserve_share=percent / 100)
    more = granted.less(harvested(rows))
    claims = sum((row.nominal.less(row.current) for row in rows if row.priority is Priority.DEFLATABLE), ZERO)
    spare = free.less(claims).less(CAPACITY * (percent / 100))
    assert more.fits_in(spare + ResourceVector(1e-5, 1e-5, 1e-5, 1e-5))
