"""Totals that daemons keep of what happens too fast to be looked at: plain numbers, counted on one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

#: Upper bounds of what lasts, seconds: calls, and operations.
CALL_S: Final = (0.005, 0.02, 0.1, 0.5, 2.0, 5.0, 15.0)
OPERATION_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)


class Distribution:
    """How many values were at most each of some bounds, and their sum.

    :param bounds: in ascending order.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Bound and how many values were at most that, as Prometheus has them."""
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]


class Distributions(dict[KeyT, Distribution], Generic[KeyT]):
    """One `Distribution` for each key that was seen."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._bounds = bounds

    def __missing__(self, key: KeyT) -> Distribution:
        made = self[key] = Distribution(self._bounds)
        return made


@dataclass(slots=True)
class Calls:
    """Calls of something that may be slow or silent."""

    seconds: Distribution = field(default_factory=lambda: Distribution(CALL_S))
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: str, seconds: float) -> None:
        """One has ended."""
        self.outcomes[outcome] += 1
        self.seconds.add(seconds)


@dataclass(slots=True)
class Reports:
    """Reports of a host agent to its manager."""

    taken: int = 0
    #: Tries in which no manager took one.
    failed: int = 0
    #: Seconds since the epoch; None: none was taken yet.
    taken_at: float | None = None
