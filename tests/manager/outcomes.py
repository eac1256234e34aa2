"""What the fake agent says of a resize: one row of the hypervisor's layer for each resource."""

from __future__ import annotations

from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import LedgerRow, VMOutcome


def outcome_of(
    name: str, generation: int, before: ResourceVector, after: ResourceVector, target: ResourceVector
) -> VMOutcome:
    rows = tuple(
        LedgerRow(
            layer=Layer.HYPERVISOR,
            resource=component,
            asked=before.less(target)[component],
            promised=before.less(target)[component],
            verified=before.less(after)[component],
            seconds=0.0,
            reason="" if after.fits_in(target) else "the balloon is stuck",
        )
        for component in COMPONENTS
        if before.less(target)[component] > 0
    )
    return VMOutcome(
        name=name,
        generation=generation,
        before=Vector.of(before),
        after=Vector.of(after),
        target=Vector.of(target),
        shortfall=Vector.of(after.less(target)),
        ledger=rows,
        seconds=0.0,
        sentence="resized",
    )
