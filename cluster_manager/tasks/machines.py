"""View of the machines that an engine has: their cores now, and how long they keep them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from sqlalchemy import select

from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.migration_cleanup import has_arrived
from cluster_manager.plans.plans import OFF, VMPhase
from cluster_manager.store import schema
from cluster_manager.store.store import Store
from cluster_manager.tasks.core_changes import CoreChanges
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.matcher.match.matching import MatchOptions
from ebbtide.matcher.match.rounds import LIVE, Pool
from ebbtide.matcher.match.turns import DRAINING, MOVING
from ebbtide.matcher.predict.changes import LastChange, whole_cores
from ebbtide.matcher.predict.predictor import Predictor
from ebbtide.messages.vms import VMState, VMStatus

#: A VM that may have been preempted, also while its way back asks its host.
_PERHAPS_OFF: Final = (VMPhase.PREEMPTED.value, VMPhase.STARTING.value)


class TaskMachines:
    """Reads the store and the hosts' reports.

    :param options: of the match maker.
    """

    def __init__(self, store: Store, hosts: Hosts, core_changes: CoreChanges, options: MatchOptions = LIVE) -> None:
        self._store = store
        self._hosts = hosts
        self._core_changes = core_changes
        self._options = options
        self._predictor: Predictor | None = None
        #: Looks at landmarks that had been taken when it was copied.
        self._looks = 0
        self._variable: frozenset[str] = frozenset()
        self._closing: Mapping[str, str] = {}
        self._paused: frozenset[str] = frozenset()
        self._off: frozenset[str] = frozenset()

    def changed(self) -> None:
        """There are new core changes."""
        self._predictor = None

    async def cores(self, names: Collection[str]) -> dict[str, int]:
        """Whole cores of those that are VMs of this manager; 0 where one does not run.

        One that has failed and is on no host only holds its name: a machine of that name is another one. A host that is
        silent counts with its last report, and a VM that no report tells of is left out: unknown is not zero. One that
        moves, or may have been preempted, counts with what its host says; where it moves while it runs, and has just
        left, with what the other host says.
        """
        table, plans = schema.vms, schema.plans
        found = {}
        variable, paused, off, closing = set(), set(), set(), dict[str, str]()
        names = sorted(names)
        # SQLite takes a limited number of values in one statement.
        for begin in range(0, len(names), 500):
            # With the plan that is at work on it, if one is. Asked in each round: what is long in a row is left out.
            columns = table.c.name, table.c.host, table.c.phase, table.c.priority, table.c.preemption_unsure
            query = (
                select(*columns, plans.c.kind.label("plan_kind"), plans.c.host.label("plan_host"))
                .outerjoin(plans, plans.c.request_id == table.c.request_id)
                .where(table.c.name.in_(names[begin : begin + 500]), schema.LIVING)
            )
            for row in await self._store.rows(query):
                moves = row.phase == VMPhase.MIGRATING.value
                live = moves and row.plan_kind == "live-migrate"
                if moves and not live:
                    closing[row.name] = MOVING
                elif (host := self._hosts.get(row.host)) is not None and host.report.mode is HostMode.DRAINING:
                    closing[row.name] = DRAINING
                if row.phase == VMPhase.FAILED.value and row.host is None:
                    continue
                unsure = row.preemption_unsure and row.phase in _PERHAPS_OFF
                if not (moves or unsure) and row.phase != VMPhase.RUNNING.value:
                    found[row.name] = 0
                    if row.phase in OFF:
                        off.add(row.name)
                elif (reported := self._reported(row, live)) is not None:
                    stopped = reported.state is VMState.STOPPED
                    found[row.name] = 0 if stopped else whole_cores(reported.current.cpu_cores)
                    # What a silent host said last may be over: such a machine is not given back for it.
                    if stopped and not moves and not self._hosts.is_silent(row.host):
                        off.add(row.name)
                    if reported.state is VMState.PAUSED:
                        paused.add(row.name)
                if row.priority != Priority.FIXED.value:
                    variable.add(row.name)
        self._variable, self._paused, self._closing = frozenset(variable), frozenset(paused), closing
        self._off = frozenset(off)
        return found

    def _reported(self, row: Any, live: bool) -> VMStatus | None:
        """A VM as it was last reported from where it is; None: nobody says.

        :param live: whether it moves while it runs.
        """
        here = self._hosts.vm(row.host, row.name)
        if not live or (here is not None and here.state is not VMState.STOPPED):
            return here
        # Its host is done with it before its row says where it runs: that it is off here says nothing.
        there = self._hosts.vm(row.plan_host, row.name)
        return there if has_arrived(there) else None

    @property
    def closing(self) -> Mapping[str, str]:
        """Of those whose cores were last asked for, the VMs that are to be stopped in order to move, or whose hosts are
        draining; and why nothing is to begin there.
        """
        return self._closing

    @property
    def paused(self) -> frozenset[str]:
        """Of those whose cores were last asked for, the VMs that stand still by what their hosts say."""
        return self._paused

    @property
    def off(self) -> frozenset[str]:
        """Of those whose cores were last asked for, the VMs that are off until somebody starts them."""
        return self._off

    def last_changes(self) -> Mapping[str, LastChange]:
        """The last core change of each machine, as far as one is remembered."""
        return self._core_changes.predictor.lasts()

    def pool(self) -> Pool:
        """What the machines have shown up to now, and whether their cores can be taken: of those last asked for.

        The predictor is a copy, so that it can be asked in another thread.
        """
        learned = self._core_changes.predictor
        # What a turn has brought to a wrong time is of no use, either, nor what does not know who has fallen silent.
        if self._predictor is None or self._core_changes.is_ahead(self._predictor) or learned.looks != self._looks:
            self._predictor, self._looks = learned.copy(), learned.looks
        return Pool(self._predictor, self._variable, self._options)

    def settle(self, predicted: float, completed: bool) -> None:
        """What was predicted of a task's attempt, and whether it came true."""
        self._core_changes.tasks.add(predicted, completed)
