"""Capacity over time: random walks, limits by carbon, and switched-off machines (Wijayawardana 2025 §4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import CapacityBatch, SeriesBatch, texts

#: Of one walk, which is held whole.
_MOST_STEPS: Final = 100_000_000


def random_walk(
    rng: np.random.Generator,
    until_s: float,
    *,
    interval_s: float = 3600.0,
    step: float = 0.15,
    least: float = 0.4,
    most: float = 1.0,
    start: float = 0.7,
    stays: bool = True,
) -> SeriesBatch:
    """Shares of full capacity: at each interval up, down or the same, a third each, by exactly ``step`` (001 §4.1).

    :param stays: False: up or down, half each, as in the simulator variableResources.

    A step that would leave [least, most] ends at the bound. Defaults are the thesis': mean 70 %, dynamic range 60 %, a
    change an hour.

    :raises InvalidParameter: not 0 <= least <= start <= most <= 1, or a step or time that is not positive.
    """
    for name, value in (("until_s", until_s), ("interval_s", interval_s), ("step", step)):
        if not (math.isfinite(value) and value > 0):
            raise InvalidParameter(name, f"must be above 0 and finite, but is {value:g}")
    if not 0 <= least < most <= 1:
        raise InvalidParameter("least", f"and most must be shares, least below most, not {least:g} and {most:g}")
    if not least <= start <= most:
        raise InvalidParameter("start", f"must lie between least and most, but is {start:g}")
    if until_s / interval_s > _MOST_STEPS:
        raise InvalidParameter(
            "interval_s", f"makes {until_s / interval_s:.3g} steps; at most {_MOST_STEPS} are allowed"
        )
    count = math.ceil(until_s / interval_s)
    moves = (rng.integers(-1, 2, count - 1) if stays else 2 * rng.integers(0, 2, count - 1) - 1) * step
    values = np.empty(count)
    share = start
    for i in range(count):
        values[i] = share
        if i < count - 1:
            share = min(max(share + float(moves[i]), least), most)
    return SeriesBatch(at_s=np.arange(count, dtype=np.float64) * interval_s, value=values)


def under_carbon(intensity: Iterable[SeriesBatch], budget: float) -> Iterator[SeriesBatch]:
    """Shares of capacity under a constant budget of carbon: ``min(1, budget / intensity)`` (Wijayawardana 2025 §4.2).

    :param budget: in the unit of the intensity: at it and below, all machines run.
    :raises InvalidParameter: a budget that is not positive.
    """
    if not (math.isfinite(budget) and budget > 0):
        raise InvalidParameter("budget", f"must be above 0 and finite, but is {budget:g}")
    for batch in intensity:
        yield SeriesBatch(at_s=batch.at_s, value=np.minimum(1.0, budget / np.maximum(batch.value, budget)))


def carbon_budget(intensity: Iterable[SeriesBatch], mean_share: float) -> float:
    """The budget at which mean capacity is ``mean_share``, by bisection over a whole series.

    Each value counts for as long as it holds, the last one for as long as the one before it.

    :raises InvalidParameter: a share that no budget reaches, or no series.
    """
    if not 0 < mean_share < 1:
        raise InvalidParameter("mean_share", f"must lie between 0 and 1, but is {mean_share:g}")
    batches = [batch for batch in intensity if len(batch)]
    if not batches or (whole := SeriesBatch.joined(batches)).value.max() <= 0:
        raise InvalidParameter("intensity", "has no value above 0")
    values, held_s = whole.value, np.diff(whole.at_s)
    # As shares of the longest: all are 1 where they are alike.
    weights = np.append(held_s, held_s[-1:]) / held_s.max() if held_s.any() else np.ones(len(values))
    low, high = 0.0, float(values.max())
    for _ in range(100):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if np.average(np.minimum(1.0, middle / np.maximum(values, middle)), weights=weights) < mean_share:
            low = middle
        else:
            high = middle
    return high


def machines(shares: Iterable[SeriesBatch], count: int, cpu_cores: float, memory_mib: float) -> Iterator[CapacityBatch]:
    """Machines that a share of capacity keeps on: the last to come on is the first to go off (Wijayawardana 2025 §4.1).

    The machines of lower numbers are the stable ones. Every machine begins with a change, to 0 if it is off.

    :raises InvalidParameter: no machines, or sizes that are not positive.
    """
    if count < 1:
        raise InvalidParameter("count", f"must be at least 1, but is {count}")
    for name, value in (("cpu_cores", cpu_cores), ("memory_mib", memory_mib)):
        if not (math.isfinite(value) and value > 0):
            raise InvalidParameter(name, f"must be above 0 and finite, but is {value:g}")
    on: int | None = None
    for batch in shares:
        at: list[float] = []
        numbers: list[int] = []
        for at_s, share in zip(batch.at_s.tolist(), batch.value.tolist(), strict=True):
            # Shares are sums of steps: a rounding error must not switch a machine off.
            wanted = min(max(math.floor(share * count + 1e-9), 0), count)
            if on is None:
                changed = range(count)
            elif wanted >= on:
                changed = range(on, wanted)
            else:
                changed = range(on - 1, wanted - 1, -1)
            at.extend(at_s for _ in changed)
            numbers.extend(i if i < wanted else -i - 1 for i in changed)
            on = wanted
        runs = np.array([n >= 0 for n in numbers], bool)
        if len(runs):
            yield CapacityBatch(
                machine=texts(f"machine-{n if n >= 0 else -n - 1}" for n in numbers),
                at_s=np.array(at),
                cpu_cores=np.where(runs, cpu_cores, 0.0),
                memory_mib=np.where(runs, memory_mib, 0.0),
            )
