"""Which task goes where now, and which waits for what, on examples worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_matcher.choice import UNKNOWN_DURATION_S, Busy, Room, Waiting, available_in_s, choose, remaining_s
from task_matcher.expectation import Expectation, HistoryPredictor
from task_matcher.prediction import Direction, History, LastChange


class Steady:
    """Keeps all cores, but for machines that lose them after so many seconds for sure."""

    def __init__(self, **loses_after_s: float) -> None:
        self._loses_after_s = loses_after_s

    def expect(self, machine: str, wait_s: float, duration_s: float) -> Expectation:
        left_s = self._loses_after_s.get(machine, math.inf)
        if wait_s + duration_s <= left_s:
            return Expectation(wait_s + duration_s, 1.0)
        return Expectation(max(wait_s, left_s) + duration_s, 0.0)


def test_a_task_waits_for_a_machine_where_it_is_done_sooner_and_says_so() -> None:
    rooms = [Room("restless", 4), Room("steady", 4, (Busy(4, 30.0),))]
    choice = choose([Waiting("long", 2, 100.0)], rooms, Steady(restless=60.0))["long"]
    assert (choice.machine, choice.waits_for) == (None, "steady")
    assert [(offer.machine, offer.wait_s) for offer in choice.offers] == [("steady", 30.0), ("restless", 0.0)]
    assert choice.sentence == (
        "it waits for steady, free in 30 s: expected to be done in 130 s (it keeps its cores with 100%); "
        "restless has room now, but there it is expected to be done in 160 s (it keeps its cores with 0%)"
    )
    short = choose([Waiting("short", 2, 50.0)], rooms, Steady(restless=60.0))["short"]
    assert (short.machine, short.waits_for) == ("restless", None)


def test_promised_room_is_taken_so_that_tasks_do_not_herd() -> None:
    rooms = [Room("restless", 4), Room("steady", 4, (Busy(4, 30.0),))]
    choices = choose([Waiting(f"t{n}", 4, 100.0) for n in range(3)], rooms, Steady(restless=60.0))
    assert choices["t0"].waits_for == "steady"
    assert choices["t1"].machine == "restless"
    # 30 s and the promised 100 s are more than what restless costs.
    assert choices["t2"].waits_for == "restless" or choices["t2"].offers[0].wait_s > 30.0


def test_equal_machines_are_filled_evenly() -> None:
    choices = choose([Waiting(f"t{n}", 1, 10.0) for n in range(4)], [Room("a", 2), Room("b", 2)], Steady())
    assert [choices[f"t{n}"].machine for n in range(4)] == ["a", "b", "a", "b"]


def test_a_task_that_fits_nowhere_says_how_large_the_largest_is() -> None:
    choices = choose([Waiting("big", 8, 10.0), Waiting("small", 1)], [Room("a", 4)], Steady())
    assert choices["big"].sentence == "no machine has 8 usable cores; the largest has 4"
    assert choices["small"].machine == "a"
    assert "all are down, or drained" in choose([Waiting("t", 1)], [], Steady())["t"].sentence
    held = choose([Waiting("t", 2)], [Room("a", 2, (Busy(1),))], Steady())["t"]
    assert held.sentence == "nobody knows when 2 cores become free"


def test_when_a_machine_has_room_follows_from_what_its_tasks_still_need() -> None:
    room = Room("a", 4, (Busy(2, 50.0), Busy(1, 10.0)))
    assert [available_in_s(room, cores) for cores in (1, 2, 3, 4)] == [0.0, 10.0, 50.0, 50.0]
    shrunk = Room("a", 2, (Busy(2, 50.0), Busy(1, 10.0)))
    assert [available_in_s(shrunk, cores) for cores in (1, 2)] == [50.0, 50.0]
    assert available_in_s(shrunk, 3) == math.inf


def test_wrong_estimates_have_a_stated_meaning() -> None:
    assert remaining_s(100.0, 40.0) == 60.0
    assert remaining_s(100.0, 200.0) == 20.0
    assert remaining_s(0.0, 0.0) == 0.0
    assert remaining_s(None, 0.0) == UNKNOWN_DURATION_S
    assert remaining_s(-5.0, 0.0) == 0.0
    rooms = [Room("a", 1)]
    for duration_s in (None, 0.0, -3.0):
        assert choose([Waiting("t", 1, duration_s)], rooms, Steady())["t"].machine == "a"


@given(
    tasks=st.lists(st.tuples(st.integers(1, 5), st.one_of(st.none(), st.floats(0, 1e6))), max_size=12),
    machines=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 3), st.floats(0, 1e6)))), max_size=5
    ),
)
def test_nothing_is_put_where_it_has_no_room(
    tasks: list[tuple[int, float | None]], machines: list[tuple[int, list[tuple[int, float]]]]
) -> None:
    rooms = [
        Room(f"m{number}", cores, tuple(Busy(held, left_s) for held, left_s in busy))
        for number, (cores, busy) in enumerate(machines)
    ]
    free = {room.name: room.free_cores for room in rooms}
    waiting = [Waiting(f"t{number}", cores, duration_s) for number, (cores, duration_s) in enumerate(tasks)]
    choices = choose(waiting, rooms, Steady())
    assert set(choices) == {task.name for task in waiting}
    for task in waiting:
        choice = choices[task.name]
        assert choice.machine is None or choice.waits_for is None
        assert choice.sentence
        if choice.machine is not None:
            free[choice.machine] -= task.cores
            assert free[choice.machine] >= 0


# --- expectations ----------------------------------------------------------------------------------------------------


def history(**last: tuple[float, Direction]) -> History:
    """Intervals of 10, 20, 30 and 40 s; after a growth comes a shrink always, after a shrink every other time."""
    pairs = {
        (Direction.GROWTH, Direction.SHRINK): 4,
        (Direction.SHRINK, Direction.SHRINK): 1,
        (Direction.SHRINK, Direction.GROWTH): 1,
    }
    changes = {name: LastChange(at, direction, 4, False) for name, (at, direction) in last.items()}
    return History(np.asarray([10.0, 20.0, 30.0, 40.0]), pairs, changes)


def test_the_expectation_is_that_of_equation_2() -> None:
    made = HistoryPredictor(history(grown=(85.0, Direction.GROWTH)), frozenset({"grown"}), 100.0)
    # e = 15, d = 10: of 20, 30, 40 one ends within, so p = 2/3; w = 20 - 15. Fresh: p = 3/4, w = 10: 10 + 10/3.
    found = made.expect("grown", 0.0, 10.0)
    assert found.completion_probability == pytest.approx(2 / 3)
    assert found.seconds == pytest.approx(2 / 3 * 10 + 1 / 3 * (5 + 10 + 10 / 3))
    # A wait of 10 s: e' = 25, so 30 ends within; w = 5.
    found = made.expect("grown", 10.0, 10.0)
    assert found.completion_probability == pytest.approx(1 / 2)
    assert found.seconds == pytest.approx(10 + 1 / 2 * 10 + 1 / 2 * (5 + 10 + 10 / 3))


def test_a_machine_of_which_nothing_is_known_promises_nothing_and_repels_nobody() -> None:
    made = HistoryPredictor(history(outlived=(0.0, Direction.GROWTH)), frozenset({"outlived", "new"}), 100.0)
    for machine in ("outlived", "new", "fixed"):
        assert made.expect(machine, 5.0, 10.0) == Expectation(15.0, None)


def test_a_pool_that_never_keeps_its_cores_is_expensive_and_not_infinite() -> None:
    made = HistoryPredictor(history(grown=(99.0, Direction.GROWTH)), frozenset({"grown"}), 100.0)
    found = made.expect("grown", 0.0, 1000.0)
    assert found.completion_probability == 0.0
    assert 1000.0 < found.seconds < math.inf
