"""A size that a target has set holds whatever else is done to its VM, until a command lets it grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.deflation.sharing import pressure_response
from ebbtide.messages.commands import ReinflateCommand
from ebbtide.messages.common import Vector
from hostagent.control import reconciler
from hostagent.control.start_admission import reinflation_targets
from hostagent.operations import mode_commands
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm import executor
from hostagent.vm.host import Host
from tests.hostagent.agent_process import OVERHEAD_MIB
from tests.hostagent.conftest import Command, has_failed, low_vm, succeeding
from tests.hostagent.control.test_pressure import calm, press
from tests.hostagent.world import Domain, World
from tests.waiting import until


async def hold(command: Command, memory_mib: float, generation: int = 2) -> None:
    target = {"cpu_cores": 3.0, "memory_mib": memory_mib}
    body = {"request_id": f"t-{generation}", "generation": generation, "target": target, "deadline_s": 20.0}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert operation.state == "done", operation.sentence


async def take(command: Command, memory_mib: float) -> None:
    """Reclaim that from low-1."""
    need = {"memory_mib": memory_mib}
    body = {"request_id": f"take-{memory_mib:g}", "need": need, "deadline_s": 20.0, "exclude": ["low-2"]}
    operation = await command("POST", "/v1/reclaims", body)
    assert operation.state == "done", operation.sentence


async def give(command: Command, request_id: str, **body: object) -> None:
    operation = await command("POST", "/v1/reinflations", {"request_id": request_id, "deadline_s": 20.0, **body})
    assert operation.state == "done", operation.sentence


def now(host: Host) -> tuple[float, bool]:
    status = host.vms["low-1"].status()
    return status.current.memory_mib, status.held


async def test_a_reclaim_ends_no_hold_and_what_it_took_comes_back_up_to_the_size_that_was_set(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await hold(command, 700.0)
    await take(command, 100.0)
    assert now(host) == (600.0, True)
    await give(command, "to-all")
    assert now(host) == (700.0, True)
    await give(command, "to-all-again")
    assert now(host) == (700.0, True)


@pytest.mark.parametrize("by", ["its name", "a target", "a minimum above its size"])
async def test_a_command_that_lets_the_vm_grow_ends_the_hold(
    command: Command, two_vms: list[Domain], host: Host, by: str
) -> None:
    await hold(command, 700.0)
    await take(command, 100.0)
    if by == "its name":
        await give(command, "by-name", vms=["low-1"])
    elif by == "a target":
        await hold(command, 1024.0, host.vms["low-1"].intent.generation + 1)
    else:
        spec = low_vm("low-1", minimum={"cpu_cores": 0.5, "memory_mib": 850.0})
        operation = await command("PUT", "/v1/vms/low-1/spec", {"request_id": "spec", "spec": spec})
        assert operation.state == "done", operation.sentence
        assert now(host) == (850.0, False)
        await give(command, "to-all-first")
    assert now(host) == (1024.0, False)
    await take(command, 150.0)
    assert now(host) == (874.0, False)
    await give(command, "to-all")
    assert now(host) == (1024.0, False)


async def test_a_vm_that_gives_for_a_neighbour_under_pressure_stays_held(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure_response, "LASTING_S", 0.0)
    monkeypatch.setattr(reconciler, "PRESSURE_PAUSE_S", 0.1)
    await hold(command, 700.0)
    need = {"cpu_cores": 1.0, "memory_mib": 500.0}
    await command("POST", "/v1/reclaims", {"request_id": "r", "need": need, "deadline_s": 20.0, "exclude": ["low-1"]})
    size = {"cpu_cores": 1.0, "memory_mib": host.free().memory_mib - OVERHEAD_MIB}
    fixed = low_vm("fixed", priority="fixed", nominal=size, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "f", "vm": fixed})).state == "done"
    press(two_vms[1])
    await until(lambda: two_vms[0].bound_mib < 600 and host.vms["low-1"].intent.phase is Phase.SETTLED)
    assert now(host) == (two_vms[0].bound_mib, True)


@pytest.mark.slow
async def test_what_a_held_vm_got_under_pressure_it_keeps_and_once_taken_that_does_not_come_back_by_itself(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await hold(command, 700.0)
    press(two_vms[0])
    await until(lambda: now(host)[0] == 1024.0)
    calm(two_vms[0])
    await until(lambda: not host.vms["low-1"].pressure.sentence)
    await take(command, 150.0)
    await give(command, "to-all")
    assert now(host) == (874.0, True)


async def test_room_that_a_held_vm_wants_under_pressure_is_not_shared_among_the_others(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler.Reconciler, "_start_response", lambda self, vm: None)
    await hold(command, 700.0)
    await take(command, 100.0)
    body = {"request_id": "r", "need": {"memory_mib": 200.0}, "deadline_s": 20.0, "exclude": ["low-1"]}
    assert (await command("POST", "/v1/reclaims", body)).state == "done"
    low = host.vms["low-1"]
    press(two_vms[0])
    await until(lambda: low.pressure.wants.memory_mib == 424.0)
    shared = ReinflateCommand(request_id="s", room=Vector(cpu_cores=1.0, memory_mib=500.0))
    targets = reinflation_targets(host, list(host.vms.values()), shared)
    assert {name: size.memory_mib for name, size in targets.items()} == {"low-1": 700.0, "low-2": 824.0 + 76.0}


async def test_a_hold_outlives_the_agent_and_stands_in_the_intent_only_where_there_is_one(
    agent: Agent, command: Command, host: Host, two_vms: list[Domain], world: World, tmp_path: Path
) -> None:
    await hold(command, 700.0)
    await take(command, 100.0)
    await agent.close()
    held = [('"held"' in domain.intent, Intent.model_validate_json(domain.intent).held_size) for domain in two_vms]
    assert held == [(True, Vector(cpu_cores=3.0, memory_mib=700.0)), (False, None)], "an older agent reads the other"
    async with succeeding(world, tmp_path) as successor:
        assert now(successor.host) == (600.0, True)


async def test_a_host_that_drains_gives_back_up_to_the_size_that_was_set_and_one_that_is_off_all(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode_commands, "KEEP_S", 0.2)
    await hold(command, 700.0)
    await take(command, 100.0)
    await command("PUT", "/v1/mode", {"request_id": "draining", "mode": "draining"})
    await until(lambda: now(host) == (700.0, True) and host.vms["low-1"].intent.phase is Phase.SETTLED)
    await command("PUT", "/v1/mode", {"request_id": "off", "mode": "off"})
    assert now(host) == (1024.0, False)
    await command("PUT", "/v1/mode", {"request_id": "active", "mode": "active"})
    await take(command, 150.0)
    assert now(host) == (874.0, False)


async def test_a_vm_that_is_started_again_is_held_no_more(command: Command, two_vms: list[Domain], host: Host) -> None:
    await hold(command, 700.0)
    await take(command, 100.0)
    await command("POST", "/v1/vms/low-1/stop", {"request_id": "stop", "limit_s": 2.0})
    operation = await command("POST", "/v1/vms/low-1/start", {"request_id": "start"})
    assert operation.state == "done", operation.sentence
    assert not host.vms["low-1"].status().held


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "RETRY_S", 0.0)


async def fail(command: Command, world: World) -> None:
    """Ask for a target that fails, and leave the hypervisor as it is."""
    world.failures["read"] = "Failed to connect socket: Connection refused"
    target = {"cpu_cores": 3.0, "memory_mib": 400.0}
    body = {"request_id": "t", "generation": 9, "target": target, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "partial"


@pytest.mark.parametrize("off", [False, True], ids=["it runs on", "it goes off meanwhile"])
@pytest.mark.parametrize("before", [None, 800.0], ids=["none before", "one before"])
async def test_a_target_that_failed_leaves_the_hold_as_it_was(
    command: Command,
    two_vms: list[Domain],
    host: Host,
    world: World,
    no_pause: None,
    before: float | None,
    off: bool,
) -> None:
    if before is not None:
        await hold(command, before)
    await take(command, 300.0)
    taken_from, vm = before or 1024.0, host.vms["low-1"]
    assert now(host) == (taken_from - 300.0, before is not None)
    await fail(command, world)
    if off:
        two_vms[0].state = "stopped"
        await until(lambda: vm.intent.phase is Phase.STOPPED)
        two_vms[0].state = "running"
    world.failures.clear()
    # Of one that boots no memory is taken.
    await until(lambda: vm.intent.phase is Phase.SETTLED and vm.running and vm.link.connected)
    assert now(host) == (taken_from - 300.0, before is not None)
    await take(command, 20.0)
    await give(command, "to-all")
    assert now(host) == (taken_from, before is not None)


async def test_a_target_that_failed_sets_no_hold_after_a_restart_of_the_agent_either(
    agent: Agent,
    command: Command,
    host: Host,
    two_vms: list[Domain],
    world: World,
    tmp_path: Path,
    no_pause: None,
) -> None:
    await take(command, 300.0)
    await fail(command, world)
    world.failures.clear()
    await until(lambda: host.vms["low-1"].intent.phase is Phase.SETTLED)
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "t")
        assert now(successor.host) == (724.0, False)
