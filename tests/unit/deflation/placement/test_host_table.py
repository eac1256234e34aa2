"""The table gives the order of ``rank_hosts``, whatever happened to the hosts before."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ebbtide.deflation.placement.fitness import HostTable, HostView, available, rank_hosts
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, ResourceVector
from tests.unit.deflation.strategies import runs, vectors

#: Few values, so that ties, equal directions, missing components and hosts at the limit are common.
amounts = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 1000.0, 1024.0, 1e-7, 0.1])
small_vectors = st.builds(ResourceVector, amounts, amounts, amounts, amounts)
any_vector = st.one_of(small_vectors, vectors)
names = st.builds("h{}".format, st.integers(0, 30))


def view(name: str, capacity: ResourceVector, availability: ResourceVector) -> HostView:
    return HostView(name, capacity, availability, ZERO)


class AnyHistory(RuleBasedStateMachine):
    """Hosts come, change, go and come back, and at each moment every decision agrees with the plain one."""

    @initialize()
    def begin(self) -> None:
        self.table = HostTable()
        self.hosts: dict[str, HostView] = {}
        self.seed = 0

    @rule(name=names, capacity=any_vector, availability=any_vector)
    def put(self, name: str, capacity: ResourceVector, availability: ResourceVector) -> None:
        self.table.put(name, tuple(capacity), tuple(availability))
        self.hosts[name] = view(name, capacity, availability)

    @rule(name=names, availability=any_vector)
    def change(self, name: str, availability: ResourceVector) -> None:
        if name in self.hosts:
            self.put(name, self.hosts[name].capacity, availability)

    @rule(data=st.lists(st.tuples(names, small_vectors), max_size=12), capacity=any_vector)
    def put_many_alike(self, data: list[tuple[str, ResourceVector]], capacity: ResourceVector) -> None:
        for name, availability in data:
            self.put(name, capacity, availability)

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.table.drop(name)
        self.hosts.pop(name, None)

    @rule(demand=any_vector, most=st.integers(0, 9))
    def rank(self, demand: ResourceVector, most: int) -> None:
        views = list(self.hosts.values())
        for policy in (PlacementPolicy.BEST_FIT, PlacementPolicy.FIRST_FIT):
            assert self.table.rank(demand, most, policy) == rank_hosts(demand, views, policy)[:most]

    @rule(demand=any_vector, most=st.integers(2, 9))
    def draw(self, demand: ResourceVector, most: int) -> None:
        self.seed += 1
        best = rank_hosts(demand, list(self.hosts.values()))
        generator = np.random.default_rng(self.seed)
        ranked = self.table.rank(demand, most, PlacementPolicy.TWO_CHOICES, generator)
        two = ranked[:2]
        assert two == sorted(two, key=best.index), "the fitter of the two first"
        assert ranked == (two + [name for name in best if name not in two])[:most]

    @rule(demand=any_vector, odd=st.booleans())
    def rank_some(self, demand: ResourceVector, odd: bool) -> None:
        def accepts(name: str) -> bool:
            return (int(name[1:]) % 2 == 1) is odd

        # Who is not accepted still counts for the scale, as it would among the hosts.
        for policy in (PlacementPolicy.BEST_FIT, PlacementPolicy.FIRST_FIT):
            plain = rank_hosts(demand, list(self.hosts.values()), policy)
            assert self.table.rank(demand, 4, policy, accepts=accepts) == list(islice(filter(accepts, plain), 4))

    @invariant()
    def the_hosts_are_known(self) -> None:
        if hasattr(self, "hosts"):
            assert len(self.table) == len(self.hosts)
            assert list(self.table.ids(5)) == sorted(self.hosts)[:5]
            assert all(name in self.table for name in self.hosts)


def test_any_history_of_hosts_leaves_the_plain_order() -> None:
    run_state_machine_as_test(AnyHistory, settings=settings(runs(60), stateful_step_count=30))


@pytest.mark.parametrize("spread", ["even", "few directions", "all the same", "full"])
def test_many_hosts_are_ranked_as_by_the_plain_order_while_they_change(spread: str) -> None:
    generator = np.random.default_rng(11)
    kinds = [(32.0, 131072.0, 2000.0, 3000.0), (64.0, 262144.0, 0.0, 3000.0), (96.0, 393216.0, 0.0, 0.0)]
    hosts: dict[str, HostView] = {}
    table = HostTable()

    def change(number: int) -> None:
        capacity = np.array(kinds[number % 3])
        share = {
            "even": generator.beta(2, 3, 4),
            "few directions": generator.integers(0, 4, 4) / 4,
            "all the same": np.full(4, 0.5),
            "full": generator.beta(1, 20, 4),
        }[spread]
        name = f"host-{number:04d}"
        hosts[name] = view(name, ResourceVector(*capacity), ResourceVector(*np.round(capacity * share, 2)))
        table.put(name, tuple(hosts[name].capacity), tuple(hosts[name].free))

    for number in generator.permutation(1500).tolist():
        change(number)
    for _ in range(25):
        for number in generator.integers(0, 1500, 40).tolist():
            change(number)
        for number in generator.integers(0, 1500, 5).tolist():
            table.drop(f"host-{number:04d}")
            hosts.pop(f"host-{number:04d}", None)
        cores = float(generator.choice([1, 4, 16]))
        demand = ResourceVector(cores, cores * 1024 * float(generator.choice([1, 4, 8])), 50, 100)
        for policy in (PlacementPolicy.BEST_FIT, PlacementPolicy.FIRST_FIT):
            assert table.rank(demand, 16, policy) == rank_hosts(demand, list(hosts.values()), policy)[:16]


def test_hosts_that_come_later_stand_in_their_place_by_id() -> None:
    table = HostTable()
    names = ["a", "z", *("a" + "b" * length for length in range(6, 0, -1))]
    for name in names:
        table.put(name, (4.0, 4096.0, 0.0, 0.0), (2.0, 2048.0, 0.0, 0.0))
        for policy in (PlacementPolicy.BEST_FIT, PlacementPolicy.FIRST_FIT):
            taken = names[: names.index(name) + 1]
            assert table.rank(ResourceVector(1, 1024), 100, policy) == sorted(taken)


def test_the_largest_host_sets_the_scale_only_while_it_is_there() -> None:
    hosts = [
        view("a", ResourceVector(8, 8192), ResourceVector(4, 8000)),
        view("b", ResourceVector(8, 8192), ResourceVector(8, 4000)),
        view("large", ResourceVector(800, 8192), ResourceVector(0, 0)),
    ]
    table = HostTable()
    for host in hosts:
        table.put(host.id, tuple(host.capacity), tuple(host.free))
    demand = ResourceVector(2.2, 2048)
    with_it = table.rank(demand, 5)
    table.drop("large")
    without = table.rank(demand, 5)
    assert (with_it, without) == (rank_hosts(demand, hosts), rank_hosts(demand, hosts[:2]))
    assert with_it != without


@pytest.mark.parametrize("idle", [0, 3000])
def test_two_choices_draw_each_pair_alike(idle: int) -> None:
    table = HostTable()
    for number in range(5):
        table.put(f"big-{number}", (8.0, 8192.0, 0.0, 0.0), (8.0, 8192.0 - number, 0.0, 0.0))
    for number in range(idle):
        table.put(f"small-{number}", (8.0, 8192.0, 0.0, 0.0), (1.0, 1024.0, 0.0, 0.0))
    generator = np.random.default_rng(3)
    drawn: Counter[tuple[str, ...]] = Counter()
    for _ in range(1000):
        ranked = table.rank(ResourceVector(2, 2048), 5, PlacementPolicy.TWO_CHOICES, generator)
        assert sorted(ranked) == [f"big-{number}" for number in range(5)]
        drawn[tuple(sorted(ranked[:2]))] += 1
    assert set(drawn) == set(combinations(sorted(f"big-{number}" for number in range(5)), 2))
    # 100 each: five standard deviations to either side.
    assert 50 < min(drawn.values()) <= max(drawn.values()) < 150


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_two_choices_need_a_generator(count: int) -> None:
    table = HostTable()
    for number in range(count):
        table.put(f"h{number}", (4.0, 4096.0, 0.0, 0.0), (4.0, 4096.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="generator"):
        table.rank(ResourceVector(1, 1024), 5, PlacementPolicy.TWO_CHOICES)


@runs()
@given(any_vector, any_vector, any_vector)
def test_promised_room_comes_off_free_first_and_then_off_deflatable(
    free: ResourceVector, deflatable: ResourceVector, taken: ResourceVector
) -> None:
    expected = free.less(taken) + deflatable.less(taken.less(free))
    assert available(free, deflatable, taken) == tuple(expected)
