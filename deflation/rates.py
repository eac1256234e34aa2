"""How many requests a caller may make: a token bucket for each, as a state machine without a clock."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from deflation.errors import InvalidField


@dataclass(frozen=True, slots=True)
class Rate:
    """So many requests a second in the long run, and ``burst`` at once after a rest.

    :raises InvalidField: one of them is not finite, ``per_s`` is not above 0, or ``burst`` is below 1.
    """

    per_s: float
    burst: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_s) and self.per_s > 0):
            raise InvalidField("per_s", "must be above 0")
        if not (math.isfinite(self.burst) and self.burst >= 1):
            raise InvalidField("burst", "must be at least 1")


class Buckets:
    """One bucket for each caller that was seen lately.

    What is kept of a caller is the moment at which its bucket will be full again, nothing where it is full.

    :param most: callers that are remembered; beyond that the one that has been quiet longest starts anew.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def take(self, caller: str, rate: Rate, now: float) -> float:
        """Take one request out of a caller's bucket.

        :param now: seconds on any clock that does not go back.
        :returns: 0.0 if it may pass; else in how many seconds the next one may, and nothing is taken.
        """
        full_at = max(self._full_at.get(caller, now), now)
        wait_s = full_at - now - (rate.burst - 1) / rate.per_s
        # Sums of fractions of seconds are not exact; a nanosecond is nobody's advantage.
        if wait_s > 1e-9:
            return wait_s
        self._full_at[caller] = full_at + 1 / rate.per_s
        self._full_at.move_to_end(caller)
        while len(self._full_at) > self._most:
            self._full_at.popitem(last=False)
        return 0.0

    def __len__(self) -> int:
        return len(self._full_at)
