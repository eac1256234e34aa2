"""The matcher as a policy of the engine, from the same options as the live one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ebbtide.matcher.match.matching import MatchOptions
from ebbtide.matcher.predict.knowledge import nothing_known
from ebbtide.matcher.predict.period import no_period, period
from ebbtide.matcher.predict.predictor import FORMS, PredictorOptions
from ebbtide.matcher.predict.rolling import rolling
from ebbtide.simulator.chance import draws_of
from ebbtide.simulator.jobs.columns import State
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.matching import arrays as a
from ebbtide.simulator.matching import heartbeats, hooks
from ebbtide.simulator.matching.futures import Foreseen


def policy(
    predicting: PredictorOptions,
    matching: MatchOptions,
    preemption_aversion: float = 0.0,
    check: bool = True,
    heartbeat: bool = False,
    foreseen: Foreseen | None = None,
) -> Policy:
    """SlackSched (Agarwal et al. 2023 §3), or what its switches make of it.

    :param preemption_aversion: of every task.
    :param heartbeat: tasks start as machines report (Algorithm 3); else the queue is gone through (Algorithm 1).
    :param check: hold predictions of tasks that start against what becomes of them.
    :param foreseen: what could be known of the VMs to come; with landmarks.
    """

    def resized(s: State, p: Any, most_cores: int, seed: int) -> a.Matching:
        machines = len(s.machines)
        if p is not None and len(p.waits) == machines:
            return p  # type: ignore[no-any-return]
        made = fresh(machines, float(s.sums[0]), predicting, matching, preemption_aversion, check, foreseen)
        made.switches[a.SWITCH.heartbeat] = heartbeat
        made.draws[:] = draws_of(seed)
        return made

    kernels: dict[str, Callable[..., Any]] = {
        "begin": hooks.begin,
        "choose": hooks.choose,
        "changed": hooks.changed,
        "ended": hooks.ended,
        "schedule": heartbeats.schedule,
    }
    return Policy("matching", kernels, a.Matching, resized, by_demand=False, allocates=True)


def fresh(
    machines: int,
    now_s: float,
    predicting: PredictorOptions,
    matching: MatchOptions,
    preemption_aversion: float,
    check: bool,
    foreseen: Foreseen | None = None,
) -> a.Matching:
    """Arrays of a run in which nothing has happened yet."""
    switches = np.zeros(a.SWITCHES, np.int64)
    switches[a.SWITCH.form] = FORMS[predicting.form]
    switches[a.SWITCH.sized] = predicting.sized
    switches[a.SWITCH.censored] = predicting.censored
    switches[a.SWITCH.delay] = matching.delay
    switches[a.SWITCH.promises] = matching.promises
    switches[a.SWITCH.releases] = matching.releases and predicting.by_landmarks and predicting.sized
    switches[a.SWITCH.check] = check
    numbers = np.zeros(a.NUMBERS)
    numbers[a.NUMBER.spare] = matching.spare
    numbers[a.NUMBER.spread] = matching.spread
    numbers[a.NUMBER.escalation] = matching.escalation
    numbers[a.NUMBER.patience] = matching.patience
    numbers[a.NUMBER.unknown] = matching.unknown
    numbers[a.NUMBER.threshold] = matching.threshold
    numbers[a.NUMBER.fallback_s] = matching.fallback_s
    numbers[a.NUMBER.fresh_s] = predicting.fresh_s
    numbers[a.NUMBER.fresh_share] = predicting.fresh_share
    numbers[a.NUMBER.fresh_until] = numbers[a.NUMBER.looked] = -np.inf
    numbers[a.NUMBER.aversion] = preemption_aversion
    if foreseen is not None:
        numbers[a.NUMBER.known_share], numbers[a.NUMBER.known_from_s] = foreseen.part, foreseen.from_s
    return a.Matching(
        switches,
        numbers,
        rolling(machines, predicting.window_s, now_s),
        period(machines, predicting.window_s, predicting.horizon_s, predicting.look_every_s, now_s)
        if predicting.by_landmarks
        else no_period(),
        nothing_known(predicting.horizon_s),
        np.zeros((0, 0)) if foreseen is None else foreseen.shares,
        np.zeros(machines),
        np.zeros(machines),
        np.zeros(machines),
        np.zeros(machines, np.int64),
        np.zeros((machines, a.PROMISES, 3)),
        np.zeros(10),
        np.zeros(10),
        np.zeros(10),
        np.zeros(2, np.int64),
    )
