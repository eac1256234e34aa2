"""What is asked of a host, and how long: its reserve, and the end of its operations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ebbtide.cli.commands import modes, records
from ebbtide.cli.commands.options import Showing
from ebbtide.deflation.modes import HostMode
from ebbtide.errors import EbbError
from ebbtide.messages.commands import SteadyStatus
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostStatus
from ebbtide.messages.operations import Operation, OperationState

OFF = "steady mode is off: no memory is taken before it is asked for"


class _Client:
    """``states``: of an operation, look by look."""

    def __init__(self, *states: OperationState) -> None:
        self.states = list(states)
        self.waits = list[float]()
        self.reserves = list[Any]()

    async def host(self, name: str) -> HostStatus:
        capacity = Vector(cpu_cores=8.0, memory_mib=16384.0)
        return HostStatus(
            id=name, url="http://127.0.0.1:1", state="ready", seen_at=1.0, capacity=capacity, free=capacity,
            deflatable=Vector(), accelerator="kvm", mode=HostMode.ACTIVE, vms=(),
        )  # fmt: skip

    async def set_steady(self, host: str, *, enabled: bool | None, reserve_mib: Any) -> SteadyStatus:
        self.reserves.append(reserve_mib)
        return SteadyStatus(
            enabled=False, reserve_mib=None if reserve_mib == "auto" else reserve_mib, learned_mib=1.0, kept_mib=0.0,
            free_mib=1.0, refill_s=1.0, sentence=OFF,
        )  # fmt: skip

    async def operation(self, request_id: str, wait_s: float, host: str | None) -> Operation:
        self.waits.append(wait_s)
        return Operation(request_id=request_id, kind="target", state=self.states.pop(0), started_at=1.0, sentence="it")


def asking(client: _Client, monkeypatch: pytest.MonkeyPatch) -> Showing:
    monkeypatch.setattr(Showing, "ask", lambda self, question: asyncio.run(question(client)))
    return Showing()


def test_a_reserve_that_is_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client()
    with pytest.raises(EbbError, match="8192 GiB are more than host-a has: 16, which is 16384 MiB"):
        modes.config("host-a", None, "8192", to=asking(client, monkeypatch))
    assert client.reserves == []


@pytest.mark.parametrize(("given", "kept"), [("8", "8 GiB"), ("auto", "learned")])
def test_the_reserve_that_was_set_is_told_also_where_steady_mode_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, kept: str
) -> None:
    modes.config("host-a", None, given, to=asking(_Client(), monkeypatch))
    assert capsys.readouterr().out == f"host-a: {OFF}; reserve: {kept}\n"


@pytest.mark.parametrize(
    ("wait_s", "looks", "waits"), [(0.0, 1, [0.0]), (45.0, 2, [30.0, 15.0]), (60.0, 2, [30.0, 30.0])]
)
def test_an_operation_is_waited_for_longer_than_a_host_holds_its_answer_back(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, looks: int, waits: list[float]
) -> None:
    client = _Client(*[OperationState.RUNNING] * looks)
    records.operation("x", wait_s, "host-a", to=asking(client, monkeypatch))
    assert client.waits == waits
    ended = _Client(OperationState.DONE)
    records.operation("x", wait_s, "host-a", to=asking(ended, monkeypatch))
    assert ended.waits == waits[:1]
