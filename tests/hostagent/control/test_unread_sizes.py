"""Resizes whose end could not be read, or left a size that may not be: what is charged then."""

from __future__ import annotations

import pytest

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.resources import ResourceVector
from hostagent.state.intents import Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command
from tests.hostagent.doing import reclaim
from tests.hostagent.world import Domain, World
from tests.waiting import until


@pytest.mark.slow
async def test_a_growth_whose_end_nobody_could_read_stays_charged_in_full_until_somebody_can(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reclaim(command, memory_mib=600.0)
    vm = host.vms["low-1"]
    deflated_mib = vm.intent.committed.memory_mib
    set_plugged = host.hypervisor.sizes.set_plugged

    async def last_words(domain: str, plugged_mib: float, limit_s: float) -> str:
        reason = await set_plugged(domain, plugged_mib, limit_s)
        world.failures["read"] = "the monitor does not answer"
        return reason

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", last_words)
    body = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 3.0, "memory_mib": 1024.0}, "deadline_s": 20.0}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert operation.state == "partial", operation.sentence
    assert "could not be read at the end" in operation.sentence
    assert operation.shortfall.memory_mib == pytest.approx(1024.0 - deflated_mib)
    assert two_vms[0].bound_mib == 1024.0
    assert (vm.intent.phase, vm.allocation().current.memory_mib) == (Phase.REINFLATING, 1024.0)
    monkeypatch.undo()
    world.failures.clear()
    await until(lambda: vm.intent.phase is Phase.SETTLED)
    assert vm.intent.committed.memory_mib == 1024.0


async def test_a_growth_of_which_nothing_could_be_read_is_no_success(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, memory_mib=600.0)
    world.failures["read"] = "the monitor does not answer"
    body = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 3.0, "memory_mib": 1024.0}, "deadline_s": 20.0}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert (operation.state, operation.shortfall.memory_mib > 200) == ("partial", True)
    assert host.vms["low-1"].allocation().current.memory_mib == 1024.0


async def test_a_resize_that_broke_off_below_the_minimum_is_charged_with_it_and_given_it(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    """CPUs went off line under a quota meant for more of them, and the quota could not be set in the end."""
    vm = host.vms["low-1"]
    two_vms[0].online, two_vms[0].quota = {0}, 0.3
    left = Bound(1, 0.3, 512.0, 512.0)
    target = ResourceVector(1.0, 1024.0)
    outcome = Outcome(left, left, target, (), ResourceVector(0.7), 1.0, "nothing could be set")
    async with vm.lock:
        await vm.resizer.commit(outcome, left.size, left.size, "t")
    assert vm.intent.committed.cpu_cores == 0.5
    assert two_vms[0].quota == 0.5


async def test_cpus_of_which_nobody_could_tell_whether_they_are_on_line_are_not_charged_anew(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    """A reading without a guest takes all plugged CPUs for being on line: no growth that anybody asked for."""
    body = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 1.0, "memory_mib": 1024.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    vm = host.vms["low-1"]
    before = Bound(1, None, 1024.0, 1024.0)
    after = Bound(4, None, 900.0, 900.0)
    outcome = Outcome(before, after, ResourceVector(1.0, 800.0), (), ResourceVector(), 1.0, "time was up")
    async with vm.lock:
        await vm.resizer.commit(outcome, ResourceVector(1.0, 1024.0), ResourceVector(4.0, 900.0), "t")
    assert (vm.intent.committed.cpu_cores, vm.intent.committed.memory_mib) == (1.0, 900.0)
    assert two_vms[0].quota == 0.25
