"""Generators: exact distributions, one seed one workload, replays that lose no core."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators import arrivals, capacity
from ebbtide.simulator.generators.durations import BoundedPareto, ClampedZipf, Durations, Gaussian, Uniform
from ebbtide.simulator.generators.harvest import HarvestSeries, Packing
from ebbtide.simulator.inputs.batches import CapacityBatch, SeriesBatch, VmBatch, hints, same, texts, unknown


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("exponent", "mean_h"),
    [(1.8, 1.50), (1.7, 2.82), (1.6, 5.63), (1.5, 11.8), (1.4, 25.7), (1.3, 57.5), (1.2, 131), (1.1, 305)],
)
def test_a_clamped_zipf_has_the_means_of_table_4_1(exponent: float, mean_h: float) -> None:
    """Figures of the infinite, clamped distribution; the thesis' own samples lie within 6 % of them."""
    assert ClampedZipf(exponent).mean_s() / 3600 == pytest.approx(mean_h, rel=0.005)


def test_a_clamped_zipf_is_clamped_and_not_truncated() -> None:
    values = ClampedZipf(1.1).draw(rng(), 200_000)
    assert values.min() == 300
    assert values.max() == 8640 * 300
    assert (values % 300 == 0).all()
    tail = 1 - sum(k**-1.1 for k in range(1, 8640)) / 10.584448464950809
    assert (values == 8640 * 300).mean() == pytest.approx(tail, abs=0.005)
    assert tail > 0.3


@pytest.mark.parametrize(
    "durations",
    [
        Uniform(60, 3600),
        Gaussian(600, 200),
        Gaussian(10, 100, least_s=5),
        BoundedPareto(1.0, 10, 1000),
        BoundedPareto(1.5, 10, 100_000),
        BoundedPareto(0.5, 1, 1000),
        ClampedZipf(1.5),
        ClampedZipf(2.5, most=10, step_s=1),
    ],
    ids=repr,
)
def test_the_mean_of_many_is_the_mean_and_a_seed_gives_the_same(durations: Durations) -> None:
    count = 400_000
    values = durations.draw(rng(7), count)
    assert abs(values.mean() - durations.mean_s()) < 5 * values.std() / math.sqrt(count)
    assert (durations.draw(rng(7), count) == values).all()
    assert not (durations.draw(rng(8), count) == values).all()


def test_quantiles_are_those_of_the_distribution() -> None:
    pareto = BoundedPareto(1.5, 10, 100_000).draw(rng(), 400_000)
    assert (pareto <= 100).mean() == pytest.approx(1 - 10**-1.5, abs=0.003)
    assert pareto.min() >= 10
    cut = Gaussian(0, 1, least_s=0.5).draw(rng(), 400_000)
    assert cut.min() >= 0.5
    share = (math.erf(1 / math.sqrt(2)) - math.erf(0.5 / math.sqrt(2))) / (1 - math.erf(0.5 / math.sqrt(2)))
    assert (cut <= 1).mean() == pytest.approx(share, abs=0.003)


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    times = np.concatenate(list(arrivals.poisson(rng(), 2.0, 100_000)))
    assert (np.diff(times) >= 0).all()
    assert times[-1] < 100_000
    assert len(times) == pytest.approx(200_000, abs=5 * math.sqrt(200_000))
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(0.5, rel=0.02)
    counts = np.bincount(times.astype(int), minlength=100_000)
    assert counts.var() == pytest.approx(2, rel=0.05)


def test_jobs_and_vms_are_made_of_what_they_are_asked_for() -> None:
    (jobs,) = arrivals.jobs(rng(), [np.arange(5000.0)], Uniform(10, 20), (1, 2, 4, 8), tasks=(2, 4))
    assert set(jobs.cpu_cores) == {1, 2, 4, 8}
    assert set(jobs.task_runtime_s.lengths) == {2, 3, 4}
    assert jobs.runtime_s[7] == pytest.approx(jobs.task_runtime_s.row(7).mean())
    (vms,) = arrivals.vms(rng(), [np.arange(5000.0)], Uniform(10, 20), [(1, 1024), (8, 2048)])
    assert {(r["cpu_cores"], r["memory_mib"]) for r in vms.rows()} == {(1, 1024), (8, 2048)}
    assert ((vms.departs_s - vms.arrives_s >= 10 - 1e-9) & (vms.departs_s - vms.arrives_s < 20 + 1e-9)).all()
    ids = [i for part in arrivals.vms(rng(), [np.zeros(2), np.ones(2)], Uniform(1, 2), [(1, 1)]) for i in part.id]
    assert ids == ["vm-0", "vm-1", "vm-2", "vm-3"]


def on_a_grid(counts: list[int], grid_s: float) -> VmBatch:
    at_s = np.repeat(np.arange(len(counts)) * grid_s, counts)
    n = len(at_s)
    return VmBatch(
        id=texts(str(i) for i in range(n)),
        group=same("", n),
        arrives_s=at_s,
        departs_s=at_s + 300,
        cpu_cores=np.ones(n),
        memory_mib=np.ones(n),
        priority=hints(n),
        utilisation=unknown(n),
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 5))
def test_jitter_moves_rows_inside_their_place_of_the_grid_only(counts: list[int], size: int) -> None:
    vms = on_a_grid(counts, 300)
    parts = [vms.take(slice(i, i + size)) for i in range(0, len(vms), size)]
    found = list(arrivals.jittered(rng(), parts, 300))
    if not sum(counts):
        assert not found
        return
    moved = VmBatch.joined([part for part in found if isinstance(part, VmBatch)])
    assert (np.diff(moved.arrives_s) >= 0).all()
    assert sorted(moved.id, key=int) == list(vms.id)
    assert np.allclose(moved.departs_s - moved.arrives_s, 300)
    assert [np.floor(t / 300) for t in moved.arrives_s] == [t / 300 for t in vms.arrives_s]
    assert len(set(moved.arrives_s)) == len(moved)


def test_jitter_keeps_a_group_together_where_that_is_asked_for() -> None:
    vms = on_a_grid([4, 4], 300)
    vms = replace(vms, group=texts(["a", "a", "b", "", "a", "a", "", ""]))
    (moved,) = arrivals.jittered(rng(), [vms.take(slice(0, 4))], 300, together=True)
    assert len(set(moved.keys)) == 3
    moved = VmBatch.joined([p for p in arrivals.jittered(rng(), [vms], 300, together=True) if isinstance(p, VmBatch)])
    by_group: dict[str, set[float]] = {}
    for row in moved.rows():
        by_group.setdefault(row["group"], set()).add(row["arrives_s"])
    assert {group: len(times) for group, times in by_group.items()} == {"a": 2, "b": 1, "": 3}


def test_a_random_walk_moves_by_exact_steps_between_its_bounds() -> None:
    walk = capacity.random_walk(rng(), 3600 * 24 * 300)
    assert (len(walk), walk.value[0], walk.at_s[1]) == (7200, 0.7, 3600)
    assert walk.value.min() == 0.4
    assert walk.value.max() == 1
    moves = np.round(np.diff(walk.value), 6)
    assert set(moves) == {-0.15, 0, 0.15}
    inside = (walk.value[:-1] > 0.5) & (walk.value[:-1] < 0.9)
    for move in (-0.15, 0.15, 0):
        assert (moves[inside] == move).mean() == pytest.approx(1 / 3, abs=0.03)
    assert walk.value.mean() == pytest.approx(0.7, abs=0.02)


def test_machines_go_off_last_on_first() -> None:
    shares = SeriesBatch(at_s=np.array([0.0, 10, 20, 30]), value=np.array([0.5, 0.75, 0.25, 0.25]))
    changes = CapacityBatch.joined(list(capacity.machines([shares], 4, 24, 1024)))
    assert [(r["at_s"], r["machine"], r["cpu_cores"]) for r in changes.rows()] == [
        (0, "machine-0", 24),
        (0, "machine-1", 24),
        (0, "machine-2", 0),
        (0, "machine-3", 0),
        (10, "machine-2", 24),
        (20, "machine-2", 0),
        (20, "machine-1", 0),
    ]


def test_machines_of_a_series_in_parts_are_those_of_the_whole() -> None:
    walk = capacity.random_walk(rng(3), 3600 * 200)
    whole = CapacityBatch.joined(list(capacity.machines([walk], 20, 24, 1024)))
    cut = [walk.take(slice(i, i + 7)) for i in range(0, len(walk), 7)]
    parts = CapacityBatch.joined(list(capacity.machines(cut, 20, 24, 1024)))
    assert list(whole.rows()) == list(parts.rows())
    on: dict[str, float] = {}
    shares = dict(zip(walk.at_s.tolist(), walk.value.tolist(), strict=True))
    times = sorted(set(whole.at_s))
    for at_s in times:
        on.update({r["machine"]: r["cpu_cores"] for r in whole.rows() if r["at_s"] == at_s})
        assert sum(c > 0 for c in on.values()) == math.floor(shares[at_s] * 20 + 1e-9)


def test_capacity_under_carbon_meets_its_mean() -> None:
    intensity = SeriesBatch(at_s=np.arange(500.0), value=rng().uniform(0, 600, 500))
    budget = capacity.carbon_budget([intensity], 0.7)
    (shares,) = capacity.under_carbon([intensity], budget)
    assert shares.value.mean() == pytest.approx(0.7, abs=1e-9)
    assert (shares.value[intensity.value <= budget] == 1).all()
    i = int(np.argmax(intensity.value))
    assert shares.value[i] == pytest.approx(budget / intensity.value[i])


def test_a_carbon_budget_counts_values_for_as_long_as_they_hold() -> None:
    intensity = SeriesBatch(at_s=np.array([0.0, 1.0, 4.0, 5.0]), value=np.array([400.0, 100.0, 400.0, 400.0]))
    (shares,) = capacity.under_carbon([intensity], capacity.carbon_budget([intensity], 0.7))
    assert shares.value @ [1, 3, 1, 1] / 6 == pytest.approx(0.7)


def vms_of(rows: list[tuple[float, float, float, float]]) -> VmBatch:
    table = np.array(sorted(rows, key=lambda row: row[0]), np.float64).reshape(-1, 4)
    n = len(table)
    return VmBatch(
        id=texts(str(i) for i in range(n)),
        group=same("", n),
        arrives_s=table[:, 0],
        departs_s=table[:, 0] + table[:, 1],
        cpu_cores=table[:, 2],
        memory_mib=table[:, 3],
        priority=hints(n),
        utilisation=unknown(n),
    )


def test_packing_fills_one_server_and_balancing_all() -> None:
    vms = vms_of([(1, 100, 2, 10), (2, 100, 2, 10), (3, math.nan, 6, 10)])
    found = {}
    for packing in (Packing.PACKING, Packing.BALANCING):
        replay = HarvestSeries(2, 8, 1000, packing, rng())
        changes = CapacityBatch.joined(list(replay.replay([vms])))
        found[packing] = [(r["at_s"], r["machine"], r["cpu_cores"]) for r in changes.rows()]
        assert (replay.counts.placed, replay.counts.rejected) == (3, 0)
    start = [(0, "server-0", 8), (0, "server-1", 8)]
    assert found[Packing.PACKING] == [
        *start,
        (1, "server-0", 6),
        (2, "server-0", 4),
        (3, "server-1", 2),
        (101, "server-0", 6),
        (102, "server-0", 8),
    ]
    assert found[Packing.BALANCING] == [
        *start,
        (1, "server-0", 6),
        (2, "server-1", 6),
        (3, "server-0", 0),
        (101, "server-0", 2),
        (102, "server-1", 8),
    ]


def test_below_the_minimum_size_there_is_no_harvest_vm() -> None:
    replay = HarvestSeries(1, 8, 100, Packing.PACKING, rng(), least_cpu_cores=2)
    changes = CapacityBatch.joined(list(replay.replay([vms_of([(1, 5, 7, 60), (2, 9, 1, 60), (3, 1, 1, 1)])])))
    assert [(r["at_s"], r["cpu_cores"], r["memory_mib"]) for r in changes.rows()] == [
        (0, 8, 100),
        (1, 0, 0),
        (6, 8, 100),
    ]
    assert (replay.counts.placed, replay.counts.rejected) == (2, 1)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30).map(float),
            st.one_of(st.just(math.nan), st.integers(0, 20).map(float)),
            st.sampled_from([0.25, 1.0, 3.0, 9.0]),
            st.sampled_from([1.0, 40.0, math.nan]),
        ),
        max_size=25,
    ),
    st.sampled_from(Packing),
    st.integers(1, 6),
)
def test_a_replay_loses_no_core(rows: list[tuple[float, float, float, float]], packing: Packing, size: int) -> None:
    vms = vms_of(rows)
    replay = HarvestSeries(3, 8, 100, packing, rng())
    parts = [vms.take(slice(i, i + size)) for i in range(0, len(vms), size)]
    changes = list(replay.replay(parts))
    free: dict[str, float] = {}
    last_s = -1.0
    for row in (r for batch in changes for r in batch.rows()):
        assert row["at_s"] >= last_s
        assert 0 <= row["cpu_cores"] <= 8
        last_s = row["at_s"]
        assert free.get(row["machine"]) != row["cpu_cores"], "a change that changes nothing"
        free[row["machine"]] = row["cpu_cores"]
    assert replay.counts.placed + replay.counts.rejected == len(vms)
    stay = [r for r in rows if math.isnan(r[1])]
    assert 24 - sum(free.values()) <= sum(r[2] for r in stay) + 1e-9
    if not stay:
        assert sum(free.values()) == 24
    # The same in one piece.
    again = HarvestSeries(3, 8, 100, packing, rng())
    assert [r for b in again.replay([vms]) for r in b.rows()] == [r for b in changes for r in b.rows()]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Uniform(5, 5), "most_s"),
        (lambda: Uniform(-1, 5), "least_s"),
        (lambda: Gaussian(5, 0), "spread_s"),
        (lambda: Gaussian(0, 1, least_s=9), "least_s"),
        (lambda: Gaussian(math.nan, 1), "centre_s"),
        (lambda: BoundedPareto(0, 1, 2), "shape"),
        (lambda: BoundedPareto(1, 3, 2), "most_s"),
        (lambda: ClampedZipf(1.0), "exponent"),
        (lambda: ClampedZipf(1.5, most=0), "most"),
        (lambda: list(arrivals.poisson(rng(), 0, 1)), "per_s"),
        (lambda: list(arrivals.poisson(rng(), 1, math.inf)), "until_s"),
        (lambda: list(arrivals.jobs(rng(), [], Uniform(1, 2), ())), "sizes"),
        (lambda: list(arrivals.jobs(rng(), [], Uniform(1, 2), tasks=(2, 1))), "tasks"),
        (lambda: list(arrivals.vms(rng(), [], Uniform(1, 2), [(1, 0)])), "sizes"),
        (lambda: list(arrivals.jittered(rng(), [], 0)), "grid_s"),
        (lambda: capacity.random_walk(rng(), 100, least=0.8), "start"),
        (lambda: capacity.random_walk(rng(), 100, least=2, most=1), "least"),
        (lambda: capacity.random_walk(rng(), 0), "until_s"),
        (lambda: list(capacity.machines([], 0, 1, 1)), "count"),
        (lambda: list(capacity.under_carbon([], 0)), "budget"),
        (lambda: capacity.carbon_budget([], 0.5), "intensity"),
        (lambda: capacity.carbon_budget([], 1), "mean_share"),
        (lambda: HarvestSeries(0, 1, 1, Packing.RANDOM, rng()), "servers"),
        (lambda: HarvestSeries(1, 1, math.inf, Packing.RANDOM, rng()), "memory_mib"),
        (lambda: HarvestSeries(1, 1, 1, Packing.RANDOM, rng(), -1), "least_cpu_cores"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert caught.value.field == field
