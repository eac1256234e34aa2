"""What the agent without a hypervisor says of each VM that it resized: all of it is the hypervisor's."""

from __future__ import annotations

from deflation.ledger import Layer
from deflation.messages import LedgerRow, Vector, VMOutcome
from deflation.resources import COMPONENTS, ResourceVector


def outcome_of(
    name: str, generation: int, before: ResourceVector, after: ResourceVector, target: ResourceVector
) -> VMOutcome:
    """One VM's outcome; what it fell short of is a balloon that is stuck."""
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
