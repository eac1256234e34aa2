"""Plans of live migrations, step by step, without any host."""

from __future__ import annotations

from typing import Any

from cluster_manager.execution.lifecycle_commands import lifecycle_command
from cluster_manager.plans.live_migrations import LiveMigrationPlan, start_live_migration
from cluster_manager.plans.plans import Depart, Event, HostBack, HostFailed, HostRead, ReadHost, SetVM, VMPhase
from cluster_manager.settings import AgentLimits
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.migrations import DepartureCommand
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMState, VMStatus
from tests.hostagent.fake_moves import ADDRESS
from tests.manager.plan_events import ended, report_of, spec_of, status_of

SPEC = spec_of("low", "deflatable")
HERE = status_of(SPEC, "home").model_copy(update={"uuid": "1ef55480-f362-464d-a514-abdb24d9b8ff"})
COMING = status_of(SPEC, "away", state=VMState.MIGRATING)
THERE = status_of(SPEC, "away")
LOST = HostFailed(0.0, "home answered with no Operation", uncertain=True)


def read(host: str, *vms: VMStatus) -> HostRead:
    return HostRead(0.0, report_of(host, *vms).model_copy(update={"migration": ADDRESS}))


def begun(**changes: Any) -> LiveMigrationPlan:
    request = MigrateRequest(request_id="request", live=True, host="away", deadline_s=60.0)
    return start_live_migration("plan", request, SPEC, "home", policy=PlacementPolicy.FIRST_FIT, **changes)


def heard(state: LiveMigrationPlan, *events: Event) -> LiveMigrationPlan:
    """The plan after these events."""
    for event in events:
        step = state.next_step(event).state
        assert isinstance(step, LiveMigrationPlan)
        state = step
    return state


def sent() -> LiveMigrationPlan:
    """Its new host has room for it, and its old one is to send it."""
    state = heard(begun(), read("home", HERE), read("away"), ended("arrive"))
    assert isinstance(state.instruction, Depart)
    return state


def test_its_old_host_hears_for_which_size_there_is_room() -> None:
    state = sent()
    assert isinstance(state.instruction, Depart)
    command = lifecycle_command(state.instruction, "d", 1, 1, AgentLimits()).body
    assert isinstance(command, DepartureCommand)
    assert command.size == HERE.current
    earlier = DepartureCommand(request_id="d", to="away", address=ADDRESS, deadline_s=60.0)
    assert command.comparable() == earlier.comparable()


def test_a_move_of_whose_end_the_old_host_tells_nothing_is_seen_on_the_new_one() -> None:
    state = heard(sent(), LOST)
    assert state.instruction == ReadHost(host="away")
    # It had not moved yet; the old host reports, and its next answer cannot be read either.
    state = heard(state, read("away", COMING), HostBack(0.0))
    assert isinstance(state.instruction, Depart)
    state = heard(state, LOST)
    assert state.instruction == ReadHost(host="away")
    step = state.next_step(read("away", THERE))
    assert isinstance(step.state, LiveMigrationPlan)
    assert step.state.stage == "clear"
    assert [(row.phase, row.host) for row in step.effects if isinstance(row, SetVM)] == [(VMPhase.RUNNING, "away")]
