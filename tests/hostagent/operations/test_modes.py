"""Modes of a host against a make-believe hypervisor: what is refused, left, undone and caught up with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.modes import HostMode
from ebbtide.messages.commands import ModeCommand
from ebbtide.messages.hosts import ModeStatus
from ebbtide.messages.operations import Operation
from hostagent.errors import HostAgentError, JournalError
from hostagent.operations import mode_commands
from hostagent.operations.agent import Agent
from hostagent.service import give_back
from hostagent.state.intents import Phase
from hostagent.state.journal import Journal
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, make_agent
from tests.hostagent.control.test_pressure import press
from tests.hostagent.doing import host_idle, reclaim
from tests.hostagent.world import Domain, DomainOff, World
from tests.waiting import until


@pytest.fixture(autouse=True)
def keep_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_commands, "KEEP_S", 0.2)


@pytest.fixture
async def two_vms(command: Command, host: Host, world: World) -> list[Domain]:
    """low-1 and low-2 of 3 cores and 1024 MiB on 6 cores and 3600 MiB, their guests connected."""
    for name in ("low-1", "low-2"):
        operation = await command("POST", "/v1/vms", {"request_id": f"c-{name}", "vm": low_vm(name)})
        assert operation.state == "done", operation.sentence
    await until(lambda: all(vm.link.connected for vm in host.vms.values()))
    await host_idle(host)
    return list(world.domains.values())


async def set_mode(command: Command, mode: str, reason: str = "") -> Operation:
    return await command("PUT", "/v1/mode", {"request_id": f"mode-{mode}", "mode": mode, "reason": reason})


async def status(client: Client) -> ModeStatus:
    return ModeStatus.model_validate_json(await (await client.get("/v1/mode")).text())


async def refusal(client: Client, method: str, path: str, body: dict[str, Any]) -> str:
    response = await client.request(method, path, json=body)
    assert response.status == 409, await response.text()
    return str((await response.json())["detail"])


def sizes(domain: Domain) -> tuple[int, float | None, float]:
    return len(domain.online), domain.quota, domain.bound_mib


LOW_9 = low_vm("low-9", nominal={"cpu_cores": 1.0, "memory_mib": 512.0})
SMALL, WHOLE = {"cpu_cores": 1.0, "memory_mib": 700.0}, {"cpu_cores": 3.0, "memory_mib": 1024.0}
CREATE = ("POST", "/v1/vms", {"request_id": "x-create", "vm": LOW_9})
SHRINK = ("PUT", "/v1/vms/low-1/target", {"request_id": "x-shrink", "generation": 90, "target": SMALL})
GROW = ("PUT", "/v1/vms/low-1/target", {"request_id": "x-grow", "generation": 91, "target": WHOLE})
RECLAIM = ("POST", "/v1/reclaims", {"request_id": "x-reclaim", "need": {"cpu_cores": 1.0}})
REINFLATE = ("POST", "/v1/reinflations", {"request_id": "x-reinflate"})


async def test_a_host_is_active_until_somebody_says_otherwise(client: Client) -> None:
    found = await status(client)
    assert (found.mode, found.since) == ("active", None)
    assert found.sentence == "host-a is active: it takes commands, repairs drift and finishes what was begun"


@pytest.mark.parametrize(
    ("mode", "refused", "done"),
    [
        ("paused", [CREATE, SHRINK, GROW, RECLAIM, REINFLATE], []),
        ("off", [CREATE, SHRINK, GROW, RECLAIM, REINFLATE], []),
        ("draining", [CREATE, SHRINK, RECLAIM], [GROW, REINFLATE]),
        ("active", [], [SHRINK, RECLAIM, CREATE, REINFLATE]),
    ],
)
async def test_each_mode_refuses_its_commands_with_a_sentence_and_changes_nothing(
    client: Client, command: Command, two_vms: list[Domain], host: Host, mode: str, refused: list[Any], done: list[Any]
) -> None:
    assert (await set_mode(command, mode, "new disks")).state == "done"
    await host_idle(host)
    before = [sizes(domain) for domain in two_vms]
    for method, path, body in refused:
        said = await refusal(client, method, path, body)
        assert said.startswith(f"host-a is {mode}: ")
        assert "(new disks)" in said
        assert "`ebb host resume host-a`" in said
        assert (await client.get(f"/v1/operations/{body['request_id']}")).status == 404
    assert [sizes(domain) for domain in two_vms] == before
    if refused:
        assert host.history.decisions()[-1].kind == "refused"
    for method, path, body in done:
        assert (await command(method, path, body)).state in ("done", "partial")
        await host_idle(host)
    assert (await command("DELETE", "/v1/vms/low-2?request_id=d")).state == "done"


async def test_a_command_that_was_taken_on_before_gets_its_answer_in_every_mode(
    client: Client, command: Command, two_vms: list[Domain]
) -> None:
    first = await reclaim(command, cpu_cores=1.0)
    await set_mode(command, "paused")
    assert await reclaim(command, cpu_cores=1.0) == first


async def test_the_mode_stands_in_the_report_and_changing_it_is_one_decision(
    client: Client, command: Command, host: Host
) -> None:
    operation = await set_mode(command, "paused", "new disks")
    assert operation.sentence == (
        "host-a is paused: no VM is created and no size is changed until it is resumed (new disks)"
    )
    report = await (await client.get("/v1/host")).json()
    assert (report["mode"], report["mode_reason"]) == ("paused", "new disks")
    (decision,) = host.history.decisions()
    assert (decision.kind, decision.sentence) == ("mode", operation.sentence)
    assert decision.inputs == {"mode": "paused", "before": "active"}


async def test_the_mode_survives_a_kill(world: World, tmp_path: Path, command: Command) -> None:
    await set_mode(command, "draining", "it is old")
    # A journal that is read anew is what a killed agent leaves.
    stored = Journal(tmp_path).mode
    assert (stored.mode, stored.reason) == ("draining", "it is old")
    assert stored.since is not None


async def test_an_old_epoch_and_a_bad_mode_are_refused(client: Client, command: Command, host: Host) -> None:
    await command("POST", "/v1/reinflations", {"request_id": "a", "epoch": 7})
    for body, status_, field in [
        ({"request_id": "b", "epoch": 6, "mode": "paused"}, 409, "epoch"),
        ({"request_id": "b", "epoch": 7, "mode": "asleep"}, 400, "mode"),
        ({"request_id": "b", "epoch": 7}, 400, "mode"),
        ({"request_id": "b", "epoch": 7, "mode": "off", "reason": "x" * 201}, 400, "reason"),
    ]:
        response = await client.put("/v1/mode", json=body)
        assert (response.status, (await response.json())["field"]) == (status_, field)
    assert host.modes.mode == "active"


async def test_a_change_that_is_repeated_in_another_order_is_the_same_change(command: Command) -> None:
    body = {"request_id": "m", "mode": "draining", "reason": "test"}
    first = await command("PUT", "/v1/mode", {**body, "order": 1})
    assert await command("PUT", "/v1/mode", {**body, "order": 2}) == first


async def test_a_mode_that_cannot_be_stored_is_not_taken(
    client: Client, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("hostagent.state.journal._replace", full)
    response = await client.put("/v1/mode", json={"request_id": "m", "mode": "off"})
    assert response.status == 503
    assert "no space left" in (await response.json())["detail"]
    assert host.modes.mode == "active"


@contextlib.contextmanager
def held_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first mode is not stored before the body has ended, nor before a later one, should that be under way."""
    set_mode, go_on, later = host.journal.set_mode, threading.Event(), threading.Event()
    first = threading.Lock()

    def slow(*arguments: Any) -> None:
        if first.acquire(blocking=False):
            assert go_on.wait(20.0)
            later.wait(0.5)
            set_mode(*arguments)
        else:
            set_mode(*arguments)
            later.set()

    monkeypatch.setattr(host.journal, "set_mode", slow)
    try:
        yield
    finally:
        go_on.set()


async def test_a_mode_that_is_overtaken_while_it_is_stored_is_answered_as_what_it_is(
    client: Client, host: Host, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"request_id": "m", "epoch": 1, "order": 3, "mode": "paused"}
    with held_up(host, monkeypatch):
        sent = asyncio.create_task(client.put("/v1/mode", json=body))
        await until(lambda: "m" in agent.requests._being_checked)
        assert (await client.put("/v1/epoch", json={"epoch": 2})).status == 200
    answer = await sent
    assert (answer.status, host.modes.mode) == (202, "paused"), await answer.text()


async def test_of_two_modes_that_come_at_once_the_later_one_holds(
    client: Client, host: Host, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"request_id": "m", "epoch": 1, "order": 3, "mode": "paused"}
    second = {"request_id": "n", "epoch": 1, "order": 4, "mode": "draining"}
    with held_up(host, monkeypatch):
        sent = [asyncio.create_task(client.put("/v1/mode", json=first))]
        await until(lambda: "m" in agent.requests._being_checked)
        sent.append(asyncio.create_task(client.put("/v1/mode", json=second)))
        await until(lambda: sent[1].done() or "n" in agent.requests._being_checked)
    answers = [answer.status for answer in await asyncio.gather(*sent)]
    assert (answers, host.modes.mode) == ([202, 202], "draining")
    ended = await (await client.get("/v1/operations/n?wait_s=20")).json()
    assert (ended["state"], ended["sentence"]) == ("done", host.modes.sentence)


# --- paused ----------------------------------------------------------------------------------------------------------


async def test_paused_nobody_puts_drift_right_and_it_is_written_down_once_and_put_right_after(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=200.0)
    await host_idle(host)
    domain = two_vms[0]
    before = sizes(domain)
    await set_mode(command, "paused", "by hand")
    domain.quota, domain.plugged_mib = None, 512.0
    changed = sizes(domain)

    def left() -> list[Any]:
        return [d for d in host.history.decisions("low-1") if d.kind == "repair" and "left as it is" in d.sentence]

    await until(lambda: bool(left()) and left()[-1].repeated >= 2)
    assert sizes(domain) == changed
    assert left()[-1].sentence.startswith("each vCPU has no quota instead of 0.75; the VM has 2 CPUs on line and")
    assert left()[-1].sentence.endswith(
        "left as it is: host-a is paused: no VM is created and no size is changed until it is resumed (by hand)"
    )
    await set_mode(command, "active")
    await until(lambda: sizes(domain) == before)


async def test_paused_what_is_left_of_a_failed_resize_is_left_and_settled_afterwards(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    world.failures["read"] = "the monitor does not answer"
    assert (await reclaim(command, cpu_cores=2.0)).state == "partial"
    await set_mode(command, "paused")
    del world.failures["read"]
    calls = len(world.calls)
    await until(lambda: len([1 for call, _ in world.calls[calls:] if call == "survey"]) > 5)
    assert {vm.intent.phase for vm in host.vms.values()} == {Phase.DEFLATING}
    assert {domain.quota for domain in two_vms} == {None}
    await set_mode(command, "active")
    await until(lambda: all(vm.intent.phase is Phase.SETTLED for vm in host.vms.values()))
    assert sum(vm.intent.committed.cpu_cores for vm in host.vms.values()) == 6.0, "what failed is not carried out"


@pytest.mark.parametrize("mode", ["paused", "draining"])
async def test_the_answer_comes_when_what_was_begun_before_has_ended(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World, mode: str
) -> None:
    world.delay = lambda: 0.05
    response = await client.post("/v1/reclaims", json={"request_id": "slow", "need": {"memory_mib": 400.0}})
    assert response.status == 202
    operation = await set_mode(command, mode)
    assert operation.progress == ("reclaim slow was begun before and ends",)
    slow = Operation.model_validate_json(await (await client.get("/v1/operations/slow")).text())
    assert slow.state == "done"
    # On a draining host it gets that back.
    assert mode == "draining" or host.vms["low-1"].intent.committed.memory_mib == 824.0


async def test_paused_a_restarted_agent_leaves_what_was_begun_and_goes_on_when_it_is_resumed(
    world: World, tmp_path: Path, command: Command, two_vms: list[Domain], host: Host
) -> None:
    world.failures["read"] = "the monitor does not answer"
    await reclaim(command, cpu_cores=2.0)
    await set_mode(command, "paused")
    del world.failures["read"]
    again = make_agent(world, tmp_path)
    await again.start()
    try:
        operation = await again.requests.operations.get("reclaim", 20.0)
        assert operation is not None
        assert operation.state != "running"
        assert again.host.modes.mode == "paused"
        assert {vm.intent.phase for vm in again.host.vms.values()} == {Phase.DEFLATING}
    finally:
        await again.close()


async def test_paused_a_vm_that_somebody_starts_runs_as_it_is(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=4.0)
    await host_idle(host)
    domain, stopped_at = two_vms[0], time.time()
    domain.state = "stopped"
    await until(lambda: not host.vms["low-1"].running)
    await set_mode(command, "paused")
    domain.quota, domain.online, domain.state = None, {0, 1, 2}, "running"
    await until(lambda: host.vms["low-1"].running)
    told = host.journal.changes[-1]
    assert (told.machine, told.cause) == ("low-1", "started from outside")
    assert (told.cores_before, told.cores_after) == (0.0, 1.0)
    assert (host.vms["low-1"].intent.started_at or 0.0) >= stopped_at
    assert domain.quota is None
    (said,) = [d.sentence for d in host.history.decisions("low-1") if d.sentence.startswith("started from outside")]
    assert said.startswith("started from outside and left as it is: host-a is paused")
    await set_mode(command, "active")
    await until(lambda: domain.quota is not None)


async def test_paused_a_vm_that_somebody_starts_is_charged_although_that_cannot_be_told(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_vms[0].state = "stopped"
    await until(lambda: not host.vms["low-1"].running)
    await set_mode(command, "paused")

    def full(*_args: object) -> None:
        raise JournalError("no space left on device")

    monkeypatch.setattr(host.journal, "add", full)
    two_vms[0].state = "running"
    await until(lambda: host.vms["low-1"].running)
    assert host.vms["low-1"].allocation().charge.cpu_cores == 3.0


async def test_paused_a_vm_under_pressure_is_written_down_and_gets_what_there_is_afterwards(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, memory_mib=800.0)
    await set_mode(command, "paused")
    press(two_vms[0])
    await until(lambda: any(d.kind == "pressure" for d in host.history.decisions("low-1")))
    looks = host.history.newest
    await until(lambda: bool(host.vms["low-1"].pressure.sentence) and not host.vms["low-1"].lock.locked())
    assert two_vms[0].bound_mib == 624
    await set_mode(command, "active")
    await until(lambda: two_vms[0].bound_mib == 1024)
    assert host.history.newest > looks


async def test_a_change_that_waits_for_one_vm_holds_up_no_other(
    client: Client, command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, memory_mib=800.0)
    vm = host.vms["low-2"]
    async with vm.lock:
        answer = await client.put("/v1/mode", json={"request_id": "pause", "mode": "paused"})
        assert answer.status == 202
        await until(lambda: vm.lock.is_wanted)
        assert (await set_mode(command, "active")).state == "done"
        press(two_vms[0])
        await until(lambda: two_vms[0].bound_mib == 1024)
    ended = await client.get("/v1/operations/pause?wait_s=20")
    assert (await ended.json())["sentence"].startswith("given up: host-a is active")


# --- draining --------------------------------------------------------------------------------------------------------


async def test_draining_vms_grow_as_room_appears(command: Command, two_vms: list[Domain], host: Host) -> None:
    high = low_vm("high-1", priority="fixed", minimum={}, nominal={"cpu_cores": 3.0, "memory_mib": 900.0})
    await reclaim(command, cpu_cores=3.0, memory_mib=600.0)
    await command("POST", "/v1/vms", {"request_id": "h", "vm": high})
    await set_mode(command, "draining")
    assert host.vms["low-1"].intent.committed.cpu_cores == 1.5
    await command("DELETE", "/v1/vms/high-1?request_id=d")
    await until(lambda: all(v.intent.committed == v.intent.spec.nominal for v in host.vms.values()))
    await until(lambda: any(d.kind == "reinflate" for d in host.history.decisions("low-1")))


# --- off -------------------------------------------------------------------------------------------------------------


async def test_what_off_gives_back_its_operation_names_though_it_has_to_wait_for_a_vm(
    agent: Agent, command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=4.0, memory_mib=900.0)
    async with host.vms["low-1"].lock:
        switching = asyncio.ensure_future(set_mode(command, "off"))
        await until(lambda: agent.requests.operations.under_way()["mode"] > 0)
        assert host.modes.mode is HostMode.OFF
        # As it does every now and then by itself.
        await agent.mode_commands._keep()
    assert {outcome.name for outcome in (await switching).vms} == {"low-1", "low-2"}


async def test_nothing_is_given_back_by_itself_before_the_operation_of_off_is_known(
    agent: Agent, command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reclaim(command, cpu_cores=4.0, memory_mib=900.0)
    by_command = host.modes.set

    async def then_the_time_comes(mode: HostMode, reason: str) -> None:
        await by_command(mode, reason)
        await agent.mode_commands._keep()

    monkeypatch.setattr(host.modes, "set", then_the_time_comes)
    assert {outcome.name for outcome in (await set_mode(command, "off")).vms} == {"low-1", "low-2"}


async def test_off_undoes_everything_and_then_leaves_the_vms_alone(
    client: Client, command: Command, two_vms: list[Domain], host: Host
) -> None:
    before = [sizes(domain) for domain in two_vms]
    await reclaim(command, cpu_cores=4.0, memory_mib=900.0)
    assert [sizes(domain) for domain in two_vms] != before
    operation = await set_mode(command, "off", "goodbye")
    assert operation.state == "done"
    assert operation.sentence.endswith("(goodbye); all 2 VMs have their nominal sizes")
    assert {outcome.name for outcome in operation.vms} == {"low-1", "low-2"}
    assert [sizes(domain) for domain in two_vms] == before
    assert all(vm.intent.committed == vm.intent.spec.nominal for vm in host.vms.values())
    two_vms[0].quota = 0.5
    await until(lambda: any("left as it is: host-a is off" in d.sentence for d in host.history.decisions("low-1")))
    assert two_vms[0].quota == 0.5
    assert (await status(client)).unfinished == ()


async def test_off_gives_memory_only_as_far_as_the_host_has_it_and_cpu_in_full_and_goes_on_when_there_is_room(
    client: Client, command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=600.0)
    high = low_vm("high-1", priority="fixed", minimum={}, nominal={"cpu_cores": 3.0, "memory_mib": 1000.0})
    assert (await command("POST", "/v1/vms", {"request_id": "h", "vm": high})).state == "done"
    operation = await set_mode(command, "off")
    assert operation.state == "partial"
    free = host.free().memory_mib
    assert free < 1.0
    assert f"low-1 lacks 204 MiB, since the host has {free:g} MiB of memory free" in operation.sentence
    assert [domain.quota for domain in two_vms] == [None, None]
    assert [len(domain.online) for domain in two_vms] == [3, 3]
    charged = sum(vm.allocation().charge.memory_mib for vm in host.vms.values())
    assert charged <= host.slice.capacity.memory_mib
    assert len((await status(client)).unfinished) == 2
    assert (await command("DELETE", "/v1/vms/high-1?request_id=d")).state == "done"
    await until(lambda: all(domain.bound_mib == 1024 for domain in two_vms))
    await until(lambda: host.modes.unfinished == ())


@pytest.mark.slow
async def test_off_is_gone_on_with_by_a_restarted_agent(
    world: World, tmp_path: Path, client: Client, command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0)
    world.failures["set_quota"] = "the monitor does not answer"
    operation = await set_mode(command, "off")
    assert operation.state == "partial"
    assert "low-1" in operation.sentence
    await client.close()
    del world.failures["set_quota"]
    again = make_agent(world, tmp_path)
    await again.start()
    try:
        await until(lambda: all(domain.quota is None and len(domain.online) == 3 for domain in two_vms))
        await until(lambda: all(vm.intent.phase is Phase.SETTLED for vm in again.host.vms.values()))
    finally:
        await again.close()


@pytest.mark.slow
async def test_what_was_taken_is_given_back_where_no_agent_serves(
    world: World, tmp_path: Path, client: Client, command: Command, two_vms: list[Domain]
) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=600.0)
    await client.close()
    world.failures["set_quota"] = "the monitor does not answer"
    with pytest.raises(HostAgentError, match=r"^after 3 s there is something left: .*low-1"):
        await give_back(make_agent(world, tmp_path), 3.0)
    del world.failures["set_quota"]
    said = await give_back(make_agent(world, tmp_path))
    assert said.endswith("nothing is taken from its 2 VMs")
    assert [sizes(domain) for domain in two_vms] == [(3, None, 1024.0)] * 2
    assert Journal(tmp_path).mode.mode == "off"


async def test_off_a_stopped_vm_would_come_up_whole(command: Command, two_vms: list[Domain], host: Host) -> None:
    await reclaim(command, cpu_cores=4.0)
    await host_idle(host)
    two_vms[0].state = "stopped"
    await until(lambda: not host.vms["low-1"].running)
    assert (await set_mode(command, "off")).state == "done"
    assert host.vms["low-1"].intent.committed.cpu_cores == 3.0
    assert two_vms[0].starts_with == (3.0, 1024.0)
    assert json.loads(two_vms[0].intent)["committed"]["cpu_cores"] == 3.0


async def test_off_is_not_answered_as_failed_where_nothing_could_be_given_back_yet(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, cpu_cores=3.0)
    await host_idle(host)
    world.failures["write_intent"] = "the monitor does not answer"
    operation = await set_mode(command, "off")
    assert (operation.state, (await status(client)).mode) == ("partial", "off")
    assert operation.sentence.startswith("host-a is off: ")
    assert "low-1" in operation.sentence
    world.failures.clear()
    await until(lambda: all(domain.quota is None and len(domain.online) == 3 for domain in two_vms))


@pytest.mark.slow
async def test_off_a_stopped_vm_that_cannot_be_defined_whole_yet_is_still_to_be_undone(
    world: World, tmp_path: Path, agent: Agent, client: Client, command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=4.0)
    await host_idle(host)
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    assert (await command("DELETE", "/v1/vms/low-2?request_id=d")).state == "done"
    world.failures["prepare_start"] = "the monitor does not answer"
    operation = await set_mode(command, "off")
    assert (operation.state, (await status(client)).mode) == ("partial", "off")
    assert operation.sentence.endswith("tried again while it is off: the monitor does not answer")
    assert (await status(client)).unfinished == ("the monitor does not answer",)
    await agent.close()
    with pytest.raises(HostAgentError, match="the monitor does not answer"):
        await give_back(make_agent(world, tmp_path), 3.0)
    again = make_agent(world, tmp_path)
    await again.start()
    try:
        await again.mode_commands.set(ModeCommand(request_id="again", mode=HostMode.OFF))
        await until(lambda: again.host.modes.unfinished != ())
        world.failures.clear()
        await until(lambda: two_vms[0].starts_with == (3.0, 1024.0))
        await until(lambda: again.host.modes.unfinished == ())
    finally:
        await again.close()


async def test_off_a_stopped_vm_that_cannot_be_defined_whole_holds_up_no_other(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, cpu_cores=4.0)
    await host_idle(host)
    for name in host.vms:
        body = {"request_id": f"s-{name}", "limit_s": 2.0}
        assert (await command("POST", f"/v1/vms/{name}/stop", body)).state == "done"

    async def refuse(method: str, name: str) -> None:
        if (method, name) == ("prepare_start", "ebb-host-a.low-1"):
            raise DomainOff("its definition cannot be written")

    world.before = refuse
    assert (await set_mode(command, "off")).state == "partial"
    assert [domain.starts_with for domain in two_vms] == [(1.0, 1024.0), (3.0, 1024.0)]
    world.before = None
    await until(lambda: two_vms[0].starts_with == (3.0, 1024.0))


async def test_off_is_given_up_when_the_host_is_resumed_meanwhile(
    client: Client, command: Command, two_vms: list[Domain], world: World
) -> None:
    world.delay = lambda: 0.05
    response = await client.post("/v1/reclaims", json={"request_id": "slow", "need": {"memory_mib": 400.0}})
    assert response.status == 202
    response = await client.put("/v1/mode", json={"request_id": "mode-off", "mode": "off"})
    assert response.status == 202
    response = await client.put("/v1/mode", json={"request_id": "back", "mode": "active"})
    assert response.status == 202
    final = Operation.model_validate_json(await (await client.get("/v1/operations/mode-off?wait_s=20")).text())
    assert final.state == "partial"
    assert final.sentence.startswith("given up: host-a is active")


async def test_resumed_from_off_the_host_takes_commands_again(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await set_mode(command, "off")
    await set_mode(command, "active")
    assert (await reclaim(command, cpu_cores=2.0)).state == "done"
    assert host.free().cpu_cores == pytest.approx(2.0)


@pytest.mark.slow
async def test_what_cannot_be_written_down_is_left_over_and_the_command_says_so(
    client: Client, command: Command, two_vms: list[Domain], world: World, tmp_path: Path
) -> None:
    await reclaim(command, cpu_cores=4.0)
    await client.close()
    world.failures["write_intent"] = "the monitor does not answer"
    with pytest.raises(HostAgentError, match=r"^after 3 s .*: low-1 is not known .* could not be written"):
        await give_back(make_agent(world, tmp_path), 3.0)
    assert sizes(two_vms[0])[0] == 1
    del world.failures["write_intent"]
    assert (await give_back(make_agent(world, tmp_path))).endswith("nothing is taken from its 2 VMs")
