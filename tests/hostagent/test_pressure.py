"""A guest under memory pressure is shrunk no further and gets at once what its host can spare (rule 6)."""

from __future__ import annotations

from deflation.guest_messages import GuestStatus
from deflation.messages import VMState
from hostagent.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.doing import reclaim
from tests.hostagent.waiting import until
from tests.hostagent.world import Domain, World


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


async def test_a_guest_that_thrashes_and_says_nothing_is_seen_through_its_balloon_driver(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, memory_mib=800.0)
    world.guests_answer = False
    press(two_vms[0])
    await until(lambda: two_vms[0].bound_mib == 1024)
    assert host.vms["low-1"].status().pressure is not None
    assert host.vms["low-2"].status().pressure is None
