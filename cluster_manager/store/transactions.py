"""The store's transactions: every write checks, in its own transaction, that this manager still leads.

A write that has begun is finished even when the task that asked for it is cancelled, so that a shutdown leaves no
half-made transaction behind. A write that failed may have been stored or not: the next leader has to begin again from
what the store says, so each failure is told to ``failed``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import structlog
from sqlalchemy import ColumnElement, Select, delete, insert, select, text, update
from sqlalchemy.exc import DataError, IntegrityError, NotSupportedError, ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.errors import DISK_FULL, LostLeadership, StoreError
from cluster_manager.store import schema
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.engines import MOST_READS, check_file, engine_of, is_full, mark_file, reading
from cluster_manager.store.postgresql import sentence_of
from ebbtide.deflation.fencing import MOST_STEP

log = structlog.get_logger()

T = TypeVar("T")

#: How long one write may take, seconds; the server's own limits end it sooner in most cases.
WRITE_S: Final = 15.0
#: The database answers, and a statement was wrong: a defect, which a new term would only meet again.
REFUSED: Final = (IntegrityError, DataError, ProgrammingError, NotSupportedError)
#: By how much the epoch rises where commits may be lost: managers begin to lead less often than this within what a
#: replica lags behind. Agents that follow nobody yet still follow after a thousand of these.
LOST_EPOCHS: Final = MOST_STEP // 1000
#: Of the document that says in which history of a server the store was written. A replica that is promoted and a server
#: that is put back to a moment begin another timeline; a server that was made anew has another identifier.
SERVER_HISTORY: Final = "server history"
_HISTORY: Final = """
    SELECT system_identifier || ' ' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) FROM pg_control_system()
"""
#: So many rows are read before the loop's other work, the proof that we lead among it, gets its turn.
BATCH: Final = 200


class Transactions:
    """One open database, for one term of leadership: closed for good when that is over.

    :param clock: seconds since the epoch.
    :param failed: is told in a sentence that a write failed.
    :param server: at which server the lock is held; None: at none that is known.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        failed: Callable[[str], None] = lambda sentence: None,
        server: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._failed = failed
        self._engine = engine_of(database, server, failed)
        self._reading = reading(self._engine)
        #: One writer at a time: plans are numbered in order, and none waits for SQLite's lock in a thread.
        self._lock = asyncio.Lock()
        self._reads = asyncio.Semaphore(MOST_READS)
        self._writes: set[asyncio.Task[Any]] = set()
        self._epoch = 0
        self._closed = False

    async def open(self, url: str | None = None, above: int = 0, led: int = 0) -> int:
        """Raise the epoch by one, and migrate. From then on every write under a lower epoch fails: before the first
        step, which may be long, where there is a store.

        It rises by more where the store has gone back: agents follow a higher epoch, or terms that were lost with their
        rows have used the next ones.

        :param url: where clients reach this manager.
        :param above: an epoch that agents follow which go on to report here; 0: not known.
        :param led: the last one of this process; 0: it has not led. A store that is further behind may be another than
            the one of that term, where the next epoch belongs to whoever leads there: it is for the hosts to say.
        :returns: the new epoch.
        :raises StoreError: the database cannot be used, or was made by a newer version; or it is empty, and was not.
        """

        async def fence(connection: AsyncConnection) -> int | None:
            if not await connection.run_sync(schema.version_of) and (known := max(above, led)):
                raise StoreError(
                    f"the {_shown(self._database)} is empty, but it has held a store of epoch {known}: restore it from "
                    "a backup; or start this manager again to begin with an empty one"
                )
            return await _raised(connection) if await connection.run_sync(schema.is_older) else None

        async def begin(connection: AsyncConnection) -> int:
            epoch, now = fenced or await _raised(connection), self._clock()
            if moved := await _moved(connection, now):
                epoch = await _raised(connection, LOST_EPOCHS)
            if epoch <= above or epoch == led:
                # Under one that was used before, the counts of its commands would be taken for those of before.
                epoch = await _raised(connection, max(above, epoch) + 1 - epoch)
                moved = moved or "its hosts follow a later manager than this store knows of"
            await connection.execute(insert(schema.terms).values(epoch=epoch, url=url, begun_at=now))
            if moved:
                said = (
                    f"{moved}: the store was put back or failed over, and what was stored last may be lost. Compare "
                    f"`ebb host list` with `ebb vm list`; it goes on with epoch {epoch}"
                )
                log.warning(said)
                row = {"at": now, "plan": None, "vm": None, "host": None, "kind": "restored", "sentence": said}
                await connection.execute(insert(schema.events).values(**row))
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


async def _raised(connection: AsyncConnection, by: int = 1) -> int:
    """The epoch, after it has been raised."""
    counters = schema.counters
    more = update(counters).where(counters.c.name == "epoch").values(value=counters.c.value + by)
    return int((await connection.execute(more.returning(counters.c.value))).scalar_one())


async def _moved(connection: AsyncConnection, now: float) -> str:
    """Note the history of the database server: in another one what a term before has committed may not be there.

    :param now: seconds since the epoch.
    :returns: that it is another one than before; empty where it is the same, or not known.
    """
    if connection.dialect.name != "postgresql":
        return ""
    table = schema.knowledge
    try:
        async with connection.begin_nested():
            found = str((await connection.execute(text(_HISTORY))).scalar_one())
            of_name = table.c.name == SERVER_HISTORY
            before = (await connection.execute(select(table.c.body).where(of_name))).scalar_one_or_none()
            if found != before:
                await connection.execute(delete(table).where(of_name))
                await connection.execute(insert(table).values(name=SERVER_HISTORY, saved_at=now, body=found))
    except (ProgrammingError, NotSupportedError) as error:
        # Of a server that is not the original one, or that has taken the right to ask from our role.
        log.info("the history of the database server cannot be told", why=sentence_of(error.orig or error))
        return ""
    if before in (None, found):
        return ""
    return f"the database server has another history (identifier and timeline {found}, before {before})"


def _shown(database: Database) -> str:
    return str(database) if isinstance(database, PostgreSQL) else f"database {database}"
