"""The store: migrations, durability settings, who may write, and what it refuses."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.defaults import DAY_S
from cluster_manager.errors import LostLeadership, StoreError
from cluster_manager.plans.lifecycle import start_start, start_stop
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Finish, SetSpec, SetVM, SpawnFollowUp, VMPhase, finish
from cluster_manager.store import queries, schema, transactions
from cluster_manager.store import tasks as of_tasks
from cluster_manager.store.database import Database, PostgreSQL
from cluster_manager.store.store import Store
from cluster_manager.store.tasks import TaskNote
from ebbtide.deflation.allocations import Priority
from ebbtide.matcher.match.tasks import Task, TaskOrder
from ebbtide.messages.common import Vector
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import StartRequest
from ebbtide.messages.vms import VMSpec
from tests.manager.databases import rows_of
from tests.manager.plan_events import happen

SIZE = Vector(cpu_cores=1.0, memory_mib=800.0)
ANY_PLAN: dict[str, Any] = dict.fromkeys(("kind", "state", "vm", "host", "since"))
ANY_EVENT: dict[str, Any] = dict.fromkeys(("kind", "vm", "host", "since", "since_id"))
ANY_VM: dict[str, Any] = dict.fromkeys(("host", "phases", "prefix"))


def _columns(connection: Connection, table: str) -> list[Any]:
    return list(inspect(connection).get_columns(table))


async def test_the_migrations_make_the_tables_that_the_code_uses(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()

    async def look(connection: AsyncConnection) -> None:
        for table in schema.metadata.sorted_tables:
            columns = await connection.run_sync(_columns, table.name)
            keys = {column.name for column in table.primary_key}
            made = {(row["name"], not row["nullable"] or row["name"] in keys) for row in columns}
            assert made == {(column.name, not column.nullable) for column in table.columns}, table.name

    await store._write(look)
    await store.close()
    assert rows_of(database, "SELECT max(number) FROM migrations") == [(len(schema.MIGRATIONS),)]


async def test_what_is_committed_is_on_the_disk(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()
    durable: tuple[Any, ...]
    if isinstance(database, PostgreSQL):
        rows_of(
            database,
            f'ALTER ROLE CURRENT_USER IN DATABASE "{rows_of(database, "SELECT current_database()")[0][0]}"'
            " SET synchronous_commit = off",
        )
        await store.close()
        store = Store(database, time.time)
        await store.open()
        query, durable = "SHOW synchronous_commit", ("on",)
    else:
        query, durable = "PRAGMA synchronous", (2,)
        assert rows_of(database, "PRAGMA journal_mode") == [("wal",)]

    async def look(connection: AsyncConnection) -> tuple[Any, ...]:
        return tuple((await connection.execute(text(query))).one())

    assert await store._write(look) == durable
    await store.close()


async def test_the_epoch_rises_with_each_opening_and_every_term_is_on_record(database: Database) -> None:
    for expected in (1, 2, 3):
        store = Store(database, lambda: 7.0)
        assert await store.open(f"http://manager-{expected}") == expected
        await store.close()
    rows = rows_of(database, "SELECT epoch, url, begun_at FROM terms ORDER BY epoch")
    assert rows == [(1, "http://manager-1", 7.0), (2, "http://manager-2", 7.0), (3, "http://manager-3", 7.0)]


async def test_who_has_an_old_epoch_can_write_nothing_and_hears_of_it(database: Database) -> None:
    said: list[str] = []
    old = Store(database, time.time, said.append)
    await old.open()
    await happen(old, "placed", "by the old leader, in its time")
    new = Store(database, time.time)
    await new.open()
    with pytest.raises(LostLeadership, match="epoch 2 leads; this one had 1"):
        await happen(old, "lost", "too late")
    assert said == ["the manager with epoch 2 leads; this one had 1"]
    assert [row.kind for row in await new.events(10)] == ["placed"]
    await old.close()
    with pytest.raises(LostLeadership):
        await old.vms()
    await new.close()


async def _create(store: Store, request_id: str, host: str, spec: VMSpec) -> None:
    done = Finish(state=OperationState.DONE, sentence="placed")
    name = spec.name
    state = PlacementPlan(id=f"create-{request_id}", request_id=request_id, instruction=done, vm=name, spec=spec)
    await store.add_plan(state, request_id)
    await store.save_step(state, [SetVM(name, VMPhase.RUNNING, host, "")])


async def test_a_plan_whose_vm_is_gone_writes_nothing_on_a_new_vm_of_its_name(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()
    first, second = VMSpec(name="low", nominal=SIZE), VMSpec(name="low", nominal=SIZE, priority=Priority.FIXED)
    await _create(store, "c1", "host-a", first)
    old = start_stop("stop-low", "s1", "low", "host-a", 1.0)
    await store.add_plan(old, "stop")
    assert [row.phase for row in await store.vms("low")] == [VMPhase.STOPPING]
    await store.save_step(old, [SetVM("low", VMPhase.RUNNING, "host-a", "its own row")])
    assert [(row.host, row.sentence) for row in await store.vms("low")] == [("host-a", "its own row")]
    await _create(store, "c2", "host-b", second)
    await store.save_step(old, [SetVM("low", VMPhase.RUNNING, "host-a", "too late"), SetSpec("low", first)])
    assert [(row.host, row.spec, row.sentence) for row in await store.vms("low")] == [("host-b", second, "")]
    await store.close()


async def test_a_store_of_a_newer_version_is_left_alone(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()
    await store.close()
    rows_of(database, "INSERT INTO migrations (number) VALUES (99)")
    store = Store(database, time.time)
    with pytest.raises(StoreError, match="version 99"):
        await store.open()
    await store.close()
    assert rows_of(database, "SELECT value FROM counters") == [(1,)]


async def test_a_store_of_version_1_is_migrated_with_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE migrations (number INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO migrations (number) VALUES (1)")
        for statement in schema.MIGRATIONS[0]:
            connection.execute(statement.format_map(schema.SPELLINGS["sqlite"]))
        connection.execute("UPDATE counters SET value = 41")
        for name, phase in (("web", "running"), ("gone", "ended")):
            spec = f'{{"name":"{name}","priority":"fixed","nominal":{{"cpu_cores":1,"memory_mib":512}}}}'
            connection.execute(
                "INSERT INTO vms (name, host, phase, spec, sentence, owes_removal, request_id, generation, "
                "deleted_by_owner) VALUES (?, 'host-a', ?, ?, 'runs', 0, 'r', 3, 0)",
                (name, phase, spec),
            )
    store = Store(path, time.time)
    assert await store.open() == 42
    assert [(row.name, row.phase, row.generation) for row in await store.vms()] == [("web", VMPhase.RUNNING, 3)]
    await store.close()
    (ended_at,), (living,) = rows_of(path, "SELECT ended_at FROM vms ORDER BY name")
    assert abs(ended_at - time.time()) < 60
    assert living is None


async def test_what_lists_are_filtered_by_is_read_out_of_an_older_store(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
    old = Store(database, time.time)
    await old.open()
    await old.close()
    monkeypatch.undo()
    stop = start_stop("stop-web", "s1", "web", "host-a", 1.0)
    ended = finish(stop, OperationState.FAILED, "it said no").state
    spec = VMSpec(name="web", nominal=SIZE, priority=Priority.FIXED)
    for number, state in enumerate((stop, ended.model_copy(update={"id": "stop-2", "request_id": "s2", "vm": None}))):
        body = state.model_dump_json().replace("'", "''")
        rows_of(
            database,
            "INSERT INTO plans (id, request_id, fingerprint, state, finished, internal, number, started_at, updated_at)"
            f" VALUES ('{state.id}', '{state.request_id}', '', '{body}', {number}, 0, {number}, 1, 1)",
        )
    rows_of(
        database,
        "INSERT INTO vms (name, host, phase, spec, sentence, owes_removal, request_id, generation, deleted_by_owner)"
        f" VALUES ('web', 'host-a', 'running', '{spec.model_dump_json()}', '', 0, 'c1', 0, 0)",
    )
    store = Store(database, time.time)
    await store.open()
    await store.close()
    rows = rows_of(database, "SELECT kind, vm, host, outcome FROM plans ORDER BY number")
    assert rows == [("stop", "web", "host-a", None), ("stop", None, "host-a", "failed")]
    assert rows_of(database, "SELECT priority FROM vms") == [("fixed",)]


@pytest.mark.parametrize(
    ("query", "index"),
    [
        (queries.plans(9, None, **{**ANY_PLAN, "vm": "web"}), "plans_vm"),
        (queries.plans(9, 7, **{**ANY_PLAN, "host": "host-a"}), "plans_host"),
        (queries.plans(9, None, **{**ANY_PLAN, "kind": "stop"}), "plans_kind"),
        (queries.plans(9, None, **{**ANY_PLAN, "state": OperationState.FAILED}), "plans_outcome"),
        (queries.plans(9, None, **{**ANY_PLAN, "state": OperationState.RUNNING}), "plans_unfinished"),
        (queries.plans(9, None, **{**ANY_PLAN, "since": 1e9}), "plans_started"),
        (queries.plans(9, None, **{**ANY_PLAN, "since": 1e9, "kind": "stop"}), "plans_kind"),
        (queries.events(9, None, **{**ANY_EVENT, "since": 1e9}), "events_at"),
        (queries.events(9, 7, **{**ANY_EVENT, "kind": "lost"}), "events_kind"),
        (queries.events(9, 7, **{**ANY_EVENT, "kind": "lost", "since": 1e9}), "events_kind"),
        (queries.events_after(7, 9, kind="lost"), "events_kind"),
        (queries.vms(9, None, **{**ANY_VM, "host": "host-a"}), "vms_host"),
        (queries.vms(9, None, **ANY_VM), "vms_living"),
    ],
)
async def test_lists_are_found_by_an_index(tmp_path: Path, query: Any, index: str) -> None:
    store = Store(tmp_path / "db", time.time)
    await store.open()
    compiled = query.compile(store._engine.sync_engine, compile_kwargs={"literal_binds": True})
    await store.close()
    told = " ".join(row[3] for row in rows_of(tmp_path / "db", f"EXPLAIN QUERY PLAN {compiled}"))
    assert f"INDEX {index}" in told, told


async def test_a_list_since_a_moment_has_what_a_manager_wrote_whose_clock_was_ahead(database: Database) -> None:
    now = 0.0
    store = Store(database, lambda: now)
    await store.open()
    for at in (0.0, 1000.0, 1050.0, 1020.0, 1100.0):
        now = at
        await happen(store, "waiting")
        await store.add_plan(start_stop(f"stop-{at}", f"s-{at}", "web", "host-a", at), "stop")
    events = await store.rows(queries.events(9, None, **{**ANY_EVENT, "since": 1040.0}))
    assert [row.at for row in events] == [1100.0, 1050.0]
    assert [row.at for row in await store.rows(queries.events(9, None, **{**ANY_EVENT, "since": 0.0}))][-1] == 0.0
    plans = await store.rows(queries.plans(9, None, **{**ANY_PLAN, "since": 1040.0}))
    assert [row.started_at for row in plans] == [1100.0, 1050.0]
    assert len(await store.rows(queries.plans(9, None, **{**ANY_PLAN, "since": 0.0}))) == 5
    await store.close()


@pytest.mark.parametrize("off_by", [-30 * DAY_S, 30 * DAY_S])
async def test_a_list_since_a_moment_is_whole_where_one_managers_clock_was_far_off(
    database: Database, off_by: float
) -> None:
    now = 0.0
    store = Store(database, lambda: now)
    await store.open()
    days = [day * DAY_S for day in (60.0, 80.0, 90.0)]
    for at in (*days, 100 * DAY_S + off_by, 100 * DAY_S):
        now = at
        await happen(store, "waiting")
        await store.add_plan(start_stop(f"stop-{at}", f"s-{at}", "web", "host-a", at), "stop")
    for since in (79 * DAY_S, 71.5 * DAY_S, 101 * DAY_S):
        wanted = [at for at in (100 * DAY_S, 100 * DAY_S + off_by, *days[::-1]) if at >= since]
        events = await store.rows(queries.events(9, None, **{**ANY_EVENT, "since": since}))
        assert [row.at for row in events] == wanted
        plans = await store.rows(queries.plans(9, None, **{**ANY_PLAN, "since": since}))
        assert [row.started_at for row in plans] == wanted
    await store.close()


async def test_a_write_does_not_wait_for_the_ends_of_many_reads(tmp_path: Path) -> None:
    store, released = Store(tmp_path / "db", time.time), threading.Event()
    event.listen(
        store._engine.sync_engine, "connect", lambda made, _: made.create_function("hold", 0, lambda: released.wait(60))
    )
    await store.open()
    reads = [asyncio.create_task(store.rows(text("SELECT hold()")), name="read") for _ in range(20)]
    try:
        await asyncio.sleep(0)  # all have asked for a connection, if they may
        await happen(store, "waiting")
        assert not any(read.done() for read in reads)
    finally:
        released.set()
        assert [row for rows in await asyncio.gather(*reads) for row in rows] == [(1,)] * 20
        await store.close()


async def test_a_migration_that_fails_half_way_leaves_the_step_before(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (*schema.MIGRATIONS, ("CREATE TABLE half (number INTEGER)", "CREATE TABLE half (number INTEGER)"))
    monkeypatch.setattr(schema, "MIGRATIONS", broken)
    store = Store(database, time.time)
    with pytest.raises(Exception, match="half"):
        await store.open()
    await store.close()
    assert rows_of(database, "SELECT max(number) FROM migrations") == [(len(broken) - 1,)]
    monkeypatch.undo()
    store = Store(database, time.time)
    assert await store.open() == 1
    await store.close()


async def test_who_led_before_writes_nothing_into_a_store_that_is_being_migrated(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps it stood still, and its clock with it: neither the lock nor its lease says that it leads no more."""
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:-1])
    old, new = Store(database, time.time), Store(database, time.time)
    assert await old.open() == 1
    monkeypatch.undo()
    during: list[int] = []

    def migrate(connection: Any) -> bool:
        during.append(connection.scalar(text("SELECT value FROM counters WHERE name = 'epoch'")))
        return real(connection)

    real = schema.migrate
    monkeypatch.setattr(schema, "migrate", migrate)
    assert await new.open() == 2
    assert during == [2, 2]
    with pytest.raises(LostLeadership):
        await happen(old, "undone")
    await old.close()
    await new.close()


async def test_a_migration_may_take_longer_than_a_write(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "WRITE_S", 0.0)
    store = Store(database, time.time)
    with pytest.raises(StoreError, match="no answer within 0 s"):
        await store.open()
    await store.close()
    assert rows_of(database, "SELECT max(number) FROM migrations") == [(len(schema.MIGRATIONS),)]
    monkeypatch.undo()
    store = Store(database, time.time)
    assert await store.open() == 1
    await store.close()


async def test_core_changes_are_taken_once_and_any_text_of_a_host_is_storable(database: Database) -> None:
    def change(sequence: int) -> CoreChange:
        return CoreChange(
            sequence=sequence, machine="a", host="h", at=1.0, cores_before=2, cores_after=1, cause="bad \x00 text"
        )

    store = Store(database, time.time)
    await store.open()
    await _create(store, "c", "h", VMSpec(name="a", nominal=SIZE))
    assert (await store.add_core_changes("h", [change(1), change(2**40)]))[0] == 2**40
    assert (await store.add_core_changes("h", [change(2), change(2**40)]))[0] == 2**40
    assert (await store.add_core_changes("other", []))[0] == 0
    rows = await store.core_changes_of("h", 0)
    assert [row.sequence for row in rows] == [1, 2, 2**40]
    assert {row.cause.replace("\x00", "\N{REPLACEMENT CHARACTER}") for row in rows} == {
        "bad \N{REPLACEMENT CHARACTER} text"
    }
    await store.close()


async def test_the_highest_sequence_of_each_host_is_found_without_reading_all_core_changes(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()
    assert await store.acknowledged() == {}
    rows = [
        {"host": host, "sequence": number, "machine": "m", "at": 0.0, "cores_before": 1.0, "cores_after": 2.0}
        | {"cause": "x", "variable": 1, "by_owner": 0}
        for host, last in (("a", 3), ("b", 700), ("c", 1))
        for number in range(1, last + 1)
    ]
    await store._write(lambda connection: connection.execute(insert(schema.core_changes), rows))
    assert await store.acknowledged() == {"a": 3, "b": 700, "c": 1}
    compiled = queries.highest_sequences().compile(store._engine.sync_engine, compile_kwargs={"literal_binds": True})
    await store.close()
    explain = "EXPLAIN" if isinstance(database, PostgreSQL) else "EXPLAIN QUERY PLAN"
    told = " ".join(str(row[-1]) for row in rows_of(database, f"{explain} {compiled}"))
    assert "Seq Scan on core_changes" not in told, told
    assert "SCAN core_changes" not in told, told


async def test_a_round_of_many_tasks_is_written_in_pieces_and_as_a_whole(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_tasks, "AT_ONCE", 3)
    store = Store(database, time.time)
    await store.open()
    made = [Task(TaskOrder(f"t-{number}", ("true",)), "key", 0.0) for number in range(7)]
    for task in made:
        await store.add_task(task, task.name, "{}", TaskNote("task-submitted", None, task.name))
    sizes: list[int] = []

    def count(_0: Any, _1: Any, _2: str, parameters: Any, _3: Any, many: bool) -> None:
        sizes.extend([len(parameters)] if many else [])

    event.listen(store._engine.sync_engine, "before_cursor_execute", count)
    notes = [TaskNote("task-started", "m", task.name) for task in made]
    await store.save_tasks([replace(task, machine="m-1") for task in made], notes)
    assert max(sizes) == 3
    assert [found.task.machine for found in await store.unfinished_tasks()] == ["m-1"] * 7
    columns = store._columns
    monkeypatch.setattr(store, "_columns", lambda task: columns(task) if task.name != "t-6" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await store.save_tasks([replace(task, machine="m-2") for task in made], notes)
    assert [found.task.machine for found in await store.unfinished_tasks()] == ["m-1"] * 7
    await store.close()
    assert rows_of(database, "SELECT count(*) FROM events WHERE kind = 'task-started'") == [(7,)]


async def test_names_sort_alike_on_every_store(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()
    for name in ("b", "B", "a-1", "a1", "_", "é"):
        await happen(store, "waiting", vm=name)

    async def look(connection: AsyncConnection) -> list[str]:
        query = schema.events.select().order_by(schema.events.c.vm)
        return [row.vm for row in (await connection.execute(query)).all()]

    assert await store._write(look) == ["B", "_", "a-1", "a1", "b", "é"]
    await store.close()


async def test_what_is_no_database_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "db").write_text("this is no database, " * 100)
    for path in (tmp_path / "db", tmp_path / "missing" / "db"):
        store = Store(path, time.time)
        with pytest.raises(StoreError, match="cannot use the database"):
            await store.open()
        await store.close()


async def test_a_vm_is_said_to_run_by_the_plan_that_hands_the_rest_over_in_whatever_order(database: Database) -> None:
    """Else it would be claimed for ever by what only clears up."""
    store = Store(database, time.time)
    await store.open()
    await _create(store, "c1", "host-a", VMSpec(name="low", nominal=SIZE))
    spec = VMSpec(name="low", nominal=SIZE)
    plan = start_start("start-low", StartRequest(request_id="s1"), spec, "host-a")
    await store.add_plan(plan, "start")
    rest = start_start("start-low.rest", StartRequest(request_id="s1.rest"), spec, "host-a")
    await store.save_step(plan, [SpawnFollowUp(rest), SetVM("low", VMPhase.RUNNING, "host-a", "it stays")])
    assert [(row.phase, row.sentence) for row in await store.vms("low")] == [(VMPhase.RUNNING, "it stays")]
    await store.close()
