"""Domains that are here again as they were once, from a backup or a snapshot: nothing of that time is done again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hostagent.operations import adoption_commands
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, succeeding
from tests.hostagent.world import Domain, World
from tests.waiting import until

NAME = "ebb-host-a.low-1"


@pytest.fixture
async def created(command: Command, host: Host, world: World) -> Domain:
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})).state == "done"
    await until(lambda: host.vms["low-1"].link.connected)
    return world.domains[NAME]


def intent_of(domain: Domain) -> Intent:
    return Intent.model_validate_json(domain.intent)


async def put_back(world: World, intent: Intent, state: str) -> Domain:
    """From a backup: a domain and a disk that its guest has run with."""
    await world.create(NAME, intent.model_dump_json())
    domain = world.domains[NAME]
    domain.state, domain.kept = state, True
    return domain


async def looked_at_owners(world: World) -> None:
    """Wait until it was asked some times whose the domains are."""
    asked = world.calls.count(("domains", ""))
    await until(lambda: world.calls.count(("domains", "")) >= asked + 3)


def alarms(host: Host, name: str = "low-1") -> list[str]:
    return [event.sentence for event in host.history.decisions(name) if event.kind == "alarm"]


async def removed(client: Client, world: World, host: Host) -> Intent:
    """Delete the VM; its intent as it was while its guest had its notice."""
    assert (await client.delete("/v1/vms/low-1?request_id=d&notice_s=1&reason=minimum")).status == 202
    await until(lambda: intent_of(world.domains[NAME]).told == "d")
    during = intent_of(world.domains[NAME])
    await client.get("/v1/operations/d?wait_s=20")
    await until(lambda: not world.domains and not host.vms)
    return during


@pytest.mark.parametrize("state", ["running", "stopped"])
@pytest.mark.parametrize("phase", [Phase.SETTLED, Phase.DELETING])
async def test_a_vm_that_is_put_back_as_it_was_before_its_deletion_is_not_deleted_again(
    agent: Agent,
    client: Client,
    created: Domain,
    host: Host,
    world: World,
    tmp_path: Path,
    phase: Phase,
    state: str,
) -> None:
    during = await removed(client, world, host)
    await agent.close()
    domain = await put_back(world, during.changed(phase=phase), state)
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("d", 10.0)
        assert ended is not None
        assert (ended.state, "was put back since" in ended.sentence) == ("done", True), ended.sentence
        settled = Phase.SETTLED if state == "running" else Phase.STOPPED
        await until(lambda: successor.host.vms["low-1"].intent.phase is settled)
        assert alarms(successor.host) == [ended.sentence]
        if state == "running":
            await until(lambda: "d" in world.withdrawn)
    assert (world.domains, domain.state) == ({NAME: domain}, state)
    async with succeeding(world, tmp_path) as later:
        await until(lambda: "low-1" in later.host.vms)
        assert await later.requests.operations.get("d") is None, "it is not its operation any more"
    assert world.domains == {NAME: domain}


@pytest.mark.parametrize("phase", [Phase.SETTLED, Phase.DELETING])
async def test_a_running_agent_takes_a_vm_back_that_is_put_back_as_it_was_before_its_deletion(
    client: Client, created: Domain, host: Host, world: World, phase: Phase
) -> None:
    during = await removed(client, world, host)
    domain = await put_back(world, during.changed(phase=phase), "stopped")
    await until(lambda: "low-1" in host.vms and host.vms["low-1"].intent.phase is Phase.STOPPED)
    await looked_at_owners(world)
    assert world.domains == {NAME: domain}


async def test_a_deletion_that_a_killed_agent_had_begun_is_gone_on_with(
    agent: Agent, created: Domain, host: Host, world: World, tmp_path: Path
) -> None:
    intent = intent_of(created)
    assert intent.cause is not None
    cause = intent.cause.model_copy(update={"request_id": "d", "kind": "delete", "body": {"reason": "delete"}})
    await agent.close()
    host.journal.add_deleted("d")
    created.intent = intent.changed(phase=Phase.DELETING, cause=cause).model_dump_json()
    async with succeeding(world, tmp_path):
        await until(lambda: not world.domains)


@pytest.mark.parametrize("state", ["running", "paused"])
async def test_a_vm_that_is_reverted_to_a_snapshot_of_its_stop_is_not_stopped_again(
    agent: Agent, client: Client, created: Domain, host: Host, world: World, tmp_path: Path, state: str
) -> None:
    world.programs_run = 1
    stop = {"request_id": "s", "limit_s": 2.0, "reason": "minimum"}
    assert (await client.post("/v1/vms/low-1/stop", json=stop)).status == 202
    await until(lambda: intent_of(created).phase is Phase.STOPPING)
    during = created.intent
    world.programs_run = 0
    await client.get("/v1/operations/s?wait_s=20")
    assert intent_of(created).phase is Phase.STOPPED
    await agent.close()
    created.intent, created.state = during, state
    stops = [call for call in world.calls if call[0] == "shut_down"]
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("s", 10.0)
        assert ended is not None
        assert (ended.state, "was put back since" in ended.sentence) == ("done", True), ended.sentence
        vm = successor.host.vms["low-1"]
        await until(lambda: vm.intent.phase is Phase.SETTLED)
        if state == "running":
            # The guest's memory is of when it was told that it goes.
            await until(lambda: "s" in world.withdrawn)
    assert (created.state, [call for call in world.calls if call[0] == "shut_down"]) == (state, stops)


async def test_a_stop_that_a_killed_agent_had_begun_is_gone_on_with(
    agent: Agent, created: Domain, world: World, tmp_path: Path
) -> None:
    intent = intent_of(created)
    assert intent.cause is not None
    cause = intent.cause.model_copy(update={"request_id": "s", "kind": "stop", "body": {"limit_s": 1.0}})
    await agent.close()
    created.intent = intent.changed(phase=Phase.STOPPING, cause=cause).model_dump_json()
    async with succeeding(world, tmp_path):
        await until(lambda: created.state == "stopped" and intent_of(created).phase is Phase.STOPPED)


# --- as they were while they were made, or came ----------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [True, False])
async def test_a_vm_that_is_put_back_as_it_was_while_it_was_made_keeps_its_disk(
    agent: Agent, command: Command, created: Domain, host: Host, world: World, tmp_path: Path, restarted: bool
) -> None:
    during = intent_of(created).changed(phase=Phase.CREATING)
    world.domains.pop(NAME)
    await until(lambda: not host.vms)
    if restarted:
        await agent.close()
        domain = await put_back(world, during, "stopped")
        async with succeeding(world, tmp_path) as successor:
            await until(lambda: intent_of(domain).phase is Phase.STOPPED)
            assert successor.host.vms["low-1"].intent.phase is Phase.STOPPED
    else:
        domain = await put_back(world, during, "stopped")
        await until(lambda: intent_of(domain).phase is Phase.STOPPED)
        assert host.vms["low-1"].intent.phase is Phase.STOPPED
        assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "up"})).state == "done"
    assert world.domains == {NAME: domain}


async def test_a_vm_whose_guest_has_never_run_is_removed_where_its_creation_came_to_nothing(
    agent: Agent, created: Domain, world: World, tmp_path: Path
) -> None:
    await agent.close()
    created.intent = intent_of(created).changed(phase=Phase.CREATING).model_dump_json()
    created.state, created.kept = "stopped", False
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: not world.domains)
        ended = await successor.requests.operations.get("c", 10.0)
        assert ended is not None
        assert ended.state == "failed", ended.sentence


async def test_a_vm_that_is_put_back_as_it_was_while_it_came_is_left_alone_until_it_is_started(
    created: Domain, host: Host, world: World
) -> None:
    during = intent_of(created).changed(phase=Phase.ARRIVING, cause=None)
    world.domains.pop(NAME)
    await until(lambda: not host.vms)
    domain = await put_back(world, during, "stopped")
    await until(lambda: alarms(host))
    await looked_at_owners(world)
    assert world.domains == {NAME: domain}
    (said,) = alarms(host)
    assert said.startswith(f"domain {NAME} was to come from another host, and is off: it is left as it is")
    domain.state = "running"
    await until(lambda: "low-1" in host.vms and host.vms["low-1"].intent.phase is Phase.SETTLED)
    assert domain.state == "running"


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["the copy first", "the copy last"])
async def test_an_agent_that_starts_looks_after_a_vm_and_not_after_its_copy(
    agent: Agent, command: Command, host: Host, world: World, tmp_path: Path, order: str
) -> None:
    await world.create("web", "")
    web = world.domains["web"]
    web.state = "running"
    body = {"request_id": "a", "domain": "web", "name": "web", "minimum": {"cpu_cores": 0.5, "memory_mib": 128.0}}
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    await agent.close()
    await world.create("web-copy", web.intent)
    copy = world.domains["web-copy"]
    copy.state = "stopped"
    if order == "the copy first":
        world.domains = {"web-copy": copy, "web": web}
    async with succeeding(world, tmp_path) as successor:
        vm = successor.host.vms["web"]
        assert (vm.domain, vm.running) == ("web", True)
        await until(lambda: alarms(successor.host, "web"))
        assert alarms(successor.host, "web") == ["domain web-copy is called web, too: it is left alone beside web"]
        assert successor.host.vms == {"web": vm}
    assert (world.domains["web"].state, world.domains["web-copy"].state) == ("running", "stopped")


async def test_a_clone_of_a_vm_that_is_deleted_does_not_become_that_vm(
    agent: Agent, command: Command, client: Client, created: Domain, host: Host, world: World, tmp_path: Path
) -> None:
    await world.create(f"{NAME}-clone", created.intent)
    clone = world.domains[f"{NAME}-clone"]
    clone.state, clone.clone = "running", True
    assert (await client.delete("/v1/vms/low-1?request_id=d")).status == 202
    await until(lambda: list(world.domains) == [f"{NAME}-clone"])
    await looked_at_owners(world)
    assert not host.vms
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: alarms(successor.host))
        said = f"domain {NAME}-clone is a copy of low-1, which is not here: it is left alone"
        assert (alarms(successor.host), successor.host.vms) == ([said], {})
    assert (world.domains, clone.state) == ({f"{NAME}-clone": clone}, "running")


async def test_a_running_agent_takes_a_vm_back_and_not_its_copy_where_libvirt_names_both_again(
    created: Domain, host: Host, world: World
) -> None:
    world.domains.pop(NAME)
    await until(lambda: not host.vms)
    # As an earlier version has written them; the copy is listed first.
    await world.create(f"{NAME}-copy", created.intent)
    copy = world.domains.pop(f"{NAME}-copy")
    copy.state = "stopped"
    world.domains.update({f"{NAME}-copy": copy, NAME: created})
    await until(lambda: "low-1" in host.vms)
    assert host.vms["low-1"].domain == NAME
    assert copy.state == "stopped"


# --- released --------------------------------------------------------------------------------------------------------


async def released(command: Command, world: World) -> tuple[Domain, str]:
    """A domain that was adopted, deflated and given back; its intent as it was while it was deflated."""
    await world.create("web", "")
    web = world.domains["web"]
    web.state, web.shares = "running", 777
    body = {"request_id": "a", "domain": "web", "name": "web", "minimum": {"cpu_cores": 0.5, "memory_mib": 128.0}}
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    target = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 0.5}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/web/target", target)).state == "done"
    during = web.intent
    assert (await command("POST", "/v1/vms/web/release", {"request_id": "r"})).state == "done"
    assert (web.quota, web.intent) == (None, "")
    return web, during


def reverted(web: Domain, during: str, state: str) -> None:
    """To a snapshot of when it was deflated."""
    web.intent, web.quota, web.shares, web.state = during, 0.5, 512, state


@pytest.mark.parametrize("state", ["running", "stopped"])
@pytest.mark.parametrize("restarted", [True, False])
async def test_a_released_domain_that_comes_back_by_a_snapshot_is_given_back_again(
    agent: Agent, command: Command, host: Host, world: World, tmp_path: Path, restarted: bool, state: str
) -> None:
    web, during = await released(command, world)
    if restarted:
        await agent.close()
        reverted(web, during, state)
        async with succeeding(world, tmp_path) as successor:
            await until(lambda: not web.intent and not successor.host.vms)
            assert "was released, and has come back" in alarms(successor.host, "web")[0]
    else:
        reverted(web, during, state)
        await until(lambda: alarms(host, "web"))
        await until(lambda: not web.intent and not host.vms)
    assert (web.quota, web.shares, web.state) == (None, 777, state)


async def test_a_released_domain_that_comes_back_and_cannot_be_given_back_yet_is_looked_after_until_it_is(
    client: Client, command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption_commands, "AGAIN_S", 0.2)
    web, during = await released(command, world)
    world.failures["give_back"] = "libvirt did not answer within 15 s"
    reverted(web, during, "running")
    await until(lambda: alarms(host, "web"))
    request_id = (await until(lambda: backs(host)))[0]
    async with asyncio.timeout(20):
        while not (await progress(client, request_id)):
            await asyncio.sleep(0.05)
    assert "web" in host.vms, "looked after meanwhile: what it has is charged"
    world.failures.clear()
    await until(lambda: not web.intent and not host.vms)


def backs(host: Host) -> list[str]:
    events = host.history.decisions("web")
    return [str(event.inputs["request_id"]) for event in events if event.kind == "alarm"]


async def progress(client: Client, request_id: str) -> Any:
    return (await (await client.get(f"/v1/operations/{request_id}")).json()).get("progress")


async def test_a_released_domain_that_is_adopted_anew_stays(
    agent: Agent, command: Command, world: World, tmp_path: Path
) -> None:
    web, _ = await released(command, world)
    body = {"request_id": "a-2", "domain": "web", "name": "web", "minimum": {"cpu_cores": 0.5, "memory_mib": 128.0}}
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        await looked_at_owners(world)
        assert "web" in successor.host.vms
    assert web.intent
