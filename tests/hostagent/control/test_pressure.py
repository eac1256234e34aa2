"""A guest under memory pressure is shrunk no further and gets at once what its host can spare (rule 6)."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing import pressure_response
from ebbtide.deflation.sharing.pressure_response import Neighbours
from ebbtide.messages.guest import GuestStatus, PressureNotice, RequestNotice
from ebbtide.messages.vms import VMState
from hostagent.control import reconciler
from hostagent.control.pressure_response import respond_to_pressure_of
from hostagent.operations import mode_commands
from hostagent.operations.size_commands import SizeCommands
from hostagent.state.intents import Phase, Request
from hostagent.vm.host import Host, plan_all
from tests.hostagent.agent_process import OVERHEAD_MIB
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.doing import reclaim
from tests.hostagent.world import Domain, World
from tests.waiting import until


def press(domain: Domain) -> None:
    """The guest's tasks wait for memory, and there is next to none available."""
    domain.stalled_percent = 60.0
    domain.used_mib = domain.bound_mib - domain.cache_mib - 8.0


def calm(domain: Domain) -> None:
    domain.stalled_percent = 0.0
    domain.used_mib = 80.0


async def test_a_deflated_vm_under_pressure_gets_all_back_at_once(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, memory_mib=800.0)
    assert two_vms[0].bound_mib == 1024 - 400
    press(two_vms[0])
    await until(lambda: two_vms[0].bound_mib == 1024)
    assert two_vms[1].bound_mib == 1024 - 400, "the other one has not asked"
    await until(lambda: host.vms["low-1"].status().current.memory_mib == 1024)


async def test_it_gets_no_more_than_is_free_and_the_rest_stands_in_the_report(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=2.0, memory_mib=1000.0)
    fixed = low_vm("fixed", priority="fixed", nominal={"cpu_cores": 1.0, "memory_mib": 1300.0}, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "f", "vm": fixed})).state == "done"
    free = host.free().memory_mib
    assert 0 < free < 500
    before = two_vms[0].bound_mib
    press(two_vms[0])
    await until(lambda: two_vms[0].bound_mib == before + free)
    status = host.vms["low-1"].status()
    assert status.pressure is not None
    assert status.pressure.startswith("under memory pressure")
    await until(lambda: host.vms["low-1"].status().asks.memory_mib == 1024 - before - free)
    assert host.free().memory_mib == 0


async def test_a_harvest_vm_gives_first(command: Command, host: Host, world: World) -> None:
    harvest = low_vm(
        "harvest",
        priority="harvest",
        nominal={"cpu_cores": 1.0, "memory_mib": 1024.0},
        minimum={"cpu_cores": 0.5, "memory_mib": 320.0},
        ceiling={"cpu_cores": 1.0, "memory_mib": 1024.0},
    )
    for name, vm in (("low-1", low_vm("low-1")), ("harvest", harvest)):
        assert (await command("POST", "/v1/vms", {"request_id": f"c-{name}", "vm": vm})).state == "done"
    await until(lambda: all(vm.link.connected for vm in host.vms.values()))
    target = {"cpu_cores": 3.0, "memory_mib": 700.0}
    body = {"request_id": "t", "generation": 2, "target": target, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    fixed = low_vm("fixed", priority="fixed", nominal={"cpu_cores": 1.0, "memory_mib": 900.0}, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "f", "vm": fixed})).state == "done"
    free = host.free().memory_mib
    assert free < 324
    low = world.domains["ebb-host-a.low-1"]
    press(low)
    await until(lambda: low.bound_mib == 1024)
    assert world.domains["ebb-host-a.harvest"].bound_mib == 1024 - (324 - free)


async def test_pressure_that_rises_in_the_middle_stops_a_deflation_and_undoes_it(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    two_vms[0].application = "hang"
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 500.0}, "deadline_s": 600.0}
    assert (await client.put("/v1/vms/low-1/target", json=body)).status == 202
    await until(lambda: any(method == "application.status" for method, _ in world.guest_calls))
    press(two_vms[0])
    host.vms["low-1"].pressure.observe(await _status(host))
    response = await client.get("/v1/operations/t?wait_s=10")
    operation = await response.json()
    assert operation["state"] == "partial"
    assert "stopped: under memory pressure" in operation["sentence"]
    await until(lambda: host.vms["low-1"].status().state is VMState.RUNNING and two_vms[0].bound_mib == 1024)


async def test_a_vm_under_pressure_gives_nothing_to_others_until_it_is_calm(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    press(two_vms[0])
    await until(lambda: host.vms["low-1"].status().pressure is not None)
    assert host.report().deflatable.memory_mib == 1024 - 320
    operation = await reclaim(command, memory_mib=200.0)
    assert operation.state == "done", operation.sentence
    assert [outcome.name for outcome in operation.vms] == ["low-2"]


async def _status(host: Host) -> GuestStatus:
    return await host.vms["low-1"].link.call("status", {}, GuestStatus, 5.0)


@pytest.mark.slow
async def test_a_guest_that_thrashes_and_says_nothing_is_seen_through_its_balloon_driver(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, memory_mib=800.0)
    world.guests_answer = False
    press(two_vms[0])
    await until(lambda: two_vms[0].bound_mib == 1024)
    assert host.vms["low-1"].status().pressure is not None
    assert host.vms["low-2"].status().pressure is None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are asked at once, and responses come one after the other."""
    monkeypatch.setattr(pressure_response, "LASTING_S", 0.0)
    monkeypatch.setattr(reconciler, "PRESSURE_PAUSE_S", 0.1)


@pytest.fixture
async def full_host(command: Command, two_vms: list[Domain], host: Host) -> list[Domain]:
    """Two VMs of 524 MiB, whose minimums are 320, and nothing is free."""
    await reclaim(command, cpu_cores=2.0, memory_mib=1000.0)
    room = host.free().memory_mib - OVERHEAD_MIB
    fixed = low_vm("fixed", priority="fixed", nominal={"cpu_cores": 1.0, "memory_mib": room}, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "f", "vm": fixed})).state == "done"
    assert [domain.bound_mib for domain in two_vms] == [524, 524]
    return two_vms


async def test_a_neighbour_without_pressure_gives_down_to_its_minimum(
    full_host: list[Domain], host: Host, impatient: None
) -> None:
    low, neighbour = full_host
    press(low)
    await until(lambda: neighbour.bound_mib <= 320 + 2 and low.bound_mib >= 524 + 204 - 2)
    told = [decision.sentence for decision in host.history.decisions("low-2") if decision.kind == "pressure"]
    assert told == ["204 MiB are asked of it for low-1, which is under pressure"]


async def test_where_a_harvest_vm_has_nothing_to_spare_the_idle_neighbour_gives_and_the_other_is_not_asked_again_soon(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure_response, "LASTING_S", 0.0)
    monkeypatch.setattr(reconciler.Reconciler, "_start_response", lambda self, vm: None)
    size = {"cpu_cores": 0.5, "memory_mib": 900.0}
    least = {"cpu_cores": 0.5, "memory_mib": 320.0}
    harvest = low_vm("harvest", priority="harvest", nominal=size, ceiling=size, minimum=least)
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 700.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    assert (await command("POST", "/v1/vms", {"request_id": "h", "vm": harvest})).state == "done"
    await until(lambda: host.vms["harvest"].link.connected)
    host.slice = replace(host.slice, capacity=host.slice.capacity.less(host.free()))
    low, neighbour = two_vms
    stuck = world.domains["ebb-host-a.harvest"]
    stuck.used_mib = stuck.bound_mib - 60.0  # no pressure, and next to nothing above its reserve
    vm, neighbours = host.vms["low-1"], Neighbours()
    press(low)
    vm.pressure.observe(await _status(host))
    neighbours.observe(asyncio.get_running_loop().time(), host.vms, [vm.name])
    await respond_to_pressure_of(host, vm, neighbours)
    assert stuck.bound_mib > 800
    assert (low.bound_mib, host.vms["low-1"].asks.memory_mib) == (1024, 0)
    assert neighbour.bound_mib == 1024 - (324 - (900 - stuck.bound_mib))
    assert neighbours.unable(asyncio.get_running_loop().time()) == {"harvest"}


async def test_a_guests_own_request_takes_nothing_from_its_neighbours(
    full_host: list[Domain], host: Host, impatient: None
) -> None:
    host.vms["low-1"].pressure.heard(RequestNotice(memory_mib=400.0, reason="I want it"))
    await until(lambda: host.vms["low-1"].status().asks.memory_mib == 400)
    assert [domain.bound_mib for domain in full_host] == [524, 524]


async def grown_to(host: Host, domain: Domain, memory_mib: float) -> None:
    """low-1, on a host that has got room, while its guest goes on to complain; no response comes first."""
    vm = host.vms["low-1"]
    async with vm.lock:
        host.slice = replace(host.slice, capacity=host.slice.capacity + ResourceVector(memory_mib=500))
        size = vm.allocation().current.with_component("memory_mib", memory_mib)
        plan_all(host, {"low-1": size}, Request("r", "reinflate", {}, 0.0))
        await host.resize_one(vm, 20.0)
        press(domain)
        vm.pressure.observe(await _status(host))


async def test_one_that_has_got_all_it_was_sold_asks_the_manager_for_nothing_though_its_pressure_lasts(
    command: Command, full_host: list[Domain], host: Host
) -> None:
    vm = host.vms["low-1"]
    press(full_host[0])
    await until(lambda: vm.status().asks.memory_mib == 500)
    await grown_to(host, full_host[0], 1024.0)
    assert vm.pressure.sentence
    await until(lambda: vm.pressure.wants.memory_mib == 0)
    await respond_to_pressure_of(host, vm, Neighbours())
    assert vm.status().asks.memory_mib == 0


async def test_what_a_vm_asked_for_before_its_host_was_paused_is_told_only_as_far_as_it_still_lacks_it(
    command: Command, full_host: list[Domain], host: Host
) -> None:
    vm = host.vms["low-1"]
    press(full_host[0])
    await until(lambda: vm.status().asks.memory_mib == 500)
    assert (await command("PUT", "/v1/mode", {"request_id": "p", "mode": "paused"})).state == "done"
    await grown_to(host, full_host[0], 824.0)
    assert vm.pressure.sentence
    assert (vm.asks.memory_mib, vm.status().asks.memory_mib) == (500, 200)


@pytest.mark.parametrize("moves", [False, True], ids=["it is being stopped", "it moves to another host"])
async def test_no_neighbour_gives_for_one_that_cannot_be_given_anything(
    full_host: list[Domain], host: Host, impatient: None, moves: bool
) -> None:
    vm, neighbours = host.vms["low-1"], Neighbours()
    async with vm.lock:
        if moves:
            await vm.record.store(phase=Phase.LEAVING)
        else:
            vm.resizer.mark_terminating("it is being stopped")
    press(full_host[0])
    vm.pressure.observe(await _status(host))
    assert vm.pressure.wants.memory_mib == 500
    neighbours.observe(asyncio.get_running_loop().time(), host.vms, [vm.name])
    await respond_to_pressure_of(host, vm, neighbours)
    assert [domain.bound_mib for domain in full_host] == [524, 524]


@pytest.mark.parametrize("deflated", [False, True], ids=["it wants nothing", "it wants its memory back"])
async def test_a_guest_that_says_its_pressure_again_and_again_is_looked_at_no_more_often_for_it(
    command: Command, two_vms: list[Domain], host: Host, deflated: bool
) -> None:
    if deflated:
        await reclaim(command, memory_mib=800.0)
    vm, asked = host.vms["low-1"], []
    vm.host = replace(vm.host, request_check=lambda: asked.append("check"))
    press(two_vms[0])
    notice = PressureNotice.model_validate((await _status(host)).model_dump())
    vm.link._on_notice(notice)
    assert asked, "pressure has begun"
    now = asyncio.get_running_loop().time()
    vm.drift_repair.pace.tried(now)
    for _ in range(20):
        vm.link._on_notice(notice)
    assert len(asked) == (2 if deflated else 1)
    assert not vm.drift_repair.pace.due(now), "a repair that does not hold is not hurried either"


async def test_between_two_surveys_is_a_least_pause_however_often_one_is_asked_for(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []

    async def begun(one: reconciler.Reconciler) -> None:
        rounds.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(reconciler.Reconciler, "_round", begun)
    while len(rounds) < 4:
        host.check_requested.set()
        await asyncio.sleep(0.01)
    assert min(later - earlier for earlier, later in pairwise(rounds)) > 0.1


async def test_what_comes_free_is_kept_for_the_vm_under_pressure_before_its_idle_neighbour(
    command: Command, full_host: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "PRESSURE_PAUSE_S", 1000.0)  # one response, and no other for now
    press(full_host[0])
    await until(lambda: host.vms["low-1"].status().asks.memory_mib == 500)
    host.slice = replace(host.slice, capacity=host.slice.capacity + ResourceVector(memory_mib=50))
    body = {"request_id": "r", "vms": ["low-2"], "deadline_s": 20.0}
    assert (await command("POST", "/v1/reinflations", body)).state == "done"
    assert full_host[1].bound_mib == 524


@pytest.mark.parametrize("busy", [False, True], ids=["it grows", "another operation has it"])
async def test_a_draining_host_shares_no_room_past_the_vm_under_pressure(
    command: Command, full_host: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(reconciler, "PRESSURE_PAUSE_S", 1000.0)  # one response, and no other for now
    if busy:
        monkeypatch.setattr(mode_commands, "DEADLINE_S", 1.0)  # it is not waited for
    vm, given = host.vms["low-1"], asyncio.Event()
    give = SizeCommands.give

    async def giving(*arguments: Any) -> Any:
        outcomes = await give(*arguments)
        given.set()
        return outcomes

    monkeypatch.setattr(SizeCommands, "give", giving)
    press(full_host[0])
    await until(lambda: vm.status().asks.memory_mib == 500 and not vm.lock.locked())
    host.slice = replace(host.slice, capacity=host.slice.capacity + ResourceVector(memory_mib=50))
    async with vm.lock if busy else contextlib.nullcontext():
        assert (await command("PUT", "/v1/mode", {"request_id": "m", "mode": "draining"})).state == "done"
        async with asyncio.timeout(20):
            await given.wait()
        assert [domain.bound_mib for domain in full_host] == [524 if busy else 574, 524]


async def test_a_vm_that_is_off_wants_nothing_and_one_that_is_started_again_begins_without_pressure(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing_to_spare(*of_whom: Any) -> None:
        pass

    monkeypatch.setattr(reconciler, "respond_to_pressure_of", nothing_to_spare)
    await reclaim(command, memory_mib=800.0)
    pressed = host.vms["low-1"]
    press(two_vms[0])
    await until(lambda: pressed.pressure.wants.memory_mib == 400.0)
    host.memory_available_mib = lambda: host.slice.reserve_mib + 400.0
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    assert (await command("POST", "/v1/reinflations", {"request_id": "r"})).state == "done"
    assert host.vms["low-2"].allocation().current.memory_mib == 1024
    host.memory_available_mib, world.guests_answer = lambda: 1e6, False
    assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "up"})).state == "done"
    assert pressed.pressure.sentence == ""


async def test_a_vm_that_is_saved_wants_nothing_until_it_goes_on(two_vms: list[Domain], host: Host) -> None:
    vm = host.vms["low-1"]
    press(two_vms[0])
    await until(lambda: host.under_pressure() == [vm])
    runs = vm.intent
    vm.record.intent = runs.changed(phase=Phase.STOPPED, saved_mib=512.0)
    assert host.under_pressure() == []
    vm.record.intent = runs
    assert host.under_pressure() == [vm]


async def test_a_guest_that_is_reset_from_outside_begins_without_pressure(
    two_vms: list[Domain], host: Host, world: World
) -> None:
    vm = host.vms["low-1"]
    press(two_vms[0])
    await until(lambda: vm.pressure.sentence != "")
    world.guests_answer = False
    vm.guest_boots()
    assert (vm.pressure.sentence, vm.pressure.said) == ("", None)
