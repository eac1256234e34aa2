"""Domains that are off or paused though no command of ours made them so, and calls of the hypervisor that fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ebbtide.deflation.resources import ZERO
from ebbtide.messages.vms import VMState
from hostagent.errors import HypervisorError
from hostagent.libvirt.hypervisor import DomainSummary
from hostagent.operations import mode_commands
from hostagent.state.intents import Phase
from hostagent.vm import executor
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command
from tests.hostagent.doing import host_idle, reclaim, report
from tests.hostagent.operations.test_modes import set_mode, sizes, status
from tests.hostagent.world import Domain, World
from tests.waiting import until

NOT_RUNNING = "Requested operation is not valid: domain is not running"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "RETRY_S", 0.0)


async def test_a_vm_that_went_off_by_itself_is_charged_nothing_and_keeps_its_row_and_its_domain(
    command: Command, two_vms: list[Domain], host: Host, world: World, client: Client
) -> None:
    free = host.free()
    two_vms[0].state = "stopped"
    await until(lambda: host.vms["low-1"].intent.phase is Phase.STOPPED)
    status = host.vms["low-1"].status()
    assert (status.state, status.current.vector(), status.overhead_mib) == (VMState.STOPPED, ZERO, 0.0)
    assert status.off_reason == "its domain has ended, and not by a command; it holds no room and keeps its disk"
    assert host.free().cpu_cores == free.cpu_cores + 3.0
    assert (await report(client)).deflatable.memory_mib == 1024.0 - 320.0, "that of low-2"
    assert "low-1 is off" in host.history.decisions("low-1")[-1].sentence
    assert host.journal.changes[-1].cores_after == 0.0
    assert "ebb-host-a.low-1" in world.domains
    started = await command("POST", "/v1/vms/low-1/start", {"request_id": "s"})
    assert (started.state, host.vms["low-1"].status().current.memory_mib) == ("done", 1024.0)


async def test_a_domain_that_ends_in_the_middle_of_a_deflation_frees_what_it_held(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_plugged = host.hypervisor.sizes.set_plugged

    async def killed(domain: str, plugged_mib: float, limit_s: float) -> str:
        if domain == "ebb-host-a.low-1":
            two_vms[0].state = "stopped"
            raise HypervisorError(NOT_RUNNING)
        return await set_plugged(domain, plugged_mib, limit_s)

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", killed)
    operation = await reclaim(command, memory_mib=600.0)
    assert (operation.state, operation.shortfall.vector()) == ("done", ZERO), operation.sentence
    assert operation.sentence.count("its domain ended while it was being resized") == 1
    (gone,) = [outcome for outcome in operation.vms if outcome.name == "low-1"]
    assert (gone.after.vector(), gone.errors) == (ZERO, ())
    assert host.vms["low-1"].intent.phase is Phase.STOPPED
    assert host.vms["low-1"].allocation().charge == ZERO


async def test_a_domain_that_ends_in_the_middle_of_a_deflation_is_waited_for_no_longer(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(domain: str, plugged_mib: float, limit_s: float) -> str:
        two_vms[0].state = "stopped"
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", never)
    body = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 3.0, "memory_mib": 600.0}, "deadline_s": 600.0}
    async with asyncio.timeout(60):
        operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert "low-1 is off (its domain ended while it was being resized)" in operation.sentence


async def test_a_target_for_a_domain_that_ends_meanwhile_fails_in_one_sentence(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def saved(domain: str, plugged_mib: float, limit_s: float) -> str:
        two_vms[0].state = "stopped"
        raise HypervisorError(NOT_RUNNING)

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", saved)
    body = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 3.0, "memory_mib": 600.0}, "deadline_s": 20.0}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert operation.state == "failed"
    assert operation.sentence == (
        "low-1 is off (its domain ended while it was being resized): it holds nothing and keeps its disk"
    )


async def test_a_paused_vm_is_called_paused_is_charged_in_full_and_gives_nothing(
    command: Command, two_vms: list[Domain], host: Host, client: Client
) -> None:
    free = host.free()
    two_vms[0].state = "paused"
    await until(lambda: host.vms["low-1"].status().state is VMState.PAUSED)
    assert host.free() == free
    assert (await report(client)).deflatable.memory_mib == 1024.0 - 320.0, "that of low-2"
    operation = await reclaim(command, memory_mib=600.0)
    assert [outcome.name for outcome in operation.vms] == ["low-2"]
    response = await client.post("/v1/vms/low-1/start", json={"request_id": "s"})
    assert response.status == 409
    assert "it is paused" in await response.text()
    two_vms[0].state = "running"
    await until(lambda: host.vms["low-1"].status().state is VMState.RUNNING)


async def test_a_target_for_a_paused_vm_is_refused_by_that_name(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    two_vms[0].state = "paused"
    await until(lambda: host.vms["low-1"].status().state is VMState.PAUSED)
    body = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 1.0, "memory_mib": 600.0}, "deadline_s": 20.0}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert (operation.state, operation.sentence) == ("failed", "low-1 cannot be resized now: it is paused")
    assert host.vms["low-1"].allocation().current.memory_mib == 1024.0


@pytest.mark.slow
async def test_a_domain_that_is_paused_in_the_middle_of_a_deflation_is_an_error_and_no_shortfall(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_plugged = host.hypervisor.sizes.set_plugged

    async def paused(domain: str, plugged_mib: float, limit_s: float) -> str:
        if domain == "ebb-host-a.low-1":
            two_vms[0].state = "paused"
            return "the memory device stopped"
        return await set_plugged(domain, plugged_mib, limit_s)

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", paused)
    operation = await reclaim(command, memory_mib=600.0)
    (halted,) = [outcome for outcome in operation.vms if outcome.name == "low-1"]
    assert halted.errors == ("it is paused: another program did that while it was being resized",)
    # At once, not at the next look: the manager reads the host as soon as the operation has ended.
    assert host.vms["low-1"].status().state is VMState.PAUSED


async def test_a_call_that_fails_once_is_tried_again_and_costs_nothing(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_quota, failures = host.hypervisor.sizes.set_quota, ["internal error: the cgroup is busy"]

    async def fails_once(*arguments: Any) -> None:
        if failures:
            raise HypervisorError(failures.pop())
        await set_quota(*arguments)

    monkeypatch.setattr(host.hypervisor.sizes, "set_quota", fails_once)
    operation = await reclaim(command, cpu_cores=1.0)
    assert failures == []
    assert operation.state == "done", operation.sentence
    assert [outcome.errors for outcome in operation.vms] == [(), ()]


async def test_a_call_that_keeps_failing_is_an_error_and_not_a_shortfall_of_the_vm(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(domain: str, plugged_mib: float, limit_s: float) -> str:
        raise HypervisorError("internal error: qemu unexpectedly closed the monitor")

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", fails)
    monkeypatch.setattr(host.hypervisor.sizes, "set_balloon", fails)
    operation = await reclaim(command, memory_mib=600.0)
    assert operation.state == "partial"
    for outcome in operation.vms:
        assert outcome.errors == ("internal error: qemu unexpectedly closed the monitor",)
        assert outcome.sentence.count("unexpectedly closed") == 1
    assert host.vms["low-1"].allocation().current.memory_mib == 1024.0


async def test_a_survey_that_is_old_by_now_takes_no_running_vm_for_one_that_is_off(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = host.hypervisor.survey

    async def old() -> dict[str, DomainSummary]:
        return {name: replace(found, state="stopped") for name, found in (await survey()).items()}

    monkeypatch.setattr(host.hypervisor, "survey", old)
    asked = world.calls.count(("domains", ""))
    for vm in host.vms.values():
        vm.request_check()
    await until(lambda: world.calls.count(("domains", "")) >= asked + 4)
    assert all(vm.running and vm.intent.phase is Phase.SETTLED for vm in host.vms.values())
    assert not any(change.cores_after == 0.0 for change in host.journal.changes)


async def test_limits_that_cannot_be_looked_at_hold_up_no_check(
    two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = asyncio.Event()

    async def hanging() -> dict[str, str]:
        hangs.set()
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(host.hypervisor.sizes, "check_limits", hanging)
    async with asyncio.timeout(20):
        await hangs.wait()
    two_vms[0].state = "stopped"
    await until(lambda: host.vms["low-1"].intent.phase is Phase.STOPPED)


async def test_a_start_waits_for_who_has_just_found_its_vm_off(
    client: Client, two_vms: list[Domain], host: Host
) -> None:
    vm = host.vms["low-1"]
    two_vms[0].state = "stopped"
    await until(lambda: vm.intent.phase is Phase.STOPPED)
    await vm.lock.acquire()
    asked = asyncio.create_task(client.post("/v1/vms/low-1/start", json={"request_id": "s"}))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.05, vm.lock.release)
    assert (await asked).status == 202
    await until(lambda: vm.running)


async def test_off_a_vm_that_another_program_has_paused_is_still_to_be_undone(
    client: Client, command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode_commands, "KEEP_S", 0.1)
    await reclaim(command, cpu_cores=4.0)
    await host_idle(host)
    committed = host.vms["low-1"].intent.committed
    two_vms[0].state = "paused"
    await until(lambda: host.vms["low-1"].paused)
    operation = await set_mode(command, "off")
    assert operation.state == "partial"
    assert "since another program has paused it" in operation.sentence
    assert host.vms["low-1"].intent.committed == committed
    (left,) = (await status(client)).unfinished
    assert left.startswith("low-1 lacks")
    two_vms[0].state = "running"
    await until(lambda: sizes(two_vms[0]) == (3, None, 1024.0))
    await until(lambda: not host.modes.unfinished)
