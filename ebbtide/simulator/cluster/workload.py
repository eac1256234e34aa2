"""VMs for a cluster out of a trace: a fixed sample of tenants, times moved off the trace's grid, priority by coin.

Overcommitment is peak offered nominal cores per core of the nodes, and set by how many nodes there are: no VM of the
sample is left out for it (Sharma et al. 2019 §6.3, Fig. 8c) but those that fit no node.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.kernels import WIDTH
from ebbtide.deflation.resources import QUANTUM, TOLERANCE
from ebbtide.simulator.cluster.members import CPU, MEMORY
from ebbtide.simulator.cluster.state import HIGH, LOW, Arrivals
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.replayed import drawn_departures
from ebbtide.simulator.inputs import batches
from ebbtide.simulator.inputs.batches import Floats, Indices, VmBatch

DAY_S: Final = 86_400.0
_HASHED: Final = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Sample:
    """The VMs of a part of a trace's tenants, one row a VM, by arrival."""

    arrives_s: Floats
    #: Infinite: not seen to depart.
    departs_s: Floats
    cpu_cores: Floats
    memory_mib: Floats
    #: Who came together: rows of one number.
    group: Indices
    #: The trace's hint: `batches.UNKNOWN`, LOW or HIGH.
    priority: batches.Hints

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Column by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Sample:
        """Out of `arrays`. Raises KeyError where one is missing."""
        return cls(**{name: np.asarray(arrays[name]) for name in cls.__slots__})

    def part(self, rows: NDArray[np.bool_]) -> Sample:
        """These rows alone."""
        return Sample.of({name: column[rows] for name, column in self.arrays().items()})

    def __len__(self) -> int:
        return len(self.arrives_s)


def chosen(group: str, share: float) -> bool:
    """Whether a tenant's group is in a sample of this share of all; larger samples hold the smaller ones."""
    number = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big")
    return number < share * _HASHED


def sampled(trace: Iterable[VmBatch], share: float = 1.0) -> Sample:
    """The VMs of a share of a trace's groups; which ones depends on their names only. A VM without one is its own.

    :param share: in (0, 1].
    :raises InvalidParameter: the share is outside, a VM has no memory stated, or none is left.
    """
    if not 0 < share <= 1:
        raise InvalidParameter("sample_share", f"must be above 0 and at most 1, but is {share:g}")
    parts: list[VmBatch] = []
    numbers: dict[str, int] = {}
    groups: list[Indices] = []
    verdicts: dict[str, bool] = {}
    for batch in trace:
        names = [group or f"vm {one}" for group, one in zip(batch.group.tolist(), batch.id.tolist(), strict=True)]
        keep = []
        for row, name in enumerate(names):
            if name not in verdicts:
                verdicts[name] = share == 1 or chosen(name, share)
            if verdicts[name]:
                keep.append(row)
        parts.append(batch.take(np.array(keep, np.int64)))
        groups.append(np.array([numbers.setdefault(names[row], len(numbers)) for row in keep], np.int64))
    if not sum(len(part) for part in parts):
        raise InvalidParameter("sample_share", f"({share:g}) leaves no VM of the trace")
    whole = VmBatch.joined(parts)
    if not np.isfinite(whole.memory_mib).all():
        raise InvalidParameter("trace", "has VMs whose memory it does not say")
    return Sample(
        arrives_s=whole.arrives_s,
        departs_s=np.where(np.isnan(whole.departs_s), np.inf, whole.departs_s),
        cpu_cores=whole.cpu_cores,
        memory_mib=whole.memory_mib,
        group=np.concatenate(groups),
        priority=whole.priority,
    )


def with_drawn_lives(sample: Sample, followed_until_s: float, rng: np.random.Generator) -> Sample:
    """The same VMs; how long those stay that the trace followed only until then is drawn (`drawn_departures`)."""
    departs_s = drawn_departures(sample.arrives_s, sample.departs_s, followed_until_s, rng)
    return replace(sample, departs_s=departs_s)


def moved_off_grid(sample: Sample, grid_s: float, rng: np.random.Generator) -> Sample:
    """The same VMs, each group moved by its own part of ``grid_s``: a trace says no more than the place of its grid."""
    if grid_s <= 0:
        return sample
    by_s = rng.uniform(0.0, grid_s, int(sample.group.max()) + 1)[sample.group]
    arrives_s = sample.arrives_s + by_s
    order = np.argsort(arrives_s, kind="stable")
    columns = sample.arrays() | {"arrives_s": arrives_s, "departs_s": sample.departs_s + by_s}
    return Sample.of({name: column[order] for name, column in columns.items()})


def fitting(sizes: Floats, cpu_cores: float, memory_mib: float) -> NDArray[np.bool_]:
    """Which of sizes fit an empty node. Shape (n, WIDTH) -> (n,)."""
    return (sizes[:, CPU] <= cpu_cores + TOLERANCE) & (sizes[:, MEMORY] <= memory_mib + TOLERANCE)


def fits_no_node(sample: Sample, fits: NDArray[np.bool_], window_s: tuple[float, float]) -> tuple[str, ...]:
    """What is to be said of VMs of the window that fit no node."""
    within = (sample.arrives_s < window_s[1]) & (sample.departs_s > window_s[0])
    wide = within & ~fits
    if not wide.any():
        return ()
    whole = offered(sample, window_s).mean_cores
    # All of them may be of no cores.
    share = offered(sample.part(wide), window_s).mean_cores / whole if whole else 0.0
    return (
        f"{wide.sum()} of {within.sum()} VMs in the window fit no node, and are left out of the peak that says how "
        f"many there are, with {share:.1%} of the core-seconds",
    )


@dataclass(frozen=True, slots=True)
class Offered:
    """What a sample asks for within a window, if every VM got its nominal size and none were refused."""

    peak_cores: float
    mean_cores: float
    peak_memory_mib: float
    #: The mean of each day of the window, or of what is left of one; cores.
    daily_mean_cores: tuple[float, ...]


def offered(sample: Sample, window_s: tuple[float, float]) -> Offered:
    """Measure the demand; at one instant departures come before arrivals."""
    leaving = np.isfinite(sample.departs_s)
    times_s = np.concatenate([sample.departs_s[leaving], sample.arrives_s])
    cores = np.concatenate([-sample.cpu_cores[leaving], sample.cpu_cores])
    mib = np.concatenate([-sample.memory_mib[leaving], sample.memory_mib])
    order = np.argsort(times_s, kind="stable")
    steps_s = times_s[order]
    core_levels, mib_levels = np.cumsum(cores[order]), np.cumsum(mib[order])
    begin_s, end_s = window_s
    edges_s = np.append(np.arange(begin_s, end_s, DAY_S), end_s)
    days = [_mean(steps_s, core_levels, a, b) for a, b in itertools.pairwise(edges_s.tolist())]
    return Offered(
        peak_cores=_peak(steps_s, core_levels, begin_s, end_s),
        mean_cores=_mean(steps_s, core_levels, begin_s, end_s),
        peak_memory_mib=_peak(steps_s, mib_levels, begin_s, end_s),
        daily_mean_cores=tuple(days),
    )


def nodes_for(peak_cores: float, overcommitment: float, node_cores: float) -> int:
    """How many nodes make a peak demand that overcommitment, as nearly as whole nodes can; at least one."""
    return max(round(peak_cores / (overcommitment * node_cores)), 1)


def incompressible(overcommitment: float, low_share: float, minimum_share: float) -> float:
    """The analytic bound: what is left of the offered peak when every low-priority VM has its minimum, per core.

    Above 1 no policy can keep everybody at the peak; below, fragmentation and memory decide.
    """
    return overcommitment * (1.0 - low_share + low_share * minimum_share)


def arrivals_of(
    sample: Sample, low_share: float, minimum_share: float, curves: int, rng: np.random.Generator
) -> Arrivals:
    """The VMs as they are asked for: priority by coin where the trace does not say, minimums a share of nominal.

    Coins do not depend on the shares: who is of low priority at a small share is at a larger one, too. Minimums are
    rounded up to the grid of sizes and raised to the hard floor, as the manager does.

    :param low_share: of the VMs whose priority the trace does not say.
    :param minimum_share: of nominal CPU and memory.
    :param curves: how many utility curves there are; each VM gets one of them, evenly.
    """
    count = len(sample)
    coin = rng.random(count)
    curve = rng.integers(0, curves, count)
    draws = rng.random((count, 2))
    hinted_low = sample.priority == batches.LOW
    low = hinted_low | ((sample.priority == batches.UNKNOWN) & (coin < low_share))
    upper = np.zeros((count, WIDTH))
    upper[:, CPU] = sample.cpu_cores
    upper[:, MEMORY] = sample.memory_mib
    minimum = np.where(low[:, None], minimum_of(upper, minimum_share), upper)
    return Arrivals(
        at_s=np.ascontiguousarray(sample.arrives_s),
        departs_s=np.ascontiguousarray(sample.departs_s),
        upper=upper,
        minimum=minimum,
        sold_as=np.where(low, LOW, HIGH).astype(np.int64),
        curve=curve.astype(np.int64),
        draws=draws,
    )


def at_minimums(sample: Sample, arrivals: Arrivals) -> Sample:
    """The same VMs, those of low priority at their minimums: what no deflation can free, as the coins have fallen."""
    low = arrivals.sold_as == LOW
    return replace(
        sample,
        cpu_cores=np.where(low, arrivals.minimum[:, CPU], sample.cpu_cores),
        memory_mib=np.where(low, arrivals.minimum[:, MEMORY], sample.memory_mib),
    )


def minimum_of(nominal: Floats, share: float) -> Floats:
    """`deflation.sharing.utility.size_of_shares` and `deflation.floors.effective_minimum` of many VMs."""
    steps = np.array(list(QUANTUM))
    sizes = np.round(np.ceil(nominal * share / steps - TOLERANCE) * steps, 6)
    minimum: Floats = np.minimum(np.maximum(sizes, np.array(list(HARD_FLOOR))), nominal)
    return minimum


def _mean(times_s: Floats, levels: Floats, begin_s: float, end_s: float) -> float:
    """The time mean of a step function."""
    inside = (times_s > begin_s) & (times_s < end_s)
    edges = np.concatenate([[begin_s], times_s[inside], [end_s]])
    first = _level(times_s, levels, begin_s)
    values = np.concatenate([[first], levels[inside]])
    return float((values * np.diff(edges)).sum() / (end_s - begin_s))


def _peak(times_s: Floats, levels: Floats, begin_s: float, end_s: float) -> float:
    """The highest value of a step function that it has for any time at all."""
    lasting = np.append(times_s[1:] > times_s[:-1], True) if len(times_s) else np.zeros(0, np.bool_)
    inside = (times_s > begin_s) & (times_s < end_s) & lasting
    return max(_level(times_s, levels, begin_s), float(levels[inside].max(initial=0.0)))


def _level(times_s: Floats, levels: Floats, at_s: float) -> float:
    """The value of a step function."""
    before = int(np.searchsorted(times_s, at_s, side="right"))
    return float(levels[before - 1]) if before else 0.0
