"""One run: arrivals and departures of a trace on hosts that look after their memory every ten seconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.placement.fitness import HostView, rank_hosts
from ebbtide.deflation.resources import ResourceVector
from ebbtide.simulator.cluster.members import CPU, MEMORY
from ebbtide.simulator.cluster.state import LOW, Arrivals
from ebbtide.simulator.steady.guests import FAULT_S, PAGES_PER_MIB, Guest, Habits
from ebbtide.simulator.steady.hosts import LOOK_S, SimulatedHost, Totals

_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0
#: What a run gives.
METRICS: Final = (
    *("arrivals", "at_once_share", "wait_mean_s", "wait_p95_s", "refused_share", "refault_mib_per_vm_h"),
    *("refault_stall_share", "trimmed_gib_per_day", "given_back_gib_per_day", "reclaimed_gib_per_day"),
    *("low_memory_share", "free_memory_share", "reserve_memory_share", "memory_demand", "nodes"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is of.

    :param window_s: what is measured; ``from_s``: when hosts begin to look after themselves, before that.
    """

    scheme: str
    nodes: int
    capacity: ResourceVector
    window_s: tuple[float, float]
    from_s: float
    reclaim_mib_s: float
    begins_s: float
    asked_mib: float | None
    habits: Habits


class Run:
    """Hosts, and the trace's VMs on them."""

    def __init__(self, plan: Plan, arrivals: Arrivals, seed: int) -> None:
        self._plan, self._arrivals, self._seed = plan, arrivals, seed
        self._totals = Totals()
        self._hosts = {
            name: SimulatedHost(
                name,
                plan.capacity,
                plan.scheme,
                plan.reclaim_mib_s,
                plan.begins_s,
                plan.asked_mib,
                self._totals,
            )
            for name in (f"{number:05d}" for number in range(plan.nodes))
        }
        #: Departures to come: (at, VM, host).
        self._leaving: list[tuple[float, str, str]] = []
        self._waits: list[float] = []
        self._refused = 0
        self._low_s = self._low_share_s = self._free_s = self._reserve_s = self._looks = 0.0

    def go(self, progress: Callable[[float], None]) -> Mapping[str, float]:
        """Go through the whole of it; the metrics."""
        plan, at_s = self._plan, self._arrivals.at_s
        begin_s, end_s = plan.window_s
        first = int(np.searchsorted(at_s, plan.from_s))
        for row in range(first):
            if self._arrivals.departs_s[row] > plan.from_s:
                self._arrive(row, plan.from_s, counts=False)
        for host in self._hosts.values():
            host.learner.arrivals.clear()  # as an agent that starts: what it finds came long ago
        row, last, before, now_s = first, int(np.searchsorted(at_s, end_s)), replace(self._totals), plan.from_s
        steps = max(int((end_s - plan.from_s) / LOOK_S), 1)
        for step in range(steps):
            now_s = plan.from_s + (step + 1) * LOOK_S
            while row < last and at_s[row] <= now_s:
                self._depart_until(float(at_s[row]))
                self._arrive(row, float(at_s[row]), counts=bool(at_s[row] >= begin_s))
                row += 1
            self._depart_until(now_s)
            if now_s - LOOK_S < begin_s <= now_s:
                before = replace(self._totals)
            for host in self._hosts.values():
                host.look(now_s)
            if now_s >= begin_s:
                self._measure()
            if step % 360 == 0:
                progress(step / steps)
        return self._metrics(before)

    def _depart_until(self, now_s: float) -> None:
        while self._leaving and self._leaving[0][0] <= now_s:
            at_s, name, host = heapq.heappop(self._leaving)
            self._hosts[host].leave(at_s, name)

    def _arrive(self, row: int, now_s: float, *, counts: bool) -> None:
        arrivals, plan = self._arrivals, self._plan
        low = int(arrivals.sold_as[row]) == LOW
        nominal = ResourceVector(float(arrivals.upper[row, CPU]), float(arrivals.upper[row, MEMORY]))
        least = ResourceVector(float(arrivals.minimum[row, CPU]), float(arrivals.minimum[row, MEMORY]))
        priority = Priority.DEFLATABLE if low else Priority.FIXED
        vm = Allocation(str(row), priority, nominal, least if low else nominal, nominal)
        views = [HostView(host.name, host.capacity, host.free(), host.deflatable()) for host in self._hosts.values()]
        ranked = rank_hosts(vm.charge, views)
        if not ranked:
            self._refused += counts
            return
        # A guest is the same under every scheme.
        chance = np.random.default_rng([self._seed, row])
        guest = Guest(plan.habits, nominal.memory_mib, chance, now_s) if low else None
        wait_s = self._hosts[ranked[0]].take(now_s, vm, guest)
        if counts:
            self._waits.append(wait_s)
        if np.isfinite(arrivals.departs_s[row]):
            heapq.heappush(self._leaving, (float(arrivals.departs_s[row]), vm.name, ranked[0]))

    def _measure(self) -> None:
        for host in self._hosts.values():
            for vm in host.vms.values():
                if vm.guest is not None:
                    self._low_s += LOOK_S
                    self._low_share_s += LOOK_S * vm.allocation.current.memory_mib / vm.allocation.nominal.memory_mib
            self._free_s += host.free().memory_mib / host.capacity.memory_mib
            self._reserve_s += host.reserve_mib / host.capacity.memory_mib
            self._looks += 1

    def _metrics(self, before: Totals) -> Mapping[str, float]:
        waits = np.array(self._waits)
        offered = len(waits) + self._refused
        days = (self._plan.window_s[1] - self._plan.window_s[0]) / _DAY_S
        low_h = self._low_s / _HOUR_S
        refaults = self._totals.refaults - before.refaults
        nan = float("nan")
        return {
            "arrivals": float(offered),
            "at_once_share": float((waits == 0).sum() / offered) if offered else nan,
            "wait_mean_s": float(waits.mean()) if len(waits) else nan,
            "wait_p95_s": float(np.quantile(waits, 0.95)) if len(waits) else nan,
            "refused_share": self._refused / offered if offered else nan,
            "refault_mib_per_vm_h": refaults / PAGES_PER_MIB / low_h if low_h else nan,
            "refault_stall_share": refaults * FAULT_S / self._low_s if low_h else nan,
            "trimmed_gib_per_day": (self._totals.trimmed_mib - before.trimmed_mib) / 1024 / days,
            "given_back_gib_per_day": (self._totals.given_back_mib - before.given_back_mib) / 1024 / days,
            "reclaimed_gib_per_day": (self._totals.reclaimed_mib - before.reclaimed_mib) / 1024 / days,
            "low_memory_share": self._low_share_s / self._low_s if low_h else nan,
            "free_memory_share": self._free_s / self._looks if self._looks else nan,
            "reserve_memory_share": self._reserve_s / self._looks if self._looks else nan,
            "nodes": float(self._plan.nodes),
        }
