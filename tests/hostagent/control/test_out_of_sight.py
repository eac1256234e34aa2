"""A domain of ours that libvirt does not name for a while, and names again: its disk is never removed for that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ebbtide.messages.common import Vector
from hostagent.control import reconciler
from hostagent.errors import JournalError
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.world import Domain, World
from tests.waiting import until

NAME = "ebb-host-a.low-1"


@pytest.fixture
async def created(command: Command, host: Host, world: World) -> Domain:
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert operation.state == "done", operation.sentence
    await until(lambda: host.vms["low-1"].link.connected)
    return world.domains[NAME]


async def stop(command: Command) -> None:
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s"})).state == "done"


async def gone_and_back(host: Host, world: World, **changes: Any) -> None:
    """:param changes: what its intent says when it is back."""
    domain = world.domains.pop(NAME)
    await until(lambda: not host.vms)
    intent = Intent.model_validate_json(domain.intent)
    domain.intent = intent.changed(**changes).model_dump_json()
    world.domains[NAME] = domain
    await until(lambda: "low-1" in host.vms)


async def test_a_stopped_vm_whose_domain_is_back_is_looked_after_and_can_be_started(
    command: Command, created: Domain, host: Host, world: World
) -> None:
    await stop(command)
    await gone_and_back(host, world)
    assert world.domains == {NAME: created}
    assert host.vms["low-1"].intent.phase is Phase.STOPPED
    assert ("destroy", NAME) not in world.calls
    assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "s-2"})).state == "done"


async def test_a_running_vm_whose_domain_is_back_is_charged_again_and_its_cores_are_told(
    created: Domain, host: Host, world: World
) -> None:
    await gone_and_back(host, world)
    assert host.vms["low-1"].running
    assert host.free() != host.slice.capacity
    await until(lambda: host.vms["low-1"].link.connected)
    told = [(0, 3), (3, 0), (0, 3)]
    await until(lambda: [(c.cores_before, c.cores_after) for c in host.journal.changes] == told)


async def test_an_operation_that_has_ended_is_not_carried_out_when_the_domain_is_back(
    command: Command, created: Domain, host: Host, world: World
) -> None:
    await stop(command)
    assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "s-2"})).state == "done"
    cause = Intent.model_validate_json(created.intent).cause
    assert cause is not None
    stopping = cause.model_copy(update={"request_id": "s", "kind": "stop"})
    smaller = Vector(cpu_cores=3.0, memory_mib=700.0)
    await gone_and_back(host, world, phase=Phase.STOPPING, cause=stopping, target=smaller)
    await until(lambda: host.vms["low-1"].intent.phase is Phase.SETTLED)
    assert host.vms["low-1"].intent.target == host.vms["low-1"].intent.committed
    assert created.state == "running"
    created.state = "paused"
    await gone_and_back(host, world, phase=Phase.STARTING, cause=cause)
    await until(lambda: host.vms["low-1"].intent.phase is Phase.STOPPED)
    assert created.state == "stopped"


async def test_a_vm_whose_start_was_not_written_down_yet_runs_on_when_its_domain_is_back(
    command: Command, created: Domain, host: Host, world: World
) -> None:
    await stop(command)
    assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "s-2"})).state == "done"
    await gone_and_back(host, world, phase=Phase.STARTING)
    await until(lambda: host.vms["low-1"].intent.phase in (Phase.SETTLED, Phase.STOPPED))
    assert (created.state, host.vms["low-1"].intent.phase) == ("running", Phase.SETTLED)


async def test_what_was_left_over_of_a_deletion_is_removed(created: Domain, host: Host, world: World) -> None:
    world.domains.pop(NAME)
    await until(lambda: not host.vms)
    created.intent = Intent.model_validate_json(created.intent).changed(phase=Phase.DELETING).model_dump_json()
    world.domains[NAME] = created
    await until(lambda: not world.domains)
    assert not host.vms


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_deletion_that_was_answered_as_failed_and_written_too_late_removes_nothing(
    command: Command, created: Domain, host: Host, world: World, restarted: bool
) -> None:
    world.failures["write_intent"] = "libvirt did not answer within 15 s"
    assert (await command("DELETE", "/v1/vms/low-1?request_id=d")).state == "failed"
    world.failures.clear()
    cause = Intent.model_validate_json(created.intent).cause
    assert cause is not None
    if restarted:
        # Another agent, which has not heard of the request.
        host.journal.add_failed("e")
    deletion = cause.model_copy(update={"request_id": "e" if restarted else "d", "kind": "delete", "body": {}})
    await gone_and_back(host, world, phase=Phase.DELETING, cause=deletion)
    await until(lambda: host.vms["low-1"].intent.phase is Phase.SETTLED)
    assert host.vms["low-1"].intent.committed.cpu_cores == 3.0
    assert (world.domains, created.state) == ({NAME: created}, "running")


async def test_a_domain_whose_name_another_vm_has_is_left_alone_and_told_of(
    created: Domain, host: Host, world: World
) -> None:
    other = Intent.model_validate_json(created.intent)
    await world.create("ebb-host-a.other", other.model_dump_json())
    await until(lambda: any(event.kind == "alarm" for event in host.history.decisions("low-1")))
    (said,) = (event.sentence for event in host.history.decisions("low-1") if event.kind == "alarm")
    assert said == "domain ebb-host-a.other is called low-1, too: it is left alone beside ebb-host-a.low-1"
    await asyncio.sleep(2 * reconciler.OWNERS_S)
    assert set(world.domains) == {NAME, "ebb-host-a.other"}
    assert host.vms["low-1"].domain == NAME


async def test_an_adopted_domain_that_is_renamed_is_taken_back_and_not_called_another_one(
    created: Domain, command: Command, host: Host, world: World
) -> None:
    body = {"request_id": "a", "domain": "web", "name": "web", "minimum": {"cpu_cores": 0.5, "memory_mib": 128.0}}
    await world.create("web", "")
    world.domains["web"].state = "running"
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    assert (await command("POST", "/v1/vms/web/stop", {"request_id": "s"})).state == "done"
    # Its new name is known before the check of the VM, which waits for the lock.
    async with host.vms["web"].lock:
        world.domains["web-old"] = world.domains.pop("web")
        asked = world.calls.count(("domains", ""))
        await until(lambda: world.calls.count(("domains", "")) >= asked + 3)
    await until(lambda: "web" in host.vms and host.vms["web"].domain == "web-old")
    assert not [event.sentence for event in host.history.decisions("web") if event.kind == "alarm"]


@pytest.mark.parametrize("noted", [True, False])
async def test_an_adopted_domain_is_looked_after_again_unless_its_adoption_has_failed(
    created: Domain,
    client: Client,
    command: Command,
    host: Host,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    noted: bool,
) -> None:
    body = {"request_id": "a", "domain": "web", "name": "web", "minimum": {"cpu_cores": 0.5, "memory_mib": 128.0}}
    await world.create("web", "")
    world.domains["web"].state = "running"
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    web = world.domains.pop("web")
    await until(lambda: "web" not in host.vms)
    world.domains["web"] = web
    await until(lambda: "web" in host.vms)
    intent = Intent.model_validate_json(web.intent)
    assert intent.cause is not None
    world.failures["write_intent"] = "libvirt did not answer within 15 s"
    await world.create("late", "")
    world.domains["late"].state = "running"
    if not noted:

        def full(request_id: str) -> None:
            raise JournalError(f"no room for {request_id}")

        monkeypatch.setattr(host.journal, "add_failed", full)
    body |= {"request_id": "b", "domain": "late", "name": "late"}
    if noted:
        assert (await command("POST", "/v1/adoptions", body)).state == "failed"
    else:
        assert (await client.post("/v1/adoptions", json=body)).status == 202
        await until(lambda: "b" in host.unwritten)
    cause = intent.cause.model_copy(update={"request_id": "b"})
    spec = intent.spec.model_copy(update={"name": "late"})
    world.domains["late"].intent = intent.changed(cause=cause, spec=spec).model_dump_json()
    await asyncio.sleep(2 * reconciler.OWNERS_S)
    assert set(host.vms) == {"low-1", "web"}
    assert set(world.domains) == {NAME, "web", "late"}


async def test_an_adopted_domain_whose_last_command_failed_is_looked_after_again(
    command: Command, host: Host, world: World
) -> None:
    body = {"request_id": "a", "domain": "web", "name": "web", "minimum": {"cpu_cores": 0.5, "memory_mib": 128.0}}
    await world.create("web", "")
    world.domains["web"].state = "running"
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    world.failures["read"] = "libvirt did not answer within 15 s"
    target = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 0.5}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/web/target", target)).state == "partial"
    assert "t" in host.journal.failed
    world.failures.clear()
    await until(lambda: host.vms["web"].intent.phase is Phase.SETTLED)
    web = world.domains.pop("web")
    await until(lambda: not host.vms)
    world.domains["web"] = web
    await until(lambda: "web" in host.vms)
    assert web.intent
    assert ("give_back", "web") not in world.calls
