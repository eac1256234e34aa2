"""Rows of the history: packed figures by host, length of step and time, and the hosts that VMs have been on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from sqlalchemy import Delete, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.store import schema
from cluster_manager.store.engines import upsert
from cluster_manager.store.transactions import Transactions

#: Rows in one transaction, so that plans have the store most of the time; and names in one question.
BATCH: Final = 200


class HistoryRow(NamedTuple):
    """One pack. ``at``: where it begins, seconds since the epoch."""

    host: str
    step_s: int
    at: int
    body: bytes


class HistoryRows(Transactions):
    """The part of the store that holds the history."""

    async def add_history(self, rows: Sequence[HistoryRow]) -> None:
        """Packs as they come."""

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(insert(schema.history), [row._asdict() for row in rows])

        await self._write(work)

    async def replace_history(
        self, hosts: Collection[str], step_s: int, begin: int, end: int, rows: Sequence[HistoryRow]
    ) -> None:
        """Packs of hosts for a stretch of time, in the place of those that begin in it, in one transaction."""
        table = schema.history
        old = delete(table).where(
            table.c.host.in_(hosts), table.c.step_s == step_s, table.c.at >= begin, table.c.at < end
        )

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(old)
            if rows:
                await connection.execute(insert(table), [row._asdict() for row in rows])

        await self._write(work)

    async def history(self, hosts: Collection[str], step_s: int, begin: int, end: int) -> list[HistoryRow]:
        """The packs of hosts that begin within a time, in order."""
        table = schema.history
        query = select(table.c.host, table.c.step_s, table.c.at, table.c.body).where(
            table.c.host.in_(hosts), table.c.step_s == step_s, table.c.at >= begin, table.c.at < end
        )
        return [HistoryRow(*row) for row in await self._read(query.order_by(table.c.at, table.c.id))]

    async def hosts_with_history(self, step_s: int, begin: int, end: int) -> list[str]:
        """The hosts of which there are packs that begin within a time."""
        table = schema.history
        query = select(table.c.host).where(table.c.step_s == step_s, table.c.at >= begin, table.c.at < end)
        return [row.host for row in await self._read(query.distinct().order_by(table.c.host))]

    async def oldest_history(self, step_s: int) -> int | None:
        """Where the first pack of a length of step begins."""
        table = schema.history
        query = select(table.c.at).where(table.c.step_s == step_s).order_by(table.c.at).limit(1)
        return next((row.at for row in await self._read(query)), None)

    async def homes_of(self, vm: str) -> list[str]:
        """The hosts that a VM has been on."""
        table = schema.history_homes
        return [row.host for row in await self._read(select(table.c.host).where(table.c.vm == vm))]

    async def save_homes(self, homes: Sequence[tuple[str, str]]) -> None:
        """VMs and their hosts, as of now."""
        now = self._clock()
        statement = upsert(self._engine, schema.history_homes)
        seen = statement.on_conflict_do_update(
            index_elements=["vm", "host"], set_={"seen_at": statement.excluded.seen_at}
        )
        rows = [{"vm": vm, "host": host, "seen_at": now} for vm, host in homes]

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(seen, rows)

        await self._write(work)

    async def recorded_homes(self, names: Collection[str]) -> Mapping[str, str]:
        """On which hosts VMs are by the manager's record: those of the names that are on one."""
        table, found = schema.vms, {}
        wanted = sorted(names)
        for first in range(0, len(wanted), BATCH):
            query = select(table.c.name, table.c.host).where(
                schema.LIVING, table.c.name.in_(wanted[first : first + BATCH]), table.c.host.is_not(None)
            )
            found.update({row.name: row.host for row in await self._read(query)})
        return found


def outdated(step_s: int, before: float, batch: int) -> Delete:
    """Some of the packs of a length of step that begin before a moment."""
    table = schema.history
    old = select(table.c.id).where(table.c.step_s == step_s, table.c.at < before).order_by(table.c.at).limit(batch)
    return delete(table).where(table.c.id.in_(old))


def homes_left(before: float) -> Delete:
    """The homes that VMs have not had since a moment."""
    return delete(schema.history_homes).where(schema.history_homes.c.seen_at < before)
