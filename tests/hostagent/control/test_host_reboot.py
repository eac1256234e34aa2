"""VMs that libvirt starts by itself with their host, before an agent is there to see it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.deflation.resources import ZERO
from hostagent.control.host_reboot import see_reboot, was_off
from hostagent.errors import JournalError
from hostagent.libvirt.hypervisor import DomainState
from hostagent.operations.agent import Agent
from hostagent.state.host_boot import HostBoot
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command, low_vm, make_agent
from tests.hostagent.libvirt.test_disks import INTENT
from tests.hostagent.world import World

LOW = "ebb-host-a.low-1"


@contextlib.asynccontextmanager
async def booted(world: World, state_dir: Path, boot: HostBoot) -> AsyncIterator[Agent]:
    """The next agent of a host that has booted since the last one was there."""
    agent = make_agent(world, state_dir)
    agent.host.boot = boot
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


@pytest.fixture
async def made(command: Command, agent: Agent) -> Agent:
    """The agent of a host that has booted for the first time, with a VM."""
    agent.host.journal.set_boot("first")
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})).state == "done"
    return agent


def told(host: Host) -> list[tuple[float, float]]:
    return [(change.cores_before, change.cores_after) for change in host.journal.changes]


async def test_a_vm_that_was_started_with_its_host_works_from_then_on_and_was_off_before(
    made: Agent, world: World, tmp_path: Path
) -> None:
    await made.close()
    boot = HostBoot("second", time.time())
    for _ in range(2):  # once for each boot, however often the agent is started
        async with booted(world, tmp_path, boot) as successor:
            assert successor.host.vms["low-1"].status().started_at == boot.at
            assert Intent.model_validate_json(world.domains[LOW].intent).started_at == boot.at
            assert told(successor.host) == [(0, 3), (3, 0), (0, 3)]
            assert successor.host.journal.boot_id == "second"
            assert world.domains[LOW].state == "running"


@pytest.mark.parametrize("known", ["", "second"])
async def test_a_vm_that_has_run_through_the_agents_absence_works_since_it_was_started(
    made: Agent, world: World, tmp_path: Path, known: str
) -> None:
    """The same boot, or the first start of an agent that notes it."""
    before = made.host.vms["low-1"].intent.started_at
    made.host.journal.set_boot(known)
    await made.close()
    async with booted(world, tmp_path, HostBoot("second", time.time())) as successor:
        assert successor.host.vms["low-1"].intent.started_at == before
        assert told(successor.host) == [(0, 3)]
        assert successor.host.journal.boot_id == "second"


async def test_one_that_goes_on_where_it_was_saved_was_off_and_has_its_work_still(made: Agent) -> None:
    host, before = made.host, made.host.vms["low-1"].intent.started_at
    host.boot = HostBoot("second", time.time())
    await see_reboot(host, [replace(found, goes_on=True) for found in await host.hypervisor.domains()])
    assert host.vms["low-1"].intent.started_at == before
    assert told(host) == [(0, 3), (3, 0), (0, 3)]


async def test_what_could_not_be_told_of_a_reboot_is_told_by_the_next_agent_and_once(
    made: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, add = made.host, made.host.journal.add
    host.boot = HostBoot("second", time.time())

    def full(machine: str, name: str, at: float, before: float, after: float, cause: str) -> None:
        if after:
            raise JournalError("no space left on device")
        add(machine, name, at, before, after, cause)

    with monkeypatch.context() as disk:
        disk.setattr(host.journal, "add", full)
        await see_reboot(host, await host.hypervisor.domains())
    assert host.journal.boot_id == "first"
    for _ in range(2):
        await see_reboot(host, await host.hypervisor.domains())
        assert told(host) == [(0, 3), (3, 0), (0, 3)]
        host.journal.set_boot("first")  # as if that had not been written


async def test_an_end_that_was_told_as_the_host_went_down_is_not_told_again(made: Agent) -> None:
    """That it is off could not be written to its domain any more."""
    host = made.host
    host.boot = HostBoot("second", time.time())
    await host.record_change("low-1", host.vms["low-1"].allocation().current, ZERO, "stopped from outside")
    await see_reboot(host, await host.hypervisor.domains())
    assert told(host) == [(0, 3), (3, 0), (0, 3)]


@pytest.mark.parametrize(
    ("state", "phase", "started_at", "off"),
    [
        ("running", Phase.SETTLED, 50.0, True),
        ("running", Phase.SETTLED, None, True),
        ("running", Phase.DEFLATING, 50.0, True),
        ("running", Phase.SETTLED, 150.0, False),
        ("stopped", Phase.SETTLED, 50.0, False),
        ("paused", Phase.SETTLED, 50.0, False),
        ("running", Phase.STOPPED, 50.0, False),
        ("running", Phase.STOPPING, 50.0, False),
    ],
)
def test_which_domains_were_off(state: str, phase: Phase, started_at: float | None, off: bool) -> None:
    """One that is off, or was by a command, is told of where that is found, and one that was started later runs on."""
    found = DomainState(LOW, state, INTENT.changed(phase=phase, started_at=started_at))
    assert was_off(found, HostBoot("second", 100.0)) is off


def test_the_boot_that_this_runs_in_is_known() -> None:
    boot = HostBoot.read()
    assert boot == HostBoot.read()
    assert boot.id
    assert 0 < boot.at < time.time()
