"""Room that placement may count on at each host that takes VMs: by its last report, less what running plans chose and
is not charged there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cluster_manager.plans.plans import Arrival, Purpose
from cluster_manager.plans.report_queries import coming_mib, low_priority, not_yet, to_come
from ebbtide.deflation.kernels import fits
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.placement.fitness import HostTable, HostView, available
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.placement.rebalancing import Rooms
from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport

_Amounts = tuple[float, ...]
Ranking = Purpose | Literal["wait"]
_MEMORY: Final = COMPONENTS.index("memory_mib")


@dataclass(frozen=True, slots=True)
class _Offer:
    """One host's figures, in the order of ``COMPONENTS``.

    ``low``: what its low-priority VMs are charged; ``above``: what they have above their minimums.
    """

    capacity: _Amounts
    free: _Amounts
    deflatable: _Amounts
    low: _Amounts
    above: _Amounts
    overhead_mib: float
    #: What can be deflated once guests answer that do not yet; None: there are none.
    coming: _Amounts | None
    report: HostReport


class Availability:
    """The open hosts, ranked for a demand. Placement counts free + deflatable, preemption free + low-priority VMs.

    Those where guests that boot, or that are only to come, can be deflated soon stand in a table of their own, with
    that as deflatable: "wait".
    """

    def __init__(self) -> None:
        self._tables: dict[Ranking, HostTable] = {"place": HostTable(), "preempt": HostTable(), "wait": HostTable()}
        #: One that may start deflated is placed by the same figures.
        self._table_of: dict[Ranking, HostTable] = self._tables | {"deflated": self._tables["place"]}
        self._offers: dict[str, _Offer] = {}
        #: Where each running placement is, and by host what its placements want, in the order in which they came.
        self._at: dict[str, str] = {}
        self._arrivals: dict[str, dict[str, Arrival]] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def open(self, report: HostReport) -> None:
        """A host takes VMs, with these figures."""
        low, above = low_priority(report)
        coming_at = coming_mib(not_yet(report))
        self._offers[report.id] = _Offer(
            _amounts(report.capacity),
            _amounts(report.free),
            _amounts(report.deflatable),
            low,
            above,
            report.vm_overhead_mib,
            _plus(_amounts(report.deflatable), _memory(coming_at)) if coming_at > 0 else None,
            report,
        )
        self._renew(report.id)

    def close(self, host: str) -> None:
        """A host takes no VMs any more."""
        if self._offers.pop(host, None) is not None:
            for table in self._tables.values():
                table.drop(host)

    def reserve(self, plan: str, host: str | None, arrival: Arrival | None = None) -> None:
        """A running placement has chosen a host, whose room no other may count; None: it has none, or has ended."""
        was = self._at.get(plan)
        if was == host:
            return
        if was is not None:
            del self._at[plan], self._arrivals[was][plan]
            if not self._arrivals[was]:
                del self._arrivals[was]
            self._renew(was)
        if host is not None and arrival is not None:
            self._at[plan] = host
            self._arrivals.setdefault(host, {})[plan] = arrival
            self._renew(host)

    def reserved(self, host: str) -> ResourceVector:
        """The room that running placements have chosen on a host, and that is not charged there yet; without their
        overheads.
        """
        return sum((arrival.size for arrival in self._coming(host)), ResourceVector())

    def chosen_by(self, plan: str) -> str | None:
        """The host on which a running placement has chosen room."""
        return self._at.get(plan)

    def queue(self, host: str, but: str) -> tuple[Arrival, ...]:
        """What running placements have chosen on a host but for one, in the order in which they came."""
        return tuple(arrival for plan, arrival in self._arrivals.get(host, {}).items() if plan != but)

    def rank(
        self,
        demand: ResourceVector,
        most: int,
        purpose: Ranking,
        policy: PlacementPolicy,
        generator: np.random.Generator,
        accepts: Callable[[str], bool] | None = None,
    ) -> list[str]:
        """The open hosts to try for a VM, best first; what a VM costs a host besides its size is allowed for.

        :param accepts: whether a host that could hold it comes into question.
        """
        return self._table_of[purpose].rank(demand, most, policy, generator, accepts)

    def minimums_allow(self, size: ResourceVector) -> Callable[[str], bool]:
        """Whether an open host could hold a VM with every VM at its minimum, whatever can be taken at this moment.

        Asked of every host that could hold it by preemption: a few microseconds each.
        """
        wanted, missing = tuple(size), [0.0] * len(COMPONENTS)

        def allow(host: str) -> bool:
            offer = self._offers[host]
            demand = _plus(wanted, _memory(offer.overhead_mib))
            placement_step.missing_of(demand, offer.free, offer.capacity, missing)
            return fits(missing, offer.above)

        return allow

    def offers(self, purpose: Purpose, most: int) -> list[tuple[str, ResourceVector]]:
        """The first open hosts by id with what each has for another VM."""
        table = self._table_of[purpose]
        return [(host, table.availability(host)) for host in table.ids(most)]

    def rooms(self, accepts: Callable[[str], bool]) -> Rooms:
        """What each open host has for one more VM by deflation alone.

        :param accepts: whether a host comes into question.
        """
        hosts, room = self._tables["place"].offered()
        rows = [row for row, host in enumerate(hosts) if accepts(host)]
        return Rooms([hosts[row] for row in rows], room[rows])

    def view(self, host: str, purpose: Purpose, demand: ResourceVector) -> tuple[HostView, float]:
        """An open host as the ranking sees it, and its fitness for a demand. Raises KeyError for any other."""
        offer = self._offers[host]
        taken, free = ResourceVector(*self._taken(host, offer)), ResourceVector(*offer.free)
        beyond = ResourceVector(*(offer.low if purpose == "preempt" else offer.deflatable))
        left = beyond.less(taken.less(free))
        score = self._table_of[purpose].fitness_of(host, demand)
        return HostView(host, ResourceVector(*offer.capacity), free.less(taken), left), score

    def _taken(self, host: str, offer: _Offer, later: bool = False) -> _Amounts:
        """The next VM costs its overhead too.

        :param later: when low-priority VMs that are to come can be deflated.
        """
        taken = _memory(offer.overhead_mib)
        for arrival in self._coming(host):
            size = arrival.keeps if later else arrival.size
            taken = _plus(taken, _plus(tuple(size), _memory(offer.overhead_mib)))
        return taken

    def _coming(self, host: str) -> Collection[Arrival]:
        """What running placements have chosen on a host and is not charged there by its last report."""
        arrivals, offer = self._arrivals.get(host, {}).values(), self._offers.get(host)
        return to_come(offer.report, arrivals) if offer is not None else arrivals

    def _renew(self, host: str) -> None:
        offer = self._offers.get(host)
        if offer is None:
            return
        taken, later = self._taken(host, offer), self._taken(host, offer, later=True)
        self._tables["place"].put(host, offer.capacity, available(offer.free, offer.deflatable, taken))
        self._tables["preempt"].put(host, offer.capacity, available(offer.free, offer.low, taken))
        if offer.coming is not None or later != taken:
            soon = offer.coming or offer.deflatable
            self._tables["wait"].put(host, offer.capacity, available(offer.free, soon, later))
        else:
            self._tables["wait"].drop(host)


def _amounts(vector: Vector) -> _Amounts:
    return (vector.cpu_cores, vector.memory_mib, vector.disk_mib_s, vector.network_mib_s)


def _memory(mib: float) -> _Amounts:
    return tuple(mib if component == _MEMORY else 0.0 for component in range(len(COMPONENTS)))


def _plus(one: _Amounts, other: _Amounts) -> _Amounts:
    return tuple(a + b for a, b in zip(one, other, strict=True))
