"""The matcher and its rivals on a small pool: interpreted, with everything checked after every event."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ebbtide.matcher.predict.predictor import PredictorOptions
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.inputs.batches import Floats
from ebbtide.simulator.jobs.engine import Engine
from ebbtide.simulator.jobs.state import as_mapping
from ebbtide.simulator.matching.calibrating import calibrate
from ebbtide.simulator.matching.pools import Pool, PoolSettings, pool
from ebbtide.simulator.matching.running import WARM_UP_S, run
from ebbtide.simulator.matching.schemes import SCHEMES, engine_policy, engine_settings
from ebbtide.simulator.matching.workload import SHAPES, Workload, jobs, runtimes

DAY_S = 86_400.0
SMALL = Workload(load=0.5, jobs=4, least_tasks=3, most_tasks=6, most_task_s=3600.0, cores=(1, 2))


def made(machines: int = 5, seed: int = 1, days: float = 2.5) -> Pool:
    """Machines of 2 to 10 cores that change every half hour on average, half of them seldom."""
    generator = np.random.default_rng(seed)
    rows = []
    for machine in range(machines):
        at_s, cores = 0.0, 8
        mean_s = 600.0 if machine % 2 else 20_000.0
        while at_s < days * DAY_S:
            rows.append((at_s, machine, cores))
            at_s += float(generator.exponential(mean_s))
            cores = int(np.clip(cores + generator.choice([-3, -2, -1, 1, 2, 3]), 2, 10))
    rows.sort()
    kept: list[tuple[float, int, int]] = []
    last: dict[int, int] = {}
    for at_s, machine, cores in rows:
        if last.get(machine) != cores:
            kept.append((at_s, machine, cores))
        last[machine] = cores
    columns = list(zip(*kept, strict=True))
    return Pool(np.array(columns[1]), np.array(columns[0]), np.array(columns[2]), machines, days * DAY_S, 0.0)


def still(machines: int, cores: int) -> Pool:
    """Machines that never change."""
    return Pool(np.arange(machines), np.zeros(machines), np.full(machines, cores), machines, 2.5 * DAY_S, 0.0)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if not SCHEMES[name].checkpoint_cost_s])
def test_every_scheme_finishes_all_jobs_and_breaks_no_rule(scheme: str) -> None:
    others = [made(20, seed=9)] if SCHEMES[scheme].known else []
    found = run(made(), SMALL, scheme, seed=2, validate=True, compile=False, others=others)
    assert found.results.jobs_done == SMALL.jobs
    assert (found.completion_s > 0).all()
    assert found.metrics["jct_p90_s"] >= found.metrics["jct_mean_s"] * 0.5


@pytest.mark.parametrize("scheme", ["oracle-no-shrink", "oracle-no-kill"])
def test_an_oracle_has_no_task_killed(scheme: str) -> None:
    for seed in range(3):
        found = run(made(seed=seed), SMALL, scheme, seed, validate=True, compile=False)
        assert (found.results.kills, found.results.waste) == (0, 0.0)


def test_interruptible_jobs_are_told_apart_and_lose_less() -> None:
    """What is killed of the first of each two begins again where it was a minute before."""
    long = replace(SMALL, jobs=12, most_task_s=7200.0)
    every, none = (run(made(), long, "capacity-random", 2, compile=False, interruptible=n) for n in (2, 0))
    assert every.results.lost_core_s < none.results.lost_core_s
    means = [every.metrics[f"{name}_jct_geometric_mean_s"] for name in ("interruptible", "uninterruptible")]
    assert np.sqrt(means[0] * means[1]) == pytest.approx(every.metrics["jct_geometric_mean_s"])
    assert "interruptible_jct_geometric_mean_s" not in none.metrics
    with pytest.raises(InvalidParameter, match="interruptible"):
        run(made(), SMALL, "checkpoint-1-min", 2, compile=False, interruptible=2)


def test_a_job_is_slowed_down_by_what_it_takes_longer_than_its_longest_task() -> None:
    found = run(made(), SMALL, "capacity-random", 2, compile=False)
    assert (found.slowdown >= 1.0 - 1e-9).all()
    calm = run(still(5, 10), SMALL, "capacity-random", 2, compile=False)
    assert calm.metrics["slowdown_geometric_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(("until_s", "left"), [(5400.0, range(1, 4)), (0.0, range(4, 5))])
def test_jobs_that_are_never_done_are_counted_and_warned_of(until_s: float, left: range) -> None:
    """On machines that keep one core for good, all jobs or some find no room any more."""
    machines, ends_s = np.arange(5), np.full(5, WARM_UP_S + until_s)
    at_s, cores = np.append(np.zeros(5), ends_s), np.repeat([10, 1], 5)
    ends = Pool(np.tile(machines, 2), at_s, cores, 5, 2.5 * DAY_S, 0.0)
    found = run(ends, replace(SMALL, cores=(2,)), "capacity-random", 2, validate=True, compile=False)
    assert found.metrics["jobs_left"] in left
    assert found.metrics["jobs_done"] == len(found.completion_s) == SMALL.jobs - found.metrics["jobs_left"]
    assert np.isnan(found.metrics["jct_p90_s"]) == np.isnan(found.metrics["slowed_4_share"]) == (not until_s)
    (said,) = found.not_done
    assert f"{found.metrics['jobs_left']:g} of {SMALL.jobs} jobs are not done" in said


def test_a_run_is_the_same_every_time() -> None:
    one, other = (run(made(), SMALL, "landmark", 3, compile=False) for _ in range(2))
    assert one.completion_s.tolist() == other.completion_s.tolist()
    assert one.metrics == pytest.approx(other.metrics, rel=0.0, abs=0.0, nan_ok=True)


@pytest.mark.parametrize("scheme", ["landmark", "oracle-no-kill"])
def test_a_run_that_is_saved_and_gone_on_with_is_the_same(scheme: str, tmp_path: Path) -> None:
    """The matcher's arrays are nested: rolling counts, landmarks and curves are tuples in its own."""
    given = made()
    batch, _ = jobs(SMALL, given, WARM_UP_S, 2)

    def engine() -> Engine:
        chosen = SCHEMES[scheme]
        policy = engine_policy(chosen, given)
        return Engine(
            [batch], None, [given.batch()], policy=policy, settings=engine_settings(chosen), seed=2, compile=False
        )

    through = engine()
    expected = through.run()
    parts = engine()
    path = tmp_path / "saved.npz"
    for until_s in (0.3 * DAY_S, WARM_UP_S, WARM_UP_S + 600.0, WARM_UP_S + 3600.0):
        parts.advance(until_s)
        parts.save(path)
        parts = engine()
        parts.load(path)
    found = parts.run()
    assert found.metrics == expected.metrics
    assert parts.now_s == through.now_s
    ours, theirs = (as_mapping(one.policy_state, "") for one in (parts, through))
    assert ours.keys() == theirs.keys()
    assert scheme != "landmark" or "rolling.last_s" in ours
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


def test_predictions_of_started_tasks_are_held_against_their_outcomes() -> None:
    found = run(made(), SMALL, "promises", 2, compile=False)
    assert found.calibration is not None
    counts, predicted, observed = found.calibration
    assert counts.sum() == found.results.tasks + found.results.kills
    assert ((observed >= 0) & (observed <= 1) & (predicted >= 0) & (predicted <= 1)).all()
    assert 0 <= found.brier <= 1


def test_the_load_is_work_over_mean_cores_in_the_window_of_the_jobs() -> None:
    given = made()
    batch, until_s = jobs(SMALL, given, WARM_UP_S, 7)
    work = sum(float(batch.task_runtime_s.row(n).sum() * batch.cpu_cores[n]) for n in range(SMALL.jobs))
    capacity = given.mean_cores(WARM_UP_S, until_s) * (until_s - WARM_UP_S)
    assert work / capacity == pytest.approx(SMALL.load, rel=1e-3)
    assert ((batch.submit_s >= WARM_UP_S) & (batch.submit_s <= until_s)).all()


def test_a_load_that_the_pool_is_too_short_for_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="load"):
        jobs(Workload(load=0.001), made(), WARM_UP_S, 7)


def drawn(shape: str) -> Floats:
    return runtimes(Workload(shape=shape), 100_000, np.random.default_rng(1))


@pytest.mark.parametrize("shape", ["uniform", "gaussian"])
def test_runtimes_stay_between_a_minute_and_the_most(shape: str) -> None:
    values = drawn(shape)
    assert values.min() >= 60.0
    assert values.max() <= 3600.0
    assert values.std() > 100.0


def test_runtimes_of_all_shapes_have_one_mean() -> None:
    """Else what is compared by shape is long tasks with short ones."""
    assert {shape: drawn(shape).mean() for shape in SHAPES} == pytest.approx(dict.fromkeys(SHAPES, 1830.0), rel=0.03)


def test_pareto_runtimes_are_bounded_an_hour_to_a_minute_apart_and_have_the_heaviest_tail() -> None:
    values = drawn("pareto")
    assert values.min() == pytest.approx(490.0, rel=1e-3)
    assert values.max() <= 60 * values.min()
    assert values.std() > 1.5 * drawn("uniform").std()


def test_a_pool_is_as_full_as_its_load_says_between_the_edges_of_a_window() -> None:
    """50 jobs come, and go, on a pool that is empty at both ends."""
    few = Workload(load=0.9, most_task_s=7200.0)
    window = Workload(load=0.9, most_task_s=7200.0, window_s=12 * 3600.0, edge_s=3 * 3600.0)
    ramps, full = (run(still(20, 40), one, "capacity-least-loaded", 3).metrics["utilisation"] for one in (few, window))
    assert ramps < 0.7
    assert full >= 0.8


def test_between_the_edges_only_what_comes_and_is_done_there_is_measured() -> None:
    whole = Workload(load=0.3, least_tasks=3, most_tasks=6, window_s=12 * 3600.0)
    every, inner = (run(still(20, 10), one, "capacity-random", 3) for one in (whole, replace(whole, edge_s=3 * 3600.0)))
    came_s = every.jobs["submitted_s"] - WARM_UP_S
    within = (came_s >= 3 * 3600.0) & (came_s < 9 * 3600.0)
    assert 0 < within.sum() < len(within)
    assert inner.completion_s.tolist() == every.completion_s[within].tolist()
    assert inner.slowdown.tolist() == every.slowdown[within].tolist()
    assert inner.results.measures["completion_count"] == within.sum()
    assert inner.results.useful_core_s < 0.7 * every.results.useful_core_s


@pytest.mark.parametrize("hours", [None, 6.0])
def test_edges_are_less_than_half_of_a_window(hours: float | None) -> None:
    with pytest.raises(InvalidParameter, match="edge_h"):
        Workload(window_s=hours and 3600.0 * hours, edge_s=3 * 3600.0)


@pytest.mark.parametrize(
    ("field", "value"), [("load", 0.0), ("shape", "flat"), ("jobs", 0), ("least_tasks", 200), ("cores", ())]
)
def test_a_bad_workload_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field):
        Workload(**{field: value})  # type: ignore[arg-type]


def vms(count: int = 6000, seed: int = 3) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    generator = np.random.default_rng(seed)
    arrives_s = np.sort(generator.uniform(0.0, 3 * DAY_S, count))
    return {
        "arrives_s": arrives_s,
        "departs_s": arrives_s + generator.exponential(7200.0, count),
        "cpu_cores": generator.choice([1.0, 2.0, 4.0], count),
        "memory_mib": np.full(count, 2048.0),
        "group": np.full(count, -1),
    }


def test_a_pool_begins_after_the_warm_up_with_what_each_machine_has_then() -> None:
    settings = PoolSettings(
        Packing.RANDOM, 20, 1.0, cpu_cores=24.0, machines=8, from_s=DAY_S, until_s=2.5 * DAY_S, grid_s=0.0
    )
    found = pool(vms(), settings, 5)
    assert sorted(found.machine[:8].tolist()) == list(range(8))
    assert (found.at_s[:8] == DAY_S).all()
    assert found.at_s.max() < 2.5 * DAY_S
    assert (np.diff(found.at_s) >= 0).all()
    for machine in range(8):
        cores = found.cores[found.machine == machine]
        assert (np.diff(cores) != 0).all()
        assert ((cores >= 0) & (cores <= 24)).all()
    statistics = found.statistics(DAY_S, 2.5 * DAY_S)
    assert statistics["changes"] > 100
    assert 0 < statistics["within_10_min"] <= statistics["within_1_h"] <= 1
    again = pool(vms(), settings, 5)
    assert found.cores.tolist() == again.cores.tolist()


def test_a_pool_without_power_is_to_the_digit_what_it_was_before_there_was_power() -> None:
    """Figures of the code that knew none; another version of NumPy may draw otherwise."""
    settings = PoolSettings(
        Packing.RANDOM, servers=20, share=1.0, cpu_cores=32.0, machines=7, from_s=0.5 * DAY_S, until_s=2 * DAY_S
    )
    found = pool(vms(), settings, 5)
    rows = np.arange(len(found.cores))
    assert (len(rows), int((found.cores * rows).sum()), int((found.machine * rows).sum())) == (1922, 25874312, 5405080)
    assert float(found.at_s.sum()) == float.fromhex("0x1.886cb24e59470p+27")
    assert found.supply is None


def test_no_machine_is_asked_how_likely_it_keeps_cores_that_it_does_not_have() -> None:
    given = made(machines=4)
    sized = PredictorOptions(form="landmark", sized=True)
    small, all_frees = (calibrate(given, sized, (900.0,), frees, compile=False) for frees in ((0.0,), (0.0, 10.0)))
    assert small.count == all_frees.count > 0


def test_predictions_on_a_stationary_pool_come_true() -> None:
    given = made(machines=24, days=3.0)
    found = calibrate(given, PredictorOptions(form="landmark", sized=True), (900.0, 3600.0), (0.0, 2.0), compile=False)
    worst = found.worst_error(200)
    assert found.count > 5000
    assert worst is not None
    assert worst < 0.1
    plain = calibrate(given, PredictorOptions(censored=False), (3600.0,), compile=False)
    assert found.brier is not None
    assert plain.brier is not None
    assert found.brier < plain.brier
