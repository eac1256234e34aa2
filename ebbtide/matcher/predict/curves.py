"""From counts by age to a survival curve: the product-limit (Kaplan-Meier) estimate on the bins of a grid.

Kernel functions (see `matcher.predict.ages`). An interval that was not seen from its beginning, or not to its end,
counts only for the ages at which it was watched: left truncation and right censoring of an actuarial life table, half
a bin where it entered and half a bin where it left. So a machine that has been steady for long counts, although its
interval is still running (Agarwal et al. 2023, §3.1.1 takes completed intervals only).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.matcher.predict.ages import BINS, Floats, edge, position

#: Cumulative hazard at which no interval is left: exp(-50) is nothing.
NOBODY: Final = 50.0
#: An age this much below the last one known begins the tail whose rate is used beyond it.
TAIL: Final = 4.0


def add_watched(entered: Floats, from_s: float, born: bool, to_s: float, censored: bool, weight: float) -> None:
    """Count that an interval was watched from one age to another. O(1), whatever lies between.

    Parts of one interval that follow on each other add up to the whole, so that an interval can be counted piece by
    piece; ``to_s`` below ``from_s`` takes back what was counted too much.

    :param entered: how many more are at risk in a bin than in the one before, shape (BINS + 2,); changed.
    :param born: whether it was watched from its beginning; ``from_s`` is 0 then.
    :param censored: whether it went on beyond ``to_s``.
    :param weight: 1, or -1 to take a part out again.
    """
    first = np.int64(position(from_s))
    last = np.int64(position(to_s))
    share = (1.0 if born else 0.5) * weight
    entered[first] += share
    entered[first + 1] += weight - share
    entered[last + 1] -= weight
    if censored:
        entered[last] -= 0.5 * weight
        entered[last + 1] += 0.5 * weight


def add_all_watched(entered: Floats, from_s: Floats, to_s: Floats) -> None:
    """As `add_watched` for intervals that go on, one an element; ``from_s`` below 0: watched from its beginning."""
    width = len(entered)
    first = position(from_s).astype(np.int64)
    last = position(to_s).astype(np.int64)
    share = np.where(from_s < 0.0, 1.0, 0.5)
    left = 0.5 * np.bincount(last, np.ones(len(last)), width)
    entered += np.bincount(first, share, width) - left
    entered[1:] += (np.bincount(first, 1.0 - share, width) - left)[: width - 1]


def fill_curve(entered: Floats, ended: Floats, extrapolate: bool, hazard: Floats, area: Floats, known: Floats) -> float:
    """The curve of what `add_watched` has counted.

    Beyond the last age at which anything was watched the rate of the last two doublings goes on if ``extrapolate``;
    otherwise nothing is known of machines that are older.

    :param ended: how many intervals ended in each bin, shape (BINS,).
    :param hazard: out: cumulative hazard ``-log P(X > edge)``, shape (BINS + 2,).
    :param area: out: the integral of ``P(X > t)`` up to each edge in seconds, shape (BINS + 2,).
    :param known: out: 0 for bins of ages of which something is known, NaN for the others, shape (BINS + 2,).
    :returns: how many intervals ended; 0 means that nothing is known.
    """
    total = 0.0
    last = -1
    at_risk = 0.0
    for index in range(BINS):
        at_risk += entered[index]
        if at_risk > 0.25 or ended[index] > 0.25:
            last = index
        total += ended[index]
    tail_from = edge(last + 1.0) / TAIL
    tail_ended = 0.5
    tail_s = 0.0
    at_risk = 0.0
    level = 0.0
    lived_s = 0.0
    for index in range(BINS + 2):
        begin_s = edge(index)
        width_s = edge(index + 1.0) - begin_s
        hazard[index] = level
        area[index] = lived_s
        known[index] = 0.0 if total > 0.0 and (index <= last or extrapolate) else np.nan
        before = level
        if index <= last:
            at_risk += entered[index]
            risk = max(at_risk, ended[index])
            if risk > 0.0:
                share = ended[index] / risk
                level += NOBODY if share > 1.0 - 1e-9 else -np.log(1.0 - share)
            if begin_s >= tail_from:
                tail_ended += ended[index]
                tail_s += risk * width_s
        elif extrapolate and tail_s > 0.0:
            level += tail_ended / tail_s * width_s
        elif not extrapolate:
            level = max(level, NOBODY)
        level = min(level, 2.0 * NOBODY)
        # Within a bin the hazard is even, so survival falls geometrically.
        fall = level - before
        survived = np.exp(-before)
        lived_s += survived * width_s * (1.0 if fall < 1e-9 else (1.0 - np.exp(-fall)) / fall)
    return total
