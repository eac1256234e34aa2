"""The lead of one manager in faked time: a term begins with the lock and ends with it, at once, as often as need be."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_manager.defaults import LeadershipTimes
from cluster_manager.errors import LostLeadership, StoreError
from cluster_manager.leadership.leadership import Leadership
from cluster_manager.leadership.locks import AdvisoryLock, FileLock, Taken
from cluster_manager.store.database import PostgreSQL
from cluster_manager.store.postgresql import connect
from tests.manager.databases import Server, rows_of
from tests.waiting import until

TIMES = LeadershipTimes(check_s=1.0, limit_s=3.0, release_s=5.0, pause_s=2.0)


class ScriptedLock:
    """Answers as it is told to."""

    limit_s = 3.0
    waits = True
    server: str | None = None

    def __init__(self) -> None:
        self.answer: Exception | None = None
        self.hangs = False
        self.takes_s = 0.0
        self.released = 0
        #: Asked when it is given up, and whether that was ever so.
        self.leads: Callable[[], bool] = lambda: False
        self.lost_by_leader = False

    async def hold(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.takes_s)
        if self.answer is not None:
            raise self.answer

    async def release(self) -> None:
        self.released += 1
        await asyncio.sleep(0.1)
        self.lost_by_leader |= self.leads()


class RecordedTerm:
    """Notes when it is begun and ended."""

    def __init__(self) -> None:
        self.at: list[tuple[str, float]] = []
        self.failure: Exception | None = None
        self.epoch = 0

    async def begin_term(self) -> int:
        if self.failure is not None:
            raise self.failure
        self.epoch += 1
        self.at.append(("begun", asyncio.get_running_loop().time()))
        return self.epoch

    async def end_term(self) -> None:
        self.at.append(("ended", asyncio.get_running_loop().time()))


def leadership(lock: ScriptedLock, term: RecordedTerm) -> Leadership:
    return Leadership(lock, term, TIMES, asyncio.get_running_loop().time)


async def test_a_leader_whose_machine_was_suspended_finds_that_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suspended_s, read = 0.0, time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: read(clock) + (suspended_s if clock == time.CLOCK_BOOTTIME else 0.0)
    )
    lock = ScriptedLock()
    lock.limit_s = 1000.0
    lead = Leadership(lock, RecordedTerm(), replace(TIMES, check_s=1000.0))
    await lead.start()
    lead.check()
    suspended_s = 2000.0
    assert not lead.leads()
    with pytest.raises(LostLeadership):
        lead.check()
    await lead.stop()


@pytest.mark.looptime
async def test_a_lock_that_cannot_be_proved_ends_the_term_within_the_limit_and_a_later_one_begins_another() -> None:
    lock, term = ScriptedLock(), RecordedTerm()
    lead = leadership(lock, term)
    begin = asyncio.get_running_loop().time()
    await lead.start()
    assert lead.leads()
    lead.check()
    await asyncio.sleep(10.5)
    assert lead.leads()
    lock.hangs = True
    await asyncio.sleep(3.0)
    assert not lead.leads()
    with pytest.raises(LostLeadership):
        lead.check()
    lock.hangs = False
    await asyncio.sleep(5.0)
    assert lead.leads()
    await lead.stop()
    whats = [what for what, _ in term.at]
    assert whats == ["begun", "ended", "begun", "ended"]
    ended, again = term.at[1][1] - begin, term.at[2][1] - begin
    assert 12.0 < ended <= 13.5
    assert ended + TIMES.pause_s <= again <= ended + TIMES.pause_s + 1.1


@pytest.mark.looptime
async def test_the_first_command_after_a_halt_of_the_process_is_refused() -> None:
    lock, term = ScriptedLock(), RecordedTerm()
    late = 0.0
    loop = asyncio.get_running_loop()
    lead = Leadership(lock, term, TIMES, lambda: loop.time() + late)
    await lead.start()
    lead.check()
    late = 60.0  # nobody of the loop had a turn meanwhile
    with pytest.raises(LostLeadership, match="could not prove within 3 s"):
        lead.check()
    await asyncio.sleep(0.5)
    assert [what for what, _ in term.at] == ["begun", "ended"]
    await lead.stop()


@pytest.mark.looptime
async def test_a_failing_store_ends_the_term_and_the_next_one_begins_after_the_pause() -> None:
    lock, term = ScriptedLock(), RecordedTerm()
    lead = leadership(lock, term)
    await lead.start()
    lead.fail("the disk is full")
    lead.fail("the disk is full")
    await asyncio.sleep(0.1)
    assert (lead.leads(), lead.why) == (False, "the disk is full")
    await asyncio.sleep(4.0)
    assert lead.leads()
    await lead.stop()
    assert [what for what, _ in term.at] == ["begun", "ended"] * 2
    assert lock.released == 2


@pytest.mark.looptime
async def test_a_proof_that_comes_when_its_term_is_over_begins_no_other_without_the_lock() -> None:
    lock, term = ScriptedLock(), RecordedTerm()
    lead = leadership(lock, term)
    await lead.start()
    lock.takes_s = 1.0
    await asyncio.sleep(1.5)  # it is being asked
    lead.fail("the disk is full")
    lock.takes_s, lock.leads = 0.0, lead.leads
    await asyncio.sleep(6.0)
    assert (lead.leads(), lock.lost_by_leader) == (True, False)
    await lead.stop()


@pytest.mark.looptime
async def test_a_lock_that_is_to_be_given_up_is_not_asked_for_before_that() -> None:
    """However late the turn comes: a halt of the process may last longer than the pause."""
    lock, term = ScriptedLock(), RecordedTerm()
    late, loop = 0.0, asyncio.get_running_loop()
    lead = Leadership(lock, term, TIMES, lambda: loop.time() + late)
    await lead.start()
    await asyncio.sleep(0.5)
    lead.fail("the disk is full")
    while len(term.at) < 2:
        await asyncio.sleep(0)
    late, lock.leads = 60.0, lead.leads
    await asyncio.sleep(6.0)
    assert (lead.leads(), lock.lost_by_leader) == (True, False)
    await lead.stop()


@pytest.mark.looptime
async def test_a_standby_knows_the_leader_and_leads_as_soon_as_the_lock_is_free() -> None:
    lock, term = ScriptedLock(), RecordedTerm()
    lock.answer = Taken("another manager holds the lock", "http://other")
    lead = leadership(lock, term)
    await lead.start()
    assert (lead.leads(), lead.leader) == (False, "http://other")
    lock.answer = None
    await asyncio.sleep(1.1)
    assert (lead.leads(), lead.leader) == (True, None)
    await lead.stop()


@pytest.mark.looptime
async def test_a_manager_that_cannot_begin_its_first_term_says_why_and_ends() -> None:
    lock, term = ScriptedLock(), RecordedTerm()
    term.failure = StoreError("the store has version 99")
    with pytest.raises(StoreError, match="version 99"):
        await leadership(lock, term).start()
    assert lock.released == 1
    term.failure = TypeError("of our own")
    with pytest.raises(StoreError, match=r"a defect of the manager \(TypeError\)"):
        await leadership(lock, term).start()
    lock.answer = StoreError("no such server")
    with pytest.raises(StoreError, match="no such server"):
        await leadership(lock, RecordedTerm()).start()


# --- the real locks --------------------------------------------------------------------------------------------------


async def test_a_file_has_one_manager_and_the_second_is_told_which(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "db"), FileLock(tmp_path / "db")
    assert first.limit_s == math.inf
    await first.hold()
    await first.hold()
    with pytest.raises(Taken, match=r"another manager \(process \d+\) uses it"):
        await second.hold()
    with pytest.raises(StoreError, match="another manager"):
        await Leadership(second, RecordedTerm(), TIMES).start()
    await first.release()
    await second.hold()
    (tmp_path / "db.lock").unlink()
    with pytest.raises(StoreError, match="was removed"):
        await second.hold()
    await second.release()


@pytest.mark.service
async def test_a_database_has_one_leader_until_its_session_ends(postgresql: Server) -> None:
    database = postgresql.new()
    first, second = AdvisoryLock(database, 0.5, 1.0), AdvisoryLock(database, 3.0, 5.0)
    await first.hold()
    await first.hold()
    with pytest.raises(Taken):
        await second.hold()
    # The first one asks no more: the server ends its session, though its connection is in order.
    await until(lambda: _got(second))
    with pytest.raises(StoreError, match="does not answer"):
        await first.hold()
    await first.release()
    await second.hold()
    await second.release()
    await first.hold()
    await first.release()
    postgresql.drop(database)


async def _got(lock: AdvisoryLock) -> bool:
    try:
        await lock.hold()
    except Taken:
        return False
    return True


@pytest.mark.service
async def test_a_lock_that_the_session_has_lost_is_noticed(postgresql: Server) -> None:
    database = postgresql.new()
    lock = AdvisoryLock(database, 3.0, 5.0)
    await lock.hold()
    assert lock._connection is not None
    await lock._connection.execute("SELECT pg_advisory_unlock_all()")
    with pytest.raises(StoreError, match="is gone"):
        await lock.hold()
    await lock.release()
    postgresql.drop(database)


@pytest.mark.service
async def test_a_search_path_without_a_schema_is_said_and_is_no_lock_of_another_manager(postgresql: Server) -> None:
    database = postgresql.new()
    lock = AdvisoryLock(PostgreSQL(f"{database.url}&options=-csearch_path%3Dlab"), 3.0, 5.0)
    for _ in range(2):
        with pytest.raises(StoreError, match="no schema of its search_path exists: CREATE SCHEMA first"):
            await lock.hold()
    rows_of(database, "CREATE SCHEMA lab")
    for _ in range(2):
        await lock.hold()
    await lock.release()
    postgresql.drop(database)


@pytest.mark.service
async def test_a_session_that_a_pooler_gives_to_two_managers_gives_the_lock_to_one(postgresql: Server) -> None:
    database = postgresql.new()
    first, second = AdvisoryLock(database, 3.0, 5.0), AdvisoryLock(database, 3.0, 5.0)
    await first.hold()
    second._connection, second._mark, second._since = first._connection, "another", time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"uses this session .* a pooler in transaction mode cannot keep the lock"):
            await second.hold()
        await first.hold()
    # Its turn on another session, which knows nothing of it.
    own, first._connection = first._connection, await connect(database, "of the pool", 5.0)
    with pytest.raises(StoreError, match="is gone"):
        await first.hold()
    await first.release()
    assert own is not None
    await own.close()
    second._connection = None
    await second.hold()
    await second.release()
    postgresql.drop(database)
