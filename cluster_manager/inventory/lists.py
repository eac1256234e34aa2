"""The lists that clients ask for, in pages: selects of `cluster_manager.store.queries`, shown as clients see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from cluster_manager.errors import RequestError
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.plans import VMPhase
from cluster_manager.store import queries
from cluster_manager.store.rows import StoredPlan, StoredVM, labels_in, phase_of, stored_plan, stored_vm
from cluster_manager.store.store import Store
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.explanations import Event, EventPage
from ebbtide.messages.labels import Selector, matches
from ebbtide.messages.machines import CoreChange, CoreChangePage
from ebbtide.messages.operations import Operation, OperationPage, OperationState
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.vms import ClusterVM, ManagedState, VMPage
from ebbtide.rest.pages import cursor_of, key_of

R = TypeVar("R")
Shown = list[tuple[R, Any]]
_RUNNING, _STOPPED, _FAILED = VMPhase.RUNNING.value, VMPhase.STOPPED.value, VMPhase.FAILED.value
#: The stored phases of what is shown as a state: its host's report may say that a VM is off, runs, or is not there.
_SHOWN_OF = {
    _FAILED: [_FAILED, _RUNNING],
    _STOPPED: [_STOPPED, _RUNNING],
    _RUNNING: [_RUNNING, _STOPPED, VMPhase.PREEMPTED.value],
    "paused": [_RUNNING, _STOPPED, VMPhase.PREEMPTED.value],
}
#: Rows that are read at once where most of them may not be what is asked for.
_SEARCH: Final = 1000
#: A statement names no more of them: with so many changes the whole list costs no more.
_MOST_CHANGED: Final = 5000


class Lists:
    """Reads pages.

    :param show_vm: a VM's row as clients see it.
    :param shown_state: what such a row is shown as, given its phase, host and name, and without looking at the rest.
    :param show_plan: a plan as clients see it.
    """

    def __init__(
        self,
        store: Store,
        hosts: Hosts,
        show_vm: Callable[[StoredVM], ClusterVM],
        shown_state: Callable[[VMPhase, str | None, str], ManagedState],
        show_plan: Callable[[StoredPlan], Operation],
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._show_vm = show_vm
        self._shown_state = shown_state
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
        changed_since: int | None = None,
        selector: Selector = (),
    ) -> VMPage:
        """By name. Raises InvalidField for a cursor of something else, as all here."""
        key = key_of("vms", after, (str,))
        changes = self._hosts.changes.latest
        position = await position_of(self._store)
        # What is not asked for any more has changed and is not gone: with a filter only the whole list is true.
        chosen = any((host, state, priority, prefix, selector))
        names, gone = await self._changed(None if chosen else changed_since)
        phases = None if state is None else _SHOWN_OF.get(state, [state])

        def show(row: Any) -> ClusterVM | None:
            """None: it is not asked for. Thousands may not be, so the cheap question comes first."""
            if selector and not matches(selector, labels_in(row.labels)):
                return None
            if state is not None and self._shown_state(phase_of(row), row.host, row.name) != state:
                return None
            if priority is not None:
                # Its host's word counts where the answer to a change was lost.
                reported = self._hosts.vm(row.host, row.name)
                if priority not in (row.priority, reported.priority if reported is not None else None):
                    return None
            vm = self._show_vm(stored_vm(row))
            return vm if priority is None or vm.priority is priority else None

        async def read(number: int, last: Any) -> Shown[ClusterVM | None]:
            query = queries.vms(number, last, host=host, phases=phases, prefix=prefix, names=names)
            return [(show(row), row.name) for row in await self._store.rows(query)]

        all_wanted = state is None and priority is None and not selector
        number = limit + 1 if all_wanted else max(limit + 1, _SEARCH)
        rows, last = await _page(read, number, limit, key[0] if key else None)
        return VMPage(
            vms=tuple(rows),
            next=None if last is None else cursor_of("vms", (last,)),
            position=position,
            changes=changes,
            changed_since=changed_since if names is not None else None,
            gone=gone,
        )

    async def _changed(self, since: int | None) -> tuple[frozenset[str] | None, tuple[str, ...]]:
        """The VMs that have changed after a number, and of these the ones that are gone; None: look at all."""
        changes = self._hosts.changes
        if since is None or not changes.knows(since):
            return None, ()
        rows = changes.since("VM", since)
        names = set(rows)
        changed = changes.since("host's VMs", since)
        for host_id in changed:
            if (host := self._hosts.get(host_id)) is not None:
                names.update(vm.name for vm in host.report.vms)
        # Silence is no report: of these hosts' VMs one knows less from one moment to the next. And one that its host
        # does not report has failed as soon as that host is heard again.
        quiet = {host_id for host_id in self._hosts.ids() if not self._hosts.is_ready(host_id)}
        if asked := changed | quiet:
            names.update(row.name for row in await self._store.rows(queries.on_hosts(asked)))
        if len(names) > _MOST_CHANGED:
            return None, ()
        living = {row.name for row in await self._store.rows(queries.living(rows))} if rows else set()
        return frozenset(names), tuple(sorted(rows - living))

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
        position = await position_of(self._store)
        wanted: Any = {"kind": kind, "state": state, "vm": vm, "host": host, "since": since}
        found = await self._store.rows(queries.plans(limit + 1, key[0] if key else None, **wanted))
        rows = tuple(self._show_plan(stored_plan(row)) for row in found[:limit])
        last = found[limit - 1].number if len(found) > limit else None
        following = None if last is None else cursor_of("operations", (last,))
        return OperationPage(operations=rows, next=following, position=position)

    async def events(self, limit: int, after: str | None, **wanted: Any) -> EventPage:
        """The event log, newest first. ``wanted``: the filters of `cluster_manager.store.queries.events`."""
        key = key_of("events", after, (int,))
        await check_position(self._store, wanted.get("since_id"), "since_id")
        position = await position_of(self._store)
        found = await self._store.rows(queries.events(limit + 1, key[0] if key else None, **wanted))
        rows = tuple(event_of(row) for row in found[:limit])
        following = cursor_of("events", (rows[-1].id,)) if len(found) > limit else None
        return EventPage(events=rows, next=following, position=position)

    async def core_changes(
        self, limit: int, after: str | None, *, machine: str | None = None, since: float | None = None
    ) -> CoreChangePage:
        """Newest first."""
        key: Any = key_of("core-changes", after, (float, int, str))
        found = await self._store.rows(queries.core_changes(limit + 1, key, machine=machine, since=since))
        rows = tuple(CoreChange.model_validate(row, from_attributes=True) for row in found[:limit])
        last = (rows[-1].at, rows[-1].sequence, rows[-1].host) if len(found) > limit else None
        return CoreChangePage(core_changes=rows, next=None if last is None else cursor_of("core-changes", last))


async def _page(
    read: Callable[[int, Any], Awaitable[Shown[R | None]]], number: int, limit: int, last: Any
) -> tuple[list[R], Any]:
    """Read on until a page is full.

    :param read: so many rows behind a key, each with its key; None in place of one that is not asked for.
    :param number: rows that are read at once, more than ``limit``.
    :returns: the rows, and the key of the last one; None: nothing comes after it.
    """
    rows: list[tuple[R, Any]] = []
    while len(rows) <= limit:
        batch = await read(number, last)
        rows += [(row, key) for row, key in batch if row is not None]
        if len(batch) < number:
            break
        last = batch[-1][1]
    return [row for row, _ in rows[:limit]], rows[limit - 1][1] if len(rows) > limit else None


async def position_of(store: Store) -> int:
    """The id of the latest event; 0 where there is none."""
    return next((row.id for row in await store.rows(queries.newest_event())), 0)


async def check_position(store: Store, event_id: int | None, name: str) -> None:
    """:raises RequestError: 400, an event that is none yet: its reader looks at another log."""
    if event_id is not None and event_id > (newest := await position_of(store)):
        sentence = f"{name}: {event_id} is ahead of the event log, which ends at {newest}: read the lists again"
        raise RequestError(400, sentence, name, ProblemCode.AHEAD_OF_LOG)


def event_of(row: Any) -> Event:
    """A row of the event log as it goes over the wire."""
    return Event(id=row.id, at=row.at, vm=row.vm, host=row.host, kind=row.kind, sentence=row.sentence)
