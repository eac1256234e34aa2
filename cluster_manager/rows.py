"""What the store gives back: its rows as values. Times are seconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass

from cluster_manager.plans import PlanState, VMPhase
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
