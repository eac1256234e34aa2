"""What befalls one of two steps that are under way at once does not harm the other, or the VM."""

from __future__ import annotations

import pytest

from hostagent.errors import HypervisorError
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command
from tests.hostagent.world import Domain, World

BODY = {"request_id": "t", "generation": 7, "target": {"cpu_cores": 1.0, "memory_mib": 450.0}, "deadline_s": 30.0}
#: What the kernel of the model keeps.
RESERVE_MIB = 48


async def test_an_application_that_crashes_while_its_freed_part_is_unplugged_costs_nothing_more(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, set_plugged = two_vms[0], host.hypervisor.sizes.set_plugged
    crashed_at: list[int] = []
    domain.application = "slow"

    async def crashes(name: str, plugged_mib: float, limit_s: float) -> str:
        if domain.half_released and not crashed_at:
            crashed_at.append(len(world.guest_calls))
            domain.application, domain.cache_mib = "crashed", 0.0
        return await set_plugged(name, plugged_mib, limit_s)

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", crashes)
    operation = await command("PUT", "/v1/vms/low-1/target", BODY)
    assert operation.state == "done", operation.sentence
    assert crashed_at, "a part was unplugged while the application was to go on"
    assert any(method == "application.status" for method, _ in world.guest_calls[crashed_at[0] :])
    assert (domain.bound_mib, len(domain.online)) == (450.0, 1)
    assert world.least_available_mib >= RESERVE_MIB
    assert host.vms["low-1"].status().current.memory_mib == 450.0


async def test_a_call_that_fails_in_one_of_two_steps_leaves_the_other_one_its_work(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    called_off: list[str] = []
    call_off = host.hypervisor.sizes.call_off

    async def fails(name: str, plugged_mib: float, limit_s: float) -> str:
        raise HypervisorError("libvirt is busy")

    async def noted(name: str) -> None:
        called_off.append(name)
        await call_off(name)

    monkeypatch.setattr(host.hypervisor.sizes, "set_plugged", fails)
    monkeypatch.setattr(host.hypervisor.sizes, "call_off", noted)
    operation = await command("PUT", "/v1/vms/low-1/target", BODY)
    domain = two_vms[0]
    assert len(domain.online) == 1, "CPUs went off line all the same"
    assert set(called_off) == {"ebb-host-a.low-1"}, "what was asked of the guest's memory is asked no longer"
    assert domain.plugged_mib == 512.0
    size = host.vms["low-1"].status().current
    assert (size.cpu_cores, size.memory_mib) == (1.0, domain.bound_mib)
    assert "libvirt is busy" in operation.sentence
