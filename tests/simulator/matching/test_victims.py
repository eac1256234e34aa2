"""Tasks that lose a machine that shrinks: the simulator by the live order and the manager choose the same."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.matcher.match import tasks
from ebbtide.matcher.match.attempts import EngineMachine
from ebbtide.matcher.match.tasks import Task, TaskOrder, TaskPhase, preempted
from ebbtide.matcher.policies.victims import LEAST_LOST, NEWEST, OLDEST, choose_victims
from ebbtide.simulator.jobs import running
from ebbtide.simulator.matching.running import LIVE_ORDER
from tests.simulator.jobs.scenes import job, run


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
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.floats(0, 1),
    st.sampled_from([0, 1]),
)
@settings(max_examples=40, deadline=None)
def test_live_and_simulated_tasks_go_in_the_same_order(cores: list[int], share: float, apart_s: int) -> None:
    """Also those that began at the same moment: with 0 s apart, all of them."""
    left = int(share * sum(cores))
    queue = [job(n * apart_s, each, 1000) for n, each in enumerate(cores)]
    moves = [(0, "a", sum(cores)), (500, "a", left), (600, "a", sum(cores))]
    told = run(queue, None, moves, kills=LIVE_ORDER.kills, requeue=LIVE_ORDER.requeue, memory=False)
    assert {int(row[0]) for row in told.rows if not row[5]} == killed_live(cores, left, apart_s)


def test_who_is_killed_waits_where_its_submission_puts_it_as_with_a_manager() -> None:
    """The second task came before the third, and waits for two cores; the third is killed at 50 s."""
    queue = [job(0, 1, 100), job(1, 2, 10), job(2, 1, 100)]
    moves = [(0, "a", 2), (50, "a", 1), (100, "a", 2)]
    told = run(queue, None, moves, kills=LIVE_ORDER.kills, requeue=LIVE_ORDER.requeue, memory=False)
    assert told.spans == {0: (0, 100), 1: (100, 110), 2: (110, 210)}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), st.booleans()), max_size=8),
    st.integers(-3, 20),
    st.integers(-3, 20),
    st.sampled_from([OLDEST, NEWEST]),
)
def test_the_rule_takes_no_more_than_it_must(
    rows: list[tuple[int, int, bool]], over_cores: int, over_mib: int, order: int
) -> None:
    cores, memory_mib = [row[0] for row in rows], [row[1] for row in rows]
    goes = [int(row[2]) for row in rows]
    count = choose_victims(cores, memory_mib, [0.0] * len(rows), goes, len(rows), over_cores, over_mib, order)
    victims = [n for n, gone in enumerate(goes) if gone]
    assert len(victims) == count
    # Those that cannot be begun again stay; the others go from one end on.
    can = [n for n, row in enumerate(rows) if row[2]]
    assert victims == (can[len(can) - count :] if order == NEWEST else can[:count])

    def short(gone: list[int]) -> bool:
        return sum(cores[n] for n in gone) < over_cores or sum(memory_mib[n] for n in gone) < over_mib

    assert not short(victims) or victims == can
    assert not victims or short(victims[1:] if order == NEWEST else victims[:-1])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), st.integers(0, 9), st.booleans()), max_size=8),
    st.integers(-3, 20),
    st.integers(-3, 20),
)
def test_the_least_work_is_lost_first_and_no_victim_is_needless(
    rows: list[tuple[int, int, int, bool]], over_cores: int, over_mib: int
) -> None:
    cores, memory_mib, lost = ([row[n] for row in rows] for n in range(3))
    goes = [int(row[3]) for row in rows]
    count = choose_victims(cores, memory_mib, lost, goes, len(rows), over_cores, over_mib, LEAST_LOST)
    victims = {n for n, gone in enumerate(goes) if gone == 1}
    can = {n for n, row in enumerate(rows) if row[3]}
    assert victims <= can
    assert (len(victims), set(goes) <= {0, 1}) == (count, True)

    def short(gone: set[int]) -> bool:
        return sum(cores[n] for n in gone) < over_cores or sum(memory_mib[n] for n in gone) < over_mib

    assert not short(victims) or victims == can
    assert all(short(victims - {n}) for n in victims)
    # Whoever alone makes the room and loses less than a single victim would have gone instead.
    if len(victims) == 1:
        assert all(short({n}) for n in can if lost[n] < lost[next(iter(victims))])


def test_the_task_that_has_just_begun_goes_rather_than_one_of_many_cores_or_a_long_past() -> None:
    goes = [1, 1, 1, 1]
    assert choose_victims([2, 1, 4, 1], [0] * 4, [900.0, 300.0, 800.0, 20.0], goes, 4, 2, 0, LEAST_LOST) == 2
    assert goes == [0, 1, 0, 1]
    goes = [1, 1]
    # The first that goes is too small; the next makes all the room, and the first goes back.
    assert choose_victims([1, 4], [0] * 2, [10.0, 50.0], goes, 2, 3, 0, LEAST_LOST) == 1
    assert goes == [0, 1]


def test_the_job_engine_kills_by_the_order_that_is_said() -> None:
    queue = [job(0, 3, 1000), job(350, 1, 1000), job(400, 2, 1000)]
    moves = [(0, "a", 6), (500, "a", 5), (600, "a", 6)]
    gone = {}
    for kills in ("oldest", "newest", "least-lost"):
        told = run(queue, None, moves, kills=kills, requeue="head", memory=False)
        gone[kills] = [int(row[0]) for row in told.rows if not row[5]]
    assert gone == {"oldest": [0], "newest": [2], "least-lost": [1]}
