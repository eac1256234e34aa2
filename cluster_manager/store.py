"""The manager's memory: hosts, VMs, plans, events and core changes in SQLite (WAL), every write a transaction.

A write that has begun is finished even when the task that asked for it is cancelled, so that a shutdown leaves no
half-made transaction behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import event, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from cluster_manager import schema
from cluster_manager.errors import StoreError
from cluster_manager.plans import Effect, Finish, Note, OweReinflation, PlanState, SetVM, VMPhase
from cluster_manager.rows import StoredChange, StoredEvent, StoredHost, StoredPlan, StoredVM
from deflation.messages import CoreChange, HostReport, VMSpec

T = TypeVar("T")

#: How long a write waits for another process that holds the database, seconds.
BUSY_S: Final = 10.0


class Store:
    """One open database.

    :param clock: seconds since the epoch.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": BUSY_S})
        event.listen(self._engine.sync_engine, "connect", _set_pragmas)
        event.listen(self._engine.sync_engine, "begin", _begin)
        #: One writer at a time, so that none waits for SQLite's lock while it holds the event loop's other work up.
        self._lock = asyncio.Lock()
        self._writes: set[asyncio.Task[Any]] = set()

    async def open(self) -> int:
        """Migrate, and raise the epoch by one.

        :returns: the new epoch.
        :raises StoreError: the file cannot be used, or was made by a newer version.
        """

        async def work(connection: AsyncConnection) -> int:
            await connection.run_sync(schema.migrate)
            table = schema.counters
            raised = update(table).where(table.c.name == "epoch").values(value=table.c.value + 1)
            return int((await connection.execute(raised.returning(table.c.value))).scalar_one())

        await asyncio.to_thread(_check_file, self._path)
        try:
            return await self._write(work)
        except SQLAlchemyError as error:
            why = getattr(error, "orig", None) or error
            raise StoreError(f"cannot use the database {self._path}: {why}") from error

    async def close(self) -> None:
        """Finish the writes under way and close."""
        while self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)
        await self._engine.dispose()

    # --- plans -----------------------------------------------------------------------------------------------------

    async def add_plan(
        self,
        state: PlanState,
        fingerprint: str,
        *,
        internal: bool = False,
        vm: StoredVM | None = None,
        deleting: str | None = None,
        generation: int | None = None,
    ) -> StoredPlan:
        """A plan before its first action, together with what it does to its VM's row.

        :param vm: the row of a VM to be placed; a failed row of that name, which is on no host, ends.
        :param deleting: the name of a VM whose deletion this plan is; its row says so from now on.
        :param generation: the generation of a target for the plan's VM.
        """
        now = self._clock()

        async def work(connection: AsyncConnection) -> None:
            number = select(func.coalesce(func.max(schema.plans.c.number), 0) + 1).scalar_subquery()
            await connection.execute(
                insert(schema.plans).values(
                    id=state.id,
                    request_id=state.request_id,
                    fingerprint=fingerprint,
                    state=state.model_dump_json(),
                    finished=int(state.finished),
                    internal=int(internal),
                    number=number,
                    started_at=now,
                    updated_at=now,
                )
            )
            if vm is not None:
                await connection.execute(_living(vm.name).values(phase=VMPhase.ENDED.value))
                await connection.execute(
                    insert(schema.vms).values(
                        name=vm.name,
                        host=vm.host,
                        phase=vm.phase.value,
                        spec=vm.spec.model_dump_json(),
                        sentence=vm.sentence,
                        owes_removal=0,
                        request_id=vm.request_id,
                        generation=0,
                        deleted_by_owner=0,
                    )
                )
            if deleting is not None:
                changes = {"phase": _after_deletion(state), "request_id": state.request_id, "owes_removal": 0}
                await connection.execute(_living(deleting).values(deleted_by_owner=1, **changes))
            if generation is not None and state.vm is not None:
                await connection.execute(_living(state.vm).values(generation=generation))

        await self._write(work)
        return StoredPlan(state, fingerprint, now, now)

    async def save_step(self, state: PlanState, effects: Iterable[Effect]) -> float:
        """A plan's next state with its effects, in one transaction.

        :returns: when, in seconds since the epoch.
        """
        now = self._clock()

        async def work(connection: AsyncConnection) -> None:
            table = schema.plans
            await connection.execute(
                update(table)
                .where(table.c.id == state.id)
                .values(state=state.model_dump_json(), finished=int(state.finished), updated_at=now)
            )
            for effect in effects:
                await self._apply(connection, state, effect, now)

        await self._write(work)
        return now

    async def _apply(self, connection: AsyncConnection, state: PlanState, effect: Effect, now: float) -> None:
        match effect:
            case Note(kind, vm, host, sentence):
                row = {"at": now, "plan": state.id, "vm": vm, "host": host, "kind": kind, "sentence": sentence}
                await connection.execute(insert(schema.events).values(**row))
            case SetVM(name, phase, host, sentence, owed):
                await connection.execute(
                    _living(name).values(phase=phase.value, host=host, sentence=sentence, owes_removal=int(owed))
                )
            case OweReinflation(host, owed):
                table = schema.hosts
                await connection.execute(update(table).where(table.c.id == host).values(owes_reinflation=int(owed)))

    async def unfinished_plans(self) -> list[StoredPlan]:
        """In the order in which they were made."""
        table = schema.plans
        return await self._plans(select(table).where(table.c.finished == 0).order_by(table.c.number))

    async def plan(self, request_id: str) -> StoredPlan | None:
        """The plan of a client's request."""
        table = schema.plans
        found = await self._plans(select(table).where(table.c.request_id == request_id))
        return found[0] if found else None

    async def newest_plans(self, limit: int) -> list[StoredPlan]:
        """What clients asked for, newest first."""
        table = schema.plans
        return await self._plans(
            select(table).where(table.c.internal == 0).order_by(table.c.number.desc()).limit(limit)
        )

    async def _plans(self, query: Any) -> list[StoredPlan]:
        return [
            StoredPlan(PlanState.model_validate_json(row.state), row.fingerprint, row.started_at, row.updated_at)
            for row in await self._read(query)
        ]

    # --- VMs and hosts ---------------------------------------------------------------------------------------------

    async def vms(self, name: str | None = None) -> list[StoredVM]:
        """Those whose names are taken, or the one that has this name; by name."""
        table = schema.vms
        query = select(table).where(table.c.phase != VMPhase.ENDED.value).order_by(table.c.name)
        return [
            StoredVM(
                row.name,
                row.host,
                VMPhase(row.phase),
                VMSpec.model_validate_json(row.spec),
                row.sentence,
                bool(row.owes_removal),
                row.request_id,
                row.generation,
            )
            for row in await self._read(query if name is None else query.where(table.c.name == name))
        ]

    async def owed_removals(self) -> dict[str, str]:
        """VMs that may still be on a host and are to be removed there: the host by the VM's name."""
        table = schema.vms
        query = select(table.c.name, table.c.host).where(
            table.c.phase != VMPhase.ENDED.value, table.c.owes_removal == 1, table.c.host.is_not(None)
        )
        return {row.name: row.host for row in await self._read(query)}

    async def hosts(self) -> list[StoredHost]:
        """Every host that has ever reported, by id."""
        rows = await self._read(select(schema.hosts).order_by(schema.hosts.c.id))
        return [StoredHost(row.id, row.report, row.seen_at, bool(row.owes_reinflation)) for row in rows]

    async def save_hosts(self, reports: Sequence[HostReport]) -> None:
        """Hosts' reports, without their core changes, in one transaction."""
        now = self._clock()
        rows = [
            {
                "id": report.id,
                "owes_reinflation": 0,
                "seen_at": now,
                "report": report.model_copy(update={"core_changes": ()}).model_dump_json(),
            }
            for report in reports
        ]
        statement = upsert(schema.hosts)
        newest = {"seen_at": statement.excluded.seen_at, "report": statement.excluded.report}

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=newest), rows)

        await self._write(work)

    # --- events and core changes -----------------------------------------------------------------------------------

    async def add_event(self, kind: str, vm: str | None, host: str | None, sentence: str) -> None:
        """A line of the event log that no plan is behind."""
        row = {"at": self._clock(), "plan": None, "vm": vm, "host": host, "kind": kind, "sentence": sentence}

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(insert(schema.events).values(**row))

        await self._write(work)

    async def events(self, limit: int, vm: str | None = None) -> list[StoredEvent]:
        """Newest first, of one VM or of all."""
        query = select(schema.events).order_by(schema.events.c.id.desc()).limit(limit)
        rows = await self._read(query if vm is None else query.where(schema.events.c.vm == vm))
        return [StoredEvent(row.at, row.vm, row.host, row.kind, row.sentence) for row in rows]

    async def add_core_changes(self, host: str, changes: Sequence[CoreChange]) -> int:
        """Core changes of a host, each sequence once, with what the store knows of their machines.

        :returns: the highest sequence of that host: what need not be sent again.
        """
        table = schema.core_changes

        async def work(connection: AsyncConnection) -> int:
            for change in changes:
                newest = select(schema.vms).where(schema.vms.c.name == change.machine).order_by(schema.vms.c.id.desc())
                row = (await connection.execute(newest.limit(1))).first()
                spec = VMSpec.model_validate_json(row.spec) if row else None
                await connection.execute(
                    upsert(table)
                    .values(
                        **{**change.model_dump(), "host": host},
                        variable=int(spec is None or spec.priority.value != "fixed"),
                        by_owner=int(row is not None and bool(row.deleted_by_owner) and change.cores_after == 0),
                    )
                    .on_conflict_do_nothing()
                )
            highest = select(func.coalesce(func.max(table.c.sequence), 0)).where(table.c.host == host)
            return int((await connection.execute(highest)).scalar_one())

        return await self._write(work)

    async def acknowledged(self) -> dict[str, int]:
        """The highest sequence of each host that has core changes here."""
        table = schema.core_changes
        query = select(table.c.host, func.max(table.c.sequence).label("highest")).group_by(table.c.host)
        return {row.host: row.highest for row in await self._read(query)}

    async def core_changes(self, machine: str | None, limit: int) -> list[StoredChange]:
        """Newest first, of one machine or of all."""
        table = schema.core_changes
        query = select(table).order_by(table.c.at.desc(), table.c.sequence.desc()).limit(limit)
        return _changes(await self._read(query if machine is None else query.where(table.c.machine == machine)))

    async def core_changes_since(self, at: float) -> list[StoredChange]:
        """All after a moment, and each machine's last one before it, oldest first."""
        table = schema.core_changes
        before = select(table.c.machine, func.max(table.c.at).label("at")).where(table.c.at <= at)
        last = before.group_by(table.c.machine).subquery()
        joined = select(table).join(last, (table.c.machine == last.c.machine) & (table.c.at == last.c.at))
        older = _changes(await self._read(joined.order_by(table.c.sequence)))
        recent = select(table).where(table.c.at > at).order_by(table.c.at, table.c.host, table.c.sequence)
        return older + _changes(await self._read(recent))

    # --- transactions ----------------------------------------------------------------------------------------------

    async def rows(self, query: Any) -> Sequence[Any]:
        """The rows of a select of :mod:`cluster_manager.queries`."""
        return await self._read(query)

    async def _read(self, query: Any) -> Sequence[Any]:
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).all()

    async def _write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        async def transaction() -> T:
            async with self._lock, self._engine.begin() as connection:
                return await work(connection)

        task = asyncio.create_task(transaction(), name="store write")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)


def _check_file(path: Path) -> None:
    """Say in plain words what the driver would say late.

    :raises StoreError: the file is there and no SQLite database, or it cannot be made.
    """
    try:
        with path.open("ab+") as file:
            file.seek(0)
            header = file.read(16)
    except OSError as error:
        raise StoreError(f"cannot use the database {path}: {error.strerror}") from error
    if header not in (b"", b"SQLite format 3\x00"):
        raise StoreError(f"cannot use the database {path}: it is no SQLite file")


def _living(name: str) -> Any:
    """An update of the row that holds a name."""
    table = schema.vms
    return update(table).where(table.c.name == name, table.c.phase != VMPhase.ENDED.value)


def _after_deletion(state: PlanState) -> str:
    """A VM that is on no host is gone with its deletion's record."""
    return (VMPhase.ENDED if isinstance(state.instruction, Finish) else VMPhase.DELETING).value


def _changes(rows: Sequence[Any]) -> list[StoredChange]:
    return [
        StoredChange(
            CoreChange(
                sequence=row.sequence,
                machine=row.machine,
                host=row.host,
                at=row.at,
                cores_before=row.cores_before,
                cores_after=row.cores_after,
                cause=row.cause,
            ),
            bool(row.variable),
            bool(row.by_owner),
        )
        for row in rows
    ]


def _set_pragmas(connection: Any, _record: Any) -> None:
    """WAL, so that readers never wait; synchronous FULL, so that a plan's record outlives a loss of power."""
    # The driver must not begin transactions by itself: it would do so too late for a consistent read and write.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN")
