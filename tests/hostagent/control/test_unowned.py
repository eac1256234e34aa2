"""What becomes of a domain of ours that no VM belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.control.unowned import Fate, fate
from hostagent.state.intents import Before, Cause, Intent, Phase

SIZE = Vector(cpu_cores=2.0, memory_mib=1024.0)
SPEC = VMSpec(name="web", nominal=SIZE, minimum=Vector())


@dataclass
class Found:
    """A domain. `theirs`: it has another owner."""

    phase: Phase
    kind: str = "create"
    state: str = "running"
    theirs: bool = False
    failed: bool = False
    name_taken: bool = False

    def intent(self) -> Intent:
        return Intent(
            owner="host-a",
            spec=SPEC,
            boot_mib=512.0,
            phase=self.phase,
            target=SIZE,
            committed=SIZE,
            cause=Cause(request_id="r", kind=self.kind, body={}, before=SIZE, started_at=0.0),
            adopted=Before() if self.theirs else None,
        )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Found(Phase.SETTLED), Fate.TAKEN_BACK),
        (Found(Phase.STOPPED, "stop", "stopped"), Fate.TAKEN_BACK),
        (Found(Phase.SETTLED, name_taken=True), Fate.LEFT),
        (Found(Phase.CREATING, state="stopped"), Fate.REMOVED),
        (Found(Phase.CREATING, failed=True), Fate.REMOVED),
        (Found(Phase.DELETING, "delete"), Fate.REMOVED),
        # What is left of a creation that failed.
        (Found(Phase.DELETING, "create", failed=True), Fate.REMOVED),
        (Found(Phase.DELETING, "delete", failed=True), Fate.TAKEN_BACK),
        (Found(Phase.DELETING, "delete", failed=True, name_taken=True), Fate.LEFT),
        (Found(Phase.ARRIVING, "arrive", "stopped"), Fate.REMOVED),
        (Found(Phase.ARRIVING, "arrive", "paused"), Fate.AWAITED),
        (Found(Phase.ARRIVING, "arrive"), Fate.TAKEN_BACK),
        (Found(Phase.SETTLED, "adopt", theirs=True), Fate.TAKEN_BACK),
        (Found(Phase.SETTLED, "adopt", theirs=True, failed=True), Fate.GIVEN_BACK),
        (Found(Phase.SETTLED, "target", theirs=True, failed=True), Fate.TAKEN_BACK),
        (Found(Phase.DELETING, "delete", theirs=True), Fate.TAKEN_BACK),
        (Found(Phase.CREATING, theirs=True), Fate.TAKEN_BACK),
    ],
)
def test_only_what_was_being_created_or_deleted_or_never_came_is_removed(found: Found, expected: Fate) -> None:
    assert fate(found.intent(), found.state, found.failed, found.name_taken) is expected
