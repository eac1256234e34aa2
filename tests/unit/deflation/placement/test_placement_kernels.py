"""The choice of a host as a loop gives what NumPy's passes over all hosts give."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.placement.fitness import HostTable, HostView, feasible, fitness, rank_hosts, scale_factors
from ebbtide.deflation.placement.kernels import (
    DIGITS,
    best_host,
    first_host,
    fitness_of_host,
    fitter_host,
    holds_demand,
    scale_of,
    score_of,
)
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, ResourceVector
from tests.unit.deflation.strategies import runs, vectors

#: Few values, so that ties, equal directions, missing components and hosts at the limit are common.
amounts = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 1000.0, 1024.0, 1e-7, 0.1])
any_vector = st.one_of(st.builds(ResourceVector, amounts, amounts, amounts, amounts), vectors)
clusters = st.lists(st.tuples(any_vector, any_vector), min_size=1, max_size=30)


def tables(rows: list[tuple[ResourceVector, ResourceVector]]) -> tuple[list[list[float]], list[list[float]]]:
    return [list(availability) for _, availability in rows], [list(capacity) for capacity, _ in rows]


def views(rows: list[tuple[ResourceVector, ResourceVector]]) -> list[HostView]:
    return [HostView(f"h{i:03d}", capacity, availability, ZERO) for i, (capacity, availability) in enumerate(rows)]


@runs(400)
@given(any_vector, clusters)
def test_fitness_of_one_host_is_that_of_all_to_the_digits(
    demand: ResourceVector, rows: list[tuple[ResourceVector, ResourceVector]]
) -> None:
    availability, capacity = tables(rows)
    factors = [0.0] * 4
    scale_of(capacity, factors)
    assert factors == scale_factors(np.array(capacity).max(axis=0)).tolist()
    scores = fitness(np.array(list(demand)), np.array(availability), np.array(capacity))
    for row, score in enumerate(scores.tolist()):
        alone = fitness_of_host(list(demand), availability[row], capacity[row], factors)
        assert 0.0 <= alone <= 1.0
        assert abs(alone - score) < 10.0 ** -(DIGITS + 4)
        assert score_of(score) == round(float(np.round(score, DIGITS)) * 10**DIGITS)


@runs(400)
@given(any_vector, clusters)
def test_a_host_that_holds_a_demand_is_feasible(
    demand: ResourceVector, rows: list[tuple[ResourceVector, ResourceVector]]
) -> None:
    availability, capacity = tables(rows)
    alone = [holds_demand(list(demand), have, most) for have, most in zip(availability, capacity, strict=True)]
    assert alone == feasible(np.array(list(demand)), np.array(availability), np.array(capacity)).tolist()


@runs(400)
@given(any_vector, clusters)
def test_the_best_and_the_first_host_are_those_that_the_live_system_ranks_first(
    demand: ResourceVector, rows: list[tuple[ResourceVector, ResourceVector]]
) -> None:
    availability, capacity = tables(rows)
    factors, hosts, table = [0.0] * 4, views(rows), HostTable()
    scale_of(capacity, factors)
    for host in hosts:
        table.put(host.id, tuple(host.capacity), tuple(host.free))
    best = best_host(list(demand), availability, capacity, factors)
    first = first_host(list(demand), availability, capacity)
    for place, policy in ((best, PlacementPolicy.BEST_FIT), (first, PlacementPolicy.FIRST_FIT)):
        expected = [] if place < 0 else [hosts[place].id]
        assert rank_hosts(demand, hosts, policy)[:1] == expected
        assert table.rank(demand, 1, policy) == expected


@runs(400)
@given(any_vector, clusters, st.randoms(use_true_random=False))
def test_of_two_hosts_that_were_drawn_the_one_that_stands_before_the_other_is_taken(
    demand: ResourceVector, rows: list[tuple[ResourceVector, ResourceVector]], chance: np.random.Generator
) -> None:
    availability, capacity = tables(rows)
    factors = [0.0] * 4
    scale_of(capacity, factors)
    order = [int(name[1:]) for name in rank_hosts(demand, views(rows))]
    if len(order) < 2:
        return
    one, other = chance.choice(order), chance.choice(order)
    chosen = fitter_host(list(demand), availability, capacity, factors, one, other)
    assert chosen == min(one, other, key=order.index)


def test_many_hosts_with_ties_are_chosen_alike() -> None:
    generator = np.random.default_rng(5)
    capacity = np.array([(32.0, 131072.0, 2000.0, 0.0), (64.0, 262144.0, 0.0, 3000.0)])[generator.integers(0, 2, 400)]
    for spread in (generator.random((400, 4)), generator.integers(0, 4, (400, 4)) / 4, np.full((400, 4), 0.5)):
        availability = np.round(capacity * spread, 2)
        rows = [
            (ResourceVector(*most), ResourceVector(*have))
            for most, have in zip(capacity.tolist(), availability.tolist(), strict=True)
        ]
        hosts, factors = views(rows), np.zeros(4)
        scale_of(capacity, factors)
        for cores, gib, disk in ((1, 1, 0), (4, 32, 100), (16, 8, 0), (40, 200, 500)):
            demand = ResourceVector(cores, gib * 1024, disk)
            place = best_host(np.array(list(demand)), availability, capacity, factors)
            assert ([] if place < 0 else [hosts[place].id]) == rank_hosts(demand, hosts)[:1]
