"""Pools of machines whose cores change by a known law."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions

Law = Callable[[np.random.Generator], float]
#: When `steady_and_shaky` ends.
NOW_S = 86_400.0


def short_or_long(generator: np.random.Generator) -> float:
    return float(generator.exponential(400.0) if generator.random() < 0.7 else generator.exponential(15_000.0))


def renewal_pool(
    machines: int, law: Law, until_s: float, seed: int = 0, cores: int = 20, start_s: float = 0.0
) -> Iterator[Change]:
    """Changes in the order of their times: each machine swings by one core at intervals drawn from one law."""
    generator = np.random.default_rng(seed)
    found: list[Change] = []
    for number in range(machines):
        at, now = start_s, cores
        found.append(Change(f"m{number}", at, 0.0, cores))
        while (at := at + law(generator)) < until_s:
            after = now - 1 if generator.random() < 0.5 and now > 1 else now + 1
            found.append(Change(f"m{number}", at, now, after))
            now = after
    return iter(sorted(found, key=lambda change: change.at))


def steady_and_shaky(options: PredictorOptions | None = None) -> Predictor:
    """A pool with a day of history, one machine that has just changed and one that has been steady for long."""
    predictor = Predictor(0.0, options)
    own = [Change("steady", 30_000.0, 0.0, 8.0), Change("shaky", NOW_S - 10.0, 0.0, 8.0)]
    for change in sorted([*renewal_pool(40, short_or_long, NOW_S, seed=6), *own], key=lambda change: change.at):
        predictor.observe(change)
    return predictor
