"""REST bodies of operations: state, progress, and what an operation did to each VM (the ledger)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field

from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.messages.common import Body, Name, Page, RequestId, Rows, Sentence, Vector


class LedgerRow(Body):
    """One layer and one resource of one deflation; amounts in the unit of the resource's name."""

    layer: Layer
    resource: Sentence
    asked: float
    promised: float
    verified: float
    seconds: float
    reason: Sentence

    @classmethod
    def of(cls, entry: LedgerEntry) -> Self:
        return cls(
            layer=entry.layer,
            resource=entry.resource,
            asked=entry.asked,
            promised=entry.promised,
            verified=entry.verified,
            seconds=entry.seconds,
            reason=entry.reason,
        )


class VMOutcome(Body):
    """What an operation did to one VM. ``before`` and ``after`` are bounds, measured."""

    name: Name
    generation: int
    before: Vector
    after: Vector
    target: Vector
    shortfall: Vector
    ledger: tuple[LedgerRow, ...]
    seconds: float
    sentence: Sentence
    errors: tuple[Sentence, ...] = Field(
        (), description="calls of the hypervisor that failed: what is missing because of them is no lack of room"
    )

    @classmethod
    def of(cls, name: str, generation: int, outcome: Outcome) -> Self:
        return cls(
            name=name,
            generation=generation,
            before=Vector.of(outcome.before.size),
            after=Vector.of(outcome.after.size),
            target=Vector.of(outcome.target),
            shortfall=Vector.of(outcome.shortfall),
            ledger=tuple(LedgerRow.of(entry) for entry in outcome.ledger),
            seconds=round(outcome.seconds, 3),
            sentence=outcome.sentence,
            errors=outcome.errors,
        )


class OperationState(StrEnum):
    """Where an operation stands; all but ``running`` are final."""

    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"


class Operation(Body):
    """One operation and, when it has ended, what it did and why, in one sentence."""

    request_id: RequestId
    kind: Literal[
        "create",
        "delete",
        "target",
        "reclaim",
        "reinflate",
        "mode",
        "stop",
        "start",
        "resize",
        "migrate",
        "adopt",
        "release",
        "withdraw",
        "return",
        "arrive",
        "depart",
        "live-migrate",
    ]
    state: OperationState
    sentence: Sentence
    vm: str | None = None
    host: str | None = None
    vms: Rows[VMOutcome] = ()
    shortfall: Vector = Vector()
    started_at: float = Field(description="seconds since the epoch")
    seconds: float = 0.0
    progress: Rows[Sentence] = Field((), description="what has been done so far, a sentence a step")


class OperationPage(Page):
    """GET /v1/operations of the manager: newest first."""

    operations: tuple[Operation, ...]
