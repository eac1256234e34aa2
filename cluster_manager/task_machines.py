"""What the manager knows of the machines that an engine has: their cores now, and how long they keep them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from sqlalchemy import select

from cluster_manager import schema
from cluster_manager.hosts import Hosts
from cluster_manager.plans import VMPhase
from cluster_manager.rows import StoredChange
from cluster_manager.store import Store
from deflation.allocations import Priority
from deflation.messages import VMSpec, VMState
from task_matcher.expectation import HistoryPredictor, Predictor
from task_matcher.prediction import WINDOW_S, Change, History, LastChange, history_of, whole_cores

#: Without news the history is read again after so many seconds: old intervals leave its window.
REREAD_S = 60.0


class TaskMachines:
    """Reads the store and the hosts' reports.

    :param clock: seconds since the epoch.
    """

    def __init__(self, store: Store, hosts: Hosts, clock: Callable[[], float]) -> None:
        self._store = store
        self._hosts = hosts
        self._clock = clock
        self._history: History | None = None
        self._read_at = 0.0
        self._variable: frozenset[str] = frozenset()

    def changed(self) -> None:
        """There are new core changes."""
        self._history = None

    async def cores(self, names: Collection[str]) -> dict[str, int]:
        """Whole cores of those that are VMs of this manager; 0 where one does not run.

        A host that is silent counts with its last report, and a VM that no report tells of is left out: unknown is not
        zero.
        """
        table = schema.vms
        found = {}
        variable = set()
        names = sorted(names)
        # SQLite takes a limited number of values in one statement.
        for begin in range(0, len(names), 500):
            query = select(table).where(table.c.name.in_(names[begin : begin + 500]), schema.LIVING)
            for row in await self._store.rows(query):
                if row.phase != VMPhase.RUNNING.value:
                    found[row.name] = 0
                elif (reported := self._hosts.vm(row.host, row.name)) is not None:
                    off = reported.state is VMState.STOPPED
                    found[row.name] = 0 if off else whole_cores(reported.current.cpu_cores)
                if VMSpec.model_validate_json(row.spec).priority is not Priority.FIXED:
                    variable.add(row.name)
        self._variable = frozenset(variable)
        return found

    async def predictor(self) -> Predictor:
        """What to expect of the machines whose cores were asked for last."""
        return HistoryPredictor(await self._read(), self._variable, self._clock())

    async def last_changes(self) -> Mapping[str, LastChange]:
        """The last core change of each machine within the past day."""
        return (await self._read()).last

    async def _read(self) -> History:
        now = self._clock()
        if self._history is None or now - self._read_at > REREAD_S:
            changes = await self._store.core_changes_since(now - WINDOW_S)
            pool = history_of((_change(stored) for stored in changes if stored.variable), now)
            self._history = replace(pool, last=history_of(map(_change, changes), now).last)
            self._read_at = now
        return self._history


def _change(stored: StoredChange) -> Change:
    change = stored.change
    return Change(change.machine, change.at, change.cores_before, change.cores_after, stored.by_owner)
