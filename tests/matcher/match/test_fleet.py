"""When machines have room: a of Eq. 2."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.match.fleet import Fleet, Running
from ebbtide.matcher.predict.expected_time import remaining_s
from ebbtide.matcher.predict.predictor import Predictor
from ebbtide.simulator.nodes.backfilling import reservation


def fleet_of(**machines: float) -> Fleet:
    fleet = Fleet(Predictor(0.0), most_cores=32, memory_step_mib=1024.0)
    for name, cores in machines.items():
        fleet.put(name, cores)
    return fleet


def wait(fleet: Fleet, machine: str, cores: float, memory_mib: float = 0.0, now: float = 0.0) -> float:
    return float(fleet.waits_s(cores, memory_mib, now)[fleet.predictor.rows[machine]])


def test_room_comes_as_running_tasks_end() -> None:
    fleet = fleet_of(a=8.0)
    fleet.start("a", Running("t1", 4.0, 0.0, 0.0, 100.0))
    fleet.start("a", Running("t2", 3.0, 0.0, 0.0, 300.0))
    assert [wait(fleet, "a", cores) for cores in (1.0, 2.0, 5.0, 6.0, 8.0)] == [0.0, 100.0, 100.0, 300.0, 300.0]
    assert wait(fleet, "a", 5.0, now=40.0) == 60.0
    fleet.end("t1")
    assert [wait(fleet, "a", cores) for cores in (5.0, 6.0)] == [0.0, 300.0]
    fleet.end("unknown")


def test_what_is_too_large_never_has_room() -> None:
    fleet = fleet_of(a=8.0, b=4.0)
    assert math.isinf(wait(fleet, "b", 5.0))
    assert math.isinf(wait(fleet, "a", 8.5))
    assert math.isinf(wait(fleet, "a", 1e6))


def test_both_cores_and_memory_must_be_free() -> None:
    fleet = fleet_of()
    fleet.put("a", 8.0, 8192.0)
    fleet.start("a", Running("cores", 7.0, 1024.0, 0.0, 100.0))
    fleet.start("a", Running("memory", 1.0, 6144.0, 0.0, 300.0))
    assert wait(fleet, "a", 0.0, 1024.0) == 0.0
    assert wait(fleet, "a", 2.0, 1024.0) == 100.0
    assert wait(fleet, "a", 2.0, 4096.0) == 300.0
    assert math.isinf(wait(fleet, "a", 1.0, 9000.0))


def test_a_task_that_overruns_its_estimate_is_not_taken_for_ended() -> None:
    fleet = fleet_of(a=4.0)
    fleet.start("a", Running("t1", 4.0, 0.0, 0.0, 100.0))
    assert wait(fleet, "a", 1.0, now=400.0) == pytest.approx(100.0)
    assert wait(fleet, "a", 1.0, now=4000.0) == pytest.approx(1000.0)


def test_an_estimate_of_nothing_leaves_no_room_that_is_not_there() -> None:
    fleet = fleet_of(a=4.0)
    fleet.start("a", Running("t1", 4.0, 0.0, 50.0, 50.0))
    assert wait(fleet, "a", 1.0, now=50.0) > 0.0


def test_promised_room_is_taken_until_it_is_forgotten() -> None:
    fleet = fleet_of(a=8.0)
    fleet.promise(fleet.predictor.rows["a"], Running("t1", 6.0, 0.0, 0.0, 500.0))
    assert [wait(fleet, "a", cores) for cores in (2.0, 3.0)] == [0.0, 500.0]
    fleet.forget_promises()
    assert wait(fleet, "a", 8.0) == 0.0


def test_a_machine_that_shrank_under_its_tasks_has_room_when_enough_have_ended() -> None:
    fleet = fleet_of(a=8.0)
    fleet.start("a", Running("t1", 4.0, 0.0, 0.0, 100.0))
    fleet.start("a", Running("t2", 4.0, 0.0, 0.0, 200.0))
    fleet.put("a", 5.0)
    assert [wait(fleet, "a", cores) for cores in (1.0, 2.0, 5.0)] == [100.0, 200.0, 200.0]
    assert fleet.free_cores()[fleet.predictor.rows["a"]] == -3.0


def test_a_machine_that_is_gone_takes_nothing_and_names_what_ran_there() -> None:
    fleet = fleet_of(a=8.0, b=2.0)
    fleet.start("a", Running("t1", 4.0, 0.0, 0.0, 100.0))
    assert fleet.remove("a") == ["t1"]
    assert fleet.remove("a") == []
    assert math.isinf(wait(fleet, "a", 1.0))
    # The task can run elsewhere now.
    fleet.start("b", Running("t1", 1.0, 0.0, 0.0, 100.0))


def test_what_is_not_known_or_runs_twice_is_refused() -> None:
    fleet = fleet_of(a=8.0)
    with pytest.raises(InvalidField, match="machine"):
        fleet.start("b", Running("t1", 1.0, 0.0, 0.0, 1.0))
    fleet.start("a", Running("t1", 1.0, 0.0, 0.0, 1.0))
    with pytest.raises(InvalidField, match="task"):
        fleet.start("a", Running("t1", 1.0, 0.0, 0.0, 1.0))
    with pytest.raises(InvalidField, match="cores"):
        fleet.put("a", -1.0)
    assert [task.task for task in fleet.tasks("a")] == ["t1"]


tasks = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.floats(1, 1000)), max_size=8)


@given(running=tasks, cores=st.integers(1, 12), gibs=st.integers(0, 8))
def test_the_table_is_what_going_through_the_ends_gives(
    running: list[tuple[int, int, float]], cores: int, gibs: int
) -> None:
    fleet = fleet_of()
    fleet.put("a", 12.0, 8 * 1024.0)
    for number, (held, gib, ends_at) in enumerate(running):
        fleet.start("a", Running(f"t{number}", float(held), 1024.0 * gib, 0.0, ends_at))
    expected = math.inf
    for at in (0.0, *sorted(ends_at for _, _, ends_at in running)):
        left = [row for row in running if row[2] > at]
        if 12 - sum(row[0] for row in left) >= cores and 8 - sum(row[1] for row in left) >= gibs:
            expected = at
            break
    assert wait(fleet, "a", float(cores), 1024.0 * gibs) == expected


#: Cores, GiB, began at, estimate; times are whole seconds, so that sums of them are exact.
held = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(0, 500), st.integers(0, 900)), max_size=6)


@given(
    running=held,
    promised=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(501, 2000)), max_size=4),
    cores=st.integers(1, 12),
    gibs=st.integers(0, 8),
)
def test_room_is_expected_when_the_simulator_expects_it_with_what_is_promised(
    running: list[tuple[int, int, int, int]], promised: list[tuple[int, int, int]], cores: int, gibs: int
) -> None:
    now = 500.0
    fleet = fleet_of()
    fleet.put("a", 12.0, 8 * 1024.0)
    ends = []
    for number, (size, gib, began_at, estimate_s) in enumerate(running):
        task = Running(f"t{number}", float(size), 1024.0 * gib, float(began_at), float(began_at + estimate_s))
        fleet.start("a", task)
        ends.append((now + remaining_s(task.ends_at, task.started_at, now), size, gib))
    for number, (size, gib, ends_at) in enumerate(promised):
        fleet.promise(fleet.predictor.rows["a"], Running(f"p{number}", float(size), 1024.0 * gib, now, float(ends_at)))
        ends.append((float(ends_at), size, gib))
    free, free_gibs = 12 - sum(size for _, size, _ in ends), 8 - sum(gib for _, _, gib in ends)
    if free >= cores and free_gibs >= gibs:
        expected = 0.0
    else:
        times = np.array([at for at, _, _ in ends])
        sizes = np.array([[size, gib] for _, size, gib in ends], np.int64).reshape(-1, 2).T.copy()
        at, _, _ = reservation(times, sizes[0], sizes[1], len(ends), free, free_gibs, cores, gibs)
        expected = max(at - now, 0.0)
    assert wait(fleet, "a", float(cores), 1024.0 * gibs, now) == expected


def test_tasks_that_overrun_are_expected_to_end_each_after_a_share_of_its_own_age() -> None:
    fleet = fleet_of(a=4.0)
    fleet.start("a", Running("old", 2.0, 0.0, 0.0, 100.0))
    fleet.start("a", Running("young", 2.0, 0.0, 800.0, 900.0))
    fleet.start("a", Running("other", 0.0, 0.0, 0.0, 5000.0))
    assert [wait(fleet, "a", cores, now=1000.0) for cores in (1.0, 3.0)] == [50.0, 250.0]
    # And later, and earlier again.
    assert [wait(fleet, "a", cores, now=1200.0) for cores in (1.0, 3.0)] == [100.0, 300.0]
    assert [wait(fleet, "a", cores, now=850.0) for cores in (1.0, 3.0)] == [50.0, 212.5]


def test_what_runs_is_released_as_it_is_expected_to_end_also_late_and_whatever_else_has_ended() -> None:
    fleet = fleet_of(a=16.0, b=8.0)
    rows = np.array([fleet.predictor.rows["a"], fleet.predictor.rows["b"]])
    for number in range(40):
        fleet.start("a" if number % 3 else "b", Running(f"gone {number}", 1.0, 0.0, 0.0, 50.0))
    fleet.start("a", Running("soon", 4.0, 0.0, 0.0, 100.0))
    fleet.start("a", Running("later", 2.0, 0.0, 0.0, 900.0))
    # A fourth of its age longer than it was said to.
    fleet.start("b", Running("late", 1.0, 0.0, 0.0, 40.0))
    for number in range(40):
        fleet.end(f"gone {number}")
    fleet.advance(80.0)
    for within_s, released in ((19.0, [0.0, 0.0]), (20.0, [4.0, 1.0]), (820.0, [6.0, 1.0])):
        assert fleet.released(rows, within_s)[0].tolist() == released
        assert [fleet.released_of(row, within_s)[0] for row in rows.tolist()] == released
    assert fleet.released(rows[:1], 820.0)[0].tolist() == [6.0]
    fleet.remove("a")
    assert fleet.released(rows, np.inf)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        pytest.param(
            (0.0, 900.0), {800.0: 4.0, 900.0: 0.0}, id="one that is expected to take as long again, once late"
        ),
        pytest.param((0.0, 150.0), {50.0: 4.0, 400.0: 0.0}, id="one that overruns, until a fourth of its age is more"),
        pytest.param((850.0, 900.0), {1250.0: 0.0}, id="one that leaves within the time from its begin on"),
        pytest.param((0.0, math.inf), {}, id="one that never ends"),
    ],
)
def test_what_is_released_stays_so_until_it_says(task: tuple[float, float], changes: dict[float, float]) -> None:
    """Within 100 s, asked when it begins and a little after each moment that was said."""
    fleet = fleet_of(a=16.0)
    rows = np.array([fleet.predictor.rows["a"]])
    fleet.start("a", Running("t", 4.0, 0.0, *task))
    seen: list[tuple[float, float]] = []
    until = task[0]
    while until < math.inf:
        now = until + 0.002
        fleet.advance(now)
        released, until = (float(found.item()) for found in fleet.released(rows, 100.0))
        assert fleet.released_of(rows.item(0), 100.0) == (released, until)
        for at in np.linspace(now, min(until, now + 5000.0), 7):
            fleet.advance(at)
            assert fleet.released(rows, 100.0)[0].tolist() == [released]
        seen.append((round(now), released))
    assert dict(seen[1:]) == changes


def test_what_is_promised_is_not_in_use() -> None:
    fleet = fleet_of(a=8.0)
    fleet.start("a", Running("t1", 3.0, 0.0, 0.0, 100.0))
    fleet.promise(fleet.predictor.rows["a"], Running("t2", 4.0, 0.0, 0.0, 500.0))
    assert fleet.free_cores()[fleet.predictor.rows["a"]] == 5.0
    assert [wait(fleet, "a", cores) for cores in (1.0, 2.0)] == [0.0, 100.0]
