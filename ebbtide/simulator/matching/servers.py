"""Replayed servers as a provider of harvest, Spot or regular VMs, one of ours at each place of a server at the most."""

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
    """Replayed servers as a provider: it answers at once. Machines are numbers of places as texts.

    A server has so many places in a row; a harvest VM has a server of its own.

    :param kind: harvest VMs take all unallocated cores, Spot VMs keep their size; both go as a whole when fewer are
        left than their (least) size. A regular VM keeps its size, and is placed on any server that has none of ours.
    :param seed: draws size and server of a request by its number: a run that asked otherwise before draws the same.
    :param sizes: least cores of a VM, drawn for each request; none: a harvest VM is there while the pool says so.
    :param each: places of a server.
    """

    def __init__(
        self,
        pool: Pool,
        allocation: Packing,
        seed: int,
        kind: VmKind = VmKind.HARVEST,
        sizes: tuple[int, ...] = (),
        each: int = 1,
    ) -> None:
        places = pool.machines * each
        self.each = each
        self._allocation = allocation
        self._seed = seed
        self._kind = kind
        self._sizes = sizes
        #: By server: cores that on-demand VMs leave; below the minimum: 0.
        self.cores: Indices = np.zeros(pool.machines, np.int64)
        #: By place, as all below: size of our VM, of a harvest VM the least one.
        self.least: Indices = np.zeros(places, np.int64)
        #: When the cores of a VM there changed.
        self.changed_s: Floats = np.full(places, -np.inf)
        self.held = np.zeros(places, bool)
        #: When our VM came: the newest goes first.
        self._came: Indices = np.zeros(places, np.int64)
        self._requests = 0
        #: Given back at this instant: what is asked for now comes from elsewhere.
        self.cooling = np.zeros(places, bool)
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
        generator = np.random.default_rng([self._seed, 2, 2, number])
        least = int(generator.choice(self._sizes)) if self._sizes else 0
        place = self._chosen(least, generator)
        if place is None:
            self._refusals[number] = f"no server has room for a {self._kind.value} VM"
            return
        self._requests += 1
        self.held[place] = True
        self.least[place] = least
        self._came[place] = self._requests
        self._offers[number] = str(place)

    async def cancel(self, number: int) -> None:
        place = self._offers.pop(number, None)
        if place is not None:
            self.held[int(place)] = False

    async def deallocate(self, machine: str) -> None:
        self.held[int(machine)] = False
        self.cooling[int(machine)] = True

    @property
    def ours(self) -> Indices:
        """Cores of our VM at each place; 0: there is none."""
        found: Indices = np.where(self.held, self.cores if self._kind is VmKind.HARVEST else self.least, 0)
        return found

    def change(self, server: int, cores: int, at_s: float) -> list[tuple[int, int]]:
        """On-demand VMs leave so many cores of a server; the places whose VMs have other cores now, and how many."""
        self.cores[server] = cores
        if self._kind is VmKind.REGULAR:
            return []
        if self._kind is VmKind.HARVEST:
            self.changed_s[server] = at_s
            if not self.held[server]:
                return []
            self.held[server] = cores >= max(int(self.least[server]), 1)
            return [(server, cores if self.held[server] else 0)]
        mine = np.arange(server * self.each, (server + 1) * self.each)
        mine = mine[self.held[mine]]
        gone = []
        for place in mine[np.argsort(-self._came[mine])].tolist():
            if self.least[mine].sum() <= cores:
                break
            self.held[place] = False
            mine = mine[mine != place]
            gone.append((place, 0))
        return gone

    def _chosen(self, least: int, generator: np.random.Generator) -> int | None:
        """A place that is free; of a server any is as good as another."""
        servers, free = self._room(least)
        server = self._server(servers, generator)
        return None if server is None else int(free[server])

    def _room(self, least: int) -> tuple[Indices, Indices]:
        """The servers with a free place and room for a VM, and the first such place of each."""
        free = ~(self.held | self.cooling).reshape(-1, self.each)
        room = free.any(1)
        if self._kind is not VmKind.REGULAR:
            taken = 0 if self._kind is VmKind.HARVEST else self.ours.reshape(-1, self.each).sum(1)
            room &= self.cores - taken >= max(least, 1)
        return np.flatnonzero(room), np.arange(len(free)) * self.each + free.argmax(1)

    def _server(self, free: Indices, generator: np.random.Generator) -> int | None:
        if not len(free):
            return None
        if self._allocation is Packing.RANDOM:
            # The first with room in a random order of all: the same one as far as it has room in other runs.
            return int(free[np.argmin(generator.random(len(self.cores))[free])])
        if self._allocation is Packing.FULLEST_OF:
            some = free[generator.integers(len(free), size=10)]
            return int(some[np.argmin(self.cores[some])])
        if self._allocation is Packing.PACKING:
            return int(free[np.argmin(self.cores[free])])
        # Buffer servers, the emptiest ones, belong to no tenant.
        buffer = np.argsort(-self.cores, kind="stable")[: int(BUFFER_SHARE * len(self.cores))]
        free = free[~np.isin(free, buffer)]
        return int(free[np.argmax(self.cores[free])]) if len(free) else None
