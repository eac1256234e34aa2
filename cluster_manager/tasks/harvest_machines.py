"""Provider of machines for the acquirer: a machine is a harvest VM, placed and deleted as a client's would be.

Its machines are those that the acquirer of this store's managers has opened, by the record of the store. A name says
nothing: clients, and the acquirers of other managers, may give the same ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Final

import structlog
from sqlalchemy import select

from cluster_manager.errors import RequestError
from cluster_manager.execution.operations import Operations
from cluster_manager.plans.plans import OFF, VMPhase
from cluster_manager.store import schema
from cluster_manager.store.rows import StoredVM, phase_of
from cluster_manager.store.store import Store
from ebbtide.deflation.allocations import Priority
from ebbtide.matcher.acquire.provision import Provision
from ebbtide.matcher.acquire.settings import AcquirerSettings
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import VMRequest

log = structlog.get_logger()

#: Phases of a VM that is there.
_THERE: Final = frozenset({VMPhase.RUNNING, VMPhase.STOPPING, VMPhase.STARTING, VMPhase.MIGRATING, *OFF})
#: What the ids of our requests begin with.
_IDS: Final = "acquirer-"
#: Seconds between two tries to delete a VM: each is a plan, and its host may be away for long.
AGAIN_S: Final = 60.0


@dataclass(slots=True)
class _Asked:
    """A request of this term, until it is refused or its VM is gone."""

    #: Of the VM, and of the request to the manager.
    name: str
    id: str
    #: Whether the manager has taken it on for sure; whether a look has found it; how its placement ended.
    taken: bool = False
    stored: bool = False
    ended: bool = False
    sentence: str = ""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    """A VM that is called as ours are."""

    phase: VMPhase
    host: str | None
    priority: Priority
    #: Whether we are deleting it, or have tried to.
    returned: bool
    #: Whether it was placed for the acquirer.
    acquired: bool

    @property
    def ours(self) -> bool:
        """Whether it is a machine of ours: one that was resized to another priority is its owner's."""
        return self.acquired and self.priority is Priority.HARVEST

    @property
    def nowhere(self) -> bool:
        """Whether it has failed and is on no host: it only holds its name, until that is given again."""
        return self.phase is VMPhase.FAILED and self.host is None

    @property
    def unclear(self) -> bool:
        """There or not: what could not be deleted is still ours, and is deleted again."""
        if self.phase is VMPhase.DELETING:
            return self.returned
        return self.phase is VMPhase.FAILED and self.host is not None


class HarvestMachines:
    """Asks of the manager what any client may ask.

    :param term: of this manager, in the ids of requests: what an earlier term asked for is found, not asked for again.
    :param in_use: names that somebody else's machines have: none of ours is called so.
    """

    def __init__(
        self,
        settings: AcquirerSettings,
        operations: Operations,
        store: Store,
        term: int,
        again_s: float = AGAIN_S,
        in_use: Callable[[], Set[str]] = frozenset,
    ) -> None:
        self._settings = settings
        self._operations = operations
        self._store = store
        self._term = term
        self._again_s = again_s
        self._in_use = in_use
        self._asked: dict[int, _Asked] = {}
        #: When a VM may be deleted again, by the loop's time.
        self._again_at: dict[str, float] = {}
        self._serial = 0

    async def look(self) -> Provision:
        """What the store says; a VM on a silent host is there as long as nothing else is known.

        :raises StoreError: it cannot be read.
        """
        # In this order: when a placement is over, the rows are those after it.
        for asked in self._asked.values():
            await self._follow(asked)
        called_so = {name: row for name, row in (await self._rows()).items() if not row.nowhere}
        # What somebody else has opened, or resized, only holds its name, and is never deleted.
        rows = {name: row for name, row in called_so.items() if row.ours}
        machines = {name for name, row in rows.items() if row.phase in _THERE}
        offers, refusals = {}, {}
        for number, asked in list(self._asked.items()):
            if asked.cancelled and not asked.stored:
                # It was never taken on.
                del self._asked[number]
            elif not asked.ended:
                # Not there for us before its placement has ended.
                machines.discard(asked.name)
            elif asked.cancelled:
                machines.discard(asked.name)
                if not await self._take_back(asked.name, rows.get(asked.name)):
                    del self._asked[number]
            elif asked.name in machines:
                offers[number] = asked.name
            else:
                refusals[number] = asked.sentence
                del self._asked[number]
        unclear = frozenset(name for name, row in rows.items() if row.unclear)
        ours = {one.name for one in self._asked.values()}
        under_way = sum(row.phase is VMPhase.PLACING and name not in ours for name, row in rows.items())
        wanted = frozenset(number for number, one in self._asked.items() if not one.cancelled)
        return Provision(
            frozenset(machines),
            offers,
            refusals,
            unclear,
            under_way,
            wanted,
            opened=frozenset(rows),
            others=frozenset(called_so.keys() - rows.keys()),
        )

    async def _follow(self, asked: _Asked) -> None:
        """How far a placement is. What has ended is not asked for again: the store forgets it one day."""
        if asked.ended:
            return
        found = await self._operations.operation(asked.id, 0.0)
        asked.stored = found is not None
        if found is not None and found.state is not OperationState.RUNNING:
            asked.ended, asked.sentence = True, found.sentence

    async def _take_back(self, name: str, row: _Row | None) -> bool:
        """Whether the VM of a cancelled request may still be there; it is being deleted then."""
        if row is None or not (row.phase in _THERE or row.unclear):
            return False
        try:
            await self.deallocate(name)
        except RequestError as error:
            # Something else is at work on it: again at the next look.
            log.info("a machine that is not wanted any more stays for now", machine=name, why=str(error))
        return True

    async def request(self, number: int) -> None:
        """Have a VM placed under the lowest number that is free.

        :raises RequestError: it was not taken on.
        :raises StoreError: whether it was taken on is not known; the next call asks for the very same.
        """
        asked = self._asked.get(number)
        if asked is None:
            name = self._free_name(await self._rows())
            self._again_at.pop(name, None)
            asked = self._asked[number] = _Asked(name, self._new_id(str(number)))
        if asked.taken:
            return
        place = self._settings.number_of(asked.name)
        assert place is not None, "named by us"
        try:
            await self._operations.create(
                VMRequest(request_id=asked.id, vm=self._settings.spec(place), deadline_s=self._settings.deadline_s),
                acquired=True,
            )
        except RequestError:
            # Another id the next time: one that was refused would stay so.
            del self._asked[number]
            raise
        asked.taken = True

    async def cancel(self, number: int) -> None:
        """A placement under way goes on to its end; then its VM is deleted."""
        if number in self._asked:
            self._asked[number].cancelled = True

    async def deallocate(self, machine: str) -> None:
        """Delete a VM that we have opened; harmless where that is under way, or done. What failed is tried again after
        a while.

        :raises RequestError: it was not taken on.
        """
        for row in await self._store.vms(machine):
            now = asyncio.get_running_loop().time()
            if row.spec.priority is not Priority.HARVEST or not row.acquired:
                return
            if row.phase is VMPhase.DELETING or row.owes_removal or now < self._again_at.get(machine, now):
                # What it owes the manager removes by itself, when the host is back.
                return
            self._again_at[machine] = now + self._again_s
            await self._operations.delete(machine, self._new_id("delete"), _if_ours)

    def _new_id(self, what: str) -> str:
        """Another one each time."""
        self._serial += 1
        return f"{_IDS}{self._term}-{what}-{self._serial}"

    def _free_name(self, rows: Mapping[str, _Row]) -> str:
        """What has failed and is nowhere has left its name free."""
        taken = {name for name, row in rows.items() if not row.nowhere}
        taken |= {one.name for one in self._asked.values()} | self._in_use()
        place = 1
        while self._name(place) in taken:
            place += 1
        return self._name(place)

    def _name(self, place: int) -> str:
        return f"{self._settings.prefix}{place}"

    async def _rows(self) -> dict[str, _Row]:
        """Of all VMs that are called as ours are."""
        table = schema.vms
        columns = (table.c.name, table.c.phase, table.c.host, table.c.priority, table.c.request_id, table.c.acquired)
        query = select(*columns).where(table.c.name.startswith(self._settings.prefix, autoescape=True), schema.LIVING)
        return {
            row.name: _Row(
                phase_of(row),
                row.host,
                Priority(row.priority),
                _is_deletion(row.request_id),
                bool(row.acquired),
            )
            for row in await self._store.rows(query)
            if self._settings.number_of(row.name) is not None
        }


def _if_ours(row: StoredVM) -> None:
    """:raises RequestError: it is another's by now: the name, or the VM since it was resized to another priority."""
    if not row.acquired:
        raise RequestError(412, f"{row.name} was not opened by this manager's acquirer", "name")
    if row.spec.priority is not Priority.HARVEST:
        raise RequestError(412, f"{row.name} is its owner's: it is {row.spec.priority}", "name")


def _is_deletion(request_id: str) -> bool:
    """Whether a request is one of ours, of whatever term, to delete a VM."""
    return request_id.startswith(_IDS) and "-delete-" in request_id
