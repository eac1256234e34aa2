from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.placement.fitness import HostView, feasible, fitness, rank_hosts
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, ResourceVector
from tests.unit.deflation.strategies import runs, vectors

CAPACITY = ResourceVector(8, 8192)


def host(id_: str, free: ResourceVector, capacity: ResourceVector = CAPACITY, taken: ResourceVector = ZERO) -> HostView:
    return HostView(id_, capacity, free, taken)


def scores(demand: list[float], availability: list[list[float]], capacity: list[list[float]]) -> list[float]:
    matrices = (np.array(values, dtype=np.float64) for values in (demand, availability, capacity))
    return list(fitness(*matrices))


def test_cosines_by_hand() -> None:
    """Demand (1/2, 1/2): along (1/2, 1/2) the cosine is 1, along (1, 1/2) 3 / sqrt(10)."""
    assert scores(
        [4, 4096, 0, 0], [[4, 4096, 0, 0], [8, 4096, 0, 0], [8, 0, 0, 0]], [[8, 8192, 0, 0]] * 3
    ) == pytest.approx([1, 3 / math.sqrt(10), 1 / math.sqrt(2)])


def test_memory_is_not_the_only_dimension() -> None:
    """In raw units both cosines would be 1 to three digits."""
    low, high = scores([8, 1024, 0, 0], [[1, 8192, 0, 0], [8, 1024, 0, 0]], [[8, 8192, 0, 0]] * 2)
    assert low < 0.3
    assert high == pytest.approx(1)


def test_components_are_divided_by_the_largest_hosts_capacity() -> None:
    small, large = scores([4, 4096, 0, 0], [[2, 4096, 0, 0], [16, 8192, 0, 0]], [[4, 4096, 0, 0], [16, 8192, 0, 0]])
    wanted = np.array([4 / 16, 4096 / 8192])
    for score, have in ((small, np.array([2 / 16, 0.5])), (large, np.array([1.0, 1.0]))):
        assert score == pytest.approx(wanted @ have / np.linalg.norm(wanted) / np.linalg.norm(have))


def test_a_disk_that_a_host_does_not_declare_is_left_out_for_it() -> None:
    declared, undeclared = scores(
        [4, 4096, 100, 0], [[8, 8192, 0, 0], [8, 8192, 0, 0]], [[8, 8192, 200, 0], [8, 8192, 0, 0]]
    )
    assert undeclared == pytest.approx(1)
    assert declared == pytest.approx(math.sqrt(2 / 3))


def test_a_zero_vector_has_fitness_zero() -> None:
    assert scores([0, 0, 0, 0], [[8, 8192, 0, 0]], [[8, 8192, 0, 0]]) == [0]
    assert scores([4, 4096, 0, 0], [[0, 0, 0, 0]], [[8, 8192, 0, 0]]) == [0]
    assert scores([4, 4096, 0, 0], [[0, 0, 0, 0]], [[0, 0, 0, 0]]) == [0]


def test_infeasible_hosts_drop_out_however_well_they_fit() -> None:
    perfect_but_small = host("a", ResourceVector(3, 3072))
    poor = host("b", ResourceVector(8, 4096))
    assert rank_hosts(ResourceVector(4, 4096), [perfect_but_small, poor]) == ["b"]
    assert rank_hosts(ResourceVector(9, 4096), [perfect_but_small, poor]) == []
    assert rank_hosts(ResourceVector(1, 1), []) == []


def test_what_can_be_deflated_counts_like_what_is_free() -> None:
    full = host("a", ResourceVector(1, 1024), taken=ResourceVector(4, 4096))
    assert rank_hosts(ResourceVector(5, 5120), [full]) == ["a"]
    assert rank_hosts(ResourceVector(5.01, 5120), [full]) == []


def test_a_host_without_a_declared_disk_takes_any_disk_but_one_without_cpu_takes_nothing() -> None:
    demand = ResourceVector(1, 1024, 100)
    assert rank_hosts(demand, [host("a", ResourceVector(8, 8192))]) == ["a"]
    drained = host("a", ResourceVector(0, 8192), ResourceVector(0, 8192))
    assert rank_hosts(demand, [drained]) == []
    assert not feasible(np.array([1.0, 0, 0, 0]), np.zeros((1, 4)), np.zeros((1, 4)))[0]


def test_ties_go_by_id_and_not_by_order() -> None:
    hosts = [host(name, ResourceVector(4, 4096)) for name in "cab"]
    assert rank_hosts(ResourceVector(2, 2048), hosts) == ["a", "b", "c"]
    assert rank_hosts(ResourceVector(2, 2048), hosts[::-1]) == ["a", "b", "c"]


def test_first_fit_goes_by_id_alone() -> None:
    hosts = [host("b", ResourceVector(4, 4096)), host("a", ResourceVector(8, 4096)), host("0", ResourceVector(1, 8192))]
    assert rank_hosts(ResourceVector(2, 2048), hosts, PlacementPolicy.FIRST_FIT) == ["a", "b"]
    assert rank_hosts(ResourceVector(2, 2048), hosts) == ["b", "a"]


def test_two_choices_draw_two_and_try_the_fitter_first() -> None:
    hosts = [host(f"h{i}", ResourceVector(4 + i / 2, 4096)) for i in range(6)]
    demand = ResourceVector(2, 2048)
    best = rank_hosts(demand, hosts)
    firsts = set()
    for seed in range(60):
        ranked = rank_hosts(demand, hosts, PlacementPolicy.TWO_CHOICES, np.random.default_rng(seed))
        assert ranked == rank_hosts(demand, hosts, PlacementPolicy.TWO_CHOICES, np.random.default_rng(seed))
        assert sorted(ranked) == sorted(best), "the others stay behind the two"
        assert best.index(ranked[0]) < best.index(ranked[1])
        assert [best.index(name) for name in ranked[2:]] == sorted(best.index(name) for name in ranked[2:])
        firsts.add(ranked[0])
    assert best[0] in firsts
    assert len(firsts) > 2
    assert best[-1] not in firsts, "the worst of all is never the fitter of two"


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_two_choices_need_a_generator_whatever_the_number_of_hosts(count: int) -> None:
    hosts = [host(f"h{i}", ResourceVector(4, 4096)) for i in range(count)]
    with pytest.raises(ValueError, match="generator"):
        rank_hosts(ResourceVector(1, 1024), hosts, PlacementPolicy.TWO_CHOICES)


views = st.lists(st.tuples(vectors, vectors, vectors), min_size=1, max_size=8).map(
    lambda rows: [
        HostView(f"h{i}", capacity, free.smaller(capacity), taken.smaller(capacity))
        for i, (capacity, free, taken) in enumerate(rows)
    ]
)


@runs()
@given(vectors, views)
def test_fitness_is_a_share_and_ranks_the_feasible_hosts_by_it(demand: ResourceVector, hosts: list[HostView]) -> None:
    availability = np.array([list(h.free + h.deflatable) for h in hosts])
    capacity = np.array([list(h.capacity) for h in hosts])
    score = dict(zip((h.id for h in hosts), fitness(np.array(list(demand)), availability, capacity), strict=True))
    assert all(0 <= value <= 1 for value in score.values())
    ranked = rank_hosts(demand, hosts)
    assert [score[name] for name in ranked] == pytest.approx(sorted((score[n] for n in ranked), reverse=True))
    for view in hosts:
        fits = all(
            want <= have + 1e-6 or (index > 1 and most == 0)
            for index, (want, have, most) in enumerate(
                zip(demand, view.free + view.deflatable, view.capacity, strict=True)
            )
        )
        assert (view.id in ranked) == fits


@runs()
@given(vectors, views, st.integers(0, 3), st.sampled_from([1 / 1024, 0.25, 16.0, 1024.0]))
def test_the_unit_of_a_component_does_not_matter(
    demand: ResourceVector, hosts: list[HostView], index: int, unit: float
) -> None:

    def scaled(vector: ResourceVector) -> list[float]:
        return [value * unit if i == index else value for i, value in enumerate(vector)]

    plain = scores(list(demand), [list(h.free + h.deflatable) for h in hosts], [list(h.capacity) for h in hosts])
    other = scores(scaled(demand), [scaled(h.free + h.deflatable) for h in hosts], [scaled(h.capacity) for h in hosts])
    assert other == pytest.approx(plain, abs=1e-9)
