"""Harvest VMs grow by themselves within the manager's budget, and give back as soon as anybody else needs room."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.cascade.reconcile import RepairPace
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.harvest import harvested
from ebbtide.deflation.sharing.hysteresis import Pace
from hostagent.control import harvest
from hostagent.operations.agent import Agent
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, make_agent
from tests.hostagent.control.test_pressure import press
from tests.hostagent.doing import host_idle, reclaim
from tests.hostagent.world import Domain, World
from tests.waiting import until

CEILING = {"cpu_cores": 4.0, "memory_mib": 1536.0}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is steady at once, and nobody rests for long."""
    monkeypatch.setattr(harvest, "HARVEST_S", 0.1)
    monkeypatch.setattr(harvest, "HARVEST_PACE", Pace(hold_s=0.3, rest_s=0.5, large_share=0.5))


@pytest.fixture
async def spare(command: Command, host: Host, world: World) -> Domain:
    """A harvest VM of 1 to 4 cores, started with 1 core and 1024 MiB."""
    body = low_vm(
        "spare",
        priority="harvest",
        nominal={"cpu_cores": 1.0, "memory_mib": 1024.0},
        minimum={"cpu_cores": 0.5, "memory_mib": 512.0},
        ceiling=CEILING,
    )
    assert (await command("POST", "/v1/vms", {"request_id": "c-spare", "vm": body})).state == "done"
    await until(lambda: host.vms["spare"].link.connected)
    return world.domains["ebb-host-a.spare"]


async def grant(client: Client, number: int, status: int = 200, epoch: int = 0, **room: float) -> Any:
    body = {"number": number, "epoch": epoch, "room": {"cpu_cores": 3.5, "memory_mib": 1024.0, **room}}
    response = await client.put("/v1/budget", json=body)
    answer = await response.json()
    assert response.status == status, answer
    return answer


async def looks(world: World, count: int = 5) -> None:
    """Wait until the agent has looked at its VMs so many times more."""
    seen = len(world.calls)
    await until(lambda: [call for call, _ in world.calls[seen:]].count("survey") >= count)


def size(host: Host, name: str = "spare") -> ResourceVector:
    return host.vms[name].allocation().current


async def test_it_grows_to_its_ceiling_within_the_budget_and_the_matcher_hears_of_it(
    client: Client, spare: Domain, host: Host
) -> None:
    assert spare.quota == pytest.approx(0.25)
    await grant(client, 1)
    await until(lambda: size(host) == ResourceVector(4, 1536))
    await host_idle(host)
    assert (spare.quota, spare.bound_mib) == (None, 1536)
    assert [(change.cores_before, change.cores_after) for change in host.journal.changes] == [(0, 1), (1, 4)]
    report = host.report()
    assert (report.budget_number, report.budget.cpu_cores) == (1, 3.5)
    assert report.deflatable.cpu_cores == 3.5


async def test_it_stays_within_a_smaller_budget(client: Client, spare: Domain, host: Host) -> None:
    await grant(client, 1, cpu_cores=1.5, memory_mib=612.0)
    await until(lambda: size(host) == ResourceVector(2, 1124))
    await host_idle(host)
    assert harvested([host.vms["spare"].allocation()]) == ResourceVector(1.5, 612)


async def test_without_a_budget_or_with_a_revoked_one_nothing_grows(
    client: Client, command: Command, spare: Domain, host: Host, world: World
) -> None:
    assert (await command("POST", "/v1/reinflations", {"request_id": "r"})).state == "done"
    assert size(host).cpu_cores == 1
    await grant(client, 1, cpu_cores=0.0, memory_mib=0.0)
    await looks(world)
    assert size(host) == ResourceVector(1, 1024)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"number": 2, "room": {"cpu_cores": 1.0}}, 409, "number"),
        ({"number": 3, "room": {"cpu_cores": 1.0}}, 409, "number"),
        ({"number": 4, "epoch": 1, "room": {"cpu_cores": 1.0}}, 409, "epoch"),
        ({"number": 0, "room": {}}, 400, "number"),
        ({"number": 4, "room": {"cpu_cores": -1.0}}, 400, "room.cpu_cores"),
        ({"number": 4}, 400, "room"),
        ({"number": 4, "room": {}, "more": 1}, 400, "more"),
    ],
)
async def test_an_old_or_malformed_budget_changes_nothing(
    client: Client, host: Host, body: dict[str, Any], status: int, field: str
) -> None:
    await grant(client, 3, epoch=2)
    response = await client.put("/v1/budget", json={"epoch": 2, **body})
    assert (response.status, (await response.json())["field"]) == (status, field)
    assert (host.journal.budget.number, host.journal.budget.room.cpu_cores) == (3, 3.5)
    # The same once more is the same answer.
    assert (await grant(client, 3, epoch=2))["number"] == 3


async def test_a_budget_that_comes_after_a_later_command_is_refused_by_its_order(
    client: Client, command: Command, spare: Domain, host: Host
) -> None:
    await grant(client, 1, epoch=2)
    assert (await command("POST", "/v1/reclaims", {"request_id": "r", "epoch": 2, "order": 9, "need": {}})).state
    body = {"number": 2, "epoch": 2, "order": 8, "room": {"cpu_cores": 3.5}}
    response = await client.put("/v1/budget", json=body)
    assert (response.status, (await response.json())["field"]) == (409, "order")
    assert (host.journal.budget.number, host.journal.budget.room) == (1, ZERO)
    response = await client.put("/v1/budget", json={**body, "order": 10})
    assert response.status == 200


async def test_a_reclaim_revokes_the_budget_and_takes_from_harvest_vms_first(
    client: Client, command: Command, spare: Domain, host: Host
) -> None:
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1", nominal={"cpu_cores": 2.0, "memory_mib": 600.0})})).state == "done"  # fmt: skip  # noqa: E501
    await until(lambda: host.vms["low-1"].link.connected)
    await grant(client, 1)
    await until(lambda: size(host).cpu_cores == 4)
    await host_idle(host)
    operation = await reclaim(command, cpu_cores=3.0)
    assert operation.state == "done", operation.sentence
    assert [outcome.name for outcome in operation.vms] == ["spare"]
    assert size(host).cpu_cores == 1
    assert host.journal.budget.room == ZERO
    # The old one does not come back by being sent again; the next one counts.
    assert (await grant(client, 1))["room"]["cpu_cores"] == 0
    await grant(client, 2)
    await until(lambda: size(host).cpu_cores == 4)


async def test_a_new_vm_gets_what_harvest_vms_hold(client: Client, command: Command, spare: Domain, host: Host) -> None:
    await grant(client, 1)
    await until(lambda: size(host) == ResourceVector(4, 1536))
    await host_idle(host)
    fixed = low_vm("high-1", priority="fixed", nominal={"cpu_cores": 4.5, "memory_mib": 1600.0}, minimum={})
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": fixed})
    assert operation.state == "done", operation.sentence
    assert size(host).cpu_cores == pytest.approx(1.5)
    assert size(host).memory_mib == 3600 - 2 * 320 - 1600
    assert sum(change.cores_after - change.cores_before for change in host.journal.changes) == 6.0
    more = low_vm("high-2", priority="fixed", nominal={"cpu_cores": 1.5, "memory_mib": 200.0}, minimum={})
    response = await client.post("/v1/vms", json={"request_id": "d", "vm": more})
    # Half a core is its minimum: that is no harvest's to give.
    assert response.status == 409


async def test_a_stopped_harvest_vm_comes_up_with_its_nominal_size_at_most(
    client: Client, command: Command, spare: Domain, host: Host
) -> None:
    await grant(client, 1)
    await until(lambda: size(host) == ResourceVector(4, 1536))
    await host_idle(host)
    assert (await command("POST", "/v1/vms/spare/stop", {"request_id": "stop", "limit_s": 2.0})).state == "done"
    assert host.vms["spare"].intent.committed.vector() == ResourceVector(1, 1024)
    assert spare.starts_with == (1.0, 1024.0)


async def test_a_vm_that_is_deleted_while_room_is_made_for_it_does_not_come_up(
    client: Client, command: Command, spare: Domain, host: Host, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grant(client, 1)
    await until(lambda: size(host) == ResourceVector(4, 1536))
    await host_idle(host)
    make_room, go_on = agent.harvest.make_room, asyncio.Event()

    async def slowly(*args: Any) -> None:
        await go_on.wait()
        await make_room(*args)

    monkeypatch.setattr(agent.harvest, "make_room", slowly)
    fixed = low_vm("high-1", priority="fixed", nominal={"cpu_cores": 4.5, "memory_mib": 1600.0}, minimum={})
    assert (await client.post("/v1/vms", json={"request_id": "c", "vm": fixed})).status == 202
    assert (await client.post("/v1/vms", json={"request_id": "c2", "vm": fixed})).status == 409
    assert (await command("DELETE", "/v1/vms/high-1?request_id=d")).state == "done"
    assert "d" in host.journal.deleted
    go_on.set()
    ended = await agent.requests.operations.get("c", 10)
    assert ended is not None
    assert (ended.state, ended.sentence) == ("failed", "high-1 was deleted meanwhile")
    assert list(host.vms) == ["spare"]


async def test_a_target_gets_what_harvest_vms_hold(client: Client, command: Command, spare: Domain, host: Host) -> None:
    body = {"request_id": "c", "vm": low_vm("low-1", nominal={"cpu_cores": 4.0, "memory_mib": 800.0}), "start_size": {"cpu_cores": 2.0, "memory_mib": 800.0}}  # fmt: skip  # noqa: E501
    assert (await command("POST", "/v1/vms", body)).state == "done"
    await until(lambda: host.vms["low-1"].link.connected)
    await grant(client, 1)
    await until(lambda: size(host).cpu_cores == 4)
    await host_idle(host)
    wish = {"generation": 2, "target": {"cpu_cores": 4.0, "memory_mib": 800.0}, "deadline_s": 20.0}
    operation = await command("PUT", "/v1/vms/low-1/target", {"request_id": "t", **wish})
    assert operation.state == "done", operation.sentence
    assert (size(host).cpu_cores, size(host, "low-1").cpu_cores) == (2, 4)


async def test_while_a_guest_is_under_pressure_harvest_vms_do_not_grow(
    client: Client, command: Command, spare: Domain, host: Host, world: World
) -> None:
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})).state == "done"
    await until(lambda: host.vms["low-1"].link.connected)
    press(world.domains["ebb-host-a.low-1"])
    await until(lambda: bool(host.vms["low-1"].pressure.sentence))
    await grant(client, 1)
    await looks(world)
    assert size(host) == ResourceVector(1, 1024)


async def test_a_paused_host_lets_nothing_grow(
    client: Client, command: Command, spare: Domain, host: Host, world: World
) -> None:
    assert (await command("PUT", "/v1/mode", {"request_id": "m", "mode": "paused"})).state == "done"
    await grant(client, 1)
    assert host.report().budget.cpu_cores == 3.5
    await looks(world)
    assert size(host).cpu_cores == 1
    assert (await command("PUT", "/v1/mode", {"request_id": "n", "mode": "active"})).state == "done"
    await until(lambda: size(host).cpu_cores == 4)


async def test_a_new_agent_has_the_budget_of_the_old_one(
    client: Client, spare: Domain, agent: Agent, world: World, tmp_path: Path
) -> None:
    await grant(client, 7, cpu_cores=1.5, memory_mib=512.0)
    await until(lambda: size(agent.host).cpu_cores == 2)
    await host_idle(agent.host)
    await agent.close()
    again = make_agent(world, tmp_path)
    await again.start()
    try:
        status = again.harvest.status()
        assert (status.number, status.room.cpu_cores, status.held.cpu_cores) == (7, 1.5, 1.5)
        await again.harvest.revoke("the test wants it")
        assert make_agent(world, tmp_path).harvest.status().room.vector() == ZERO
    finally:
        await again.close()


# --- starting deflated -----------------------------------------------------------------------------------------------


async def test_a_vm_starts_at_a_smaller_size_and_grows_to_nominal(command: Command, host: Host, world: World) -> None:
    body = {"request_id": "c", "vm": low_vm("low-1"), "start_size": {"cpu_cores": 1.5, "memory_mib": 450.0}}
    operation = await command("POST", "/v1/vms", body)
    assert operation.state == "done", operation.sentence
    domain = world.domains["ebb-host-a.low-1"]
    assert domain.resumed_with_quota == pytest.approx(0.5)
    assert domain.bound_mib == 450
    assert host.free() == ResourceVector(6 - 1.5, 3600 - 320 - 450)
    assert host.journal.changes[-1].cores_after == 1.5
    assert not host.vms["low-1"].status().held
    await until(lambda: host.vms["low-1"].link.connected)
    operation = await command("POST", "/v1/reinflations", {"request_id": "r", "vms": ["low-1"]})
    assert operation.state == "done", operation.sentence
    assert size(host, "low-1") == ResourceVector(3, 1024)
    assert (domain.bound_mib, domain.quota) == (1024, None)


@pytest.mark.parametrize(
    ("start_size", "field"),
    [
        ({"cpu_cores": 0.2, "memory_mib": 500.0}, "start_size.cpu_cores"),
        ({"cpu_cores": 4.0, "memory_mib": 500.0}, "start_size.cpu_cores"),
        ({"cpu_cores": 1.0, "memory_mib": 330.0}, "start_size"),
        ({"cpu_cores": 1.0, "memory_mib": 2000.0}, "start_size.memory_mib"),
    ],
)
async def test_a_size_at_which_it_cannot_start_is_refused(
    client: Client, world: World, start_size: dict[str, float], field: str
) -> None:
    response = await client.post("/v1/vms", json={"request_id": "c", "vm": low_vm("low-1"), "start_size": start_size})
    assert (response.status, (await response.json())["field"]) == (400, field)
    assert world.domains == {}


async def test_only_the_vms_that_are_named_grow(command: Command, two_vms: list[Domain], host: Host) -> None:
    assert (await reclaim(command, cpu_cores=3.0)).state == "done"
    operation = await command("POST", "/v1/reinflations", {"request_id": "r", "vms": ["low-2"]})
    assert [outcome.name for outcome in operation.vms] == ["low-2"]
    assert (size(host, "low-1").cpu_cores, size(host, "low-2").cpu_cores) == (1.5, 3)


async def test_a_size_that_was_set_by_a_target_is_reported_as_held(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 1024.0}}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    assert {vm.name: vm.held for vm in host.report().vms} == {"low-1": True, "low-2": False}
    assert (await command("POST", "/v1/reinflations", {"request_id": "r"})).state == "done"
    assert host.vms["low-1"].status().held, "nobody has named it"
    assert (await command("POST", "/v1/reinflations", {"request_id": "s", "vms": ["low-1"]})).state == "done"
    assert not host.vms["low-1"].status().held


async def test_a_growth_that_falls_short_is_not_tried_again_and_again(
    client: Client, spare: Domain, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the looks take, its pause is not over.
    monkeypatch.setattr(RepairPace, "due", lambda pace, now: pace.not_before == 0.0)
    world.failures["set_plugged"] = "the device is stuck"
    await grant(client, 1)
    await until(lambda: size(host).cpu_cores == 4)
    await looks(world, 10)
    await host_idle(host)
    assert size(host) == ResourceVector(4, 1024)
    assert [method for method, _ in world.calls].count("set_plugged") <= 2
