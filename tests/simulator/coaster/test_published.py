"""Turns as in Eagle's published simulator, rule by rule on paper, and any queue beside plain lists."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.coaster import arrays as a
from ebbtide.simulator.coaster.loop import append, take_published
from ebbtide.simulator.errors import InvalidParameter
from tests.simulator.coaster.scenes import ONE_SERVER, told
from tests.simulator.jobs.scenes import job

PAPER: dict[str, Any] = {"rules": "paper"}
SIMULATOR: dict[str, Any] = {"rules": "simulator"}
#: Server 1 is long all the time, so that all short jobs queue at server 0, a probe for each task.
LONG = job(0, 1, 5000)


@pytest.mark.parametrize(
    ("options", "begins_s"),
    [
        (SIMULATOR, 68),  # Six tasks of 3 s: with a seventh they were 21 s.
        (SIMULATOR | {"most_delays": 1.5}, 56),  # 6 s.
        (SIMULATOR | {"most_delays": 0.5}, 50),
        (PAPER, 65),  # Five tasks.
    ],
)
def test_those_that_pass_a_task_take_five_times_its_estimate_at_most(options: dict[str, Any], begins_s: float) -> None:
    """One task of 4 s waits since 2 s, eight of 3 s since 3 s; the server is free at 50 s."""
    found = told([LONG, job(1, 1, 49), job(2, 1, 4), *[job(3, 1, 3)] * 8], **ONE_SERVER, **options)
    assert found.state.waited_s[2] + 2 == begins_s


@pytest.mark.parametrize(
    ("options", "second_s", "other_s", "void"),
    [
        (SIMULATOR, 26, 21, 1),
        (SIMULATOR | {"sticky": False}, 26, 21, 0),
        (PAPER, 21, 41, 1),
    ],
)
def test_the_job_that_a_server_has_competes_with_those_that_wait(
    options: dict[str, Any], second_s: float, other_s: float, void: int
) -> None:
    """Two tasks of 20 s from 1 s on; at 2 s one of 5 s comes. The first probe gets both tasks of its job, the second
    none, unless a probe is good for one task only."""
    found = told([LONG, job(1, 1, 20, 20), job(2, 1, 5)], **ONE_SERVER, **options)
    assert (found.state.waited_s[2] + 1, found.state.waited_s[3] + 2) == (second_s, other_s)
    assert found.metrics["probes_void"] == void


def test_a_job_with_less_left_goes_on() -> None:
    """Its second task of 20 s comes before the 30 s of another job."""
    found = told([LONG, job(1, 1, 20, 20), job(2, 1, 30)], **ONE_SERVER, **SIMULATOR)
    assert found.state.waited_s[1:].tolist() == [0, 20, 39]


@pytest.mark.parametrize(("rules", "waited_s", "ended_s"), [("paper", 10.9, 18), ("simulator", 10, 17)])
def test_durations_are_whole_seconds(rules: str, waited_s: float, ended_s: float) -> None:
    """10.9 and 6.1 s from 1 s on, or 10 and 6."""
    found = told([LONG, job(1, 1, 10.9), job(1, 1, 6.1)], **ONE_SERVER, rules=rules)
    assert found.state.waited_s[1:].tolist() == [0, pytest.approx(waited_s)]
    assert found.state.ended_s[2] == pytest.approx(ended_s)


@pytest.mark.parametrize(("rules", "long"), [("paper", True), ("simulator", False)])
def test_what_is_long_goes_by_whole_seconds(rules: str, long: bool) -> None:
    assert told([job(0, 1, 100.9)], **ONE_SERVER, cutoff_s=100.5, rules=rules).long.tolist() == [long]


class Waiting(NamedTuple):
    """An entry: its job's tasks, those that have begun, their estimate, whether it is long, what passed it so far."""

    tasks: int
    begun: int
    estimate_s: int
    long: bool
    delayed_s: int


def queue(waiting: list[Waiting], sticky: bool) -> a.Coaster:
    """Server 0 with this queue, each entry of a job of its own."""
    servers, entries, waited_s, ran_on = a.empty(1, len(waiting), 1, 1)
    state = a.Coaster(
        knobs=np.zeros(a.KNOBS, np.int64),
        numbers=np.zeros(a.NUMBERS),
        draws=np.zeros(2, np.int64),
        at_s=np.zeros(len(waiting)),
        mean_s=np.array([one.estimate_s for one in waiting], np.float64),
        offsets=np.cumsum([0, *(one.tasks for one in waiting)]),
        runtime_s=np.zeros(1),
        waited_s=waited_s,
        ran_on=ran_on,
        begun=np.array([one.begun for one in waiting], np.int64),
        done=np.zeros(len(waiting), np.int64),
        ended_s=np.zeros(len(waiting)),
        servers=servers,
        queued_s=np.zeros(1),
        expected_s=np.zeros(1),
        since_s=np.zeros(1),
        open=np.zeros(1, np.int64),
        entries=entries,
        delayed_s=np.array([one.delayed_s for one in waiting], np.float64),
    )
    state.knobs[[a.KNOB.published, a.KNOB.shortest, a.KNOB.sticky]] = 1, 1, sticky
    state.numbers[a.NUMBER.most_delays] = 5.0
    for number, one in enumerate(waiting):
        append(state, 0, number, int(one.long))
    state.delayed_s[:] = [one.delayed_s for one in waiting]
    return state


def left(state: a.Coaster) -> list[int]:
    found = []
    entry = state.servers[0, a.SERVER.first]
    while entry >= 0:
        found.append(int(state.entries[entry, a.ENTRY.job]))
        last, entry = entry, state.entries[entry, a.ENTRY.next]
    assert state.servers[0, a.SERVER.last] == (last if found else -1)
    return found


@pytest.mark.parametrize(
    ("waiting", "taken", "stays", "delayed"),
    [
        # The first is long.
        ([Waiting(9, 0, 200, True, 0), Waiting(1, 0, 1, False, 0)], 0, [1], [0, 0]),
        # A long one behind has 200 s left, the first 40.
        ([Waiting(2, 0, 20, False, 0), Waiting(2, 1, 200, True, 0)], 0, [0, 1], [0, 0]),
        # The second has least left, but takes more than the 2 s that the first may still be delayed.
        ([Waiting(9, 0, 4, False, 18), Waiting(1, 0, 3, False, 0)], 0, [0, 1], [18, 0]),
        # It takes just what the first may still be delayed, and its job has no more tasks.
        ([Waiting(9, 0, 4, False, 17), Waiting(1, 0, 9, False, 0), Waiting(1, 0, 3, False, 0)], 2, [0, 1], [20, 3, 0]),
        # The first has begun all its tasks: it is dropped, and holds nobody up.
        ([Waiting(3, 3, 4, False, 20), Waiting(1, 0, 9, False, 0), Waiting(1, 0, 3, False, 0)], 2, [1], [20, 3, 0]),
        ([Waiting(3, 3, 4, False, 0)], -1, [], [0]),
    ],
)
def test_turns_by_hand(waiting: list[Waiting], taken: int, stays: list[int], delayed: list[float]) -> None:
    state = queue(waiting, True)
    assert take_published(state, 0) == taken
    assert left(state) == stays
    assert state.delayed_s.tolist() == delayed


def turn(waiting: list[Waiting], sticky: bool) -> tuple[int, list[int], list[int]]:
    """The same, by plain lists: of those whose task fits into the slack of all short ones before, the least left."""
    there = [n for n, one in enumerate(waiting) if one.long or one.begun < one.tasks]
    if not there:
        return -1, [], [one.delayed_s for one in waiting]
    fits = [
        n
        for n in there
        if all(
            waiting[n].estimate_s + waiting[m].delayed_s <= 5 * waiting[m].estimate_s
            for m in there[: there.index(n)]
            if not waiting[m].long
        )
    ]
    left_s = {n: (waiting[n].tasks - waiting[n].begun) * waiting[n].estimate_s for n in fits}
    taken = there[0] if waiting[there[0]].long else min(fits, key=lambda n: (left_s[n], n))
    one = waiting[taken]
    passed = [] if one.long else there[: there.index(taken)]
    keeps = sticky and not one.long and one.tasks - one.begun > 1
    return (
        taken,
        [n for n in there if n != taken or keeps],
        [w.delayed_s + (one.estimate_s if n in passed else 0) for n, w in enumerate(waiting)],
    )


@st.composite
def entries(draw: st.DrawFn) -> Waiting:
    tasks, estimate_s, long = draw(st.integers(1, 4)), draw(st.integers(0, 20)), draw(st.booleans())
    begun = draw(st.integers(0, tasks - 1 if long else tasks))
    return Waiting(tasks, begun, estimate_s, long, 0 if long else draw(st.integers(0, 5 * estimate_s)))


@given(st.lists(entries(), min_size=1, max_size=8), st.booleans())
def test_any_queue_takes_the_turn_of_plain_lists(waiting: list[Waiting], sticky: bool) -> None:
    state = queue(waiting, sticky)
    taken = int(take_published(state, 0))
    # Who has begun all its tasks is dropped where the search comes by.
    stay = [n for n in left(state) if waiting[n].long or waiting[n].begun < waiting[n].tasks]
    assert (taken, stay, state.delayed_s.tolist()) == turn(waiting, sticky)
    # Nobody is held up for longer than the cap.
    assert all(state.delayed_s[n] <= 5 * one.estimate_s for n, one in enumerate(waiting) if not one.long)


@pytest.mark.parametrize(("changes", "field"), [({"rules": "eagle"}, "rules"), ({"most_delays": -1.0}, "most_delays")])
def test_wrong_rules_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        told([LONG], **ONE_SERVER, **changes)
