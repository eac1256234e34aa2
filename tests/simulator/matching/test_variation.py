"""How a pool's machines differ from each other, and from hour to hour; placements that make them differ."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.simulator.generators.harvest import HarvestSeries, Packing
from ebbtide.simulator.inputs.batches import VmBatch, hints, texts, unknown
from ebbtide.simulator.matching.pools import Pool, PoolSettings, pool
from ebbtide.simulator.matching.variation import correlation, counted, drift, spread, stability

HOUR_S, DAY_S = 3600.0, 86_400.0


def made(rates: list[int], days: int = 2) -> Pool:
    """Machines that change so many times an hour, evenly, from 8 to 9 cores and back."""
    rows = [(0.0, machine, 8) for machine in range(len(rates))]
    for machine, rate in enumerate(rates):
        for number in range(rate * 24 * days):
            rows.append((1.0 + number * HOUR_S / rate, machine, 9 - number % 2))
    columns = list(zip(*sorted(rows), strict=True))
    return Pool(np.array(columns[1]), np.array(columns[0]), np.array(columns[2]), len(rates), days * DAY_S, 0.0)


def test_what_a_machine_begins_with_is_no_change_and_each_other_row_is_one() -> None:
    counts = counted(made([0, 1, 4]), 0.0, 2 * DAY_S, HOUR_S)
    assert counts.shape == (48, 3)
    assert (counts == [0, 1, 4]).all()


def test_a_machine_without_cores_is_not_there() -> None:
    """Eight cores for an hour, gone for a day, back with four, which become five after half an hour."""
    at_s, cores = [0.0, HOUR_S, 25 * HOUR_S, 25.5 * HOUR_S], [8, 0, 4, 5]
    found = Pool(np.zeros(4, np.int64), np.array(at_s), np.array(cores), 1, 2 * DAY_S, 0.0)
    assert np.flatnonzero(counted(found, 0.0, 2 * DAY_S, HOUR_S)).tolist() == [1, 25]
    whole = spread(found, 0.0, 2 * DAY_S)
    assert (whole["cores_p10"], whole["cores_p90"], whole["day_p50_changes"]) == (5.0, 5.0, 1.0)
    assert found.statistics(0.0, 2 * DAY_S)["gap_mean_min"] == 30.0


def test_machines_that_persist_have_one_order_in_all_hours() -> None:
    found = spread(made([0, 0, 1, 1, 2, 6]), 0.0, 2 * DAY_S)
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert (found["hour_p50_changes"], found["day_p50_changes"]) == (1.0, 24.0)
    assert found["day_p90_changes"] == pytest.approx(np.percentile([0, 0, 24, 24, 48, 144] * 2, 90))
    assert (found["cores_p10"], found["cores_p90"]) == (8.0, 9.0) or found["cores_p90"] == 8.0


def test_ranks_of_equal_values_are_their_mean() -> None:
    assert correlation(np.array([1, 2, 2, 3]), np.array([10, 20, 20, 30])) == pytest.approx(1.0)
    assert correlation(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1.0)
    assert np.isnan(correlation(np.array([1, 1, 1]), np.array([1, 2, 3])))


def test_how_long_a_machine_must_have_been_stable_is_read_off_the_gaps() -> None:
    """Half of all gaps last a minute, half a hundred: after a minute a task of ten is as good as safe."""
    gap_s = np.repeat([60.0, 6000.0], 50)
    assert stability(gap_s, 600.0) == pytest.approx(0.1)
    # At once, where seven of ten gaps are longer than the task; never, where no age helps.
    assert stability(np.repeat([60.0, 6000.0], [30, 70]), 600.0) == 0.0
    assert stability(np.full(100, 60.0), 600.0) == np.inf


def test_gaps_that_stay_the_same_do_not_drift() -> None:
    gap_s = np.tile([60.0, 600.0], 100)
    end_s = np.repeat([0.0, 6 * HOUR_S], 100)
    assert drift(gap_s, end_s) == 0.0
    # Short ones first, and then long ones: each is half of all away.
    assert drift(np.sort(gap_s), end_s) == pytest.approx(0.5)
    assert np.isnan(drift(gap_s[:10], end_s[:10]))


def batch(rows: list[tuple[float, float, float, str]]) -> VmBatch:
    arrives_s, departs_s, cores, group = zip(*rows, strict=True)
    count = len(rows)
    return VmBatch(
        id=texts(str(n) for n in range(count)),
        group=texts(group),
        arrives_s=np.array(arrives_s),
        departs_s=np.array(departs_s),
        cpu_cores=np.array(cores),
        memory_mib=np.full(count, 1.0),
        priority=hints(count),
        utilisation=unknown(count),
    )


def servers_of(rows: list[tuple[float, float, float, str]], **how: object) -> dict[str, float]:
    """Free cores of three servers of 8 after all have come."""
    series = HarvestSeries(3, 8, 100, Packing.BALANCING, np.random.default_rng(1), **how)  # type: ignore[arg-type]
    left: dict[str, float] = {}
    for changes in series.replay([batch(rows)]):
        for server, at_s, cores in zip(changes.machine, changes.at_s, changes.cpu_cores, strict=True):
            if at_s <= 10.0:
                left[server] = cores
    return left


def test_a_batch_stays_on_one_server_as_far_as_it_has_room() -> None:
    rows = [(10.0, 99.0, 3.0, "a"), (10.0, 99.0, 3.0, "a"), (10.0, 99.0, 3.0, "a")]
    assert sorted(servers_of(rows, together=True).values()) == [2.0, 5.0, 8.0]
    assert sorted(servers_of(rows).values()) == [5.0, 5.0, 5.0]
    # Another batch, one that comes later, and VMs of none go where they would.
    alone = [(5.0, 99.0, 3.0, "a"), (10.0, 99.0, 3.0, "a"), (10.0, 99.0, 3.0, "")]
    assert sorted(servers_of(alone, together=True).values()) == [5.0, 5.0, 5.0]


def replayed(seed: int = 5, **how: object) -> Pool:
    generator = np.random.default_rng(7)
    count = 4000
    arrives_s = np.sort(generator.uniform(0.0, 3 * DAY_S, count))
    vms = {
        "arrives_s": arrives_s,
        "departs_s": arrives_s + generator.exponential(7200.0, count),
        "cpu_cores": generator.choice([1.0, 2.0, 4.0], count),
        "memory_mib": np.full(count, 2048.0),
        "group": np.arange(count) // 3,
    }
    given = {"packing": Packing.RANDOM, "machines": 20, "cpu_cores": 24.0, "grid_s": 0.0, **how}
    return pool(vms, PoolSettings(servers=20, share=1.0, from_s=DAY_S, until_s=2.5 * DAY_S, **given), seed)  # type: ignore[arg-type]


def test_the_fullest_of_some_keeps_servers_apart_where_random_placement_makes_them_alike() -> None:
    correlations = [
        spread(replayed(packing=packing), DAY_S, 2.5 * DAY_S)["rank_correlation"]
        for packing in (Packing.RANDOM, Packing.FULLEST_OF)
    ]
    assert correlations[1] > correlations[0] + 0.2


def test_of_one_server_drawn_the_fullest_is_a_random_one_and_of_many_the_fullest_of_all() -> None:
    sizes = {
        drawn: replayed(packing=Packing.FULLEST_OF, drawn=drawn).statistics(DAY_S, 2 * DAY_S)["change_mean_cores"]
        for drawn in (1, 1000)
    }
    alike = {
        1: replayed(packing=Packing.RANDOM).statistics(DAY_S, 2 * DAY_S)["change_mean_cores"],
        1000: replayed(packing=Packing.PACKING).statistics(DAY_S, 2 * DAY_S)["change_mean_cores"],
    }
    assert sizes == pytest.approx(alike, rel=0.15)


def test_threads_are_so_many_times_the_cores() -> None:
    one, two = replayed(), replayed(threads_per_core=2)
    assert (two.cores == 2 * one.cores).all()
    assert (two.at_s == one.at_s).all()
