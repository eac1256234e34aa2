"""Stop and start as an agent carries them out, over a make-believe host."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.messages.commands import Command as Deletion
from hostagent.errors import HypervisorError
from hostagent.operations import ending, lifecycle_commands, resuming
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm import notice
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, make_agent, succeeding
from tests.hostagent.doing import reclaim, report, unseen
from tests.hostagent.world import Domain, World
from tests.waiting import until


async def stop(command: Command, name: str = "low-1", request_id: str = "stop") -> Any:
    return await command("POST", f"/v1/vms/{name}/stop", {"request_id": request_id, "limit_s": 2.0})


async def start(command: Command, name: str = "low-1", request_id: str = "start") -> Any:
    return await command("POST", f"/v1/vms/{name}/start", {"request_id": request_id})


# --- stop and start --------------------------------------------------------------------------------------------------


async def test_a_stopped_vm_holds_no_room_and_starts_where_it_was(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await reclaim(command, cpu_cores=2.0, memory_mib=200.0)
    before, free = host.vms["low-1"].intent.committed, host.free()
    stopped = await stop(command)
    assert (stopped.state, stopped.kind, stopped.vm) == ("done", "stop", "low-1")
    assert "came free" in stopped.sentence
    (status, _) = (await report(client)).vms
    assert (status.state, status.current.cpu_cores, status.overhead_mib) == ("stopped", 0.0, 0.0)
    assert status.start_size == before
    await host.sample()
    assert host.free().memory_mib > free.memory_mib
    domain = world.domains["ebb-host-a.low-1"]
    assert domain.state == "stopped"
    assert (await stop(command, request_id="again")).sentence == "low-1 is stopped"
    started = await start(command)
    assert started.state == "done", started.sentence
    assert (domain.state, world.starts) == ("running", 1)
    assert domain.resumed_with_quota is not None, "held to its committed size before its vCPUs run"
    assert (await report(client)).vms[0].current == before
    await until(lambda: host.vms["low-1"].link.connected)
    assert (await start(command, request_id="start-2")).sentence == "low-1 runs already"


async def test_a_start_beside_another_operation_on_the_vm_says_so_and_that_it_may_be_tried_again(
    client: Client, command: Command, host: Host, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    await stop(command)
    monkeypatch.setattr(lifecycle_commands, "FOUND_OFF_S", 0.05)
    async with host.vms["low-1"].lock:
        refused = await client.post("/v1/vms/low-1/start", json={"request_id": "start"})
    problem = await refused.json()
    assert (refused.status, problem["code"]) == (409, "busy")
    assert "another operation on it is under way; try again" in problem["detail"]
    assert (await start(command)).state == "done"


async def test_a_vm_that_another_program_has_just_started_is_held_to_its_size_and_goes_on_when_it_is_to_start(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command)
    domain, starts = world.domains["ebb-host-a.low-1"], world.starts
    # Past the agent, which has not looked since.
    with unseen(host):
        domain.state = "running"
        started = await start(command)
    assert started.state == "done", started.sentence
    assert (domain.state, world.starts) == ("running", starts)
    last = [method for method, _ in world.calls if method in ("suspend", "set_quota", "resume")][-3:]
    assert last == ["suspend", "set_quota", "resume"], "held to its size before it goes on"


@pytest.mark.parametrize("call", ["suspend", "set_quota", "resume"])
async def test_a_vm_that_another_program_has_just_started_is_kept_where_it_cannot_be_held_to_its_size_yet(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain], call: str
) -> None:
    await stop(command)
    domain, vm = world.domains["ebb-host-a.low-1"], host.vms["low-1"]
    with unseen(host):
        domain.state, world.failures[call] = "running", "busy"
        world.calls.clear()
        failed = await start(command)
    assert (failed.state, failed.sentence) == ("failed", "busy")
    assert not vm.allocation().charge.is_zero()
    told = host.journal.changes[-1]
    assert (told.machine, told.cores_before, told.cores_after) == ("low-1", 0.0, 3.0)
    await until(lambda: [method for method, _ in world.calls].count(call) > 2)
    again = await (await client.post("/v1/vms/low-1/start", json={"request_id": "again"})).json()
    assert call == "suspend" or again["code"] == "busy", "its pause is ours"
    world.failures.clear()
    await until(lambda: vm.running and vm.intent.phase is Phase.SETTLED)
    methods = [method for method, _ in world.calls]
    assert (domain.state, methods.count("shut_down")) == ("running", 0)
    last = [method for method in methods if method in ("suspend", "set_quota", "resume")][-3:]
    assert last == ["suspend", "set_quota", "resume"], "held to its size before it goes on"


@pytest.mark.parametrize("is_told", [True, False], ids=["told at once", "told later"])
async def test_a_vm_that_another_program_starts_while_it_is_being_started_goes_on_though_that_start_fails(
    command: Command,
    host: Host,
    world: World,
    two_vms: list[Domain],
    monkeypatch: pytest.MonkeyPatch,
    is_told: bool,
) -> None:
    await stop(command)
    domain, vm = world.domains["ebb-host-a.low-1"], host.vms["low-1"]

    async def too_late(name: str, intent: Intent) -> None:
        world.domains[name].state = "running"
        if not is_told:
            world.failures["domains"] = "no connection"
        raise HypervisorError("domain is already running")

    monkeypatch.setattr(host.hypervisor, "start", too_late)
    world.calls.clear()
    failed = await start(command)
    assert (failed.state, failed.sentence) == ("failed", "domain is already running")
    assert vm.intent.phase is (Phase.ADMITTING if is_told else Phase.STOPPING)
    assert not vm.allocation().charge.is_zero()
    world.failures.clear()
    await until(lambda: vm.running and vm.intent.phase is Phase.SETTLED)
    methods = [method for method, _ in world.calls]
    assert (domain.state, methods.count("shut_down")) == ("running", 0)
    told = host.journal.changes[-1]
    assert (told.machine, told.cores_before, told.cores_after) == ("low-1", 0.0, 3.0)
    last = [method for method in methods if method in ("suspend", "set_quota", "resume")][-3:]
    assert last == ["suspend", "set_quota", "resume"], "held to its size before it goes on"


@pytest.mark.parametrize("state", ["running", "stopped"])
async def test_a_vm_that_runs_though_its_start_was_answered_as_failed_is_held_to_its_size_by_the_next_agent(
    command: Command, agent: Agent, world: World, tmp_path: Path, two_vms: list[Domain], state: str
) -> None:
    await stop(command)
    domain = world.domains["ebb-host-a.low-1"]
    world.failures["write_intent"] = "busy"
    assert (await start(command)).state == "failed"
    await agent.close()
    # The write came late, and another program has started it since.
    intent, cause = Intent.model_validate_json(domain.intent), agent.host.vms["low-1"].intent.cause
    assert cause is not None
    late = cause.model_copy(update={"kind": "start", "request_id": "start"})
    domain.intent = intent.changed(phase=Phase.STARTING, cause=late).model_dump_json()
    domain.state = state
    world.failures.clear()
    world.calls.clear()
    async with succeeding(world, tmp_path) as successor:
        settled = Phase.SETTLED if state == "running" else Phase.STOPPED
        await until(lambda: successor.host.vm("low-1").intent.phase is settled)
        assert domain.state == state
        assert successor.host.journal.last_cores("low-1") == (3.0 if state == "running" else 0.0)
        ended = await successor.requests.operations.get("start", 10)
        assert ended is not None
        assert ended.state == "failed"


async def test_a_vm_that_runs_though_its_start_was_answered_as_failed_is_not_ended_by_the_agent_after_next(
    command: Command, agent: Agent, world: World, tmp_path: Path, two_vms: list[Domain]
) -> None:
    started = agent.host.vms["low-1"].intent.cause
    assert started is not None
    await agent.close()
    domain = world.domains["ebb-host-a.low-1"]
    late = started.model_copy(update={"kind": "start", "request_id": "late"})
    intent = Intent.model_validate_json(domain.intent)
    domain.intent = intent.changed(phase=Phase.STARTING, cause=late).model_dump_json()
    agent.host.journal.add_failed("late")
    world.failures["set_quota"] = "busy"
    async with succeeding(world, tmp_path):
        await until(lambda: domain.state == "paused")
    world.failures.clear()
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vm("low-1").intent.phase in (Phase.SETTLED, Phase.STOPPED))
        assert domain.state == "running"


async def test_a_preempted_vm_is_told_and_keeps_its_disk_and_comes_up_at_another_size(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    body = {"request_id": "p", "limit_s": 1.5, "reason": "shortfall"}
    stopped = await command("POST", "/v1/vms/low-1/stop", body)
    assert stopped.state == "done"
    assert "preempted low-1, reason shortfall (its guest was told 1 s before, and 1 of 1 programs" in stopped.sentence
    assert {(told["kind"], told["reason"], told["request_id"]) for told in world.notices} == {
        ("stop", "shortfall", "p")
    }
    assert 0.5 < world.notices[0]["seconds_left"] <= 1.0, "the rest is for its power-off"
    assert world.domains["ebb-host-a.low-1"].state == "stopped"
    begun = {"request_id": "back", "start_size": {"cpu_cores": 1.0, "memory_mib": 100.0}}
    assert (await command("POST", "/v1/vms/low-1/start", begun)).state == "done"
    status = (await report(client)).vms[0]
    assert (status.current.cpu_cores, status.current.memory_mib) == (1.0, 512.0), "no less than it boots with"


async def test_a_notice_is_as_long_as_promised_though_the_clock_is_set_meanwhile(
    command: Command, world: World, two_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "time", SimpleNamespace(time=lambda: time.time() + 3600.0))
    monkeypatch.setattr(notice, "POLLED_S", 0.1)
    body = {"request_id": "p", "limit_s": 60.0, "reason": "shortfall"}
    assert (await command("POST", "/v1/vms/low-1/stop", body)).state == "done"
    assert 30.0 < world.notices[0]["seconds_left"] <= 60.0


async def test_a_vm_that_is_preempted_for_good_is_told_first(
    command: Command, world: World, two_vms: list[Domain]
) -> None:
    gone = await command("DELETE", "/v1/vms/low-1?request_id=d&reason=minimum&notice_s=1.2")
    assert gone.sentence.startswith(
        "preempted low-1, reason minimum (its guest was told 1 s before, and 1 of 1 programs"
    )
    assert {(told["kind"], told["reason"], told["request_id"]) for told in world.notices} == {
        ("delete", "minimum", "d")
    }
    assert 1.0 < world.notices[0]["seconds_left"] <= 1.2, "all of it is for its programs"
    assert list(world.domains) == ["ebb-host-a.low-2"]
    world.notices.clear()
    await command("DELETE", "/v1/vms/low-2?request_id=d2")
    assert world.notices == [], "its owner's deletion is told to nobody"


async def test_a_killed_agent_goes_on_with_the_very_same_notice(
    command: Command, agent: Agent, world: World, tmp_path: Path, unnoted: None
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await command("POST", "/v1/vms/low-1/stop", {"request_id": "p", "limit_s": 1.5, "reason": "minimum"})
    await agent.close()
    (domain,) = world.domains.values()
    intent = Intent.model_validate_json(domain.intent)
    assert intent.cause is not None
    domain.intent = intent.changed(phase=Phase.STOPPING).model_dump_json()
    domain.state = "running"
    world.notices.clear()
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("p", 10)
        assert ended is not None
        assert "its guest was told" in ended.sentence
        assert {told["request_id"] for told in world.notices} == {"p"}
        assert domain.state == "stopped"


async def test_a_killed_agent_goes_on_with_the_notice_of_a_deletion(
    client: Client, agent: Agent, world: World, tmp_path: Path, two_vms: list[Domain]
) -> None:
    world.programs_run = 1
    assert (await client.delete("/v1/vms/low-1?request_id=d&reason=minimum&notice_s=6")).status == 202
    await until(lambda: len(world.notices) > 0)
    await agent.close()
    world.notices.clear()
    world.programs_run = 0
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("d", 20)
        assert ended is not None
        assert ended.sentence.startswith("preempted low-1, reason minimum (its guest was told"), ended.sentence
        assert {told["request_id"] for told in world.notices} == {"d"}
        assert list(world.domains) == ["ebb-host-a.low-2"]


async def test_a_vm_that_its_owner_stops_is_told_of_no_preemption(
    command: Command, world: World, two_vms: list[Domain]
) -> None:
    await stop(command)
    assert world.notices == []


async def test_a_start_needs_room_and_is_charged_at_once(
    client: Client, command: Command, host: Host, two_vms: list[Domain]
) -> None:
    await stop(command)
    high = low_vm("high", priority="fixed", minimum={}, nominal={"cpu_cores": 2.0, "memory_mib": 900.0})
    assert (await command("POST", "/v1/vms", {"request_id": "c3", "vm": high})).state == "done"
    response = await client.post("/v1/vms/low-1/start", json={"request_id": "start"})
    problem = await response.json()
    assert (response.status, problem["field"]) == (409, "name")
    assert "needs more than what is free" in problem["detail"]
    assert host.vms["low-1"].intent.phase is Phase.STOPPED
    await command("DELETE", "/v1/vms/high?request_id=d")
    assert (await start(command, request_id="later")).state == "done"


async def test_a_start_that_fails_leaves_the_vm_off_and_free(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command)
    free = host.free()
    world.failures["start"] = "no such disk"
    failed = await start(command)
    assert (failed.state, failed.sentence) == ("failed", "no such disk")
    assert host.vms["low-1"].intent.phase is Phase.STOPPED
    assert host.free() == free
    world.failures.clear()
    assert (await start(command, request_id="second")).state == "done"


async def test_a_start_that_fails_and_cannot_be_undone_is_undone_later(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command)
    domain, vm = world.domains["ebb-host-a.low-1"], host.vms["low-1"]
    world.failures |= {"resume": "busy", "shut_down": "busy"}
    assert (await start(command)).state == "failed"
    assert (domain.state, vm.intent.phase) == ("paused", Phase.STOPPING)
    assert not vm.allocation().charge.is_zero()
    world.failures.clear()
    await until(lambda: vm.intent.phase is Phase.STOPPED)
    assert domain.state == "stopped"
    assert (await start(command, request_id="second")).state == "done"


async def test_a_vm_that_an_operator_lets_run_before_its_failed_start_could_be_undone_goes_on(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command)
    domain, vm = world.domains["ebb-host-a.low-1"], host.vms["low-1"]
    world.failures |= {"resume": "busy", "shut_down": "busy"}
    assert (await start(command)).state == "failed"
    assert (domain.state, vm.intent.phase) == ("paused", Phase.STOPPING)
    vm.drift_repair.pace.not_before = math.inf
    domain.state = "running"
    world.failures.clear()
    world.calls.clear()
    await until(lambda: vm.running and vm.intent.phase is Phase.SETTLED)
    methods = [method for method, _ in world.calls]
    assert (domain.state, methods.count("shut_down")) == ("running", 0)
    last = [method for method in methods if method in ("suspend", "set_quota", "resume")][-3:]
    assert last == ["suspend", "set_quota", "resume"], "held to its size before it goes on"


async def test_a_start_that_was_answered_as_failed_is_not_carried_out_by_the_next_agent(
    command: Command, agent: Agent, world: World, tmp_path: Path, two_vms: list[Domain]
) -> None:
    await stop(command)
    domain = world.domains["ebb-host-a.low-1"]
    world.failures |= dict.fromkeys(("resume", "shut_down", "survey"), "busy")
    assert (await start(command)).state == "failed"
    await agent.close()
    # As if the hypervisor had not stored that it is to go down.
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.STARTING).model_dump_json()
    world.failures.clear()
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vm("low-1").intent.phase is Phase.STOPPED)
        assert domain.state == "stopped"
        ended = await successor.requests.operations.get("start", 10)
        assert ended is not None
        assert ended.state == "failed"


async def test_a_start_is_resumed_when_the_hypervisor_says_again_what_runs(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await stop(command)
    await start(command)
    await agent.close()
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.STARTING).model_dump_json()
    domain.state = "paused"
    async with succeeding(world, tmp_path) as successor:
        world.failures["domains"] = "no connection"
        world.calls.clear()
        await until(lambda: ("domains", "") in world.calls)
        world.failures.clear()
        await until(lambda: successor.host.vm("low-1").intent.phase is Phase.SETTLED)
        assert domain.state == "running"


async def test_a_start_is_charged_with_what_came_up_or_given_up(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await reclaim(command, memory_mib=600.0)
    await stop(command)
    domain, vm = world.domains["ebb-host-a.low-1"], host.vms["low-1"]
    size = vm.intent.committed
    domain.boot_mib = 9000.0
    failed = await start(command)
    assert failed.state == "failed"
    assert "more than its size" in failed.sentence
    assert (domain.state, vm.intent.phase, vm.intent.committed) == ("stopped", Phase.STOPPED, size)
    domain.boot_mib = 1024.0
    started = await start(command, request_id="again")
    assert "1024 MiB" in started.sentence, started.sentence


async def test_a_stop_that_fails_leaves_the_vm_looked_after_and_can_be_repeated(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    for number, method in enumerate(("shut_down", "prepare_start")):
        world.failures[method] = "busy"
        failed = await stop(command, request_id=f"stop-{number}")
        assert (failed.state, failed.sentence) == ("failed", "busy")
        assert host.vms["low-1"].intent.phase is Phase.SETTLED
        assert not host.vms["low-1"].allocation().charge.is_zero()
        world.failures.clear()
    assert (await stop(command, request_id="last")).state == "done"
    assert host.vms["low-1"].intent.phase is Phase.STOPPED


async def test_a_stopped_vm_can_be_deleted_and_takes_part_in_nothing(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command)
    taken = await reclaim(command, cpu_cores=1.0)
    assert [outcome.name for outcome in taken.vms] == ["low-2"]
    assert (await command("DELETE", "/v1/vms/low-1?request_id=d")).state == "done"
    assert list(world.domains) == ["ebb-host-a.low-2"]


async def test_a_stopped_vm_that_somebody_starts_is_admitted_only_where_there_is_room(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command)
    high = low_vm("high", priority="fixed", minimum={}, nominal={"cpu_cores": 2.0, "memory_mib": 900.0})
    await command("POST", "/v1/vms", {"request_id": "c3", "vm": high})
    domain = world.domains["ebb-host-a.low-1"]
    domain.state = "running"
    await until(lambda: domain.state == "paused")
    assert host.vms["low-1"].intent.phase is Phase.STOPPED
    await command("DELETE", "/v1/vms/high?request_id=d")
    await until(lambda: domain.state == "running" and host.vms["low-1"].intent.phase is Phase.SETTLED)
    assert host.vms["low-1"].allocation().current.memory_mib == 1024.0


async def test_a_stopped_vm_that_somebody_starts_while_no_agent_runs_is_admitted_by_the_next(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await stop(command)
    await agent.close()
    (domain,) = world.domains.values()
    domain.state = "running"
    world.calls.clear()
    later = make_agent(world, tmp_path)
    await later.start()
    try:
        vm = later.host.vms["low-1"]
        await until(lambda: vm.running and vm.intent.phase is Phase.SETTLED)
        assert ("suspend", vm.domain) in world.calls
        assert not vm.allocation().charge.is_zero()
    finally:
        await later.close()


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.STARTING])
@pytest.mark.parametrize("state", ["running", "paused", "stopped"])
async def test_what_a_killed_agent_had_begun_is_ended_by_the_next(
    command: Command, agent: Agent, world: World, tmp_path: Path, unnoted: None, phase: Phase, state: str
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await stop(command)
    if phase is Phase.STARTING:
        await start(command)
    await agent.close()
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=phase).model_dump_json()
    domain.state = state
    async with succeeding(world, tmp_path) as successor:
        settled = Phase.STOPPED if phase is Phase.STOPPING else Phase.SETTLED
        await until(lambda: successor.host.vm("low-1").intent.phase is settled)
        assert domain.state == ("stopped" if phase is Phase.STOPPING else "running")
        ended = await successor.requests.operations.get("stop" if phase is Phase.STOPPING else "start", 10)
        assert ended is not None
        assert ended.state == "done"


@pytest.mark.parametrize("kind", ["start", "create"])
async def test_a_vm_that_a_killed_agent_let_run_is_held_to_its_size_again_before_it_goes_on(
    command: Command, agent: Agent, world: World, tmp_path: Path, kind: str
) -> None:
    await command("POST", "/v1/vms", {"request_id": "create", "vm": low_vm("low-1")})
    await reclaim(command, cpu_cores=1.5)
    if kind == "start":
        await stop(command)
        await start(command)
    await agent.close()
    (domain,) = world.domains.values()
    intent = Intent.model_validate_json(domain.intent)
    cause = intent.cause
    assert cause is not None
    phase = Phase.STARTING if kind == "start" else Phase.CREATING
    changed = cause.model_copy(update={"kind": kind, "request_id": kind})
    domain.intent = intent.changed(phase=phase, cause=changed).model_dump_json()
    # Somebody started it past the agent that was to start it.
    domain.state, domain.quota, domain.resumed_with_quota = "running", None, None
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vm("low-1").intent.phase is Phase.SETTLED)
        assert domain.state == "running"
        assert domain.resumed_with_quota == pytest.approx(0.5)
        ended = await successor.requests.operations.get(kind, 10)
        assert ended is not None
        assert ended.state == "done", ended.sentence


async def _killed_after_it_let_run(command: Command, agent: Agent, world: World) -> Domain:
    """A new VM runs, and no intent says so yet."""
    await command("POST", "/v1/vms", {"request_id": "create", "vm": low_vm("low-1")})
    await agent.close()
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.CREATING).model_dump_json()
    return domain


@pytest.mark.parametrize("call", ["suspend", "set_quota", "resume"])
async def test_a_new_vm_that_a_killed_agent_let_run_is_kept_and_held_to_its_size_as_soon_as_that_can_be_done(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    domain = await _killed_after_it_let_run(command, agent, world)
    monkeypatch.setattr(resuming, "ASK_AGAIN_S", 0.05)
    world.failures[call] = "an earlier libvirt call has not returned"
    async with succeeding(world, tmp_path) as successor:
        tried = len(world.calls)
        await until(lambda: [method for method, _ in world.calls[tried:]].count(call) > 2)
        assert list(world.domains.values()) == [domain]
        world.failures.clear()
        ended = await successor.requests.operations.get("create", 10)
        assert ended is not None
        assert ended.state == "done", ended.sentence
        assert domain.state == "running"
        last = [method for method, _ in world.calls if method in ("suspend", "set_quota", "resume")][-2:]
        assert last == ["set_quota", "resume"]
        assert successor.host.vm("low-1").intent.phase is Phase.SETTLED


async def test_a_new_vm_that_cannot_be_held_to_its_size_yet_can_be_deleted(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _killed_after_it_let_run(command, agent, world)
    monkeypatch.setattr(resuming, "ASK_AGAIN_S", 0.05)
    world.failures["suspend"] = "an earlier libvirt call has not returned"
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: "suspend" in [method for method, _ in world.calls])
        deleting = await successor.creations.delete("low-1", Deletion(request_id="d"), "delete")
        gone = await successor.requests.operations.get(deleting.request_id, 10)
        assert gone is not None
        assert gone.state == "done", gone.sentence
        ended = await successor.requests.operations.get("create", 10)
        assert ended is not None
        assert (ended.state, ended.sentence) == ("failed", "low-1 was removed meanwhile")
        assert not world.domains


async def test_a_new_vm_that_a_killed_agent_let_run_and_that_powers_off_before_it_can_be_held_keeps_its_disk(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = await _killed_after_it_let_run(command, agent, world)
    monkeypatch.setattr(resuming, "ASK_AGAIN_S", 0.05)
    world.failures["suspend"] = "an earlier libvirt call has not returned"
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: "suspend" in [method for method, _ in world.calls])
        domain.state = "stopped"
        ended = await successor.requests.operations.get("create", 10)
        assert ended is not None
        assert (ended.state, ended.sentence) == ("done", "low-1 was started, and is off by now")
        assert list(world.domains.values()) == [domain]
        assert successor.host.vm("low-1").intent.phase is Phase.STOPPED


async def test_a_start_that_a_killed_agent_had_begun_is_given_up_where_more_runs_than_fits(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await stop(command)
    await start(command)
    await agent.close()
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.STARTING).model_dump_json()
    domain.state, domain.boot_mib, domain.balloon_mib = "running", 9000.0, 9000.0
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("start", 10)
        assert ended is not None
        assert (ended.state, "more than its size" in ended.sentence) == ("failed", True)
        assert domain.state == "stopped"
        assert successor.host.vm("low-1").intent.phase is Phase.STOPPED


async def test_the_templates_of_a_host_are_listed_and_reported(client: Client) -> None:
    response = await client.get("/v1/templates")
    assert [row["name"] for row in (await response.json())["templates"]] == ["lab"]
    found = (await report(client)).templates
    assert found is not None
    assert [template.name for template in found] == ["lab"]
