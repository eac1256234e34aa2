"""VMs are worked on side by side, one VM never twice at once; what somebody else starts is admitted first."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from hostagent.operations import size_commands
from hostagent.state.intents import Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.doing import reclaim
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain, World
from tests.waiting import until


async def test_two_vms_are_resized_side_by_side_and_one_vm_never_twice_at_once(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    for domain in two_vms:
        domain.application = "hang"
    begun = []
    for number, name in enumerate(("low-1", "low-2", "low-1")):
        body = {
            "request_id": f"t{number}",
            "generation": 2 + number,
            "target": {"cpu_cores": 1.0 + number / 10, "memory_mib": 900.0},
            "deadline_s": 6.0,
        }
        assert (await client.put(f"/v1/vms/{name}/target", json=body)).status == 202
        begun.append(body["request_id"])
    await until(lambda: all(host.vms[name].intent.phase is Phase.DEFLATING for name in ("low-1", "low-2")))
    assert host.vms["low-1"].intent.generation == 2, "the second one waits for the first"
    for request_id in begun:
        response = await client.get(f"/v1/operations/{request_id}?wait_s=20")
        assert (await response.json())["state"] == "done"
    assert host.vms["low-1"].status().current.cpu_cores == 1.2


async def test_a_reclaim_leaves_out_a_vm_that_stays_busy(
    client: Client, command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_commands, "WAIT_SHARE", 0.5 / 30.0)  # all but half a second is for the other one
    async with host.vms["low-1"].lock:
        body = {"request_id": "r", "need": {"cpu_cores": 1.0}, "deadline_s": 30.0}
        operation = await command("POST", "/v1/reclaims", body)
    assert operation.state == "done", operation.sentence
    assert [outcome.name for outcome in operation.vms] == ["low-2"]


@pytest.mark.parametrize("excluded", [False, True])
async def test_a_busy_vm_that_gives_nothing_is_neither_waited_for_nor_named(
    command: Command, two_vms: list[Domain], host: Host, excluded: bool
) -> None:
    body = {
        "request_id": "r",
        "need": {"cpu_cores": 6.0},
        "deadline_s": 600.0,
        "exclude": ["low-1"] if excluded else [],
    }
    if not excluded:
        host.slice = replace(host.slice, capacity=host.slice.capacity * 2.0)
        spec = low_vm("high", priority="fixed", nominal={"cpu_cores": 0.5, "memory_mib": 300.0}, minimum={})
        assert (await command("POST", "/v1/vms", {"request_id": "c-high", "vm": spec})).state == "done"
    async with host.vms["low-1" if excluded else "high"].lock:
        operation = await command("POST", "/v1/reclaims", body)
    assert operation.state == "partial", operation.sentence
    assert [outcome.name for outcome in operation.vms] == (["low-2"] if excluded else ["low-1", "low-2"])


async def test_reclaims_that_wait_for_the_same_vm_all_get_it_in_time(
    client: Client, two_vms: list[Domain], host: Host
) -> None:
    vm = host.vms["low-1"]
    async with vm.lock:
        for request_id in ("r-1", "r-2"):
            body = {"request_id": request_id, "need": {"cpu_cores": 1.0}, "deadline_s": 20.0}
            assert (await client.post("/v1/reclaims", json=body)).status == 202
        await until(lambda: vm.lock._queued + vm.lock._watching == 2)
    for request_id in ("r-1", "r-2"):
        operation = await (await client.get(f"/v1/operations/{request_id}?wait_s=20")).json()
        assert operation["state"] == "done", operation["sentence"]
        assert [(outcome["name"], outcome["errors"]) for outcome in operation["vms"]] == [("low-1", []), ("low-2", [])]


async def test_a_deletion_does_not_wait_for_a_deflation(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    two_vms[0].application = "hang"
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}, "deadline_s": 600.0}
    assert (await client.put("/v1/vms/low-1/target", json=body)).status == 202
    await until(lambda: ("application.status", "") in [(m, "") for m, _ in world.guest_calls])
    operation = await command("DELETE", "/v1/vms/low-1?request_id=gone")
    assert operation.state == "done", operation.sentence
    response = await client.get("/v1/operations/t?wait_s=5")
    assert "it is being removed" in (await response.json())["sentence"]


async def test_a_vm_that_somebody_else_starts_is_held_to_its_size_before_it_runs(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=1000.0)
    domain, vm = two_vms[0], host.vms["low-1"]
    assert domain.starts_with == (1.5, 524.0)
    domain.state = "stopped"
    await until(lambda: not vm.running)
    # As a foreign start leaves it: all CPUs, no quota, no balloon.
    domain.online, domain.quota, domain.plugged_mib, domain.balloon_mib = {0, 1, 2}, None, 12.0, 512.0
    calls = len(world.calls)
    domain.state, domain.resumed_with_quota = "running", None
    await until(lambda: vm.running)
    assert domain.resumed_with_quota == pytest.approx(0.5)
    assert [method for method, name in world.calls[calls:] if name == "ebb-host-a.low-1"].index("suspend") < 4


async def test_a_vm_that_somebody_else_starts_stays_paused_where_its_memory_does_not_fit(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, cpu_cores=2.0, memory_mib=1300.0)
    big = low_vm("big", priority="fixed", nominal={"cpu_cores": 0.5, "memory_mib": 1800.0}, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "c-big", "vm": big})).state == "done"
    domain, vm = two_vms[0], host.vms["low-1"]
    domain.state = "stopped"
    await until(lambda: not vm.running)
    domain.state, domain.plugged_mib, domain.balloon_mib = "running", 512.0, 512.0
    await until(lambda: vm.intent.phase is Phase.ADMITTING and domain.state == "paused")
    domain.state = "stopped"
    await until(lambda: vm.intent.phase is Phase.STOPPED)
    assert (domain.state, vm.running) == ("stopped", False), "nothing is left to admit"
    domain.state = "running"
    await until(lambda: vm.intent.phase is Phase.ADMITTING and domain.state == "paused")
    await command("DELETE", "/v1/vms/big?request_id=gone")
    await until(lambda: vm.running)
    assert domain.state == "running"
    taken = sum(vm.allocation().charge.memory_mib for vm in host.vms.values())
    assert taken <= host.slice.capacity.memory_mib


async def test_what_a_started_vm_has_loaded_already_does_not_count_against_it_twice(
    two_vms: list[Domain], host: Host
) -> None:
    """libvirt has read back its saved memory, and the machine has that much less."""
    domain, vm = two_vms[0], host.vms["low-1"]
    domain.state = "stopped"
    await until(lambda: not vm.running)
    host.memory_available_mib = lambda: host.slice.reserve_mib + 500.0
    domain.state = "running"
    await until(lambda: domain.state == "paused")
    assert host.fits(vm.intent.spec.allocation(vm.intent.committed.vector(), 0.0)) is False
    cast(FakeHypervisor, host.hypervisor).residents[vm.domain] = 900.0
    await until(lambda: vm.running)


async def test_a_vm_whose_admission_breaks_off_before_it_runs_is_admitted_again(
    two_vms: list[Domain], host: Host, world: World
) -> None:
    domain, vm = two_vms[0], host.vms["low-1"]
    domain.state = "stopped"
    await until(lambda: not vm.running)
    world.failures["resume"] = "busy"
    world.calls.clear()
    domain.state = "running"
    await until(lambda: ("resume", vm.domain) in world.calls)
    world.failures.clear()
    await until(lambda: vm.running)
    assert (domain.state, vm.intent.phase) == ("running", Phase.SETTLED)


async def test_how_often_the_quota_stops_a_vm_is_told(command: Command, two_vms: list[Domain], host: Host) -> None:
    assert host.vms["low-1"].status().throttled_share is None
    await reclaim(command, cpu_cores=3.0)
    await until(lambda: host.vms["low-1"].status().throttled_share == 0.25)


async def test_a_host_is_drained_when_the_vms_that_were_to_be_created_before_are_there(
    client: Client, command: Command, host: Host, world: World
) -> None:
    world.delay = lambda: 0.05
    assert (await client.post("/v1/vms", json={"request_id": "slow", "vm": low_vm("low-1")})).status == 202
    operation = await command("PUT", "/v1/mode", {"request_id": "drain", "mode": "draining"})
    assert operation.progress == ("create slow was begun before and ends",)
    assert host.vms["low-1"].running
