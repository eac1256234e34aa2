"""The manager as the acquirer's provider: a machine is a harvest VM of ours, placed and deleted like anybody's."""

from __future__ import annotations

from typing import Final

from sqlalchemy import select

from cluster_manager import schema
from cluster_manager.errors import RequestError
from cluster_manager.operations import Operations
from cluster_manager.plans import VMPhase
from cluster_manager.store import Store
from deflation.messages import OperationState, VMRequest
from task_matcher.acquirer_settings import AcquirerSettings
from task_matcher.provision import Provision

#: Phases of a VM that is there; one that is being deleted is gone.
_THERE: Final = frozenset({VMPhase.RUNNING, VMPhase.STOPPING, VMPhase.STARTING, VMPhase.MIGRATING, VMPhase.STOPPED})


class HarvestMachines:
    """Asks of the manager what any client may ask.

    :param term: of this manager, in the ids of requests: what an earlier term asked for is found, not asked for again.
    """

    def __init__(self, settings: AcquirerSettings, operations: Operations, store: Store, term: int) -> None:
        self._settings = settings
        self._operations = operations
        self._store = store
        self._term = term
        #: The VM of each request that was made in this term.
        self._asked: dict[int, str] = {}
        self._cancelled: set[int] = set()
        self._ids: dict[int, str] = {}
        self._serial = 0

    async def look(self) -> Provision:
        """What the store says; a VM on a silent host is there as long as nobody knows otherwise.

        :raises StoreError: it cannot be read.
        """
        # In this order: when a placement is over, the phases are those after it.
        placements = {number: await self._operations.operation(self._ids[number], 0.0) for number in self._asked}
        phases = await self._phases()
        machines = {name for name, (phase, _) in phases.items() if phase in _THERE}
        offers, refusals = {}, {}
        for number, found in placements.items():
            name = self._asked[number]
            if found is None or found.state is OperationState.RUNNING:
                # Not there for us before its placement has ended.
                machines.discard(name)
                continue
            if number in self._cancelled:
                machines.discard(name)
                if name in phases and phases[name][0] in _THERE:
                    await self.deallocate(name)
                    continue
                self._cancelled.discard(number)
            elif name in machines:
                offers[number] = name
                continue
            else:
                refusals[number] = found.sentence
            del self._asked[number]
        # What could not be deleted is still ours, and is deleted again.
        silent = frozenset(name for name, (phase, host) in phases.items() if phase is VMPhase.FAILED and host)
        asked = set(self._asked.values())
        under_way = sum(phase is VMPhase.PLACING and name not in asked for name, (phase, _) in phases.items())
        return Provision(frozenset(machines), offers, refusals, silent, under_way)

    async def request(self, number: int) -> None:
        """Have a VM placed under the lowest number that is free.

        :raises RequestError: it was not taken on.
        """
        if number in self._asked:
            return
        # What has failed and is nowhere has left its name free.
        rows = await self._phases()
        taken = {name for name, (phase, host) in rows.items() if phase is not VMPhase.FAILED or host is not None}
        place = 1
        while self._name(place) in taken or self._name(place) in self._asked.values():
            place += 1
        # Another id each time: one that was refused would stay so.
        self._serial += 1
        self._asked[number] = self._name(place)
        self._ids[number] = f"acquirer-{self._term}-{number}-{self._serial}"
        try:
            await self._operations.create(
                VMRequest(
                    request_id=self._ids[number],
                    vm=self._settings.spec(place),
                    deadline_s=self._settings.deadline_s,
                )
            )
        except RequestError:
            del self._asked[number]
            raise

    async def cancel(self, number: int) -> None:
        """A placement under way goes on to its end; then its VM is deleted."""
        if number in self._asked:
            self._cancelled.add(number)

    async def deallocate(self, machine: str) -> None:
        """Delete a VM; harmless where that is under way, or done.

        :raises RequestError: it was not taken on.
        """
        for row in await self._store.vms(machine):
            if row.phase is VMPhase.DELETING:
                return
            # Again another id each time.
            self._serial += 1
            await self._operations.delete(machine, f"acquirer-{self._term}-delete-{self._serial}")

    def _name(self, place: int) -> str:
        return f"{self._settings.prefix}{place}"

    async def _phases(self) -> dict[str, tuple[VMPhase, str | None]]:
        """Of all VMs that are ours by name, and where they are."""
        table = schema.vms
        query = select(table.c.name, table.c.phase, table.c.host).where(
            table.c.name.startswith(self._settings.prefix, autoescape=True), schema.LIVING
        )
        rows = await self._store.rows(query)
        ours = (row for row in rows if self._settings.number_of(row.name) is not None)
        return {row.name: (VMPhase(row.phase), row.host) for row in ours}
