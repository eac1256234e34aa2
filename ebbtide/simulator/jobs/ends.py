"""Ends of running tasks: a tree whose nodes hold the earlier of two, by time, then by the order of starts. Kernels.

A task's leaf is its row of `tasks`; so what is to be read on its way up is known from the start, and read at once,
where a heap must compare before it knows where to go on. The root is node 1; below node i are 2i and 2i + 1.
"""

from __future__ import annotations

import math

import numpy as np

from ebbtide.simulator.jobs.columns import TASK, Floats, Ints


def widened(ends_at: Floats, ends_task: Ints, rows: int) -> tuple[Floats, Ints]:
    """The same tree with leaves for so many tasks; empty arrays are an empty tree."""
    while len(ends_task) < max(rows, 2):
        leaves = max(2 * len(ends_task), 2)
        at, task = np.full(2 * leaves, math.inf), np.zeros(leaves, np.int64)
        # The old tree stands below the new root, on the left.
        layer = 1
        while 2 * layer <= leaves and len(ends_task):
            at[2 * layer : 3 * layer] = ends_at[layer : 2 * layer]
            task[2 * layer : 3 * layer] = ends_task[layer : 2 * layer]
            layer *= 2
        if len(ends_task):
            at[1], task[1] = ends_at[1], ends_task[1]
        ends_at, ends_task = at, task
    return ends_at, ends_task


def push(ends_at: Floats, ends_task: Ints, tasks: Ints, task: int, at_s: float) -> None:
    """Put in a task that ends at ``at_s``."""
    place = len(ends_task) + task
    ends_at[place] = at_s
    order = tasks[task, TASK.start]
    place >>= 1
    while place > 0:
        other_s = ends_at[place]
        if other_s < at_s or (other_s == at_s and tasks[ends_task[place], TASK.start] < order):
            return
        ends_at[place] = at_s
        ends_task[place] = task
        place >>= 1


def remove(ends_at: Floats, ends_task: Ints, tasks: Ints, task: int) -> None:
    """Take a task out."""
    place = len(ends_task) + task
    ends_at[place] = math.inf
    best = task ^ 1
    best_s = ends_at[place ^ 1]
    place >>= 1
    while place > 0 and ends_task[place] == task:
        ends_at[place] = best_s
        ends_task[place] = best
        # Which of two is earlier is chance: so its number says where to read, and there is no branch.
        other_s = ends_at[place ^ 1]
        earlier = int(other_s < best_s)
        if other_s == best_s and best_s < math.inf:
            earlier = int(tasks[ends_task[place ^ 1], TASK.start] < tasks[best, TASK.start])
        best = ends_task[place ^ earlier]
        best_s = min(best_s, other_s)
        place >>= 1
