"""What the store gives back: its rows as values. Times are seconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster_manager.plans import PlanState, VMPhase
from deflation.allocations import Priority
from deflation.messages import CoreChange, VMSpec


@dataclass(frozen=True, slots=True)
class StoredHost:
    """A host as it was last seen. Times are seconds since the epoch."""

    id: str
    #: A HostReport, as it is stored.
    report_json: str
    seen_at: float
    owes_reinflation: bool


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


@dataclass(frozen=True, slots=True)
class RunningVM:
    """A VM that runs, as far as rankings of very many need it."""

    name: str
    host: str | None
    priority: Priority


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan and its times, in seconds since the epoch."""

    state: PlanState
    fingerprint: str
    started_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One line of the event log."""

    at: float
    vm: str | None
    host: str | None
    kind: str
    sentence: str


@dataclass(frozen=True, slots=True)
class StoredChange:
    """A core change with what the manager knew of its machine."""

    change: CoreChange
    variable: bool
    by_owner: bool


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
    )


def stored_plan(row: Any) -> StoredPlan:
    """A row of the table of plans."""
    return StoredPlan(PlanState.model_validate_json(row.state), row.fingerprint, row.started_at, row.updated_at)


def stored_core_change(row: Any) -> CoreChange:
    """A row of the table of core changes, as it goes over the wire."""
    return CoreChange(
        sequence=row.sequence,
        machine=row.machine,
        host=row.host,
        at=row.at,
        cores_before=row.cores_before,
        cores_after=row.cores_after,
        cause=row.cause,
    )
