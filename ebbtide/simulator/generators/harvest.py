"""Harvest series by replay (Agarwal 2023 §2.1, §4.3): on-demand VMs come and go, the rest is a harvest VM's."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import CapacityBatch, Floats, Mask, VmBatch, texts


class Packing(StrEnum):
    """Onto which server an on-demand VM goes, of those that have room."""

    #: The fullest: whole servers stay free, harvest VMs are large or small.
    PACKING = "packing"
    #: The emptiest.
    BALANCING = "balancing"
    RANDOM = "random"
    #: The fullest of some that are drawn at random: servers differ, and go on differing, as the paper's do.
    FULLEST_OF = "fullest-of"


@dataclass(slots=True)
class Counts:
    """What became of the on-demand VMs of a replay."""

    placed: int = 0
    #: No server had room.
    rejected: int = 0
    #: The trace does not say how much memory they have: they are placed by cores alone.
    without_memory: int = 0


class HarvestSeries:
    """Unallocated cores and memory of each server as capacity changes, one harvest VM a server.

    A server begins with all it has; a replay that starts empty is filling for days, so leave its beginning out. Memory
    grows with servers and with the VMs that are there, not with the trace.

    :param servers: how many.
    :param cpu_cores: of each.
    :param memory_mib: of each.
    :param least_cpu_cores: with less left over there is no harvest VM: the series says 0 (the paper's minimum size).
    :param drawn: with `Packing.FULLEST_OF`: of how many servers with room the fullest is taken.
    :param together: VMs of one batch that arrive at one instant go onto one server, as far as it has room; only the
        first of them, and the first that does not fit, is placed by ``packing``.
    :raises InvalidParameter: no servers, or sizes that are not positive.
    """

    def __init__(
        self,
        servers: int,
        cpu_cores: float,
        memory_mib: float,
        packing: Packing,
        rng: np.random.Generator,
        least_cpu_cores: float = 0.0,
        drawn: int = 10,
        together: bool = False,
    ) -> None:
        if servers < 1:
            raise InvalidParameter("servers", f"must be at least 1, but is {servers}")
        if drawn < 1:
            raise InvalidParameter("drawn", f"must be at least 1, but is {drawn}")
        for name, value in (("cpu_cores", cpu_cores), ("memory_mib", memory_mib)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidParameter(name, f"must be above 0 and finite, but is {value:g}")
        if not (math.isfinite(least_cpu_cores) and least_cpu_cores >= 0):
            raise InvalidParameter("least_cpu_cores", f"must be finite and not negative, but is {least_cpu_cores:g}")
        self.counts = Counts()
        self._names = texts(f"server-{i}" for i in range(servers))
        self._packing = packing
        self._rng = rng
        self._least_cpu_cores = least_cpu_cores
        self._drawn = drawn
        self._together = together
        #: Of the batches that arrive now: the server of each.
        self._homes: dict[str, int] = {}
        self._free_cores: Floats = np.full(servers, cpu_cores, np.float64)
        self._free_mib: Floats = np.full(servers, memory_mib, np.float64)
        #: That have power: all of them.
        self._powered: Floats = np.full(servers, cpu_cores, np.float64)
        #: (departure, order of arrival, server, cores, memory)
        self._leaving: list[tuple[float, int, int, float, float]] = []
        self._arrived = 0

    def replay(self, vms: Iterable[VmBatch]) -> Iterator[CapacityBatch]:
        """Place the VMs in the order of their arrival; departures at the same instant come first.

        Changes of one server at one instant are one row.
        """
        servers = len(self._names)
        shown = np.full(servers, np.nan)
        changed: set[int] = set(range(servers))
        now_s = 0.0
        for batch in vms:
            out = _Changes(self._names)
            values = (batch.arrives_s, batch.departs_s, batch.cpu_cores, batch.memory_mib, batch.group)
            for arrives_s, departs_s, cores, mib, group in zip(*(v.tolist() for v in values), strict=True):
                if arrives_s > now_s:
                    self._homes.clear()
                while (next_s := self._next_s()) <= arrives_s:
                    now_s = self._note(out, shown, changed, now_s, next_s)
                    changed |= self._happen()
                now_s = self._note(out, shown, changed, now_s, arrives_s)
                server = self._place(departs_s, cores, mib, self._homes.get(group))
                if server is not None:
                    changed.add(server)
                    if self._together and group:
                        self._homes[group] = server
            if out.at:
                yield out.batch()
        out = _Changes(self._names)
        while (next_s := self._next_s()) < math.inf:
            now_s = self._note(out, shown, changed, now_s, next_s)
            changed |= self._happen()
        self._note(out, shown, changed, now_s, math.inf)
        if out.at:
            yield out.batch()

    def _next_s(self) -> float:
        """When something happens that is no arrival; infinite: nothing will."""
        return self._leaving[0][0] if self._leaving else math.inf

    def _happen(self) -> set[int]:
        """Let that happen; the servers that it touches."""
        return {self._leave()}

    def _note(self, out: _Changes, shown: Floats, changed: set[int], now_s: float, next_s: float) -> float:
        """Write down what has changed at ``now_s`` once time goes on; the new time."""
        if next_s <= now_s:
            return now_s
        for server in sorted(changed):
            cores = float(self._free_cores[server])
            cores = 0.0 if cores < max(self._least_cpu_cores, 1e-9) else cores
            if cores != shown[server]:
                shown[server] = cores
                out.add(server, now_s, cores, float(self._free_mib[server]) if cores else 0.0)
        changed.clear()
        return next_s

    def _place(self, departs_s: float, cores: float, mib: float, home: int | None = None) -> int | None:
        if math.isnan(mib):
            self.counts.without_memory += 1
            mib = 0.0
        server = self._put(departs_s, cores, mib, home)
        if server is None:
            self.counts.rejected += 1
        else:
            self.counts.placed += 1
        return server

    def _put(self, departs_s: float, cores: float, mib: float, home: int | None = None) -> int | None:
        """Onto a server with room, that of its batch before all others; None: there is none."""
        fits: Mask = (self._free_cores >= cores - 1e-9) & (self._free_mib >= mib - 1e-9)
        candidates = np.flatnonzero(fits)
        if not len(candidates):
            return None
        if home is not None and fits[home]:
            server = home
        elif self._packing is Packing.RANDOM:
            server = int(candidates[self._rng.integers(len(candidates))])
        elif self._packing is Packing.FULLEST_OF:
            some = candidates[self._rng.integers(len(candidates), size=self._drawn)]
            server = int(some[np.argmin(self._free_cores[some])])
        else:
            free = self._free_cores[candidates]
            best = np.argmin(free) if self._packing is Packing.PACKING else np.argmax(free)
            server = int(candidates[best])
        self._free_cores[server] -= cores
        self._free_mib[server] -= mib
        if math.isfinite(departs_s):
            heapq.heappush(self._leaving, (departs_s, self._arrived, server, cores, mib))
        self._arrived += 1
        return server

    def _leave(self) -> int:
        _, _, server, cores, mib = heapq.heappop(self._leaving)
        # Fractions of cores come and go; what rounding leaves must not grow.
        self._free_cores[server] = min(round(self._free_cores[server] + cores, 6), float(self._powered[server]))
        self._free_mib[server] = round(self._free_mib[server] + mib, 6)
        return server


class _Changes:
    """Rows of a batch under construction."""

    def __init__(self, names: np.ndarray[tuple[int], np.dtype[np.object_]]) -> None:
        self._names = names
        self.servers: list[int] = []
        self.at: list[float] = []
        self.cores: list[float] = []
        self.mib: list[float] = []

    def add(self, server: int, at_s: float, cores: float, mib: float) -> None:
        self.servers.append(server)
        self.at.append(at_s)
        self.cores.append(cores)
        self.mib.append(mib)

    def batch(self) -> CapacityBatch:
        return CapacityBatch(
            machine=self._names[self.servers],
            at_s=np.array(self.at),
            cpu_cores=np.array(self.cores),
            memory_mib=np.array(self.mib),
        )
