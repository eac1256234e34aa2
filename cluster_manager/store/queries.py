"""Selects of the lists: filters by columns with indexes, and keyset pages, portable to any database of SQLAlchemy's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, Select, func, select, tuple_

from cluster_manager.store import schema
from ebbtide.messages.operations import OperationState


def vms(
    limit: int | None,
    after: str | None,
    *,
    host: str | None,
    phases: list[str] | None,
    prefix: str | None,
    names: Collection[str] | None = None,
) -> Select[Any]:
    """VMs whose names are taken, by name; all of them where there is no limit. ``names``: only these."""
    table = schema.vms
    query = select(table).where(schema.LIVING).order_by(table.c.name).limit(limit)
    if names is not None:
        query = query.where(table.c.name.in_(names))
    if after is not None:
        query = query.where(table.c.name > after)
    if host is not None:
        query = query.where(table.c.host == host)
    if phases is not None:
        query = query.where(table.c.phase.in_(phases))
    if prefix:
        query = query.where(table.c.name.startswith(prefix, autoescape=True))
    return query


def living(names: Collection[str]) -> Select[Any]:
    """Of these names those that are taken."""
    return select(schema.vms.c.name).where(schema.LIVING, schema.vms.c.name.in_(names))


def on_hosts(hosts: Collection[str]) -> Select[Any]:
    """The names that are taken by VMs of these hosts."""
    return select(schema.vms.c.name).where(schema.LIVING, schema.vms.c.host.in_(hosts))


def _first(key: ColumnElement[int], at: ColumnElement[float], since: float) -> ScalarSelect[Any]:
    """The first row that is not older than a moment, whatever the clocks of managers said: who begins there does not go
    through all rows in search of a few more.

    :param key: grows from row to row, as does ``at`` where clocks agree.
    """
    # Not the bare key: databases would look for it from the first row on, instead of by the index of ``at``.
    return select(func.min(key + 0)).where(at >= since).scalar_subquery()


def plans(
    limit: int,
    after: int | None,
    *,
    kind: str | None,
    state: OperationState | None,
    vm: str | None,
    host: str | None,
    since: float | None,
) -> Select[Any]:
    """What clients asked for, newest first."""
    table = schema.plans
    query = select(table).where(table.c.internal == 0).order_by(table.c.number.desc()).limit(limit)
    if after is not None:
        query = query.where(table.c.number < after)
    if since is not None:
        query = query.where(
            table.c.started_at >= since, table.c.number >= _first(table.c.number, table.c.started_at, since)
        )
    if state is OperationState.RUNNING:
        query = query.where(table.c.finished == schema.constant(0))
    elif state is not None:
        query = query.where(table.c.outcome == state.value)
    for column, value in ((table.c.kind, kind), (table.c.vm, vm), (table.c.host, host)):
        if value is not None:
            query = query.where(column == value)
    return query


def under_way(vm: str, host: str) -> Select[Any]:
    """The plans about a VM that are, or will be, at work on a host, oldest first."""
    table = schema.plans
    unfinished = table.c.finished == schema.constant(0)
    return select(table).where(unfinished, table.c.vm == vm, table.c.host == host).order_by(table.c.number)


def events(
    limit: int,
    after: int | None,
    *,
    kind: str | None,
    vm: str | None,
    host: str | None,
    since: float | None,
    since_id: int | None,
    until: float | None = None,
) -> Select[Any]:
    """The event log, newest first."""
    table = schema.events
    query = select(table).order_by(table.c.id.desc()).limit(limit)
    if after is not None:
        query = query.where(table.c.id < after)
    if since is not None:
        query = query.where(table.c.at >= since, table.c.id >= _first(table.c.id, table.c.at, since))
    if until is not None:
        query = query.where(table.c.at <= until)
    if since_id is not None:
        query = query.where(table.c.id > since_id)
    for column, value in ((table.c.kind, kind), (table.c.vm, vm), (table.c.host, host)):
        if value is not None:
            query = query.where(column == value)
    return query


def events_after(
    event_id: int, limit: int, *, kind: str | None = None, vm: str | None = None, host: str | None = None
) -> Select[Any]:
    """The event log behind one event, oldest first."""
    table = schema.events
    query = select(table).where(table.c.id > event_id).order_by(table.c.id).limit(limit)
    for column, value in ((table.c.kind, kind), (table.c.vm, vm), (table.c.host, host)):
        if value is not None:
            query = query.where(column == value)
    return query


def newest_event() -> Select[Any]:
    """The row of the latest event, if there is one."""
    return select(schema.events).order_by(schema.events.c.id.desc()).limit(1)


def core_changes(
    limit: int, after: tuple[float, int, str] | None, *, machine: str | None, since: float | None
) -> Select[Any]:
    """Core changes, newest first; of one moment, those of later hosts first, whose names tell them apart."""
    table = schema.core_changes
    key = (table.c.at, table.c.sequence, table.c.host)
    query = select(table).order_by(*(column.desc() for column in key)).limit(limit)
    if after is not None:
        query = query.where(tuple_(*key) < tuple_(*after))
    if machine is not None:
        query = query.where(table.c.machine == machine)
    if since is not None:
        query = query.where(table.c.at >= since)
    return query


def highest_sequences() -> Select[Any]:
    """Of each host that has core changes, also one that is forgotten, the highest sequence: from host to host by the
    primary key, since databases read the whole table for a GROUP BY.
    """
    changes = schema.core_changes.c
    hosts = select(func.min(changes.host).label("host")).cte("the_hosts", recursive=True)
    following = select(func.min(changes.host)).where(changes.host > hosts.c.host).scalar_subquery()
    hosts = hosts.union_all(select(following).where(hosts.c.host.is_not(None)))
    highest = select(func.max(changes.sequence)).where(changes.host == hosts.c.host).scalar_subquery()
    return select(hosts.c.host, highest.label("highest")).where(hosts.c.host.is_not(None))
