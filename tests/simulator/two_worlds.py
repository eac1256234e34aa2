"""The same arrivals and departures for a real manager and for the simulated cluster, and what each makes of them."""

from __future__ import annotations

import contextlib
import heapq
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any, Final

import aiosqlite
import numpy as np
import pytest

from cluster_manager.defaults import LeadershipTimes
from ebbtide.deflation.allocations import Priority, deflatable_capacity, free_capacity
from ebbtide.deflation.floors import effective_minimum
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMStatus
from tests.manager.cluster import QUICK, Cluster, cluster_of
from tests.manager.fake_agent import FakeAgent

OVERHEAD_MIB: Final = 100.0
#: Of different shapes; a disk is declared by some.
SHAPES: Final = (
    ResourceVector(48, 131_072),
    ResourceVector(32, 196_608, 1500),
    ResourceVector(64, 131_072, 2500),
)

#: No other manager wants to lead.
LEADERSHIP: Final = LeadershipTimes(check_s=5.0, limit_s=600.0, release_s=900.0)

Size = tuple[float, float, float, float]


@dataclass(frozen=True)
class Arrival:
    """A VM that is asked for, and when it goes if it is not stopped before."""

    number: int
    at_s: float
    departs_s: float
    fixed: bool
    nominal: ResourceVector
    minimum: ResourceVector

    @property
    def name(self) -> str:
        """Names stand in the order of the arrivals."""
        return f"vm-{self.number:06d}"


def arrivals_of(seed: int, hosts: int, overcommitment: float) -> Iterator[Arrival]:
    """VMs without end: sizes as clouds sell them, both priorities, several minimums; no two events at one moment.

    :param overcommitment: mean offered nominal cores over the cores there are.
    """
    generator = np.random.default_rng(seed)
    cores = sum(SHAPES[number % len(SHAPES)].cpu_cores for number in range(hosts))
    kinds = np.array([1, 2, 2, 4, 4, 8, 16])
    mean_life_s = 4000.0
    gap_s = mean_life_s * kinds.mean() / (overcommitment * cores)
    at_s, number = 0.0, 0
    while True:
        at_s += float(generator.exponential(gap_s))
        cpu = float(generator.choice(kinds))
        nominal = ResourceVector(
            cpu, cpu * 1024 * float(generator.choice([1, 2, 4, 8])), float(generator.choice([0, 0, 50, 100]))
        )
        fixed = bool(generator.random() < 0.4)
        share = float(generator.choice([0, 0.25, 0.25, 0.5]))
        minimum = nominal if fixed else effective_minimum(nominal * share, nominal)
        life_s = float(generator.exponential(mean_life_s)) + 1.0
        yield Arrival(number, at_s, at_s + life_s, fixed, nominal, minimum)
        number += 1


@dataclass
class Decided:
    """What came of an event."""

    #: Where the VM was placed, or where it was; None: it was refused.
    host: str | None
    #: Names, in the order in which they were stopped.
    victims: list[str] = field(default_factory=list)


class QuietAgent(FakeAgent):
    """Reports when it is asked to only, so that no room appears by itself; keeps no record of core changes.

    What it says of its VMs is worked out once for each change of theirs.
    """

    def __init__(self, number: int) -> None:
        shape = SHAPES[number % len(SHAPES)]
        super().__init__(f"host-{number:02d}", OVERHEAD_MIB, **shape.as_dict())
        self._seen: tuple[VMStatus, ...] = ()
        self._free, self._deflatable = shape, ZERO

    def add_change(self, *change: Any, **more: Any) -> None:
        pass

    async def _report_for_ever(self) -> None:
        pass

    def free(self) -> ResourceVector:
        self._look()
        return self._free

    def report(self) -> HostReport:
        self._look()
        return HostReport(
            id=self.id,
            url=f"http://127.0.0.1:{self._port}",
            incarnation=self.incarnation,
            sequence=next(self._reports),
            capacity=Vector.of(self.capacity),
            free=Vector.of(self._free),
            deflatable=Vector.of(self._deflatable),
            vm_overhead_mib=self.overhead_mib,
            accelerator="qemu",
            vms=self._seen,
        )

    def _look(self) -> None:
        vms = tuple(self.vms.values())
        if len(vms) == len(self._seen) and all(map(is_, vms, self._seen)):
            return
        rows = [vm.allocation() for vm in vms]
        self._seen = vms
        self._free, self._deflatable = free_capacity(self.capacity, rows), deflatable_capacity(rows)

    def sizes(self) -> dict[str, Size]:
        """What each VM has."""
        return {name: tuple(vm.current.vector()) for name, vm in self.vms.items()}  # type: ignore[misc]


class LiveWorld:
    """A real manager over REST with agents that have no hypervisor."""

    def __init__(self, cluster: Cluster, agents: list[QuietAgent], policy: PlacementPolicy) -> None:
        self._cluster = cluster
        self._policy = policy
        self.agents = {agent.id: agent for agent in agents}

    async def arrive(self, vm: Arrival) -> Decided:
        """Ask for a VM."""
        body: dict[str, Any] = {
            "name": vm.name,
            "priority": (Priority.FIXED if vm.fixed else Priority.DEFLATABLE).value,
            "nominal": vm.nominal.as_dict(),
        }
        if not vm.fixed:
            # As in the simulated world, where none comes back.
            body |= {"minimum": vm.minimum.as_dict(), "on_preemption": "delete"}
        before = {agent.id: set(agent.vms) for agent in self.agents.values()}
        done = {agent.id: len(agent.done) for agent in self.agents.values()}
        operation = await self._cluster.create(body, policy=self._policy.value, deadline_s=60.0)
        host = operation.host if operation.state is OperationState.DONE else None
        victims = [
            name
            for agent in self.agents.values()
            for kind, name in agent.done[done[agent.id] :]
            if kind == "delete" and name in before[agent.id]
        ]
        return Decided(host, victims)

    async def depart(self, name: str) -> None:
        """Delete a VM."""
        operation = await self._cluster.delete(name)
        assert operation.state is OperationState.DONE, operation

    def sizes(self, host: str) -> dict[str, Size]:
        """What each VM of a host has."""
        return self.agents[host].sizes()


@contextlib.asynccontextmanager
async def live_world(hosts: int, policy: PlacementPolicy) -> AsyncIterator[LiveWorld]:
    """A manager and its hosts, all empty. Its store is in memory where the machine has a file system for that."""
    agents = [QuietAgent(number) for number in range(hosts)]
    limits = replace(QUICK, answer_s=60.0, absence_s=60.0, start_stop_s=60.0)
    quick = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ebb-two-worlds-", dir=quick) as directory, _store_without_threads():
        path = Path(directory)
        patient: dict[str, Any] = {"silent_after_s": 86_400.0, "agents": limits, "leadership": LEADERSHIP}
        async with cluster_of(path, *agents, **patient) as cluster:
            yield LiveWorld(cluster, agents, policy)


@contextlib.contextmanager
def _store_without_threads() -> Iterator[None]:
    """SQLite is called where it is asked for, not in a thread of its own.

    An event takes some hundred calls of it, and each change of threads costs more than the call itself.
    """

    async def execute(self: Any, function: Any, *args: Any, **options: Any) -> Any:
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, check_same_thread=False))
        patch.setattr(aiosqlite.Connection, "_execute", execute)
        yield


@dataclass
class Timeline:
    """The events in order, departures of those only that run."""

    arrivals: Iterator[Arrival]
    _departures: list[tuple[float, str]] = field(default_factory=list)
    _gone: set[str] = field(default_factory=set)

    def runs(self, vm: Arrival) -> None:
        """A VM was placed, so that it will depart."""
        heapq.heappush(self._departures, (vm.departs_s, vm.name))

    def stopped(self, name: str) -> None:
        """A VM was preempted, so that it will not."""
        self._gone.add(name)

    def __iter__(self) -> Iterator[Arrival | tuple[float, str]]:
        """Each event, which has to be dealt with before the next is asked for."""
        for vm in self.arrivals:
            while self._departures and self._departures[0][0] <= vm.at_s:
                at_s, name = heapq.heappop(self._departures)
                if name in self._gone:
                    self._gone.discard(name)
                else:
                    yield at_s, name
            yield vm
