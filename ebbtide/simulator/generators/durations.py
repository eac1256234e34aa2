"""Durations: uniform, Gaussian, bounded Pareto (Agarwal 2023 §4.2.1) and clamped Zipf (Wijayawardana 2025, Table 4.1).

Each is drawn from the generator that is passed in, by its inverse distribution, so that one seed gives one workload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.extras import Later
from ebbtide.simulator.inputs.batches import Floats

special: Any = Later("scipy.special")

#: Seed 001: durations are whole multiples of 5 min, and at most 720 h.
ZIPF_STEP_S: Final = 300.0
ZIPF_MOST: Final = 8640
#: Of a bounded Pareto distribution, least to most: powers of less are beyond floats.
_LEAST_RATIO: Final = 1e-15


class Durations(Protocol):
    """A distribution of durations."""

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """``count`` durations; s."""

    def mean_s(self) -> float:
        """The exact mean; s."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform on [least_s, most_s).

    :raises InvalidParameter: not 0 <= least_s < most_s.
    """

    least_s: float
    most_s: float

    def __post_init__(self) -> None:
        _finite(self.least_s, "least_s")
        _finite(self.most_s, "most_s")
        if self.least_s < 0:
            raise InvalidParameter("least_s", f"must not be negative, but is {self.least_s:g}")
        if self.most_s <= self.least_s:
            raise InvalidParameter("most_s", f"must be above least_s, but is {self.most_s:g}")

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.uniform(self.least_s, self.most_s, count)

    def mean_s(self) -> float:
        return (self.least_s + self.most_s) / 2


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Normal with centre_s and spread_s (its standard deviation), cut off at least_s: truncated, not clamped.

    :raises InvalidParameter: a spread that is not positive, or least_s below 0.
    """

    centre_s: float
    spread_s: float
    least_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("centre_s", "spread_s", "least_s"):
            _finite(getattr(self, name), name)
        if self.spread_s <= 0:
            raise InvalidParameter("spread_s", f"must be above 0, but is {self.spread_s:g}")
        if self.least_s < 0:
            raise InvalidParameter("least_s", f"must not be negative, but is {self.least_s:g}")
        if (self.least_s - self.centre_s) / self.spread_s > 8:
            raise InvalidParameter("least_s", "is so far above centre_s that nothing of the distribution is left")

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        low = special.ndtr((self.least_s - self.centre_s) / self.spread_s)
        values = self.centre_s + self.spread_s * special.ndtri(low + (1 - low) * rng.random(count))
        return np.maximum(np.asarray(values, np.float64), self.least_s)

    def mean_s(self) -> float:
        edge = (self.least_s - self.centre_s) / self.spread_s
        density = math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi)
        return self.centre_s + self.spread_s * density / float(special.ndtr(-edge))


@dataclass(frozen=True, slots=True)
class BoundedPareto:
    """Pareto of ``shape`` between least_s and most_s, truncated.

    :raises InvalidParameter: not 0 < least_s < most_s, or a shape that is not positive.
    """

    shape: float
    least_s: float
    most_s: float

    def __post_init__(self) -> None:
        for name in ("shape", "least_s", "most_s"):
            _finite(getattr(self, name), name)
            if getattr(self, name) <= 0:
                raise InvalidParameter(name, f"must be above 0, but is {getattr(self, name):g}")
        if self.most_s <= self.least_s:
            raise InvalidParameter("most_s", f"must be above least_s, but is {self.most_s:g}")
        if self.least_s / self.most_s < _LEAST_RATIO:
            raise InvalidParameter("least_s", f"must be at least {_LEAST_RATIO:g} of most_s, but is {self.least_s:g}")

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        tail = (self.least_s / self.most_s) ** self.shape
        values: Floats = self.least_s * (1 - rng.random(count) * (1 - tail)) ** (-1 / self.shape)
        return np.asarray(np.clip(values, self.least_s, self.most_s), np.float64)

    def mean_s(self) -> float:
        ratio = self.least_s / self.most_s
        scale = 1 - ratio**self.shape
        if scale <= 0:
            # Too little apart, or too even: nor does rounding leave `draw` a difference.
            return self.least_s
        if self.shape == 1:
            mean_s = self.least_s * math.log(1 / ratio) / scale
        else:
            mean_s = self.shape / (self.shape - 1) * self.least_s * (1 - ratio ** (self.shape - 1)) / scale
        return float(min(max(mean_s, self.least_s), self.most_s))


@dataclass(frozen=True, slots=True)
class ClampedZipf:
    """``min(zipf(exponent), most) * step_s``: Zipf with its tail put on ``most`` (Wijayawardana 2025, Table 4.1).

    Clamped and not truncated: what lies beyond ``most`` counts as ``most``, which is up to half of all at 1.1.

    :raises InvalidParameter: an exponent of 1 or less, or a step or ``most`` that is not positive.
    """

    exponent: float
    most: int = ZIPF_MOST
    step_s: float = ZIPF_STEP_S

    def __post_init__(self) -> None:
        _finite(self.exponent, "exponent")
        _finite(self.step_s, "step_s")
        if self.exponent <= 1:
            raise InvalidParameter("exponent", f"must be above 1, but is {self.exponent:g}")
        if self.most < 1:
            raise InvalidParameter("most", f"must be at least 1, but is {self.most}")
        if self.step_s <= 0:
            raise InvalidParameter("step_s", f"must be above 0, but is {self.step_s:g}")

    def _shares(self) -> Floats:
        """How likely each of 1 ... most is; the last has the whole tail."""
        shares: Floats = np.arange(1, self.most + 1, dtype=np.float64) ** -self.exponent / special.zeta(self.exponent)
        shares[-1] = 1 - shares[:-1].sum()
        return shares

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        # NumPy's own zipf throws away what does not fit an integer, which at 1.1 is more than a hundredth.
        steps = np.searchsorted(np.cumsum(self._shares())[:-1], rng.random(count), side="right") + 1
        return np.asarray(steps * self.step_s, np.float64)

    def mean_s(self) -> float:
        return float((self._shares() * np.arange(1, self.most + 1)).sum() * self.step_s)


def _finite(value: float, name: str) -> None:
    if not math.isfinite(value):
        raise InvalidParameter(name, "must be finite")
