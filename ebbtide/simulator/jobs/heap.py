"""Ends of running tasks: a heap of fours in arrays, by time, then by the order of starts. Kernels, no numba here.

The place of each task is known (`heap_place`), so that one that is killed goes at once: the heap holds what runs, and
nothing else.
"""

from __future__ import annotations

from ebbtide.simulator.jobs.columns import TASK, Floats, Ints


def sift_up(heap_at: Floats, heap_task: Ints, heap_place: Ints, tasks: Ints, place: int) -> None:
    """Move what stands at ``place`` towards the root as far as it belongs."""
    at_s = heap_at[place]
    task = heap_task[place]
    order = tasks[task, TASK.start]
    while place > 0:
        above = (place - 1) >> 2
        other_s = heap_at[above]
        if other_s < at_s or (other_s == at_s and tasks[heap_task[above], TASK.start] < order):
            break
        moved = heap_task[above]
        heap_at[place] = other_s
        heap_task[place] = moved
        heap_place[moved] = place
        place = above
    heap_at[place] = at_s
    heap_task[place] = task
    heap_place[task] = place


def sift_down(heap_at: Floats, heap_task: Ints, heap_place: Ints, tasks: Ints, place: int, count: int) -> None:
    """Move what stands at ``place`` away from the root as far as it belongs."""
    at_s = heap_at[place]
    task = heap_task[place]
    # To the end of the heap, the smallest below moving up each time, and back as far as it belongs: what stands here
    # came from the end and mostly belongs there. Which of four is the smallest is chance: so numbers and no branches.
    below = 4 * place + 1
    while below + 3 < count:
        best = below
        best_s = heap_at[below]
        for other in range(below + 1, below + 4):
            other_s = heap_at[other]
            smaller = int(other_s < best_s)
            if other_s == best_s:
                smaller = int(tasks[heap_task[other], TASK.start] < tasks[heap_task[best], TASK.start])
            best += smaller * (other - best)
            best_s = min(best_s, other_s)
        moved = heap_task[best]
        heap_at[place] = best_s
        heap_task[place] = moved
        heap_place[moved] = place
        place = best
        below = 4 * place + 1
    if below < count:
        best = below
        for other in range(below + 1, count):
            if heap_at[other] < heap_at[best] or (
                heap_at[other] == heap_at[best]
                and tasks[heap_task[other], TASK.start] < tasks[heap_task[best], TASK.start]
            ):
                best = other
        moved = heap_task[best]
        heap_at[place] = heap_at[best]
        heap_task[place] = moved
        heap_place[moved] = place
        place = best
    heap_at[place] = at_s
    heap_task[place] = task
    sift_up(heap_at, heap_task, heap_place, tasks, place)


def push(heap_at: Floats, heap_task: Ints, heap_place: Ints, tasks: Ints, count: int, task: int, at_s: float) -> None:
    """Put a task that ends at ``at_s`` into a heap of ``count``."""
    heap_at[count] = at_s
    heap_task[count] = task
    sift_up(heap_at, heap_task, heap_place, tasks, count)


def remove(heap_at: Floats, heap_task: Ints, heap_place: Ints, tasks: Ints, count: int, task: int) -> None:
    """Take a task out of a heap of ``count``."""
    place = heap_place[task]
    last = count - 1
    heap_place[task] = -1
    if place == last:
        return
    heap_at[place] = heap_at[last]
    heap_task[place] = heap_task[last]
    # What stands there now may belong above as well as below: the way down ends with the way up.
    sift_down(heap_at, heap_task, heap_place, tasks, place, last)
