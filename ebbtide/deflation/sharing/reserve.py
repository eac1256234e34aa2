"""Reserve of a host in steady mode: how much memory is to be free before it is asked for, learned from arrivals.

An arrival fits at once where the reserve is no smaller than what came within the time that the reserve takes to be
full again, the arrival itself included. So the reserve is a quantile, over the latest arrivals, of just that amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

#: Share of arrivals that are to fit at once.
QUANTILE: Final = 0.95
#: Arrivals that are remembered, and how fast what they say loses weight, in seconds.
MOST_ARRIVALS: Final = 256
HALF_LIFE_S: Final = 86_400.0
#: What is older than this says nothing, in seconds.
FORGET_S: Final = 14 * HALF_LIFE_S
#: How long a reserve takes to be full again: before that was seen, and at least and at most, in seconds.
REFILL_S: Final = 300.0
LEAST_REFILL_S: Final = 10.0
MOST_REFILL_S: Final = 3600.0
#: How much a refill that was seen counts against those before.
_NEW_SHARE: Final = 0.25
#: A learned reserve takes no more than this share of what the host hands out.
MOST_SHARE: Final = 0.25


@dataclass(slots=True)
class ReserveLearner:
    """What one host has learned. Times are seconds of any one clock; those of a restarted host go on.

    :param refill_s: how long a reserve takes to be full again.
    :param arrivals: (at, MiB) of the latest, oldest first.
    """

    refill_s: float = REFILL_S
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    #: Since when the reserve is being filled; None: it is not, or nothing is known.
    _filling_since: float | None = None
    _looked_at: float = 0.0

    def arrived(self, at: float, memory_mib: float) -> None:
        """Take in an arrival. Where the clock went back, those before come right before it.

        :param memory_mib: what it takes of the host, its overhead included.
        """
        if memory_mib <= 0:
            return
        if self.arrivals and (ahead_s := self.arrivals[-1][0] - at) > 0:
            # Else all that come would have the time of a clock that was ahead, and be forgotten no more.
            self.arrivals = [(min(then - ahead_s, at), mib) for then, mib in self.arrivals]
        self.arrivals.append((at, memory_mib))
        del self.arrivals[:-MOST_ARRIVALS]

    def observe(self, now: float, filling: bool) -> None:
        """Take in whether the reserve is being filled, to learn how long that takes until it is full.

        :param filling: as `Trimmer.is_filling` has it: a reserve that lacks too little to be filled says nothing.
        """
        self._looked_at = now
        if filling:
            self._filling_since = now if self._filling_since is None else self._filling_since
        elif self._filling_since is not None:
            took_s = min(max(now - self._filling_since, LEAST_REFILL_S), MOST_REFILL_S)
            self.refill_s += _NEW_SHARE * (took_s - self.refill_s)
            self._filling_since = None

    def waits(self, now: float) -> None:
        """Take in that nobody could fill the reserve since the last look: that time does not count."""
        if self._filling_since is not None:
            self._filling_since += now - self._looked_at
        self._looked_at = now

    def rests(self) -> None:
        """Take in that nobody fills the reserve for now: how long it is short meanwhile says nothing."""
        self._filling_since = None

    def learned_mib(self, now: float) -> float:
        """The reserve by which the wanted share of arrivals would have fitted at once; 0 without any."""
        seen = [(at, mib) for at, mib in self.arrivals if now - at < FORGET_S]
        within, first, demands = 0.0, 0, []
        for at, mib in seen:
            within += mib
            while seen[first][0] < at - self.refill_s:
                within -= seen[first][1]
                first += 1
            demands.append((within, 0.5 ** (max(now - at, 0.0) / HALF_LIFE_S)))
        return _quantile(demands, QUANTILE)


def _quantile(weighed: Sequence[tuple[float, float]], share: float) -> float:
    """The least value that, with all below it, has the share of the weight; 0 of none."""
    left = share * sum(weight for _, weight in weighed)
    ordered = sorted(weighed)
    for value, weight in ordered:
        left -= weight
        if left <= 1e-9:
            return value
    return ordered[-1][0] if ordered else 0.0


def reserve_of(asked_mib: float | None, learned_mib: float, capacity_mib: float) -> float:
    """The reserve to keep, in MiB: as an operator asked for it, else as learned, within a share of the host."""
    return min(asked_mib, capacity_mib) if asked_mib is not None else min(learned_mib, MOST_SHARE * capacity_mib)
