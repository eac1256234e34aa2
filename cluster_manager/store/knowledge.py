"""Documents of what the manager has learned, in its store: one by name, replaced as a whole."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.store import schema
from cluster_manager.store.engines import upsert
from cluster_manager.store.transactions import REFUSED, Transactions


class KnowledgeRows(Transactions):
    """The part of the store that holds what was learned."""

    async def knowledge(self, name: str) -> str | None:
        """The document of a name, as it was saved last."""
        table = schema.knowledge
        rows = await self._read(select(table.c.body).where(table.c.name == name))
        return str(rows[0].body) if rows else None

    async def known_before(self) -> float | None:
        """The last moment that the store knows of from before this term, seconds since the epoch; None: of none."""
        this = schema.terms.alias()
        begun = select(this.c.begun_at).where(this.c.epoch == self._epoch).scalar_subquery()
        columns = (schema.terms.c.begun_at, schema.hosts.c.seen_at, schema.events.c.at)
        last = [select(func.max(column)).where(column < begun).scalar_subquery() for column in columns]
        return max((at for at in (await self._read(select(*last)))[0] if at is not None), default=None)

    async def stored_epoch(self) -> int | None:
        """The epoch, before this store is opened; None: there is no store of this version."""
        counters = schema.counters
        try:
            rows = await self._read(select(counters.c.value).where(counters.c.name == "epoch"))
        except REFUSED:
            return None
        return int(rows[0].value) if rows else None

    async def leaders(self) -> frozenset[str]:
        """Where the managers are reached that have led."""
        rows = await self._read(select(schema.terms.c.url).distinct())
        return frozenset(row.url for row in rows if row.url)

    async def save_knowledge(self, name: str, body: str) -> None:
        """Put a document in the place of the last one."""

        async def work(connection: AsyncConnection) -> None:
            values = {"name": name, "saved_at": self._clock(), "body": body}
            statement = upsert(self._engine, schema.knowledge).values(**values)
            del values["name"]
            await connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))

        await self._write(work)
