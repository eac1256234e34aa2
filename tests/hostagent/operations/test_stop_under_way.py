"""A VM that is on its way down, as an agent tells of it and lets it be started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import VMState
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM
from tests.hostagent.conftest import Client, Command
from tests.hostagent.doing import report
from tests.hostagent.world import Domain, World
from tests.waiting import until


@asynccontextmanager
async def guest_that_takes_its_time(
    host: Host, vm: ManagedVM, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Event]:
    """Its power-off begins, and does not end before the block does; the event says that it has begun."""
    begun, may_end = asyncio.Event(), asyncio.Event()
    shut_down = host.hypervisor.shut_down

    async def slowly(domain: str, limit_s: float) -> str:
        begun.set()
        await may_end.wait()
        return await shut_down(domain, limit_s)

    monkeypatch.setattr(host.hypervisor, "shut_down", slowly)
    try:
        yield begun
    finally:
        may_end.set()


@asynccontextmanager
async def operation_under_way(
    host: Host, vm: ManagedVM, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Event]:
    """Another operation has the VM to itself until the block ends."""
    begun = asyncio.Event()
    async with vm.lock:
        mark_terminating = vm.resizer.mark_terminating

        def terminating(why: str) -> None:
            mark_terminating(why)
            begun.set()

        monkeypatch.setattr(vm.resizer, "mark_terminating", terminating)
        yield begun


@pytest.mark.parametrize("held_up", [guest_that_takes_its_time, operation_under_way], ids=["guest", "operation"])
async def test_a_start_while_a_stop_waits_is_refused_and_the_vm_is_said_to_be_stopping(
    client: Client,
    command: Command,
    host: Host,
    world: World,
    two_vms: list[Domain],
    monkeypatch: pytest.MonkeyPatch,
    held_up: object,
) -> None:
    assert callable(held_up)
    async with held_up(host, host.vms["low-1"], monkeypatch) as begun:
        answer = await client.post("/v1/vms/low-1/stop", json={"request_id": "stop", "limit_s": 2.0})
        assert answer.status == 202
        async with asyncio.timeout(10):
            await begun.wait()
        states = {vm.name: vm.state for vm in (await report(client)).vms}
        assert states == {"low-1": VMState.STOPPING, "low-2": VMState.RUNNING}
        refused = await client.post("/v1/vms/low-1/start", json={"request_id": "start"})
        problem = await refused.json()
        assert (refused.status, problem["field"]) == (409, "name")
        assert "it is being stopped" in problem["detail"]
        assert world.domains["ebb-host-a.low-1"].state == "running"
    ended = await client.get("/v1/operations/stop", params={"wait_s": "20"})
    assert Operation.model_validate_json(await ended.text()).state == "done"
    assert world.domains["ebb-host-a.low-1"].state == "stopped"
    started = await command("POST", "/v1/vms/low-1/start", {"request_id": "start-again"})
    assert started.state == "done", started.sentence
    await until(lambda: host.vms["low-1"].link.connected)


async def test_a_start_while_a_removal_waits_is_refused(client: Client, host: Host, two_vms: list[Domain]) -> None:
    async with host.vms["low-1"].lock:
        assert (await client.delete("/v1/vms/low-1?request_id=d")).status == 202
        await until(lambda: bool(host.vms["low-1"].resizer.terminating))
        refused = await client.post("/v1/vms/low-1/start", json={"request_id": "start"})
        assert refused.status == 409
        assert "it is being removed" in (await refused.json())["detail"]
    ended = await client.get("/v1/operations/d", params={"wait_s": "20"})
    assert Operation.model_validate_json(await ended.text()).state == "done"


@pytest.mark.parametrize("by_itself", [False, True])
async def test_a_vm_that_is_undefined_while_it_runs_is_gone_once_it_is_stopped(
    command: Command,
    host: Host,
    world: World,
    two_vms: list[Domain],
    monkeypatch: pytest.MonkeyPatch,
    by_itself: bool,
) -> None:
    shut_down = host.hypervisor.shut_down

    async def ended(domain: str, limit_s: float) -> str:
        if by_itself:
            del world.domains[domain]
        how = await shut_down(domain, limit_s)
        del world.domains[domain]
        return how

    monkeypatch.setattr(host.hypervisor, "shut_down", ended)
    stopped = await command("POST", "/v1/vms/low-1/stop", {"request_id": "stop", "limit_s": 2.0})
    assert stopped.state == "done", stopped.sentence
    assert "its domain is gone from here, and its disk is kept until it is removed by hand" in stopped.sentence
    assert list(host.vms) == ["low-2"]
    changes = [(one.machine, one.cores_after, one.cause) for one in host.journal.changes]
    assert changes[-1] == ("low-1", 0, "stop")
