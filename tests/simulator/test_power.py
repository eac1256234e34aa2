"""Servers whose power changes: what is cut first, who is evicted and comes again, and that nothing is lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.harvest import HarvestSeries, Packing
from ebbtide.simulator.generators.power import Cut, PoweredSeries, PowerSteps, power_steps, shares
from ebbtide.simulator.inputs.batches import CapacityBatch, SeriesBatch
from tests.simulator.test_generators import rng, vms_of

Rows = list[tuple[float, str, float]]


def powered(
    steps: list[tuple[float, int]],
    vms: list[tuple[float, float, float, float]],
    packing: Packing = Packing.PACKING,
    cut: Cut = Cut.SERVERS,
    servers: int = 2,
) -> tuple[Rows, PoweredSeries]:
    """Changes on servers of 8 cores, and the replay after them. VMs: arrival, how long, cores, memory."""
    at_s, cores = zip(*steps, strict=True)
    power = PowerSteps(np.array(at_s, np.float64), np.array(cores, np.int64))
    replay = PoweredSeries(servers, 8, 1000, packing, rng(), 0.0, power, cut, np.random.default_rng(5))
    changes = CapacityBatch.joined(list(replay.replay([vms_of(vms)])))
    return [(r["at_s"], r["machine"], r["cpu_cores"]) for r in changes.rows()], replay


def levels(rows: Rows, at_s: float) -> float:
    """Unallocated cores with power of all servers, after what happens at an instant."""
    last = {server: cores for when, server, cores in rows if when <= at_s}
    return sum(last.values())


def test_a_drop_takes_unallocated_cores_first_then_vms_and_a_rise_brings_them_back() -> None:
    rows, replay = powered([(0, 16), (10, 12), (20, 3), (30, 16)], [(1, 99, 4, 10)])
    # 16 with power, 4 of a VM's.
    assert levels(rows, 1) == 12
    # 4 less, which the VM does not feel.
    assert levels(rows, 10) == 8
    # 9 less: the 8 that are left, and one of the VM's, which goes; its other 3 cores are unallocated.
    assert levels(rows, 20) == 3
    # All have power again, and the VM is back, and leaves when it would have left.
    assert levels(rows, 30) == 12
    assert [row[0] for row in rows if row[0] > 30] == [100]
    assert levels(rows, 100) == 16
    assert (replay.power_counts.evicted, replay.power_counts.relaunched, replay.power_counts.deferred) == (1, 1, 0)


def test_the_vm_that_was_placed_last_is_evicted_first() -> None:
    # Two of 8 cores fill both servers; without 8 cores the one on server-1 goes, and its server has no power.
    rows, replay = powered([(0, 16), (10, 8), (30, 16)], [(1, 99, 8, 10), (2, 50, 8, 10)])
    assert [row for row in rows if row[0] >= 10] == [(52, "server-1", 8), (100, "server-0", 8)]
    assert replay.power_counts.evicted == replay.power_counts.relaunched == 1


def test_a_vm_that_would_have_left_meanwhile_does_not_come_again() -> None:
    rows, replay = powered([(0, 16), (10, 0), (30, 16)], [(1, 15, 4, 10)])
    assert levels(rows, 10) == 0
    assert levels(rows, 30) == 16
    assert rows[-1][0] == 30
    assert (replay.power_counts.evicted, replay.power_counts.relaunched) == (1, 0)


def test_a_vm_that_finds_no_room_for_lack_of_power_comes_when_there_is() -> None:
    rows, replay = powered([(0, 4), (30, 16)], [(1, 99, 6, 10)])
    assert levels(rows, 29) == 4
    assert levels(rows, 30) == 10
    assert levels(rows, 100) == 16
    assert (replay.power_counts.deferred, replay.power_counts.relaunched) == (1, 1)
    assert replay.counts.rejected == 0
    # With full power there is no room because there is no room.
    _, full = powered([(0, 16)], [(1, 99, 9, 10)])
    assert (full.power_counts.deferred, full.counts.rejected) == (0, 1)


def test_where_one_waits_in_vain_a_smaller_one_comes() -> None:
    vms = [(1.0, 99.0, 8.0, 10.0), (2.0, 99.0, 8.0, 10.0), (3.0, 99.0, 2.0, 10.0)]
    rows, replay = powered([(0, 4), (30, 8), (40, 16)], vms, servers=2)
    # 3 s: the small one is placed. 30 s: 6 cores are unallocated, too few for either large one. 40 s: one comes.
    assert [levels(rows, at_s) for at_s in (3, 30, 40)] == [2, 6, 6]
    assert (replay.power_counts.deferred, replay.power_counts.relaunched) == (2, 1)


@pytest.mark.parametrize("packing", list(Packing))
def test_with_full_power_all_the_time_a_replay_is_what_it_was(packing: Packing) -> None:
    draws = np.random.default_rng(3)
    at_s = np.cumsum(draws.exponential(2.0, 300))
    vms = [
        (float(at), float(draws.exponential(20.0)), float(draws.choice([0.5, 1, 2, 4])), float(draws.choice([9, 300])))
        for at in at_s
    ]
    plain = CapacityBatch.joined(list(HarvestSeries(2, 8, 1000, packing, rng()).replay([vms_of(vms)])))
    rows, replay = powered([(0, 16), (100, 16), (300, 16)], vms, packing)
    assert rows == [(r["at_s"], r["machine"], r["cpu_cores"]) for r in plain.rows()]
    assert len(rows) > 300
    assert replay.counts.rejected > 5


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 24), min_size=1, max_size=12),
    st.lists(
        st.tuples(
            st.integers(0, 40).map(float),
            st.one_of(st.just(math.nan), st.integers(1, 20).map(float)),
            st.sampled_from([0.25, 1.0, 3.0, 8.0]),
            st.sampled_from([1.0, 400.0, math.nan]),
        ),
        max_size=25,
    ),
    st.sampled_from(Packing),
    st.sampled_from(Cut),
)
def test_powered_cores_are_what_the_steps_say_and_none_is_lost(
    cores: list[int], vms: list[tuple[float, float, float, float]], packing: Packing, cut: Cut
) -> None:
    steps = [(4.0 * number, value) for number, value in enumerate(cores)]
    rows, replay = powered(steps, sorted(vms, key=lambda vm: vm[0]), packing, cut, servers=3)
    assert all(0 <= row[2] <= 8 for row in rows)
    for step, (at_s, value) in enumerate(steps):
        until_s = steps[step + 1][0] if step + 1 < len(steps) else math.inf
        for when in (row[0] for row in rows if at_s <= row[0] < until_s):
            assert levels(rows, when) <= value
    forever = sum(vm[2] for vm in replay._running.values())
    assert float(replay._powered.sum()) == steps[-1][1]
    assert float(replay._free_cores.sum()) == pytest.approx(steps[-1][1] - forever, abs=1e-4)
    assert all(math.isnan(vm[0]) for vm in replay._running.values())


def test_power_is_straight_between_the_values_of_a_trace_and_its_largest_powers_all() -> None:
    trace = [SeriesBatch(at_s=np.array([0.0, 1800.0]), value=np.array([10.0, 20.0]))]
    trace.append(SeriesBatch(at_s=np.array([3600.0]), value=np.array([0.0])))
    found = power_steps(trace, 40, 0.0, 3600.0, 900.0)
    assert found.at_s.tolist() == [0, 900, 1800, 2700]
    assert found.cores.tolist() == [20, 30, 40, 20]
    # From later on; 13.3 of 20 are 26.6 of 40 cores, of which whole ones count.
    later = power_steps(trace, 40, 600.0, 2400.0, 1200.0)
    assert later.cores.tolist() == [26, 40]


@pytest.mark.parametrize(("from_s", "value", "field"), [(3000.0, 5.0, "power_from_s"), (0.0, 0.0, "power")])
def test_a_trace_that_is_too_short_or_without_power_is_refused(from_s: float, value: float, field: str) -> None:
    trace = [SeriesBatch(at_s=np.array([0.0, 3600.0]), value=np.array([value, value]))]
    with pytest.raises(InvalidParameter) as caught:
        power_steps(trace, 40, from_s, 3600.0, 900.0)
    assert caught.value.field == field


def test_parts_of_cores_are_refused_where_power_changes() -> None:
    with pytest.raises(InvalidParameter, match="cpu_cores"):
        PoweredSeries(1, 8.5, 9, Packing.RANDOM, rng(), 0, PowerSteps(np.zeros(1), np.ones(1, int)), Cut.EVEN, rng())


def test_servers_are_cut_one_by_one_or_evenly() -> None:
    available = np.array([9.0, 5.0, 0.0, 4.0])
    one_by_one = shares(available, 7, Cut.SERVERS, rng())
    # All but the last one that is cut lose all.
    assert one_by_one.sum() == 7
    assert sum((one_by_one > 0) & (one_by_one < available)) <= 1
    even = shares(available, 7, Cut.EVEN, rng())
    # Down to 4 would be 6; one more, of somebody's who has 4.
    assert even.sum() == 7
    assert sorted((available - even).tolist()) == [0, 3, 4, 4]
    for cut in Cut:
        assert shares(available, 99, cut, rng()).tolist() == available.tolist()
        assert shares(available, 0, cut, rng()).sum() == 0
