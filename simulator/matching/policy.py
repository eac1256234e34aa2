"""The matcher as a policy of the engine, from the same options as the live one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simulator.jobs.columns import State
from simulator.jobs.policy import Policy
from simulator.matching import arrays as a
from simulator.matching import hooks
from task_matcher.knowledge import nothing_known
from task_matcher.landmarks import landmarks
from task_matcher.matching import MatchOptions
from task_matcher.period import no_period, period
from task_matcher.predictor import FORMS, PredictorOptions
from task_matcher.rolling import rolling


def policy(predicting: PredictorOptions, matching: MatchOptions, dislike: float = 0.0, check: bool = True) -> Policy:
    """SlackSched (seed 000 §3), or what its switches make of it.

    :param dislike: of every task.
    :param check: hold predictions of tasks that start against what becomes of them.
    """

    def resized(s: State, p: Any, most_cores: int, seed: int) -> a.Matching:
        machines = len(s.machines)
        if p is not None and len(p.waits) == machines:
            return p  # type: ignore[no-any-return]
        return fresh(machines, float(s.sums[0]), predicting, matching, dislike, check)

    kernels: dict[str, Callable[..., Any]] = {
        "begin": hooks.begin,
        "choose": hooks.choose,
        "changed": hooks.changed,
        "ended": hooks.ended,
    }
    return Policy("matching", kernels, a.Matching, resized, by_demand=False, allocates=True)


def fresh(
    machines: int, now_s: float, predicting: PredictorOptions, matching: MatchOptions, dislike: float, check: bool
) -> a.Matching:
    """Arrays of a run in which nothing has happened yet."""
    switches = np.zeros(a.SWITCHES, np.int64)
    switches[a.K_FORM] = FORMS[predicting.form]
    switches[a.K_SIZED] = predicting.sized
    switches[a.K_CENSORED] = predicting.censored
    switches[a.K_DELAY] = matching.delay
    switches[a.K_PROMISES] = matching.promises
    switches[a.K_CHECK] = check
    switches[a.K_PERIOD] = predicting.by_period
    numbers = np.zeros(a.NUMBERS)
    numbers[a.N_SPARE] = matching.spare
    numbers[a.N_SPREAD] = matching.spread
    numbers[a.N_ESCALATION] = matching.escalation
    numbers[a.N_UNKNOWN] = matching.unknown
    numbers[a.N_FALLBACK_S] = matching.fallback_s
    numbers[a.N_FRESH_S] = predicting.fresh_s
    numbers[a.N_FRESH_SHARE] = predicting.fresh_share
    numbers[a.N_FRESH_UNTIL] = numbers[a.N_LOOKED] = -np.inf
    numbers[a.N_DISLIKE] = dislike
    return a.Matching(
        switches,
        numbers,
        rolling(machines, predicting.window_s, now_s),
        landmarks(machines, predicting.window_s, predicting.horizon_s, predicting.look_every_s, now_s),
        period(machines, predicting.window_s, predicting.horizon_s, predicting.look_every_s, now_s)
        if predicting.by_period
        else no_period(),
        nothing_known(predicting.horizon_s),
        np.zeros(machines),
        np.zeros(machines),
        np.zeros(machines),
        np.zeros(machines, np.int64),
        np.zeros((machines, a.PROMISES, 3)),
        np.zeros(10),
        np.zeros(10),
        np.zeros(10),
    )
