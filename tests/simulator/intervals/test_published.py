"""First fit beside variableResources' rules, start by start: looks at each end, killed jobs by their submission."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.intervals.policy import Options, policy
from tests.simulator.intervals.variable_resources import Referee
from tests.simulator.jobs.scenes import Told, job, run

Jobs = list[tuple[float, float, int]]
Moves = list[tuple[float, int]]
CORES = 8


def scene(seed: int) -> tuple[Jobs, Moves]:
    """More work than room, on a grid of time: many end, come and go at the same instants."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.integers(0, 60, 150)) * 300.0
    lengths = np.minimum(rng.geometric(0.1, 150), 40) * 300.0
    jobs = list(zip(at.tolist(), lengths.tolist(), rng.choice([1, 2, 4, 8], 150).tolist(), strict=True))
    moves = [(1200.0 * (i + 1), int(rng.integers(2, 6))) for i in range(80)]
    return jobs, [*moves, (98_400.0, 5)]


def ours(jobs: Jobs, moves: Moves, by: str, **settings: Any) -> Told:
    changes, on = [(0.0, f"m{i}", float(CORES) if i < 4 else 0.0) for i in range(5)], 4
    for at_s, count in moves:
        changes += [(at_s, f"m{i}", float(CORES)) for i in range(on, count)]
        changes += [(at_s, f"m{i}", 0.0) for i in range(on - 1, count - 1, -1)]
        on = count
    options = Options("first-fit", 2, 1200.0, np.inf, np.inf, 0.5, np.zeros((1, 40)), learns=False)
    how: Any = {"policy": "first-fit"} if by == "jobs" else {"policy": policy(options), "by_length": True}
    return run([job(at_s, cores, length_s) for at_s, length_s, cores in jobs], None, changes, **how, **settings)


@pytest.mark.parametrize("by", ["jobs", "intervals"])
@pytest.mark.parametrize("seed", range(2))
def test_every_start_is_where_and_when_the_published_rules_have_it(seed: int, by: str) -> None:
    jobs, moves = scene(seed)
    referee = Referee(jobs, 4, moves, CORES, 0.0, 1e9, strict=False, ends_by_machine=False)
    referee.run()
    told = ours(jobs, moves, by, looks="ends", requeue="submission")
    found = sorted((int(row[0]), int(row[2]), row[3]) for row in told.rows)
    assert referee.kills > 20
    assert told.results.kills == referee.kills
    assert found == sorted(referee.starts)


def test_one_look_an_instant_starts_others() -> None:
    """Who is small takes each room as it comes where the queue is looked at after every end."""
    jobs, moves = scene(0)
    both = [ours(jobs, moves, "jobs", looks=looks, requeue="submission").rows for looks in ("ends", "instants")]
    assert both[0] != both[1]


def test_a_killed_job_waits_where_its_submission_puts_it() -> None:
    """0 and 1 run, 2 waits; both are killed, and begin again before it."""
    queue = [job(0, 4, 3000), job(0, 4, 3000), job(20, 4, 3000)]
    changes = [(0.0, "a", 8.0), (600.0, "a", 0.0), (1200.0, "a", 4.0)]
    told = run(queue, None, changes, requeue="submission")
    assert [int(row[0]) for row in told.rows if row[5]] == [0, 1, 2]
    told = run(queue, None, changes, requeue="tail")
    assert [int(row[0]) for row in told.rows if row[5]] == [2, 0, 1]
