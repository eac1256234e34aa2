"""Off and release of VMs that do not run: their memory is saved as it is, or we have paused them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostagent.errors import HostAgentError
from hostagent.operations import mode_commands
from hostagent.service import give_back
from hostagent.state.intents import Phase
from hostagent.vm.host import Host
from tests.hostagent.agent_process import OVERHEAD_MIB
from tests.hostagent.conftest import Client, Command, low_vm, make_agent
from tests.hostagent.operations.test_adoption import adopted
from tests.hostagent.operations.test_modes import set_mode, sizes, status
from tests.hostagent.operations.test_suspend import LOW, suspend
from tests.hostagent.world import Domain, World
from tests.waiting import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_commands, "KEEP_S", 0.2)
    monkeypatch.setattr("hostagent.vm.notice.POLLED_S", 0.1)


async def suspended(command: Command) -> None:
    """low-1, deflated to one core, its memory saved."""
    smaller = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 1.0}}
    assert (await command("PUT", "/v1/vms/low-1/target", smaller)).state == "done"
    assert "was saved" in (await suspend(command)).sentence


async def test_off_a_suspended_vm_is_still_to_be_undone_until_it_is_started(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await suspended(command)
    domain, saved_at = world.domains[LOW], host.vms["low-1"].intent.committed
    operation = await set_mode(command, "off")
    assert operation.state == "partial"
    (left,) = (await status(client)).unfinished
    assert left.startswith("low-1 lacks")
    assert left.endswith("its memory is saved as it is: start it first, or remove what is saved")
    assert host.vms["low-1"].intent.committed == saved_at, "that is what it comes up with"
    # By another program, since off takes no start.
    await world._do_start(LOW)
    assert (domain.quota, len(domain.online)) != (None, 3), "what was saved has its limits"
    await world._do_resume(LOW)
    await until(lambda: sizes(domain) == (3, None, 1024.0))
    await until(lambda: not host.modes.unfinished)


async def test_off_a_suspended_vm_comes_up_whole_once_what_was_saved_is_removed(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await suspended(command)
    domain = world.domains[LOW]
    assert (await set_mode(command, "off")).state == "partial"
    domain.saved_mib = None
    await until(lambda: not host.modes.unfinished)
    assert domain.starts_with == (3.0, 1024.0)
    assert host.vms["low-1"].intent.committed.cpu_cores == 3.0


@pytest.mark.slow
async def test_what_a_suspended_vm_lacks_is_not_given_back_where_no_agent_serves(
    client: Client, command: Command, world: World, two_vms: list[Domain], tmp_path: Path
) -> None:
    await suspended(command)
    await client.close()
    with pytest.raises(HostAgentError, match=r"there is something left: low-1 lacks .* its memory is saved"):
        await give_back(make_agent(world, tmp_path), 3.0)


async def test_an_adopted_domain_is_not_released_while_its_memory_is_saved(
    client: Client, command: Command, host: Host, world: World
) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    body = {"request_id": "p", "limit_s": 30.0, "reason": "shortfall", "suspend": True}
    assert "was saved" in (await command("POST", "/v1/vms/web/stop", body)).sentence
    refused = await client.post("/v1/vms/web/release", json={"request_id": "release"})
    assert refused.status == 409
    assert "the memory of web is saved as it is: start it first, or remove what is saved" in await refused.text()
    assert domain.intent, "it is still looked after"
    domain.saved_mib = None
    released = await command("POST", "/v1/vms/web/release", {"request_id": "again"})
    assert released.state == "done", released.sentence
    assert (domain.quota, domain.intent) == (None, "")


async def paused_by_us(command: Command, host: Host, domain: Domain, stopped: bool) -> None:
    """low-1, which another program has started where there was no room for it."""
    if stopped:
        assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "stop", "limit_s": 2.0})).state == "done"
        high = low_vm("high", priority="fixed", minimum={}, nominal={"cpu_cores": 2.0, "memory_mib": 1200.0})
        assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": high})).state == "done"
    else:
        domain.state = "stopped"
        await until(lambda: host.vms["low-1"].intent.phase is Phase.STOPPED)
        domain.balloon_mib = 9000.0
    domain.state = "running"
    await until(lambda: domain.state == "paused" and not host.vms["low-1"].lock.locked())


@pytest.mark.parametrize("stopped", [False, True], ids=["admitting", "stopped on command"])
async def test_off_lets_a_vm_run_that_we_have_paused(
    command: Command, host: Host, two_vms: list[Domain], stopped: bool
) -> None:
    domain, vm = two_vms[0], host.vms["low-1"]
    await paused_by_us(command, host, domain, stopped)
    operation = await set_mode(command, "off")
    assert operation.state == "done", operation.sentence
    assert (domain.state, vm.intent.phase, vm.running) == ("running", Phase.SETTLED, True)
    holds_mib = 1024 if stopped else 9512
    assert vm.allocation().charge.memory_mib == holds_mib + OVERHEAD_MIB, "whether that fits, or was sold, or not"
    assert sizes(domain)[:2] == (3, None)


@pytest.mark.slow
async def test_paused_a_vm_that_we_have_paused_is_left_so_and_runs_on_where_an_operator_lets_it(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    async def looked() -> None:
        calls = len(world.calls)
        await until(lambda: len([1 for call, _ in world.calls[calls:] if call == "survey"]) > 5)

    domain, vm = two_vms[0], host.vms["low-1"]
    await paused_by_us(command, host, domain, False)
    await set_mode(command, "paused")
    domain.balloon_mib = 512.0
    await looked()
    assert domain.state == "paused", "there is room for it by now"
    domain.balloon_mib, domain.state = 9000.0, "running"
    await until(lambda: vm.intent.phase is Phase.SETTLED)
    await looked()
    assert (domain.state, vm.running) == ("running", True)
    assert vm.allocation().charge.memory_mib >= 9000.0, "whether that fits or not"


async def test_off_a_vm_that_we_have_paused_and_cannot_let_run_is_still_to_be_undone(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await paused_by_us(command, host, two_vms[0], True)
    world.failures["resume"] = "the monitor does not answer"
    assert (await set_mode(command, "off")).state == "partial"
    (left,) = (await status(client)).unfinished
    assert left == "low-1 is paused by us: there was no room when another program started it"
    world.failures.clear()
    await until(lambda: two_vms[0].state == "running")
    await until(lambda: not host.modes.unfinished)


async def test_a_vm_that_we_have_paused_runs_where_what_was_taken_is_given_back_and_no_agent_serves(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain], tmp_path: Path
) -> None:
    await paused_by_us(command, host, two_vms[0], False)
    await client.close()
    await give_back(make_agent(world, tmp_path))
    assert two_vms[0].state == "running"
