"""When a task is expected to be done on a machine (seed 000 §3.1.2, Eq. 2), from what its pool's history teaches."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from task_matcher.prediction import Direction, History, completion_probability

#: A restart on a fresh machine that never keeps its cores would take for ever; it counts as one in a hundred.
LEAST_PROBABILITY: Final = 0.01


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a task may expect of a machine."""

    #: From now to its end, with the wait: ``E_wc``.
    seconds: float
    #: ``P_c``; None without history.
    completion_probability: float | None


class Predictor(Protocol):
    """Says what to expect."""

    def expect(self, machine: str, wait_s: float, duration_s: float) -> Expectation:
        """Of a task that begins there in ``wait_s`` seconds and runs for ``duration_s``."""


class HistoryPredictor:
    """By Eq. 1 and 2, from a history of completed inter-change times.

    A machine of which nothing is known counts as one that keeps its cores: the task is not kept from it, and nothing is
    promised either (its probability is None).

    :param variable: machines whose cores can be taken away.
    :param now: seconds since the epoch, on the clock of the history.
    """

    def __init__(self, history: History, variable: Set[str], now: float) -> None:
        self._history = history
        self._variable = variable
        self._now = now
        self._sums = np.concatenate(([0.0], np.cumsum(history.intervals)))

    def expect(self, machine: str, wait_s: float, duration_s: float) -> Expectation:
        last = self._history.last.get(machine)
        if machine not in self._variable or last is None or last.gone:
            return Expectation(wait_s + duration_s, None)
        elapsed_s = max(self._now - last.at, 0.0) + wait_s
        probability = self._probability(last.direction, elapsed_s, duration_s)
        if probability is None:
            return Expectation(wait_s + duration_s, None)
        wasted_s = self._wasted(elapsed_s, duration_s)
        again_s = wasted_s + self._fresh(duration_s)
        return Expectation(wait_s + probability * duration_s + (1.0 - probability) * again_s, probability)

    def _probability(self, last: Direction, elapsed_s: float, duration_s: float) -> float | None:
        history = self._history
        shrink = history.shrink_probability(last)
        return completion_probability(history.intervals, shrink, elapsed_s, duration_s)

    def _wasted(self, elapsed_s: float, duration_s: float) -> float:
        """``w``: the mean of ``X - e`` over intervals that end within the task's lifetime; 0 if there are none."""
        intervals = self._history.intervals
        low = int(np.searchsorted(intervals, elapsed_s, side="right"))
        high = int(np.searchsorted(intervals, elapsed_s + duration_s, side="right"))
        if high <= low:
            return 0.0
        return float(self._sums[high] - self._sums[low]) / (high - low) - elapsed_s

    def _fresh(self, duration_s: float) -> float:
        """``E_wc(g, 0, 0, d)``: on a machine that has just started, begun again as often as it takes."""
        probability = self._probability(Direction.GROWTH, 0.0, duration_s)
        if probability is None:
            return duration_s
        probability = max(probability, LEAST_PROBABILITY)
        return duration_s + (1.0 - probability) / probability * self._wasted(0.0, duration_s)
