"""Calibration on a pool: what is predicted of all its machines at regular times, and what became of them.

Every quarter of an hour each machine of the pool is asked for, as the match maker would, for several durations and
several cores left free; the pool's own changes say what became of it. Predictions know only what was before. A run of
the model `matching` with ``calibrate`` does so beside its jobs (experiments/calibration.toml).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ebbtide.matcher.predict.calibration import CLASSES, Calibration
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.rolling import NONE
from ebbtide.simulator.inputs.batches import Floats
from ebbtide.simulator.matching.futures import Futures
from ebbtide.simulator.matching.pools import Pool

DURATIONS_S: Final = (600.0, 1800.0, 3600.0, 7200.0)
FREE: Final = (0.0, 2.0, 6.0)
#: Figures of one decile, which add up over runs: outcomes, sum of what was predicted, how many came true.
FIGURES: Final = ("count", "predicted", "observed")
#: Of which predictions: those of the tasks that were started, and those of all machines.
KINDS: Final = ("started", "machines")


def calibrate(
    found: Pool,
    options: PredictorOptions,
    durations_s: Sequence[float] = DURATIONS_S,
    frees: Sequence[float] = FREE,
    every_s: float = 900.0,
    warm_up_s: float = 1.25 * 86_400.0,
) -> Calibration:
    """Predictions for all machines at regular times, and their outcomes.

    Without sizes a prediction came true if no shrink came within the duration; with sizes, if no more than the free
    cores were lost of those that there were.
    """
    calibration = Calibration()
    start_s = float(found.at_s[0])
    predictor = Predictor(start_s, options)
    cores = np.zeros(found.machines)
    names = [f"machine-{number}" for number in range(found.machines)]
    rows = np.array([predictor.row(name) for name in names])
    futures = Futures(found)
    next_s = start_s + warm_up_s
    last_s = found.until_s - max(durations_s)
    for machine, at_s, after in zip(found.machine.tolist(), found.at_s.tolist(), found.cores.tolist(), strict=True):
        while next_s < at_s and next_s <= last_s:
            predictor.advance(next_s)
            there = (cores >= 1.0) & (predictor.directions()[rows] != NONE)
            asked = rows[there]
            elapsed_s = next_s - predictor.state.last_s[asked]
            for duration_s in durations_s:
                lost = futures.lost(next_s, duration_s)[there] if options.sized else None
                for free in frees if options.sized else frees[:1]:
                    p = predictor.probability(
                        predictor.directions()[asked], elapsed_s, duration_s, np.full(len(asked), free), cores[there]
                    )
                    kept = lost <= free if lost is not None else ~futures.shrinks(next_s, duration_s)[there]
                    calibration.add_all(np.clip(np.asarray(p), 0.0, 1.0), kept)
            next_s += every_s
        predictor.observe(Change(names[machine], at_s, float(cores[machine]), float(after)))
        rows[machine] = predictor.row(names[machine])
        cores[machine] = after
    return calibration


def figure(kind: str, decile: int, what: str) -> str:
    """The name of a metric."""
    return f"calibration_{kind}_{decile}_{what}"


def figures(kind: str, count: Floats, predicted: Floats, observed: Floats) -> dict[str, float]:
    """Metrics of one run, of arrays by decile; the last two are means, 0 without outcomes."""
    sums = {"count": count, "predicted": predicted * count, "observed": observed * count}
    return {
        figure(kind, decile, what): float(values[decile]) for what, values in sums.items() for decile in range(CLASSES)
    }


def of_machines(calibration: Calibration) -> dict[str, float]:
    """Metrics of one run, of what was predicted of all machines; beside the deciles the Brier score."""
    count, predicted, observed = np.zeros((3, CLASSES))
    for row in calibration.curve():
        decile = round(row.low * CLASSES)
        count[decile], predicted[decile], observed[decile] = row.count, row.predicted, row.observed
    brier = calibration.brier
    score = {} if brier is None else {"calibration_brier": brier}
    return {**figures("machines", count, predicted, observed), **score}
