"""Outcomes of resizes, put together."""

from __future__ import annotations

from deflation.instructions import Outcome
from deflation.resources import ResourceVector


def shortfall(before: ResourceVector, after: ResourceVector, target: ResourceVector) -> ResourceVector:
    """What the target still asks for, in the direction in which each component was to go."""
    return ResourceVector(
        *(
            max((now - goal) if was >= goal else (goal - now), 0.0)
            for was, now, goal in zip(before, after, target, strict=True)
        )
    )


def joined(down: Outcome, up: Outcome | None) -> Outcome:
    """One outcome for a resize that went down in one component and up in another."""
    if up is None:
        return down
    return Outcome(
        before=down.before,
        after=up.after,
        target=down.target,
        ledger=down.ledger + up.ledger,
        shortfall=down.shortfall + up.shortfall,
        seconds=down.seconds + up.seconds,
        sentence=f"{down.sentence}; {up.sentence}",
        measured=up.measured,
    )
