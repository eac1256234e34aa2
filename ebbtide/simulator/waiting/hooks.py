"""The waiting policy in the engine: a whole look at the queue of its own, and what it pays. Kernels, no numba here.

Fixed machines are filled first come, first served, work-conserving, best fit on cores (Ambati 2021 §2.3); who finds no
room is asked once, when it comes or when its trial is over, whether it waits.
"""

from __future__ import annotations

import math

from ebbtide.matcher.policies.cluster_state import began as cluster_began
from ebbtide.matcher.policies.cluster_state import describe
from ebbtide.matcher.policies.cluster_state import ended as cluster_ended
from ebbtide.matcher.policies.cluster_state import waits as cluster_waits
from ebbtide.matcher.policies.cluster_state import waits_no_more as cluster_waits_no_more
from ebbtide.matcher.policies.forest import predicted
from ebbtide.matcher.policies.past_lengths import TRIALS, found_out, long_chance
from ebbtide.matcher.policies.waiting import (
    CORE_HOUR,
    HOLD,
    MIB_A_CORE,
    ON_DEMAND,
    SPOT_SHARE,
    TRY,
    WAIT,
    after_trial,
    at_arrival,
    leaves_at_s,
    length_s,
    rented_cores,
    tried,
    tried_for_s,
)
from ebbtide.simulator.jobs.columns import COUNT, JOB, JOB_TIME, MACHINE, QUEUE, SUM, TASK, TIME, State
from ebbtide.simulator.jobs.lists import enqueue, put_on, take_off
from ebbtide.simulator.jobs.machines import give_back, rent
from ebbtide.simulator.jobs.measures import add, overlap
from ebbtide.simulator.jobs.nodes import choose as best_fit
from ebbtide.simulator.jobs.nodes import moved as node_moved
from ebbtide.simulator.jobs.passes import next_waiting, rewind
from ebbtide.simulator.jobs.running import kill, start
from ebbtide.simulator.nodes.draws import draw
from ebbtide.simulator.waiting.arrays import KNOB, LIMIT, PAID, Waiting

_MARKS = 1
_FOREST = 2


def moved(s: State, p: Waiting, machine: int) -> None:
    """Fixed machines are chosen by what they have free; rented ones are not chosen."""
    if machine < p.knobs[KNOB.fixed]:
        node_moved(s, p.nodes, machine)


def started(s: State, p: Waiting, task: int, machine: int, now_s: float) -> None:
    """A job runs: what the cluster looks like has changed."""
    cores = float(s.tasks[task, TASK.cores])
    if s.times[task, TIME.note] > 0.0:
        cluster_waits_no_more(p.cluster, cores, s.times[task, TIME.since])
        s.times[task, TIME.note] = 0.0
    if on_trial(p, machine) and len(p.lifetimes) > 0:
        # When its machine goes: negative, so that it is not taken for one that waits.
        s.times[task, TIME.note] = -(now_s + p.lifetimes[p.knobs[KNOB.tried] % len(p.lifetimes)])
    if machine < p.knobs[KNOB.fixed]:
        cluster_began(p.cluster, cores, float(s.tasks[task, TASK.memory]), now_s)


def ended(s: State, p: Waiting, task: int, machine: int, now_s: float, completed: bool) -> None:
    """A job runs no more: it is paid for, and what it waited is entered."""
    cores = s.tasks[task, TASK.cores]
    began_s = s.times[task, TIME.began]
    submitted_s = s.job_times[s.tasks[task, TASK.job], JOB_TIME.submitted]
    measured = s.sums[SUM.from_s] <= submitted_s < s.sums[SUM.to_s]
    if on_trial(p, machine):
        p.past[cores, TRIALS] -= 1.0
    if p.knobs[KNOB.tries] != 0 and machine <= p.knobs[KNOB.fixed] + p.knobs[KNOB.most] and not gone(s, task, now_s):
        length = length_s(now_s - began_s, cores, p.knobs[KNOB.by_core_time] != 0)
        known(p, cores, not completed or length >= p.numbers[LIMIT.short_below_s], submitted_s, now_s)
    s.times[task, TIME.note] = 0.0
    if machine < p.knobs[KNOB.fixed]:
        cluster_ended(p.cluster, float(cores), float(s.tasks[task, TASK.memory]), began_s)
        add(p.sums, PAID.fixed_core_s, cores * overlap(began_s, now_s, s.sums[SUM.from_s], s.sums[SUM.to_s]))
        if measured:
            add(p.sums, PAID.after_core_s, cores * overlap(began_s, now_s, s.sums[SUM.to_s], math.inf))
    else:
        give_back(s, task, machine)
        # Jobs are billed in full wherever their hours lie, here as above: who waits must not be cheaper for running
        # later.
        if measured:
            paid = rented_cores(p.sizes, MIB_A_CORE, cores, s.tasks[task, TASK.memory])
            share = SPOT_SHARE if on_trial(p, machine) and len(p.lifetimes) > 0 else 1.0
            add(p.sums, PAID.dollars, paid * CORE_HOUR * share * (now_s - began_s) / 3600.0)
            add(p.sums, PAID.core_s, cores * (now_s - began_s))
            if not completed:
                add(p.sums, PAID.lost_core_s, cores * (now_s - began_s))
    if completed and measured:
        add(p.sums, PAID.wait_s, s.times[task, TIME.queued])
        add(p.sums, PAID.delay_s, max(now_s - s.times[task, TIME.left] - submitted_s, 0.0))
        add(p.sums, PAID.jobs, 1.0)
        if s.times[task, TIME.queued] > 0.0:
            add(p.sums, PAID.late, 1.0)


def known(p: Waiting, cores: int, long: bool, submitted_s: float, now_s: float) -> None:
    """The length of a job has been found out, on trial or elsewhere. Those that fit no fixed machine tell of nobody."""
    if cores < len(p.past):
        found_out(p.past, cores, long, submitted_s, now_s, p.numbers[LIMIT.half_life_s])


def on_trial(p: Waiting, machine: int) -> bool:
    """Whether a machine is that of trials."""
    return bool(0 < machine - p.knobs[KNOB.fixed] <= p.knobs[KNOB.most])


def gone(s: State, task: int, now_s: float) -> bool:
    """Whether the spot machine is gone that a job was tried on."""
    return bool(s.times[task, TIME.note] < 0.0 and -s.times[task, TIME.note] <= now_s)


def too_large(p: Waiting, cores: int, memory_mib: int) -> bool:
    """Whether no fixed machine would ever hold a job."""
    return bool(cores > p.knobs[KNOB.most] or memory_mib > p.knobs[KNOB.most_mib])


def would_be_late(s: State, p: Waiting, task: int, now_s: float) -> bool:
    """Whether a job is believed to wait b or longer, if it waits from now on."""
    mark = False
    if len(p.marks) > 0:
        mark = p.marks[s.jobs[s.tasks[task, TASK.job], JOB.number]] != 0
    decision = p.knobs[KNOB.decisions]
    p.knobs[KNOB.decisions] = decision + 1
    kind = p.knobs[KNOB.late]
    if kind != _FOREST and p.knobs[KNOB.records] == 0:
        return mark and kind == _MARKS
    describe(p.features, p.cluster, now_s, float(s.tasks[task, TASK.cores]))
    if p.knobs[KNOB.records] != 0:
        row = p.knobs[KNOB.recorded]
        if decision % p.knobs[KNOB.stride] == 0 and row < len(p.rows):
            for i in range(len(p.features)):
                p.rows[row, i] = p.features[i]
            p.labels[row] = 1.0 if mark else 0.0
            p.asked_s[row] = now_s
            p.knobs[KNOB.recorded] = row + 1
    if kind == _FOREST:
        return predicted(p.forest, p.features) >= 0.5
    return mark and kind == _MARKS


def now_waits(s: State, p: Waiting, task: int) -> None:
    """A job has been told to wait."""
    s.times[task, TIME.note] = 1.0
    cluster_waits(p.cluster, float(s.tasks[task, TASK.cores]), s.times[task, TIME.since])


def stays(s: State, task: int, machine: int, now: int) -> None:
    """Take a rented job from the machine of trials to that of those who stay; it runs on."""
    take_off(s, task)
    s.machines[machine, MACHINE.used] -= s.tasks[task, TASK.cores]
    s.machines[machine, MACHINE.used_memory] -= s.tasks[task, TASK.memory]
    give_back(s, task, machine)
    put_on(s, task, now)
    s.machines[now, MACHINE.used] += s.tasks[task, TASK.cores]
    s.machines[now, MACHINE.used_memory] += s.tasks[task, TASK.memory]
    rent(s, task, now)


def point_at_new(s: State, p: Waiting) -> None:
    """Let the queues' cursors stand on the first that came since the last look."""
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        task = s.queues[queue, QUEUE.last]
        first = -1
        while task >= 0 and s.tasks[task, TASK.order] >= p.knobs[KNOB.new]:
            first = task
            task = s.tasks[task, TASK.before]
        s.queues[queue, QUEUE.cursor] = first


def wake(s: State, p: Waiting) -> None:
    """Ask to be woken when the next trial is over, a job is held no longer, or has waited too long."""
    at_s = p.numbers[LIMIT.held_until_s]
    wait_s = p.numbers[LIMIT.wait_below_s]
    if wait_s < math.inf:
        for i in range(s.counts[COUNT.active]):
            at_s = min(at_s, leaves_at_s(s.times[s.queues[s.active[i], QUEUE.first], TIME.since], wait_s))
    if p.knobs[KNOB.tries] != 0:
        for cores in range(1, p.knobs[KNOB.most] + 1):
            task = s.machines[p.knobs[KNOB.fixed] + cores, MACHINE.first]
            if task >= 0:
                limit_s = tried_for_s(p.numbers[LIMIT.short_below_s], cores, p.knobs[KNOB.by_core_time] != 0)
                at_s = min(at_s, s.times[task, TIME.began] + limit_s)
            while task >= 0 and len(p.lifetimes) > 0:
                at_s = min(at_s, -s.times[task, TIME.note])
                task = s.tasks[task, TASK.next]
    s.sums[SUM.wake] = min(s.sums[SUM.wake], at_s)


def asked(s: State, p: Waiting, task: int, now_s: float) -> int:
    """Whether a job of unknown length is tried now: TRY, HOLD or WAIT. Who is held is asked again."""
    cores = s.tasks[task, TASK.cores]
    chance = long_chance(p.past, cores, now_s, p.numbers[LIMIT.half_life_s])
    held_until_s = s.times[task, TIME.since] + p.numbers[LIMIT.hold_s]
    what = tried(chance, p.numbers[LIMIT.try_up_to], p.past[cores, TRIALS], now_s, held_until_s)
    if what == HOLD:
        p.knobs[KNOB.new] = min(p.knobs[KNOB.new], s.tasks[task, TASK.order])
        p.numbers[LIMIT.held_until_s] = min(p.numbers[LIMIT.held_until_s], held_until_s)
    return what


def drawn_queue(s: State, p: Waiting) -> int:
    """A queue that is still to be looked at, as likely as it has many that wait; -1: there is none."""
    count = 0
    for i in range(s.counts[COUNT.active]):
        if s.queues[s.active[i], QUEUE.cursor] >= 0:
            count += s.queues[s.active[i], QUEUE.waiting]
    left = draw(p.nodes.draws, count) if count > 0 else 0
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        if s.queues[queue, QUEUE.cursor] >= 0:
            left -= s.queues[queue, QUEUE.waiting]
            if left < 0:
                return int(queue)
    return -1


def drawn_task(s: State, p: Waiting, queue: int) -> int:
    """Any task of a queue, each as likely."""
    task = s.queues[queue, QUEUE.first]
    for _ in range(draw(p.nodes.draws, s.queues[queue, QUEUE.waiting])):
        task = s.tasks[task, TASK.next]
    return int(task)


def next_start(s: State, p: Waiting, now_s: float) -> tuple[int, int]:
    """The task that starts next in this look, and where; (-1, -1): there is none.

    First the queue in its order, or drawn, on the fixed machines, then those that are new, then those that have waited
    too long.
    """
    fixed = p.knobs[KNOB.fixed]
    if p.knobs[KNOB.phase] == 0:
        drawn = p.knobs[KNOB.random] != 0
        while True:
            queue = drawn_queue(s, p) if drawn else next_waiting(s)
            if queue < 0:
                break
            task = s.queues[queue, QUEUE.cursor]
            machine = -1
            if not too_large(p, s.queues[queue, QUEUE.cores], s.queues[queue, QUEUE.memory]):
                machine = best_fit(s, p.nodes, task, now_s)
            if machine >= 0 and drawn:
                # All of a queue want the same; its cursor says only that it has not been without room.
                return drawn_task(s, p, queue), machine
            if machine >= 0:
                s.queues[queue, QUEUE.cursor] = s.tasks[task, TASK.next]
                return int(task), machine
            s.queues[queue, QUEUE.cursor] = -1
        point_at_new(s, p)
        p.knobs[KNOB.new] = s.counts[COUNT.tail]
        p.numbers[LIMIT.held_until_s] = math.inf
        p.knobs[KNOB.phase] = 1
    if p.knobs[KNOB.phase] == 1:
        short_below_s = p.numbers[LIMIT.short_below_s]
        while True:
            queue = next_waiting(s)
            if queue < 0:
                break
            task = s.queues[queue, QUEUE.cursor]
            s.queues[queue, QUEUE.cursor] = s.tasks[task, TASK.next]
            # Who has been told to wait, when it came or after its trial.
            if s.times[task, TIME.note] > 0.0:
                continue
            cores = s.tasks[task, TASK.cores]
            if too_large(p, cores, s.tasks[task, TASK.memory]):
                p.knobs[KNOB.too_large] += 1
                return int(task), int(fixed)
            believed_s = length_s(s.times[task, TIME.estimate], cores, p.knobs[KNOB.by_core_time] != 0)
            tries = False
            if p.knobs[KNOB.tries] != 0:
                believed_s = math.nan
                what = asked(s, p, task, now_s)
                if what == HOLD:
                    continue
                tries = what == TRY
                if not tries:
                    p.knobs[KNOB.untried] += 1
            # Who is short, or is tried first, needs no belief about its wait.
            late = False
            if not tries and not believed_s < short_below_s:
                late = would_be_late(s, p, task, now_s)
            what = at_arrival(believed_s, short_below_s, late, tries)
            if what == TRY:
                p.knobs[KNOB.tried] += 1
                p.past[cores, TRIALS] += 1.0
                return int(task), int(fixed + cores)
            if what == ON_DEMAND:
                p.knobs[KNOB.rented] += 1
                return int(task), int(fixed)
            now_waits(s, p, task)
        p.knobs[KNOB.phase] = 2
        p.knobs[KNOB.at] = 0
    while p.knobs[KNOB.at] < s.counts[COUNT.active]:
        task = s.queues[s.active[p.knobs[KNOB.at]], QUEUE.first]
        if leaves_at_s(s.times[task, TIME.since], p.numbers[LIMIT.wait_below_s]) <= now_s:
            if p.knobs[KNOB.marks] != 0:
                p.marks[s.jobs[s.tasks[task, TASK.job], JOB.number]] = 1
            p.knobs[KNOB.gave_up] += 1
            return int(task), int(fixed)
        p.knobs[KNOB.at] += 1
    return -1, -1


def next_gone(s: State, p: Waiting, now_s: float) -> int:
    """The next job whose spot machine is gone; -1: there is none."""
    if len(p.lifetimes) > 0:
        for cores in range(1, p.knobs[KNOB.most] + 1):
            task = s.machines[p.knobs[KNOB.fixed] + cores, MACHINE.first]
            while task >= 0:
                if gone(s, task, now_s):
                    return int(task)
                task = s.tasks[task, TASK.next]
    return -1


def next_killed(s: State, p: Waiting, now_s: float) -> int:
    """The next job whose trial is over, or whose spot machine is gone; -1: there is none. Those that stay are taken
    aside."""
    if p.knobs[KNOB.tries] == 0:
        return -1
    task = next_gone(s, p, now_s)
    if task >= 0:
        return task
    while p.knobs[KNOB.at] <= p.knobs[KNOB.most]:
        cores = p.knobs[KNOB.at]
        machine = p.knobs[KNOB.fixed] + cores
        limit_s = tried_for_s(p.numbers[LIMIT.short_below_s], cores, p.knobs[KNOB.by_core_time] != 0)
        task = s.machines[machine, MACHINE.first]
        if task < 0 or s.times[task, TIME.began] + limit_s > now_s:
            p.knobs[KNOB.at] += 1
        elif after_trial(would_be_late(s, p, task, now_s)) == WAIT:
            return int(task)
        else:
            p.past[cores, TRIALS] -= 1.0
            known(p, cores, True, s.job_times[s.tasks[task, TASK.job], JOB_TIME.submitted], now_s)
            stays(s, task, machine, machine + p.knobs[KNOB.most])
            p.knobs[KNOB.stayed] += 1
    return -1


def schedule(s: State, p: Waiting, now_s: float) -> None:
    """One look: trials that are over, then all that starts. Each of `kill` and `start` stands here once: they are large
    where they are compiled."""
    p.knobs[KNOB.at] = 1
    while True:
        task = next_killed(s, p, now_s)
        if task < 0:
            break
        again = gone(s, task, now_s)
        kill(s, p, task, now_s)
        enqueue(s, task, s.counts[COUNT.tail], False)
        s.counts[COUNT.tail] += 1
        if again:
            p.knobs[KNOB.revoked] += 1
        else:
            now_waits(s, p, task)
    p.knobs[KNOB.phase] = 0
    rewind(s)
    while True:
        task, machine = next_start(s, p, now_s)
        if task < 0:
            break
        if machine >= p.knobs[KNOB.fixed]:
            rent(s, task, machine)
        start(s, p, task, machine, now_s)
    wake(s, p)
