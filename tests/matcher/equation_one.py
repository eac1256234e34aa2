"""Eq. 1 of Agarwal et al. 2023 (§3.1.1, Fig. 8) as the paper says it: what the live P_c is held against.

Over all changes at once, by completed intervals only, each counted whole, and exact to the second. The live path
(`matcher.predict.completion_probability`) takes changes one by one and counts running intervals too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.ages import Floats, Value, position
from ebbtide.matcher.predict.changes import WINDOW_S, Change, Direction, LastChange, check_duration, whole_cores


@dataclass(frozen=True, slots=True)
class History:
    """What the changes of a pool of machines teach."""

    #: Completed inter-change times in seconds, ascending. Shape (n,).
    intervals: NDArray[np.float64]
    #: How often each direction followed on each: ``pairs[first, second]``.
    pairs: Mapping[tuple[Direction, Direction], int]
    #: The last change of each machine, by name.
    last: Mapping[str, LastChange]

    def shrink_probability(self, last: Direction) -> float | None:
        """``P_s(x)``: how likely a shrink follows on x; None if nothing has ever followed on x."""
        shrinks = self.pairs.get((last, Direction.SHRINK), 0)
        total = shrinks + self.pairs.get((last, Direction.GROWTH), 0)
        return shrinks / total if total else None

    def last_of(self, machine: str) -> LastChange | None:
        """The last change of a machine; None if none is known."""
        return self.last.get(machine)

    def probabilities_of(self, machines: Sequence[str], now: float, duration_s: float) -> list[float | None]:
        """P_c of each machine, None where history is silent.

        :raises InvalidField: a duration that is negative or not finite.
        """
        check_duration(duration_s)
        found: list[float | None] = []
        for name in machines:
            last = self.last.get(name)
            if last is None or last.gone:
                found.append(None)
                continue
            shrink = self.shrink_probability(last.direction)
            found.append(completion_probability(self.intervals, shrink, max(now - last.at, 0.0), duration_s))
        return found


def history_of(changes: Iterable[Change], now: float, window_s: float = WINDOW_S) -> History:
    """The inter-change times and bigrams of a pool.

    An interval lies between two changes of one machine, and counts if it was completed within ``window_s`` before
    ``now``. None reaches over a machine's end (its name may be used again), and an end by its owner completes none.

    :param changes: what is known at ``now``, in any order. Unchanged whole cores are no change.
    """
    intervals: list[float] = []
    pairs: Counter[tuple[Direction, Direction]] = Counter()
    last: dict[str, LastChange] = {}
    for change in sorted(changes, key=lambda change: change.at):
        direction = change.direction
        if direction is None:
            continue
        before = last.get(change.machine)
        if before and not before.gone and not change.starts and not change.by_owner and change.at > now - window_s:
            intervals.append(change.at - before.at)
            pairs[before.direction, direction] += 1
        last[change.machine] = LastChange(change.at, direction, whole_cores(change.cores_after), change.ends)
    return History(np.sort(np.asarray(intervals, dtype=np.float64)), dict(pairs), last)


def survival(intervals: NDArray[np.float64], seconds: float) -> float | None:
    """``P(X > seconds)``, the complementary CDF of the observed intervals; None if there are none.

    :param intervals: ascending, shape (n,).
    """
    if len(intervals) == 0:
        return None
    return 1.0 - float(np.searchsorted(intervals, seconds, side="right")) / len(intervals)


def completion_probability(
    intervals: NDArray[np.float64], shrink_probability: float | None, elapsed_s: float, duration_s: float
) -> float | None:
    """``P_c(x, e, d) = 1 - P_s(x) * (1 - P(X > e + d | X > e))`` (Agarwal et al. 2023 Eq. 1).

    None, and neither 0 nor 1, where history is silent:

    * no completed interval: nothing is known of X;
    * nothing ever followed on x (``shrink_probability`` is None): even where the other factor is 0, the answer 1 would
      rest on no observation of a machine in this state;
    * no interval was longer than e: this machine has outlived all that was seen, so the condition ``X > e`` has
      probability 0. It may be very steady or about to change; both would be guesses.

    :param intervals: completed inter-change times in seconds, ascending, shape (n,).
    :param shrink_probability: ``P_s(x)`` in [0, 1].
    :param elapsed_s: e, the time since the last change. Below 0 (clocks of hosts differ) counts as 0.
    :param duration_s: d, how long the task still runs.
    :raises InvalidField: a duration that is negative or not finite, a probability outside [0, 1], elapsed time that
        is not finite.
    """
    check_duration(duration_s)
    if not math.isfinite(elapsed_s):
        raise InvalidField("elapsed_s", "must be finite")
    if shrink_probability is None:
        return None
    if not 0.0 <= shrink_probability <= 1.0:
        raise InvalidField("shrink_probability", f"must be within [0, 1], but is {shrink_probability!r}")
    elapsed_s = max(elapsed_s, 0.0)
    lived, lives_on = survival(intervals, elapsed_s), survival(intervals, elapsed_s + duration_s)
    if lived is None or lives_on is None or lived <= 0.0:
        return None
    return 1.0 - shrink_probability * (1.0 - lives_on / lived)


def interpolate(values: Floats, index: Value, part: Value) -> Value:
    """Between the values at the edges of a bin: of its number, and of how far into it. More than BINS values."""
    low = values[index]
    return low + part * (values[index + 1] - low)


def lives_on(hazard: Floats, known: Floats, elapsed_s: Value, duration_s: Value) -> Value:
    """``P(X > e + d | X > e)`` by a curve on the grid of ages; NaN where nothing is known of ages like e."""
    begin = position(elapsed_s)
    end = position(elapsed_s + duration_s)
    first, last = np.int64(begin), np.int64(end)
    lived = interpolate(hazard, first, begin - first)
    return np.exp(lived - interpolate(hazard, last, end - last)) + known[first]
