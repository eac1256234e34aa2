"""Rows of the store as values. Times are seconds since the epoch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import structlog
from pydantic import TypeAdapter, ValidationError

from cluster_manager.plans.plans import Plan, VMPhase
from cluster_manager.plans.preemption import PreemptionReason
from cluster_manager.plans.reading import read_plan, unread_plan
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.matcher.predict.changes import Change
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec

log = structlog.get_logger()
_LABELS: Final = TypeAdapter(dict[str, str])
#: What reading a body that is damaged, or of a later version, may fail with.
UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, InvalidField)


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
    #: Why what it is sold as cannot be read; empty: it can. The spec is then good for nothing but to be shown.
    unread: str = ""
    #: Why it was to be preempted, as long as nobody has said that it was.
    perhaps: PreemptionReason | None = None


@dataclass(frozen=True, slots=True)
class RunningVM:
    """A VM that runs, as far as rankings of very many need it."""

    name: str
    host: str | None
    priority: Priority


@dataclass(eq=False, slots=True)
class StoredPlan:
    """A plan as it was stored last, with its times; while it runs, with its stopwatches and what waits for it."""

    state: Plan
    fingerprint: str
    started_at: float
    updated_at: float
    #: How long it has been running, and how long ago its last step was stored, by a clock that nobody sets.
    elapsed_s: Callable[[], float] | None = None
    since_step_s: Callable[[], float] = lambda: 0.0
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


def why_unread(error: Exception) -> str:
    """What is wrong with a body, in a few words."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    wrong = {".".join(map(str, one["loc"])) or one["msg"] for one in error.errors()}
    return ", ".join(sorted(wrong)[:5])


@lru_cache(4096)
def tell_unread(what: str, name: str, why: str) -> None:
    """Once for each: lists are read every other second."""
    log.warning(f"a stored {what} cannot be read: nothing is decided by it", name=name, why=why)


def stored_spec(row: Any) -> tuple[VMSpec, str]:
    """What a VM is sold as, and why that cannot be read: then as far as it is understood, or as its columns say."""
    try:
        return VMSpec.model_validate_json(row.spec), ""
    except UNREADABLE as error:
        tell_unread("VM", row.name, why := why_unread(error))
    try:
        return VMSpec.model_validate_json(row.spec, extra="ignore"), why
    except UNREADABLE:
        priority = Priority(row.priority) if row.priority in list(Priority) else Priority.FIXED
        least = Vector(cpu_cores=HARD_FLOOR.cpu_cores, memory_mib=HARD_FLOOR.memory_mib)
        ceiling = least if priority is Priority.HARVEST else None
        return VMSpec(name=row.name, priority=priority, nominal=least, ceiling=ceiling), why


def phase_of(row: Any) -> VMPhase:
    """Where a VM stands; of a later version's word its host is to say what really is."""
    if row.phase in list(VMPhase):
        return VMPhase(row.phase)
    return VMPhase.RUNNING if row.host is not None else VMPhase.FAILED


def stored_vm(row: Any) -> StoredVM:
    """A row of the table of VMs."""
    spec, unread = stored_spec(row)
    if not unread and row.phase not in list(VMPhase):
        tell_unread("VM", row.name, unread := f"phase {row.phase}")
    known = row.preemption_reason in list(PreemptionReason)  # and no later version's
    return StoredVM(
        row.name,
        row.host,
        phase_of(row),
        spec,
        row.sentence,
        bool(row.owes_removal),
        row.request_id,
        row.generation,
        row.preempted_at,
        row.preemption_reason,
        labels_in(row.labels),
        bool(row.acquired),
        unread,
        PreemptionReason(row.preemption_reason) if row.preemption_unsure and known else None,
    )


def labels_in(text: str) -> dict[str, str]:
    """Labels as they are stored; most things have none, and what cannot be read counts as none."""
    if text == "{}":
        return {}
    try:
        return _LABELS.validate_json(text)
    except UNREADABLE as error:
        tell_unread("set of labels", text[:200], why_unread(error))
        return {}


def stored_labels(labels: Mapping[str, str]) -> str:
    """Labels as text, by key."""
    return json.dumps(dict(sorted(labels.items())), separators=(",", ":"))


def stored_plan(row: Any) -> StoredPlan:
    """A row of the table of plans."""
    state: Plan
    try:
        state = read_plan(row.state)
    except UNREADABLE as error:
        tell_unread("plan", row.id, why := why_unread(error))
        state = unread_plan(row, why)
    return StoredPlan(state, row.fingerprint, row.started_at, row.updated_at)


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
