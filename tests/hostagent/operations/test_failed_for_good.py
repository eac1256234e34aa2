"""What was answered as failed is not carried out later: not by a retry, not by a successor, not past its deadline."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.commands import Command as Deletion
from ebbtide.messages.commands import TargetCommand
from ebbtide.messages.common import PartialVector
from ebbtide.messages.operations import Operation, VMOutcome
from hostagent.control import reconciler
from hostagent.errors import HypervisorError, HypervisorTimeout
from hostagent.libvirt.hypervisor import Hypervisor
from hostagent.operations import creation_commands, operations
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.state.journal import Journal
from hostagent.vm import executor
from hostagent.vm import host as host_module
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, has_failed, low_vm, succeeding
from tests.hostagent.doing import reclaim
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain, World
from tests.waiting import until

REFUSED = "Failed to connect socket: Connection refused"
FULL = ResourceVector(3.0, 1024.0)


class Late:
    """A hypervisor that does not answer writes of intents in time; the first of them is carried out all the same.

    :param in_time: how many it answers in time.
    """

    def __init__(self, hypervisor: Hypervisor, in_time: int = 0) -> None:
        self.intents: list[Intent] = []
        self._write, self._in_time = hypervisor.write_intent, in_time

    async def write_intent(self, domain: str, intent: Intent) -> None:
        if self._in_time:
            self._in_time -= 1
            await self._write(domain, intent)
            return
        self.intents.append(intent)
        raise HypervisorTimeout("libvirt did not answer within 15 s")

    def arrives_in(self, domain: Domain) -> None:
        for intent in self.intents[:1]:
            domain.intent = intent.model_dump_json()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "RETRY_S", 0.0)


def target(deadline_s: float = 20.0) -> dict[str, Any]:
    size = {"cpu_cores": 1.0, "memory_mib": 600.0}
    return {"request_id": "t", "generation": 7, "target": size, "deadline_s": deadline_s}


def sizes_asked(world: World) -> list[str]:
    """But for those by which each VM was held to its size when it was made."""
    made = max(place for place, (method, _) in enumerate(world.calls) if method == "resume")
    return [method for method, _ in world.calls[made:] if method in ("set_plugged", "set_balloon", "set_quota")]


async def test_a_target_that_failed_is_not_carried_out_when_the_hypervisor_is_back(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    world.failures["read"] = REFUSED
    operation = await command("PUT", "/v1/vms/low-1/target", target())
    assert operation.state == "partial"
    assert operation.vms[0].errors == (REFUSED,)
    vm = host.vms["low-1"]
    assert vm.allocation().current == FULL, "charged in full until it is read"
    world.failures.clear()
    await until(lambda: vm.intent.phase is Phase.SETTLED)
    assert (vm.intent.committed.vector(), two_vms[0].bound_mib, two_vms[0].quota) == (FULL, 1024.0, None)
    assert sizes_asked(world) == []


async def test_what_a_failed_deflation_had_taken_is_given_back(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_plugged = host.hypervisor.sizes.set_plugged

    async def last_words(domain: str, plugged_mib: float, limit_s: float) -> str:
        reason = await set_plugged(domain, plugged_mib, limit_s)
        world.failures["write_intent"] = world.failures["prepare_start"] = REFUSED
        return reason

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", last_words)
    operation = await command("PUT", "/v1/vms/low-1/target", target())
    assert operation.state == "partial", operation.sentence
    assert two_vms[0].bound_mib < 1024.0
    monkeypatch.undo()
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.2)
    world.failures.clear()
    vm = host.vms["low-1"]
    await until(lambda: vm.intent.phase is Phase.SETTLED)
    assert (vm.intent.committed.vector(), two_vms[0].bound_mib) == (FULL, 1024.0)


@pytest.mark.parametrize("written", [True, False], ids=["in the metadata", "in the journal only"])
async def test_a_successor_of_the_agent_does_not_carry_it_out_either(
    agent: Agent, command: Command, two_vms: list[Domain], world: World, tmp_path: Path, written: bool
) -> None:
    world.failures["read"] = REFUSED
    await command("PUT", "/v1/vms/low-1/target", target())
    await agent.close()
    domain = two_vms[0]
    assert '"given_up":true' in domain.intent
    if not written:
        domain.intent = domain.intent.replace('"given_up":true', '"given_up":false')
    world.failures.clear()
    async with succeeding(world, tmp_path) as successor:
        vm = successor.host.vms["low-1"]
        await until(lambda: vm.intent.phase is Phase.SETTLED)
        operation = await successor.requests.operations.get("t", 5.0)
        assert operation is not None
        assert (vm.intent.committed.vector(), domain.bound_mib) == (FULL, 1024.0)
        assert operation.state == "failed", operation.sentence
        assert sizes_asked(world) == []


async def test_a_target_whose_vm_is_busy_until_the_deadline_fails_and_changes_nothing(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "LEAST_WAIT_S", 0.05)
    vm = host.vms["low-1"]
    async with vm.lock:
        operation = await command("PUT", "/v1/vms/low-1/target", target(0.1))
        assert operation.sentence == "low-1 was busy until the deadline, and nothing was changed"
        assert operation.state == "failed"
    await until(lambda: not vm.lock.locked())
    assert (vm.intent.generation, vm.intent.committed.vector(), sizes_asked(world)) == (1, FULL, [])


# --- stops and deletions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [True, False], ids=["cut off", "written too late"])
async def test_a_stop_that_failed_is_not_carried_out_by_a_successor_of_the_agent(
    agent: Agent,
    command: Command,
    two_vms: list[Domain],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: bool,
) -> None:
    domain, hypervisor = two_vms[0], agent.host.hypervisor
    late = Late(hypervisor)

    async def busy(domain: str, limit_s: float) -> str:
        world.failures["write_intent"] = REFUSED
        raise HypervisorError("the domain is busy")

    with monkeypatch.context() as broken:
        if begun:
            broken.setattr(hypervisor, "shut_down", busy)
        else:
            broken.setattr(hypervisor, "write_intent", late.write_intent)
        body = {"request_id": "s", "limit_s": 2.0, "reason": "minimum"}
        assert (await command("POST", "/v1/vms/low-1/stop", body)).state == "failed"
        await agent.close()
    late.arrives_in(domain)
    assert Intent.model_validate_json(domain.intent).phase is Phase.STOPPING
    world.failures.clear()
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "s")
        assert successor.host.vms["low-1"].intent.phase is Phase.SETTLED
        assert (domain.state, Intent.model_validate_json(domain.intent).phase) == ("running", Phase.SETTLED)


@pytest.mark.parametrize("state", ["running", "off", "told"])
async def test_a_deletion_that_failed_is_not_carried_out_by_a_successor_of_the_agent(
    agent: Agent,
    command: Command,
    two_vms: list[Domain],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    domain, late = two_vms[0], Late(agent.host.hypervisor, in_time=state == "told")
    off, notice = state == "off", "&notice_s=1" if state == "told" else ""
    if off:
        assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    with monkeypatch.context() as broken:
        broken.setattr(agent.host.hypervisor, "write_intent", late.write_intent)
        assert (await command("DELETE", f"/v1/vms/low-1?request_id=d{notice}")).state == "failed"
        await agent.close()
    late.arrives_in(domain)
    assert Intent.model_validate_json(domain.intent).phase is Phase.DELETING
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "d")
        vm = successor.host.vms["low-1"]
        await until(lambda: vm.intent.phase is (Phase.STOPPED if off else Phase.SETTLED) and not vm.lock.locked())
        assert (vm.intent.committed.vector(), vm.allocation().current) == (FULL, ZERO if off else FULL)
        await until(lambda: set(world.withdrawn) == ({"d"} if state == "told" else set()))
        gone = await successor.creations.delete("low-1", Deletion(request_id="d-2"), "delete")
        ended = await successor.requests.operations.get(gone.request_id, 5.0)
        assert ended is not None
        assert ended.state == "done", ended.sentence
        assert list(world.domains) == ["ebb-host-a.low-2"]


async def test_a_start_that_failed_and_was_turned_off_again_is_not_answered_as_done_by_a_successor_of_the_agent(
    agent: Agent, command: Command, two_vms: list[Domain], world: World, tmp_path: Path
) -> None:
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    world.failures["resume"] = REFUSED
    assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "b"})).state == "failed"
    assert Intent.model_validate_json(two_vms[0].intent).phase is Phase.STOPPED
    await agent.close()
    world.failures.clear()
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "b")
        assert two_vms[0].state == "stopped"


async def test_a_start_that_was_written_too_late_is_not_carried_out_by_a_successor_of_the_agent(
    agent: Agent, command: Command, two_vms: list[Domain], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, late = two_vms[0], Late(agent.host.hypervisor)
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    with monkeypatch.context() as broken:
        broken.setattr(agent.host.hypervisor, "write_intent", late.write_intent)
        assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "b"})).state == "failed"
        assert agent.host.vms["low-1"].allocation().current == ZERO
        await agent.close()
    late.arrives_in(domain)
    assert Intent.model_validate_json(domain.intent).phase is Phase.STARTING
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "b")
        vm = successor.host.vms["low-1"]
        await until(lambda: vm.intent.phase is Phase.STOPPED and not vm.lock.locked())
        assert (domain.state, world.starts) == ("stopped", 0)


@pytest.mark.parametrize("kind", ["create", "start"])
async def test_a_vm_that_a_successor_pauses_runs_on_though_the_word_that_it_had_settled_came_late(
    agent: Agent, two_vms: list[Domain], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Else the agent after that one would take it for paused by another program."""
    domain, settled = two_vms[0], two_vms[0].intent
    intent = Intent.model_validate_json(settled)
    assert intent.cause is not None
    cause = intent.cause.model_copy(update={"kind": kind})
    await agent.close()
    domain.intent = intent.changed(phase=Phase.STARTING, cause=cause).model_dump_json()
    with monkeypatch.context() as hanging:
        hanging.setattr(FakeHypervisor, "set_quota", lambda *_: asyncio.Event().wait())
        async with succeeding(world, tmp_path):
            domain.intent = settled
            await until(lambda: domain.state == "paused")
    async with succeeding(world, tmp_path):
        await until(lambda: domain.state == "running")


def made_without_answer(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> list[Intent]:
    """What libvirt is asked to create from now on, without an answer: it may come about late."""
    made: list[Intent] = []

    async def create(domain: str, intent: Intent, xml: str | None = None) -> None:
        made.append(intent)
        raise HypervisorTimeout("libvirt did not answer within 60 s")

    monkeypatch.setattr(agent.host.hypervisor, "create", create)
    return made


async def test_a_creation_that_came_about_too_late_is_removed_by_a_successor_of_the_agent(
    agent: Agent, command: Command, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        made = made_without_answer(agent, broken)
        assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("web")})).state == "failed"
        await agent.close()
    await world.create("ebb-host-a.web", made[0].model_dump_json())
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "c")
        await until(lambda: not world.domains)
        assert "web" not in successor.host.vms


class FullDisk:
    """A journal's disk without room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_room = False
        save = Journal._save_state

        def full(journal: Journal) -> None:
            if not self.has_room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            save(journal)

        monkeypatch.setattr(Journal, "_save_state", full)
        for module in (creation_commands, operations):
            monkeypatch.setattr(module, "WRITE_AGAIN_S", 0.02)


async def being_undone(client: Client, agent: Agent) -> None:
    """Ask for a VM whose creation fails, and look whether that is not answered yet."""
    begun = await client.post("/v1/vms", json={"request_id": "c", "vm": low_vm("web")})
    assert begun.status == 202, await begun.text()
    async with asyncio.timeout(20):
        while (operation := await agent.requests.operations.get("c")) is None or not operation.progress:
            await asyncio.sleep(0.02)
    assert operation.state == "running", operation.sentence
    assert "web is still being undone" in operation.progress[0]
    again = await client.post("/v1/vms", json={"request_id": "c-2", "vm": low_vm("web")})
    assert again.status == 409, "its name is not free yet"


@pytest.mark.parametrize("then", ["room", "killed", "deleted"])
async def test_a_creation_that_may_come_about_late_is_not_answered_as_failed_before_that_is_written_down(
    agent: Agent,
    client: Client,
    command: Command,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    then: str,
) -> None:
    with monkeypatch.context() as broken:
        made = made_without_answer(agent, broken)
        disk = FullDisk(broken)
        await being_undone(client, agent)
        if then == "deleted":
            assert (await command("DELETE", "/v1/vms/web?request_id=d")).state == "failed", "nor is that written down"
        disk.has_room = then != "killed"
        if then == "deleted":
            await until(lambda: "c" in agent.host.journal.failed)
        if then != "killed":
            await has_failed(agent, "c")
        await agent.close()
    await world.create("ebb-host-a.web", made[0].model_dump_json())
    async with succeeding(world, tmp_path) as successor:
        operation = await successor.requests.operations.get("c", 5.0)
        assert operation is not None
        assert operation.state == ("done" if then == "killed" else "failed"), operation.sentence
        assert ("ebb-host-a.web" in world.domains) is (then == "killed")


REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "deletion": ("DELETE", "/v1/vms/low-1?request_id=r", None),
    "stop": ("POST", "/v1/vms/low-1/stop", {"request_id": "r", "limit_s": 2.0, "reason": "minimum"}),
    "resize": ("PUT", "/v1/vms/low-1/spec", {"request_id": "r", "spec": low_vm("low-1"), "deadline_s": 20.0}),
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("killed", [False, True], ids=["room", "killed"])
async def test_what_may_be_begun_late_is_not_answered_as_failed_before_that_is_written_down(
    agent: Agent,
    client: Client,
    two_vms: list[Domain],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    killed: bool,
) -> None:
    domain, late = two_vms[0], Late(agent.host.hypervisor)
    with monkeypatch.context() as broken:
        broken.setattr(agent.host.hypervisor, "write_intent", late.write_intent)
        disk = FullDisk(broken)
        method, path, body = REQUESTS[kind]
        begun = await client.request(method, path, json=body)
        assert begun.status == 202, await begun.text()
        async with asyncio.timeout(20):
            while (operation := await agent.requests.operations.get("r")) is None or not operation.progress:
                await asyncio.sleep(0.02)
        assert operation.state == "running", operation.sentence
        assert operation.progress[0].startswith("that it failed cannot be written down yet: libvirt did not answer")
        assert not agent.host.vms["low-1"].lock.locked(), "it can be deflated meanwhile"
        disk.has_room = not killed
        if not killed:
            await has_failed(agent, "r")
        await agent.close()
    late.arrives_in(domain)
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("r", 5.0)
        assert ended is not None
        assert ended.state == ("done" if killed else "failed"), ended.sentence
        assert ("ebb-host-a.low-1" in world.domains) is (kind != "deletion" or not killed)


async def test_a_deletion_of_a_creation_that_may_come_about_late_lasts_beyond_the_agent(
    agent: Agent, client: Client, command: Command, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        made = made_without_answer(agent, broken)
        disk = FullDisk(broken)
        broken.setattr(creation_commands, "WRITE_AGAIN_S", 60.0)
        await being_undone(client, agent)
        disk.has_room = True
        assert (await command("DELETE", "/v1/vms/web?request_id=d")).state == "done"
        await agent.close()
    await world.create("ebb-host-a.web", made[0].model_dump_json())
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "c")
        await until(lambda: not world.domains)


async def test_a_creation_whose_failure_cannot_be_written_down_has_failed_once_nothing_is_left_of_it(
    agent: Agent, client: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch)
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.05)
    world.failures["resume"] = world.failures["destroy"] = REFUSED
    await being_undone(client, agent)
    assert agent.host.vms["web"].allocation().current == FULL, "it is charged"
    world.failures.clear()
    await has_failed(agent, "c")
    assert not world.domains


async def test_what_had_failed_and_is_repeated_after_a_restart_has_failed(
    agent: Agent, command: Command, two_vms: list[Domain], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = PartialVector(cpu_cores=1.0, memory_mib=600.0)
    target_command = TargetCommand(request_id="t", generation=7, target=size, deadline_s=20.0)
    world.failures["write_intent"] = REFUSED
    assert (await command("PUT", "/v1/vms/low-1/target", target())).state == "failed"
    assert (await command("DELETE", "/v1/vms/low-2?request_id=d")).state == "failed"
    await agent.close()
    world.failures.clear()
    async with succeeding(world, tmp_path) as successor:
        await successor.sizes.target("low-1", target_command)
        await successor.creations.delete("low-2", Deletion(request_id="d"), "delete")
        for request_id in ("t", "d"):
            await has_failed(successor, request_id)
        assert sizes_asked(world) == []
        assert list(world.domains) == ["ebb-host-a.low-1", "ebb-host-a.low-2"]


# --- changes of what a VM is sold ------------------------------------------------------------------------------------


async def resized(command: Command, request_id: str = "r", **fields: Any) -> Operation:
    body = {"request_id": request_id, "spec": low_vm("low-1", **fields), "deadline_s": 20.0}
    return await command("PUT", "/v1/vms/low-1/spec", body)


def fails(monkeypatch: pytest.MonkeyPatch, world: World, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    """These calls fail from the moment on at which a resize begins, or has ended, once its intent was written."""
    resize_one = Host.resize_one

    async def last_words(*arguments: Any) -> VMOutcome:
        world.failures |= dict.fromkeys(before, REFUSED)
        outcome = await resize_one(*arguments)
        world.failures |= dict.fromkeys(after, REFUSED)
        return outcome

    monkeypatch.setattr(Host, "resize_one", last_words)


async def test_a_fixed_vm_whose_resize_cannot_be_written_at_its_end_stays_fixed(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await resized(command, priority="fixed", minimum={})).state == "done"
    smaller = {"cpu_cores": 2.0, "memory_mib": 1024.0}
    with monkeypatch.context() as broken:
        fails(broken, world, before=(), after=("write_intent",))
        operation = await resized(command, "s", priority="fixed", minimum={}, nominal=smaller)
    assert (operation.state, operation.sentence) == ("failed", REFUSED)
    vm = host.vms["low-1"]
    world.failures.clear()
    await until(lambda: not vm.record.uncertain)
    stored = Intent.model_validate_json(two_vms[0].intent)
    assert (stored.spec.priority, stored.spec.nominal.cpu_cores, stored.was) == ("fixed", 2.0, None)
    taken = await reclaim(command, cpu_cores=1.0)
    assert [outcome.name for outcome in taken.vms] == ["low-2"]
    assert (vm.allocation().current.cpu_cores, len(two_vms[0].online)) == (2.0, 2)


SMALLER = {"cpu_cores": 1.0, "memory_mib": 600.0}


async def test_a_resize_that_failed_is_not_carried_out_when_the_hypervisor_is_back(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        fails(broken, world, before=("read", "write_intent"), after=())
        assert (await resized(command, nominal=SMALLER)).state == "failed"
    world.failures.clear()
    vm = host.vms["low-1"]
    await until(lambda: not vm.record.uncertain and not vm.lock.locked())
    assert (vm.intent.phase, vm.intent.was, vm.allocation().current) == (Phase.SETTLED, None, FULL)
    assert vm.intent.spec.nominal.vector() == FULL
    assert (two_vms[0].bound_mib, sizes_asked(world)) == (1024.0, [])


@pytest.mark.parametrize("begun", [True, False], ids=["cut off", "written too late"])
async def test_a_successor_of_the_agent_does_not_carry_out_a_resize_that_failed(
    agent: Agent,
    command: Command,
    two_vms: list[Domain],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: bool,
) -> None:
    domain, late = two_vms[0], Late(agent.host.hypervisor)
    with monkeypatch.context() as broken:
        if begun:
            fails(broken, world, before=("read", "write_intent"), after=())
        else:
            broken.setattr(agent.host.hypervisor, "write_intent", late.write_intent)
        assert (await resized(command, nominal=SMALLER)).state == "failed"
        await agent.close()
    late.arrives_in(domain)
    assert Intent.model_validate_json(domain.intent).was is not None
    world.failures.clear()
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "r")
        vm = successor.host.vms["low-1"]
        await until(lambda: vm.intent.was is None and not vm.lock.locked())
        assert (vm.intent.phase, vm.intent.spec.nominal.vector()) == (Phase.SETTLED, FULL)
        assert (domain.bound_mib, sizes_asked(world)) == (1024.0, [])


@pytest.mark.parametrize("restarted", [True, False], ids=["by the next agent", "by this one"])
async def test_a_resize_of_a_vm_that_is_off_which_was_written_too_late_is_taken_back(
    agent: Agent,
    command: Command,
    two_vms: list[Domain],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarted: bool,
) -> None:
    domain, late = two_vms[0], Late(agent.host.hypervisor)
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"

    def sold(intent: Intent) -> tuple[ResourceVector, ResourceVector, object]:
        return intent.spec.nominal.vector(), intent.committed.vector(), intent.was

    with monkeypatch.context() as broken:
        broken.setattr(agent.host.hypervisor, "write_intent", late.write_intent)
        assert (await resized(command, nominal=SMALLER)).state == "failed"
        assert sold(agent.host.vms["low-1"].intent) == (FULL, FULL, None)
        if restarted:
            await agent.close()
    late.arrives_in(domain)
    assert Intent.model_validate_json(domain.intent).spec.nominal.memory_mib == 600.0
    if not restarted:
        await until(lambda: sold(Intent.model_validate_json(domain.intent)) == (FULL, FULL, None))
        return
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "r")
        assert sold(successor.host.vms["low-1"].intent) == (FULL, FULL, None)
        assert sold(Intent.model_validate_json(domain.intent)) == (FULL, FULL, None)
        assert (domain.vcpus, domain.starts_with) == (3, (3.0, 1024.0))


@pytest.mark.parametrize("busy", [False, True], ids=["at once", "though libvirt does not take it yet"])
async def test_a_resize_of_a_vm_that_is_off_is_done_once_it_is_written_and_a_successor_of_the_agent_says_so(
    agent: Agent,
    command: Command,
    two_vms: list[Domain],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    busy: bool,
) -> None:
    domain, late = two_vms[0], Late(agent.host.hypervisor, in_time=1)
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    with monkeypatch.context() as broken:
        broken.setattr(agent.host.hypervisor, "write_intent", late.write_intent)
        assert (await resized(command, nominal=SMALLER)).state == "done"
        await agent.close()
    if busy:
        world.failures["write_intent"] = REFUSED
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("r", 5.0)
        assert ended is not None
        assert ended.state == "done", ended.sentence
        world.failures.clear()
        await until(lambda: Intent.model_validate_json(domain.intent).was is None)
        stored = Intent.model_validate_json(domain.intent)
        assert (stored.spec.nominal.memory_mib, stored.committed.memory_mib, stored.was) == (600.0, 600.0, None)
