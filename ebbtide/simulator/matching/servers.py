"""Replayed servers as a provider of harvest, Spot or regular VMs, one of ours on each at the most."""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.matcher.acquire.provision import Provision
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.inputs.batches import Floats, Indices
from ebbtide.simulator.matching.costs import VmKind
from ebbtide.simulator.matching.pools import Pool

#: Of the servers, those that emptiest-first allocation leaves out: the buffer that providers keep (Agarwal 2023 §4.3).
BUFFER_SHARE: Final = 0.05


class Servers:
    """Replayed servers as a provider: it answers at once. Machines are servers' numbers as texts.

    :param kind: harvest VMs take all unallocated cores, Spot VMs keep their size; both go as a whole when fewer are
        left than their (least) size. A regular VM keeps its size, and is placed on any server that has none of ours.
    :param sizes: least cores of a VM, drawn for each request; none: a harvest VM is there while the pool says so.
    """

    def __init__(
        self,
        pool: Pool,
        allocation: Packing,
        generator: np.random.Generator,
        kind: VmKind = VmKind.HARVEST,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self._pool = pool
        self._allocation = allocation
        self._generator = generator
        self._kind = kind
        self._sizes = sizes
        #: Cores that each server has for a harvest VM now; below the minimum: 0.
        self.cores: Indices = np.zeros(pool.machines, np.int64)
        #: Size of our VM on each server, of a harvest VM the least one.
        self.least: Indices = np.zeros(pool.machines, np.int64)
        #: When the cores of a VM there changed.
        self.changed_s: Floats = np.full(pool.machines, -np.inf)
        self.held = np.zeros(pool.machines, bool)
        #: Given back at this instant: what is asked for now comes from elsewhere.
        self.cooling = np.zeros(pool.machines, bool)
        self._offers: dict[int, str] = {}
        self._refusals: dict[int, str] = {}

    async def look(self) -> Provision:
        machines = frozenset(str(number) for number in np.flatnonzero(self.held))
        cores = {name: float(self.ours[int(name)]) for name in self._offers.values()}
        found = Provision(machines, dict(self._offers), dict(self._refusals), cores=cores)
        self._offers, self._refusals = {}, {}
        return found

    async def request(self, number: int) -> None:
        if number in self._offers:
            return
        least = int(self._generator.choice(self._sizes)) if self._sizes else 0
        server = self._chosen(least)
        if server is None:
            self._refusals[number] = f"no server has room for a {self._kind.value} VM"
            return
        self.held[server] = True
        self.least[server] = least
        self._offers[number] = str(server)

    async def cancel(self, number: int) -> None:
        server = self._offers.pop(number, None)
        if server is not None:
            self.held[int(server)] = False

    async def deallocate(self, machine: str) -> None:
        self.held[int(machine)] = False
        self.cooling[int(machine)] = True

    @property
    def ours(self) -> Indices:
        """Cores of our VM on each server; 0: there is none."""
        found: Indices = np.where(self.held, self.cores if self._kind is VmKind.HARVEST else self.least, 0)
        return found

    def change(self, server: int, cores: int, at_s: float) -> int | None:
        """On-demand VMs leave so many cores of a server; how many our VM there has now, None: as many as before."""
        self.cores[server] = cores
        if self._kind is VmKind.HARVEST:
            self.changed_s[server] = at_s
        if not self.held[server] or self._kind is VmKind.REGULAR:
            return None
        if cores < max(int(self.least[server]), 1):
            self.held[server] = False
            return 0
        return cores if self._kind is VmKind.HARVEST else None

    def _chosen(self, least: int) -> int | None:
        room = np.full(len(self.cores), True) if self._kind is VmKind.REGULAR else self.cores >= max(least, 1)
        free = np.flatnonzero(room & ~self.held & ~self.cooling)
        if not len(free):
            return None
        if self._allocation is Packing.RANDOM:
            return int(free[self._generator.integers(len(free))])
        if self._allocation is Packing.FULLEST_OF:
            some = free[self._generator.integers(len(free), size=10)]
            return int(some[np.argmin(self.cores[some])])
        if self._allocation is Packing.PACKING:
            return int(free[np.argmin(self.cores[free])])
        # Buffer servers, the emptiest ones, belong to no tenant.
        buffer = np.argsort(-self.cores, kind="stable")[: int(BUFFER_SHARE * len(self.cores))]
        free = free[~np.isin(free, buffer)]
        return int(free[np.argmax(self.cores[free])]) if len(free) else None
