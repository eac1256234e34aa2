from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import COMPONENTS, QUANTUM, TOLERANCE, ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import (
    choose_victims,
    share_room,
    sizes_to_reach,
    split_need,
    split_need_in_turn,
)
from tests.unit.deflation.strategies import hosts, needs, runs

#: Rounding in sums of many sizes.
SLACK = 1e-5


def vm(
    name: str,
    current: tuple[float, float],
    nominal: tuple[float, float] = (4, 4096),
    minimum: tuple[float, float] = (0.1, 192),
    priority: Priority = Priority.DEFLATABLE,
    ceiling: tuple[float, float] | None = None,
    overhead_mib: float = 0,
) -> Allocation:
    return Allocation(
        name,
        priority,
        ResourceVector(*nominal),
        ResourceVector(*minimum),
        ResourceVector(*current),
        ResourceVector(*ceiling) if ceiling else None,
        overhead_mib,
    )


def sizes(vms: Sequence[Allocation], targets: Mapping[str, ResourceVector], component: str) -> list[float]:
    return [targets.get(a.name, a.current)[component] for a in vms]


# --- splitting a need ------------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_contracts() -> None:
    """M = (4, 4), current (4, 2), R = 2: the one that has given already gives nothing more."""
    vms = [vm("a", (4, 4096)), vm("b", (2, 4096))]
    split = split_need(vms, ResourceVector(2))
    assert sizes(vms, split.targets, "cpu_cores") == [2, 2]
    assert split.shortfall == ZERO
    assert "b" not in split.targets


def test_a_need_is_shared_in_proportion_to_what_lies_above_the_minimums() -> None:
    vms = [vm("a", (4, 4096), minimum=(2, 192)), vm("b", (4, 4096), minimum=(1, 192))]
    targets = split_need(vms, ResourceVector(2.5)).targets
    assert sizes(vms, targets, "cpu_cores") == [3, 2.5]


def test_harvest_vms_give_before_deflatable_ones() -> None:
    harvest = vm("h", (6, 4096), nominal=(2, 2048), minimum=(1, 512), priority=Priority.HARVEST, ceiling=(8, 8192))
    vms = [vm("a", (4, 4096)), harvest]
    targets = split_need(vms, ResourceVector(5)).targets
    assert set(targets) == {"h"}
    assert targets["h"].cpu_cores == 1
    targets = split_need(vms, ResourceVector(6)).targets
    assert (targets["h"].cpu_cores, targets["a"].cpu_cores) == (1, 3)


def test_each_resource_has_an_alpha_of_its_own() -> None:
    vms = [vm("a", (4, 4096)), vm("b", (2, 4096), nominal=(4, 4096))]
    targets = split_need(vms, ResourceVector(1, 2048)).targets
    assert sizes(vms, targets, "cpu_cores") == [3, 2]
    assert sizes(vms, targets, "memory_mib") == [3072, 3072]


def test_what_no_vm_can_give_is_a_shortfall() -> None:
    vms = [vm("a", (1, 4096), minimum=(0.5, 192)), vm("f", (4, 4096), priority=Priority.FIXED)]
    split = split_need(vms, ResourceVector(2))
    assert split.targets["a"].cpu_cores == 0.5
    assert split.shortfall == ResourceVector(1.5)
    assert split_need([], ResourceVector(1)).shortfall == ResourceVector(1)


def test_those_that_are_asked_last_give_only_what_the_others_cannot() -> None:
    def of(name: str) -> Allocation:
        size = ResourceVector(2, 2048)
        return Allocation(name, Priority.DEFLATABLE, nominal=size, minimum=ResourceVector(1, 1024), current=size)

    rows = [of("one"), of("other")]
    for memory_mib, targets, shortfall in (
        (1024, {"other": 1024}, 0),
        (1536, {"one": 1536, "other": 1024}, 0),
        (4096, {"one": 1024, "other": 1024}, 2048),
    ):
        split = split_need_in_turn(rows, ResourceVector(memory_mib=memory_mib), {"one"})
        assert {name: size.memory_mib for name, size in split.targets.items()} == targets
        assert split.shortfall.memory_mib == shortfall


def test_a_vm_that_does_not_move_keeps_a_size_that_is_off_the_grid() -> None:
    """Its size is a measured bound; rounding it down would take half a step from it for nothing."""
    vms = [vm("a", (4, 4096)), vm("b", (1.2345, 4096))]
    assert set(split_need(vms, ResourceVector(1)).targets) == {"a"}


def test_a_vm_below_its_minimum_is_neither_raised_nor_lowered() -> None:
    vms = [vm("a", (4, 4096)), vm("b", (1, 4096), minimum=(2, 192))]
    assert sizes(vms, split_need(vms, ResourceVector(1)).targets, "cpu_cores") == [3, 1]
    assert sizes(vms, split_need(vms, ResourceVector(10)).targets, "cpu_cores") == [0.1, 1]


@runs(400)
@given(hosts(), needs)
def test_a_split_frees_the_need_or_all_there_is(vms: list[Allocation], need: ResourceVector) -> None:
    split = split_need(vms, need)
    for component in COMPONENTS:
        freed = math.fsum(a.current[component] for a in vms) - math.fsum(sizes(vms, split.targets, component))
        assert freed + split.shortfall[component] >= need[component] - SLACK
        if split.shortfall[component] > TOLERANCE:
            assert freed == pytest.approx(math.fsum(a.deflatable[component] for a in vms), abs=SLACK)
        else:
            movers = sum(component_changed(a, split.targets, component) for a in vms)
            assert freed <= need[component] + QUANTUM[component] * max(movers, 1) + SLACK


@runs(200)
@given(hosts(on_grid=True), needs)
def test_on_the_grid_a_split_frees_less_than_a_step_too_much(vms: list[Allocation], need: ResourceVector) -> None:
    """Harvest and deflatable VMs are rounded one after the other, so a step for each group."""
    split = split_need(vms, need)
    for component in ("cpu_cores", "memory_mib"):
        freed = math.fsum(a.current[component] for a in vms) - math.fsum(sizes(vms, split.targets, component))
        off_grid = any(abs(a.minimum[component] / QUANTUM[component] % 1) > 1e-6 for a in vms)
        if not off_grid and need[component] > TOLERANCE:
            assert freed < need[component] + QUANTUM[component] + SLACK
        for a in vms:
            size = split.targets.get(a.name, a.current)[component]
            if size != a.current[component] and size != a.minimum[component]:
                steps = size / QUANTUM[component]
                assert abs(steps - round(steps)) < 1e-6


@runs(400)
@given(hosts(), needs)
def test_a_split_keeps_everybody_within_bounds(vms: list[Allocation], need: ResourceVector) -> None:
    targets = split_need(vms, need).targets
    for a in vms:
        target = targets.get(a.name, a.current)
        assert target.fits_in(a.current), "nobody grows"
        assert a.minimum.fits_in(target), "nobody falls below the minimum"
        if a.priority is Priority.FIXED:
            assert a.name not in targets
        assert a.name not in targets or target != a.current


@runs(400)
@given(hosts(), needs)
def test_deflatable_vms_give_nothing_while_harvest_vms_have_something(
    vms: list[Allocation], need: ResourceVector
) -> None:
    targets = split_need(vms, need).targets
    for component in COMPONENTS:
        if any(a.priority is Priority.DEFLATABLE and component_changed(a, targets, component) for a in vms):
            for a in vms:
                if a.priority is Priority.HARVEST:
                    assert targets.get(a.name, a.current)[component] == pytest.approx(a.minimum[component], abs=SLACK)


@runs(400)
@given(hosts(), needs)
def test_those_that_move_share_one_alpha_and_the_others_had_given_more(
    vms: list[Allocation], need: ResourceVector
) -> None:
    targets = split_need(vms, need).targets
    for group, component in itertools.product((Priority.HARVEST, Priority.DEFLATABLE), COMPONENTS):
        members = [a for a in vms if a.priority is group and a.upper[component] > a.minimum[component] + TOLERANCE]
        levels = {a.name: level(a, targets, component) for a in members}
        steps = {a.name: step(a, component) for a in members}
        movers = [a for a in members if component_changed(a, targets, component)]
        for a, b in itertools.combinations(movers, 2):
            assert abs(levels[a.name] - levels[b.name]) <= steps[a.name] + steps[b.name]
        for mover, other in itertools.product(movers, members):
            assert levels[mover.name] <= levels[other.name] + steps[mover.name] + steps[other.name]


@runs(300)
@given(hosts(), needs, st.floats(0, 1))
def test_a_larger_need_leaves_nobody_better_off(vms: list[Allocation], need: ResourceVector, share: float) -> None:
    less, more = split_need(vms, need * share), split_need(vms, need)
    assert less.shortfall.less(more.shortfall).is_zero()
    for a in vms:
        for component in COMPONENTS:
            large = less.targets.get(a.name, a.current)[component]
            small = more.targets.get(a.name, a.current)[component]
            # Largest remainders may fall to another VM: one step.
            assert small <= large + QUANTUM[component] + SLACK


@runs()
@given(hosts(), needs)
def test_the_order_of_the_vms_does_not_matter(vms: list[Allocation], need: ResourceVector) -> None:
    assert split_need(vms, need).targets == split_need(vms[::-1], need).targets


@runs()
@given(hosts())
def test_no_need_changes_nothing(vms: list[Allocation]) -> None:
    split = split_need(vms, ZERO)
    assert split.targets == {}
    assert split.shortfall == ZERO


# --- sharing room ----------------------------------------------------------------------------------------------------


def test_the_one_that_has_given_most_gets_room_first() -> None:
    vms = [vm("a", (3, 4096)), vm("b", (1, 4096))]
    assert sizes(vms, share_room(vms, ResourceVector(2)), "cpu_cores") == [3, 3]
    assert sizes(vms, share_room(vms, ResourceVector(3)), "cpu_cores") == [3.5, 3.5]
    assert sizes(vms, share_room(vms, ResourceVector(30)), "cpu_cores") == [4, 4]


def test_harvest_vms_grow_last_and_to_their_ceiling() -> None:
    harvest = vm("h", (1, 4096), nominal=(2, 4096), minimum=(1, 512), priority=Priority.HARVEST, ceiling=(8, 4096))
    vms = [vm("a", (2, 4096)), harvest]
    assert share_room(vms, ResourceVector(2)) == {"a": ResourceVector(4, 4096)}
    assert sizes(vms, share_room(vms, ResourceVector(5)), "cpu_cores") == [4, 4]
    assert sizes(vms, share_room(vms, ResourceVector(50)), "cpu_cores") == [4, 8]


def test_a_vm_below_its_minimum_is_not_given_more_than_there_is() -> None:
    vms = [vm("a", (1, 4096), minimum=(2, 192))]
    assert sizes(vms, share_room(vms, ResourceVector(0.5)), "cpu_cores") == [1.5]


@runs(400)
@given(hosts(), needs)
def test_no_more_is_given_than_there_is_and_nobody_exceeds_its_upper_size(
    vms: list[Allocation], room: ResourceVector
) -> None:
    targets = share_room(vms, room)
    for component in COMPONENTS:
        rise = math.fsum(sizes(vms, targets, component)) - math.fsum(a.current[component] for a in vms)
        assert rise <= room[component] + SLACK
        lacking = [a for a in vms if a.priority is not Priority.FIXED and not a.upper.less(a.current).is_zero()]
        left = [targets.get(a.name, a.current)[component] < a.upper[component] - TOLERANCE for a in lacking]
        if any(left):
            assert rise >= room[component] - QUANTUM[component] * len(vms) - SLACK, "room was held back"
    for a in vms:
        target = targets.get(a.name, a.current)
        assert a.current.fits_in(target), "nobody shrinks"
        assert target.fits_in(a.upper)
        assert a.priority is not Priority.FIXED or a.name not in targets


@runs(400)
@given(hosts(), needs)
def test_sharing_levels_what_splitting_has_made_uneven(vms: list[Allocation], room: ResourceVector) -> None:
    targets = share_room(vms, room)
    for group, component in itertools.product((Priority.HARVEST, Priority.DEFLATABLE), COMPONENTS):
        members = [a for a in vms if a.priority is group and a.upper[component] > a.minimum[component] + TOLERANCE]
        movers = [a for a in members if component_changed(a, targets, component)]
        for mover, other in itertools.product(movers, members):
            slack = step(mover, component) + step(other, component)
            assert level(other, targets, component) <= level(mover, targets, component) + slack


@runs(200)
@given(st.lists(st.tuples(st.integers(10, 800), st.integers(192, 8192)), min_size=1, max_size=6), st.floats(0, 1))
def test_what_was_split_from_full_vms_is_shared_back_to_them(rows: list[tuple[int, int]], share: float) -> None:
    vms = [vm(f"vm-{i}", (c / 100, m), nominal=(c / 100, m)) for i, (c, m) in enumerate(rows)]
    need = sum((a.deflatable for a in vms), ZERO) * share
    split = split_need(vms, need)
    shrunk = [Allocation(a.name, a.priority, a.nominal, a.minimum, split.targets.get(a.name, a.current)) for a in vms]
    freed = sum((a.current.less(b.current) for a, b in zip(vms, shrunk, strict=True)), ZERO)
    back = share_room(shrunk, freed)
    for before, after in zip(vms, shrunk, strict=True):
        assert before.current.less(back.get(after.name, after.current)).less(ResourceVector(1e-5, 1e-5)).is_zero()


# --- whom to preempt -------------------------------------------------------------------------------------------------


def test_those_farthest_from_their_targets_go_first() -> None:
    vms = [vm("a", (2, 512), minimum=(2, 192)), vm("b", (2, 512), minimum=(1, 192))]
    targets = {"a": ResourceVector(1.5), "b": ResourceVector(0.5)}
    assert choose_victims(vms, ResourceVector(2), targets, {"b": 9.0}) == ["b"], "however much it loses"
    targets["a"] = ResourceVector(0.5)
    assert choose_victims(vms, ResourceVector(2), targets, {"b": 9.0}) == ["a"]


@pytest.mark.parametrize("missing", [0.05, 0.13, 0.29])
def test_of_those_that_are_as_far_but_for_rounding_the_one_that_loses_least_goes_whatever_its_size(
    missing: float,
) -> None:
    """All at their minimums, three tenths of what they were sold: their targets are a step off at the most."""
    sold = {"a": 1, "b": 7, "c": 3, "d": 1.5, "e": 11}
    vms = [vm(name, (n * 0.3, 512), nominal=(n, 512), minimum=(n * 0.3, 512)) for name, n in sold.items()]
    reached, in_the_way = sizes_to_reach(vms, ResourceVector(missing))
    assert in_the_way
    for least in sold:
        costs = dict.fromkeys(sold, 9.0) | {least: 1.0}
        for targets in (reached, {}):
            assert choose_victims(vms, ResourceVector(missing), targets, costs) == [least]


def test_a_victim_that_turns_out_unneeded_is_spared() -> None:
    vms = [vm("far", (1, 512)), vm("large", (4, 512))]
    targets = {"far": ZERO, "large": ResourceVector(3.5)}
    assert choose_victims(vms, ResourceVector(4), targets) == ["large"]


def test_of_two_that_could_be_spared_it_is_the_one_nearer_to_its_target() -> None:
    vms = [vm("far", (1, 512)), vm("near", (2, 512)), vm("last", (3, 512))]
    targets = {"far": ZERO, "near": ResourceVector(1.2), "last": ResourceVector(2.9)}
    assert choose_victims(vms, ResourceVector(4), targets) == ["far", "last"]


def test_a_fixed_vm_is_never_a_victim() -> None:
    vms = [vm("f", (4, 4096), priority=Priority.FIXED), vm("a", (1, 512))]
    assert choose_victims(vms, ResourceVector(1), {}) == ["a"]
    assert choose_victims(vms, ResourceVector(1.5), {}) is None


def test_the_overhead_of_a_victim_counts() -> None:
    assert choose_victims([vm("a", (1, 512), overhead_mib=320)], ResourceVector(memory_mib=832), {}) == ["a"]
    assert choose_victims([vm("a", (1, 512), overhead_mib=320)], ResourceVector(memory_mib=833), {}) is None


@runs(400)
@given(hosts(), needs)
def test_victims_cover_what_is_missing_and_none_is_needless(vms: list[Allocation], missing: ResourceVector) -> None:
    targets = split_need(vms, missing).targets
    names = choose_victims(vms, missing, targets)
    everybody = [a for a in vms if a.priority is not Priority.FIXED]
    if names is None:
        assert not missing.fits_in(sum((a.charge for a in everybody), ZERO))
        return
    chosen = [a for a in everybody if a.name in names]
    assert len(chosen) == len(names) == len(set(names))
    assert missing.fits_in(sum((a.charge for a in chosen), ZERO))
    for victim in chosen:
        rest = sum((a.charge for a in chosen if a is not victim), ZERO)
        assert missing.is_zero() or not missing.fits_in(rest)
    assert choose_victims(vms[::-1], missing, targets) == names


def component_changed(a: Allocation, targets: Mapping[str, ResourceVector], component: str) -> bool:
    return abs(targets.get(a.name, a.current)[component] - a.current[component]) > TOLERANCE


def level(a: Allocation, targets: Mapping[str, ResourceVector], component: str) -> float:
    """Deflation from the upper size, as a share of what can be deflated: 1 - alpha."""
    size = targets.get(a.name, a.current)[component]
    return (a.upper[component] - size) / (a.upper[component] - a.minimum[component])


def step(a: Allocation, component: str) -> float:
    return (QUANTUM[component] + SLACK) / (a.upper[component] - a.minimum[component])
