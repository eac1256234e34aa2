"""Who comes back after a preemption, and when: the oldest that fits, in room that lasts, without flapping."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.return_queue import DEFAULT_PACE, ReturnPace, ReturnQueue, Waiting

OLD, YOUNG = Waiting("old", ResourceVector(2.0, 1000.0)), Waiting("young", ResourceVector(1.0, 500.0))
LARGE, SMALL = ResourceVector(4.0, 4000.0), ResourceVector(1.0, 4000.0)


def fed(queue: ReturnQueue, begin: int, end: int, room: ResourceVector, *waiting: Waiting) -> list[tuple[int, str]]:
    """A report every two seconds; what was started when."""
    started = []
    for now in range(begin, end, 2):
        queue.observe(now, waiting, room)
        if (name := queue.due(now)) is not None:
            queue.tried(now, name)
            started.append((now, name))
            waiting = tuple(one for one in waiting if one.name != name)
    return started


def test_the_oldest_comes_back_first_once_it_has_rested() -> None:
    assert fed(ReturnQueue(), 0, 40, LARGE, OLD, YOUNG) == [(30, "old"), (32, "young")]


def test_a_younger_one_passes_an_older_one_that_does_not_fit() -> None:
    assert fed(ReturnQueue(), 0, 60, SMALL, OLD, YOUNG) == [(30, "young")]


def test_room_counts_when_it_has_lasted() -> None:
    queue = ReturnQueue()
    assert fed(queue, 0, 60, ZERO, OLD) == []
    assert fed(queue, 60, 76, LARGE, OLD) == []
    assert fed(queue, 76, 78, SMALL, OLD) == [], "it was gone for a moment"
    assert fed(queue, 78, 120, LARGE, OLD) == [(98, "old")]


def test_what_nothing_was_heard_of_for_long_counts_anew() -> None:
    queue = ReturnQueue()
    assert fed(queue, 0, 28, LARGE, OLD) == []
    assert fed(queue, 100, 130, LARGE, OLD) == [(120, "old")]


def test_one_that_could_not_be_started_waits_ever_longer_up_to_a_limit() -> None:
    queue, tries = ReturnQueue(ReturnPace(longest_s=100.0)), []
    for now in range(0, 500, 2):
        queue.observe(now, (OLD,), LARGE)
        if (name := queue.due(now)) is not None:
            queue.tried(now, name)
            tries.append(now)
    assert tries == [30, 60, 120, 220, 320, 420]


def test_one_that_is_soon_preempted_again_waits_longer_and_one_that_ran_for_long_does_not() -> None:
    queue = ReturnQueue()
    assert fed(queue, 0, 40, LARGE, OLD) == [(30, "old")]
    assert fed(queue, 40, 100, LARGE, OLD) == [(70, "old")], "its rest"
    assert fed(queue, 100, 200, LARGE, OLD) == [(130, "old")], "a minute since the last try"
    assert fed(queue, 200, 400, LARGE, OLD) == [(250, "old")], "two minutes"
    assert fed(queue, 400, 1200, LARGE) == []
    assert fed(queue, 1200, 1300, LARGE, OLD) == [(1230, "old")]


def test_growth_leaves_room_for_who_comes_back_next_and_for_none_that_does_not_fit() -> None:
    queue = ReturnQueue()
    fed(queue, 0, 30, SMALL, OLD, YOUNG)
    assert queue.kept(20) == ZERO, "both rest"
    assert queue.kept(30) == YOUNG.least
    queue.observe(30, (OLD, YOUNG), LARGE)
    assert queue.kept(30) == OLD.least
    queue.observe(32, (), LARGE)
    assert queue.kept(32) == ZERO


@given(
    rooms=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=120),
    least=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4),
)
def test_none_is_started_that_does_not_fit_and_with_room_for_all_every_one_is(
    rooms: list[float], least: list[float]
) -> None:
    waiting = tuple(Waiting(f"vm-{at}", ResourceVector(cores)) for at, cores in enumerate(least))
    queue, now, needs = ReturnQueue(replace(DEFAULT_PACE, longest_s=60.0)), 0.0, {w.name: w.least for w in waiting}
    for room in rooms:
        queue.observe(now, waiting, ResourceVector(room))
        if (name := queue.due(now)) is not None:
            assert needs[name].fits_in(ResourceVector(room))
            queue.tried(now, name)
        now += 2.0
    came_back = []
    for _ in range(200):
        queue.observe(now, waiting, ResourceVector(10.0))
        if (name := queue.due(now)) is not None:
            queue.tried(now, name)
            came_back.append(name)
            waiting = tuple(one for one in waiting if one.name != name)
        now += 2.0
    assert sorted(came_back) == sorted(needs)


def test_one_that_sees_room_elsewhere_for_long_enough_goes_there_unless_it_fits_here() -> None:
    queue = ReturnQueue()
    sees = replace(OLD, elsewhere=True)

    def due(begin: int, end: int, room: ResourceVector, *waiting: Waiting) -> list[tuple[int, str]]:
        found = []
        for now in range(begin, end, 2):
            queue.observe(now, waiting, room)
            if (name := queue.due_elsewhere(now)) is not None:
                found.append((now, name))
        return found

    assert due(0, 40, SMALL, OLD, YOUNG) == []
    assert due(40, 60, SMALL, sees, YOUNG) == []
    assert due(60, 62, SMALL, OLD, YOUNG) == [], "the room was gone for a moment"
    assert due(62, 84, SMALL, sees, YOUNG) == [(82, "old")]
    assert due(84, 86, LARGE, sees, YOUNG) == [], "it fits here"
    queue.tried(86, "old")
    assert due(86, 118, SMALL, sees, YOUNG) == [(116, "old")], "the pause after a try"
    assert due(140, 160, SMALL, sees, YOUNG) == [], "nothing was heard of for long"


def test_one_that_was_tried_here_goes_elsewhere_and_the_two_take_turns() -> None:
    queue, sees, went, came = ReturnQueue(), replace(OLD, elsewhere=True), [], []
    assert fed(queue, 0, 32, LARGE, OLD) == [(30, "old")]
    for now in range(32, 500, 2):
        queue.observe(now, (sees,), LARGE)
        if (name := queue.due(now)) is not None:
            queue.tried(now, name)
            came.append(now)
        if (name := queue.due_elsewhere(now)) is not None:
            assert queue.kept(now) == ZERO, "nothing is kept free here for it"
            queue.tried(now, name, elsewhere=True)
            went.append(now)
    assert (went, came) == ([60, 240], [120, 480]), "the pauses after a try"
