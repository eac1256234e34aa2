"""Rows of the store as values. Times are seconds since the epoch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster_manager.plans.plans import Plan, VMPhase
from cluster_manager.plans.reading import read_plan
from ebbtide.deflation.allocations import Priority
from ebbtide.matcher.predict.changes import Change
from ebbtide.messages.vms import VMSpec


@dataclass(frozen=True, slots=True)
class StoredHost:
    """A host as it was last seen. Times are seconds since the epoch."""

    id: str
    #: A HostReport, as it is stored.
    report_json: str
    seen_at: float
    owes_reinflation: bool
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredVM:
    """A VM whose name is taken."""

    name: str
    host: str | None
    phase: VMPhase
    spec: VMSpec
    sentence: str
    owes_removal: bool
    request_id: str
    generation: int
    #: Since when it waits for room after a preemption, and why; None: it does not.
    preempted_at: float | None = None
    preemption_reason: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Whether this manager's acquirer had it placed.
    acquired: bool = False


@dataclass(frozen=True, slots=True)
class RunningVM:
    """A VM that runs, as far as rankings of very many need it."""

    name: str
    host: str | None
    priority: Priority


@dataclass(eq=False, slots=True)
class StoredPlan:
    """A plan as it was stored last, with its times; while it runs, with what waits for it."""

    state: Plan
    fingerprint: str
    started_at: float
    updated_at: float
    #: Set after each step; replaced by a new one.
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One line of the event log."""

    at: float
    vm: str | None
    host: str | None
    kind: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChange(Change):
    """A core change as the matcher reads it, with where it came from and what the manager knew of its machine."""

    host: str
    sequence: int
    cause: str
    #: Whether cores of this machine can be taken away.
    variable: bool


def stored_vm(row: Any) -> StoredVM:
    """A row of the table of VMs."""
    return StoredVM(
        row.name,
        row.host,
        VMPhase(row.phase),
        VMSpec.model_validate_json(row.spec),
        row.sentence,
        bool(row.owes_removal),
        row.request_id,
        row.generation,
        row.preempted_at,
        row.preemption_reason,
        labels_in(row.labels),
        bool(row.acquired),
    )


def labels_in(text: str) -> dict[str, str]:
    """Labels as they are stored; most things have none."""
    return json.loads(text) if text != "{}" else {}


def stored_labels(labels: Mapping[str, str]) -> str:
    """Labels as text, by key."""
    return json.dumps(dict(sorted(labels.items())), separators=(",", ":"))


def stored_plan(row: Any) -> StoredPlan:
    """A row of the table of plans."""
    return StoredPlan(read_plan(row.state), row.fingerprint, row.started_at, row.updated_at)


def stored_change(row: Any) -> StoredChange:
    """A row of the table of core changes."""
    return StoredChange(
        machine=row.machine,
        at=row.at,
        cores_before=row.cores_before,
        cores_after=row.cores_after,
        by_owner=bool(row.by_owner),
        host=row.host,
        sequence=row.sequence,
        cause=row.cause,
        variable=bool(row.variable),
    )
