"""Servers on renewable power (Agarwal 2023 §4.5): powered cores follow a power trace, beside VMs that come and go."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.harvest import HarvestSeries, Packing
from ebbtide.simulator.inputs.batches import Floats, Indices, SeriesBatch


class Cut(StrEnum):
    """From which servers power is taken, of those with unallocated cores, and to which it comes back first."""

    #: One server after another, in random order, as far as it goes: few servers change much.
    SERVERS = "servers"
    #: A core at a time, where the most can be taken (given back): many servers change a little.
    EVEN = "even"


@dataclass(frozen=True, slots=True)
class PowerSteps:
    """How many cores of all servers have power, from each step on until the next. Shape (steps,) each.

    :param at_s: seconds of the replay, rising.
    :param cores: whole.
    """

    at_s: Floats
    cores: Indices


def power_steps(
    series: Iterable[SeriesBatch], all_cores: float, from_s: float, until_s: float, step_s: float
) -> PowerSteps:
    """Powered cores in proportion to a power trace, whose largest value powers all cores.

    Power is straight between two values of the trace, and cores change every ``step_s``.

    :param from_s: of the trace, what falls on second 0 of the replay.
    :param until_s: of the replay.
    :raises InvalidParameter: the trace has no power at all, or does not reach so far.
    """
    batches = list(series)
    at_s = np.concatenate([batch.at_s for batch in batches]) if batches else np.empty(0)
    value = np.concatenate([batch.value for batch in batches]) if batches else np.empty(0)
    if not len(value) or not value.max() > 0:
        raise InvalidParameter("power", "must have values above 0")
    steps_s = np.arange(0.0, until_s, step_s)
    if from_s < at_s[0] or from_s + float(steps_s[-1]) > at_s[-1]:
        days = (float(at_s[-1]) - until_s) / 86_400.0
        raise InvalidParameter("power_from_s", f"must leave the trace long enough: at most {days:.2f} days")
    shares = np.interp(steps_s + from_s, at_s, value) / value.max()
    return PowerSteps(steps_s, np.floor(np.maximum(shares, 0.0) * all_cores + 1e-6).astype(np.int64))


@dataclass(slots=True)
class PowerCounts:
    """What power did to on-demand VMs."""

    evicted: int = 0
    #: Found no room when they came, with less than full power.
    deferred: int = 0
    #: Of both, those that came (back).
    relaunched: int = 0


class PoweredSeries(HarvestSeries):
    """A `HarvestSeries` on servers whose powered cores change; without a step they all have power.

    When power drops, unallocated cores lose it first (harvest VMs shrink); then on-demand VMs are evicted, the one that
    was placed last first. They run elsewhere: they keep the time of their departure. When it rises, servers below full
    get it back, and then those VMs come again, in the order in which they went, where there is room. On-demand VMs that
    find no room while power is not full are counted among these, for the load is to stay.

    Whole cores are cut; what is left over of an evicted VM's is unallocated. At one instant departures come before
    power, and power before arrivals.

    :param power: steps; what the last one gives stays.
    :param power_rng: draws servers, apart from ``rng``, which places VMs.
    :raises InvalidParameter: as `HarvestSeries`; servers of parts of cores.
    """

    def __init__(
        self,
        servers: int,
        cpu_cores: float,
        memory_mib: float,
        packing: Packing,
        rng: np.random.Generator,
        least_cpu_cores: float,
        power: PowerSteps,
        cut: Cut,
        power_rng: np.random.Generator,
        drawn: int = 10,
        together: bool = False,
    ) -> None:
        super().__init__(servers, cpu_cores, memory_mib, packing, rng, least_cpu_cores, drawn, together)
        if cpu_cores != int(cpu_cores):
            raise InvalidParameter("cpu_cores", f"must be whole where power changes, but is {cpu_cores:g}")
        self.power_counts = PowerCounts()
        self._full_cores = cpu_cores
        self.power = power
        self._cut = cut
        self._power_rng = power_rng
        self._step = 0
        #: On servers now, by number: (departure, server, cores, memory); the one that was placed last is last.
        self._running: dict[int, tuple[float, int, float, float]] = {}
        #: Elsewhere: (departure, cores, memory), the one that went first is first.
        self._away: list[tuple[float, float, float]] = []

    def _next_s(self) -> float:
        return min(super()._next_s(), self._step_s())

    def _step_s(self) -> float:
        return float(self.power.at_s[self._step]) if self._step < len(self.power.at_s) else math.inf

    def _happen(self) -> set[int]:
        if super()._next_s() <= self._step_s():
            del self._running[self._leaving[0][1]]
            return super()._happen()
        at_s, cores = self._step_s(), float(self.power.cores[self._step])
        self._step += 1
        missing = float(self._powered.sum()) - cores
        return self._fall(missing) if missing > 0 else self._rise(-missing, at_s)

    def _fall(self, cores: float) -> set[int]:
        """Take power of so many cores away; the servers that this touches."""
        touched = self._shift(np.floor(self._free_cores + 1e-6), cores, -1.0)
        cores -= sum(touched.values())
        gone: set[int] = set()
        while cores >= 1.0 and self._running:
            number, (departs_s, server, its_cores, mib) = self._running.popitem()
            gone.add(number)
            self._away.append((departs_s, its_cores, mib))
            self.power_counts.evicted += 1
            free = round(float(self._free_cores[server]) + its_cores, 6)
            taken = min(float(math.floor(free + 1e-6)), cores)
            self._free_cores[server] = round(free - taken, 6)
            self._free_mib[server] = round(float(self._free_mib[server]) + mib, 6)
            self._powered[server] -= taken
            touched[server] = touched.get(server, 0.0) + taken
            cores -= taken
        if gone:
            self._leaving = [one for one in self._leaving if one[1] not in gone]
            heapq.heapify(self._leaving)
        return set(touched)

    def _rise(self, cores: float, now_s: float) -> set[int]:
        """Give power to so many cores, and room to those who went; the servers that this touches."""
        touched = set(self._shift(np.round(self._full_cores - self._powered), cores, 1.0))
        still: list[tuple[float, float, float]] = []
        refused: list[tuple[float, float]] = []
        for departs_s, its_cores, mib in self._away:
            if departs_s <= now_s:
                continue
            # Where one has found no room, none that is as large will.
            full = any(its_cores >= least and mib >= least_mib for least, least_mib in refused)
            server = None if full else self._put(departs_s, its_cores, mib)
            if server is not None:
                self.power_counts.relaunched += 1
                touched.add(server)
                continue
            if not full:
                refused.append((its_cores, mib))
            still.append((departs_s, its_cores, mib))
        self._away = still
        return touched

    def _shift(self, available: Floats, cores: float, sign: float) -> dict[int, float]:
        """Power of whole cores on or off, as far as ``available`` goes; how many, by server."""
        amounts = shares(available, cores, self._cut, self._power_rng)
        self._powered += sign * amounts
        self._free_cores = np.round(self._free_cores + sign * amounts, 6)
        return {int(server): float(amounts[server]) for server in np.flatnonzero(amounts)}

    def _place(self, departs_s: float, cores: float, mib: float, home: int | None = None) -> int | None:
        rejected = self.counts.rejected
        server = super()._place(departs_s, cores, mib, home)
        if server is None and (self._powered < self._full_cores).any():
            self.counts.rejected = rejected
            self.power_counts.deferred += 1
            self._away.append((departs_s, cores, 0.0 if math.isnan(mib) else mib))
        return server

    def _put(self, departs_s: float, cores: float, mib: float, home: int | None = None) -> int | None:
        number = self._arrived
        server = super()._put(departs_s, cores, mib, home)
        if server is not None:
            self._running[number] = (departs_s, server, cores, mib)
        return server


def shares(available: Floats, cores: float, cut: Cut, rng: np.random.Generator) -> Floats:
    """How ``cores`` are taken of what each server has available, or of all where that is less. Shape (servers,).

    :param available: whole numbers from 0 on.
    :param cores: whole.
    """
    order = rng.permutation(len(available))
    if cores >= available.sum():
        return available.copy()
    found = np.zeros(len(available))
    if cut is Cut.SERVERS:
        mine = available[order]
        found[order] = np.clip(cores - (np.cumsum(mine) - mine), 0.0, mine)
        return found
    # The highest level down to which cutting gives enough; what is too much stays with some of those that were cut.
    low, high = 0, int(available.max())
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(available - level, 0.0).sum() >= cores else (low, level - 1)
    found = np.maximum(available - low, 0.0)
    spared = order[found[order] > 0][: round(found.sum() - cores)]
    found[spared] -= 1.0
    return found
