"""VMs out of a trace: which ones, when, how many nodes they are worth, and what is asked for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.deflation.floors import effective_minimum
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.utility import check_curve, size_of_shares, utility_at
from ebbtide.simulator.cluster.applications import APPLICATIONS, curves_of
from ebbtide.simulator.cluster.settings import ClusterPolicy, under
from ebbtide.simulator.cluster.state import LOW
from ebbtide.simulator.cluster.workload import (
    DAY_S,
    Sample,
    arrivals_of,
    at_minimums,
    fits_no_node,
    incompressible,
    minimum_of,
    moved_off_grid,
    nodes_for,
    offered,
    sampled,
    with_drawn_lives,
)
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs import batches
from ebbtide.simulator.inputs.batches import VmBatch, hints, texts, unknown


def batch(count: int, *, groups: int = 10, first: int = 0, memory_mib: float = 1024.0) -> VmBatch:
    """VMs of 2 cores a 300 s apart that stay for 900 s, ``groups`` tenants in turn."""
    at_s = np.array([300.0 * (first + i) for i in range(count)])
    return VmBatch(
        id=texts(f"vm-{first + i}" for i in range(count)),
        group=texts(f"tenant-{(first + i) % groups}" for i in range(count)),
        arrives_s=at_s,
        departs_s=np.where(np.arange(count) % 7 == 0, np.nan, at_s + 900),
        cpu_cores=np.full(count, 2.0),
        memory_mib=np.full(count, memory_mib),
        priority=hints(count),
        utilisation=unknown(count),
    )


def sample_of(rows: list[tuple[float, float, float]]) -> Sample:
    """(arrives, departs, cores) each."""
    at_s, departs_s, cores = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    return Sample(at_s, departs_s, cores, cores * 1024, np.arange(len(rows)), hints(len(rows)))


def test_a_sample_keeps_tenants_whole_and_larger_ones_hold_the_smaller() -> None:
    parts = [batch(300, groups=60), batch(300, groups=60, first=300)]
    small, large, whole = (sampled(parts, share) for share in (0.2, 0.6, 1.0))
    assert 0 < len(small) < len(large) < len(whole) == 600
    assert len(small) % 10 == 0
    assert set(small.arrives_s.tolist()) < set(large.arrives_s.tolist())
    assert np.isinf(whole.departs_s).sum() == 86
    again = sampled(parts, 0.2)
    assert again.arrives_s.tolist() == small.arrives_s.tolist()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, 1e-12])
def test_a_sample_of_no_vms_is_an_error(share: float) -> None:
    with pytest.raises(InvalidParameter, match="sample_share"):
        sampled([batch(30)], share)


def test_vms_without_memory_are_an_error() -> None:
    with pytest.raises(InvalidParameter, match="memory"):
        sampled([batch(30, memory_mib=math.nan)])


def test_times_move_within_their_place_of_the_grid_and_tenants_stay_together() -> None:
    sample = sampled([batch(200, groups=50)])
    moved = moved_off_grid(sample, 300.0, np.random.default_rng(1))
    assert (np.diff(moved.arrives_s) >= 0).all()
    by_s = moved.arrives_s % 300
    for group in range(50):
        assert len(set(np.round(by_s[moved.group == group], 6))) == 1
    assert len(set(np.round(by_s, 6))) > 40
    leaving = np.isfinite(moved.departs_s)
    assert (moved.departs_s - moved.arrives_s)[leaving] == pytest.approx(900)
    assert moved_off_grid(sample, 0.0, np.random.default_rng(1)) is sample


def test_vms_that_the_trace_lost_sight_of_leave_as_others_of_their_age_did() -> None:
    """Followed until 100: half of those seen for longer than that left after 500, the others are there at the end."""
    lost = [(0.0, math.inf, 1.0)] * 400
    known = [(0.0, 50.0, 1.0), (0.0, 500.0, 1.0)] * 100 + [(200.0, math.inf, 1.0)] * 100 + [(5000.0, 5001.0, 1.0)]
    sample = sample_of(lost + known)
    drawn = with_drawn_lives(sample, 100.0, np.random.default_rng(1))
    assert drawn.departs_s[400:].tolist() == sample.departs_s[400:].tolist()
    assert set(drawn.departs_s[:400].tolist()) == {500.0, math.inf}
    assert 150 < np.isinf(drawn.departs_s[:400]).sum() < 250
    again, other = (with_drawn_lives(sample, 100.0, np.random.default_rng(seed)).departs_s for seed in (1, 2))
    assert drawn.departs_s.tolist() == again.tolist() != other.tolist()


def test_vms_that_are_followed_to_the_end_stay() -> None:
    sample = sample_of([(0, math.inf, 1), (100, 400, 1), (300, 9000, 1)])
    for until_s in (0.0, 300.0):
        drawn = with_drawn_lives(sample, until_s, np.random.default_rng(1))
        assert math.isinf(drawn.departs_s[0]) == (until_s == 0)
    late = sample_of([(100, math.inf, 1), (200, 250, 1), (300, 9000, 1)])
    assert math.isinf(with_drawn_lives(late, 100.0, np.random.default_rng(1)).departs_s[0])


def test_the_offered_peak_counts_departures_of_an_instant_before_its_arrivals() -> None:
    sample = sample_of([(0, 10, 4), (10, 30, 6), (20, math.inf, 3)])
    demand = offered(sample, (0.0, 40.0))
    assert demand.peak_cores == 9
    assert demand.mean_cores == pytest.approx((4 * 10 + 6 * 10 + 9 * 10 + 3 * 10) / 40)
    assert demand.peak_memory_mib == 9 * 1024
    late = offered(sample, (30.0, 40.0))
    assert late.peak_cores == 3
    assert late.mean_cores == pytest.approx(3)
    assert len(offered(sample, (0.0, 2.5 * DAY_S)).daily_mean_cores) == 3


def test_vms_of_no_cores_that_fit_no_node_are_told_of() -> None:
    sample = sample_of([(0, 10, 0)])
    (said,) = fits_no_node(sample, np.zeros(1, np.bool_), (0.0, 20.0))
    assert said.startswith("1 of 1 VMs in the window fit no node")
    assert said.endswith("with 0.0% of the core-seconds")


def test_overcommitment_is_set_by_the_number_of_nodes() -> None:
    assert nodes_for(7680, 1.6, 48) == 100
    assert nodes_for(7680, 1.0, 48) == 160
    assert nodes_for(1, 2.0, 48) == 1


def test_the_bound_is_what_minimums_and_high_priority_vms_leave_at_the_peak() -> None:
    assert incompressible(1.6, 0.5, 0.3) == pytest.approx(1.04)
    assert incompressible(1.6, 0.7, 0.3) == pytest.approx(0.816)
    assert incompressible(2.0, 0.0, 0.0) == 2


def test_coins_are_the_same_at_every_share() -> None:
    sample = sampled([batch(500)])
    few, many = (arrivals_of(sample, share, 0.3, 2, np.random.default_rng(5)) for share in (0.3, 0.7))
    assert ((few.sold_as == LOW) <= (many.sold_as == LOW)).all()
    assert (few.sold_as == LOW).mean() == pytest.approx(0.3, abs=0.08)
    assert few.draws.tolist() == many.draws.tolist()
    assert (few.minimum == few.upper)[few.sold_as != LOW].all()


def test_what_is_left_at_the_minimums_is_near_the_bound() -> None:
    sample = sampled([batch(2000)])
    arrivals = arrivals_of(sample, 0.6, 0.25, 1, np.random.default_rng(5))
    window_s = (0.0, 600_000.0)
    whole, least = (offered(one, window_s) for one in (sample, at_minimums(sample, arrivals)))
    assert least.peak_cores / whole.peak_cores == pytest.approx(incompressible(1.0, 0.6, 0.25), rel=0.1)
    assert least.peak_memory_mib / whole.peak_memory_mib == pytest.approx(0.55, rel=0.1)


def test_what_the_trace_says_of_priority_goes_before_the_coin() -> None:
    sample = sampled([batch(100)])
    said = np.array([batches.LOW, batches.HIGH] * 50, np.int8)
    arrivals = arrivals_of(Sample.of(sample.arrays() | {"priority": said}), 0.5, 0.3, 1, np.random.default_rng(1))
    assert ((arrivals.sold_as == LOW) == (said == batches.LOW)).all()


@settings(max_examples=60, deadline=None)
@given(
    cores=st.floats(0.1, 64).map(lambda value: round(value, 2)),
    memory_mib=st.integers(192, 1 << 20).map(float),
    share=st.floats(0, 1),
)
def test_minimums_are_those_of_the_live_system(cores: float, memory_mib: float, share: float) -> None:
    nominal = ResourceVector(cores, memory_mib)
    live = effective_minimum(size_of_shares(nominal, ResourceVector(share, share)), nominal)
    assert minimum_of(np.array([list(nominal)]), share)[0].tolist() == pytest.approx(list(live), abs=1e-9)


def test_only_deflation_and_ballooning_make_use_of_minimums() -> None:
    arrivals = arrivals_of(sampled([batch(100)]), 0.5, 0.25, 1, np.random.default_rng(1))
    low = arrivals.sold_as == LOW
    for policy in ClusterPolicy:
        treated = under(policy, arrivals)
        deflated = policy in (ClusterPolicy.DEFLATION, ClusterPolicy.MEMORY_BALLOONING)
        assert (treated.minimum[low, 0] == (0.5 if deflated else 2.0)).all()
        assert (treated.minimum[~low] == treated.upper[~low]).all()


def test_every_application_has_a_curve_with_a_source_and_full_throughput_at_nominal() -> None:
    for name, (points, source) in APPLICATIONS.items():
        check_curve(points, name)
        assert points[-1] == (1.0, 1.0)
        assert "Fig. " in source
    assert dict(APPLICATIONS["spark-als"].points)[0.5] == pytest.approx(0.5)
    curves = curves_of(list(APPLICATIONS))
    assert len(curves.points) == len(APPLICATIONS)
    with pytest.raises(InvalidParameter, match="there are many"):
        curves_of(["nonesuch"])
    with pytest.raises(InvalidParameter, match="empty"):
        curves_of([])


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0.0), (0.2, 0.3), (0.4, 0.6), (0.5, 0.7), (0.6, 0.8), (0.8, 0.9), (1.0, 0.9)]
)
def test_utility_is_straight_between_points_and_below_the_first(share: float, expected: float) -> None:
    assert utility_at([0.4, 0.6, 0.8], [0.6, 0.8, 0.9], share) == pytest.approx(expected)
