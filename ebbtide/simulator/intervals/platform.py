"""Machines of the model: how many are on, as far as is measured and until what was under way then has ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import INPUTS, Input
from ebbtide.simulator.generators import capacity
from ebbtide.simulator.inputs.batches import CapacityBatch, SeriesBatch
from ebbtide.simulator.jobs.columns import TASK, TIME, Floats
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.model import Walk

#: Steps of 3600 / changes_per_h seconds need not be whole numbers.
_ROUNDING_S: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Carbon:
    """Capacity under a constant carbon budget (Wijayawardana 2025 §4.2): so high that mean capacity is ``mean``.

    :param every_s: between two instants at which machines may be switched, the first of which is time 0.
    """

    series: Input
    from_s: float
    mean: float
    every_s: float

    def shares(self, budget_s: float) -> SeriesBatch:
        """Shares of machines that are on, from time 0 to the end of the series.

        :param budget_s: mean capacity is that of so many seconds.
        :raises InvalidParameter: the series has no values, ends before the window begins, or has values at other
            instants than machines may be switched at.
        """
        batches = list(self.series.batches(SeriesBatch, "carbon", from_first=True))
        if not batches:
            raise InvalidParameter(f"{INPUTS}.carbon", "has no values")
        whole = SeriesBatch.joined(batches)
        if self.from_s > whole.at_s[-1]:
            last = f"the last value of the series comes at {whole.at_s[-1]:g} s"
            raise InvalidParameter("carbon_from_s", f"is {self.from_s:g}, but {last}")
        # what holds when the window begins may come before it
        first = max(int(np.searchsorted(whole.at_s, self.from_s, side="right")) - 1, 0)
        kept = whole.take(slice(first, None))
        self._aligned(kept.at_s)
        kept = replace(kept, at_s=np.maximum(kept.at_s - self.from_s, 0.0))
        budget = capacity.carbon_budget([kept.take(kept.at_s < budget_s)], self.mean)
        return next(capacity.under_carbon([kept], budget))

    def _aligned(self, at_s: Floats) -> None:
        """:raises InvalidParameter: values are not a step apart, or not whole steps from the window's begin."""
        step_s = float(np.diff(at_s).min(initial=math.inf))
        if math.isfinite(step_s) and abs(step_s - self.every_s) > _ROUNDING_S:
            given = f"is {3600 / self.every_s:g}, so that machines may be switched every {self.every_s:g} s"
            raise InvalidParameter("changes_per_h", f"{given}, but the series of carbon has a step of {step_s:g} s")
        later_s = at_s[at_s > self.from_s]
        steps = (later_s - self.from_s) / self.every_s
        off = np.abs(steps - np.round(steps)) * self.every_s > _ROUNDING_S
        if off.any():
            wanted = f"each later value of the series must come whole steps of {self.every_s:g} s after it"
            one = f"one comes at {later_s[off][0]:.12g} s"
            raise InvalidParameter("carbon_from_s", f"is {self.from_s:.12g}; {wanted}, and {one}")


@dataclass(frozen=True, slots=True)
class Seen:
    """What has happened up to an instant.

    :param killed: as `Intervals.killed`; ``met``: as `Intervals.met`.
    """

    kills: int
    changes: int
    killed: Floats
    met: Floats

    @classmethod
    def of(cls, engine: Engine) -> Seen:
        found, kept = engine.results(), engine.policy_state
        return cls(found.kills, found.changes, kept.killed.copy(), kept.met.copy())


class Changes:
    """What becomes of the machines in ``days_s``, or up to ``to_s`` where that is later; and then for as long as
    anything runs that began before ``to_s``: only what completes is of use, and machines that stay as they are would
    let all of it complete.
    """

    def __init__(
        self, platform: Walk | Carbon, machines: Machines, days_s: float, to_s: float, rng: np.random.Generator
    ) -> None:
        self.until_s = max(days_s, to_s) if math.isfinite(to_s) else days_s
        self._platform, self._machines, self._days_s, self._to_s, self._rng = platform, machines, days_s, to_s, rng
        self._seen: Seen | None = None
        #: When what is known of the machines ends, and what was under way when the window did.
        self._known_s, self._done_s = math.inf, -math.inf

    def batches(self, engine: Callable[[], Engine]) -> Iterator[CapacityBatch]:
        """For the engine that they are of. Raises InvalidParameter."""
        stream = capacity.machines(
            self._shares(engine), self._machines.count, self._machines.cpu_cores, memory_mib=2.0**39
        )
        first = next(stream)
        yield first
        # changes nothing: the engine asks for what comes next at that time, when it is known what is under way
        yield replace(first.take(slice(-1, None)), at_s=np.array([self.until_s]))
        yield from stream

    def seen_by(self, engine: Engine) -> Seen:
        """What had happened when the days were over, or the run before that."""
        return self._seen or Seen.of(engine)

    def beyond(self) -> tuple[str, ...]:
        """What is to be said of a window, or of what was under way at its end, that outlasts the series."""
        to_s = self._to_s if math.isfinite(self._to_s) else self.until_s
        if self._known_s >= max(to_s, self._done_s):
            return ()
        what = f"what is measured ends at {to_s:g} s"
        if self._known_s >= to_s:
            what = f"what was under way at the end of the window runs until {self._done_s:g} s"
        return (f"{what}, and the series of carbon ends at {self._known_s:g} s; then machines stay as they are",)

    def _shares(self, engine: Callable[[], Engine]) -> Iterator[SeriesBatch]:
        if isinstance(self._platform, Carbon):
            shares = self._platform.shares(self._days_s)
            # the last value holds for as long as the one before it
            self._known_s = float(shares.at_s[-1] + np.diff(shares.at_s[-2:]).sum())
        else:
            shares = self._platform.shares(self._rng, self.until_s)
        yield shares.take(shares.at_s < self.until_s)
        self._seen = Seen.of(engine())
        self._done_s = ends_s = self._last_end_s(engine())
        if ends_s <= self.until_s:
            return
        if isinstance(self._platform, Walk):
            at_s, share = float(shares.at_s[-1]), float(shares.value[-1])
            on = replace(self._platform, start=share).shares(self._rng, ends_s - at_s)
            # the first of them is the last one again; rounding must move none before the end
            shares = SeriesBatch(at_s=np.maximum(on.at_s + at_s, self.until_s), value=on.value)
        yield shares.take((shares.at_s >= self.until_s) & (shares.at_s < ends_s))

    def _last_end_s(self, engine: Engine) -> float:
        """When all ends that runs now and began within what is measured; -inf if nothing does."""
        s = engine.state
        counts = (s.tasks[:, TASK.machine] >= 0) & (s.times[:, TIME.began] < self._to_s)
        return float(s.times[counts, TIME.ends].max(initial=-math.inf))
