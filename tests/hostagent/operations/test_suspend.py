"""A preempted VM is suspended: its memory is saved and it goes on where it was, or is stopped with the reason told."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.resources import ZERO
from ebbtide.messages.commands import Command as Deletion
from hostagent.control.overcommitment import Overcommitment
from hostagent.errors import HypervisorTimeout, JournalError
from hostagent.libvirt.hypervisor import Saved, ToSave
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.agent_process import OVERHEAD_MIB
from tests.hostagent.conftest import Client, Command, has_failed, low_vm, succeeding
from tests.hostagent.doing import report
from tests.hostagent.world import Domain, World
from tests.waiting import until

LOW = "ebb-host-a.low-1"


async def suspend(command: Command, limit_s: float = 30.0, request_id: str = "p") -> Any:
    body = {"request_id": request_id, "limit_s": limit_s, "reason": "shortfall", "suspend": True}
    return await command("POST", "/v1/vms/low-1/stop", body)


async def start(command: Command, request_id: str = "back", **fields: Any) -> Any:
    return await command("POST", "/v1/vms/low-1/start", {"request_id": request_id, **fields})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostagent.vm.notice.POLLED_S", 0.1)


async def test_a_vm_is_deflated_told_and_saved_and_goes_on_with_its_memory(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    domain, vm = world.domains[LOW], host.vms["low-1"]
    suspended = await suspend(command)
    assert suspended.state == "done"
    assert "its guest was told" in suspended.sentence
    assert "its memory, " in suspended.sentence
    assert {told["kind"] for told in world.notices} == {"suspend"}
    status = (await report(client)).vms[0]
    assert (domain.state, status.state, status.saved_mib) == ("stopped", "stopped", domain.saved_mib)
    held_mib = domain.bound_mib
    assert held_mib < 1024, "what it could do without need not be saved"
    assert status.start_size is not None
    assert status.start_size.memory_mib == held_mib
    assert vm.allocation().charge.is_zero()

    back = await start(command, start_size={"cpu_cores": 1.0, "memory_mib": 1024.0})
    assert back.state == "done", back.sentence
    assert (domain.state, domain.bound_mib, vm.intent.saved_mib) == ("running", held_mib, None)
    status = (await report(client)).vms[0]
    assert (status.current.cpu_cores, status.current.memory_mib) == (1.0, held_mib), "its memory is what was saved"
    assert domain.resumed_with_quota is not None, "held to its size before its vCPUs run"
    assert status.saved_mib is None
    await until(lambda: world.withdrawn == ["p"])
    await until(lambda: vm.intent.told == "")


def swap_backs_limits(world: World, domain: Domain) -> None:
    """Its guest has next to nothing to give, so that only a limit can take its memory."""
    world.has_swap, domain.findings = True, [["memory-limit", True, "swap backs it"]]
    domain.cache_mib, domain.application = 880.0, "refuse"


async def test_what_would_only_go_into_swap_is_not_taken_before_it_is_saved(
    command: Command, world: World, two_vms: list[Domain]
) -> None:
    domain = world.domains[LOW]
    swap_backs_limits(world, domain)
    world.calls.clear()
    assert "was saved" in (await suspend(command, 60.0)).sentence
    assert ("set_limit", LOW) not in world.calls[: world.calls.index(("save", LOW))]
    assert domain.limit_mib is None


async def test_what_swap_holds_of_it_is_charged_from_its_next_start_on_and_not_while_it_is_saved(
    command: Command, host: Host, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, neighbour = world.domains[LOW], host.vms["low-2"]
    swap_backs_limits(world, domain)
    smaller = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 700.0}}
    assert (await command("PUT", "/v1/vms/low-1/target", smaller)).state == "done"
    assert domain.limit_mib == 700
    room = {"cpu_cores": 1.0, "memory_mib": host.free().memory_mib - OVERHEAD_MIB}
    fixed = low_vm("fixed", priority="fixed", nominal=room, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "f", "vm": fixed})).state == "done"
    save, beyond = host.hypervisor.save, []

    async def watched(name: str, limit_s: float) -> Saved:
        beyond.append(host.overcommitted())
        await Overcommitment(host).look()
        return await save(name, limit_s)

    monkeypatch.setattr(host.hypervisor, "save", watched)
    assert "was saved" in (await suspend(command, 60.0)).sentence
    assert beyond == [ZERO]
    assert neighbour.allocation().current.memory_mib == 1024
    assert host.vms["low-1"].intent.committed.memory_mib == domain.bound_mib > 700


@pytest.mark.parametrize(("free_mib", "limit_s", "why"), [(100.0, 30.0, "which has 100"), (1e6, 2.0, "of its notice")])
async def test_without_room_or_time_it_is_stopped_and_that_is_told(
    client: Client, command: Command, world: World, two_vms: list[Domain], free_mib: float, limit_s: float, why: str
) -> None:
    world.save_room_mib = free_mib
    stopped = await suspend(command, limit_s)
    assert stopped.state == "done"
    assert "it was not suspended: " in stopped.sentence
    assert why in stopped.sentence
    assert "its guest powered off" in stopped.sentence
    assert {told["kind"] for told in world.notices} == {"stop"}
    assert ("save", LOW) not in world.calls
    status = (await report(client)).vms[0]
    assert (status.state, status.saved_mib) == ("stopped", None)


async def test_a_save_that_fails_ends_as_a_stop(
    client: Client, command: Command, world: World, two_vms: list[Domain]
) -> None:
    world.failures["save"] = "no space left on device"
    stopped = await suspend(command)
    assert "it was not suspended: no space left on device; its guest powered off" in stopped.sentence
    assert (await report(client)).vms[0].saved_mib is None


async def test_a_disk_that_is_too_slow_is_found_out_and_leaves_the_guest_time_to_power_off(
    command: Command, host: Host, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    async def large(domain: str) -> ToSave:
        return ToSave(4000.0, 4096.0, 1e6)

    async def too_slow(domain: str, limit_s: float) -> Saved:
        limits.append(limit_s)
        raise HypervisorTimeout(f"libvirt did not answer within {limit_s:g} s")

    monkeypatch.setattr(host.hypervisor, "to_save", large)
    monkeypatch.setattr(host.hypervisor, "save", too_slow)
    stopped = await suspend(command, 300.0)
    assert "it was not suspended: libvirt did not answer" in stopped.sentence
    assert "its guest powered off" in stopped.sentence
    assert 190 < limits[0] <= 200, "the last third of the notice is for the power-off"
    body = {"request_id": "p2", "limit_s": 300.0, "reason": "shortfall", "suspend": True}
    stopped = await command("POST", "/v1/vms/low-2/stop", body)
    assert len(limits) == 1, "it is not tried again with as much"
    assert "it was not suspended: saving its 4000 MiB may take" in stopped.sentence
    assert f"at {4000 / limits[0]:.0f} MiB/s" in stopped.sentence


async def test_a_guest_whose_save_took_all_of_the_notice_is_still_asked_to_power_off(
    command: Command, host: Host, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(domain: str, limit_s: float) -> Saved:
        monkeypatch.setattr("hostagent.operations.ending.left", lambda until: 0.0)
        raise HypervisorTimeout(f"libvirt did not answer within {limit_s:g} s")

    monkeypatch.setattr(host.hypervisor, "save", late)
    assert "its guest powered off within 5 s" in (await suspend(command)).sentence


async def test_a_start_that_fails_saves_it_again(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await suspend(command)
    world.failures["resume"] = "busy"
    assert (await start(command)).state == "failed"
    domain, vm = world.domains[LOW], host.vms["low-1"]
    assert (domain.state, vm.intent.phase) == ("stopped", Phase.STOPPED)
    assert vm.intent.saved_mib == domain.saved_mib is not None
    world.failures.clear()
    assert (await start(command, "again")).state == "done"


async def test_a_start_that_fails_and_cannot_be_saved_again_keeps_its_memory_until_it_can(
    command: Command, host: Host, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    await suspend(command)
    domain, vm = world.domains[LOW], host.vms["low-1"]
    saved_mib, limits = domain.saved_mib, []
    assert saved_mib is not None
    save = host.hypervisor.save

    async def watched(name: str, limit_s: float) -> Saved:
        limits.append(limit_s)
        return await save(name, limit_s)

    monkeypatch.setattr(host.hypervisor, "save", watched)
    world.failures |= {"resume": "busy", "save": "no space left on device"}
    assert (await start(command)).state == "failed"
    assert (domain.state, vm.intent.phase) == ("paused", Phase.STOPPING)
    assert limits[0] == 300.0 + saved_mib / 16.0, "as long as its memory may take"
    assert not vm.allocation().charge.is_zero()
    world.failures.clear()
    vm.request_check()
    await until(lambda: vm.intent.phase is Phase.STOPPED)
    assert vm.intent.saved_mib == domain.saved_mib is not None
    assert (await start(command, "again")).state == "done"


async def test_its_sizes_stay_while_its_memory_is_saved_and_its_rule_may_change(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await suspend(command)
    size = host.vms["low-1"].intent.committed
    larger = low_vm("low-1", nominal={"cpu_cores": 3.0, "memory_mib": 1100.0})
    refused = await command("PUT", "/v1/vms/low-1/spec", {"request_id": "r1", "spec": larger})
    assert refused.state == "failed"
    assert "resize it when it runs" in refused.sentence
    other = low_vm("low-1", preemption_notice_s=5.0)
    changed = await command("PUT", "/v1/vms/low-1/spec", {"request_id": "r2", "spec": other})
    assert changed.state == "done", changed.sentence
    intent = host.vms["low-1"].intent
    assert (intent.spec.preemption_notice_s, intent.committed, intent.redefine) == (5.0, size, False)


async def test_a_killed_agent_finds_what_was_saved(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await until(lambda: agent.host.vms["low-1"].link.connected)
    await suspend(command)
    await agent.close()
    (domain,) = world.domains.values()
    # As it was just before the agent had written down that it is off.
    intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.STOPPING, saved_mib=None)
    domain.intent = intent.model_dump_json()
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("p", 10)
        assert ended is not None
        assert "its memory was saved" in ended.sentence
        assert successor.host.vms["low-1"].intent.saved_mib == domain.saved_mib


async def test_what_deletes_it_deletes_what_was_saved(command: Command, world: World, two_vms: list[Domain]) -> None:
    await suspend(command)
    assert (await command("DELETE", "/v1/vms/low-1?request_id=d")).state == "done"
    assert LOW not in world.domains


@pytest.mark.parametrize("how", ["stop", "suspend", "delete"])
async def test_a_preemption_that_is_called_off_leaves_the_vm_running_and_its_guest_is_told(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain], how: str
) -> None:
    domain, vm = world.domains[LOW], host.vms["low-1"]
    world.programs_run = 1
    if how == "delete":
        begun = await client.delete("/v1/vms/low-1?request_id=p&reason=minimum&notice_s=30")
    else:
        body = {"request_id": "p", "limit_s": 30.0, "reason": "minimum", "suspend": how == "suspend"}
        begun = await client.post("/v1/vms/low-1/stop", json=body)
    assert begun.status == 202
    await until(lambda: len(world.notices) > 0)
    off = {"request_id": "p.off", "preemption": "another"}
    assert (await client.post("/v1/vms/low-1/withdrawal", json=off)).status == 409
    off = {"request_id": "p.off", "preemption": "p", "reason": "room has appeared"}
    assert (await command("POST", "/v1/vms/low-1/withdrawal", off)).state == "done"
    ended = await client.get("/v1/operations/p", params={"wait_s": "20"})
    told = await ended.json()
    assert told["state"] == "partial"
    assert "low-1 runs on" in told["sentence"]
    assert "room has appeared" in told["sentence"]
    await until(lambda: world.withdrawn == ["p"])
    assert (domain.state, vm.intent.phase) == ("running", Phase.SETTLED)
    if how == "delete":
        cause = Intent.model_validate_json(domain.intent).cause
        assert cause is not None
        assert cause.kind == "create", "or a later agent would go on with it"
    late = {"request_id": "late", "preemption": "p"}
    assert (await client.post("/v1/vms/low-1/withdrawal", json=late)).status == 409
    # What it gave up for being saved comes back.
    await until(lambda: domain.bound_mib == 1024.0)


async def test_a_preemption_that_is_called_off_in_the_middle_of_its_deflation_leaves_nothing_at_work(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, vm = world.domains[LOW], host.vms["low-1"]
    taking = asyncio.Event()

    async def never(domain: str, plugged_mib: float, limit_s: float) -> str:
        taking.set()
        await asyncio.sleep(3600.0)
        return ""

    body = {"request_id": "p", "limit_s": 300.0, "reason": "shortfall", "suspend": True}
    with monkeypatch.context() as slow:
        slow.setattr(host.hypervisor.sizes, "set_plugged", never)
        world.programs_run = 1
        assert (await client.post("/v1/vms/low-1/stop", json=body)).status == 202
        async with asyncio.timeout(20):
            await taking.wait()
        off = {"request_id": "p.off", "preemption": "p", "reason": "room has appeared"}
        assert (await command("POST", "/v1/vms/low-1/withdrawal", off)).state == "done"
        ended = await (await client.get("/v1/operations/p", params={"wait_s": "20"})).json()
        assert ended["state"] == "partial", ended["sentence"]
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "deflate:low-1"]
    assert vm.resizer.terminating == ""
    await until(lambda: domain.bound_mib == 1024.0 and not vm.lock.locked())
    assert (await report(client)).vms[0].state == "running"


async def called_off(client: Client, command: Command, world: World, how: str) -> None:
    """Preempt low-1 and call that off again; ended when its guest knows."""
    world.programs_run = 1
    if how == "delete":
        await client.delete("/v1/vms/low-1?request_id=p&reason=minimum&notice_s=30")
    else:
        body = {"request_id": "p", "limit_s": 30.0, "reason": "minimum", "suspend": how == "suspend"}
        await client.post("/v1/vms/low-1/stop", json=body)
    await until(lambda: len(world.notices) > 0)
    off = {"request_id": "p.off", "preemption": "p", "reason": "room has appeared"}
    assert (await command("POST", "/v1/vms/low-1/withdrawal", off)).state == "done"
    assert (await (await client.get("/v1/operations/p", params={"wait_s": "20"})).json())["state"] == "partial"
    await until(lambda: world.withdrawn == ["p"])


@pytest.mark.parametrize("how", ["stop", "suspend"])
async def test_the_next_agent_does_not_say_that_a_vm_was_stopped_whose_preemption_had_been_called_off(
    client: Client, agent: Agent, command: Command, world: World, two_vms: list[Domain], tmp_path: Path, how: str
) -> None:
    await called_off(client, command, world, how)
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        told = await successor.requests.operations.get("p", 20.0)
        assert told is not None
        assert (told.state, told.sentence) == (
            "partial",
            "low-1 runs on: its preemption had ended before this agent started",
        )
        assert world.domains[LOW].state == "running"


async def test_the_next_agent_says_of_a_vm_that_was_preempted_and_started_from_outside_that_it_was_preempted(
    agent: Agent, command: Command, world: World, host: Host, two_vms: list[Domain], tmp_path: Path
) -> None:
    body = {"request_id": "p", "limit_s": 2.0, "reason": "minimum"}
    assert (await command("POST", "/v1/vms/low-1/stop", body)).state == "done"
    world.domains[LOW].state = "running"
    await until(lambda: host.vms["low-1"].running and host.vms["low-1"].intent.phase is Phase.SETTLED)
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        told = await successor.requests.operations.get("p", 20.0)
        assert told is not None
        assert told.state == "done", told.sentence


async def test_a_deletion_that_was_called_off_and_comes_again_after_a_restart_removes_nothing(
    client: Client, agent: Agent, command: Command, world: World, two_vms: list[Domain], tmp_path: Path
) -> None:
    await called_off(client, command, world, "delete")
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        await successor.creations.delete("low-1", Deletion(request_id="p"), "minimum", 30.0)
        await has_failed(successor, "p")
        assert world.domains[LOW].state == "running"


@pytest.mark.parametrize("what", ["its intent", "its growth"])
async def test_a_vm_that_goes_on_is_not_ended_since_that_cannot_be_written_yet(
    command: Command, host: Host, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    domain, vm, resume = world.domains[LOW], host.vms["low-1"], host.hypervisor.resume
    assert (await suspend(command)).state == "done"

    def full(*_: object) -> None:
        raise JournalError("no space left on device")

    async def and_then(name: str) -> None:
        await resume(name)
        if what == "its intent":
            world.failures["write_intent"] = "the monitor does not answer"
        else:
            monkeypatch.setattr(host.journal, "add", full)

    monkeypatch.setattr(host.hypervisor, "resume", and_then)
    world.calls.clear()
    back = await start(command)
    assert (back.state, domain.state, vm.running) == ("done", "running", True), back.sentence
    assert not {("shut_down", LOW), ("save", LOW)} & set(world.calls)
    assert not vm.allocation().charge.is_zero()
    world.failures.clear()
    await until(lambda: Intent.model_validate_json(domain.intent).phase is Phase.SETTLED)
    assert Intent.model_validate_json(domain.intent).saved_mib is None


async def test_a_vm_whose_preemption_failed_after_its_guest_was_told_is_told_that_it_stays(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    world.failures["shut_down"] = "the monitor does not answer"
    body = {"request_id": "p", "limit_s": 2.0, "reason": "minimum"}
    assert (await command("POST", "/v1/vms/low-1/stop", body)).state == "failed"
    assert world.notices
    await until(lambda: world.withdrawn == ["p"])
    assert (world.domains[LOW].state, host.vms["low-1"].intent.phase) == ("running", Phase.SETTLED)


@pytest.mark.parametrize("how", ["stop", "suspend", "delete"])
async def test_a_preemption_that_was_called_off_is_not_gone_on_with_by_the_successor_of_a_killed_agent(
    client: Client, agent: Agent, command: Command, world: World, two_vms: list[Domain], tmp_path: Path, how: str
) -> None:
    world.programs_run = 1
    if how == "delete":
        await client.delete("/v1/vms/low-1?request_id=p&reason=minimum&notice_s=30")
    else:
        body = {"request_id": "p", "limit_s": 30.0, "reason": "minimum", "suspend": how == "suspend"}
        await client.post("/v1/vms/low-1/stop", json=body)
    await until(lambda: len(world.notices) > 0)
    # As a kill right after the answer does: nothing more is written of what the preemption came to.
    begun = Intent.model_validate_json(world.domains[LOW].intent)
    off = {"request_id": "p.off", "preemption": "p", "reason": "room has appeared"}
    assert (await client.post("/v1/vms/low-1/withdrawal", json=off)).status == 202
    await agent.close()
    world.domains[LOW].intent = begun.model_dump_json()
    async with succeeding(world, tmp_path) as successor:
        told = await successor.requests.operations.get("p", 20.0)
        assert told is not None
        assert (told.state, "low-1 runs on" in told.sentence) == ("partial", True), told.sentence
        await until(lambda: world.withdrawn == ["p"])
        assert world.domains[LOW].state == "running"
        assert successor.host.vms["low-1"].intent.phase is Phase.SETTLED


@pytest.mark.slow
async def test_a_preemption_is_not_called_off_where_that_cannot_be_stored(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise JournalError("no space left on device")

    world.programs_run = 1
    body = {"request_id": "p", "limit_s": 3.0, "reason": "minimum"}
    assert (await client.post("/v1/vms/low-1/stop", json=body)).status == 202
    await until(lambda: len(world.notices) > 0)
    off = {"request_id": "p.off", "preemption": "p", "reason": "room has appeared"}
    with monkeypatch.context() as broken:
        broken.setattr(host.journal, "add_withdrawn", full)
        refused = await client.post("/v1/vms/low-1/withdrawal", json=off)
        assert (refused.status, "no space left" in (await refused.text())) == (503, True)
        assert not host.vms["low-1"].notice.withdrawn
    ended = await (await client.get("/v1/operations/p", params={"wait_s": "20"})).json()
    assert (ended["state"], world.domains[LOW].state) == ("done", "stopped")


async def test_a_notice_is_not_over_while_its_calling_off_is_being_stored(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, store = threading.Event(), threading.Event(), host.journal.add_withdrawn

    def slowly(request_id: str) -> None:
        begun.set()
        assert go_on.wait(20.0)
        store(request_id)

    monkeypatch.setattr(host.journal, "add_withdrawn", slowly)
    world.programs_run = 1
    body = {"request_id": "p", "limit_s": 30.0, "reason": "minimum"}
    assert (await client.post("/v1/vms/low-1/stop", json=body)).status == 202
    await until(lambda: len(world.notices) > 0)
    off = {"request_id": "p.off", "preemption": "p", "reason": "room has appeared"}
    calling = asyncio.create_task(client.post("/v1/vms/low-1/withdrawal", json=off), name="withdrawal")
    await asyncio.to_thread(begun.wait, 20.0)
    # Its programs have ended by now.
    world.programs_run = 0
    told = len(world.notices)
    await until(lambda: len(world.notices) > told)
    go_on.set()
    assert (await calling).status == 202
    ended = await (await client.get("/v1/operations/p", params={"wait_s": "20"})).json()
    assert (ended["state"], world.domains[LOW].state) == ("partial", "running")


async def test_a_guest_that_goes_on_from_a_snapshot_of_its_notice_is_told_that_this_is_over(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    """Reverted past us: nothing but the guest knows of the notice."""
    world.domains[LOW].notice = "p"
    host.vms["low-1"].request_check()
    await until(lambda: world.withdrawn == ["p"], limit_s=30)
    assert world.domains[LOW].notice == ""


async def test_a_guest_that_says_for_ever_that_it_has_a_notice_is_not_told_for_ever(
    command: Command, host: Host, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = host.vms["low-1"]
    world.domains[LOW].notice = "of its own"

    def keeps(domain: Domain, params: dict[str, Any]) -> dict[str, Any]:
        world.withdrawn.append(params["request_id"])
        return {"known": True}

    monkeypatch.setattr(world, "_withdrawn", keeps)
    vm.request_check()
    await until(lambda: world.withdrawn == ["of its own"], limit_s=30)
    for _ in range(2):
        looks = vm.drift_repair.looks
        vm.request_check()
        await until(lambda: vm.drift_repair.looks > looks, limit_s=30)  # noqa: B023
    assert vm.link.notice == "of its own"
    assert world.withdrawn == ["of its own"]
