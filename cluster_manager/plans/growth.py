"""Decision what a host's free room is for, by its reports: VMs that lack something grow, then harvest VMs get a budget.

Level-triggered: whatever made the room (a VM that stopped or was made smaller, a foreign process that ended, a host
that reports again), the next report shows it. When to grow is decided in `deflation.sharing.hysteresis`, what harvest
VMs may have in `deflation.sharing.harvest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster_manager.plans.report_queries import allocations_of, kept_free, pressed_on
from ebbtide.deflation.allocations import Allocation, Priority, lack, shareable
from ebbtide.deflation.modes import HostEvent, Reaction, reaction
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.harvest import grant, is_worth_granting
from ebbtide.deflation.sharing.hysteresis import DEFAULT_PACE, Pace, RoomWatch
from ebbtide.deflation.sharing.pressure_response import room_besides_pressure
from ebbtide.messages.commands import Budget
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMState

#: Pauses before VMs that did not grow when told to are told again, in seconds.
FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 900.0
#: Hosts whose VMs are told to grow at the same time, and those while somebody waits for a command: after a restart of
#: the manager there may be thousands, and each takes some records.
MOST_GROWING: Final = 16
MOST_BESIDE: Final = 1


@dataclass(frozen=True, slots=True)
class Due:
    """VMs that are to grow now, and the room that they are to share."""

    vms: tuple[str, ...]
    room: ResourceVector
    #: The sizes that they have: a try after which none grew is not repeated at once.
    sizes: tuple[ResourceVector, ...]


class Growth:
    """The rooms of all hosts, as their reports show them.

    :param pace: how long growth waits.
    """

    def __init__(self, pace: Pace = DEFAULT_PACE) -> None:
        self._pace = pace
        self._watches: dict[str, RoomWatch] = {}
        self._tries: dict[str, _Tried] = {}
        #: Of hosts on which no VM lacks anything, the latest report: thousands of hosts report every two seconds.
        self._idle: dict[str, HostReport] = {}
        #: Of the others the rows of the latest report: most reports are the last one once more.
        self._rows: dict[str, tuple[HostReport, list[Allocation]]] = {}

    def due(self, report: HostReport, reserved: ResourceVector, now: float, decide: bool = True) -> Due | None:
        """Take in a report, and say which VMs are to grow; None if none is.

        :param reserved: room that running plans have chosen there.
        :param now: seconds of one monotonic clock.
        :param decide: False where the answer could not be acted on: it is most of the work.
        """
        idle = self._idle.pop(report.id, None)
        if idle is report or not _is_any_deflated(report):
            self._idle[report.id] = report
            self._watches.pop(report.id, None)
            self._rows.pop(report.id, None)
            return None
        rows = self._rows_of(report)
        room = _room(report, reserved, rows)
        watch = self._watches.setdefault(report.id, RoomWatch(self._pace))
        if idle is not None:
            # What was taken since then was taken just now.
            had = allocations_of(idle)
            watch.observe(now, had, _room(idle, reserved, had))
        watch.observe(now, rows, room)
        if not decide or reaction(report.mode, HostEvent.REINFLATE) is not Reaction.DONE:
            return None
        free_to_grow = {vm.name for vm in report.vms if vm.state is VMState.RUNNING and not vm.held}
        lacking = [
            row
            for row in rows
            if row.priority is Priority.DEFLATABLE and row.name in free_to_grow and not row.nominal.fits_in(row.current)
        ]
        # One under pressure whose size a target holds does not grow by this, but what it asks for comes first.
        asks = [vm.asks.vector() for vm in report.vms if vm.pressure and vm.name not in {row.name for row in lacking}]
        room = room_besides_pressure(room, asks)
        targets = watch.grown(now, lacking, room, pressed_on(report))
        if not targets:
            return None
        rows = sorted((row for row in lacking if row.name in targets), key=lambda row: row.name)
        room = sum((targets[row.name].less(row.current) for row in rows), ZERO)
        found = Due(tuple(row.name for row in rows), room, tuple(row.current for row in rows))
        tried = self._tries.get(report.id)
        return None if tried is not None and now < tried.not_before and tried.is_like(found) else found

    def forget(self, host: str) -> None:
        """A host does not come back."""
        for kept in (self._watches, self._tries, self._idle, self._rows):
            kept.pop(host, None)

    def _rows_of(self, report: HostReport) -> list[Allocation]:
        known = self._rows.get(report.id)
        if known is None or known[0] is not report:
            known = self._rows[report.id] = (report, allocations_of(report))
        return known[1]

    def tried(self, host: str, due: Due, now: float) -> None:
        """These VMs are told to grow now. If that comes to nothing they wait ever longer for the next time."""
        earlier = self._tries.get(host)
        again = earlier is not None and earlier.is_like(due)
        pause_s = min(earlier.pause_s * 2, LONGEST_PAUSE_S) if again and earlier is not None else FIRST_PAUSE_S
        self._tries[host] = _Tried(due, pause_s, now + pause_s)


def may_begin(growing: int, commanded: bool) -> bool:
    """Whether VMs of one more host may be told to grow now.

    :param growing: the hosts where they are growing.
    :param commanded: whether somebody waits for a command to end.
    """
    return growing < (MOST_BESIDE if commanded else MOST_GROWING)


def _room(report: HostReport, reserved: ResourceVector, rows: Sequence[Allocation]) -> ResourceVector:
    """What there is to share."""
    free = report.free.vector().less(reserved + kept_free(report))
    return shareable(free, report.capacity.vector(), lack(rows))


def _is_any_deflated(report: HostReport) -> bool:
    return any(
        vm.priority is Priority.DEFLATABLE
        and vm.start_size is None
        and (
            vm.current.cpu_cores < vm.nominal.cpu_cores
            or vm.current.memory_mib < vm.nominal.memory_mib
            or vm.current.disk_mib_s < vm.nominal.disk_mib_s
            or vm.current.network_mib_s < vm.nominal.network_mib_s
        )
        for vm in report.vms
    )


@dataclass(frozen=True, slots=True)
class _Tried:
    due: Due
    pause_s: float
    not_before: float

    def is_like(self, due: Due) -> bool:
        """Whether the same VMs would be told the same, none of them having grown."""
        return (self.due.vms, self.due.sizes) == (due.vms, due.sizes)


def has_harvest_vms(report: HostReport) -> bool:
    """Whether a host has any to grant a budget for."""
    return any(vm.priority is Priority.HARVEST for vm in report.vms)


def budget_for(report: HostReport, reserved: ResourceVector, epoch: int) -> Budget | None:
    """The next budget for a host's harvest VMs; None if it has none, or one that is about right.

    :param reserved: room that running plans have chosen there.
    """
    if not has_harvest_vms(report):
        return None
    rows = allocations_of(report)
    if reaction(report.mode, HostEvent.HARVEST) is not Reaction.DONE:
        return None
    held = [vm.name for vm in report.vms if vm.held]
    wanted = grant(rows, _room(report, reserved, rows), report.capacity.vector(), held)
    if not is_worth_granting(report.budget.vector(), wanted):
        return None
    return Budget(epoch=epoch, number=report.budget_number + 1, room=Vector.of(wanted))
