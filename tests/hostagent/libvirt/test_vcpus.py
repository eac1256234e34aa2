"""ACPI unplug of vCPUs: one per step, by the count that is read again; and in a whole deflation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import libvirt
import pytest

from ebbtide.deflation.cascade.mechanisms import Mechanism
from hostagent.libvirt import settling, vcpus
from hostagent.libvirt.libvirt_readings import summary_of
from hostagent.libvirt.vcpus import bring
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command, low_vm
from tests.hostagent.libvirt.one_domain import OneDomain
from tests.hostagent.world import World
from tests.waiting import until


class FakeDomain:
    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []
        #: What it does when it is asked for a count; by default what it is told.
        self.does: Callable[[int], None] = self.follow

    def follow(self, count: int) -> None:
        self.count = count

    def setVcpusFlags(self, count: int, flags: int) -> None:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        self.asked.append(count)
        self.does(count)

    def vcpusFlags(self, flags: int) -> int:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        return self.count


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "LOOK_S", 0.01)
    monkeypatch.setattr(vcpus, "LOOK_S", 0.01)
    monkeypatch.setattr(vcpus, "STEP_LIMIT_S", 0.05)


async def moved(domain: FakeDomain, count: int, limit_s: float = 5.0) -> str:
    connection: Any = OneDomain(domain)
    return await bring(connection, "vm", count, limit_s)


@pytest.mark.parametrize(("has", "goal", "asked"), [(4, 1, [3, 2, 1]), (1, 3, [2, 3]), (2, 2, [])])
async def test_vcpus_move_one_per_step(has: int, goal: int, asked: list[int]) -> None:
    domain = FakeDomain(has)
    assert await moved(domain, goal) == ""
    assert (domain.count, domain.asked) == (goal, asked)


async def test_a_step_that_does_not_come_about_ends_it_with_what_was_reached() -> None:
    domain = FakeDomain(4)

    def stubborn(count: int) -> None:
        if count < 3:
            raise libvirt.libvirtError("vcpu unplug request timed out")
        domain.count = count

    domain.does = stubborn
    assert await moved(domain, 1) == "the domain has 3 vCPUs instead of 2: vcpu unplug request timed out"
    assert domain.asked == [3, 2]


async def test_a_time_out_of_libvirts_does_not_count_where_the_vcpu_has_gone() -> None:
    domain = FakeDomain(3)

    def late(count: int) -> None:
        domain.count = count
        raise libvirt.libvirtError("vcpu unplug request timed out")

    domain.does = late
    assert await moved(domain, 1) == ""


async def test_without_time_no_step_is_begun() -> None:
    domain = FakeDomain(3)
    assert await moved(domain, 1, 0.0) == "the domain has 3 vCPUs instead of 1: no time is left"
    assert domain.asked == []


@pytest.mark.parametrize(("passed", "left"), [(True, 1), (False, 3)])
async def test_off_lined_vcpus_are_unplugged_only_where_a_guest_has_passed_it_and_come_back(
    world: World, host: Host, command: Command, passed: bool, left: int
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await until(lambda: host.vms["low-1"].link.connected)
    domain = world.domains["ebb-host-a.low-1"]
    domain.findings = [[Mechanism.CPU_UNPLUG.value, passed, "as the test says", ""]]
    for generation, (cores, vcpus_left) in enumerate(((1.0, left), (3.0, 3)), 2):
        body = {
            "target": {"cpu_cores": cores, "memory_mib": 1024.0},
            "request_id": f"r{generation}",
            "generation": generation,
        }
        done = await command("PUT", "/v1/vms/low-1/target", body)
        assert done.state.value == "done", done.sentence
        assert (domain.vcpus, len(domain.online)) == (vcpus_left, round(cores))
        assert host.vms["low-1"].intent.committed.cpu_cores == pytest.approx(cores)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ({"vcpu.0.time": 1, "vcpu.2.time": 2, "vcpu.10.time": 3, "vcpu.2.wait": 9, "vcpu.maximum": 12}, (1, 2, 3)),
        ({"vcpu.0.time": 1, "vcpu.1.time": 2, "vcpu.2.time": 3}, (1, 2, 3)),
        ({}, (0, 0, 0)),
    ],
)
def test_times_of_vcpus_are_those_of_the_ones_that_are_there_in_their_order(
    times: dict[str, int], seconds: tuple[int, ...]
) -> None:
    stats = {"vcpu.current": 3} | {name: value * 10**9 for name, value in times.items()}
    assert summary_of(SimpleNamespace(UUIDString=lambda: "1-2"), stats).vcpu_seconds == seconds
