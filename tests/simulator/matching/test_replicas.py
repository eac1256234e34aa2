"""Three replicas of each task: interpreted, with everything checked after every event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from ebbtide.simulator.compiling import compiled, plain, shared
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import CapacityBatch, JobBatch, Ragged, hints, same, texts, unknown
from ebbtide.simulator.jobs.columns import MACHINE, TASK, State
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.jobs.settings import Settings
from ebbtide.simulator.matching import replicas
from ebbtide.simulator.matching.running import run
from tests.simulator.matching.test_running import SMALL, made

shared(replicas.choose)


def jobs(*runtimes_s: float, cores: float = 1.0) -> JobBatch:
    """One job with these tasks, at 0 s."""
    return JobBatch(
        id=texts(["job"]),
        group=same("", 1),
        submit_s=np.zeros(1),
        cpu_cores=np.array([cores]),
        memory_mib=unknown(1),
        priority=hints(1),
        runtime_s=unknown(1),
        requested_s=unknown(1),
        task_runtime_s=Ragged.of(np.array(runtimes_s), np.array([len(runtimes_s)])),
    )


def changes(*rows: tuple[str, float, float]) -> CapacityBatch:
    names, at_s, cores = zip(*rows, strict=True)
    return CapacityBatch(texts(names), np.array(at_s), np.array(cores), np.full(len(rows), np.nan))


def told(batch: JobBatch, moves: CapacityBatch | None, machines: Machines | None = None, **given: Any) -> Any:
    """Results and attempts: columns as `ATTEMPT_COLUMNS`."""
    attempts: list[Any] = []
    engine = Engine(
        [batch],
        machines,
        [moves] if moves is not None else None,
        policy=replicas.policy(),
        settings=Settings(replicas=3, memory=False, validate=True, **given),
        attempts=attempts.append,
        compile=False,
    )
    return engine.run(), np.concatenate(attempts)


def test_the_first_to_end_wins_and_the_others_are_withdrawn() -> None:
    # a and b shrink while it runs; c keeps its core, and ends it at 10 s; the one on a began again at 4 s.
    moves = changes(
        ("a", 0.0, 1.0), ("b", 0.0, 1.0), ("c", 0.0, 1.0), ("a", 3.0, 0.0), ("a", 4.0, 1.0), ("b", 6.0, 0.0)
    )
    results, attempts = told(jobs(10.0), moves)
    assert (results.tasks, results.tasks_done, results.tasks_withdrawn, results.kills) == (3, 1, 2, 2)
    assert results.ended_s == 10.0
    assert sorted((row[3], row[4], row[5]) for row in attempts) == [
        (0.0, 3.0, 0.0), (0.0, 6.0, 0.0), (0.0, 10.0, 1.0), (4.0, 10.0, 0.0),
    ]  # fmt: skip
    assert (results.useful_core_s, results.lost_core_s) == (10.0, 15.0)


def test_no_two_replicas_of_a_task_share_a_machine() -> None:
    results, attempts = told(jobs(10.0, 10.0), None, Machines(2, 8))
    assert (results.tasks_done, results.tasks_withdrawn) == (2, 4)
    # The third has no machine of its own and waits until it is not needed.
    assert len(attempts) == 4
    for number in (0, 1):
        assert {row[2] for row in attempts if row[1] == number} == {0, 1}


def test_replicas_that_wait_take_nothing() -> None:
    results, attempts = told(jobs(10.0, 20.0), None, Machines(1, 1))
    assert (results.ended_s, results.lost_core_s, len(attempts)) == (30.0, 0.0, 2)


@pytest.mark.parametrize("seed", range(4))
def test_replicas_on_a_restless_pool_break_no_rule(seed: int) -> None:
    found = run(made(seed=seed), SMALL, "replicas-3", seed, validate=True, compile=False)
    plain = run(made(seed=seed), SMALL, "capacity-random", seed, validate=True, compile=False)
    assert found.results.jobs_done == SMALL.jobs
    assert found.results.tasks == 3 * plain.results.tasks
    assert found.results.tasks_done == plain.results.tasks
    assert found.results.used_core_s > plain.results.used_core_s


class Heard(NamedTuple):
    """What a policy is told: attempts that began, completed, were killed, were withdrawn."""

    chance: replicas.Chance
    counts: NDArray[np.int64]


def _choose(s: State, p: Heard, task: int, now_s: float) -> int:
    return replicas.choose(s, p.chance, task, now_s)


def _started(s: State, p: Heard, task: int, machine: int, now_s: float) -> None:
    p.counts[0] += 1


def _ended(s: State, p: Heard, task: int, machine: int, now_s: float, completed: bool) -> None:
    p.counts[1 if completed else 2] += 1


def _withdrawn(s: State, p: Heard, task: int, machine: int, now_s: float) -> None:
    p.counts[3] += 1


def _heard(s: State, p: Any, most_cores: int, seed: int) -> Heard:
    return Heard(replicas.policy().resized(s, None, most_cores, seed), np.zeros(4, np.int64))


def test_a_policy_hears_of_the_end_of_every_attempt_that_began() -> None:
    kernels: dict[str, Callable[..., Any]] = {
        "choose": _choose,
        "started": _started,
        "ended": _ended,
        "withdrawn": _withdrawn,
    }
    policy = Policy("heard", kernels, Heard, _heard, by_demand=False)
    moves = changes(
        ("a", 0.0, 1.0), ("b", 0.0, 1.0), ("c", 0.0, 1.0), ("a", 3.0, 0.0), ("a", 4.0, 1.0), ("b", 6.0, 0.0)
    )
    settings = Settings(replicas=3, memory=False, validate=True)
    engine = Engine([jobs(10.0)], None, [moves], policy=policy, settings=settings, compile=False)
    results = engine.run()
    # Two are killed; of the other two replicas one runs and one waits when the third is done.
    assert engine.policy_state.counts.tolist() == [4, 1, 2, 1]
    assert results.tasks_withdrawn == 2


@compiled
def _chosen(s: Any, p: Any, task: int) -> int:
    return int(replicas.choose(s, p, task, 0.0))


def test_compiled_and_interpreted_choose_the_same() -> None:
    batch = jobs(*[50.0] * 12, cores=2.0)
    policy = replicas.policy()
    settings = Settings(replicas=3, memory=False, validate=True)
    engine = Engine([batch], Machines(9, 5), policy=policy, settings=settings, seed=5, compile=False)
    engine.advance(1.0)
    waiting = np.flatnonzero(engine.state.tasks[:, TASK.machine] == -1)
    assert len(waiting) == 18
    # Where nothing is used, every choice is open but for the twins' machines.
    engine.state.machines[:, MACHINE.used] = 0
    one, other = policy.resized(engine.state, None, 5, 7), policy.resized(engine.state, None, 5, 7)
    ours = [_chosen(engine.state, one, int(task)) for task in np.tile(waiting, 5)]
    assert ours == [plain(_chosen)(engine.state, other, int(task)) for task in np.tile(waiting, 5)]
    assert set(ours) == set(range(9))


def test_a_number_of_replicas_that_cannot_be_is_named() -> None:
    for number in (0, 17):
        with pytest.raises(InvalidParameter, match="replicas"):
            Settings(replicas=number)
