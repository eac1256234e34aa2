"""VMs that were restarted while no agent looked: what they hold is charged until their guests speak."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.messages.commands import CreateCommand, ModeCommand
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from hostagent.operations import mode_commands
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.conftest import Command, low_vm, succeeding
from tests.hostagent.operations.test_modes import set_mode
from tests.hostagent.world import Domain, World
from tests.waiting import until

LOW = "ebb-host-a.low-1"


async def restarted(command: Command, agent: Agent, world: World, *, sold: bool = False) -> Domain:
    """low-1 of one core and 400 MiB, which comes up with its 512 MiB of boot memory, its guest silent.

    :param sold: it is sold as no more than that, instead of deflated to it.
    """
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})).state == "done"
    await until(lambda: agent.host.vms["low-1"].link.connected)
    size = {"cpu_cores": 1.0, "memory_mib": 400.0}
    if sold:
        body = {"request_id": "s", "spec": low_vm("low-1", nominal=size), "deadline_s": 20.0}
        assert (await command("PUT", "/v1/vms/low-1/spec", body)).state == "done"
    else:
        smaller = {"request_id": "t", "generation": 2, "target": size}
        assert (await command("PUT", "/v1/vms/low-1/target", smaller)).state == "done"
    await agent.close()
    world.guests_answer = False
    await world._do_shut_down(LOW, 0.0)
    await world._do_start(LOW)
    await world._do_resume(LOW)
    return world.domains[LOW]


async def test_what_it_holds_is_charged_until_its_guest_has_given_it_back(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    domain = await restarted(command, agent, world)
    assert domain.bound_mib == 512.0
    async with succeeding(world, tmp_path) as successor:
        host, vm = successor.host, successor.host.vms["low-1"]
        await until(lambda: host.free().memory_mib == CAPACITY.memory_mib - 512.0 - OVERHEAD_MIB)
        await until(lambda: domain.cap is not None)
        assert host.free().cpu_cores == CAPACITY.cpu_cores - 1.0, "what limits hold is not charged beyond them"
        told = [said.sentence for said in host.history.decisions("low-1")]
        assert any("holds 3 cores and 512 MiB, more than is committed" in sentence for sentence in told)
        assert vm.intent.committed.memory_mib == 400.0
        world.guests_answer = True
        await until(lambda: domain.bound_mib == 400.0, limit_s=30)
        await until(lambda: host.free().memory_mib == CAPACITY.memory_mib - 400.0 - OVERHEAD_MIB)


async def test_off_it_keeps_what_it_holds_and_comes_up_whole(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode_commands, "KEEP_S", 0.2)
    domain = await restarted(command, agent, world)
    # All of its memory, whatever its definition says.
    domain.plugged_mib = 512.0
    async with succeeding(world, tmp_path) as successor:
        host, vm = successor.host, successor.host.vms["low-1"]
        await until(lambda: vm.allocation().current.memory_mib == 1024.0)
        operation = await successor.mode_commands.set(ModeCommand(request_id="off", mode="off"))
        ended = await successor.requests.operations.get(operation.request_id, 20.0)
        assert ended is not None
        assert ended.state is OperationState.DONE, ended.sentence
        assert not host.modes.unfinished
        assert Intent.model_validate_json(domain.intent).committed.memory_mib == 1024.0
        assert domain.starts_with == (3.0, 1024.0)


@pytest.mark.slow
async def test_what_its_guest_keeps_beyond_what_it_is_sold_stays_charged(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    domain = await restarted(command, agent, world, sold=True)
    assert domain.bound_mib == 512.0
    async with succeeding(world, tmp_path) as successor:
        host, vm = successor.host, successor.host.vms["low-1"]
        await until(lambda: host.free().memory_mib == CAPACITY.memory_mib - 512.0 - OVERHEAD_MIB)
        domain.used_mib = 420.0
        world.guests_answer = True
        await until(lambda: 420.0 < domain.bound_mib < 512.0, limit_s=30)
        looks = vm.drift_repair.looks
        await until(lambda: vm.drift_repair.looks >= looks + 3, limit_s=30)
        assert host.free().memory_mib == pytest.approx(CAPACITY.memory_mib - domain.bound_mib - OVERHEAD_MIB, abs=2)
        domain.used_mib = 80.0
        await until(lambda: domain.bound_mib == 400.0, limit_s=60)
        await until(lambda: host.free().memory_mib == CAPACITY.memory_mib - 400.0 - OVERHEAD_MIB)


async def test_what_it_is_charged_with_does_not_count_against_it_when_it_goes_on(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    """On a host that is full another program pauses it and lets it go on, as for a snapshot."""
    domain = await restarted(command, agent, world)
    async with succeeding(world, tmp_path) as successor:
        host, vm = successor.host, successor.host.vms["low-1"]
        await until(lambda: host.free().memory_mib == CAPACITY.memory_mib - 512.0 - OVERHEAD_MIB)
        rest = {"cpu_cores": 1.0, "memory_mib": host.free().memory_mib - OVERHEAD_MIB - 10.0}
        high = VMSpec.model_validate(low_vm("high", priority="fixed", minimum={}, nominal=rest))
        asked = await successor.creations.create(CreateCommand(request_id="h", vm=high))
        made = await successor.requests.operations.get(asked.request_id, 20)
        assert made is not None
        assert made.state == "done", made.sentence
        domain.state = "paused"
        await until(lambda: vm.paused)
        domain.state = "running"
        await until(lambda: vm.running and domain.state == "running")
        assert host.free().memory_mib == 10.0


async def test_on_a_paused_host_what_it_holds_is_charged_though_its_guest_speaks(
    command: Command, agent: Agent, world: World
) -> None:
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})).state == "done"
    host, vm, domain = agent.host, agent.host.vms["low-1"], world.domains[LOW]
    await until(lambda: vm.link.connected)
    smaller = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 3.0, "memory_mib": 512.0}}
    assert (await command("PUT", "/v1/vms/low-1/target", smaller)).state == "done"
    await set_mode(command, "paused")
    domain.plugged_mib = 512.0
    await until(lambda: host.free().memory_mib == CAPACITY.memory_mib - 1024.0 - OVERHEAD_MIB)
    await set_mode(command, "active")
    await until(lambda: host.free().memory_mib == CAPACITY.memory_mib - 512.0 - OVERHEAD_MIB, limit_s=30)
    assert domain.bound_mib == 512.0
