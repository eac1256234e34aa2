"""Algorithm 1 of Agarwal et al. 2023 in plain Python, which `make bench NAME=matcher` compares with.

Written as one would: intervals in a sorted list with running sums, looked up by bisection; each machine's running tasks
sorted by their ends once, when they change.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import accumulate

from ebbtide.matcher.match.fleet import Running
from ebbtide.matcher.predict.changes import Change, Direction


class PlainMatcher:
    """Machines one by one. Completed intervals only."""

    def __init__(self) -> None:
        self._intervals: list[float] = []
        self._sums: list[float] = [0.0]
        self._last: dict[str, tuple[float, Direction]] = {}
        self._pairs: dict[tuple[Direction, Direction], int] = {}
        self._shrink: dict[Direction, float] = {}
        self._cores: dict[str, float] = {}
        self._running: dict[str, list[tuple[float, float]]] = {}

    def observe(self, change: Change) -> None:
        """Keep an interval."""
        direction = change.direction
        if direction is None:
            return
        last = self._last.get(change.machine)
        if last is not None:
            self._intervals.append(change.at - last[0])
            self._pairs[last[1], direction] = self._pairs.get((last[1], direction), 0) + 1
        self._last[change.machine] = (change.at, direction)

    def learned(self) -> None:
        """All is known: sort it."""
        self._intervals.sort()
        self._sums = [0.0, *accumulate(self._intervals)]
        for x in Direction:
            shrinks = self._pairs.get((x, Direction.SHRINK), 0)
            self._shrink[x] = shrinks / max(shrinks + self._pairs.get((x, Direction.GROWTH), 0), 1)

    def put(self, machine: str, cores: float) -> None:
        """A machine has so many cores."""
        self._cores[machine] = cores
        self._running[machine] = []

    def start(self, machine: str, task: Running) -> None:
        """A task runs there."""
        insort(self._running[machine], (task.ends_at, task.cores))

    def decide(self, cores: float, duration_s: float, now: float) -> tuple[float, str] | None:
        """The least expected time and its machine."""
        again_p, again_w = self._chances(Direction.GROWTH, 0.0, duration_s)
        again_p = max(again_p, 0.02)
        restart_s = duration_s + (1.0 - again_p) / again_p * again_w
        best: tuple[float, str] | None = None
        for machine, (at, direction) in self._last.items():
            wait_s = self._wait_s(machine, cores, now)
            if wait_s == math.inf:
                continue
            p, w = self._chances(direction, now - at + wait_s, duration_s)
            expected_s = wait_s + p * duration_s + (1.0 - p) * (w + restart_s)
            if best is None or expected_s < best[0]:
                best = (expected_s, machine)
        return best

    def _wait_s(self, machine: str, cores: float, now: float) -> float:
        free = self._cores[machine]
        if free < cores:
            return math.inf
        running = self._running[machine]
        for _, held in running:
            free -= held
        if free >= cores:
            return 0.0
        for ends_at, held in running:
            free += held
            if free >= cores:
                return max(ends_at - now, 0.0)
        return math.inf

    def _chances(self, x: Direction, elapsed_s: float, duration_s: float) -> tuple[float, float]:
        """P_c by Eq. 1, and w."""
        low = bisect_right(self._intervals, elapsed_s)
        high = bisect_right(self._intervals, elapsed_s + duration_s)
        lived = len(self._intervals) - low
        if lived == 0:
            return 0.5, 0.5 * duration_s
        ended = high - low
        wasted_s = (self._sums[high] - self._sums[low]) / ended - elapsed_s if ended else 0.5 * duration_s
        return 1.0 - self._shrink[x] * ended / lived, wasted_s
