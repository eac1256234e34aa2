"""Which tasks lose a machine that shrinks: the simulated schemes of the live order and the manager choose the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.matching.schemes import SCHEMES, engine_settings
from task_matcher.attempts import EngineMachine
from task_matcher.tasks import Task, TaskOrder, TaskPhase, preempted
from tests.simulator.jobs.scenes import job, run

LIVE_ORDER = [name for name, scheme in SCHEMES.items() if (scheme.kills, scheme.requeue) == ("newest", "head")]


def killed_live(cores: list[int], left: int) -> set[int]:
    """Of tasks that began at 0, 1, 2, ... s, by the manager's rule."""
    tasks = [
        Task(TaskOrder(str(n), ("true",), each, restartable=True), "k", 0.0, TaskPhase.RUNNING, machine="a", began_at=n)
        for n, each in enumerate(cores)
    ]
    return {int(task.name) for task in preempted(tasks, {"a": EngineMachine("a", sum(cores), left)})}


@given(st.sampled_from(LIVE_ORDER), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_live_and_simulated_tasks_go_in_the_same_order(scheme: str, cores: list[int], share: float) -> None:
    left = int(share * sum(cores))
    said = engine_settings(SCHEMES[scheme])
    queue = [job(n, each, 1000) for n, each in enumerate(cores)]
    moves = [(0, "a", sum(cores)), (500, "a", left), (600, "a", sum(cores))]
    told = run(queue, None, moves, kills=said.kills, requeue=said.requeue, memory=said.memory)
    assert {int(row[0]) for row in told.rows if not row[5]} == killed_live(cores, left)


def test_there_are_schemes_of_the_live_order() -> None:
    assert {"live", "landmark-live", "capacity-random-live"} <= set(LIVE_ORDER)
