"""Live migrations where any command may be lost, refused, forgotten, or come late: there is one copy, all the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.plans import (
    Arrive,
    AwaitHost,
    ChooseHosts,
    Commanding,
    Depart,
    Effect,
    Event,
    HostBack,
    HostFailed,
    HostRead,
    HostsChosen,
    Plan,
    ReadHost,
    Remove,
    SetVM,
    SpawnFollowUp,
    VMPhase,
)
from ebbtide.deflation.fencing import Fence
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMState, VMStatus
from tests.hostagent.fake_moves import ADDRESS
from tests.manager.plan_events import ended, report_of, spec_of, status_of

SPEC = spec_of("low", "deflatable")
DONE, FAILED = OperationState.DONE, OperationState.FAILED
#: What may become of a command; ``unanswered``: it is carried out; ``late``: it may be, at any time.
ENDS = ("done", "failed", "refused", "lost", "unanswered", "late")
#: And of a move that its hypervisor has begun.
MOVES = ("done", "called off", "died")
#: What a VM may be on its new host when it has come up there; ``going off``: that is not written down there yet.
UP = ("running", "paused", "going off", "off")
MOST_STEPS = 400


@dataclass
class World:
    """Two hosts, and what is on its way to them. Moves are the hypervisors': on one host until on the other."""

    data: Any
    #: How many more things may go wrong.
    trouble: int
    states: dict[str, str] = field(default_factory=lambda: {"home": "running", "away": "absent"})
    fences: dict[str, Fence] = field(default_factory=lambda: {"home": Fence(), "away": Fence()})
    #: What each command of the source came to, by its step: repeated, it is answered and not carried out again.
    departed: dict[int, OperationState] = field(default_factory=dict)
    late: list[tuple[int, Commanding]] = field(default_factory=list)
    order: int = 0
    now: float = 0.0
    #: It ended with its hypervisor, not by anything of ours.
    died: bool = False

    def perform(self, state: Plan) -> Event:
        """Carry out one instruction, in whatever way."""
        self.now += 1.0
        self._let_some_come_late()
        match state.instruction:
            case ChooseHosts():
                return HostsChosen(self.now, ("away",))
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
        return HostRead(self.now, report_of(host, *self._vms(host)).model_copy(update={"migration": ADDRESS}))

    def _command(self, command: Commanding) -> Event:
        self.order += 1
        end = self.data.draw(st.sampled_from(ENDS)) if self._wrong() else "done"
        lost = HostFailed(self.now, f"{command.host} is silent", uncertain=True)
        if end == "late":
            self.late.append((self.order, command))
        if end in ("lost", "late"):
            return lost
        self.fences[command.host] = self.fences[command.host].after(1, self.order)
        if isinstance(command, Depart) and command.step in self.departed:
            return lost if end == "unanswered" else ended("depart", self.departed[command.step], self.now)
        if end == "refused":
            return HostFailed(self.now, f"{command.host} refused", uncertain=False)
        done = False if end == "failed" else self._carry_out(command)
        if end == "failed" and isinstance(command, Depart):
            self.departed[command.step] = FAILED
        kind = "delete" if isinstance(command, Remove) else command.do  # type: ignore[attr-defined]
        return lost if end == "unanswered" else ended(kind, DONE if done else FAILED, self.now)

    def _carry_out(self, command: Commanding) -> bool:
        match command:
            case Arrive():
                if self.states["away"] == "absent":
                    self.states["away"] = "arriving"
                return self.states["away"] == "arriving"
            case Depart(step=step):
                if step not in self.departed:
                    # An agent that is started again only knows that it is off there.
                    self.departed[step] = DONE if self._move() and self.data.draw(st.booleans()) else FAILED
                return self.departed[step] is DONE
            case Remove(host="away"):
                if self.states["away"] == "running":
                    return False  # it has arrived
                assert self.states["away"] not in UP, "the only copy was removed"
                self.states["away"] = "absent"
            case Remove(host="home"):
                assert self.states["home"] != "running", "the only copy was removed"
                assert self.states["away"] in UP, "the only copy was removed"
                self.states["home"] = "absent"
        return True

    def _move(self) -> bool:
        if self.states["home"] != "running" or self.states["away"] != "arriving":
            return False
        end = self.data.draw(st.sampled_from(MOVES)) if self._wrong() else "done"
        if end == "died":
            self.states["home"], self.died = "stopped", True
        if end == "done":
            self.states = {"home": "stopped", "away": self.data.draw(st.sampled_from(UP))}
        return end == "done"

    def _let_some_come_late(self) -> None:
        for order, command in list(self.late):
            if self.data.draw(st.booleans()):
                self.late.remove((order, command))
                known = isinstance(command, Depart) and command.step in self.departed
                if not known and not self.fences[command.host].refusal(1, order)[0]:
                    self.fences[command.host] = self.fences[command.host].after(1, order)
                    self._carry_out(command)

    def _vms(self, host: str) -> list[VMStatus]:
        if self.states[host] == "absent":
            return []
        status = status_of(SPEC, host).model_copy(update={"uuid": "1ef55480-f362-464d-a514-abdb24d9b8ff"})
        off = {"state": VMState.STOPPED, "start_size": SPEC.nominal, "current": Vector()}
        match self.states[host]:
            case "stopped":
                return [status.model_copy(update=off)]
            case "arriving":
                return [status.model_copy(update={"state": VMState.MIGRATING})]
            case "paused":
                return [status.model_copy(update={"state": VMState.PAUSED})]
            case "going off":
                self.states[host] = "off"
                return [status.model_copy(update={"state": VMState.STOPPED})]
            case "off":
                return [status.model_copy(update={**off, "off_reason": "its domain has ended"})]
        return [status]

    def _wrong(self) -> bool:
        if self.trouble <= 0 or not self.data.draw(st.booleans()):
            return False
        self.trouble -= 1
        return True


@pytest.mark.parametrize("host", [None, "away"])
@given(data=st.data(), trouble=st.integers(0, 12))
def test_whatever_is_lost_or_late_there_is_one_copy_and_the_record_says_where(
    host: str | None, data: Any, trouble: int
) -> None:
    world = World(data, trouble)
    state: Plan = start_live_migration(
        "plan",
        MigrateRequest(request_id="request", live=True, host=host, deadline_s=5.0),
        SPEC,
        "home",
        policy=PlacementPolicy.FIRST_FIT,
    )
    row = SetVM("low", VMPhase.MIGRATING, "home", "")
    left: list[Plan] = []
    for _ in range(MOST_STEPS):
        step = state.next_step(world.perform(state))
        state, row = step.state, _last(step.effects, row)
        left += [effect.state for effect in step.effects if isinstance(effect, SpawnFollowUp)]
        copies = [name for name, what in world.states.items() if what in UP]
        assert len(copies) == (0 if world.died else 1)
        if state.finished:
            if not left:
                break
            state = left.pop(0)
    else:
        raise AssertionError(f"it does not end: {state.progress}")
    world._let_some_come_late()
    assert row.host is not None
    assert row.phase is (VMPhase.STOPPED if world.died else VMPhase.RUNNING)
    assert world.states[row.host] in (("stopped",) if world.died else UP), row.sentence
    others = {name for name, what in world.states.items() if what != "absent"} - {row.host}
    assert not others, "it is somewhere else too"


def _last(effects: tuple[Effect, ...], row: SetVM) -> SetVM:
    return next((effect for effect in reversed(effects) if isinstance(effect, SetVM)), row)
