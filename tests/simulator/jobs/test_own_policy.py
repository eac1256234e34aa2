"""A policy from outside is compiled into the loop, hears of everything, and can let tasks wait."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs.policy import Policy
from tests.simulator.jobs import delaying, scenes
from tests.simulator.jobs.scenes import job

MOVES = [(0.0, "a", 4.0), (1.0, "b", 4.0), (2.0, "b", 6.0), (3.0, "a", 3.0), (4.0, "a", 4.0), (20.0, "b", 2.0)]


@pytest.mark.parametrize("compile", [False, True])
def test_it_learns_delays_and_is_woken(compile: bool) -> None:
    """Tasks wait until 10 s though there is room; then b is better, since a has shrunk; at 20 s b kills its first."""
    told = scenes.run([job(0, 2, 15, 15, 15)], None, MOVES, policy=delaying.DELAYING, compile=compile)
    assert [(r[1], r[2], r[3], r[4], r[5]) for r in told.rows] == [
        (0, 1, 10, 20, 0),
        (1, 1, 10, 20, 0),
        (2, 1, 10, 25, 1),
        (0, 0, 20, 35, 1),
        (1, 0, 20, 35, 1),
    ]
    learned = told.engine.policy_state
    assert learned.shrinks.tolist() == [1, 1]
    assert learned.seen.tolist()[1:] == [5, 3, 2]


def test_compiled_and_interpreted_agree_on_it() -> None:
    for seed in range(3):
        jobs, moves = scenes.random_scene(seed)
        runs = [scenes.run(jobs, None, moves, policy=delaying.DELAYING, compile=how) for how in (False, True)]
        assert runs[0].rows == runs[1].rows
        assert runs[0].results.kills > 0
        assert runs[0].engine.policy_state.seen.tolist() == runs[1].engine.policy_state.seen.tolist()


def test_a_kernel_of_no_hook_is_refused() -> None:
    def wrong(*_: Any) -> None:
        return None

    policy = Policy("wrong", {"chose": wrong}, delaying.Learned, delaying.resized)
    with pytest.raises(InvalidParameter, match="kernels must be of begin, choose"):
        scenes.run([job(0, 1, 1)], None, MOVES, policy=policy)


def test_another_policy_with_the_same_arrays_has_the_same_kernels() -> None:
    scenes.run([job(0, 1, 1)], None, MOVES, policy=delaying.DELAYING)
    other = Policy("other", {"choose": delaying.choose}, delaying.Learned, delaying.resized)
    with pytest.raises(InvalidParameter, match="kernels differ in begin"):
        scenes.run([job(0, 1, 1)], None, MOVES, policy=other)
