"""The store's transactions: every write checks, in its own transaction, that this manager still leads.

A write that has begun is finished even when the task that asked for it is cancelled, so that a shutdown leaves no
half-made transaction behind. A write that failed may have been stored or not: the next leader has to begin again from
what the store says, so each failure is told to ``failed``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Select, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError, NotSupportedError, ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.errors import DISK_FULL, LostLeadership, StoreError
from cluster_manager.store import schema
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.engines import MOST_READS, check_file, engine_of, is_full, mark_file, reading
from cluster_manager.store.postgresql import sentence_of

T = TypeVar("T")

#: How long one write may take, seconds; the server's own limits end it sooner in most cases.
WRITE_S: Final = 15.0
#: The database answers, and a statement was wrong: a defect, which a new term would only meet again.
REFUSED: Final = (IntegrityError, DataError, ProgrammingError, NotSupportedError)
#: So many rows are read before the loop's other work, the proof that we lead among it, gets its turn.
BATCH: Final = 200


class Transactions:
    """One open database, for one term of leadership: closed for good when that is over.

    :param clock: seconds since the epoch.
    :param failed: is told in a sentence that a write failed.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float], failed: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self._database = database
        self._clock = clock
        self._failed = failed
        self._engine = engine_of(database)
        self._reading = reading(self._engine)
        #: One writer at a time: plans are numbered in order, and none waits for SQLite's lock in a thread.
        self._lock = asyncio.Lock()
        self._reads = asyncio.Semaphore(MOST_READS)
        self._writes: set[asyncio.Task[Any]] = set()
        self._epoch = 0
        self._closed = False

    async def open(self, url: str | None = None) -> int:
        """Raise the epoch by one, and migrate. From then on every write under a lower epoch fails: before the first
        step, which may be long, where there is a store.

        :param url: where clients reach this manager.
        :returns: the new epoch.
        :raises StoreError: the database cannot be used, or was made by a newer version.
        """

        async def fence(connection: AsyncConnection) -> int | None:
            return await _raised(connection) if await connection.run_sync(schema.is_older) else None

        async def begin(connection: AsyncConnection) -> int:
            epoch = fenced or await _raised(connection)
            await connection.execute(insert(schema.terms).values(epoch=epoch, url=url, begun_at=self._clock()))
            return epoch

        if not isinstance(self._database, PostgreSQL):
            await asyncio.to_thread(check_file, self._database)
        try:
            fenced = await self._transaction(fence, False, None)
            # What is migrated may be large: it ends at last, and a step cut off would only be begun again.
            while await self._transaction(lambda connection: connection.run_sync(schema.migrate), False, None):
                pass
            self._epoch = await self._transaction(begin, False, WRITE_S)
        except REFUSED as error:
            # Nothing of ours: rights that are missing, or what else is in the database.
            raise self._error(error) from error
        if not isinstance(self._database, PostgreSQL):
            await asyncio.to_thread(mark_file, self._database)
        return self._epoch

    async def close(self) -> None:
        """Finish the writes under way and close; later writes and reads are refused."""
        self._closed = True
        while self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)
        await self._engine.dispose()

    def give_up(self, sentence: str) -> None:
        """Something that had to be stored or read was not: the term is to end, and the next one to go on from here."""
        self._failed(sentence)

    async def answers(self) -> bool:
        """Whether the store can be read at this moment."""
        try:
            await self._read(select(schema.counters.c.value))
        except StoreError:
            return False
        return True

    async def _read(self, query: Any) -> Sequence[Any]:
        """The rows that answer a query, which waits while many others are at work.

        :raises StoreError: the database does not answer.
        """
        try:
            async with self._reads:
                self._check_open()
                async with self._reading.connect() as connection:
                    return (await connection.execute(query)).all()
        except REFUSED:
            raise
        except (SQLAlchemyError, OSError) as error:
            raise self._error(error) from error

    async def _values(self, query: Select[Any], key: ColumnElement[Any], value: Callable[[Any], T]) -> list[T]:
        """The rows that answer a query as values, by ``key``, read in pieces so that many do not hold the loop up.

        :param key: a column of the query that is different in each row.
        """
        values: list[T] = []
        query = query.order_by(key).limit(BATCH)
        rows = await self._read(query)
        while rows:
            values.extend(map(value, rows))
            if len(rows) < BATCH:
                break
            await asyncio.sleep(0)
            rows = await self._read(query.where(key > rows[-1]._mapping[key]))
        return values

    async def _write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run ``work`` in one transaction, after the writes that were asked for before.

        :raises LostLeadership: another manager leads; nothing was stored.
        :raises StoreError: the database failed; whether it was stored is unknown.
        """
        self._check_open()
        return await self._transaction(work, True, WRITE_S)

    async def _transaction(
        self, work: Callable[[AsyncConnection], Awaitable[T]], fenced: bool, limit_s: float | None
    ) -> T:
        async def transaction() -> T:
            async with self._lock, asyncio.timeout(limit_s), self._engine.begin() as connection:
                if fenced:
                    await self._check_epoch(connection)
                return await work(connection)

        async def kept() -> T:
            try:
                return await transaction()
            except REFUSED:
                raise
            except (SQLAlchemyError, OSError, StoreError) as error:
                failure = self._error(error)
                if fenced:
                    self._failed(str(failure))
                raise failure from error

        task = asyncio.create_task(kept(), name="store write")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    async def _check_epoch(self, connection: AsyncConnection) -> None:
        """Hold the epoch for this transaction: a new leader's raise waits for its end, and what comes after is refused.

        :raises LostLeadership: it has been raised.
        """
        counters = schema.counters
        # SQLite leaves FOR SHARE out; there the file's lock keeps others away.
        query = select(counters.c.value).where(counters.c.name == "epoch").with_for_update(read=True)
        stored = (await connection.execute(query)).scalar_one()
        if stored != self._epoch:
            raise LostLeadership(f"the manager with epoch {stored} leads; this one had {self._epoch}")

    def _check_open(self) -> None:
        if self._closed:
            raise LostLeadership("this manager does not lead any more")

    def _error(self, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        # Without the statement and its values, which SQLAlchemy's own words have and which may be private.
        why = getattr(error, "orig", None) or error
        if is_full(why):
            return StoreError(DISK_FULL)
        said = f"no answer within {WRITE_S:g} s" if isinstance(error, TimeoutError) else sentence_of(why)
        return StoreError(f"cannot use the {_shown(self._database)}: {said}")


async def _raised(connection: AsyncConnection) -> int:
    """The epoch, after it has been raised by one."""
    counters = schema.counters
    more = update(counters).where(counters.c.name == "epoch").values(value=counters.c.value + 1)
    return int((await connection.execute(more.returning(counters.c.value))).scalar_one())


def _shown(database: Database) -> str:
    return str(database) if isinstance(database, PostgreSQL) else f"database {database}"
