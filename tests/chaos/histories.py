"""What must have become of each VM by all that was asked for: whether it runs, where, and what it is sold as."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.deflation.resources import ZERO
from ebbtide.messages.common import Vector
from ebbtide.messages.requests import ResizeRequest
from ebbtide.messages.vms import VMSpec, VMStatus
from tests.chaos.agent import ChaosAgent
from tests.chaos.workload import Client, Request
from tests.manager.fake_lifecycle import runs


@dataclass
class Fate:
    """A VM by the operations on it. None: an answer was lost, and the operation said that it does not know."""

    spec: VMSpec | None
    runs: bool | None = True
    #: Where the last operation that says so left it.
    host: str | None = None

    def after(self, request: Request) -> None:
        """The next operation on it, which has ended."""
        assert request.end is not None
        done, said = request.end["state"] == "done", request.end["sentence"]
        if request.kind == "resize":
            self._resized(request, done, said)
        elif request.kind == "stop":
            self.runs = False if done else None if "may have been stopped" in said else self.runs
        elif request.kind in ("start", "migrate"):
            self._started(request, done, said)

    def _resized(self, request: Request, done: bool, said: str) -> None:
        if done and self.spec is not None:
            self.spec = ResizeRequest.model_validate(request.body).onto(self.spec)
        elif "may have been changed" in said:
            self.spec = None

    def _started(self, request: Request, done: bool, said: str) -> None:
        assert request.end is not None
        if done:
            self.runs, self.host = True, request.end["host"]
        elif "may have been started: " in said:
            self.runs = None
        elif "is off on" in said or "stays off" in said:
            self.runs = False
        elif " again: " in said:
            self.runs = True


def fates(client: Client) -> dict[str, Fate]:
    """Of every VM that was placed, by all operations that have ended, in the order in which they began."""
    found: dict[str, Fate] = {}
    ended = [request for request in client.requests if request.end is not None]
    for request in sorted(ended, key=lambda one: one.end["started_at"] if one.end is not None else 0.0):
        assert request.end is not None
        if request.kind == "create" and request.end["state"] == "done" and request.body is not None:
            found[request.vm] = Fate(VMSpec.model_validate(request.body["vm"]), host=request.end["host"])
        elif request.vm in found:
            found[request.vm].after(request)
    return found


def disagreements(
    client: Client, shown: Sequence[dict[str, Any]], agents: Sequence[ChaosAgent], preempted: Collection[str]
) -> list[str]:
    """Where history, the manager's answers and the hosts tell different stories, a sentence each.

    :param preempted: VMs that ever were: whether these run is not the client's doing alone.
    """
    rows = {row["name"]: row for row in shown}
    expected, found = fates(client), []
    for agent in agents:
        for name, vm in agent.vms.items():
            row = rows.get(name)
            if row is None:
                found.append(f"{name} on {agent.id} is not shown")
                continue
            states = ("running",) if runs(vm) else ("stopped", "preempted") if name in preempted else ("stopped",)
            if row["state"] not in states or row["host"] != agent.id:
                found.append(f"{name} is {states[0]} on {agent.id}, and shown as {row['state']} on {row['host']}")
            told = {key: row[key] for key in ("priority", "nominal", "minimum", "ceiling")}
            if told != (has := sold(vm)):
                found.append(f"{name} is sold as {has}, and shown as {told}")
            if (fate := expected.get(name)) is not None:
                fate.runs = None if name in preempted else fate.runs
                found += _unlike(fate, vm, agent.id)
    return found


def sold(vm: VMStatus) -> dict[str, Any]:
    """What a VM is sold as, by its host."""
    return {key: value for key, value in vm.model_dump(mode="json").items() if key in _SOLD}


_SOLD = ("priority", "nominal", "minimum", "ceiling")


def _unlike(fate: Fate, vm: VMStatus, host: str) -> list[str]:
    found = []
    if fate.runs is not None and fate.runs != runs(vm):
        found.append(f"{vm.name} {'runs' if runs(vm) else 'is off'} on {host} against what was asked for last")
    if fate.host is not None and fate.host != host:
        found.append(f"{vm.name} is on {host}, and was last put on {fate.host}")
    if fate.spec is not None:
        minimum = Vector.of(fate.spec.allocation(ZERO).minimum)
        asked = (fate.spec.priority, fate.spec.nominal, minimum, fate.spec.ceiling)
        if asked != (vm.priority, vm.nominal, vm.minimum, vm.ceiling):
            found.append(f"{vm.name} is sold as {sold(vm)}, and was asked for as {fate.spec}")
    return found
