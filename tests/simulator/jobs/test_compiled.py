"""Compiled, interpreted, stopped and gone on with, and written plainly: the same run each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.simulating import simulator_plain, simulator_run
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import JobBatch
from ebbtide.simulator.jobs import state
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.settings import Settings
from tests.simulator.jobs import scenes

OPTIONS: list[dict[str, Any]] = [
    {"policy": "best-fit", "discipline": "conserving", "priorities": True},
    {"policy": "first-fit", "discipline": "strict", "kills": "newest", "memory": False},
    {"policy": "random", "discipline": "easy", "estimates": "requested", "requeue": "head", "priorities": True},
    {"policy": "filling", "discipline": "conserving", "checkpoint_every_s": 2.0, "checkpoint_cost_s": 0.25},
    {"policy": "first-fit", "discipline": "conserving", "replicas": 3, "memory": False},
    {"policy": "least-loaded", "discipline": "conserving", "kills": "newest"},
    {"policy": "worst-fit", "discipline": "conserving", "kills": "oldest"},
]


def same_state(one: Engine, other: Engine) -> None:
    """To the last bit; free rows hold what was there, and that is the same as well."""
    for ours, theirs in ((one.state, other.state), (one.policy_state, other.policy_state)):
        names = set(ours._fields) - {"done", "attempts"}
        for name in names:
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o['policy']} {o['discipline']}")
def test_compiled_and_interpreted_are_the_same_to_the_last_bit(options: dict[str, Any]) -> None:
    kills = 0
    for seed in range(3):
        jobs, moves = scenes.random_scene(seed)
        one = scenes.run(jobs, None, moves, compile=True, seed=seed, **options)
        other = scenes.run(jobs, None, moves, compile=False, seed=seed, **options)
        assert one.rows == other.rows
        assert [r.tolist() for r in one.done] == [r.tolist() for r in other.done]
        np.testing.assert_equal(one.results.metrics, other.results.metrics)
        same_state(one.engine, other.engine)
        kills += one.results.kills
    assert kills > 10


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o['policy']} {o['discipline']}")
def test_a_run_that_is_saved_and_gone_on_with_is_the_same_to_the_last_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    jobs, moves = scenes.random_scene(11, jobs=200, machines=8)
    policy = options["policy"]
    settings = Settings(**{k: v for k, v in options.items() if k != "policy"})

    def engine(batch: int = 7) -> Engine:
        return Engine(
            scenes.batches(jobs, batch),
            Machines(2, 8),
            scenes.changes(moves, 5),
            policy=policy,
            settings=settings,
            seed=3,
        )

    through = engine()
    through.run()
    path = tmp_path / "saved.npz"
    parts = engine()
    for until_s in (0.0, 7.3, 20.0, 61.0, 99.5):
        assert not parts.advance(until_s)
        parts.save(path)
        assert [p.name for p in tmp_path.iterdir()] == ["saved.npz"]
        parts = engine()
        parts.load(path)
    assert parts.advance(np.inf)
    same_state(parts, through)
    assert through.results().kills > 10


def test_what_was_saved_is_not_gone_on_with_as_something_else(tmp_path: Path) -> None:
    jobs, moves = scenes.random_scene(1)
    path = tmp_path / "saved.npz"

    def engine(**more: Any) -> Engine:
        given: dict[str, Any] = {"policy": "random", "seed": 3, "settings": Settings()} | more
        return Engine(scenes.batches(jobs), None, scenes.changes(moves), compile=False, **given)

    first = engine()
    first.advance(10)
    first.save(path)
    for field, more in (("seed", {"seed": 4}), ("settings", {"settings": Settings(kills="newest")})):
        with pytest.raises(InvalidParameter, match=f"^{field} is .* when .*saved.npz was saved"):
            engine(**more).load(path)
    path.write_bytes(b"PK")
    with pytest.raises(InvalidParameter, match="is no saved engine"):
        engine().load(path)


@pytest.mark.parametrize(("count", "machines", "step_s"), [(3000, 5, 0.0), (3000, 3, 300.0), (20_000, 225, 0.0)])
def test_the_plain_loop_finds_the_same(count: int, machines: int, step_s: float) -> None:
    """Also where many things happen at one instant, and where the queue is long."""

    def jobs() -> Iterator[JobBatch]:
        for batch in simulator_run.jobs(count, machines, 7):
            if step_s:
                submit_s, runtime_s = (
                    np.floor(batch.submit_s / step_s) * step_s,
                    np.ceil(batch.runtime_s / step_s) * step_s,
                )
                yield simulator_run.job_batch(submit_s, runtime_s, batch.cpu_cores)
            else:
                yield batch

    plain = simulator_plain.run(jobs(), machines, 64)
    ours = Engine(jobs(), Machines(machines, 64)).run()
    assert (ours.jobs_done, ours.events, ours.most_waiting) == (plain.jobs, plain.events, plain.most_waiting)
    assert ours.jobs_done == count
    assert ours.measures["wait_mean_s"] * count == pytest.approx(plain.wait_s, rel=1e-12)
    assert ours.measures["completion_mean_s"] * count == pytest.approx(plain.completion_s, rel=1e-12)
    assert ours.useful_core_s == pytest.approx(plain.core_s, rel=1e-12)
    assert ours.ended_s == plain.ended_s
    if machines < 100:
        assert plain.wait_s > 0


def test_percentiles_are_within_one_percent_of_the_exact_ones() -> None:
    rows: list[NDArray[np.float64]] = []
    engine = Engine(simulator_run.jobs(20_000, 180, 3), Machines(180, 64), done=rows.append)
    measures = engine.run().measures
    table = np.concatenate(rows)
    assert len(table) == 20_000
    assert sorted(table[:, 0].astype(int).tolist()) == list(range(20_000))
    completion = np.sort(table[:, 4] - table[:, 2])
    wait = np.sort(table[:, 3] - table[:, 2])
    for percent in (50, 90, 95, 99):
        rank = -(-len(table) * percent // 100) - 1
        assert measures[f"completion_p{percent}_s"] == pytest.approx(completion[rank], rel=0.01)
        assert measures[f"wait_p{percent}_s"] == pytest.approx(wait[rank], rel=0.01, abs=1e-3)
    assert measures["completion_mean_s"] == pytest.approx(completion.mean(), rel=1e-12)
    assert measures["completion_max_s"] == completion[-1]


def test_a_growing_table_keeps_what_is_in_it() -> None:
    """More alive than the arrays hold at first, in the middle of everything."""
    jobs = [
        scenes.job(0, 1, *(5.0,) * 700),
        scenes.job(1, 2, *(3.0,) * 3000),
        *(scenes.job(2, 1, 1.0) for _ in range(1500)),
    ]
    told = scenes.run(jobs, Machines(3, 4), compile=True, batch=50)
    assert told.results.tasks_done == 5200
    assert len(told.engine.state.tasks) >= told.results.most_alive > state.empty_state().tasks.shape[0]
    assert len(told.engine.state.jobs) >= 1500
