"""The hosts by their agents' reports: who is ready, who is silent, and what placement may count on.

A silent host gets no new VM, and is never assumed empty: its last report stands until the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster_manager.store import Store
from cluster_manager.versions import host_version
from deflation.messages import HostReport, HostStatus, VMStatus
from deflation.modes import HostMode


@dataclass(slots=True)
class Host:
    """One host. ``seen_at`` is for people (seconds since the epoch), ``seen`` for ages (monotonic; None: not yet)."""

    report: HostReport
    seen_at: float
    seen: float | None
    owes_reinflation: bool


class Hosts:
    """Every host that has ever reported to this store.

    :param clock: seconds since the epoch.
    :param monotonic: seconds that never go back.
    """

    def __init__(
        self,
        store: Store,
        silent_after_s: float,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._silent_after_s = silent_after_s
        self._clock = clock
        self._monotonic = monotonic
        self._hosts: dict[str, Host] = {}
        self._news = asyncio.Event()
        self._loaded_at = monotonic()

    async def load(self) -> None:
        """Recall the hosts of earlier runs; they count as silent until they report."""
        for stored in await self._store.hosts():
            self._hosts[stored.report.id] = Host(stored.report, stored.seen_at, None, stored.owes_reinflation)
        self._loaded_at = self._monotonic()

    async def take(self, report: HostReport) -> None:
        """Take an agent's report, or its answer to a question; stored when it changes more than free memory."""
        host = self._hosts.get(report.id)
        known = host.report if host is not None else None
        if host is None or known is None or _essence(known) != _essence(report):
            await self._store.save_host(report)
        before = known.mode if known is not None else HostMode.ACTIVE
        if report.mode is not before:
            because = f" ({report.mode_reason})" if report.mode_reason else ""
            await self._store.add_event("mode", None, report.id, f"{report.id} is {report.mode}{because}, was {before}")
        for vm in _asking(report) - (_asking(known) if known is not None else set()):
            asks = next(status.asks.vector() for status in report.vms if status.name == vm)
            sentence = f"{vm} is under pressure and asks for {asks} beyond what {report.id} can spare"
            await self._store.add_event("pressure", vm, report.id, sentence)
        owes = host.owes_reinflation if host is not None else False
        self._hosts[report.id] = Host(report, self._clock(), self._monotonic(), owes)
        self._news.set()

    def get(self, host_id: str) -> Host | None:
        return self._hosts.get(host_id)

    def all(self) -> list[Host]:
        """By id."""
        return [self._hosts[host_id] for host_id in sorted(self._hosts)]

    def ready(self) -> list[Host]:
        """Those that have reported lately, by id."""
        return [host for host in self.all() if self.is_ready(host.report.id)]

    def is_ready(self, host_id: str) -> bool:
        host = self._hosts.get(host_id)
        return host is not None and host.seen is not None and self._monotonic() - host.seen <= self._silent_after_s

    async def settle(self) -> None:
        """After a start, give the hosts of earlier runs the time to report before one decides without them."""
        while any(host.seen is None for host in self._hosts.values()):
            left = self._loaded_at + self._silent_after_s - self._monotonic()
            if left <= 0:
                return
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                return

    def status(self, host_id: str) -> HostStatus | None:
        """The host as clients see it."""
        host = self._hosts.get(host_id)
        if host is None:
            return None
        report = host.report
        return HostStatus(
            id=report.id,
            url=report.url,
            state="ready" if self.is_ready(host_id) else "silent",
            seen_at=host.seen_at,
            capacity=report.capacity,
            free=report.free,
            deflatable=report.deflatable,
            accelerator=report.accelerator,
            mode=report.mode,
            mode_reason=report.mode_reason,
            vms=tuple(vm.name for vm in report.vms),
            version=host_version(report),
        )

    def vm(self, host_id: str | None, name: str) -> VMStatus | None:
        """A VM as its host last reported it."""
        host = self._hosts.get(host_id) if host_id is not None else None
        return next((vm for vm in host.report.vms if vm.name == name), None) if host is not None else None


def _asking(report: HostReport) -> set[str]:
    """Names of the VMs that want more than their host has."""
    return {vm.name for vm in report.vms if not vm.asks.vector().is_zero()}


def _essence(report: HostReport) -> HostReport:
    """What is worth a write: free memory and throttling move all the time, and core changes have their own table."""
    vms = tuple(vm.model_copy(update={"throttled_share": None, "pressure": None}) for vm in report.vms)
    return report.model_copy(update={"free": report.capacity, "core_changes": (), "vms": vms})
