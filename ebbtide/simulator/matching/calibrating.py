"""Calibration on a pool: what is predicted of all its machines at regular times, and what became of them.

Every quarter of an hour each machine of the pool is asked for, as the match maker would, for several durations and
several cores left free; the pool's own changes say what became of it. Predictions know only what was before. A run of
the model `matching` with ``calibrate`` does so beside its jobs (experiments/calibration.toml).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ebbtide.matcher.match.matching import MatchOptions
from ebbtide.matcher.predict.calibration import CLASSES, Calibration
from ebbtide.matcher.predict.completion_probability import completion_probability, form_now
from ebbtide.matcher.predict.predictor import FORMS, PredictorOptions
from ebbtide.matcher.predict.rolling import NONE
from ebbtide.simulator.compiling import compiled
from ebbtide.simulator.inputs.batches import Floats, Mask
from ebbtide.simulator.jobs.columns import MACHINE, Ints
from ebbtide.simulator.matching.futures import Futures
from ebbtide.simulator.matching.hooks import begin, changed
from ebbtide.simulator.matching.policy import fresh
from ebbtide.simulator.matching.pools import Pool

DURATIONS_S: Final = (600.0, 1800.0, 3600.0, 7200.0)
FREE: Final = (0.0, 2.0, 6.0)
#: In which a predictor only learns.
WARM_UP_S: Final = 1.25 * 86_400.0
#: Figures of one decile, which add up over runs: outcomes, sum of what was predicted, how many came true.
FIGURES: Final = ("count", "predicted", "observed")
#: Of which predictions: those of the tasks that were started, and those of all machines.
KINDS: Final = ("started", "machines")


class _Machines(NamedTuple):
    """What the hooks look at of an engine's state."""

    machines: Ints


def follow(s: Any, p: Any, machine: Ints, at_s: Floats, cores: Ints, place: int, now_s: float) -> int:
    """Let a policy learn of the changes from a place on up to now; the place of the next one. A kernel."""
    while place < len(at_s) and at_s[place] <= now_s:
        number = machine[place]
        before = s.machines[number, MACHINE.cores]
        s.machines[number, MACHINE.cores] = cores[place]
        changed(s, p, number, at_s[place], before)
        place += 1
    begin(s, p, now_s)
    return place


@functools.cache
def _compiled() -> Any:
    return compiled(follow)


class Look(NamedTuple):
    """The machines of a pool at one moment, as a predictor sees them."""

    now_s: float
    #: Those that are there and have been heard of; (machines,).
    there: Mask
    #: Cores of these; (n,).
    had: Floats
    #: Of `completion_probability`: all but durations and free cores.
    known: tuple[Any, ...]

    def predicted(self, duration_s: float, free: float) -> Floats:
        """How likely each keeps all its cores but the free ones for so long; (n,), NaN where nothing is known."""
        knowledge, form, sized, direction, elapsed_s = self.known
        found: Floats = completion_probability(
            knowledge, form, sized, direction, elapsed_s, duration_s, np.full(len(self.had), free), self.had
        )
        return found


def looks(
    found: Pool, options: PredictorOptions, until_s: float, every_s: float, warm_up_s: float, compile: bool = True
) -> Iterator[Look]:
    """A pool at regular times, from the end of the time in which a predictor only learns."""
    start_s = float(found.at_s[0])
    learn = _compiled() if compile else follow
    p = fresh(found.machines, start_s, options, MatchOptions(), 0.0, False)
    s = _Machines(np.zeros((found.machines, len(MACHINE)), np.int64))
    place = 0
    for now_s in np.arange(start_s + warm_up_s, until_s, every_s).tolist():
        place = learn(s, p, found.machine, found.at_s, found.cores, place, now_s)
        cores = s.machines[:, MACHINE.cores]
        there = (cores >= 1) & (p.rolling.direction != NONE)
        direction, elapsed_s = p.rolling.direction[there], now_s - p.rolling.last_s[there]
        form = form_now(p.knowledge, FORMS[options.form])
        known = (p.knowledge, form, options.sized, direction, elapsed_s)
        yield Look(now_s, there, cores[there].astype(np.float64), known)


def calibrate(
    found: Pool,
    options: PredictorOptions,
    durations_s: Sequence[float] = DURATIONS_S,
    frees: Sequence[float] = FREE,
    every_s: float = 900.0,
    warm_up_s: float = WARM_UP_S,
    compile: bool = True,
) -> Calibration:
    """Predictions for all machines at regular times, and their outcomes.

    Without sizes and landmarks a prediction came true if no shrink came within the duration; with them, if no more than
    the free cores were lost of those that there were; machines with no more than these are not asked.

    :param compile: with numba.
    """
    calibration = Calibration()
    futures = Futures(found)
    for look in looks(found, options, found.until_s - max(durations_s), every_s, warm_up_s, compile):
        for duration_s in durations_s:
            lost = futures.lost(look.now_s, duration_s)[look.there] if options.of_cores else None
            for free in frees if options.sized else frees[:1]:
                kept = lost <= free if lost is not None else ~futures.shrinks(look.now_s, duration_s)[look.there]
                # No task leaves free what a machine does not have.
                fits = look.had > free
                calibration.add_all(np.clip(look.predicted(duration_s, free)[fits], 0.0, 1.0), kept[fits])
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
