"""EASY's reservation by hand, and against a plain look at all ends."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.nodes.backfilling import may_start_before, reservation


def reserved(
    running: list[tuple[float, int, int]], free: tuple[int, int], need: tuple[int, int]
) -> tuple[float, int, int]:
    ends = np.array([r[0] for r in running] + [0.0])
    cores = np.array([r[1] for r in running] + [0], np.int64)
    mib = np.array([r[2] for r in running] + [0], np.int64)
    return reservation(ends, cores, mib, len(running), *free, *need)


def test_the_first_of_the_queue_starts_when_enough_has_ended() -> None:
    """Of 8 cores 1 is free, 3 from 10 s on, 2 from 20 s, 2 from 30 s; 5 are wanted: at 20 s, with 1 to spare."""
    running = [(30.0, 2, 0), (10.0, 3, 0), (20.0, 2, 0)]
    assert reserved(running, (1, 0), (5, 0)) == (20.0, 1, 0)
    assert reserved(running, (1, 0), (4, 0)) == (10.0, 0, 0)
    assert reserved(running, (1, 0), (9, 0)) == (math.inf, 0, 0)


def test_what_ends_at_the_same_instant_is_to_spare_as_well() -> None:
    assert reserved([(10.0, 3, 0), (10.0, 2, 0)], (1, 0), (4, 0)) == (10.0, 2, 0)


def test_memory_counts_as_cores_do() -> None:
    assert reserved([(10.0, 3, 100), (20.0, 1, 200)], (1, 50), (2, 200)) == (20.0, 3, 150)


def test_what_ends_in_time_or_leaves_the_room_may_start_before() -> None:
    assert may_start_before(20.0, 20.0, 9, 9, 0, 0)
    assert not may_start_before(20.1, 20.0, 2, 0, 1, 0)
    assert may_start_before(20.1, 20.0, 1, 0, 1, 0)
    assert not may_start_before(20.1, 20.0, 1, 1, 1, 0)


@given(
    st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(1, 4), st.integers(0, 4)), max_size=25),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(1, 40),
    st.integers(0, 40),
)
def test_it_is_the_earliest_time_with_room(
    running: list[tuple[float, int, int]], free: int, free_mib: int, need: int, need_mib: int
) -> None:
    at_s, cores, mib = reserved(running, (free, free_mib), (need, need_mib))
    for end in sorted({-math.inf, *(r[0] for r in running)}):
        there = free + sum(r[1] for r in running if r[0] <= end)
        there_mib = free_mib + sum(r[2] for r in running if r[0] <= end)
        if there >= need and there_mib >= need_mib:
            assert (at_s, cores, mib) == (end, there - need, there_mib - need_mib)
            return
    assert at_s == math.inf
