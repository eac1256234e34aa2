"""Which domain a VM is, and what becomes of a domain of ours that no VM belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.control.unowned import Fate, fate, put_back, told_apart
from hostagent.libvirt.hypervisor import DomainState
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
    ended: bool = False

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
        # As it was while it was made, from a backup.
        (Found(Phase.CREATING, state="stopped"), Fate.TAKEN_BACK),
        (Found(Phase.CREATING, failed=True), Fate.REMOVED),
        (Found(Phase.CREATING, failed=True, name_taken=True), Fate.LEFT),
        (Found(Phase.DELETING, "delete"), Fate.REMOVED),
        (Found(Phase.DELETING, "delete", ended=True), Fate.TAKEN_BACK),
        (Found(Phase.DELETING, "delete", name_taken=True), Fate.LEFT),
        # What is left of a creation that failed.
        (Found(Phase.DELETING, "create", failed=True), Fate.REMOVED),
        (Found(Phase.DELETING, "delete", failed=True), Fate.TAKEN_BACK),
        (Found(Phase.DELETING, "delete", failed=True, name_taken=True), Fate.LEFT),
        (Found(Phase.ARRIVING, "arrive", "stopped"), Fate.AWAITED),
        (Found(Phase.ARRIVING, "arrive", "stopped", failed=True), Fate.REMOVED),
        (Found(Phase.ARRIVING, "arrive", "stopped", name_taken=True), Fate.LEFT),
        (Found(Phase.ARRIVING, "arrive", "paused"), Fate.AWAITED),
        (Found(Phase.ARRIVING, "arrive"), Fate.TAKEN_BACK),
        (Found(Phase.SETTLED, "adopt", theirs=True), Fate.TAKEN_BACK),
        (Found(Phase.SETTLED, "adopt", theirs=True, failed=True), Fate.GIVEN_BACK),
        (Found(Phase.SETTLED, "target", theirs=True, failed=True), Fate.TAKEN_BACK),
        (Found(Phase.DELETING, "delete", theirs=True), Fate.TAKEN_BACK),
        (Found(Phase.CREATING, theirs=True), Fate.TAKEN_BACK),
    ],
)
def test_only_what_is_known_to_be_left_over_is_removed(found: Found, expected: Fate) -> None:
    assert fate(found.intent(), found.state, found.failed, found.name_taken, found.ended) is expected


@pytest.mark.parametrize(
    ("phase", "kind", "deleted", "carried_out", "expected"),
    [
        (Phase.SETTLED, "delete", ["r"], [], True),
        (Phase.SETTLED, "delete", [], ["r"], True),
        # Begun by an earlier agent, and not ended.
        (Phase.DELETING, "delete", ["r"], [], False),
        (Phase.DELETING, "delete", ["r"], ["r"], True),
        (Phase.SETTLED, "delete", [], [], False),
        (Phase.STOPPING, "stop", [], ["r"], True),
        (Phase.STOPPING, "stop", [], ["another"], False),
        (Phase.STOPPED, "stop", [], ["r"], False),
        # A start that failed: it is turned off again.
        (Phase.STOPPING, "start", [], ["r"], False),
    ],
)
def test_what_was_stopped_or_removed_before_and_says_that_it_is_to_be_was_put_back(
    phase: Phase, kind: str, deleted: list[str], carried_out: list[str], expected: bool
) -> None:
    assert put_back(Found(phase, kind).intent(), deleted, carried_out) is expected


def bearing(domain: str, state: str = "running", original: bool | None = None, released: bool = False) -> DomainState:
    return DomainState(domain, state, Found(Phase.SETTLED).intent(), original=original, released=released)


@pytest.mark.parametrize(
    ("vm", "copy"),
    [
        (bearing("db", "stopped", original=True), bearing("web", original=None)),
        (bearing("db", "stopped"), bearing("ebb-host-a.web", original=False)),
        (bearing("db"), bearing("web", "stopped")),
        (bearing("db", "paused"), bearing("ebb-host-a.web", "stopped")),
        (bearing("web"), bearing("db")),
        (bearing("ebb-host-a.web", "stopped"), bearing("ebb-host-a.old", "stopped")),
        (bearing("db"), bearing("db-clone")),
        (bearing("ebb-host-a.web", "stopped"), bearing("db", original=True, released=True)),
        (bearing("ebb-host-a.web", "stopped"), bearing("ebb-host-a.web-clone", original=False)),
    ],
)
def test_a_vm_is_told_from_its_copies_by_uuid_then_by_its_state_then_by_its_name(
    vm: DomainState, copy: DomainState
) -> None:
    other = DomainState("x", "running", vm.intent.changed(spec=SPEC.model_copy(update={"name": "x"})))
    assert told_apart([vm, other, copy]) == [vm, other]
    assert told_apart([copy, vm, other]) == [vm, other]


def test_a_clone_of_a_vm_that_is_gone_is_not_that_vm_and_one_that_was_put_back_under_another_uuid_is() -> None:
    clone, back = (bearing(name, original=False) for name in ("ebb-host-a.web-clone", "ebb-host-a.web"))
    assert told_apart([clone]) == []
    assert told_apart([clone, back]) == [back]
    renamed = bearing("ebb-host-a.new", original=True)
    assert told_apart([renamed]) == [renamed]
