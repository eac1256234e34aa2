"""An acquirer over replayed servers (Agarwal 2023 §4.3): machines come and go as it asks for them and gives them back.

Every server of a pool could have one VM of ours (`servers.Servers`); a harvest VM has all cores that on-demand VMs
leave. A stream of changes tells the engine of those that we hold: the acquirer's looks are made where the engine asks
for what comes next, when it stands at the very instant.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

import numpy as np

from ebbtide.matcher.acquire.acquirer import Acquirer, Decommission, Emptied, Event, PeriodOver, Standing, advance_all
from ebbtide.matcher.acquire.net_changes import AcquirerOptions, View
from ebbtide.matcher.acquire.provision import calls, news
from ebbtide.matcher.acquire.stability import StabilityRecord, median_duration_s
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.inputs.batches import CapacityBatch, Indices, texts
from ebbtide.simulator.jobs.columns import COUNT, LEAVING, MACHINE, QUEUE, TASK, TIME, State
from ebbtide.simulator.matching.costs import Meter, Prices, VmKind
from ebbtide.simulator.matching.futures import Futures
from ebbtide.simulator.matching.pools import Pool
from ebbtide.simulator.matching.servers import Servers
from ebbtide.simulator.matching.workload import FALLBACK_S

Answer = TypeVar("Answer")
#: Between two looks at how stable the machines are.
_RECORD_S: Final = 900.0
#: How far who knows the future looks.
_AHEAD_S: Final = 4 * 3600.0


class Removal(StrEnum):
    """Which machines are given back first, where there are too many."""

    #: Those whose cores changed last (Algorithm 2).
    RECENT = "recent"
    #: Those that have kept their cores least likely for the median task (`matcher.acquire.stability`).
    STABILITY = "stability"
    #: Any: nothing is made of what is known of them (Agarwal et al. 2023 §4.4's runs without the matcher).
    RANDOM = "random"
    #: Those that will keep their cores least often in the hours to come: a bound on what any rule can gain.
    FUTURE = "future"


@dataclass(frozen=True, slots=True)
class Acquisition:
    """How a run gets its machines.

    :param budget_cores: keep so many cores, as near as the utilisations of the options say; None: as many
        as the work needs.
    :param allocation: to which server the provider puts a new harvest VM, of those with room for its minimum.
    :param step_s: between two looks at what has gone and what has emptied; the acquirer's own period is a multiple.
    :param kind: what all machines are.
    :param vm_cores: (least) cores of a machine, one of these for each request; none: harvest VMs as the pool has them,
        of which no costs are told.
    :param vms_per_server: at the most; a harvest VM has a server of its own.
    """

    options: AcquirerOptions = field(default_factory=lambda: AcquirerOptions(64, 64))
    allocation: Packing = Packing.RANDOM
    step_s: float = 300.0
    budget_cores: float | None = None
    kind: VmKind = VmKind.HARVEST
    vm_cores: tuple[int, ...] = ()
    vms_per_server: int = 1
    removal: Removal = Removal.RECENT
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        if not 0 < self.step_s <= self.options.period_s:
            raise InvalidParameter("step_s", f"must be above 0 and at most period_s, but is {self.step_s:g}")
        if self.budget_cores is not None and not self.budget_cores > 0:
            raise InvalidParameter("budget_cores", f"must be above 0, but is {self.budget_cores:g}")
        if self.kind is not VmKind.HARVEST and not self.vm_cores:
            raise InvalidParameter("vm_cores", f"must be stated for {self.kind.value} VMs")
        if not 1 <= self.vms_per_server <= 64:
            raise InvalidParameter("vms_per_server", f"must be from 1 to 64, but is {self.vms_per_server}")
        if self.vms_per_server > 1 and self.kind is VmKind.HARVEST:
            raise InvalidParameter("vms_per_server", "must be 1 with harvest VMs: each takes what its server has left")
        if self.vms_per_server > 1 and self.removal is Removal.FUTURE:
            raise InvalidParameter("vms_per_server", "must be 1 where machines are given back by the future")
        if self.vm_cores and min(self.vm_cores) < 1:
            raise InvalidParameter("vm_cores", "must be from 1 on")

    def held_share(self, pool: Pool, from_s: float) -> float:
        """Of a pool's servers or cores, about those that are held at the most: what load is counted by."""
        if self.budget_cores is None:
            return min(self.options.most_machines / pool.machines, 1.0)
        until_s = min(from_s + 86_400.0, pool.until_s)
        return min(self.budget_cores / pool.mean_cores(from_s, until_s), 1.0)


def at_once(call: Awaitable[Answer]) -> Answer:
    """The answer of a provider that never waits: no loop is needed.

    :raises RuntimeError: it waits.
    """
    waiting = call.__await__()
    try:
        next(waiting)
    except StopIteration as done:
        answer: Answer = done.value
        return answer
    raise RuntimeError("a provider that is called at once must not wait")


@dataclass(slots=True)
class Held:
    """What was held, by steps: shape (steps,) each."""

    at_s: list[float] = field(default_factory=list)
    machines: list[int] = field(default_factory=list)
    #: Cores of the machines that take tasks, and of those that leave.
    cores: list[int] = field(default_factory=list)
    leaving_cores: list[int] = field(default_factory=list)
    #: Cores on which tasks run.
    used_cores: list[int] = field(default_factory=list)
    #: Regular core-hours an hour, of all machines; NaN: not told.
    cost_per_h: list[float] = field(default_factory=list)
    #: Which servers, as numbers.
    servers: list[Indices] = field(default_factory=list)

    @property
    def table(self) -> dict[str, Any]:
        """By steps."""
        return {
            "at_s": np.asarray(self.at_s),
            "machines": np.asarray(self.machines, np.float64),
            "cores": np.asarray(self.cores, np.float64),
            "leaving_cores": np.asarray(self.leaving_cores, np.float64),
            "used_cores": np.asarray(self.used_cores, np.float64),
            "cost_per_h": np.asarray(self.cost_per_h, np.float64),
        }

    def mean(self, values: list[int], from_s: float, until_s: float) -> float:
        """Over the steps within a window; NaN if there is none."""
        at_s = np.asarray(self.at_s)
        within = (at_s >= from_s) & (at_s < until_s)
        return float(np.asarray(values)[within].mean()) if within.any() else float("nan")


class AcquiredMachines:
    """The machines of one run as changes for the engine, which is given afterwards: `state`.

    :param from_s: costs and utilisation count from then on.
    """

    def __init__(self, pool: Pool, acquisition: Acquisition, seed: int, from_s: float = 0.0) -> None:
        self._pool = pool
        self._acquisition = acquisition
        # Of its own: what is given back moves no draw of what is asked for.
        self._generator = np.random.default_rng([seed, 2, 1])
        each = acquisition.vms_per_server
        self._servers = Servers(pool, acquisition.allocation, seed, acquisition.kind, acquisition.vm_cores, each)
        self._from_s = from_s
        self._meter = Meter(acquisition.kind, acquisition.prices, from_s)
        self._names = texts(f"machine-{number}" for number in range(pool.machines * each))
        # By Eq. 1 and the size of shrinks, whatever the scheme predicts by.
        self._predictor = Predictor(float(pool.at_s[0]), PredictorOptions(sized=True))
        self._record = StabilityRecord(max(acquisition.options.evidence_s, 1.0))
        self._futures = Futures(pool) if acquisition.removal is Removal.FUTURE else None
        self._recorded_s = -math.inf
        self._shown: dict[int, int] = {}
        #: Of the engine.
        self.state: Callable[[], State] = _no_engine
        self.acquirer = Acquirer(next_at=float(pool.at_s[0]))
        self.held = Held()
        self.requested = 0
        self.given_back = 0
        #: Those that went by themselves: their server had no room for the minimum any more.
        self.evicted = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by name, of the whole run."""
        return {
            "machines_requested": float(self.requested),
            "machines_given_back": float(self.given_back),
            "machines_evicted": float(self.evicted),
            "machines_held_mean": float(np.mean(self.held.machines)) if self.held.machines else math.nan,
            "cores_held_mean": float(np.mean(self.held.cores)) if self.held.cores else math.nan,
            **self._paid(),
        }

    def _paid(self) -> dict[str, float]:
        """Since jobs come: of all cores that are held, those of leaving machines, too."""
        late = np.asarray(self.held.at_s) >= self._from_s
        cores = (np.asarray(self.held.cores) + np.asarray(self.held.leaving_cores))[late]
        used = np.asarray(self.held.used_cores)[late]
        found = {
            "cores_paid_mean": float(cores.mean()) if len(cores) else math.nan,
            "utilisation": float(used.sum() / cores.sum()) if len(cores) and cores.sum() else math.nan,
        }
        if not self._acquisition.vm_cores:
            return found
        return {**found, "cost_total": self._meter.total, "core_h_paid": self._meter.core_h}

    def batches(self) -> Iterator[CapacityBatch]:
        """Changes until the pool's end, a step's at a time."""
        pool, servers = self._pool, self._servers
        steps = _Rows(self._names)
        now_s = float(pool.at_s[0])
        place = int(np.searchsorted(pool.at_s, now_s, side="right"))
        for server, cores in zip(pool.machine[:place].tolist(), pool.cores[:place].tolist(), strict=True):
            servers.change(server, cores, now_s)
        for number in range(len(self._names)):
            steps.add(number, now_s, 0)
        yield steps.batch()
        while now_s < pool.until_s:
            rows = _Rows(self._names)
            self._look(rows, now_s)
            end_s = min(now_s + self._acquisition.step_s, pool.until_s)
            last = int(np.searchsorted(pool.at_s, end_s, side="right"))
            self._replay(rows, place, last)
            place, now_s = last, end_s
            # The engine asks for more when it has done this, and so stands at the end of the step.
            rows.repeat(now_s, int(self.state().machines[0, MACHINE.cores]))
            yield rows.batch()
            self._meter.to(now_s)

    def _replay(self, rows: _Rows, first: int, last: int) -> None:
        """What on-demand VMs take and leave on all servers, of which the engine hears what is ours."""
        pool, servers = self._pool, self._servers
        for place in range(first, last):
            server, at_s = int(pool.machine[place]), float(pool.at_s[place])
            for number, cores in servers.change(server, int(pool.cores[place]), at_s):
                rows.add(number, at_s, cores)
                self._learn(number, at_s, cores)
                self._meter.change(number, at_s, cores, int(servers.least[number]))
                self.evicted += cores == 0

    def _look(self, rows: _Rows, now_s: float) -> None:
        """Everything that follows at this instant."""
        servers, machines = self._servers, self.state().machines
        self._see(now_s)
        servers.cooling[:] = False
        # Those that have gone by now: the next harvest VM there takes tasks.
        machines[~servers.held & (machines[:, MACHINE.held] == LEAVING), MACHINE.held] = 0
        events: list[Event] = self._news(now_s)
        for one in self.acquirer.machines.values():
            if one.standing is Standing.LEAVING and machines[int(one.name), MACHINE.running] == 0:
                events.append(Emptied(one.name))
        events.append(PeriodOver(now_s, self._views(now_s), self._wanted()))
        while events:
            held = self._servers.held.copy()
            self.acquirer, instructions = advance_all(self.acquirer, events, self._acquisition.options)
            for call in calls(servers, instructions, lambda told: self._decommission(rows, now_s, told)):
                at_once(call)
            for server in np.flatnonzero(servers.held & ~held):
                self.requested += 1
                cores = int(servers.ours[server])
                rows.add(int(server), now_s, cores)
                self._learn(int(server), now_s, cores)
                self._meter.change(int(server), now_s, cores, int(servers.least[server]))
            for server in np.flatnonzero(held & ~servers.held):
                self.given_back += 1
                rows.add(int(server), now_s, 0)
                self._learn(int(server), now_s, 0, by_owner=True)
                self._meter.change(int(server), now_s, 0, 0)
            events = self._news(now_s)
        self._write_down(now_s)

    def _news(self, now_s: float) -> list[Event]:
        return news(self.acquirer, at_once(self._servers.look()), now_s)

    def _decommission(self, rows: _Rows, now_s: float, told: Decommission) -> None:
        server = int(told.machine)
        self.state().machines[server, MACHINE.held] = LEAVING
        # Nothing changes; policies that keep lists of room hear of it.
        rows.add(server, now_s, int(self._servers.ours[server]))

    def _views(self, now_s: float) -> dict[str, View]:
        views = {}
        ours = self._servers.ours
        kept = None
        if self._futures is not None and now_s >= self.acquirer.next_at:
            kept = self._futures.share_kept(now_s, self._duration_s(), _AHEAD_S)
        for one in self.acquirer.kept:
            unchanged_s = now_s - max(float(self._servers.changed_s[int(one.name)]), one.came_at)
            if self._acquisition.removal is Removal.RANDOM:
                # The acquirer gives back what changed last: whichever that is said to be.
                unchanged_s = float(self._generator.random())
            busy = int(self.state().machines[int(one.name), MACHINE.running]) > 0
            stability = self._record.of(one.name) if kept is None else float(kept[int(one.name)])
            known_s = now_s - one.came_at if kept is None else math.inf
            views[one.name] = View(float(ours[int(one.name)]), unchanged_s, busy, stability, known_s)
        return views

    def _learn(self, server: int, at_s: float, cores: int, by_owner: bool = False) -> None:
        """What the acquirer's predictor hears of the machines that it holds."""
        if self._acquisition.removal is not Removal.STABILITY:
            return
        before = self._shown.get(server, 0)
        self._shown[server] = cores
        self._predictor.observe(Change(str(server), at_s, float(before), float(cores), by_owner))

    def _see(self, now_s: float) -> None:
        """Write down how stable the machines are, every quarter of an hour."""
        if self._acquisition.removal is not Removal.STABILITY or now_s < self._recorded_s + _RECORD_S:
            return
        self._recorded_s = now_s
        names = [one.name for one in self.acquirer.kept]
        found = self._predictor.probabilities_of(names, now_s, self._duration_s())
        self._record.observe(now_s, dict(zip(names, found, strict=True)))

    def _duration_s(self) -> float:
        """The median of what the tasks that are there are said to run."""
        s = self.state()
        alive = s.tasks[:, TASK.machine] > -2
        return median_duration_s(s.times[alive, TIME.estimate].tolist(), FALLBACK_S)

    def _wanted(self) -> float:
        if self._acquisition.budget_cores is not None:
            return self._acquisition.budget_cores
        s = self.state()
        queued = float((s.queues[:, QUEUE.cores] * s.queues[:, QUEUE.waiting]).sum())
        return float(s.counts[COUNT.used_cores]) + queued

    def _write_down(self, now_s: float) -> None:
        held, servers = self.held, np.flatnonzero(self._servers.held)
        leaving = [int(one.name) for one in self.acquirer.machines.values() if one.standing is not Standing.HELD]
        leaving = [server for server in leaving if self._servers.held[server]]
        held.at_s.append(now_s)
        held.machines.append(len(servers) - len(leaving))
        ours = self._servers.ours
        held.leaving_cores.append(int(ours[leaving].sum()))
        held.cores.append(int(ours.sum()) - held.leaving_cores[-1])
        held.used_cores.append(int(self.state().counts[COUNT.used_cores]))
        held.cost_per_h.append(self._meter.per_h if self._acquisition.vm_cores else math.nan)
        held.servers.append(servers)


class _Rows:
    """Rows of one batch."""

    def __init__(self, names: np.ndarray[tuple[int], np.dtype[np.object_]]) -> None:
        self._names = names
        self._rows: list[tuple[int, float, int]] = []
        self._cores: dict[int, int] = {}

    def add(self, server: int, at_s: float, cores: int) -> None:
        self._rows.append((server, at_s, cores))
        self._cores[server] = cores

    def repeat(self, at_s: float, cores: int) -> None:
        """A last row that changes nothing.

        :param cores: that the first server has where no row is about it.
        """
        self.add(0, at_s, self._cores.get(0, cores))

    def batch(self) -> CapacityBatch:
        servers, at_s, cores = zip(*self._rows, strict=True)
        return CapacityBatch(
            machine=self._names[list(servers)],
            at_s=np.array(at_s),
            cpu_cores=np.array(cores, np.float64),
            memory_mib=np.full(len(at_s), np.nan),
        )


def _no_engine() -> Any:
    raise AssertionError("the engine is given before it asks for changes")
