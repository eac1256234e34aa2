"""Completion probability and expected completion time (seed 000 §3.1, Eq. 1 and 2, App. B.2).

Kernel functions: each works alike on one machine (compiled, in the simulator) and on arrays over machines (live), so
there is one copy of the policy. Unknown is NaN, and stays NaN through all of them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from task_matcher.ages import FIRST_S, Floats, Value, interpolate, located, position, stretched

#: The worst machine of Eq. 2 completes a task at least this often: a task is not restarted for ever.
LEAST_PROBABILITY: Final = 0.02
#: A task that runs longer than it was said to is expected to take this share of its age longer.
OVERRUN: Final = 0.25


class Lines(NamedTuple):
    """A curve by :func:`task_matcher.ages.fill_lines`. Shapes (BINS + 2,)."""

    hazard: Floats
    hazard_rises: Floats
    area: Floats
    area_rises: Floats
    #: 0, or NaN for bins of ages of which nothing is known.
    known: Floats


class Aged(NamedTuple):
    """What a curve says of machines of an age, whatever the task: one machine, or arrays of them."""

    #: The age, stretched.
    age: Value
    #: Cumulative hazard up to it, and e to the power of that.
    lived: Value
    scale: Value
    #: Area under survival up to it; s.
    area: Value


def lives_on(hazard: Any, known: Any, elapsed_s: Value, duration_s: Value) -> Value:
    """``P(X > e + d | X > e)``; NaN where nothing is known of ages like e."""
    begin = position(elapsed_s)
    end = position(elapsed_s + duration_s)
    first, last = np.int64(begin), np.int64(end)
    lived = interpolate(hazard, first, begin - first)
    return np.exp(lived - interpolate(hazard, last, end - last)) + known[first]


def aged(lines: Lines, elapsed_s: Value) -> tuple[Aged, Value]:
    """The part of :func:`lives_and_wastes` that the task has nothing to do with; and 0, NaN where nothing is known."""
    age = stretched(elapsed_s)
    begin = located(age)
    first = np.int64(begin)
    lived = lines.hazard[first] + begin * lines.hazard_rises[first]
    area = lines.area[first] + begin * lines.area_rises[first]
    return Aged(age, lived, np.exp(lived), area), lines.known[first]


def lives_and_wastes(lines: Lines, machines: Aged, duration_s: Value) -> tuple[Value, Value]:
    """What :func:`lives_on` says, and w of Eq. 2: ``E(X - e | e < X < e + d)``, half of d where no change can come.

    Also where nothing is known, which :func:`aged` has said.

    :param duration_s: not below 0.
    """
    end = located(machines.age + duration_s / FIRST_S)
    last = np.int64(end)
    lived = lines.hazard_rises[last]
    lived *= end
    lived += lines.hazard[last]
    lives = np.exp(machines.lived - lived)
    # ( area(e + d) - area(e) ) / survival(e) - d * lives, and a little of one half of d: where hardly any change can
    # come, the difference of nearly equal numbers says nothing.
    wasted = lines.area_rises[last]
    wasted *= end
    wasted += lines.area[last]
    wasted -= machines.area
    wasted *= machines.scale
    wasted -= duration_s * (lives - 0.5e-3)
    wasted /= 1.001 - lives
    return lives, np.minimum(np.maximum(wasted, 0.0), duration_s)


def fails(shrink_probability: Value, lives: Value) -> Value:
    """Eq. 1: ``1 - P_c = P_s(x) * (1 - P(X > e + d | X > e))``."""
    return shrink_probability * (1.0 - lives)


def completes(shrink_probability: Value, lives: Value) -> Value:
    """Eq. 1: ``P_c``."""
    return 1.0 - fails(shrink_probability, lives)


def wasted_evenly_s(probability: Value, duration_s: Value) -> Value:
    """w where only P_c is known: a task that fails does so at an even rate."""
    rate = np.minimum(np.maximum(-np.log(np.fmax(probability, 1e-250)), 1e-4), 600.0)
    return duration_s * (1.0 / rate - 1.0 / np.expm1(rate))


def restart_s(probability: float, wasted: float, duration_s: float) -> float:
    """``E_wc(g, 0, 0, d)``: Eq. 2 solved for a machine that has just grown, which refers to itself. One machine's."""
    least = probability if probability > LEAST_PROBABILITY else LEAST_PROBABILITY
    return duration_s + (1.0 - least) / least * wasted


def expected_s(
    wait_s: Value,
    failure: Value,
    wasted: Value,
    restart: float,
    duration_s: float,
    checkpoint_s: float,
    aversion: float,
) -> Value:
    """Eq. 2: ``E_wc = a + p * d + (1 - p) * (w + E_wc(g, 0, 0, d))`` in seconds, as ``a + d`` and what failing adds.

    That is never below 0, so no machine is better than ``a + d``: ``restart`` is d at least, and w d at most.

    Beyond the paper, and nothing with its values: a task that saves its work every ``checkpoint_s`` (infinite: never)
    has only the rest to do again; ``aversion`` counts a preemption as so many durations of the task.

    :param failure: ``1 - p``.
    """
    more = wasted + (restart - duration_s + aversion * duration_s)
    if checkpoint_s < np.inf:
        saved = np.maximum(wasted - 0.5 * checkpoint_s, 0.0) / max(duration_s, 1e-9)
        more -= restart * np.minimum(saved, 1.0)
    more *= failure
    more += wait_s + duration_s
    return more


def aversion(dislike: float, attempts: float, escalation: float) -> float:
    """How many durations a preemption counts: none for dislike 0, one for one half, all for 1; more with each attempt.

    :param dislike: of preemption, 0 to 1.
    :param attempts: how often the task was preempted already.
    :param escalation: durations for each of them; 0: the paper's rule.
    """
    dislike = min(max(dislike, 0.0), 1.0 - 1e-6)
    return dislike / (1.0 - dislike) + escalation * attempts


def usable_duration_s(estimate_s: float, ran_s: float, fallback_s: float) -> float:
    """How long a task is taken to run, whatever was said of it.

    Missing (NaN), negative and infinite estimates count as ``fallback_s``; 0 is what it says. A task that has already
    run for ``ran_s`` without an end takes at least that long, and a share more: no estimate is right that time has
    refuted.
    """
    # Comparisons with NaN are false.
    chosen = min(estimate_s, 1e12) if 0.0 <= estimate_s < np.inf else fallback_s
    return max(chosen, (1.0 + OVERRUN) * ran_s)


def remaining_s(ends_s: Value, started_s: Value, now_s: Value) -> Value:
    """How much longer a running task is expected to take, also when it should have ended long ago."""
    left = np.fmax(ends_s - now_s, -1.0)
    overdue = left <= 0.0
    return (1.0 - overdue) * left + overdue * OVERRUN * np.fmax(now_s - started_s, 1.0)
