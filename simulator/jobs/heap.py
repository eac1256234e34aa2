"""Ends of running tasks: a binary heap in arrays, by time, then by the order of starts. Kernels: compiled, no numba here.

Each task knows its place (`T_HEAP`), so that one that is killed goes at once: the heap holds what runs, and nothing else.
"""

from __future__ import annotations

from simulator.jobs.columns import T_HEAP, T_START, Floats, Ints


def sift_up(heap_at: Floats, heap_task: Ints, tasks: Ints, place: int) -> None:
    """Move what stands at ``place`` towards the root as far as it belongs."""
    at_s = heap_at[place]
    task = heap_task[place]
    order = tasks[task, T_START]
    while place > 0:
        above = (place - 1) >> 1
        other_s = heap_at[above]
        if other_s < at_s or (other_s == at_s and tasks[heap_task[above], T_START] < order):
            break
        moved = heap_task[above]
        heap_at[place] = other_s
        heap_task[place] = moved
        tasks[moved, T_HEAP] = place
        place = above
    heap_at[place] = at_s
    heap_task[place] = task
    tasks[task, T_HEAP] = place


def sift_down(heap_at: Floats, heap_task: Ints, tasks: Ints, place: int, count: int) -> None:
    """Move what stands at ``place`` away from the root as far as it belongs."""
    at_s = heap_at[place]
    task = heap_task[place]
    order = tasks[task, T_START]
    while True:
        below = 2 * place + 1
        if below >= count:
            break
        below_s = heap_at[below]
        other = below + 1
        if other < count:
            other_s = heap_at[other]
            if other_s < below_s or (
                other_s == below_s and tasks[heap_task[other], T_START] < tasks[heap_task[below], T_START]
            ):
                below = other
                below_s = other_s
        if at_s < below_s or (at_s == below_s and order < tasks[heap_task[below], T_START]):
            break
        moved = heap_task[below]
        heap_at[place] = below_s
        heap_task[place] = moved
        tasks[moved, T_HEAP] = place
        place = below
    heap_at[place] = at_s
    heap_task[place] = task
    tasks[task, T_HEAP] = place


def push(heap_at: Floats, heap_task: Ints, tasks: Ints, count: int, task: int, at_s: float) -> None:
    """Put a task that ends at ``at_s`` into a heap of ``count``."""
    heap_at[count] = at_s
    heap_task[count] = task
    sift_up(heap_at, heap_task, tasks, count)


def remove(heap_at: Floats, heap_task: Ints, tasks: Ints, count: int, task: int) -> None:
    """Take a task out of a heap of ``count``."""
    place = tasks[task, T_HEAP]
    last = count - 1
    tasks[task, T_HEAP] = -1
    if place == last:
        return
    moved = heap_task[last]
    heap_at[place] = heap_at[last]
    heap_task[place] = moved
    tasks[moved, T_HEAP] = place
    sift_up(heap_at, heap_task, tasks, place)
    sift_down(heap_at, heap_task, tasks, tasks[moved, T_HEAP], last)
