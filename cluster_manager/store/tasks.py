"""The tasks in the manager's store: every new state with its event in one transaction, before anything is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import Select, bindparam, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.store import schema
from cluster_manager.store.rows import UNREADABLE, tell_unread, why_unread
from cluster_manager.store.transactions import Transactions
from ebbtide.matcher.match.tasks import Task, TaskOrder, TaskPhase
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.tasks import TaskSpec

_TASK = TypeAdapter(Task)
#: So many rows are written in one call of the driver.
AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task's row."""

    number: int
    request_id: str
    fingerprint: str
    task: Task
    #: Why it cannot be read; empty: it can. The task is then good for nothing but to be shown, and to hold its cores.
    unread: str = ""


@dataclass(frozen=True, slots=True)
class TaskNote:
    """A line of the event log, about a task or about nothing that has a row."""

    kind: EventKind
    machine: str | None
    sentence: str


class TaskRows(Transactions):
    """The part of the store that is about tasks."""

    async def add_task(self, task: Task, request_id: str, fingerprint: str, note: TaskNote) -> StoredTask:
        """A new task, before anything is done about it."""

        async def work(connection: AsyncConnection) -> int:
            table = schema.tasks
            number = select(func.coalesce(func.max(table.c.number), 0) + 1).scalar_subquery()
            made = insert(table).values(
                name=task.name, number=number, request_id=request_id, fingerprint=fingerprint, **self._columns(task)
            )
            found = (await connection.execute(made.returning(table.c.number))).scalar_one()
            await connection.execute(insert(schema.events).values(self._event(note)))
            return int(found)

        return StoredTask(await self._write(work), request_id, fingerprint, task)

    async def save_tasks(self, tasks: Sequence[Task], notes: Iterable[TaskNote] = ()) -> None:
        """New states, all of them or none."""
        told = tuple(notes)
        if not tasks and not told:
            return

        async def work(connection: AsyncConnection) -> None:
            # Many in one call of the driver: a round may change thousands, and who submits waits for it. Not all: other
            # work gets its turn between two calls.
            table = schema.tasks
            changed = update(table).where(table.c.name == bindparam("of"))
            for begin in range(0, len(tasks), AT_ONCE):
                rows = [{"of": task.name, **self._columns(task)} for task in tasks[begin : begin + AT_ONCE]]
                await connection.execute(changed, rows)
            for begin in range(0, len(told), AT_ONCE):
                events = [self._event(note) for note in told[begin : begin + AT_ONCE]]
                await connection.execute(insert(schema.events), events)

        await self._write(work)

    async def unfinished_tasks(self) -> list[StoredTask]:
        """In the order in which they were submitted."""
        table = schema.tasks
        # Written into the statement, so that the index over a part of the table fits it.
        query = select(table).where(table.c.finished == literal_column("0"))
        return await self._values(query, table.c.number, stored_task)

    async def task(self, *, name: str | None = None, request_id: str | None = None) -> StoredTask | None:
        """The task of a name, or of a request."""
        table = schema.tasks
        query = select(table)
        query = query.where(table.c.name == name) if name is not None else query
        query = query.where(table.c.request_id == request_id) if request_id is not None else query
        return next((stored_task(row) for row in await self._read(query.limit(1))), None)

    def _columns(self, task: Task) -> dict[str, Any]:
        return {
            "phase": task.phase.value,
            "machine": task.machine,
            "state": _TASK.dump_json(task).decode(),
            "finished": int(task.final),
            "submitted_at": task.submitted_at,
            "updated_at": self._clock(),
        }

    def _event(self, note: TaskNote) -> dict[str, Any]:
        return {
            "at": self._clock(),
            "plan": None,
            "vm": note.machine,
            "host": None,
            "kind": note.kind,
            "sentence": note.sentence,
        }


def tasks_query(
    limit: int, after: int | None, *, state: TaskPhase | None, machine: str | None, prefix: str | None
) -> Select[Any]:
    """Tasks, newest first."""
    table = schema.tasks
    query = select(table).order_by(table.c.number.desc()).limit(limit)
    if after is not None:
        query = query.where(table.c.number < after)
    if state is not None:
        query = query.where(table.c.phase == state.value)
    if machine is not None:
        query = query.where(table.c.machine == machine)
    if prefix:
        query = query.where(table.c.name.startswith(prefix, autoescape=True))
    return query


def stored_task(row: Any) -> StoredTask:
    """A row of the table."""
    try:
        return StoredTask(row.number, row.request_id, row.fingerprint, _TASK.validate_json(row.state))
    except UNREADABLE as error:
        tell_unread("task", row.name, why := why_unread(error))
    return StoredTask(row.number, row.request_id, row.fingerprint, _unread_task(row, why), why)


def _unread_task(row: Any, why: str) -> Task:
    """What stands for a task that cannot be read, by its columns and as it was asked for; no attempt has its key."""
    order = TaskOrder(row.name, ())
    with suppress(*UNREADABLE):
        spec = TaskSpec.model_validate_json(row.fingerprint, extra="ignore")
        order = TaskOrder(row.name, spec.command, spec.cores, spec.duration_s)
    phase = TaskPhase.RUNNING if row.machine is not None else TaskPhase.WAITING
    if row.phase in list(TaskPhase):
        phase = TaskPhase(row.phase)
    elif row.finished:
        phase = TaskPhase.FAILED
    said = f"its stored state cannot be read ({why}): this manager does not go on with it"
    return Task(order, "", row.submitted_at, phase, machine=row.machine, sentence=said)
