"""What a new agent must not do with what an earlier one left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ebbtide.messages.commands import Command as Body
from ebbtide.messages.commands import CreateCommand, StartCommand
from ebbtide.messages.vms import VMSpec, VMState
from hostagent.control import reconciler
from hostagent.errors import HypervisorError, RequestRefused
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, succeeding
from tests.hostagent.world import World
from tests.waiting import until


async def test_a_deletion_that_is_repeated_after_a_restart_leaves_a_new_vm_of_the_name_alone(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    await command("DELETE", "/v1/vms/low-1?request_id=gone")
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        created = await successor.creations.create(
            CreateCommand(request_id="c2", vm=VMSpec.model_validate(low_vm("low-1")))
        )
        assert (await successor.requests.operations.get(created.request_id, 10)) is not None
        await successor.creations.delete("low-1", Body(request_id="gone"), "delete")
        repeated = await successor.requests.operations.get("gone", 10)
        assert repeated is not None
        assert (repeated.state, "before the agent was started again" in repeated.sentence) == ("done", True)
        assert "low-1" in successor.host.vms
        assert list(world.domains) == ["ebb-host-a.low-1"]


async def test_a_creation_that_an_earlier_version_stored_with_fewer_fields_is_known_when_it_is_repeated(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    await agent.close()
    (domain,) = world.domains.values()
    intent = Intent.model_validate_json(domain.intent)
    assert intent.cause is not None
    assert intent.cause.body is not None
    for field in ("on_preemption", "preemption_notice_s"):
        del intent.cause.body["vm"][field]
    domain.intent = intent.model_dump_json()
    async with succeeding(world, tmp_path) as successor:
        repeated = CreateCommand(request_id="c1", vm=VMSpec.model_validate(low_vm("low-1")))
        assert (await successor.creations.create(repeated)).kind == "create"
        assert await successor.requests.operations.get("c1", 10) is not None
        other = CreateCommand(request_id="c1", vm=VMSpec.model_validate(low_vm("low-1", priority="fixed")))
        with pytest.raises(RequestRefused, match="used for another request"):
            await successor.creations.create(other)
        assert list(world.domains) == ["ebb-host-a.low-1"]


@pytest.mark.parametrize("phase", [Phase.DEFLATING, Phase.REINFLATING])
async def test_what_a_killed_agent_had_asked_of_a_guest_is_called_off_before_anything_is_measured(
    command: Command, agent: Agent, world: World, tmp_path: Path, phase: Phase
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 1024.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    await agent.close()
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=phase).model_dump_json()
    calls = len(world.calls)
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vm("low-1").intent.phase is Phase.SETTLED, limit_s=30)
        methods = [method for method, name in world.calls[calls:] if name and method in ("call_off", "read")]
        assert methods[0] == "call_off"


async def test_a_vm_that_was_sold_disk_grows_again_on_a_host_that_declares_none(
    client: Client, command: Command, world: World
) -> None:
    vm = low_vm("low-1", nominal={"cpu_cores": 3.0, "memory_mib": 1024.0, "disk_mib_s": 100.0})
    assert (await command("POST", "/v1/vms", {"request_id": "c1", "vm": vm})).state == "done"
    for generation, disk in ((2, 20.0), (3, 80.0)):
        target = {"cpu_cores": 3.0, "memory_mib": 1024.0, "disk_mib_s": disk}
        body = {"request_id": f"t{generation}", "generation": generation, "target": target, "deadline_s": 20.0}
        operation = await command("PUT", "/v1/vms/low-1/target", body)
        assert operation.state == "done", operation.sentence
        assert world.domains["ebb-host-a.low-1"].disk_mib_s == disk


async def test_an_intent_whose_writing_failed_is_written_again_until_the_domain_holds_ours(
    command: Command, agent: Agent, world: World
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    (domain,) = world.domains.values()
    world.failures["write_intent"] = "libvirt did not answer within 15 s"
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 1024.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "failed"
    # As if libvirt had carried the write out after all.
    vm = agent.host.vm("low-1")
    domain.intent = vm.intent.changed(phase=Phase.DEFLATING, generation=2).model_dump_json()
    world.failures.clear()
    await until(lambda: Intent.model_validate_json(domain.intent) == vm.intent)
    assert vm.intent.phase is Phase.SETTLED


async def test_a_creation_that_fails_late_leaves_a_new_vm_of_the_name_alone(
    client: Client, command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    create = host.hypervisor.create

    async def slow(domain: str, intent: Intent, xml: str | None = None) -> None:
        await create(domain, intent)
        entered.set()
        await go_on.wait()
        raise HypervisorError("libvirt did not answer within 60 s")

    monkeypatch.setattr(host.hypervisor, "create", slow)
    assert (await client.post("/v1/vms", json={"request_id": "c1", "vm": low_vm("low-1")})).status == 202
    await entered.wait()
    assert (await client.delete("/v1/vms/low-1?request_id=d1")).status == 202
    again = await client.post("/v1/vms", json={"request_id": "c2", "vm": low_vm("low-1")})
    assert again.status == 409, "the name is taken until the removal has ended"
    monkeypatch.undo()
    go_on.set()
    for request_id, state in (("c1", "failed"), ("d1", "done")):
        response = await client.get(f"/v1/operations/{request_id}?wait_s=10")
        assert (await response.json())["state"] == state
    await until(lambda: "low-1" not in host.vms)
    assert (await command("POST", "/v1/vms", {"request_id": "c3", "vm": low_vm("low-1")})).state == "done"
    calls = len(world.calls)
    await until(lambda: "survey" in [method for method, _ in world.calls[calls:]])
    assert list(host.vms) == ["low-1"]
    assert [domain.state for domain in world.domains.values()] == ["running"]


@pytest.mark.parametrize("found_by", ["the earlier agent", "its successor"])
async def test_a_vm_that_is_off_keeps_its_disk_when_the_agent_is_started_again(
    command: Command, agent: Agent, world: World, tmp_path: Path, found_by: str
) -> None:
    """What last concerned it is its creation: that is not to be taken for one that never came to its end."""
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    (domain,) = world.domains.values()
    if found_by == "the earlier agent":
        domain.state = "stopped"
        await until(lambda: agent.host.vm("low-1").intent.phase is Phase.STOPPED)
    await agent.close()
    domain.state = "stopped"
    async with succeeding(world, tmp_path) as successor:
        created = await successor.requests.operations.get("c1", 10)
        assert created is not None
        assert created.state == "done", created.sentence
        await until(lambda: successor.host.vm("low-1").intent.phase is Phase.STOPPED)
        assert list(world.domains) == ["ebb-host-a.low-1"]


async def test_a_vm_that_another_program_has_paused_is_called_so_before_the_first_survey(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    await agent.close()
    (domain,) = world.domains.values()
    domain.state = "paused"
    monkeypatch.setattr(reconciler, "SURVEY_S", 600.0)
    async with succeeding(world, tmp_path) as successor:
        (status,) = successor.host.report().vms
        assert status.state is VMState.PAUSED
        with pytest.raises(RequestRefused, match="low-1 cannot be started now: it is paused"):
            await successor.lifecycle.start("low-1", StartCommand(request_id="s"))
    assert domain.state == "paused", "its power is not cut"


async def test_a_vm_of_which_no_operation_is_known_is_heard(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    """As one whose preemption was called off after a restart has none."""
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    await agent.close()
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(cause=None).model_dump_json()
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vm("low-1").link.connected)


async def test_a_vm_whose_resumed_start_fails_is_heard_when_another_program_starts_it(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    await command("POST", "/v1/vms/low-1/stop", {"request_id": "s"})
    await command("POST", "/v1/vms/low-1/start", {"request_id": "up"})
    await command("POST", "/v1/vms/low-1/stop", {"request_id": "s2"})
    await agent.close()
    (domain,) = world.domains.values()
    intent = Intent.model_validate_json(domain.intent)
    assert intent.cause is not None
    up = intent.cause.model_copy(update={"request_id": "up2", "kind": "start", "body": {}})
    domain.intent = intent.changed(phase=Phase.STARTING, cause=up).model_dump_json()
    world.failures["start"] = "no such disk"
    async with succeeding(world, tmp_path) as successor:
        vm = successor.host.vm("low-1")
        await until(lambda: vm.intent.phase is Phase.STOPPED)
        domain.state = "running"
        await until(lambda: vm.running and vm.link.connected)


async def test_a_vm_whose_start_had_failed_is_heard_when_another_program_starts_it(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c1", "vm": low_vm("low-1")})
    await command("POST", "/v1/vms/low-1/stop", {"request_id": "s"})
    await command("POST", "/v1/vms/low-1/start", {"request_id": "up"})
    await asyncio.to_thread(agent.host.journal.add_failed, "up")
    await agent.close()
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.STARTING).model_dump_json()
    domain.state = "paused"  # its vCPUs were not let run
    async with succeeding(world, tmp_path) as successor:
        vm = successor.host.vm("low-1")
        await until(lambda: vm.intent.phase is Phase.STOPPED)
        domain.state = "running"
        await until(lambda: vm.running and vm.link.connected)
