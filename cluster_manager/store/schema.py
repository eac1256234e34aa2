"""The tables of the manager's store, and the numbered migrations that make them.

Bodies that are only ever read back whole (plans, reports) are JSON in a text column; what is searched has columns.
The same steps make a SQLite and a PostgreSQL store; what the two spell differently stands in `SPELLINGS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    bindparam,
    inspect,
    text,
)
from sqlalchemy import String as SQLString
from sqlalchemy import Text as SQLText
from sqlalchemy.types import TypeDecorator

from cluster_manager.errors import StoreError

metadata: Final = MetaData()


class _Storable(TypeDecorator[str]):
    """Text that PostgreSQL takes as well: it knows no NUL character, and hosts and clients may write one."""

    impl: Any = SQLText
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return value.replace("\x00", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value


class String(_Storable):
    """A name: compared byte by byte, so that both kinds of stores sort alike."""

    impl = SQLString
    cache_ok = True


class Text(_Storable):
    """A sentence or a body."""

    cache_ok = True


#: One number by name; ``epoch``: how often a manager has begun to lead on this store.
counters: Final = Table(
    "counters", metadata, Column("name", String, primary_key=True), Column("value", BigInteger, nullable=False)
)

#: Who led: one row for each epoch.
terms: Final = Table(
    "terms",
    metadata,
    Column("epoch", BigInteger, primary_key=True),
    # Where its clients reach it; null where it does not know.
    Column("url", Text, nullable=True),
    Column("begun_at", Float, nullable=False),
)

hosts: Final = Table(
    "hosts",
    metadata,
    Column("id", String, primary_key=True),
    Column("seen_at", Float, nullable=False),
    Column("report", Text, nullable=False),
    # 1: its VMs may be smaller than they need be, and no plan is at work on it.
    Column("owes_reinflation", Integer, nullable=False),
    # A JSON object.
    Column("labels", Text, nullable=False, server_default="{}"),
)

#: Every VM that was ever asked for. A name is taken while a row that has not ended holds it.
vms: Final = Table(
    "vms",
    metadata,
    Column("id", BigInteger, primary_key=True),
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
    Column("generation", BigInteger, nullable=False),
    Column("deleted_by_owner", Integer, nullable=False),
    # When its phase became "ended", seconds since the epoch.
    Column("ended_at", Float, nullable=True),
    # That of its spec.
    Column("priority", String, nullable=False),
    # Since when it waits for room after a preemption, and why; null: it does not.
    Column("preempted_at", Float, nullable=True),
    Column("preemption_reason", String, nullable=True),
    # A JSON object.
    Column("labels", Text, nullable=False, server_default="{}"),
    # 1: the acquirer of this store's manager had it placed, and may have it deleted.
    Column("acquired", Integer, nullable=False, server_default="0"),
    # 1: its host has not said whether it was preempted.
    Column("preemption_unsure", Integer, nullable=False, server_default="0"),
)


def constant(value: str | int) -> Any:
    """Written into the statement, so that an index over a part of a table fits it."""
    return bindparam(None, value, literal_execute=True)


#: The rows that hold their VMs' names.
LIVING: Final[ColumnElement[bool]] = vms.c.phase != constant("ended")

plans: Final = Table(
    "plans",
    metadata,
    Column("id", String, primary_key=True),
    Column("request_id", String, nullable=False, unique=True),
    # The request's kind and body: the same request id with another one is refused.
    Column("fingerprint", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("finished", Integer, nullable=False),
    # 1: the manager's own, not shown as a client's operation.
    Column("internal", Integer, nullable=False),
    Column("number", BigInteger, nullable=False, unique=True),
    Column("started_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    # What its state says: of which kind it is, whose VM it is about, where it is, and how it ended (null: not yet).
    Column("kind", String, nullable=False),
    Column("vm", String, nullable=True),
    Column("host", String, nullable=True),
    Column("outcome", String, nullable=True),
)

events: Final = Table(
    "events",
    metadata,
    Column("id", BigInteger, primary_key=True),
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
    Column("sequence", BigInteger, primary_key=True),
    Column("machine", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("cores_before", Float, nullable=False),
    Column("cores_after", Float, nullable=False),
    Column("cause", Text, nullable=False),
    # 1: cores of this machine can be taken away (it is not a fixed VM).
    Column("variable", Integer, nullable=False),
    # 1: its owner ended it, so these cores were not taken away.
    Column("by_owner", Integer, nullable=False),
)

#: Long work that an engine runs. A name is taken until its row is pruned.
tasks: Final = Table(
    "tasks",
    metadata,
    Column("name", String, primary_key=True),
    Column("number", BigInteger, nullable=False, unique=True),
    Column("request_id", String, nullable=False, unique=True),
    # The request's body: the same request id with another one is refused.
    Column("fingerprint", Text, nullable=False),
    Column("phase", String, nullable=False),
    Column("machine", String, nullable=True),
    Column("state", Text, nullable=False),
    Column("finished", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

#: What was learned, as a JSON document by name.
knowledge: Final = Table(
    "knowledge",
    metadata,
    Column("name", String, primary_key=True),
    Column("saved_at", Float, nullable=False),
    Column("body", Text, nullable=False),
)

#: Figures of a host and its VMs over some steps in a row, packed (`cluster_manager.history.packs`).
history: Final = Table(
    "history",
    metadata,
    Column("id", BigInteger, primary_key=True),
    Column("host", String, nullable=False),
    Column("step_s", Integer, nullable=False),
    # Where the first step begins, seconds since the epoch.
    Column("at", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

#: On which hosts a VM has been, and when that was last known.
history_homes: Final = Table(
    "history_homes",
    metadata,
    Column("vm", String, primary_key=True),
    Column("host", String, primary_key=True),
    Column("seen_at", Float, nullable=False),
)

#: What a statement of a migration may name in braces, by dialect.
SPELLINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "sqlite": {
        "id": "INTEGER PRIMARY KEY",
        "name": "VARCHAR",
        "number": "INTEGER",
        "bytes": "BLOB",
        "now": "CAST(strftime('%s', 'now') AS REAL)",
        "plan_kind": "json_extract(state, '$.kind')",
        "plan_vm": "json_extract(state, '$.vm')",
        "plan_host": "json_extract(state, '$.host')",
        "plan_outcome": "json_extract(state, '$.instruction.state')",
        "vm_priority": "json_extract(spec, '$.priority')",
    },
    "postgresql": {
        "id": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
        "name": 'VARCHAR COLLATE "C"',
        "number": "BIGINT",
        "bytes": "BYTEA",
        "now": "extract(epoch FROM now())",
        "plan_kind": "state::json ->> 'kind'",
        "plan_vm": "state::json ->> 'vm'",
        "plan_host": "state::json ->> 'host'",
        "plan_outcome": "state::json #>> '{instruction,state}'",
        "vm_priority": "spec::json ->> 'priority'",
    },
}

#: Step n brings a store from version n to n + 1. A step that was released is never edited; the next one corrects it.
MIGRATIONS: Final[tuple[Sequence[str], ...]] = (
    (
        "CREATE TABLE counters (name {name} PRIMARY KEY, value {number} NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('epoch', 0)",
        "CREATE TABLE hosts (id {name} PRIMARY KEY, seen_at FLOAT NOT NULL, report TEXT NOT NULL, "
        "owes_reinflation INTEGER NOT NULL)",
        "CREATE TABLE vms (id {id}, name {name} NOT NULL, host {name}, phase {name} NOT NULL, "
        "spec TEXT NOT NULL, sentence TEXT NOT NULL, owes_removal INTEGER NOT NULL, request_id {name} NOT NULL, "
        "generation {number} NOT NULL, deleted_by_owner INTEGER NOT NULL)",
        "CREATE UNIQUE INDEX vms_living ON vms (name) WHERE phase <> 'ended'",
        "CREATE TABLE plans (id {name} PRIMARY KEY, request_id {name} NOT NULL UNIQUE, fingerprint TEXT NOT NULL, "
        "state TEXT NOT NULL, finished INTEGER NOT NULL, internal INTEGER NOT NULL, number {number} NOT NULL UNIQUE, "
        "started_at FLOAT NOT NULL, updated_at FLOAT NOT NULL)",
        "CREATE INDEX plans_unfinished ON plans (number) WHERE finished = 0",
        "CREATE TABLE events (id {id}, at FLOAT NOT NULL, "
        "plan {name} REFERENCES plans (id), vm {name}, host {name}, "
        "kind {name} NOT NULL, sentence TEXT NOT NULL)",
        "CREATE TABLE core_changes (host {name} NOT NULL, sequence {number} NOT NULL, machine {name} NOT NULL, "
        "at FLOAT NOT NULL, cores_before FLOAT NOT NULL, cores_after FLOAT NOT NULL, cause TEXT NOT NULL, "
        "variable INTEGER NOT NULL, by_owner INTEGER NOT NULL, PRIMARY KEY (host, sequence))",
        "CREATE INDEX core_changes_machine ON core_changes (machine, at)",
        "CREATE INDEX core_changes_at ON core_changes (at)",
    ),
    # Who leads; when a VM ended; and what finds the rows of one VM, of one plan, and those to be pruned.
    (
        "CREATE TABLE terms (epoch {number} PRIMARY KEY, url TEXT, begun_at FLOAT NOT NULL)",
        "ALTER TABLE vms ADD COLUMN ended_at FLOAT",
        "UPDATE vms SET ended_at = {now} WHERE phase = 'ended'",
        "CREATE INDEX vms_name ON vms (name)",
        "CREATE INDEX vms_ended ON vms (ended_at) WHERE phase = 'ended'",
        "CREATE INDEX vms_owed ON vms (name) WHERE owes_removal = 1",
        "CREATE INDEX plans_updated ON plans (updated_at)",
        "CREATE INDEX events_plan ON events (plan)",
        "CREATE INDEX events_vm ON events (vm)",
        "CREATE INDEX events_at ON events (at)",
    ),
    # What lists are filtered by, out of the bodies.
    (
        "ALTER TABLE plans ADD COLUMN kind {name} NOT NULL DEFAULT ''",
        "ALTER TABLE plans ADD COLUMN vm {name}",
        "ALTER TABLE plans ADD COLUMN host {name}",
        "ALTER TABLE plans ADD COLUMN outcome {name}",
        "UPDATE plans SET kind = {plan_kind}, vm = {plan_vm}, host = {plan_host}, outcome = {plan_outcome}",
        "ALTER TABLE vms ADD COLUMN priority {name} NOT NULL DEFAULT ''",
        "UPDATE vms SET priority = coalesce({vm_priority}, 'deflatable')",
        "CREATE INDEX plans_kind ON plans (kind, number)",
        "CREATE INDEX plans_vm ON plans (vm, number)",
        "CREATE INDEX plans_host ON plans (host, number)",
        "CREATE INDEX plans_outcome ON plans (outcome, number)",
        "CREATE INDEX vms_host ON vms (host, name) WHERE phase <> 'ended'",
        "CREATE INDEX vms_priority ON vms (priority, name) WHERE phase <> 'ended'",
    ),
    # Tasks that an engine runs.
    (
        "CREATE TABLE tasks (name {name} PRIMARY KEY, number {number} NOT NULL UNIQUE, "
        "request_id {name} NOT NULL UNIQUE, fingerprint TEXT NOT NULL, phase {name} NOT NULL, machine {name}, "
        "state TEXT NOT NULL, finished INTEGER NOT NULL, submitted_at FLOAT NOT NULL, updated_at FLOAT NOT NULL)",
        "CREATE INDEX tasks_unfinished ON tasks (number) WHERE finished = 0",
        "CREATE INDEX tasks_phase ON tasks (phase, number)",
        "CREATE INDEX tasks_machine ON tasks (machine, number)",
        "CREATE INDEX tasks_updated ON tasks (updated_at)",
    ),
    # What was learned of the machines.
    ("CREATE TABLE knowledge (name {name} PRIMARY KEY, saved_at FLOAT NOT NULL, body TEXT NOT NULL)",),
    # A task's aversion to preemption has another name in its body, and in that of its request.
    (
        """UPDATE tasks SET state = replace(state, '"dislike":', '"preemption_aversion":'), """
        """fingerprint = replace(fingerprint, '"dislike":', '"preemption_aversion":')""",
    ),
    # Which VMs wait for room after a preemption.
    (
        "ALTER TABLE vms ADD COLUMN preempted_at FLOAT",
        "ALTER TABLE vms ADD COLUMN preemption_reason {name}",
        "CREATE INDEX vms_preempted ON vms (host, preempted_at) WHERE phase = 'preempted'",
    ),
    # How hosts and VMs were; and what finds the events of a host.
    (
        "CREATE TABLE history (id {id}, host {name} NOT NULL, step_s INTEGER NOT NULL, at {number} NOT NULL, "
        "body {bytes} NOT NULL)",
        "CREATE INDEX history_host ON history (host, step_s, at)",
        "CREATE INDEX history_at ON history (step_s, at)",
        "CREATE TABLE history_homes (vm {name} NOT NULL, host {name} NOT NULL, seen_at FLOAT NOT NULL, "
        "PRIMARY KEY (vm, host))",
        "CREATE INDEX history_homes_seen ON history_homes (seen_at)",
        "CREATE INDEX events_host ON events (host, id)",
    ),
    # By what VMs and hosts are chosen.
    (
        "ALTER TABLE vms ADD COLUMN labels TEXT NOT NULL DEFAULT '{{}}'",
        "ALTER TABLE hosts ADD COLUMN labels TEXT NOT NULL DEFAULT '{{}}'",
    ),
    # What finds plans by when they began, and events by their kind.
    (
        "CREATE INDEX plans_started ON plans (started_at, number)",
        "CREATE INDEX events_kind ON events (kind, id)",
    ),
    # Which VMs the acquirer had placed: by the request that made the row, else by the last one of the row.
    (
        "ALTER TABLE vms ADD COLUMN acquired INTEGER NOT NULL DEFAULT 0",
        "UPDATE vms SET acquired = 1 WHERE priority = 'harvest' AND substr(coalesce((SELECT made.request_id "
        "FROM plans AS made WHERE made.vm = vms.name AND made.kind IN ('create', 'adopt') "
        "ORDER BY made.number DESC LIMIT 1), vms.request_id), 1, 9) = 'acquirer-'",
    ),
    # Which VMs may have been preempted.
    ("ALTER TABLE vms ADD COLUMN preemption_unsure INTEGER NOT NULL DEFAULT 0",),
)


#: A store in another schema of the search_path where the first one has none, and that first one.
_HIDDEN: Final = """
    SELECT table_schema, current_schema() FROM information_schema.tables
    WHERE table_name = 'migrations' AND table_schema = ANY (current_schemas(false))
    AND to_regclass(quote_ident(table_schema) || '.counters') IS NOT NULL
    AND to_regclass(quote_ident(current_schema()) || '.migrations') IS NULL
    LIMIT 1
"""


def version_of(connection: Connection) -> int:
    """The store's version; 0 for a new one.

    :raises StoreError: the store was made by a newer version of the manager, or there is one that this would hide.
    """
    if connection.dialect.name == "postgresql" and (hidden := connection.execute(text(_HIDDEN)).first()) is not None:
        raise StoreError(
            f"there is a store in schema {hidden[0]}, but a new one would be made in schema {hidden[1]}, with which "
            f"the search_path begins: begin it with {hidden[0]} (ALTER ROLE ... SET search_path), or have it without it"
        )
    connection.execute(text("CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY)"))
    version = int(connection.execute(text("SELECT coalesce(max(number), 0) FROM migrations")).scalar_one())
    if version > len(MIGRATIONS):
        raise StoreError(f"the store has version {version}, but this manager knows only {len(MIGRATIONS)}")
    return version


def is_older(connection: Connection) -> bool:
    """Whether there is a store, and a step to make. Raises as `version_of`."""
    return 0 < version_of(connection) < len(MIGRATIONS)


def migrate(connection: Connection) -> bool:
    """Bring a store one version further, in the caller's transaction.

    :returns: whether there was a step to make.
    :raises StoreError: the store was made by a newer version.
    """
    version = version_of(connection)
    if version == len(MIGRATIONS):
        return False
    if version == 0 and counters.name in inspect(connection).get_table_names():
        raise StoreError(
            "the database holds a store that was not restored to its end: drop it, and restore the backup again"
        )
    dialect = connection.dialect.name
    if dialect == "postgresql":
        # An index over a large table takes its time.
        connection.execute(text("SET LOCAL statement_timeout = 0"))
    for statement in MIGRATIONS[version]:
        connection.exec_driver_sql(statement.format_map(SPELLINGS[dialect]))
    record(connection, version + 1)
    return True


def record(connection: Connection, number: int) -> None:
    """Note that a store has been through a migration."""
    connection.execute(text("INSERT INTO migrations (number) VALUES (:number)"), {"number": number})
