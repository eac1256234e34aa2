"""Best fit, first fit and random fit over their indexes, against a look at every machine."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ebbtide.simulator.jobs import nodes
from ebbtide.simulator.nodes import bins as node_bins
from ebbtide.simulator.nodes import draws
from ebbtide.simulator.nodes import levels as node_levels
from ebbtide.simulator.nodes import tree as node_tree

MOST = 12
MACHINES = 70

Free = NDArray[np.int64]


class Indexes:
    """All three over the same machines."""

    def __init__(self) -> None:
        self.best = nodes.make(nodes.BEST_FIT, MACHINES, MOST, 1)
        self.first = nodes.make(nodes.FIRST_FIT, MACHINES, MOST, 1)
        self.bins = nodes.make(nodes.RANDOM, MACHINES, MOST, 1)
        self.free: Free = np.zeros(MACHINES, np.int64)
        self.spare: Free = np.zeros(MACHINES, np.int64)
        for machine in range(MACHINES):
            self._set(machine, -1, 0)

    def put(self, machine: int, cores: int, mib: int) -> None:
        before = int(self.free[machine])
        self.free[machine], self.spare[machine] = cores, mib
        self._set(machine, before, cores)

    def _set(self, machine: int, before: int, cores: int) -> None:
        b, t, r = self.best, self.first, self.bins
        node_levels.move(b.sets, b.offsets, b.levels, b.level_offsets, machine, before, cores)
        node_tree.change(t.tree, machine, cores)
        node_bins.move(r.by_free, r.places, r.starts, machine, max(before, 0), cores)

    def chosen(self, cores: int, mib: int) -> tuple[int, int, int]:
        b, t, r = self.best, self.first, self.bins
        return (
            node_levels.best_fit(b.sets, b.offsets, b.levels, b.level_offsets, self.spare, cores, mib),
            node_tree.first_fit(t.tree, self.spare, cores, mib),
            node_bins.random_fit(r.by_free, r.starts, self.spare, cores, mib, r.draws),
        )


@given(
    st.lists(
        st.tuples(
            st.integers(0, MACHINES - 1),
            st.integers(0, MOST),
            st.sampled_from([0, 100, 200]),
            st.integers(1, MOST + 1),
            st.sampled_from([0, 100, 150, 300]),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_each_index_finds_what_a_look_at_all_machines_finds(steps: list[tuple[int, int, int, int, int]]) -> None:
    indexes = Indexes()
    for machine, free, spare, cores, mib in steps:
        indexes.put(machine, free, spare)
        fitting = [m for m in range(MACHINES) if indexes.free[m] >= cores and indexes.spare[m] >= mib]
        best, first, some = indexes.chosen(cores, mib)
        if not fitting:
            assert (best, first, some) == (-1, -1, -1)
            continue
        assert best == min(fitting, key=lambda m: (indexes.free[m], m))
        assert first == fitting[0]
        assert some in fitting


@pytest.mark.parametrize("mib", [0, 100])
def test_every_machine_that_fits_is_as_likely(mib: int) -> None:
    indexes = Indexes()
    for machine in range(MACHINES):
        indexes.put(machine, machine % 8, 100 if machine % 3 == 0 else 0)
    fitting = [m for m in range(MACHINES) if m % 8 >= 5 and (not mib or m % 3 == 0)]
    count = 400 * len(fitting)
    drawn = Counter(indexes.chosen(5, mib)[2] for _ in range(count))
    assert set(drawn) == set(fitting)
    # Chi-squared, far beyond any quantile that chance would reach once in a million times.
    assert sum((drawn[m] - 400) ** 2 / 400 for m in fitting) < 3 * len(fitting) + 40


def test_a_rare_machine_with_the_memory_is_found_among_many_without() -> None:
    indexes = Indexes()
    for machine in range(MACHINES):
        indexes.put(machine, 4, 100 if machine == 41 else 0)
    assert {indexes.chosen(2, 100)[2] for _ in range(50)} == {41}


@pytest.mark.parametrize("members", [1, 31, 32, 33, 1024, 1025, 40_000])
def test_a_set_of_any_size_finds_its_members_in_order(members: int) -> None:
    offsets = node_levels.layers(members)
    sets = np.zeros((1, int(offsets[-1])), np.int64)
    some = sorted({0, members // 2, members - 1, *range(0, members, 997)})
    for member in some:
        node_levels.include(sets, offsets, 0, member)
    found, start = [], 0
    while (member := node_levels.first_from(sets, offsets, 0, start)) >= 0:
        found.append(member)
        start = member + 1
    assert found == some
    emptied = [node_levels.exclude(sets, offsets, 0, member) for member in some]
    assert emptied == [False] * (len(some) - 1) + [True]
    assert not sets.any()


def test_draws_are_even_and_one_seed_gives_the_same() -> None:
    state, again = draws.state_of(3, 4), draws.state_of(3, 4)
    values = [draws.draw(state, 10) for _ in range(20_000)]
    assert values == [draws.draw(again, 10) for _ in range(20_000)]
    counts = np.bincount(values, minlength=10)
    assert len(counts) == 10
    assert ((counts - 2000) ** 2 / 2000).sum() < 60
    pairs = np.bincount([10 * a + b for a, b in pairwise(values)], minlength=100)
    assert ((pairs - 200) ** 2 / 200).sum() < 250
    assert {draws.draw(state, 1) for _ in range(10)} == {0}
