"""The lists that clients ask for, in pages: selects of :mod:`cluster_manager.queries`, shown as clients see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cluster_manager import queries
from cluster_manager.plans import PlanState, VMPhase
from cluster_manager.rows import StoredPlan, StoredVM
from cluster_manager.store import Store
from deflation.allocations import Priority
from deflation.messages import CoreChange, ManagedVM, Operation, OperationState, VMSpec
from deflation.pages import CoreChangePage, Event, EventPage, OperationPage, VMPage
from rest.pages import cursor_of, key_of

R = TypeVar("R")
Shown = list[tuple[R, Any]]
_RUNNING, _STOPPED, _FAILED = VMPhase.RUNNING.value, VMPhase.STOPPED.value, VMPhase.FAILED.value
#: The stored phases of what is shown as a state: its host's report may say that a VM is off, runs, or is not there.
_SHOWN_OF = {_FAILED: [_FAILED, _RUNNING], _STOPPED: [_STOPPED, _RUNNING], _RUNNING: [_RUNNING, _STOPPED]}


class Lists:
    """Reads pages.

    :param show_vm: a VM's row as clients see it.
    :param show_plan: a plan as clients see it.
    """

    def __init__(
        self, store: Store, show_vm: Callable[[StoredVM], ManagedVM], show_plan: Callable[[StoredPlan], Operation]
    ) -> None:
        self._store = store
        self._show_vm = show_vm
        self._show_plan = show_plan

    async def vms(
        self,
        limit: int,
        after: str | None,
        *,
        host: str | None = None,
        state: str | None = None,
        priority: Priority | None = None,
        prefix: str | None = None,
    ) -> VMPage:
        """By name. Raises InvalidField for a cursor of something else, as all here."""
        key = key_of("vms", after, (str,))
        phases = None if state is None else _SHOWN_OF.get(state, [state])

        async def read(number: int, last: Any) -> Shown[ManagedVM]:
            wanted = priority.value if priority is not None else None
            query = queries.vms(number, last, host=host, phases=phases, priority=wanted, prefix=prefix)
            return [(self._show_vm(_stored_vm(row)), row.name) for row in await self._store.rows(query)]

        def fits(vm: ManagedVM) -> bool:
            return (state is None or vm.state == state) and (priority is None or vm.priority is priority)

        rows, last = await _page(read, fits, limit, key[0] if key else None)
        return VMPage(vms=tuple(rows), next=None if last is None else cursor_of("vms", (last,)))

    async def operations(
        self,
        limit: int,
        after: str | None,
        *,
        kind: str | None = None,
        state: OperationState | None = None,
        vm: str | None = None,
        host: str | None = None,
        since: float | None = None,
    ) -> OperationPage:
        """What clients asked for, newest first."""
        key = key_of("operations", after, (int,))
        wanted: Any = {"kind": kind, "state": state, "vm": vm, "host": host, "since": since}
        found = await self._store.rows(queries.plans(limit + 1, key[0] if key else None, **wanted))
        rows = tuple(self._show_plan(_stored_plan(row)) for row in found[:limit])
        last = found[limit - 1].number if len(found) > limit else None
        return OperationPage(operations=rows, next=None if last is None else cursor_of("operations", (last,)))

    async def events(self, limit: int, after: str | None, **wanted: Any) -> EventPage:
        """The event log, newest first. ``wanted``: the filters of :func:`cluster_manager.queries.events`."""
        key = key_of("events", after, (int,))
        found = await self._store.rows(queries.events(limit + 1, key[0] if key else None, **wanted))
        rows = tuple(event_of(row) for row in found[:limit])
        return EventPage(events=rows, next=cursor_of("events", (rows[-1].id,)) if len(found) > limit else None)

    async def core_changes(
        self, limit: int, after: str | None, *, machine: str | None = None, since: float | None = None
    ) -> CoreChangePage:
        """Newest first."""
        key: Any = key_of("core-changes", after, (float, int, str))
        found = await self._store.rows(queries.core_changes(limit + 1, key, machine=machine, since=since))
        rows = tuple(_change(row) for row in found[:limit])
        last = (rows[-1].at, rows[-1].sequence, rows[-1].host) if len(found) > limit else None
        return CoreChangePage(core_changes=rows, next=None if last is None else cursor_of("core-changes", last))


async def _page(
    read: Callable[[int, Any], Awaitable[Shown[R]]], fits: Callable[[R], bool], limit: int, last: Any
) -> tuple[list[R], Any]:
    """Read on until a page of rows that fit is full.

    :param read: so many rows behind a key, each with its key.
    :returns: the rows, and the key of the last one; None: nothing comes after it.
    """
    rows: list[tuple[R, Any]] = []
    while len(rows) <= limit:
        batch = await read(limit + 1, last)
        rows += [(row, key) for row, key in batch if fits(row)]
        if len(batch) <= limit:
            break
        last = batch[-1][1]
    return [row for row, _ in rows[:limit]], rows[limit - 1][1] if len(rows) > limit else None


def event_of(row: Any) -> Event:
    """A row of the event log as it goes over the wire."""
    return Event(id=row.id, at=row.at, vm=row.vm, host=row.host, kind=row.kind, sentence=row.sentence)


def _stored_vm(row: Any) -> StoredVM:
    return StoredVM(
        row.name,
        row.host,
        VMPhase(row.phase),
        VMSpec.model_validate_json(row.spec),
        row.sentence,
        bool(row.owes_removal),
        row.request_id,
        row.generation,
    )


def _stored_plan(row: Any) -> StoredPlan:
    return StoredPlan(PlanState.model_validate_json(row.state), row.fingerprint, row.started_at, row.updated_at)


def _change(row: Any) -> CoreChange:
    return CoreChange(
        sequence=row.sequence,
        machine=row.machine,
        host=row.host,
        at=row.at,
        cores_before=row.cores_before,
        cores_after=row.cores_after,
        cause=row.cause,
    )
