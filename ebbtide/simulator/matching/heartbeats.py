"""Tasks that start as machines report: Agarwal et al. 2023, Algorithm 3. Kernels: compiled, no numba here.

The engine looks at the queue when something has happened. All machines report then, one after another from a random one
on, again and again until a whole round has started nothing: YARN's nodes report every second, and nothing that counts
changes in so short a time.
"""

from __future__ import annotations

import math
from typing import Any

from ebbtide.matcher.match.choices import better_on_heartbeat
from ebbtide.matcher.predict.completion_probability import failure_and_loss, form_now, outlook
from ebbtide.matcher.predict.expected_time import usable_duration_s
from ebbtide.simulator.jobs.columns import COUNT, MACHINE, QUEUE, TASK, TIME, State
from ebbtide.simulator.jobs.machines import fits
from ebbtide.simulator.jobs.passes import schedule as go_through
from ebbtide.simulator.jobs.running import start
from ebbtide.simulator.matching.arrays import NUMBER, SWITCH, Matching
from ebbtide.simulator.matching.hooks import begin, choose
from ebbtide.simulator.nodes.draws import draw


def schedule(s: State, p: Any, now_s: float) -> None:
    """A look at the queue."""
    if p.switches[SWITCH.heartbeat] == 0:
        go_through(s, p, now_s)
        return
    if s.counts[COUNT.active] == 0:
        return
    begin(s, p, now_s)
    mark_shortest(s)
    count = len(s.machines)
    machine = draw(p.draws, count)
    quiet = 0
    # By Algorithm 1, until a task starts the answer of one machine's report is that of the next.
    asked = False
    while quiet < count and s.counts[COUNT.active] > 0:
        task, probability = most_likely(s, p, machine, now_s)
        where = machine
        if task < 0 and not asked:
            asked = True
            task = shortest(s)
            p.promised[:] = 0
            where = choose(s, p, task, now_s)
            if where >= 0:
                probability = p.probability[where]
        if task >= 0 and where >= 0:
            s.times[task, TIME.note] = probability
            start(s, p, task, where, now_s)
            mark_shortest(s)
            quiet = 0
            asked = False
        else:
            quiet += 1
        machine = (machine + 1) % count


def mark_shortest(s: State) -> None:
    """Let each queue's cursor stand on its shortest task, the first of several: all of a queue want the same room."""
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        best = s.queues[queue, QUEUE.first]
        task = s.tasks[best, TASK.next]
        while task >= 0:
            if s.times[task, TIME.estimate] < s.times[best, TIME.estimate]:
                best = task
            task = s.tasks[task, TASK.next]
        s.queues[queue, QUEUE.cursor] = best


def shortest(s: State) -> int:
    """The shortest task that waits."""
    best = -1
    for i in range(s.counts[COUNT.active]):
        task = s.queues[s.active[i], QUEUE.cursor]
        if best < 0 or s.times[task, TIME.estimate] < s.times[best, TIME.estimate]:
            best = task
    return best


def most_likely(s: State, p: Matching, machine: int, now_s: float) -> tuple[int, float]:
    """Of the tasks that have room on a machine the one most likely to complete there, if more than the threshold; P_c.

    -1: there is none. P_c falls as durations grow, so that of each queue its shortest is asked.
    """
    knowledge = p.knowledge
    form = form_now(knowledge, p.switches[SWITCH.form])
    sized = p.switches[SWITCH.sized] != 0
    found = -1
    best = -1.0
    best_s = math.inf
    if s.machines[machine, MACHINE.held] != 0:
        return found, best
    for i in range(s.counts[COUNT.active]):
        task = s.queues[s.active[i], QUEUE.cursor]
        if not fits(s, machine, task):
            continue
        duration_s = usable_duration_s(s.times[task, TIME.estimate], 0.0, p.numbers[NUMBER.fallback_s])
        elapsed_s = max(now_s - p.rolling.last_s[machine], 0.0)
        cores = float(s.machines[machine, MACHINE.cores])
        free = cores - float(s.machines[machine, MACHINE.used] + s.tasks[task, TASK.cores])
        looks = outlook(knowledge, form, sized, p.rolling.direction[machine], elapsed_s, free, cores)
        probability = 1.0 - failure_and_loss(knowledge, form, looks, duration_s)[0]
        if better_on_heartbeat(probability, duration_s, p.numbers[NUMBER.threshold], best, best_s):
            found, best, best_s = task, probability, duration_s
    return found, best
