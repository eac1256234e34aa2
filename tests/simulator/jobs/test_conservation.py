"""Random scenes under every option, with a look at the whole state after every event; and it finds what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.simulator.errors import ConservationBroken
from ebbtide.simulator.jobs import columns as c
from ebbtide.simulator.jobs.columns import State
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.nodes import KINDS
from ebbtide.simulator.jobs.settings import DISCIPLINES, KILLS, REQUEUE, Settings
from ebbtide.simulator.jobs.validation import RULES, check
from tests.simulator.jobs import scenes

OPTIONS = st.fixed_dictionaries(
    {
        "discipline": st.sampled_from(sorted(DISCIPLINES)),
        "kills": st.sampled_from(sorted(KILLS)),
        "requeue": st.sampled_from(sorted(REQUEUE)),
        "estimates": st.sampled_from(["exact", "requested"]),
        "priorities": st.booleans(),
        "memory": st.booleans(),
        "depth": st.sampled_from([0, 0, 3]),
        "checkpoint_every_s": st.sampled_from([0.0, 0.0, 2.0]),
        "checkpoint_cost_s": st.sampled_from([0.0, 0.25]),
        "replicas": st.sampled_from([1, 1, 3]),
    }
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31), st.sampled_from(sorted(KINDS)), OPTIONS)
def test_no_task_is_lost_or_doubled_whatever_the_options(seed: int, policy: str, options: dict[str, Any]) -> None:
    jobs, moves = scenes.random_scene(seed, jobs=25, machines=3)
    told = scenes.run(jobs, None, moves, policy=policy, seed=seed, **options)
    completed = Counter((int(r[0]), int(r[1])) for r in told.rows if r[5])
    assert set(completed.values()) <= {1}
    wanted = {(i, n) for i, j in enumerate(jobs) for n in range(len(j.runtimes_s))}
    assert set(completed) == wanted
    assert (
        told.results.tasks
        == told.results.tasks_done + told.results.tasks_withdrawn
        == len(wanted) * options["replicas"]
    )
    assert told.results.jobs_left == 0
    # By the log alone: no machine runs more at a time than it has.
    sizes = {(at_s, name): cores for at_s, name, cores in moves}
    for at_s, _ in sizes:
        for name, number in told.engine.machine_numbers.items():
            there = next((cores for t, n, cores in reversed(moves) if n == name and t <= at_s), 0.0)
            used = sum(jobs[int(r[0])].cores for r in told.rows if int(r[2]) == number and r[3] <= at_s < r[4])
            assert used <= there
    results = told.results
    ran = sum(jobs[int(r[0])].cores * (r[4] - r[3]) for r in told.rows)
    assert results.useful_core_s + results.lost_core_s == pytest.approx(ran)
    if not options["checkpoint_every_s"]:
        lost = sum(jobs[int(r[0])].cores * (r[4] - r[3]) for r in told.rows if not r[5])
        assert results.lost_core_s == pytest.approx(lost)
    broken_off = sum(not r[5] for r in told.rows)
    assert results.kills <= broken_off <= results.kills + results.tasks_withdrawn


def _sane() -> State:
    jobs, moves = scenes.random_scene(0, jobs=60, machines=3)
    engine = Engine(scenes.batches(jobs), None, scenes.changes(moves), settings=Settings(validate=True), compile=False)
    engine.advance(30.0)
    s = engine.state
    assert s.counts[c.COUNT.running] > 2
    assert s.counts[c.COUNT.waiting] > 2
    assert check(s) == 0
    return s


def _used(s: State) -> None:
    s.machines[0, c.MACHINE.cores] = 0


def _forgotten(s: State) -> None:
    s.machines[int(s.machines[:, c.MACHINE.running].argmax()), c.MACHINE.used] -= 1


def _ends(s: State) -> None:
    s.ends_at[1] += 1


def _queue(s: State) -> None:
    s.tasks[s.queues[s.active[0], c.QUEUE.first], c.TASK.machine] = 0


def _lost(s: State) -> None:
    s.counts[c.COUNT.tasks_done] += 1


def _job(s: State) -> None:
    s.jobs[s.tasks[s.ends_task[1], c.TASK.job], c.JOB.left] += 1


def _cores(s: State) -> None:
    s.counts[c.COUNT.all_cores] += 1


def _work(s: State) -> None:
    s.sums[c.SUM.done] += 1.0


def _time(s: State) -> None:
    s.sums[c.SUM.lost] += 1.0


def _held(s: State) -> None:
    s.machines[0, c.MACHINE.held] = 1


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_used, 1),
        (_forgotten, 2),
        (_ends, 3),
        (_queue, 4),
        (_lost, 5),
        (_job, 6),
        (_cores, 7),
        (_work, 8),
        (_time, 9),
        (_held, 10),
    ],
)
def test_what_is_broken_on_purpose_is_found_by_its_rule(spoil: Callable[[State], None], rule: int) -> None:
    s = _sane()
    spoil(s)
    assert check(s) == rule


def test_a_run_ends_with_the_rule_that_is_broken() -> None:
    engine = Engine(scenes.batches([scenes.job(0, 1, 5), scenes.job(9, 1, 5)]), Machines(1, 2), compile=False)
    engine.advance(1.0)
    engine.state.counts[c.COUNT.all_cores] += 1
    with pytest.raises(ConservationBroken, match=f"at .* s: {RULES[7]}"):
        engine.run()
