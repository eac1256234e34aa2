"""The match maker as the engine's hooks: Algorithm 1 over the engine's machines. Kernels: compiled, no numba here.

All figures come from the functions of `ebbtide.matcher` that the live match maker calls with arrays.
"""

from __future__ import annotations

import math

from ebbtide.matcher.match.choices import choose as choose_machine
from ebbtide.matcher.predict.completion_probability import LANDMARK, failure_and_loss, form_now, outlook
from ebbtide.matcher.predict.expected_time import (
    aversion,
    expected_s,
    may_wait,
    release_s,
    remaining_s,
    restart_s,
    usable_duration_s,
)
from ebbtide.matcher.predict.knowledge import learn
from ebbtide.matcher.predict.landmarks import AGES, ANY_CORES, FREE, SIZES, STEPS
from ebbtide.matcher.predict.period import fill_lasts_of_period, stands, watch
from ebbtide.matcher.predict.rolling import GROWTH, SHRINK, leave, roll
from ebbtide.matcher.predict.rolling import begin as begin_interval
from ebbtide.matcher.predict.rolling import change as change_interval
from ebbtide.simulator.jobs.columns import LEAVING, MACHINE, TASK, TIME, State
from ebbtide.simulator.jobs.running import checkpoint_every_s
from ebbtide.simulator.matching.arrays import NUMBER, PROMISE, PROMISES, SWITCH, Matching
from ebbtide.simulator.matching.futures import KNOWN_EVERY_S
from ebbtide.simulator.nodes.backfilling import reservation


def begin(s: State, p: Matching, now_s: float) -> None:
    """A look at the queue: what is known is brought up to date, and promises of the last look are void."""
    p.promised[:] = 0
    roll(p.rolling, now_s)
    numbers = p.numbers
    if p.switches[SWITCH.form] == LANDMARK:
        watch(p.period, now_s)
    news = p.switches[SWITCH.news] > numbers[NUMBER.fresh_share] * p.knowledge.totals[0]
    if now_s < numbers[NUMBER.fresh_until] and not news:
        return
    learn(p.knowledge, p.rolling, now_s, p.switches[SWITCH.censored] != 0)
    if p.switches[SWITCH.form] == LANDMARK and p.period.clock[0] != numbers[NUMBER.looked]:
        p.knowledge.totals[2] = fill_lasts_of_period(p.period, p.knowledge.lasts)
        numbers[NUMBER.looked] = p.period.clock[0]
        if len(p.foreseen) > 0:
            _foresee(p, now_s)
    numbers[NUMBER.fresh_until] = now_s + numbers[NUMBER.fresh_s]
    p.switches[SWITCH.news] = 0


def _foresee(p: Matching, now_s: float) -> None:
    """What could be known of the VMs to come has its part of what is said of machines of any age."""
    numbers = p.numbers
    row = int(max(now_s - numbers[NUMBER.known_from_s], 0.0) / KNOWN_EVERY_S)
    row = min(row, len(p.foreseen) - 1)
    share = numbers[NUMBER.known_share]
    width = len(FREE) * (STEPS + 1)
    for size in range(SIZES + 1):
        for age in range(AGES):
            for cell in range(width):
                at = (size * AGES + age) * width + cell
                known = p.foreseen[row, size * width + cell]
                seen = p.knowledge.lasts[at]
                p.knowledge.lasts[at] = known if share >= 1.0 else seen + share * (known - seen)


def changed(s: State, p: Matching, machine: int, now_s: float, cores_before: int) -> None:
    """The engine's machines are the pool, and each change teaches."""
    cores = s.machines[machine, MACHINE.cores]
    roll(p.rolling, now_s)
    direction = GROWTH if cores > cores_before else SHRINK
    if cores == 0 and s.machines[machine, MACHINE.held] == LEAVING:
        # Given back by its owner: these cores were not taken away.
        leave(p.rolling, machine, now_s)
        _stands(p, machine, now_s, -1.0, direction)
        p.switches[SWITCH.news] += 1
        return
    if cores_before == 0:
        begin_interval(p.rolling, machine, now_s, GROWTH)
    else:
        change_interval(p.rolling, machine, now_s, direction, float(abs(cores - cores_before)), cores == 0)
    _stands(p, machine, now_s, float(cores), direction)
    p.switches[SWITCH.news] += 1


def _stands(p: Matching, machine: int, now_s: float, cores: float, direction: int) -> None:
    if p.switches[SWITCH.form] == LANDMARK:
        # Looks are taken of how machines stood then, so those up to now come before the change.
        watch(p.period, now_s)
        stands(p.period, machine, now_s, cores, direction)


def room_in_s(s: State, p: Matching, machine: int, task: int, now_s: float) -> float:
    """a of Eq. 2: how long until a machine has room for a task, by what runs there and what is promised."""
    need_cores = s.tasks[task, TASK.cores]
    need_mib = s.tasks[task, TASK.memory]
    if s.machines[machine, MACHINE.held] != 0 or s.machines[machine, MACHINE.cores] < need_cores:
        return math.inf
    if s.machines[machine, MACHINE.memory] < need_mib:
        return math.inf
    free_cores = s.machines[machine, MACHINE.cores] - s.machines[machine, MACHINE.used]
    free_mib = s.machines[machine, MACHINE.memory] - s.machines[machine, MACHINE.used_memory]
    count = 0
    for index in range(p.promised[machine]):
        cores, mib = int(p.promises[machine, index, PROMISE.cores]), int(p.promises[machine, index, PROMISE.memory])
        free_cores -= cores
        free_mib -= mib
        s.scratch_times[count] = p.promises[machine, index, PROMISE.ends]
        s.scratch[count] = cores
        s.scratch_more[count] = mib
        count += 1
    if free_cores >= need_cores and free_mib >= need_mib:
        return 0.0
    other = s.machines[machine, MACHINE.first]
    while other >= 0:
        left_s = remaining_s(s.times[other, TIME.expected], s.times[other, TIME.began], now_s)
        s.scratch_times[count] = now_s + left_s
        s.scratch[count] = s.tasks[other, TASK.cores]
        s.scratch_more[count] = s.tasks[other, TASK.memory]
        count += 1
        other = s.tasks[other, TASK.next]
    at_s, _, _ = reservation(
        s.scratch_times, s.scratch, s.scratch_more, count, free_cores, free_mib, need_cores, need_mib
    )
    return max(at_s - now_s, 0.0)


def left_free(
    s: State, p: Matching, machine: int, need: float, wait_s: float, duration_s: float, now_s: float
) -> float:
    """Cores that a task leaves free, with what others release in time where there is room now."""
    free = float(s.machines[machine, MACHINE.cores] - s.machines[machine, MACHINE.used]) - need
    if p.switches[SWITCH.releases] == 0 or wait_s > 0.0:
        return free
    by_s = release_s(duration_s)
    other = s.machines[machine, MACHINE.first]
    while other >= 0:
        if remaining_s(s.times[other, TIME.expected], s.times[other, TIME.began], now_s) <= by_s:
            free += float(s.tasks[other, TASK.cores])
        other = s.tasks[other, TASK.next]
    return free


def choose(s: State, p: Matching, task: int, now_s: float) -> int:
    """Algorithm 1: the machine with the least expected time; -1 if that is busy, and its room is promised then."""
    numbers = p.numbers
    knowledge = p.knowledge
    form = form_now(knowledge, p.switches[SWITCH.form])
    sized = p.switches[SWITCH.sized] != 0
    duration_s = usable_duration_s(s.times[task, TIME.estimate], 0.0, numbers[NUMBER.fallback_s])
    fresh = outlook(knowledge, form, sized, GROWTH, 0.0, 0.0, ANY_CORES)
    again, wasted = failure_and_loss(knowledge, form, fresh, duration_s)
    if math.isnan(again):
        again = 1.0 - numbers[NUMBER.unknown]
    restart = restart_s(1.0 - again, wasted, duration_s)
    weight = aversion(numbers[NUMBER.aversion], float(s.tasks[task, TASK.kills]), numbers[NUMBER.escalation])
    every_s = checkpoint_every_s(s, task)
    checkpoint_s = every_s if every_s > 0.0 else math.inf
    waited_s = now_s - s.times[task, TIME.since]
    need = s.tasks[task, TASK.cores]
    room = False
    for machine in range(len(s.machines)):
        wait_s = room_in_s(s, p, machine, task, now_s)
        p.waits[machine] = wait_s
        room = room or wait_s == 0.0
    delay = may_wait(p.switches[SWITCH.delay] != 0, waited_s, numbers[NUMBER.patience], duration_s, room)
    for machine in range(len(s.machines)):
        wait_s = p.waits[machine]
        p.expected[machine] = math.inf
        p.probability[machine] = math.nan
        if wait_s == math.inf or (wait_s > 0.0 and not delay):
            continue
        then_s = max(now_s - p.rolling.last_s[machine], 0.0) + wait_s
        cores = float(s.machines[machine, MACHINE.cores])
        free = left_free(s, p, machine, float(need), wait_s, duration_s, now_s)
        x = p.rolling.direction[machine]
        looks = outlook(knowledge, form, sized, x, then_s, free, cores)
        failure, wasted = failure_and_loss(knowledge, form, looks, duration_s)
        p.probability[machine] = 1.0 - failure
        if math.isnan(failure):
            failure = 1.0 - numbers[NUMBER.unknown]
        p.expected[machine] = expected_s(wait_s, failure, wasted, restart, duration_s, checkpoint_s, weight)
    idle = s.machines[:, MACHINE.cores] - s.machines[:, MACHINE.used]
    machine = choose_machine(
        p.expected, p.waits, p.probability, idle, duration_s, delay, numbers[NUMBER.spare], numbers[NUMBER.spread]
    )
    if machine < 0:
        return -1
    if p.waits[machine] == 0.0:
        s.times[task, TIME.note] = p.probability[machine]
        return machine
    index = p.promised[machine]
    if p.switches[SWITCH.promises] != 0 and index < PROMISES:
        p.promises[machine, index, PROMISE.ends] = now_s + p.waits[machine] + duration_s
        p.promises[machine, index, PROMISE.cores] = need
        p.promises[machine, index, PROMISE.memory] = s.tasks[task, TASK.memory]
        p.promised[machine] = index + 1
    return -1


def ended(s: State, p: Matching, task: int, machine: int, now_s: float, completed: bool) -> None:
    """What was predicted when a task started is held against what became of it."""
    predicted = s.times[task, TIME.note]
    if p.switches[SWITCH.check] == 0 or math.isnan(predicted):
        return
    index = min(int(predicted * 10.0), 9)
    p.outcomes[index] += 1.0
    p.predicted[index] += predicted
    p.observed[index] += 1.0 if completed else 0.0
    p.numbers[NUMBER.squares] += (predicted - (1.0 if completed else 0.0)) ** 2.0
