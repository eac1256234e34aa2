"""REST bodies of operations: state, progress, and what an operation did to each VM (the ledger)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field

from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.messages.common import Body, Name, Open, RequestId, Rows, Sentence, Vector, WatchedPage
from ebbtide.messages.problem_codes import ReasonCode


class LedgerRow(Body):
    """One layer and one resource of one deflation; amounts in the unit of the resource's name."""

    layer: Open[Layer] = Field(description="which")
    resource: Sentence = Field(description="the component of the vector")
    asked: float = Field(description="of this layer")
    promised: float = Field(description="by the layer before it was measured")
    verified: float = Field(description="what was measured: the only figure that counts")
    seconds: float = Field(description="how long it took")
    reason: Sentence = Field(description="why not all")

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

    name: Name = Field(description="the VM's name")
    generation: int = Field(description="of the target")
    before: Vector = Field(description="the bound before it, measured")
    after: Vector = Field(description="the bound after it, measured")
    target: Vector = Field(description="the size to reach")
    shortfall: Vector = Field(description="what is missing")
    ledger: tuple[LedgerRow, ...] = Field(description="by layer and resource")
    seconds: float = Field(description="how long it took")
    sentence: Sentence = Field(description="what was done and why")
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


class Reason(Body):
    """Why an operation did not do all that it was asked for, for programs."""

    code: Open[ReasonCode] = Field(description="stable; later versions have more codes")
    asked: Vector | None = Field(None, description="what there was to be room for; null: it was about no room")
    missing: Vector = Field(Vector(), description="what was not verified of what was asked for")


class OperationState(StrEnum):
    """Where an operation stands; all but ``running`` are final."""

    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"


class Operation(Body):
    """One operation and, when it has ended, what it did and why, in one sentence."""

    request_id: RequestId
    kind: Open[
        Literal[
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
            "cancel",
        ]
    ] = Field(description="what was asked for")
    state: Open[OperationState] = Field(description="where it stands")
    sentence: Sentence = Field(description="what it did and why, or how far it is")
    vm: str | None = Field(None, description="which VM it is about; null: it is about none, or several")
    host: str | None = Field(None, description="where it is at work; null: nowhere yet")
    vms: Rows[VMOutcome] = Field((), description="what it did to each VM")
    shortfall: Vector = Field(Vector(), description="what is missing, of all VMs")
    started_at: float = Field(description="seconds since the epoch")
    seconds: float = Field(0.0, description="how long it has taken")
    progress: Rows[Sentence] = Field((), description="what has been done so far, a sentence a step")
    #: Only the manager gives one; managers of version 0.1 know of none in what a host answers.
    reason: Reason | None = Field(
        None, exclude_if=lambda reason: reason is None, description="failed or partial: why; left out otherwise"
    )
    trace_id: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{32}$",
        exclude_if=lambda trace: trace is None,
        description="of its trace, where spans of it are sent; a host agent says it to those who gave it one",
    )


class OperationPage(WatchedPage):
    """GET /v1/operations of the manager: newest first."""

    operations: tuple[Operation, ...] = Field(description="newest first")
