"""The tree of ends against heapq, with removals from its middle, and made wider on the way."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.jobs import ends
from ebbtide.simulator.jobs.columns import TASK, TASK_INTS


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=60), st.integers(0, 9))
def test_ends_come_by_time_and_then_by_the_order_of_starts_whatever_is_killed(
    steps: list[tuple[int, int]], rows: int
) -> None:
    """Times are few, so that many are equal; 0 takes the first out, 1 some other, the rest put one in."""
    tasks = np.zeros((len(steps) + 1, TASK_INTS), np.int64)
    at_s, task = ends.widened(np.empty(0), np.empty(0, np.int64), rows)
    model: list[tuple[float, int]] = []
    started = 0
    for kind, value in steps:
        if kind >= 2 or not model:
            if started >= len(task):
                at_s, task = ends.widened(at_s, task, started + value)
                at_s, task = ends.widened(at_s, task, started + 1)
            tasks[started, TASK.start] = started
            ends.push(at_s, task, tasks, started, float(value))
            heapq.heappush(model, (float(value), started))
            started += 1
        else:
            gone = model[0] if kind == 0 else model[value % len(model)]
            ends.remove(at_s, task, tasks, gone[1])
            model.remove(gone)
            heapq.heapify(model)
    while model:
        assert (at_s[1], task[1]) == heapq.heappop(model)
        ends.remove(at_s, task, tasks, int(task[1]))
    assert np.isinf(at_s[1:]).all()
