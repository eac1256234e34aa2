"""The tables of the manager's store, and the numbered migrations that make them.

Bodies that are only ever read back whole (plans, reports) are JSON in a text column; what is searched has columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Column, Connection, Float, ForeignKey, Integer, MetaData, String, Table, Text, text

from cluster_manager.errors import StoreError

metadata: Final = MetaData()

#: One number by name; ``epoch``: how often a manager has started on this store.
counters: Final = Table(
    "counters", metadata, Column("name", String, primary_key=True), Column("value", Integer, nullable=False)
)

hosts: Final = Table(
    "hosts",
    metadata,
    Column("id", String, primary_key=True),
    Column("seen_at", Float, nullable=False),
    Column("report", Text, nullable=False),
    # 1: its VMs may be smaller than they need be, and no plan is at work on it.
    Column("owes_reinflation", Integer, nullable=False),
)

#: Every VM that was ever asked for. A name is taken while a row that has not ended holds it.
vms: Final = Table(
    "vms",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False),
    Column("host", String, nullable=True),
    Column("phase", String, nullable=False),
    Column("spec", Text, nullable=False),
    Column("sentence", Text, nullable=False),
    # 1: it may still be on the host and is to be removed there.
    Column("owes_removal", Integer, nullable=False),
    # The request that deletes it, or the last one that placed it.
    Column("request_id", String, nullable=False),
    # The highest generation of a target that was passed on.
    Column("generation", Integer, nullable=False),
    Column("deleted_by_owner", Integer, nullable=False),
)

plans: Final = Table(
    "plans",
    metadata,
    Column("id", String, primary_key=True),
    Column("request_id", String, nullable=False, unique=True),
    # The request's kind and body: the same request id with another one is refused.
    Column("fingerprint", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("finished", Integer, nullable=False),
    # 1: the manager's own, not shown as anybody's operation.
    Column("internal", Integer, nullable=False),
    Column("number", Integer, nullable=False, unique=True),
    Column("started_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

events: Final = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("plan", String, ForeignKey("plans.id"), nullable=True),
    Column("vm", String, nullable=True),
    Column("host", String, nullable=True),
    Column("kind", String, nullable=False),
    Column("sentence", Text, nullable=False),
)

core_changes: Final = Table(
    "core_changes",
    metadata,
    Column("host", String, primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("machine", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("cores_before", Float, nullable=False),
    Column("cores_after", Float, nullable=False),
    Column("cause", Text, nullable=False),
    # 1: cores of this machine can be taken away (it is not a fixed VM).
    Column("variable", Integer, nullable=False),
    # 1: its owner ended it, so nobody took these cores away.
    Column("by_owner", Integer, nullable=False),
)

#: Step n brings a store from version n to n + 1. A step that was released is never edited; the next one corrects it.
MIGRATIONS: Final[tuple[Sequence[str], ...]] = (
    (
        "CREATE TABLE counters (name VARCHAR PRIMARY KEY, value INTEGER NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('epoch', 0)",
        "CREATE TABLE hosts (id VARCHAR PRIMARY KEY, seen_at FLOAT NOT NULL, report TEXT NOT NULL, "
        "owes_reinflation INTEGER NOT NULL)",
        "CREATE TABLE vms (id INTEGER PRIMARY KEY, name VARCHAR NOT NULL, host VARCHAR, phase VARCHAR NOT NULL, "
        "spec TEXT NOT NULL, sentence TEXT NOT NULL, owes_removal INTEGER NOT NULL, request_id VARCHAR NOT NULL, "
        "generation INTEGER NOT NULL, deleted_by_owner INTEGER NOT NULL)",
        "CREATE UNIQUE INDEX vms_living ON vms (name) WHERE phase <> 'ended'",
        "CREATE TABLE plans (id VARCHAR PRIMARY KEY, request_id VARCHAR NOT NULL UNIQUE, fingerprint TEXT NOT NULL, "
        "state TEXT NOT NULL, finished INTEGER NOT NULL, internal INTEGER NOT NULL, number INTEGER NOT NULL UNIQUE, "
        "started_at FLOAT NOT NULL, updated_at FLOAT NOT NULL)",
        "CREATE INDEX plans_unfinished ON plans (number) WHERE finished = 0",
        "CREATE TABLE events (id INTEGER PRIMARY KEY, at FLOAT NOT NULL, "
        "plan VARCHAR REFERENCES plans (id), vm VARCHAR, host VARCHAR, "
        "kind VARCHAR NOT NULL, sentence TEXT NOT NULL)",
        "CREATE TABLE core_changes (host VARCHAR NOT NULL, sequence INTEGER NOT NULL, machine VARCHAR NOT NULL, "
        "at FLOAT NOT NULL, cores_before FLOAT NOT NULL, cores_after FLOAT NOT NULL, cause TEXT NOT NULL, "
        "variable INTEGER NOT NULL, by_owner INTEGER NOT NULL, PRIMARY KEY (host, sequence))",
        "CREATE INDEX core_changes_machine ON core_changes (machine, at)",
        "CREATE INDEX core_changes_at ON core_changes (at)",
    ),
)


def migrate(connection: Connection) -> None:
    """Bring a store to the present version, each step in the caller's transaction.

    :raises StoreError: the store was made by a newer version.
    """
    connection.execute(text("CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY)"))
    version = connection.execute(text("SELECT coalesce(max(number), 0) FROM migrations")).scalar_one()
    if version > len(MIGRATIONS):
        raise StoreError(f"the store has version {version}, but this manager knows only {len(MIGRATIONS)}")
    for number, statements in enumerate(MIGRATIONS[version:], start=version + 1):
        for statement in statements:
            connection.execute(text(statement))
        connection.execute(text("INSERT INTO migrations (number) VALUES (:number)"), {"number": number})
