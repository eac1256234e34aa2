"""The waiting policy in the engine: a whole look at the queue of its own, and what it pays. Kernels, no numba here.

Fixed machines are filled first come, first served, work-conserving, best fit on cores (seed 002 §2.3); who finds no
room is asked once, when it comes or when its trial is over, whether it waits.
"""

from __future__ import annotations

import math

from simulator.jobs.columns import (
    C_ACTIVE,
    C_TAIL,
    F_BEGAN,
    F_ESTIMATE,
    F_LEFT,
    F_NOTE,
    F_QUEUED,
    F_SINCE,
    G_SUBMITTED,
    J_NUMBER,
    M_FIRST,
    M_USED,
    M_USED_MEMORY,
    Q_CURSOR,
    Q_FIRST,
    Q_LAST,
    S_FROM,
    S_TO,
    S_WAKE,
    T_BEFORE,
    T_CORES,
    T_JOB,
    T_KILLS,
    T_MEMORY,
    T_NEXT,
    T_ORDER,
    State,
)
from simulator.jobs.elastic import give_back, rent
from simulator.jobs.lists import enqueue, put_on, take_off
from simulator.jobs.measures import add, overlap
from simulator.jobs.nodes import choose as best_fit
from simulator.jobs.nodes import moved as node_moved
from simulator.jobs.passes import next_waiting, rewind
from simulator.jobs.running import kill, start
from simulator.waiting.arrays import (
    D_CORE_S,
    D_DELAY_S,
    D_DOLLARS,
    D_FIXED_CORE_S,
    D_JOBS,
    D_LATE,
    D_LOST_CORE_S,
    D_WAIT_S,
    K_AT,
    K_BY_CORE_TIME,
    K_DECISIONS,
    K_FIXED,
    K_GAVE_UP,
    K_LATE,
    K_MARKS,
    K_MOST,
    K_NEW,
    K_PHASE,
    K_RECORDED,
    K_RECORDS,
    K_RENTED,
    K_STAYED,
    K_STRIDE,
    K_TRIED,
    K_TRIES,
    N_SHORT_BELOW_S,
    N_WAIT_BELOW_S,
    Waiting,
)
from task_matcher.cluster_state import began as cluster_began
from task_matcher.cluster_state import describe
from task_matcher.cluster_state import ended as cluster_ended
from task_matcher.cluster_state import waits as cluster_waits
from task_matcher.cluster_state import waits_no_more as cluster_waits_no_more
from task_matcher.forest import predicted
from task_matcher.waiting import (
    CORE_HOUR,
    MIB_A_CORE,
    ON_DEMAND,
    TRY,
    WAIT,
    after_trial,
    at_arrival,
    leaves_at_s,
    length_s,
    rented_cores,
    tried_for_s,
)

_MARKS = 1
_FOREST = 2


def moved(s: State, p: Waiting, machine: int) -> None:
    """Fixed machines are chosen by what they have free; rented ones are not chosen."""
    if machine < p.knobs[K_FIXED]:
        node_moved(s, p.nodes, machine)


def started(s: State, p: Waiting, task: int, machine: int, now_s: float) -> None:
    """A job runs: what the cluster looks like has changed."""
    cores = float(s.tasks[task, T_CORES])
    if s.times[task, F_NOTE] > 0.0:
        cluster_waits_no_more(p.cluster, cores, s.times[task, F_SINCE])
        s.times[task, F_NOTE] = 0.0
    if machine < p.knobs[K_FIXED]:
        cluster_began(p.cluster, cores, float(s.tasks[task, T_MEMORY]), now_s)


def ended(s: State, p: Waiting, task: int, machine: int, now_s: float, completed: bool) -> None:
    """A job runs no more: it is paid for, and what it waited is entered."""
    cores = s.tasks[task, T_CORES]
    began_s = s.times[task, F_BEGAN]
    submitted_s = s.job_times[s.tasks[task, T_JOB], G_SUBMITTED]
    measured = s.sums[S_FROM] <= submitted_s < s.sums[S_TO]
    if machine < p.knobs[K_FIXED]:
        cluster_ended(p.cluster, float(cores), float(s.tasks[task, T_MEMORY]), began_s)
        add(p.sums, D_FIXED_CORE_S, cores * overlap(began_s, now_s, s.sums[S_FROM], s.sums[S_TO]))
    else:
        give_back(s, task, machine)
        # Jobs are billed in full wherever their hours lie: who waits first must not be cheaper for running later.
        if measured:
            paid = rented_cores(p.sizes, MIB_A_CORE, cores, s.tasks[task, T_MEMORY])
            add(p.sums, D_DOLLARS, paid * CORE_HOUR * (now_s - began_s) / 3600.0)
            add(p.sums, D_CORE_S, cores * (now_s - began_s))
            if not completed:
                add(p.sums, D_LOST_CORE_S, cores * (now_s - began_s))
    if completed and measured:
        add(p.sums, D_WAIT_S, s.times[task, F_QUEUED])
        add(p.sums, D_DELAY_S, max(now_s - s.times[task, F_LEFT] - submitted_s, 0.0))
        add(p.sums, D_JOBS, 1.0)
        if s.times[task, F_QUEUED] > 0.0:
            add(p.sums, D_LATE, 1.0)


def would_be_late(s: State, p: Waiting, task: int, now_s: float) -> bool:
    """Whether a job is believed to wait b or longer, if it waits from now on."""
    mark = False
    if len(p.marks) > 0:
        mark = p.marks[s.jobs[s.tasks[task, T_JOB], J_NUMBER]] != 0
    kind = p.knobs[K_LATE]
    if kind != _FOREST and p.knobs[K_RECORDS] == 0:
        return mark and kind == _MARKS
    describe(p.features, p.cluster, now_s, float(s.tasks[task, T_CORES]))
    if p.knobs[K_RECORDS] != 0:
        row = p.knobs[K_RECORDED]
        if p.knobs[K_DECISIONS] % p.knobs[K_STRIDE] == 0 and row < len(p.rows):
            for i in range(len(p.features)):
                p.rows[row, i] = p.features[i]
            p.labels[row] = 1.0 if mark else 0.0
            p.knobs[K_RECORDED] = row + 1
        p.knobs[K_DECISIONS] += 1
    if kind == _FOREST:
        return predicted(p.forest, p.features) >= 0.5
    return mark and kind == _MARKS


def now_waits(s: State, p: Waiting, task: int) -> None:
    """A job has been told to wait."""
    s.times[task, F_NOTE] = 1.0
    cluster_waits(p.cluster, float(s.tasks[task, T_CORES]), s.times[task, F_SINCE])


def stays(s: State, task: int, machine: int, now: int) -> None:
    """Take a rented job from the machine of trials to that of those who stay; it runs on."""
    take_off(s, task)
    s.machines[machine, M_USED] -= s.tasks[task, T_CORES]
    s.machines[machine, M_USED_MEMORY] -= s.tasks[task, T_MEMORY]
    give_back(s, task, machine)
    put_on(s, task, now)
    s.machines[now, M_USED] += s.tasks[task, T_CORES]
    s.machines[now, M_USED_MEMORY] += s.tasks[task, T_MEMORY]
    rent(s, task, now)


def point_at_new(s: State, p: Waiting) -> None:
    """Let the queues' cursors stand on the first that came since the last look."""
    for i in range(s.counts[C_ACTIVE]):
        queue = s.active[i]
        task = s.queues[queue, Q_LAST]
        first = -1
        while task >= 0 and s.tasks[task, T_ORDER] >= p.knobs[K_NEW]:
            first = task
            task = s.tasks[task, T_BEFORE]
        s.queues[queue, Q_CURSOR] = first


def wake(s: State, p: Waiting) -> None:
    """Ask to be woken when the next trial is over, or the next job has waited too long."""
    at_s = math.inf
    wait_s = p.numbers[N_WAIT_BELOW_S]
    if wait_s < math.inf:
        for i in range(s.counts[C_ACTIVE]):
            at_s = min(at_s, leaves_at_s(s.times[s.queues[s.active[i], Q_FIRST], F_SINCE], wait_s))
    if p.knobs[K_TRIES] != 0:
        for cores in range(1, p.knobs[K_MOST] + 1):
            task = s.machines[p.knobs[K_FIXED] + cores, M_FIRST]
            if task >= 0:
                limit_s = tried_for_s(p.numbers[N_SHORT_BELOW_S], cores, p.knobs[K_BY_CORE_TIME] != 0)
                at_s = min(at_s, s.times[task, F_BEGAN] + limit_s)
    s.sums[S_WAKE] = min(s.sums[S_WAKE], at_s)


def next_start(s: State, p: Waiting, now_s: float) -> tuple[int, int]:
    """Who starts next in this look, and where; (-1, -1): nobody any more.

    First the queue in its order on the fixed machines, then those that are new, then those that have waited too long.
    """
    fixed = p.knobs[K_FIXED]
    if p.knobs[K_PHASE] == 0:
        while True:
            queue = next_waiting(s)
            if queue < 0:
                break
            task = s.queues[queue, Q_CURSOR]
            machine = best_fit(s, p.nodes, task, now_s)
            if machine >= 0:
                s.queues[queue, Q_CURSOR] = s.tasks[task, T_NEXT]
                return int(task), machine
            s.queues[queue, Q_CURSOR] = -1
        point_at_new(s, p)
        p.knobs[K_NEW] = s.counts[C_TAIL]
        p.knobs[K_PHASE] = 1
    if p.knobs[K_PHASE] == 1:
        tries = p.knobs[K_TRIES] != 0
        short_below_s = p.numbers[N_SHORT_BELOW_S]
        while True:
            queue = next_waiting(s)
            if queue < 0:
                break
            task = s.queues[queue, Q_CURSOR]
            s.queues[queue, Q_CURSOR] = s.tasks[task, T_NEXT]
            if s.tasks[task, T_KILLS] > 0:
                continue
            cores = s.tasks[task, T_CORES]
            believed_s = length_s(s.times[task, F_ESTIMATE], cores, p.knobs[K_BY_CORE_TIME] != 0)
            # Who is short, or is tried first, needs no belief about its wait.
            late = False
            if not tries and believed_s >= short_below_s:
                late = would_be_late(s, p, task, now_s)
            what = at_arrival(believed_s, short_below_s, late, tries)
            if what == TRY:
                p.knobs[K_TRIED] += 1
                return int(task), int(fixed + cores)
            if what == ON_DEMAND:
                p.knobs[K_RENTED] += 1
                return int(task), int(fixed)
            now_waits(s, p, task)
        p.knobs[K_PHASE] = 2
        p.knobs[K_AT] = 0
    while p.knobs[K_AT] < s.counts[C_ACTIVE]:
        task = s.queues[s.active[p.knobs[K_AT]], Q_FIRST]
        if leaves_at_s(s.times[task, F_SINCE], p.numbers[N_WAIT_BELOW_S]) <= now_s:
            if p.knobs[K_MARKS] != 0:
                p.marks[s.jobs[s.tasks[task, T_JOB], J_NUMBER]] = 1
            p.knobs[K_GAVE_UP] += 1
            return int(task), int(fixed)
        p.knobs[K_AT] += 1
    return -1, -1


def next_killed(s: State, p: Waiting, now_s: float) -> int:
    """The next job whose trial is over and that shall wait; -1: there is none. Those that stay are taken aside."""
    if p.knobs[K_TRIES] == 0:
        return -1
    while p.knobs[K_AT] <= p.knobs[K_MOST]:
        cores = p.knobs[K_AT]
        machine = p.knobs[K_FIXED] + cores
        limit_s = tried_for_s(p.numbers[N_SHORT_BELOW_S], cores, p.knobs[K_BY_CORE_TIME] != 0)
        task = s.machines[machine, M_FIRST]
        if task < 0 or s.times[task, F_BEGAN] + limit_s > now_s:
            p.knobs[K_AT] += 1
        elif after_trial(would_be_late(s, p, task, now_s)) == WAIT:
            return int(task)
        else:
            stays(s, task, machine, machine + p.knobs[K_MOST])
            p.knobs[K_STAYED] += 1
    return -1


def schedule(s: State, p: Waiting, now_s: float) -> None:
    """One look: trials that are over, then all that starts. Each of `kill` and `start` stands here once: they are large
    where they are compiled."""
    p.knobs[K_AT] = 1
    while True:
        task = next_killed(s, p, now_s)
        if task < 0:
            break
        kill(s, p, task, now_s)
        enqueue(s, task, s.counts[C_TAIL], False)
        s.counts[C_TAIL] += 1
        now_waits(s, p, task)
    p.knobs[K_PHASE] = 0
    rewind(s)
    while True:
        task, machine = next_start(s, p, now_s)
        if task < 0:
            break
        if machine >= p.knobs[K_FIXED]:
            rent(s, task, machine)
        start(s, p, task, machine, now_s)
    wake(s, p)
