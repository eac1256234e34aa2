"""`matcher`: the task matcher's decisions over up to ten thousand machines, beside Algorithm 1 in plain Python.

One core, one process, no manager: what is measured is the decision alone, in seconds of that core, with a day's history
of the machines, most of which have tasks that run. The plain form (`benchmarks.matching.matcher_plain`) is Algorithm 1
of the paper as one would write it, machine by machine, over the same history, the same running tasks and the same tasks
that wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.matching.matcher_plain import PlainMatcher
from benchmarks.passes import Pass, one_core
from ebbtide.matcher.match.fleet import Fleet, Running
from ebbtide.matcher.match.matching import Demand, MatchMaker, MatchOptions
from ebbtide.matcher.match.rounds import LIVE, LIVE_PREDICTION
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions

SIZES: Final = (100, 1000, 10_000)
WAITING: Final = (10, 100, 1000, 10_000)
#: Tasks of a round that is decided as a manager does by default.
ROUND: Final = 100
EQUATION_ONE: Final = PredictorOptions(form="next-change")
#: Decisions for the percentile, and of the plain form, which is slow.
DECISIONS: Final = 1000
PLAIN: Final = 20
#: Changes that one machine has in the history; 50 a day is a pool as restless as the paper's C1.
CHANGES: Final = 20
NOW_S: Final = 86_400.0
#: Decisions at a moment of their own each, so many seconds apart.
MOMENTS: Final = 100
APART_S: Final = 0.01
#: Decisions that are the first with new curves.
FIRST: Final = 20
#: Of this core: others that use it take nothing of the long loop and nothing of the short one.
_clock = time.thread_time


@dataclass
class _Pool:
    """Machines, what is known of them, and tasks that wait, the same for both forms."""

    matcher: MatchMaker
    plain: PlainMatcher
    demands: list[Demand]
    #: Seconds for one change to be learned.
    learning: list[float] = field(default_factory=list)


def run(how: Pass) -> Figures:
    """The figures."""
    sizes = SIZES[:2] if how.quick else SIZES
    waiting = WAITING[:2] if how.quick else WAITING
    count = 100 if how.quick else DECISIONS
    figures: Figures = {}
    medians: dict[int, list[float]] = {size: [] for size in sizes}
    percentiles: dict[int, list[float]] = {size: [] for size in sizes}
    plain: dict[int, list[float]] = {size: [] for size in sizes}
    default: dict[int, list[float]] = {size: [] for size in sizes}
    default_moved: dict[int, list[float]] = {size: [] for size in sizes}
    default_round: dict[int, list[float]] = {size: [] for size in sizes}
    default_cold: dict[int, list[float]] = {size: [] for size in sizes}
    learning: dict[int, list[float]] = {size: [] for size in sizes}
    moved: dict[int, list[float]] = {size: [] for size in sizes}
    rounds: dict[tuple[int, int], list[float]] = {}
    with one_core():
        for number in range(how.runs):
            for size in sizes:
                pool = _pool(size, max(waiting), number)
                times = [_seconds(pool, demand) for demand in pool.demands[:count]]
                medians[size].append(float(np.median(times)))
                percentiles[size].append(1000.0 * float(np.percentile(times, 99)))
                plain[size].append(float(np.median([_plain_s(pool, demand) for demand in pool.demands[:PLAIN]])))
                learning[size].append(1e6 * float(np.median(pool.learning)))
                for tasks in waiting:
                    rounds.setdefault((size, tasks), []).append(_round_per_s(pool, tasks))
                moved[size].append(1e6 * _moved_s(pool))
                pool = _pool(size, max(count, ROUND), number, LIVE_PREDICTION, LIVE)
                default[size].append(float(np.median([_seconds(pool, demand) for demand in pool.demands[:count]])))
                default_moved[size].append(1e6 * _moved_s(pool))
                default_round[size].append(_round_per_s(pool, ROUND))
                default_cold[size].append(1e6 * _cold_s(pool))
                how.report(
                    f"run {number + 1}: {size} machines: {1000 * medians[size][-1]:.3f} ms a decision, "
                    f"plain {1000 * plain[size][-1]:.1f} ms"
                )
    for size in sizes:
        where = f"one task over {size} machines, Eq. 1 and 2, one core"
        of = f"Algorithm 1 in plain Python, machine by machine, over the same {size} machines"
        figures |= {
            f"decisions_{size}_per_s": Figure.over([1.0 / value for value in medians[size]], "1/s", where),
            f"decision_{size}_p99_ms": Figure.over(percentiles[size], "ms", where),
            f"plain_{size}_ms": Figure.over([1000.0 * value for value in plain[size]], "ms", of),
            f"plain_{size}_to_decision": Figure.over(ratios(plain[size], medians[size]), "ratio", of),
            f"default_{size}_to_decision": Figure.over(
                ratios(default[size], medians[size]), "ratio", f"{where}; this one as a manager decides by default"
            ),
            f"default_moved_{size}_us": Figure.over(
                default_moved[size], "us", f"moved_{size}_us, as a manager decides by default"
            ),
            f"default_round_{size}_{ROUND}_per_s": Figure.over(
                default_round[size], "1/s", f"round_{size}_{ROUND}_per_s, as a manager decides by default"
            ),
            f"default_cold_{size}_us": Figure.over(
                default_cold[size], "us", f"{where}, as a manager decides by default: the first with new curves"
            ),
            f"moved_{size}_us": Figure.over(
                moved[size], "us", f"{where}, {1000 * APART_S:g} ms after the one before, the curves as they were"
            ),
            f"plain_{size}_to_moved": Figure.over(ratios(plain[size], [us / 1e6 for us in moved[size]]), "ratio", of),
            f"learn_{size}_us": Figure.over(learning[size], "us", f"one core change learned, {size} machines known"),
        }
        for tasks in waiting:
            per_s = rounds[size, tasks]
            figures[f"round_{size}_{tasks}_per_s"] = Figure.over(
                per_s, "1/s", f"decisions in a round over {tasks} waiting tasks, {size} machines"
            )
            figures[f"plain_{size}_to_round_{tasks}"] = Figure.over(
                ratios(plain[size], [1.0 / value for value in per_s]), "ratio", of
            )
    few, many = sizes[0], sizes[-1]
    figures[f"growth_{few}_to_{many}"] = Figure.over(
        ratios(medians[many], medians[few]),
        "ratio",
        f"a decision over {few} machines; linear growth would be {many // few}",
    )
    return figures


def _pool(
    size: int,
    waiting: int,
    seed: int,
    predicting: PredictorOptions = EQUATION_ONE,
    matching: MatchOptions | None = None,
) -> _Pool:
    generator = np.random.default_rng([seed, size])
    predictor = Predictor(0.0, predicting)
    plain = PlainMatcher()
    learning = []
    at = generator.uniform(0.0, NOW_S, (size, CHANGES))
    at[:, 0] = generator.uniform(0.0, NOW_S / 4, size)
    at.sort(axis=1)
    sizes = generator.integers(4, 48, (size, CHANGES)).astype(float)
    order = np.argsort(at, axis=None, kind="stable")
    for index in order.tolist():
        machine, number = divmod(index, CHANGES)
        before = float(sizes[machine, number - 1]) if number else 0.0
        change = Change(f"machine-{machine}", float(at[machine, number]), before, float(sizes[machine, number]))
        began = _clock()
        predictor.observe(change)
        learning.append(_clock() - began)
        plain.observe(change)
    plain.learned()
    predictor.advance(NOW_S)
    fleet = Fleet(predictor)
    for machine in range(size):
        name, cores = f"machine-{machine}", float(sizes[machine, -1])
        fleet.put(name, cores)
        plain.put(name, cores)
        free = cores * float(generator.uniform(0.0, 0.6))
        number = 0
        while (need := float(generator.choice((1.0, 2.0, 4.0)))) <= cores - free:
            cores -= need
            began_at = NOW_S - float(generator.uniform(0.0, 1800.0))
            task = Running(f"{name}/{number}", need, 0.0, began_at, NOW_S + float(generator.uniform(1.0, 3600.0)))
            fleet.start(name, task)
            plain.start(name, task)
            number += 1
    demands = [
        Demand(
            f"task-{number}",
            float(generator.choice((1.0, 2.0, 4.0))),
            duration_s=float(generator.uniform(60.0, 3600.0)),
        )
        for number in range(waiting)
    ]
    return _Pool(MatchMaker(fleet, matching), plain, demands, learning)


def _seconds(pool: _Pool, demand: Demand, now: float = NOW_S) -> float:
    began = _clock()
    pool.matcher.decide(demand, now)
    return _clock() - began


def _moved_s(pool: _Pool) -> float:
    """A decision at another moment than the one before."""
    moments = [NOW_S + number * APART_S for number in range(1, MOMENTS + 1)]
    return float(np.median([_seconds(pool, demand, at) for demand, at in zip(pool.demands, moments, strict=False)]))


def _cold_s(pool: _Pool) -> float:
    """The first decision with new curves, as comes once in `fresh_s` at least."""
    apart_s = pool.matcher.predictor.options.fresh_s + 1.0
    moments = [NOW_S + number * apart_s for number in range(1, FIRST + 1)]
    return float(np.median([_seconds(pool, demand, at) for demand, at in zip(pool.demands, moments, strict=False)]))


def _round_per_s(pool: _Pool, tasks: int) -> float:
    began = _clock()
    pool.matcher.decide_all(pool.demands[:tasks], pool.matcher.predictor.now)
    return tasks / (_clock() - began)


def _plain_s(pool: _Pool, demand: Demand) -> float:
    began = _clock()
    pool.plain.decide(demand.cores, demand.duration_s or 0.0, NOW_S)
    return _clock() - began
