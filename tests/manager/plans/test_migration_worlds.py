"""Migrations where any command may be lost, refused, forgotten, or come late: one VM, in one place, in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.plans.migrations import start_migration
from cluster_manager.plans.plans import (
    OFF,
    AwaitHost,
    ChooseHosts,
    Commanding,
    Create,
    Effect,
    Event,
    Forgotten,
    HostBack,
    HostFailed,
    HostRead,
    HostsChosen,
    Plan,
    ReadHost,
    Remove,
    SetVM,
    SpawnFollowUp,
    Start,
    Stop,
    VMPhase,
)
from cluster_manager.plans.returns import start_return_elsewhere
from ebbtide.deflation.fencing import Fence
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMState, VMStatus
from tests.manager.plan_events import ended, report_of, spec_of, status_of, unrecorded

SPEC = spec_of("low", "deflatable")
#: What may become of a command; ``unanswered``: it is carried out; ``late``: it may be, at any time.
ENDS = ("done", "failed", "refused", "lost", "unanswered", "late", "forgotten")
MOST_STEPS = 300


@dataclass
class World:
    """Two hosts, and what is on its way to them."""

    data: Any
    #: How many more things may go wrong.
    trouble: int
    states: dict[str, str]
    #: Whether its own host has no room for it.
    full: bool = False
    fences: dict[str, Fence] = field(default_factory=lambda: {"home": Fence(), "away": Fence()})
    late: list[tuple[int, Commanding]] = field(default_factory=list)
    order: int = 0
    now: float = 0.0

    def perform(self, state: Plan) -> Event:
        """Carry out one instruction, in whatever way."""
        self.now += 1.0
        self._let_some_come_late()
        match state.instruction:
            case ChooseHosts():
                first = self._read("away") if self.data.draw(st.booleans()) else None
                return HostsChosen(self.now, ("away",), first=first)
            case ReadHost(host=host):
                return self._read(host)
            case AwaitHost(host=host, until_s=until_s):
                if until_s is not None and self._wrong():
                    self.now = max(self.now, until_s)
                    return HostFailed(self.now, f"{host} does not report", uncertain=True)
                return HostBack(self.now)
            case Commanding() as command:
                return self._command(command)
        raise AssertionError(f"{state.instruction} in this world")

    def _read(self, host: str) -> HostRead | HostFailed:
        if self._wrong():
            return HostFailed(self.now, f"{host} is silent", uncertain=True)
        if host == "home" and self.full:
            return HostRead(self.now, report_of(host, *self._vms(host), cpu_cores=0.5))
        return unrecorded(host, *self._vms(host), at=self.now)

    def _command(self, command: Commanding) -> Event:
        self.order += 1
        end = self.data.draw(st.sampled_from(ENDS)) if self._wrong() else "done"
        lost = HostFailed(self.now, f"{command.host} is silent", uncertain=True)
        if end == "lost":
            return lost
        if end in ("late", "forgotten"):
            self.late.append((self.order, command))
            forgotten = end == "forgotten" and isinstance(command, Create)
            return Forgotten(self.now, lapse=True) if forgotten else lost
        self.fences[command.host] = self.fences[command.host].after(1, self.order)
        if end == "refused":
            return HostFailed(self.now, f"{command.host} refused", uncertain=False)
        if end == "failed":
            return ended(_kind(command), OperationState.FAILED, self.now)
        if not self._carry_out(command):
            return ended(_kind(command), OperationState.FAILED, self.now)
        return lost if end == "unanswered" else ended(_kind(command), at=self.now)

    def _carry_out(self, command: Commanding) -> bool:
        host, was = command.host, self.states[command.host]
        match command:
            case Stop():
                self.states[host] = "stopped" if was == "running" else was
            case Start():
                self.states[host] = "running" if was == "stopped" else was
            case Create():
                self.states[host] = "running" if was == "absent" else was
            case Remove():
                self.states[host] = "absent"
        running = [host for host, state in self.states.items() if state == "running"]
        assert len(running) < 2, "it runs twice"
        return self.states[host] != "absent" or isinstance(command, Remove)

    def _let_some_come_late(self) -> None:
        for order, command in list(self.late):
            if self.data.draw(st.booleans()):
                self.late.remove((order, command))
                if not self.fences[command.host].refusal(1, order)[0]:
                    self.fences[command.host] = self.fences[command.host].after(1, order)
                    self._carry_out(command)

    def _vms(self, host: str) -> list[VMStatus]:
        if self.states[host] == "absent":
            return []
        status = status_of(SPEC, host)
        off = {"state": VMState.STOPPED, "start_size": SPEC.nominal, "current": Vector()}
        return [status.model_copy(update=off) if self.states[host] == "stopped" else status]

    def _wrong(self) -> bool:
        if self.trouble <= 0 or not self.data.draw(st.booleans()):
            return False
        self.trouble -= 1
        return True


@pytest.mark.parametrize("running", [True, False])
@given(data=st.data(), trouble=st.integers(0, 12), deadline_s=st.sampled_from((3.0, 60.0)))
def test_whatever_is_lost_or_late_it_is_in_one_place_in_the_end_and_never_runs_twice(
    running: bool, data: Any, trouble: int, deadline_s: float
) -> None:
    world = World(data, trouble, {"home": "running" if running else "stopped", "away": "absent"})
    state: Plan = start_migration(
        "plan",
        MigrateRequest(request_id="request", limit_s=1.0, deadline_s=deadline_s),
        SPEC,
        "home",
        running=running,
        policy=PlacementPolicy.FIRST_FIT,
    )
    row = play(world, state, SetVM("low", VMPhase.MIGRATING, "home", ""))
    if running and row.phase is VMPhase.STOPPED:
        # Its owner is told, and starts it where its disk is.
        assert "off on home" in row.sentence
        assert world.states["home"] == "stopped"


@given(data=st.data(), trouble=st.integers(0, 12), full=st.booleans(), gone_s=st.sampled_from((3.0, 3600.0)))
def test_a_preempted_vm_that_may_come_back_elsewhere_is_in_one_place_too_and_else_keeps_its_place(
    data: Any, trouble: int, full: bool, gone_s: float
) -> None:
    world = World(data, trouble, {"home": "stopped", "away": "absent"}, full)
    state = start_return_elsewhere("plan", SPEC, "home", gone_s)
    row = play(world, state, SetVM("low", VMPhase.STARTING, "home", ""))
    # One that may run elsewhere must not come back by itself.
    assert (row.phase is VMPhase.STOPPED) == ("waited for no longer" in row.sentence)
    if trouble == 0:
        assert (row.phase, row.host) == (VMPhase.RUNNING, "away" if full else "home")


def play(world: World, state: Plan, row: SetVM) -> SetVM:
    """A plan and all that follows from it. Returns the record of its VM in the end."""
    for _ in range(MOST_STEPS):
        step = state.next_step(world.perform(state))
        state = step.state
        row = _last(step.effects, row)
        for effect in step.effects:
            if isinstance(effect, SpawnFollowUp):
                assert state.finished
                state = effect.state
        if state.finished:
            break
    else:
        raise AssertionError(f"it does not end: {state.progress}")
    world._let_some_come_late()
    others = {host for host, is_there in world.states.items() if is_there != "absent"} - {row.host}
    assert not others, "it is somewhere else too"
    expected = "running" if row.phase is VMPhase.RUNNING else "stopped"
    assert row.phase in (VMPhase.RUNNING, *OFF)
    assert row.host is not None
    if "next report says" not in row.sentence and "waited for no longer" not in row.sentence:
        assert world.states[row.host] == expected
    return row


def _last(effects: tuple[Effect, ...], row: SetVM) -> SetVM:
    return next((effect for effect in reversed(effects) if isinstance(effect, SetVM)), row)


def _kind(command: Commanding) -> str:
    """What an agent calls it."""
    return "delete" if isinstance(command, Remove) else command.do  # type: ignore[attr-defined]
