"""E_wc, when a task is expected to be done on a machine: Eq. 2 of Agarwal et al. 2023 (§3.1.2, App. B.2).

Kernel functions, as in `matcher.predict.completion_probability`: of one machine, or of arrays over machines.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.matcher.predict.ages import Value

#: The worst machine of Eq. 2 completes a task at least this often: a task is not restarted for ever.
LEAST_PROBABILITY: Final = 0.02
#: A task that runs longer than it was said to is expected to take this share of its age longer.
OVERRUN: Final = 0.25


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


def aversion(preemption_aversion: float, attempts: float, escalation: float) -> float:
    """How many durations a preemption counts: none for an aversion of 0, one for one half, all for 1.

    More with each attempt.

    :param preemption_aversion: of preemption, 0 to 1.
    :param attempts: how often the task was preempted already.
    :param escalation: durations for each of them; 0: the paper's rule.
    """
    preemption_aversion = min(max(preemption_aversion, 0.0), 1.0 - 1e-6)
    return preemption_aversion / (1.0 - preemption_aversion) + escalation * attempts


def may_wait(delay: bool, waited_s: float, patience: float, duration_s: float, room: bool) -> bool:
    """Whether a task may go on waiting for a busy machine.

    What a busy machine promises may be gone before it has room, time and again: who has waited for long takes what
    there is. Where there is nothing, it keeps its promise, or narrower tasks could pass it for ever.

    :param delay: whether it may at all.
    :param waited_s: how long it has waited by now.
    :param patience: for so many of its durations; infinite: for ever (the paper's rule).
    :param room: whether a machine has room for it now.
    """
    return delay and (waited_s <= patience * max(duration_s, 1e-9) or not room)


def usable_duration_s(estimate_s: float, ran_s: float, fallback_s: float) -> float:
    """How long a task is taken to run, whatever was said of it.

    Missing (NaN), negative and infinite estimates count as ``fallback_s``; 0 is what it says. A task that has already
    run for ``ran_s`` without an end takes at least that long, and a share more: no estimate is right that time has
    refuted.
    """
    # Comparisons with NaN are false.
    chosen = min(estimate_s, 1e12) if 0.0 <= estimate_s < np.inf else fallback_s
    return max(chosen, (1.0 + OVERRUN) * ran_s)


def release_s(duration_s: float) -> float:
    """After how long of a task's run what others leave on its machine counts as room that it can lose.

    The newest go first where a machine shrinks, so the cores of older tasks that have ended can be lost before its own.
    Within about half of the duration, .35 to .71 of it: a power of two, so that tasks of about as long are weighed
    alike.
    """
    half_s: float = 2.0 ** np.floor(np.log2(max(duration_s, 1.0)) - 0.5)
    return half_s


def remaining_s(ends_s: Value, started_s: Value, now_s: float) -> Value:
    """How much longer running tasks are expected to take, also those that should have ended long ago."""
    left_s = ends_s - now_s
    return np.maximum(left_s, 0.0) + (left_s <= 0.0) * (OVERRUN * np.maximum(1.0, now_s - started_s))


def leaves_in_time_until_s(ends_s: Value, started_s: Value, within_s: float) -> Value:
    """Until when a running task has no more than a time, above a quarter of a second, left by `remaining_s`.

    Then it has overrun its estimate by so much that it is expected to take longer.
    """
    return np.maximum(ends_s, started_s + within_s / OVERRUN)
