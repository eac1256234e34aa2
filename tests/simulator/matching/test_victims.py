"""Tasks that lose a machine that shrinks: the simulated schemes of the live order and the manager choose the same."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.matcher.match import tasks
from ebbtide.matcher.match.attempts import EngineMachine
from ebbtide.matcher.match.tasks import Task, TaskOrder, TaskPhase, preempted
from ebbtide.matcher.policies.victims import choose_victims
from ebbtide.simulator.jobs import running
from ebbtide.simulator.matching.schemes import SCHEMES, engine_settings
from tests.simulator.jobs.scenes import job, run

LIVE_ORDER = [name for name, scheme in SCHEMES.items() if (scheme.kills, scheme.requeue) == ("newest", "head")]


def killed_live(cores: list[int], left: int, apart_s: int) -> set[int]:
    """Of tasks that began so many seconds apart, by the manager's rule."""
    running = Task(TaskOrder("", ("true",), restartable=True), "k", 0.0, TaskPhase.RUNNING, machine="a")
    those = [
        replace(running, order=replace(running.order, name=str(n), cores=each), began_at=1.0 + n * apart_s)
        for n, each in enumerate(cores)
    ]
    return {int(task.name) for task in preempted(those, {"a": EngineMachine("a", sum(cores), left)})}


def test_manager_and_job_engine_call_one_rule() -> None:
    assert tasks.__dict__["choose_victims"] is choose_victims
    assert running.__dict__["choose_victims"] is choose_victims


@given(
    st.sampled_from(LIVE_ORDER),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.floats(0, 1),
    st.sampled_from([0, 1]),
)
@settings(max_examples=40, deadline=None)
def test_live_and_simulated_tasks_go_in_the_same_order(
    scheme: str, cores: list[int], share: float, apart_s: int
) -> None:
    """Also those that began at the same moment: with 0 s apart, all of them."""
    left = int(share * sum(cores))
    said = engine_settings(SCHEMES[scheme])
    queue = [job(n * apart_s, each, 1000) for n, each in enumerate(cores)]
    moves = [(0, "a", sum(cores)), (500, "a", left), (600, "a", sum(cores))]
    told = run(queue, None, moves, kills=said.kills, requeue=said.requeue, memory=said.memory)
    assert {int(row[0]) for row in told.rows if not row[5]} == killed_live(cores, left, apart_s)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), st.booleans()), max_size=8),
    st.integers(-3, 20),
    st.integers(-3, 20),
    st.booleans(),
)
def test_the_rule_takes_no_more_than_it_must(
    rows: list[tuple[int, int, bool]], over_cores: int, over_mib: int, newest: bool
) -> None:
    cores, memory_mib = [row[0] for row in rows], [row[1] for row in rows]
    goes = [int(row[2]) for row in rows]
    count = choose_victims(cores, memory_mib, goes, len(rows), over_cores, over_mib, newest)
    victims = [n for n, gone in enumerate(goes) if gone]
    assert len(victims) == count
    # Those that cannot be begun again stay; the others go from one end on.
    can = [n for n, row in enumerate(rows) if row[2]]
    assert victims == (can[len(can) - count :] if newest else can[:count])

    def short(gone: list[int]) -> bool:
        return sum(cores[n] for n in gone) < over_cores or sum(memory_mib[n] for n in gone) < over_mib

    assert not short(victims) or victims == can
    assert not victims or short(victims[1:] if newest else victims[:-1])


def test_there_are_schemes_of_the_live_order() -> None:
    assert {"live", "landmark-live", "capacity-random-live"} <= set(LIVE_ORDER)
