"""Prediction of waits: a forest and, beside it, a straight line, both judged on what they have not seen (§3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ebbtide.matcher.policies.forest import Forest, grown, nothing, predicted
from ebbtide.simulator.jobs.columns import Floats

#: Of so many stretches of time these judge, and the others are learned from: 70 and 30 % (§4). Rows that stand side by
#: side are much alike, so drawing single ones would let the judges see what was learned.
_STRETCHES: Final = 10
_JUDGES: Final = (2, 5, 8)


@dataclass(frozen=True)
class Learned:
    """A forest, and Matthews correlation coefficients of it and of least squares; NaN where one class is missing."""

    forest: Forest
    forest_mcc: float
    line_mcc: float
    rows: int
    late_share: float


def correlation(said: Floats, true: Floats) -> float:
    """Matthews' coefficient of two yes-or-no columns: 1 always right, 0 as chance, -1 always wrong.

    NaN where the truth has one class only; 0 where what was said has.
    """
    yes, was = said >= 0.5, true >= 0.5
    if was.all() or not was.any():
        return math.nan
    both, neither = float((yes & was).sum()), float((~yes & ~was).sum())
    wrong, missed = float((yes & ~was).sum()), float((~yes & was).sum())
    scale = (both + wrong) * (both + missed) * (neither + wrong) * (neither + missed)
    return (both * neither - wrong * missed) / math.sqrt(scale) if scale > 0 else 0.0


def learn(rows: Floats, labels: Floats, seed: int) -> Learned:
    """Grow a forest, and say how good it is.

    :param rows: shape (count, features), in the order of time; ``labels``: shape (count,), 1 for a wait of b or more.
    """
    if len(rows) < _STRETCHES:
        return Learned(nothing(), math.nan, math.nan, len(rows), math.nan)
    judge = np.isin(np.arange(len(rows)) * _STRETCHES // len(rows), _JUDGES)
    seen, known = rows[~judge], labels[~judge]
    forest = grown(seen, known, np.random.default_rng([seed, 137]))
    said = np.array([predicted(forest, row) for row in rows[judge]])
    spread = np.where(seen.std(axis=0) > 0, seen.std(axis=0), 1.0)
    scaled = np.column_stack([(rows - seen.mean(axis=0)) / spread, np.ones(len(rows))])
    weights = np.linalg.lstsq(scaled[~judge], known, rcond=None)[0]
    return Learned(
        forest,
        correlation(said, labels[judge]),
        correlation(scaled[judge] @ weights, labels[judge]),
        len(rows),
        float(labels.mean()),
    )
