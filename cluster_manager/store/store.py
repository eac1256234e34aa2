"""The manager's memory: hosts, VMs, plans, events and core changes in a database, every write a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import structlog
from sqlalchemy import Delete, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.plans.claims import AddVM, ClaimRemoval, SetGeneration
from cluster_manager.plans.plans import (
    Claim,
    ClaimVM,
    Effect,
    Finish,
    Note,
    Plan,
    ReinflationPending,
    SetPreempted,
    SetSpec,
    SetVM,
    SpawnFollowUp,
    Step,
    VMPhase,
)
from cluster_manager.plans.reading import UnreadPlan
from cluster_manager.store import schema
from cluster_manager.store.change_rows import CLOCKS_S, change_row, dated, last_date, lost_cores
from cluster_manager.store.engines import upsert
from cluster_manager.store.history import HistoryRows
from cluster_manager.store.knowledge import KnowledgeRows
from cluster_manager.store.queries import highest_sequences
from cluster_manager.store.rows import (
    RunningVM,
    StoredChange,
    StoredEvent,
    StoredHost,
    StoredPlan,
    StoredVM,
    labels_in,
    stored_change,
    stored_labels,
    stored_plan,
    stored_spec,
    stored_vm,
)
from cluster_manager.store.tasks import TaskRows
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import LARGEST
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.vms import VMSpec

log = structlog.get_logger()

#: A plan is at work on it, and says what becomes of it.
_CLAIMED: Final = tuple(
    phase.value for phase in (VMPhase.PLACING, VMPhase.DELETING, VMPhase.STOPPING, VMPhase.STARTING, VMPhase.MIGRATING)
)
#: Of these it may come to nothing, and then one that was preempted meanwhile waits for room.
_MAY_STAY: Final = (VMPhase.MIGRATING.value, VMPhase.STARTING.value, VMPhase.DELETING.value)
#: It is off, or may be, and waits for room as before.
_WAITS: Final = frozenset({VMPhase.PREEMPTED, VMPhase.STARTING, VMPhase.STOPPING, VMPhase.DELETING, VMPhase.MIGRATING})
#: An event that no plan is behind: kind, VM, host, sentence.
Line = tuple[str, str | None, str | None, str]
#: A VM that a migration, or a start elsewhere, has to itself.
_UNDER_WAY: Final = (VMPhase.MIGRATING.value, VMPhase.STARTING.value)


class Store(TaskRows, KnowledgeRows, HistoryRows):
    """One open database."""

    #: Is told the names of the VMs whose rows a write may have changed.
    on_vms: Callable[[Iterable[str]], None] = staticmethod(lambda names: None)

    def _changed(self, vms: Iterable[str | None]) -> None:
        self.on_vms(name for name in vms if name is not None)

    # --- plans -----------------------------------------------------------------------------------------------------

    async def add_plan(self, state: Plan, fingerprint: str) -> StoredPlan:
        """A plan before its first action, together with what it does to its VM's row."""
        now = self._clock()

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(_new_plan(state, fingerprint, now))
            if (claim := state.claim) is not None and state.vm is not None:
                for statement in _claiming(state, state.vm, claim, now):
                    await connection.execute(statement)

        await self._write(work)
        self._changed((state.vm,))
        return StoredPlan(state, fingerprint, now, now)

    async def save_step(self, state: Plan, effects: Iterable[Effect]) -> float:
        """A plan's next state with its effects, in one transaction.

        :returns: when, in seconds since the epoch.
        """
        now, effects = self._clock(), tuple(effects)

        async def work(connection: AsyncConnection) -> None:
            table = schema.plans
            await connection.execute(update(table).where(table.c.id == state.id).values(**plan_columns(state, now)))
            # A VM is handed over last: what else is said of it is said by the plan that still has it.
            for effect in sorted(effects, key=lambda effect: isinstance(effect, SpawnFollowUp)):
                await self._apply(connection, state, effect, now)

        await self._write(work)
        self._changed((state.vm, *(e.name for e in effects if isinstance(e, SetVM | SetPreempted | SetSpec))))
        return now

    async def _apply(self, connection: AsyncConnection, state: Plan, effect: Effect, now: float) -> None:
        match effect:
            case Note(kind, vm, host, sentence):
                row = {"at": now, "plan": state.id, "vm": vm, "host": host, "kind": kind, "sentence": sentence}
                await connection.execute(insert(schema.events).values(**row))
            case SetVM(name, phase, host, sentence, owed, unless_preempted):
                row = _living(name)
                if name == state.vm:
                    # While it waited its VM may have been preempted and the name given to another VM.
                    row = row.where(schema.vms.c.request_id == state.request_id)
                else:
                    # A preempted VM whose deletion, move or start waits: its name is free when that plan has ended, not
                    # before. And what was found here by that name may be none of ours: ours is where its row says.
                    row = row.where(schema.vms.c.phase.not_in(_MAY_STAY), schema.vms.c.host == host)
                values = {**_phase(phase, now), "host": host, "sentence": sentence, "owes_removal": int(owed)}
                if name == state.vm and state.kind == "delete" and not owed and phase is not VMPhase.ENDED:
                    # Its owner's deletion came to nothing: what takes its cores later is not that.
                    row = row.values(deleted_by_owner=0)
                if unless_preempted:
                    preempted = row.where(schema.vms.c.preempted_at.is_not(None))
                    await connection.execute(preempted.values(phase=VMPhase.PREEMPTED.value))
                    row = row.where(schema.vms.c.preempted_at.is_(None))
                await connection.execute(row.values(**values))
            case SetPreempted(name, host, reason, sentence, unsure):
                row = _living(name).where(schema.vms.c.host == host)
                # What is said of it later does not cost it its place.
                since = func.coalesce(schema.vms.c.preempted_at, now)
                said = {"preemption_reason": reason.value, "preemption_unsure": int(unsure), "sentence": sentence}
                waits: dict[str, Any] = {"preempted_at": since, **said}
                free = row.where(schema.vms.c.phase.not_in(_CLAIMED))
                await connection.execute(free.values(phase=VMPhase.PREEMPTED.value, **waits))
                await connection.execute(row.where(schema.vms.c.phase.in_(_MAY_STAY)).values(**waits))
            case SetSpec(name, spec):
                row = _living(name).where(schema.vms.c.request_id == state.request_id)
                await connection.execute(row.values(**_sold(spec)))
            case ReinflationPending(host, owed):
                table = schema.hosts
                await connection.execute(update(table).where(table.c.id == host).values(owes_reinflation=int(owed)))
            case SpawnFollowUp(rest):
                await connection.execute(_new_plan(rest, rest.id, now))
                # Where the plan still has the VM to itself, the other one has it from now on.
                mine = (schema.vms.c.request_id == state.request_id) & schema.vms.c.phase.in_(_UNDER_WAY)
                await connection.execute(_living(state.vm or "").where(mine).values(request_id=rest.request_id))

    async def unfinished_plans(self) -> list[StoredPlan]:
        """In the order in which they were made, without those that cannot be read."""
        table = schema.plans
        query = select(table).where(table.c.finished == schema.constant(0))
        plans = await self._values(query, table.c.number, stored_plan)
        return [plan for plan in plans if not isinstance(plan.state, UnreadPlan)]

    async def plan(self, request_id: str) -> StoredPlan | None:
        """The plan of a client's request."""
        table = schema.plans
        found = await self._plans(select(table).where(table.c.request_id == request_id))
        return found[0] if found else None

    async def _plans(self, query: Any) -> list[StoredPlan]:
        return [stored_plan(row) for row in await self._read(query)]

    # --- VMs and hosts ---------------------------------------------------------------------------------------------

    async def vms(self, name: str | None = None) -> list[StoredVM]:
        """Those whose names are taken, or the one that has this name; by name."""
        table = schema.vms
        query = select(table).where(schema.LIVING)
        return await self._values(
            query if name is None else query.where(table.c.name == name),
            table.c.name,
            stored_vm,
        )

    async def label_vm(self, row: StoredVM, labels: Mapping[str, str]) -> bool:
        """Give a VM all these labels instead of those that it has; False: it is another one's name by now."""
        statement = _living(row.name).where(
            schema.vms.c.request_id == row.request_id, schema.vms.c.labels == stored_labels(row.labels)
        )

        async def work(connection: AsyncConnection) -> bool:
            return (await connection.execute(statement.values(labels=stored_labels(labels)))).rowcount > 0

        done = await self._write(work)
        self._changed((row.name,))
        return done

    async def label_host(self, host: str, labels: Mapping[str, str]) -> None:
        """Give a host all these labels instead of those that it has."""
        table = schema.hosts
        statement = update(table).where(table.c.id == host).values(labels=stored_labels(labels))

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement)

        await self._write(work)

    async def recorded(self, host: str) -> frozenset[str]:
        """The VMs that are on a host by this record, whatever the host says."""
        table = schema.vms
        query = select(table.c.name).where(schema.LIVING, table.c.host == host)
        return frozenset(row.name for row in await self._read(query))

    async def sold(self, host: str) -> dict[str, VMSpec]:
        """What the VMs of a host are sold as, by this record, without those whose row cannot be read."""
        table = schema.vms
        known = schema.LIVING, table.c.phase.in_([phase.value for phase in VMPhase])
        query = select(table.c.name, table.c.priority, table.c.spec).where(*known, table.c.host == host)
        found = ((row.name, *stored_spec(row)) for row in await self._read(query))
        return {name: spec for name, spec, unread in found if not unread}

    async def running_vms(self, name: str | None = None) -> list[RunningVM]:
        """Those that run by their rows, or the one that has this name, without their specs; by name."""
        table = schema.vms
        query = select(table.c.name, table.c.host, table.c.priority).where(
            schema.LIVING, table.c.phase == VMPhase.RUNNING.value
        )
        query = query if name is None else query.where(table.c.name == name)
        return await self._values(
            query, table.c.name, lambda row: RunningVM(row.name, row.host, Priority(row.priority))
        )

    async def preempted(self) -> list[StoredVM]:
        """The VMs that wait for room, in the order in which they were preempted; not one that is to be removed."""
        table = schema.vms
        query = select(table).where(
            table.c.phase == schema.constant(VMPhase.PREEMPTED.value), table.c.owes_removal == schema.constant(0)
        )
        return [stored_vm(row) for row in await self._read(query.order_by(table.c.preempted_at, table.c.id))]

    async def owed_removals(self) -> dict[str, str]:
        """VMs that may still be on a host and are to be removed there: host by name."""
        table = schema.vms
        query = select(table.c.name, table.c.host).where(table.c.owes_removal == schema.constant(1), schema.LIVING)
        return {row.name: row.host for row in await self._read(query) if row.host}

    async def hosts(self) -> list[StoredHost]:
        """Every host that has ever reported, by id."""
        return await self._values(
            select(schema.hosts),
            schema.hosts.c.id,
            lambda row: StoredHost(row.id, row.report, row.seen_at, bool(row.owes_reinflation), labels_in(row.labels)),
        )

    async def save_hosts(self, reports: Sequence[HostReport], lines: Sequence[Line] = ()) -> None:
        """Hosts' reports, without their core changes, and events that no plan is behind, in one transaction."""
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
        statement = upsert(self._engine, schema.hosts)
        newest = {"seen_at": statement.excluded.seen_at, "report": statement.excluded.report}
        events = [
            {"at": now, "plan": None, "kind": kind, "vm": vm, "host": host, "sentence": sentence}
            for kind, vm, host, sentence in lines
        ]

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=newest), rows)
            if events:
                await connection.execute(insert(schema.events), events)

        await self._write(work)

    async def save_seen(self, seen: Mapping[str, float]) -> None:
        """When hosts were last heard of, in one transaction; of one that is gone nothing is written."""
        table = schema.hosts
        statement = update(table).where(table.c.id == bindparam("host")).values(seen_at=bindparam("at"))
        rows = [{"host": host, "at": at} for host, at in seen.items()]

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement, rows)

        await self._write(work)

    async def forget_host(
        self,
        host: str,
        vms: Sequence[str],
        ends: Sequence[Step],
        sentence: str,
        rests: Sequence[Plan] = (),
        *,
        seen_at: float = 0.0,
    ) -> list[StoredChange]:
        """A host that does not come back, in one transaction: its VMs' names are free, these plans have ended, and
        those clear up elsewhere.

        :param seen_at: when it was last heard of, seconds since the epoch.
        :returns: the core changes that say that these VMs have no cores any more, as their host would have said it.
        """
        now = self._clock()
        gone = {**_phase(VMPhase.ENDED, now), "sentence": sentence, "owes_removal": 0, "deleted_by_owner": 1}
        row = {"at": now, "plan": None, "host": host, "sentence": sentence}
        rows = [{**row, "kind": "lost", "vm": vm} for vm in vms] + [{**row, "kind": "host-forgotten", "vm": None}]

        async def work(connection: AsyncConnection) -> list[StoredChange]:
            plans, hosts = schema.plans, schema.hosts
            lost = await lost_cores(connection, host, vms, seen_at)
            if lost:
                await connection.execute(insert(schema.core_changes), lost)
            for step in ends:
                mine = plans.c.id == step.state.id
                await connection.execute(update(plans).where(mine).values(**plan_columns(step.state, now)))
                for effect in step.effects:
                    await self._apply(connection, step.state, effect, now)
            for rest in rests:
                await connection.execute(_new_plan(rest, rest.id, now))
            for vm in vms:
                await connection.execute(_living(vm).where(schema.vms.c.host == host).values(**gone))
            await connection.execute(delete(hosts).where(hosts.c.id == host))
            await connection.execute(insert(schema.events), rows)
            new = _changes_of(host, lost[0]["sequence"] - 1) if lost else None
            return [] if new is None else _changes((await connection.execute(new)).all())

        changes = await self._write(work)
        self._changed((*vms, *(step.state.vm for step in ends)))
        return changes

    async def prune(self, statement: Delete) -> int:
        """Delete what `cluster_manager.store.pruning` says; returns how many rows."""

        async def work(connection: AsyncConnection) -> int:
            return (await connection.execute(statement)).rowcount

        return await self._write(work)

    # --- events and core changes -----------------------------------------------------------------------------------

    async def events(self, limit: int, vm: str | None = None) -> list[StoredEvent]:
        """Newest first, of one VM or of all."""
        query = select(schema.events).order_by(schema.events.c.id.desc()).limit(limit)
        rows = await self._read(query if vm is None else query.where(schema.events.c.vm == vm))
        return [StoredEvent(row.at, row.vm, row.host, row.kind, row.sentence) for row in rows]

    async def add_core_changes(
        self,
        host: str,
        changes: Sequence[CoreChange],
        after: int = LARGEST,
        reported: Callable[[str], Mapping[str, bool]] = lambda host: {},
    ) -> tuple[int, list[StoredChange]]:
        """Core changes of a host, each sequence once, with what the store knows of their machines.

        Those of machines that are another host's are dropped (`_of_host`).

        :param reported: the VMs of which a host tells, and whether it has said lately that each is on there.
        :returns: the highest sequence of that host: what need not be sent again; and all of that host with a higher
            sequence than ``after``, in its order.
        """
        table = schema.core_changes

        async def work(connection: AsyncConnection) -> tuple[int, list[StoredChange]]:
            if changes:
                vms = schema.vms
                named = select(func.max(vms.c.id)).where(vms.c.name.in_({change.machine for change in changes}))
                query = select(vms).where(vms.c.id.in_(named.group_by(vms.c.name)))
                newest = {row.name: row for row in (await connection.execute(query)).all()}
                homes = {name: reported(row.host) for name, row in newest.items() if row.host is not None}
                at_home = {name: told[name] for name, told in homes.items() if name in told}
                own = await _of_host(
                    connection, host, {change.machine for change in changes}, newest, at_home, self._clock()
                )
                dropped = sorted({change.machine for change in changes} - own)
                if dropped:
                    log.info("core changes dropped: of machines that are not there", host=host, machines=dropped[:5])
                plans = {_plan_of(change) for change in changes if change.cores_after == 0}
                kind, asked = schema.plans.c.kind, schema.plans.c.internal == 0
                # Also a deletion that failed on its way: its host ends it later.
                by_owner = select(schema.plans.c.id).where(
                    schema.plans.c.id.in_(plans), (kind == "release") | ((kind == "delete") & asked)
                )
                given_up = set((await connection.execute(by_owner)).scalars())
                statement = upsert(self._engine, table).on_conflict_do_nothing()
                told = [change for change in changes if change.machine in own]
                dates = dated(told, await last_date(connection, host), self._clock())
                rows = [
                    change_row(host, c, at, newest.get(c.machine), _plan_of(c) in given_up)
                    for c, at in zip(told, dates, strict=True)
                ]
                if rows:
                    await connection.execute(statement, rows)
            highest = select(func.coalesce(func.max(table.c.sequence), 0)).where(table.c.host == host)
            # What was dropped is not to come again.
            found = max(int((await connection.execute(highest)).scalar_one()), *(c.sequence for c in changes), 0)
            new = (await connection.execute(_changes_of(host, after))).all() if after < found else ()
            return found, [stored_change(row) for row in new]

        return await self._write(work)

    async def acknowledged(self) -> dict[str, int]:
        """The highest sequence of each host that has core changes here."""
        return {row.host: row.highest for row in await self._read(highest_sequences())}

    async def core_changes_of(self, host: str, after: int) -> list[StoredChange]:
        """Those of a host with a higher sequence, in its order."""
        return _changes(await self._read(_changes_of(host, after)))

    async def core_changes_since(self, at: float) -> list[StoredChange]:
        """All after a moment, and each machine's last one before it, oldest first."""
        table = schema.core_changes
        before = select(table.c.machine, func.max(table.c.at).label("at")).where(table.c.at <= at)
        last = before.group_by(table.c.machine).subquery()
        joined = select(table).join(last, (table.c.machine == last.c.machine) & (table.c.at == last.c.at))
        older = _changes(await self._read(joined.order_by(table.c.sequence)))
        recent = select(table).where(table.c.at > at).order_by(table.c.at, table.c.host, table.c.sequence)
        return older + _changes(await self._read(recent))

    # --- anything --------------------------------------------------------------------------------------------------

    async def rows(self, query: Any) -> Sequence[Any]:
        """The rows of a select of `cluster_manager.store.queries`."""
        return await self._read(query)


def _living(name: str) -> Any:
    """An update of the row that holds a name."""
    table = schema.vms
    return update(table).where(table.c.name == name, schema.LIVING)


def _phase(phase: VMPhase, now: float) -> dict[str, Any]:
    """The columns that a phase sets."""
    here = {} if phase in _WAITS else {"preempted_at": None, "preemption_reason": None, "preemption_unsure": 0}
    return {"phase": phase.value, **({"ended_at": now} if phase is VMPhase.ENDED else {}), **here}


def _claiming(state: Plan, vm: str, claim: Claim, now: float) -> list[Any]:
    """The statements by which a new plan claims its VM's row."""
    match claim:
        case AddVM(host, spec, sentence, labels, acquired):
            row = insert(schema.vms).values(
                name=vm,
                host=host,
                phase=VMPhase.PLACING.value,
                **_sold(spec),
                sentence=sentence,
                owes_removal=0,
                request_id=state.request_id,
                generation=0,
                deleted_by_owner=0,
                labels=stored_labels(labels),
                acquired=int(acquired),
            )
            return [_living(vm).values(**_phase(VMPhase.ENDED, now)), row]
        case ClaimVM(phase):
            changes = _phase(phase, now) if phase is not None else {}
            return [_living(vm).values(**changes, request_id=state.request_id)]
        case ClaimRemoval(phase):
            changes = {**_phase(phase, now), "request_id": state.request_id, "owes_removal": 0}
            # What the manager owes is no owner's wish, unless a deletion before it was.
            return [_living(vm).values(**changes, **({} if state.internal else {"deleted_by_owner": 1}))]
        case SetGeneration(generation):
            return [_living(vm).values(generation=generation)]


def _new_plan(state: Plan, fingerprint: str, now: float) -> Any:
    """The insert of a plan's row, behind all others."""
    number = select(func.coalesce(func.max(schema.plans.c.number), 0) + 1).scalar_subquery()
    return insert(schema.plans).values(
        id=state.id,
        request_id=state.request_id,
        fingerprint=fingerprint,
        internal=int(state.internal),
        number=number,
        started_at=now,
        kind=state.kind,
        vm=state.vm,
        **plan_columns(state, now),
    )


def plan_columns(state: Plan, now: float) -> dict[str, Any]:
    """The columns of a plan that may change with each of its steps."""
    end = state.instruction
    return {
        **({} if isinstance(state, UnreadPlan) else {"state": state.model_dump_json()}),
        "finished": int(state.finished),
        "host": state.host,
        "outcome": end.state.value if isinstance(end, Finish) else None,
        "updated_at": now,
    }


def _sold(spec: VMSpec) -> dict[str, Any]:
    """The columns of what a VM is sold as."""
    return {"spec": spec.model_dump_json(), "priority": spec.priority.value}


def _plan_of(change: CoreChange) -> str:
    """The id of the plan whose command a core change came of, if one did."""
    return change.cause.rpartition(".")[0]


async def _of_host(
    connection: AsyncConnection,
    host: str,
    machines: set[str],
    newest: Mapping[str, Any],
    at_home: Mapping[str, bool],
    now: float,
) -> set[str]:
    """The machines of which a host may tell: its own by the record, those that a plan is at work on there, and those
    of which it told last, so that the end of one that has moved away still comes in.

    :param newest: by name the newest row of a VM.
    :param at_home: those of which their own host tells: no other one has a say, whatever the dates of its changes; nor
        has one to which a plan may move them, as long as they are on there.
    """
    plans, table = schema.plans, schema.core_changes
    under_way = select(plans.c.vm).where(
        plans.c.finished == schema.constant(0),
        plans.c.host == host,
        plans.c.vm.in_({name for name in machines if not at_home.get(name)}),
    )
    own = {name for name, row in newest.items() if row.host == host}
    own |= set((await connection.execute(under_way)).scalars())
    if not (others := machines - own - set(at_home)):
        return own
    # A moment to come is no news: one that said so would be believed for ever.
    told = select(table.c.machine, func.max(table.c.at).label("at"))
    last = told.where(table.c.machine.in_(others), table.c.at <= now + CLOCKS_S).group_by(table.c.machine).subquery()
    joined = select(table.c.machine).join(last, (table.c.machine == last.c.machine) & (table.c.at == last.c.at))
    return own | set((await connection.execute(joined.where(table.c.host == host))).scalars())


def _changes_of(host: str, after: int) -> Any:
    """The core changes of a host with a higher sequence, in its order."""
    table = schema.core_changes
    return select(table).where(table.c.host == host, table.c.sequence > after).order_by(table.c.sequence)


def _changes(rows: Sequence[Any]) -> list[StoredChange]:
    return [stored_change(row) for row in rows]
