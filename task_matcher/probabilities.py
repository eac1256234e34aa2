"""Completion probability and expected completion time (seed 000 §3.1, Eq. 1 and 2, App. B.2).

Kernel functions: each works alike on one machine (compiled, in the simulator) and on arrays over machines (live), so
there is one copy of the policy. Unknown is NaN, and stays NaN through all of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from task_matcher.ages import Value, interpolate, position

#: The worst machine of Eq. 2 completes a task at least this often: a task is not restarted for ever.
LEAST_PROBABILITY: Final = 0.02
#: A task that runs longer than it was said to is expected to take this share of its age longer.
OVERRUN: Final = 0.25


def lives_on(hazard: Any, known: Any, elapsed_s: Value, duration_s: Value) -> Value:
    """``P(X > e + d | X > e)``; NaN where nothing is known of ages like e."""
    begin = position(elapsed_s)
    end = position(elapsed_s + duration_s)
    first, last = np.int64(begin), np.int64(end)
    lived = interpolate(hazard, first, begin - first)
    return np.exp(lived - interpolate(hazard, last, end - last)) + known[first]


def lives_and_wastes(hazard: Any, area: Any, known: Any, elapsed_s: Value, duration_s: Value) -> tuple[Value, Value]:
    """What :func:`lives_on` says, and w of Eq. 2: ``E(X - e | e < X < e + d)``, half of d where no change can come.

    :param area: the integral of survival up to each edge; s.
    """
    begin = position(elapsed_s)
    end = position(elapsed_s + duration_s)
    first, last = np.int64(begin), np.int64(end)
    part, rest = begin - first, end - last
    lived = interpolate(hazard, first, part)
    lives = np.exp(lived - interpolate(hazard, last, rest))
    spent = (interpolate(area, last, rest) - interpolate(area, first, part)) * np.exp(lived)
    # A little of one half of d is mixed in: where hardly any change can come, the difference of nearly equal numbers
    # says nothing.
    wasted = (spent - duration_s * lives + 0.5e-3 * duration_s) / (1.001 - lives)
    return lives + known[first], np.minimum(np.maximum(wasted, 0.0), duration_s)


def completes(shrink_probability: Value, lives: Value) -> Value:
    """Eq. 1: ``P_c = 1 - P_s(x) * (1 - P(X > e + d | X > e))``."""
    return 1.0 - shrink_probability * (1.0 - lives)


def wasted_evenly_s(probability: Value, duration_s: Value) -> Value:
    """w where only P_c is known: a task that fails does so at an even rate."""
    rate = np.minimum(np.maximum(-np.log(np.fmax(probability, 1e-250)), 1e-4), 600.0)
    return duration_s * (1.0 / rate - 1.0 / np.expm1(rate))


def restart_s(probability: Value, wasted: Value, duration_s: Value) -> Value:
    """``E_wc(g, 0, 0, d)``: Eq. 2 solved for a machine that has just grown, which refers to itself."""
    least = np.fmax(probability, LEAST_PROBABILITY)
    return duration_s + (1.0 - least) / least * wasted


def expected_s(
    wait_s: Value,
    probability: Value,
    wasted: Value,
    restart: Value,
    duration_s: float,
    checkpoint_s: float,
    aversion: float,
) -> Value:
    """Eq. 2: ``E_wc = a + p * d + (1 - p) * (w + E_wc(g, 0, 0, d))`` in seconds.

    Beyond the paper, and nothing with its values: a task that saves its work every ``checkpoint_s`` (infinite: never)
    has only the rest to do again; ``aversion`` counts a preemption as so many durations of the task.
    """
    fails = 1.0 - probability
    again = restart
    if checkpoint_s < np.inf:
        saved = np.maximum(wasted - 0.5 * checkpoint_s, 0.0) / max(duration_s, 1e-9)
        again = restart * (1.0 - np.minimum(saved, 1.0))
    found = wait_s + probability * duration_s + fails * (wasted + again)
    if aversion > 0.0:
        found = found + aversion * duration_s * fails
    return found


def aversion(dislike: Value, attempts: Value, escalation: Value) -> Value:
    """How many durations a preemption counts: none for dislike 0, one for one half, all for 1; more with each attempt.

    :param dislike: of preemption, 0 to 1.
    :param attempts: how often the task was preempted already.
    :param escalation: durations for each of them; 0: the paper's rule.
    """
    dislike = np.fmin(np.fmax(dislike, 0.0), 1.0 - 1e-6)
    return dislike / (1.0 - dislike) + escalation * attempts


def usable_duration_s(estimate_s: Value, ran_s: Value, fallback_s: Value) -> Value:
    """How long a task is taken to run, whatever was said of it.

    Missing (NaN), negative and infinite estimates count as ``fallback_s``; 0 is what it says. A task that has already
    run for ``ran_s`` without an end takes at least that long, and a share more: no estimate is right that time has
    refuted.
    """
    # Comparisons with NaN are false, so that each factor is 0 or 1 without a branch.
    right = (estimate_s >= 0.0) & (estimate_s < np.inf)
    usable = np.fmax(np.fmin(estimate_s, 1e12), 0.0)
    chosen = right * usable + (1.0 - right) * fallback_s
    return np.fmax(chosen, (1.0 + OVERRUN) * ran_s)


def remaining_s(ends_s: Value, started_s: Value, now_s: Value) -> Value:
    """How much longer a running task is expected to take, also when it should have ended long ago."""
    left = np.fmax(ends_s - now_s, -1.0)
    overdue = left <= 0.0
    return (1.0 - overdue) * left + overdue * OVERRUN * np.fmax(now_s - started_s, 1.0)
