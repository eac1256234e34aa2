"""Looks at the queue that know of machine intervals (Wijayawardana 2025 §6.1, Algorithms 1 to 5). Kernels.

Who was refused is asked again only where the answer may be another: about machines that have grown since, about all
of them once a machine was switched or has grown older by a step. In between a refusal stands: time takes from what is
left of a step, and adds to the risk.
"""

from __future__ import annotations

import math

from ebbtide.matcher.policies.intervals import (
    aligned,
    fill_tails,
    is_big,
    mean_remaining_s,
    next_change_s,
    risk,
    since_change_s,
)
from ebbtide.simulator.intervals.arrays import (
    FACT,
    GROWN,
    H1,
    H2,
    H3,
    H4,
    NUMBER,
    ON_CONDITION,
    OTHERS,
    SHORTER_H,
    STABLE_ONES,
    Intervals,
)
from ebbtide.simulator.jobs.columns import COUNT, JOB_TIME, MACHINE, MACHINE_TIME, QUEUE, SUM, TASK, TIME, State
from ebbtide.simulator.jobs.machines import free_cores, free_mib
from ebbtide.simulator.jobs.running import start
from ebbtide.simulator.nodes.tree import change as change_tree
from ebbtide.simulator.nodes.tree import first_at_least

#: Looks this share of a step before an instant count as being there: of times that rounding may have moved.
_EARLY = 1e-6


def changed(s: State, p: Intervals, machine: int, now_s: float, cores_before: int) -> None:
    """A machine has another size: all is asked again. One that goes off ends an interval."""
    p.facts[FACT.all] = 1
    if cores_before == 0 or s.machines[machine, MACHINE.cores] != 0:
        return
    steps = int((now_s - s.machine_times[machine, MACHINE_TIME.changed]) / p.numbers[NUMBER.every_s] + 0.5)
    steps = min(max(steps, 0), len(p.met) - 1)
    p.met[steps] += 1.0
    if p.facts[FACT.learns] != 0:
        p.ended[p.bands[machine], steps] += 1.0
        p.facts[FACT.news] = 1


def ended(s: State, p: Intervals, task: int, machine: int, now_s: float, completed: bool) -> None:
    """Count a kill, within the window in which work is measured, by how long the job runs."""
    if completed or not s.sums[SUM.from_s] <= now_s < s.sums[SUM.to_s]:
        return
    runtime_s = s.job_times[s.tasks[task, TASK.job], JOB_TIME.longest]
    p.killed[0] += 1.0
    for place in range(len(SHORTER_H)):
        if runtime_s < SHORTER_H[place] * 3600.0:
            p.killed[1 + place] += 1.0


def moved(s: State, p: Intervals, machine: int) -> None:
    """Take in what a machine has free now."""
    spare_mib = free_mib(s, machine)
    free = free_cores(s, machine)
    if free > p.known[machine] or spare_mib > p.spare[machine]:
        count = p.facts[FACT.grown]
        if count < GROWN:
            p.grown[count] = machine
            p.facts[FACT.grown] = count + 1
        else:
            p.facts[FACT.all] = 1
    p.spare[machine] = spare_mib
    if free != p.known[machine]:
        p.known[machine] = free
        change_tree(p.tree, machine, free)


def outlasts(s: State, p: Intervals, machine: int, runtime_s: float, now_s: float) -> bool:
    """Whether a machine may be trusted with a job that is asked about (Algorithms 3 and 4)."""
    every_s = p.numbers[NUMBER.every_s]
    row = p.bands[machine]
    uptime_s = now_s - s.machine_times[machine, MACHINE_TIME.changed]
    heeds = p.facts[FACT.heeds]
    if heeds & H3 != 0 and mean_remaining_s(p.tails[row], p.sums[row], every_s, uptime_s) < runtime_s:
        return False
    if heeds & H4 != 0:
        return bool(risk(p.tails[row], every_s, uptime_s, runtime_s) < p.numbers[NUMBER.aggressiveness])
    return True


def asks_for(p: Intervals, cores: int, runtime_s: float) -> int:
    """What a task asks for: STABLE_ONES, OTHERS or ON_CONDITION."""
    heeds = p.facts[FACT.heeds]
    if heeds & H1 != 0 and is_big(runtime_s, cores, p.numbers[NUMBER.big_core_s]):
        return STABLE_ONES
    asked = heeds & H4 != 0 and (heeds & H2 == 0 or runtime_s > p.numbers[NUMBER.every_s])
    if asked or (heeds & H3 != 0 and runtime_s > p.numbers[NUMBER.long_s]):
        return ON_CONDITION
    return OTHERS


def worth_asking(s: State, p: Intervals, task: int, now_s: float) -> bool:
    """Whether a task may start in this look for all that is known: it is the time for it, and none like it failed."""
    cores = s.tasks[task, TASK.cores]
    runtime_s = s.times[task, TIME.estimate]
    what = asks_for(p, cores, runtime_s)
    small = what != STABLE_ONES and p.facts[FACT.heeds] & H2 != 0
    if small and not aligned(runtime_s, now_s, p.numbers[NUMBER.every_s]):
        return False
    return bool(runtime_s < p.hopeless[what, cores])


def choose(s: State, p: Intervals, task: int, now_s: float, every: bool) -> int:
    """The first machine that fits and is not ruled out; -1 if there is none (Algorithm 5).

    :param every: ask about all machines; False: about those that have grown.
    """
    cores = s.tasks[task, TASK.cores]
    memory_mib = s.tasks[task, TASK.memory]
    runtime_s = s.times[task, TIME.estimate]
    what = asks_for(p, cores, runtime_s)
    stable = p.facts[FACT.stable]
    first = 0
    end = len(s.machines)
    if what == STABLE_ONES:
        end = stable
    elif p.facts[FACT.heeds] & H1 != 0:
        first = stable
    found = -1
    # Stable machines are never switched off: nothing is asked about them.
    if every:
        machine = first_at_least(p.tree, first, cores)
        while 0 <= machine < end:
            onward = machine + 1
            if p.spare[machine] >= memory_mib:
                if what != ON_CONDITION or machine < stable:
                    found = machine
                    break
                if runtime_s < p.refused_s[machine] and outlasts(s, p, machine, runtime_s, now_s):
                    found = machine
                    break
                # Those that were switched on with it are like it.
                onward = p.after[machine]
            machine = first_at_least(p.tree, onward, cores)
    else:
        for place in range(p.facts[FACT.grown]):
            machine = p.grown[place]
            if machine < first or machine >= end or (0 <= found <= machine):
                continue
            if p.known[machine] < cores or p.spare[machine] < memory_mib:
                continue
            if what != ON_CONDITION or machine < stable or outlasts(s, p, machine, runtime_s, now_s):
                found = machine
    if found < 0 and memory_mib == 0:
        # Room only shrinks within a look, and a longer job is not easier to place.
        p.hopeless[what, cores] = runtime_s if what == ON_CONDITION else -1.0
    return int(found)


def refused_from_s(s: State, p: Intervals, machine: int, now_s: float) -> float:
    """A runtime from which a machine that may be switched off takes no task under a condition; maybe not the
    shortest."""
    every_s = p.numbers[NUMBER.every_s]
    # Longer than all intervals that are known.
    high_s = every_s * (p.tails.shape[1] + 1)
    if outlasts(s, p, machine, high_s, now_s):
        return math.inf
    low_s = 0.0
    while high_s > low_s + 0.1 * every_s:
        middle_s = low_s + 0.5 * (high_s - low_s)
        if outlasts(s, p, machine, middle_s, now_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return float(high_s)


def refused_by_grown_s(p: Intervals) -> float:
    """The same of all machines that have grown, as it was when all were asked last: what is left only falls since."""
    found_s = 0.0
    for place in range(p.facts[FACT.grown]):
        found_s = max(found_s, p.refused_s[p.grown[place]])
    return found_s


def refused_by_all_s(s: State, p: Intervals, now_s: float) -> float:
    """The same of all machines, whatever they have free. Those that were switched on together are one."""
    stable = p.facts[FACT.stable]
    found_s = math.inf if stable > 0 and p.facts[FACT.heeds] & H1 == 0 else 0.0
    refused_s = 0.0
    since_s = math.nan
    band = -1
    above = after = len(s.machines)
    for machine in range(len(s.machines) - 1, stable - 1, -1):
        if s.machines[machine, MACHINE.cores] == 0:
            continue
        if s.machine_times[machine, MACHINE_TIME.changed] != since_s or p.bands[machine] != band:
            since_s = s.machine_times[machine, MACHINE_TIME.changed]
            band = p.bands[machine]
            after = above
            refused_s = refused_from_s(s, p, machine, now_s)
            found_s = max(found_s, refused_s)
        p.refused_s[machine] = refused_s
        p.after[machine] = after
        above = machine
    return found_s


def least_core_s(s: State, p: Intervals, queue: int) -> float:
    """The least core-time that a task of a queue has left: where there are checkpoints, one that was killed has any."""
    if s.sums[SUM.checkpoint_every] > 0.0:
        return 0.0
    return float(p.edges[s.queues[queue, QUEUE.rank]])


def hopeless_queue(s: State, p: Intervals, queue: int) -> bool:
    """Whether no task of a queue can start in this look: whatever one of them asks for, it is too long for it.

    A queue holds tasks of one class of core-time (`Settings.by_length`).
    """
    heeds = p.facts[FACT.heeds]
    cores = s.queues[queue, QUEUE.cores]
    low = least_core_s(s, p, queue)
    # Rounding may have put a task beyond the class's end.
    high = p.edges[s.queues[queue, QUEUE.rank] + 1] * (1.0 + 1e-8)
    least_s = low / cores
    most_s = high / cores
    every_s = p.numbers[NUMBER.every_s]
    if heeds & H1 != 0 and high >= p.numbers[NUMBER.big_core_s] and least_s < p.hopeless[STABLE_ONES, cores]:
        return False
    if heeds & H1 != 0 and low >= p.numbers[NUMBER.big_core_s]:
        return True
    conditional = heeds & (H3 | H4) != 0
    free = True
    if heeds & (H3 | H4) == H4:
        conditional = heeds & H2 == 0 or most_s > every_s
        free = heeds & H2 != 0 and least_s <= every_s
    elif heeds & (H3 | H4) == H3:
        conditional = most_s > p.numbers[NUMBER.long_s]
        free = least_s <= p.numbers[NUMBER.long_s]
    if conditional and least_s < p.hopeless[ON_CONDITION, cores]:
        return False
    # Jobs of at most a step wait for the next one, if that comes too soon for all of them.
    waits = heeds & H2 != 0 and least_s >= p.numbers[NUMBER.left_s]
    waits = waits and (most_s <= every_s or heeds & (H3 | H4) == H4)
    return bool(not free or waits or least_s >= p.hopeless[OTHERS, cores])


def settle(s: State, p: Intervals, queue: int, now_s: float, before: int) -> bool:
    """Move a queue's cursor on to the next task that is worth asking; False: there is none up to that place."""
    task = s.queues[queue, QUEUE.cursor]
    if task >= 0 and hopeless_queue(s, p, queue):
        task = -1
    while task >= 0 and s.tasks[task, TASK.order] < before:
        if worth_asking(s, p, task, now_s):
            s.queues[queue, QUEUE.cursor] = task
            return True
        task = s.tasks[task, TASK.next]
    s.queues[queue, QUEUE.cursor] = -1
    return False


def earlier(s: State, one: int, other: int) -> bool:
    """Whether the task at one queue's cursor came before that at another's."""
    first = s.tasks[s.queues[one, QUEUE.cursor], TASK.order]
    return bool(first < s.tasks[s.queues[other, QUEUE.cursor], TASK.order])


def sift(s: State, place: int, count: int) -> None:
    """Let a queue sink in the heap of queues, which is in ``scratch``: the earliest is first."""
    queue = s.scratch[place]
    while True:
        below = 2 * place + 1
        if below >= count:
            break
        if below + 1 < count and earlier(s, s.scratch[below + 1], s.scratch[below]):
            below += 1
        if not earlier(s, s.scratch[below], queue):
            break
        s.scratch[place] = s.scratch[below]
        place = below
    s.scratch[place] = queue


def ask(s: State, p: Intervals, now_s: float, every: bool) -> None:
    """Ask those that wait, first come, first served.

    :param every: those that were not asked before, about all machines; False: the others, about those that have grown.
    """
    stable_s = others_s = math.inf
    longest_s = p.numbers[NUMBER.never_s]
    if not every:
        longest_s = refused_by_grown_s(p)
        if p.facts[FACT.heeds] & H1 != 0:
            # The first machine tells for which of both there is room at all, if only one has grown.
            on_stable = p.grown[0] < p.facts[FACT.stable]
            if p.facts[FACT.grown] == 1 and on_stable:
                others_s = longest_s = -1.0
            elif p.facts[FACT.grown] == 1:
                stable_s = -1.0
    for cores in range(p.hopeless.shape[1]):
        p.hopeless[STABLE_ONES, cores] = stable_s
        p.hopeless[OTHERS, cores] = others_s
        p.hopeless[ON_CONDITION, cores] = longest_s
    asked = p.facts[FACT.asked]
    before = s.counts[COUNT.tail] if every else asked
    most = most_grown(p)
    count = 0
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        task = -1
        if every:
            other = s.queues[queue, QUEUE.first]
            # All of a queue, as where all are asked again, or its last few.
            if s.tasks[other, TASK.order] >= asked:
                task = other
            else:
                other = s.queues[queue, QUEUE.last]
                while s.tasks[other, TASK.order] >= asked:
                    task = other
                    other = s.tasks[other, TASK.before]
        elif s.queues[queue, QUEUE.cores] <= most:
            task = s.queues[queue, QUEUE.first]
        if task >= 0:
            s.queues[queue, QUEUE.cursor] = task
            if settle(s, p, queue, now_s, before):
                s.scratch[count] = queue
                count += 1
    for place in range(count // 2 - 1, -1, -1):
        sift(s, place, count)
    while count > 0:
        queue = s.scratch[0]
        task = s.queues[queue, QUEUE.cursor]
        machine = -1
        if worth_asking(s, p, task, now_s):
            machine = choose(s, p, task, now_s, every)
        s.queues[queue, QUEUE.cursor] = s.tasks[task, TASK.next]
        if machine >= 0:
            start(s, p, task, machine, now_s)
        if not settle(s, p, queue, now_s, before):
            count -= 1
            s.scratch[0] = s.scratch[count]
        if count > 0:
            sift(s, 0, count)


def ask_newest(s: State, p: Intervals, now_s: float) -> None:
    """`ask` about all machines, if a single task was not asked before: the newest."""
    task = s.counts[COUNT.newest]
    cores = s.tasks[task, TASK.cores]
    p.hopeless[STABLE_ONES, cores] = p.hopeless[OTHERS, cores] = math.inf
    p.hopeless[ON_CONDITION, cores] = p.numbers[NUMBER.never_s]
    if worth_asking(s, p, task, now_s):
        machine = choose(s, p, task, now_s, True)
        if machine >= 0:
            start(s, p, task, machine, now_s)


def is_new(s: State, p: Intervals, task: int) -> bool:
    """Whether a task waits that was not asked before."""
    return bool(s.tasks[task, TASK.machine] == -1 and s.tasks[task, TASK.order] >= p.facts[FACT.asked])


def most_grown(p: Intervals) -> int:
    """The most free cores of a machine that has grown."""
    most = 0
    for place in range(p.facts[FACT.grown]):
        most = max(most, p.known[p.grown[place]])
    return int(most)


def wake(s: State, p: Intervals, now_s: float) -> None:
    """Time alone may let one start that is not big; after the last change of all it does not."""
    heeds = p.facts[FACT.heeds]
    if heeds & (H2 | H4) == 0:
        return
    if s.counts[COUNT.more_changes] == 0 and s.counts[COUNT.next_change] >= len(s.change_at):
        return
    at_s = next_change_s(now_s, p.numbers[NUMBER.every_s])
    big_core_s = p.numbers[NUMBER.big_core_s]
    # Queues of whose tasks none is big tell at once.
    for i in range(s.counts[COUNT.active]):
        if heeds & H1 == 0 or p.edges[s.queues[s.active[i], QUEUE.rank] + 1] * (1.0 + 1e-8) < big_core_s:
            s.sums[SUM.wake] = min(s.sums[SUM.wake], at_s)
            return
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        task = s.queues[queue, QUEUE.first] if least_core_s(s, p, queue) < big_core_s else -1
        while task >= 0:
            if asks_for(p, s.tasks[task, TASK.cores], s.times[task, TIME.estimate]) != STABLE_ONES:
                s.sums[SUM.wake] = min(s.sums[SUM.wake], at_s)
                return
            task = s.tasks[task, TASK.next]


def due_s(s: State, p: Intervals, now_s: float) -> float:
    """When a refusal may stand no longer: at the next instant of switches, or when a machine is a step older."""
    heeds = p.facts[FACT.heeds]
    every_s = p.numbers[NUMBER.every_s]
    at_s = math.inf
    if heeds & H2 != 0:
        at_s = next_change_s(now_s, every_s)
    if heeds & (H3 | H4) != 0:
        for machine in range(p.facts[FACT.stable], len(s.machines)):
            if s.machines[machine, MACHINE.cores] != 0:
                since_s = s.machine_times[machine, MACHINE_TIME.changed]
                at_s = min(at_s, since_s + next_change_s(now_s - since_s, every_s))
    return float(at_s - _EARLY * every_s)


def schedule(s: State, p: Intervals, now_s: float) -> None:
    """One look: first come, first served, and who cannot start is passed over; what class a task has plays no part."""
    if s.counts[COUNT.active] == 0:
        # Nobody was refused.
        p.facts[FACT.grown] = 0
        p.facts[FACT.asked] = s.counts[COUNT.tail]
        return
    if p.facts[FACT.news] != 0:
        p.facts[FACT.news] = 0
        p.facts[FACT.all] = 1
        for row in range(len(p.ended)):
            fill_tails(p.ended[row], p.tails[row], p.sums[row])
    every_s = p.numbers[NUMBER.every_s]
    since_s = since_change_s(now_s, every_s)
    p.numbers[NUMBER.left_s] = every_s - since_s if not aligned(every_s, now_s, every_s) else math.inf
    wake(s, p, now_s)
    # Who was killed may wait before all others, and was not asked there.
    before_all = p.facts[FACT.head] != s.counts[COUNT.head]
    if p.facts[FACT.all] != 0 or before_all or now_s >= p.numbers[NUMBER.due_s]:
        p.facts[FACT.all] = 0
        p.facts[FACT.head] = s.counts[COUNT.head]
        p.facts[FACT.asked] = s.counts[COUNT.head]
        p.numbers[NUMBER.due_s] = due_s(s, p, now_s)
        p.numbers[NUMBER.never_s] = refused_by_all_s(s, p, now_s) if p.facts[FACT.heeds] & (H3 | H4) != 0 else math.inf
    elif p.facts[FACT.grown] > 0:
        ask(s, p, now_s, False)
    if s.counts[COUNT.tail] == p.facts[FACT.asked] + 1 and is_new(s, p, s.counts[COUNT.newest]):
        ask_newest(s, p, now_s)
    elif s.counts[COUNT.tail] > p.facts[FACT.asked]:
        ask(s, p, now_s, True)
    p.facts[FACT.asked] = s.counts[COUNT.tail]
    p.facts[FACT.grown] = 0
