"""Algorithm 3 by the live match maker, which never decides by it: what the simulator's is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ebbtide.matcher.match.choices import better_on_heartbeat
from ebbtide.matcher.match.matching import Decision, Demand, MatchMaker


def on_heartbeat(maker: MatchMaker, machine: str, demands: Sequence[Demand], now: float) -> Decision | None:
    """What is started since a machine has reported; None: nothing.

    Of the tasks that have room there, the one most likely to complete, if more than the threshold; otherwise the
    shortest task goes where Algorithm 1 sends it, if there is room.
    """
    maker.predictor.advance(now)
    maker.fleet.advance(now)
    best: Decision | None = None
    row = maker.predictor.rows.get(machine, -1)
    for demand in demands if row >= 0 else ():
        room_at = maker.fleet.room_of(row, demand.cores, demand.memory_mib)
        if room_at > now:
            continue
        duration_s = maker.duration_s(demand)
        band = maker._match_cache.of(np.array([row]), np.array([room_at]), demand.cores, now)
        weighed = maker._weigh(demand, duration_s, band, False, None)
        found = weighed.probability(0)
        so_far, so_far_s = (-1.0, math.inf) if best is None else (best.completion_probability, best.duration_s)
        threshold = maker.options.threshold
        if found is not None and better_on_heartbeat(found, duration_s, threshold, so_far or 0.0, so_far_s):
            best = Decision(demand.task, machine, True, 0.0, found, float(weighed.compared[0]), duration_s)
    if best is not None or not demands:
        return best
    decision = maker.decide(min(demands, key=maker.duration_s), now)
    return decision if decision.starts else None
