"""Preempted VMs that wait for room, by host, as the store has them."""

from __future__ import annotations

import asyncio

from cluster_manager.plans.reclaim_steps import status_in
from cluster_manager.plans.report_queries import closed, seen_elsewhere
from cluster_manager.plans.returns import least_to_return, room_to_return
from cluster_manager.store.rows import StoredVM
from cluster_manager.store.store import Store
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import Preempted, VMSpec


class WaitingVMs:
    """The queues of all hosts, oldest first. Read again whenever what a plan has stored may change them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_host: dict[str, list[StoredVM]] = {}
        self.names: frozenset[str] = frozenset()
        #: The later of two readings counts.
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """See what the store says now."""
        async with self._reading:
            rows, by_host = await self._store.preempted(), dict[str, list[StoredVM]]()
            for row in rows:
                by_host.setdefault(row.host or "", []).append(row)
            self._by_host, self.names = by_host, frozenset(row.name for row in rows)

    @property
    def hosts(self) -> frozenset[str]:
        """Those on which somebody waits."""
        return frozenset(self._by_host)

    def since(self) -> dict[str, list[float]]:
        """Since when VMs wait on each host, oldest first, seconds since the epoch."""
        return {host: [row.preempted_at or 0.0 for row in rows] for host, rows in self._by_host.items()}

    def specs(self, host: str) -> list[VMSpec]:
        """What the VMs that wait on a host are sold as, oldest first; not those of which that cannot be read."""
        return [row.spec for row in self._by_host.get(host, ()) if not row.unread]

    def unsure(self, host: str) -> frozenset[str]:
        """Those of them that may not have been preempted at all."""
        return frozenset(row.name for row in self._by_host.get(host, ()) if row.perhaps is not None)

    def place(self, row: StoredVM, report: HostReport | None, reserved: ResourceVector) -> Preempted:
        """A VM's place in the queue of its host, and what it waits for.

        :param report: the last one of its host.
        :param reserved: room that running plans have chosen there.
        """
        names = [one.name for one in self._by_host.get(row.host or "", ())]
        position = names.index(row.name) + 1 if row.name in names else len(names) + 1
        missing, why = _missing(row, report, reserved)
        line = f"{_ordinal(position)} in line on {row.host}, {why}"
        if row.owes_removal:
            missing, line = ZERO, f"in no line: it is removed as soon as {row.host} answers"
        return Preempted(
            reason=row.preemption_reason or "",
            at=row.preempted_at or 0.0,
            position=position,
            waits_for=Vector.of(missing),
            sentence=line,
        )


def _missing(row: StoredVM, report: HostReport | None, reserved: ResourceVector) -> tuple[ResourceVector, str]:
    if row.unread:
        return ZERO, "waits until it can be read what it is sold as"
    spec = row.spec
    found = status_in(report, spec.name) if report is not None else None
    if report is None or found is None:
        return ZERO, "waits for its host to report it"
    if why := closed(report) or refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE):
        return ZERO, f"waits: {why}"
    try:
        least = least_to_return(spec, found, report)
    except InvalidField as error:
        return ZERO, f"waits: its host says of it what cannot be ({error})"
    missing = least.less(room_to_return(report, reserved))
    if missing.is_zero():
        return missing, "waits for the room to last"
    other = " there, or for all its room on another host" if seen_elsewhere(report, spec, found) else ""
    return missing, f"waits for {missing}{other}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
