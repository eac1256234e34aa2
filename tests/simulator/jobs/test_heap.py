"""The heap of ends against heapq, with removals from its middle."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.jobs import heap
from ebbtide.simulator.jobs.columns import TASK, TASK_INTS


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=60))
def test_ends_come_by_time_and_then_by_the_order_of_starts_whatever_is_killed(steps: list[tuple[int, int]]) -> None:
    """Times are few, so that many are equal; 0 takes the first out, 1 some other, the rest put one in."""
    tasks = np.zeros((len(steps), TASK_INTS), np.int64)
    heap_at, heap_task = np.zeros(len(steps)), np.zeros(len(steps), np.int64)
    heap_place = np.zeros(len(steps), np.int64)
    model: list[tuple[float, int]] = []
    started = 0
    for kind, value in steps:
        if kind >= 2 or not model:
            tasks[started, TASK.start] = started
            heap.push(heap_at, heap_task, heap_place, tasks, len(model), started, float(value))
            heapq.heappush(model, (float(value), started))
            started += 1
            continue
        gone = model[0] if kind == 0 else model[value % len(model)]
        heap.remove(heap_at, heap_task, heap_place, tasks, len(model), gone[1])
        model.remove(gone)
        heapq.heapify(model)
        assert heap_place[gone[1]] == -1
    for place in range(len(model)):
        assert heap_place[heap_task[place]] == place
    while model:
        first = heapq.heappop(model)
        assert (heap_at[0], heap_task[0]) == first
        heap.remove(heap_at, heap_task, heap_place, tasks, len(model) + 1, int(heap_task[0]))
