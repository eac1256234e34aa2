"""Stores of an earlier version: what they hold is read after an upgrade."""

from __future__ import annotations

import json
import time
from typing import Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.plans.plans import VMPhase
from cluster_manager.store import schema
from cluster_manager.store.database import Database
from cluster_manager.store.store import Store
from cluster_manager.store.tasks import TaskNote
from ebbtide.matcher.match.tasks import Task, TaskOrder
from ebbtide.messages.vms import OnPreemption
from tests.manager.databases import rows_of
from tests.manager.plan_events import record, report_of


async def execute(database: Database, *statements: str) -> None:
    """Change a store past the manager."""
    store = Store(database, time.time)
    await store.open()

    async def work(connection: AsyncConnection) -> None:
        for statement in statements:
            await connection.execute(text(statement))

    await store._write(work)
    await store.close()


#: What the step for labels and those after it have added.
WITHOUT_LABELS: Final = (
    "ALTER TABLE vms DROP COLUMN preemption_unsure",
    "ALTER TABLE vms DROP COLUMN acquired",
    "DROP INDEX plans_started",
    "DROP INDEX events_kind",
    "ALTER TABLE vms DROP COLUMN labels",
    "ALTER TABLE hosts DROP COLUMN labels",
)
#: What the step for preempted VMs and those after it have added.
WITHOUT_PREEMPTED: Final = (
    *WITHOUT_LABELS,
    "DROP TABLE history",
    "DROP TABLE history_homes",
    "DROP INDEX events_host",
    "DROP INDEX vms_preempted",
    "ALTER TABLE vms DROP COLUMN preempted_at",
    "ALTER TABLE vms DROP COLUMN preemption_reason",
)


def before(step: int) -> str:
    return f"DELETE FROM migrations WHERE number >= {step}"


async def test_a_vm_of_an_earlier_version_is_stopped_when_it_is_preempted(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()
    await record(store, "old", "host-a")
    await store.close()
    step = next(n for n, statements in enumerate(schema.MIGRATIONS, 1) if "preempted_at" in statements[0])
    spec = json.dumps({"name": "old", "nominal": {"cpu_cores": 1.0, "memory_mib": 512.0}})
    await execute(database, f"UPDATE vms SET spec = '{spec}'", *WITHOUT_PREEMPTED, before(step))
    store = Store(database, time.time)
    await store.open()
    (row,) = await store.vms("old")
    assert (row.phase, row.preempted_at, row.spec.on_preemption) == (VMPhase.RUNNING, None, OnPreemption.STOP)
    assert (await store.sold("host-a"))["old"] == row.spec
    await store.close()


async def test_tasks_keep_the_aversion_that_an_earlier_version_called_dislike(database: Database) -> None:
    command = ("print", '"dislike":')
    task = Task(TaskOrder("t", command, 1, preemption_aversion=0.5), "key", 1.0)
    fingerprint = '{"name":"t","preemption_aversion":0.5}'
    store = Store(database, time.time)
    await store.open()
    await store.add_task(task, "r", fingerprint, TaskNote("task-submitted", None, "t"))
    await store.close()
    earlier = [f"{column} = replace({column}, 'preemption_aversion', 'dislike')" for column in ("state", "fingerprint")]
    step = next(n for n, statements in enumerate(schema.MIGRATIONS, 1) if "dislike" in statements[0])
    await execute(database, f"UPDATE tasks SET {', '.join(earlier)}", *WITHOUT_PREEMPTED, before(step))
    assert "preemption_aversion" not in str(rows_of(database, "SELECT state, fingerprint FROM tasks"))
    store = Store(database, time.time)
    await store.open()
    stored = await store.task(name="t")
    assert stored is not None
    assert (stored.task, stored.fingerprint) == (task, fingerprint)
    await store.close()


async def test_vms_and_hosts_of_an_earlier_version_have_no_labels(database: Database) -> None:
    store = Store(database, time.time)
    await store.open()
    await record(store, "old", "host-a")
    await store.save_hosts([report_of("host-a")])
    await store.close()
    step = next(n for n, statements in enumerate(schema.MIGRATIONS, 1) if "labels" in statements[0])
    await execute(database, *WITHOUT_LABELS, before(step))
    store = Store(database, time.time)
    await store.open()
    (row,) = await store.vms("old")
    (host,) = await store.hosts()
    assert (row.labels, host.labels) == ({}, {})
    assert await store.label_vm(row, {"env": "prod"})
    assert not await store.label_vm(row, {"env": "test"})
    assert (await store.vms("old"))[0].labels == {"env": "prod"}
    await store.close()


async def test_the_machines_that_an_acquirer_of_an_earlier_version_has_opened_are_its_own(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = next(n for n, statements in enumerate(schema.MIGRATIONS) if "COLUMN acquired" in statements[0])
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:step])
    old = Store(database, time.time)
    await old.open()
    await old.close()
    monkeypatch.undo()
    spec = {"nominal": {"cpu_cores": 1.0, "memory_mib": 512.0}}
    rows = {
        # It has moved since.
        "harvest-1": ("harvest", "move-1"),
        # A client's.
        "harvest-2": ("harvest", "by-hand"),
        # The plan that made it is forgotten.
        "harvest-3": ("harvest", "acquirer-3-1-1"),
        # The acquirer had one of this name before.
        "harvest-4": ("harvest", "by-hand-4"),
        "web": ("deflatable", "acquirer-3-2-2"),
    }
    for name, (priority, request) in rows.items():
        body = json.dumps({"name": name, **spec})
        rows_of(
            database,
            "INSERT INTO vms (name, host, phase, spec, sentence, owes_removal, request_id, generation, "
            f"deleted_by_owner, priority) VALUES ('{name}', 'host-a', 'running', '{body}', '', 0, '{request}', 0, 0, "
            f"'{priority}')",
        )
    plans = [
        ("harvest-1", "create", "acquirer-2-1-1"),
        ("harvest-1", "migrate", "move-1"),
        ("harvest-2", "create", "by-hand"),
        ("harvest-4", "create", "acquirer-2-4-4"),
        ("harvest-4", "create", "by-hand-4"),
    ]
    for number, (name, kind, request) in enumerate(plans):
        rows_of(
            database,
            "INSERT INTO plans (id, request_id, fingerprint, state, finished, internal, number, started_at, "
            f"updated_at, vm, kind) VALUES ('{request}', '{request}', '', '', 1, 0, {number}, 1, 1, '{name}', "
            f"'{kind}')",
        )
    store = Store(database, time.time)
    await store.open()
    assert [row.name for row in await store.vms() if row.acquired] == ["harvest-1", "harvest-3"]
    await store.close()
