"""What could be known of a pool: how often a machine that is picked keeps its room, by who picks.

Where a provider puts its VMs is a coin that nobody knows before it falls. So the same VMs are replayed with other
draws: of all their servers with as many cores at a moment, the share that kept the room is what somebody would say who
knows every VM that will come and go, and not where. Where all servers are alike no past of theirs tells more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ebbtide.matcher.predict.predictor import PredictorOptions
from ebbtide.simulator.inputs.batches import Floats, Mask
from ebbtide.simulator.matching.calibrating import DURATIONS_S, FREE, WARM_UP_S, looks
from ebbtide.simulator.matching.futures import ALIKE, Futures
from ebbtide.simulator.matching.pools import Pool

#: Figures of one run: shares of picks that kept their room, and mean squared errors of two predictions of it.
METRICS: Final = (
    *("picked_random", "picked_predicted", "picked_known", "picked_both", "picked_best"),
    *("picks_predicted_brier", "picks_known_brier"),
)


def foresight(
    found: Pool,
    others: Sequence[Pool],
    options: PredictorOptions,
    durations_s: Sequence[float] = DURATIONS_S,
    frees: Sequence[float] = FREE,
    every_s: float = 1800.0,
    warm_up_s: float = WARM_UP_S,
    compile: bool = True,
) -> dict[str, float]:
    """Picks of one machine at regular times, for each duration and so many cores left free, and how often they held.

    Who picks: anyone (`random`), by what is predicted, by what could be known of the VMs to come (`known`), by the mean
    of these two, and by what does come (`best`). Of equals each is as likely.

    :param others: the same VMs by other draws.
    :param options: of the predictor; with sizes.
    :param compile: with numba.
    """
    futures, their_futures = Futures(found), [Futures(other) for other in others]
    sums = np.zeros(len(METRICS))
    picks = 0
    for look in looks(found, options, found.until_s - max(durations_s), every_s, warm_up_s, compile):
        theirs = np.concatenate([_cores(other, look.now_s) for other in others])
        order = np.argsort(theirs, kind="stable")
        theirs = theirs[order]
        for duration_s in durations_s:
            lost = futures.lost(look.now_s, duration_s)[look.there]
            their_lost = np.concatenate([one.lost(look.now_s, duration_s) for one in their_futures])[order]
            for free in frees:
                fits = look.had > free
                # Those that have no more cannot lose it.
                first = int(np.searchsorted(theirs, free, side="right"))
                if not fits.any() or first == len(theirs):
                    continue
                kept, had = (lost <= free)[fits], look.had[fits]
                predicted = np.nan_to_num(np.clip(look.predicted(duration_s, free)[fits], 0.0, 1.0), nan=1.0)
                known = _chances(had, theirs[first:], their_lost[first:] <= free)
                picked = [_picked(by, kept) for by in (np.zeros(len(had)), predicted, known, predicted + known)]
                errors = [float(np.mean((by - kept) ** 2)) for by in (predicted, known)]
                sums += [*picked, float(kept.any()), *errors]
                picks += 1
    return dict(zip(METRICS, (sums / picks).tolist(), strict=True)) if picks else {}


def _picked(by: Floats, kept: Mask) -> float:
    return float(kept[by >= by.max() - 1e-9].mean())


def _cores(pool: Pool, now_s: float) -> Floats:
    """Of each machine; (machines,)."""
    cores = np.zeros(pool.machines)
    until = np.searchsorted(pool.at_s, now_s, side="right")
    # Of several changes of one machine the last stays.
    cores[pool.machine[:until]] = pool.cores[:until]
    return cores


def _chances(had: Floats, theirs: Floats, kept: Mask) -> Floats:
    """Of each machine: the share of servers with about as many cores that keep the room. Theirs by their cores.

    Those with as many cores, then with one more or less, and so on, until there are `ALIKE`.
    """
    count = np.concatenate([[0], np.cumsum(kept)])
    chances = np.zeros(len(had))
    for number, cores in enumerate(had):
        low = high = wider = 0
        while high - low < min(ALIKE, len(theirs)):
            low = int(np.searchsorted(theirs, cores - wider, side="left"))
            high = int(np.searchsorted(theirs, cores + wider, side="right"))
            wider += 1
        chances[number] = (count[high] - count[low]) / (high - low)
    return chances
