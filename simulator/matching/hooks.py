"""The match maker as the engine's hooks: Algorithm 1 over the engine's machines. Kernels: compiled, no numba here.

All figures come from the functions of `task_matcher` that the live match maker calls with arrays.
"""

from __future__ import annotations

import math

from simulator.jobs.columns import (
    F_BEGAN,
    F_ESTIMATE,
    F_EXPECTED,
    F_NOTE,
    LEAVING,
    M_CORES,
    M_FIRST,
    M_HELD,
    M_MEMORY,
    M_USED,
    M_USED_MEMORY,
    S_CHECKPOINT_EVERY,
    T_CORES,
    T_KILLS,
    T_MEMORY,
    T_NEXT,
    State,
)
from simulator.matching.arrays import (
    K_CENSORED,
    K_CHECK,
    K_DELAY,
    K_FORM,
    K_NEWS,
    K_PERIOD,
    K_PROMISES,
    K_SIZED,
    N_DISLIKE,
    N_ESCALATION,
    N_FALLBACK_S,
    N_FRESH_S,
    N_FRESH_SHARE,
    N_FRESH_UNTIL,
    N_LOOKED,
    N_SPARE,
    N_SPREAD,
    N_SQUARES,
    N_UNKNOWN,
    PROMISES,
    R_CORES,
    R_ENDS,
    R_MEMORY,
    Matching,
)
from task_matcher.backfilling import reservation
from task_matcher.choices import choose as choose_machine
from task_matcher.knowledge import LANDMARK, NEXT_CHANGE, failures, learn, stand
from task_matcher.landmarks import LEAST, fill_lasts, look, remember
from task_matcher.period import fill_lasts_of_period, stands, watch
from task_matcher.probabilities import aversion, expected_s, remaining_s, restart_s, usable_duration_s
from task_matcher.rolling import GROWTH, SHRINK, leave, roll
from task_matcher.rolling import begin as begin_interval
from task_matcher.rolling import change as change_interval


def begin(s: State, p: Matching, now_s: float) -> None:
    """A look at the queue: what is known is brought up to date, and promises of the last look are void."""
    p.promised[:] = 0
    roll(p.rolling, now_s)
    numbers = p.numbers
    if p.switches[K_PERIOD] != 0:
        watch(p.period, now_s)
    elif p.switches[K_FORM] == LANDMARK:
        look(p.marks, now_s)
    news = p.switches[K_NEWS] > numbers[N_FRESH_SHARE] * p.knowledge.totals[0]
    if now_s < numbers[N_FRESH_UNTIL] and not news:
        return
    learn(p.knowledge, p.rolling, now_s, p.switches[K_CENSORED] != 0)
    if p.switches[K_PERIOD] != 0:
        if p.period.clock[0] != numbers[N_LOOKED]:
            p.knowledge.totals[2] = fill_lasts_of_period(p.period, p.knowledge.lasts)
            numbers[N_LOOKED] = p.period.clock[0]
    elif p.switches[K_FORM] == LANDMARK and p.marks.clock[0] != numbers[N_LOOKED]:
        p.knowledge.totals[2] = fill_lasts(p.marks, p.knowledge.lasts)
        numbers[N_LOOKED] = p.marks.clock[0]
    numbers[N_FRESH_UNTIL] = now_s + numbers[N_FRESH_S]
    p.switches[K_NEWS] = 0


def changed(s: State, p: Matching, machine: int, now_s: float, cores_before: int) -> None:
    """The engine's machines are the pool, and each change teaches."""
    cores = s.machines[machine, M_CORES]
    roll(p.rolling, now_s)
    direction = GROWTH if cores > cores_before else SHRINK
    if cores == 0 and s.machines[machine, M_HELD] == LEAVING:
        # Given back by its owner: nobody took these cores away.
        leave(p.rolling, machine, now_s)
        _stands(p, machine, now_s, -1.0, direction)
        p.switches[K_NEWS] += 1
        return
    if cores_before == 0:
        begin_interval(p.rolling, machine, now_s, GROWTH)
    else:
        change_interval(p.rolling, machine, now_s, direction, float(abs(cores - cores_before)), cores == 0)
    _stands(p, machine, now_s, float(cores), direction)
    p.switches[K_NEWS] += 1


def _stands(p: Matching, machine: int, now_s: float, cores: float, direction: int) -> None:
    remember(p.marks, machine, now_s, cores, direction)
    if p.switches[K_PERIOD] != 0:
        # Looks are taken of how machines stood then, so those up to now come before the change.
        watch(p.period, now_s)
        stands(p.period, machine, now_s, cores, direction)


def room_in_s(s: State, p: Matching, machine: int, task: int, now_s: float) -> float:
    """a of Eq. 2: how long until a machine has room for a task, by what runs there and what is promised."""
    need_cores = s.tasks[task, T_CORES]
    need_mib = s.tasks[task, T_MEMORY]
    if s.machines[machine, M_HELD] != 0 or s.machines[machine, M_CORES] < need_cores:
        return math.inf
    if s.machines[machine, M_MEMORY] < need_mib:
        return math.inf
    free_cores = s.machines[machine, M_CORES] - s.machines[machine, M_USED]
    free_mib = s.machines[machine, M_MEMORY] - s.machines[machine, M_USED_MEMORY]
    count = 0
    for index in range(p.promised[machine]):
        cores, mib = int(p.promises[machine, index, R_CORES]), int(p.promises[machine, index, R_MEMORY])
        free_cores -= cores
        free_mib -= mib
        s.scratch_times[count] = p.promises[machine, index, R_ENDS]
        s.scratch[count] = cores
        s.scratch_more[count] = mib
        count += 1
    if free_cores >= need_cores and free_mib >= need_mib:
        return 0.0
    other = s.machines[machine, M_FIRST]
    while other >= 0:
        left_s = remaining_s(s.times[other, F_EXPECTED], s.times[other, F_BEGAN], now_s)
        s.scratch_times[count] = now_s + left_s
        s.scratch[count] = s.tasks[other, T_CORES]
        s.scratch_more[count] = s.tasks[other, T_MEMORY]
        count += 1
        other = s.tasks[other, T_NEXT]
    at_s, _, _ = reservation(
        s.scratch_times, s.scratch, s.scratch_more, count, free_cores, free_mib, need_cores, need_mib
    )
    return max(at_s - now_s, 0.0)


def choose(s: State, p: Matching, task: int, now_s: float) -> int:
    """Algorithm 1: the machine with the least expected time; -1 if that is busy, and its room is promised then."""
    numbers = p.numbers
    knowledge = p.knowledge
    form = p.switches[K_FORM]
    if form == LANDMARK and knowledge.totals[2] < LEAST:
        form = NEXT_CHANGE
    sized = p.switches[K_SIZED] != 0
    duration_s = usable_duration_s(s.times[task, F_ESTIMATE], 0.0, numbers[N_FALLBACK_S])
    anew, wasted = failures(knowledge, form, stand(knowledge, form, sized, GROWTH, 0.0, 0.0), duration_s)
    if math.isnan(anew):
        anew = 1.0 - numbers[N_UNKNOWN]
    restart = restart_s(1.0 - anew, wasted, duration_s)
    weight = aversion(numbers[N_DISLIKE], float(s.tasks[task, T_KILLS]), numbers[N_ESCALATION])
    checkpoint_s = s.sums[S_CHECKPOINT_EVERY] if s.sums[S_CHECKPOINT_EVERY] > 0.0 else math.inf
    need = s.tasks[task, T_CORES]
    for machine in range(len(s.machines)):
        wait_s = room_in_s(s, p, machine, task, now_s)
        p.waits[machine] = wait_s
        p.expected[machine] = math.inf
        p.probability[machine] = math.nan
        if wait_s == math.inf or (wait_s > 0.0 and p.switches[K_DELAY] == 0):
            continue
        then_s = max(now_s - p.rolling.last_s[machine], 0.0) + wait_s
        free = float(s.machines[machine, M_CORES] - s.machines[machine, M_USED] - need)
        x = p.rolling.direction[machine]
        failure, wasted = failures(knowledge, form, stand(knowledge, form, sized, x, then_s, free), duration_s)
        p.probability[machine] = 1.0 - failure
        if math.isnan(failure):
            failure = 1.0 - numbers[N_UNKNOWN]
        p.expected[machine] = expected_s(wait_s, failure, wasted, restart, duration_s, checkpoint_s, weight)
    delay = p.switches[K_DELAY] != 0
    used = s.machines[:, M_USED]
    machine = choose_machine(
        p.expected, p.waits, p.probability, used, duration_s, delay, numbers[N_SPARE], numbers[N_SPREAD]
    )
    if machine < 0:
        return -1
    if p.waits[machine] == 0.0:
        s.times[task, F_NOTE] = p.probability[machine]
        return machine
    index = p.promised[machine]
    if p.switches[K_PROMISES] != 0 and index < PROMISES:
        p.promises[machine, index, R_ENDS] = now_s + p.waits[machine] + duration_s
        p.promises[machine, index, R_CORES] = need
        p.promises[machine, index, R_MEMORY] = s.tasks[task, T_MEMORY]
        p.promised[machine] = index + 1
    return -1


def ended(s: State, p: Matching, task: int, machine: int, now_s: float, completed: bool) -> None:
    """What was predicted when a task started is held against what became of it."""
    predicted = s.times[task, F_NOTE]
    if p.switches[K_CHECK] == 0 or math.isnan(predicted):
        return
    index = min(int(predicted * 10.0), 9)
    p.outcomes[index] += 1.0
    p.predicted[index] += predicted
    p.observed[index] += 1.0 if completed else 0.0
    p.numbers[N_SQUARES] += (predicted - (1.0 if completed else 0.0)) ** 2.0
