"""The kernels under `deflation.sharing.proportional`: what holds of them beyond what its tests hold of the policies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation import kernels
from ebbtide.deflation.allocations import Allocation
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.proportional import CODES, choose_victims, share_room, split_need
from tests.unit.deflation.strategies import hosts, needs, runs


@dataclass
class Tables:
    """The VMs of a host as kernels read them."""

    rows: list[Allocation]
    priority: list[int]
    nominal: list[list[float]]
    upper: list[list[float]]
    minimum: list[list[float]]
    current: list[list[float]]
    charge: list[list[float]]
    order: list[int]

    @classmethod
    def of(cls, rows: list[Allocation], order: list[int]) -> Tables:
        return cls(
            rows,
            [CODES[row.priority] for row in rows],
            [list(row.nominal) for row in rows],
            [list(row.upper) for row in rows],
            [list(row.minimum) for row in rows],
            [list(row.current) for row in rows],
            [list(row.charge) for row in rows],
            order,
        )

    def split(self, need: ResourceVector) -> tuple[dict[str, list[float]], list[float]]:
        targets, shortfall = self.empty(), [0.0] * 4
        kernels.split(self.priority, self.upper, self.minimum, self.current, list(need), self.order, targets, shortfall)
        return self.named(targets), shortfall

    def share(self, room: ResourceVector, pressed: set[str]) -> dict[str, list[float]]:
        targets = self.empty()
        under_pressure = [row.name in pressed for row in self.rows]
        kernels.share(
            self.priority, self.upper, self.minimum, self.current, list(room), under_pressure, self.order, targets
        )
        return self.named(targets)

    def victims(self, missing: ResourceVector) -> list[str] | None:
        chosen, zero, cost = [0] * len(self.rows), self.empty(), [0.0] * len(self.rows)
        count = kernels.victims(
            self.priority, self.nominal, self.current, self.charge, list(missing), zero, cost, self.order, chosen
        )
        return None if count < 0 else [self.rows[place].name for place in chosen[:count]]

    def empty(self) -> list[list[float]]:
        return [[0.0] * 4 for _ in self.rows]

    def named(self, targets: list[list[float]]) -> dict[str, list[float]]:
        return {row.name: target for row, target in zip(self.rows, targets, strict=True)}


@runs(200)
@given(hosts(largest=12), needs, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_changes_not_one_bit(
    vms: list[Allocation], need: ResourceVector, chance: random.Random
) -> None:
    plain = Tables.of(vms, list(range(len(vms))))
    order = list(range(len(vms)))
    chance.shuffle(order)
    # Any numbers that compare like the names do.
    shuffled = Tables.of([vms[place] for place in order], [10 * place - 7 for place in order])
    pressed = {a.name for a in vms if chance.random() < 0.3}
    assert plain.split(need) == shuffled.split(need)
    assert plain.share(need, pressed) == shuffled.share(need, pressed)
    assert plain.victims(need) == shuffled.victims(need)


@runs(100)
@given(hosts(largest=12), needs)
def test_the_policies_are_the_kernels(vms: list[Allocation], need: ResourceVector) -> None:
    tables = Tables.of(vms, [sorted(a.name for a in vms).index(a.name) for a in vms])
    split, (targets, shortfall) = split_need(vms, need), tables.split(need)
    assert {a.name: list(split.targets.get(a.name, a.current)) for a in vms} == targets
    assert split.shortfall == ResourceVector(*shortfall) or max(shortfall) <= 1e-6
    pressed = {a.name for a in vms[::3]}
    shared = share_room(vms, need, pressed)
    assert {a.name: list(shared.get(a.name, a.current)) for a in vms} == tables.share(need, pressed)
    assert choose_victims(vms, need, {}) == tables.victims(need)


@runs(60)
@given(hosts(), needs)
def test_arrays_are_read_and_written_like_lists(vms: list[Allocation], need: ResourceVector) -> None:
    lists = Tables.of(vms, list(range(len(vms))))
    columns: list[Any] = [lists.priority, lists.nominal, lists.upper, lists.minimum, lists.current, lists.charge]
    shapes = [-1, *[(-1, 4)] * 5]
    made: list[Any] = [np.array(column).reshape(shape) for column, shape in zip(columns, shapes, strict=True)]
    made.append(np.arange(len(vms)))
    arrays = Tables(vms, *made)
    assert arrays.split(need) == lists.split(need)
    assert arrays.share(need, set()) == lists.share(need, set())
    assert arrays.victims(need) == lists.victims(need)


def test_equal_remainders_fall_to_the_first_by_name_whatever_rounding_adds() -> None:
    """All three lack a third of a step; in binary the remainders differ in their last digits."""
    for upper in ([1.0, 2.0, 4.0], [4.0, 1.0, 2.0], [0.7, 0.9, 1.1]):
        sizes = [0.0] * 3
        kernels.lowered(upper, [size - 0.3 for size in upper], upper, 0.02, 0.01, sizes)
        steps = [round((high - size) / 0.01, 6) for high, size in zip(upper, sizes, strict=True)]
        assert steps == [0.0, 1.0, 1.0], "the first keeps its step, the others give one each"


def test_a_sum_over_very_many_vms_stays_far_below_the_tolerance() -> None:
    """10,000 VMs of up to 4 TiB on one host: what is freed agrees with the need to a step and rounding."""
    chance = random.Random(3)
    upper = [float(chance.randint(1024, 4_194_304)) for _ in range(10_000)]
    current = [size - chance.randint(0, int(size) // 2) for size in upper]
    need, sizes = 123_456_789.0, [0.0] * len(upper)
    freed = kernels.lowered(upper, [192.0] * len(upper), current, need, 1.0, sizes)
    assert 0.0 <= freed - need < 1.0 + 1e-6
    assert freed == sum(int(before) - int(after) for before, after in zip(current, sizes, strict=True))
