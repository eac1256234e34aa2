"""A guest that boots, reboots or has lost its agent: its memory is not taken yet; the report says when it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.cascade.readiness import PRIOR_S, BootTimes
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.vms import NotYetDeflatable, VMStatus
from hostagent.control import start_admission
from hostagent.errors import JournalError
from hostagent.state import journal
from hostagent.state.journal import Journal
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM
from tests.hostagent.conftest import Command, low_vm
from tests.hostagent.doing import reclaim
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain, World
from tests.waiting import until


def status(host: Host, name: str = "low-1") -> VMStatus:
    return next(vm for vm in host.report().vms if vm.name == name)


def soon(host: Host, name: str = "low-1") -> NotYetDeflatable:
    found = status(host, name).not_yet
    assert found is not None
    return found


async def test_a_guest_that_boots_is_not_yet_deflatable_and_its_cpu_is(
    command: Command, host: Host, world: World
) -> None:
    world.guests_answer = False
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    found = soon(host)
    assert (found.memory_mib, found.why) == (1024 - 320, "booting")
    assert PRIOR_S - 20 < found.in_s <= PRIOR_S
    assert host.report().deflatable.vector() == ResourceVector(2.5, 0.0)
    operation = await reclaim(command, cpu_cores=1.0, memory_mib=200.0)
    assert operation.shortfall.vector() == ResourceVector(0.0, 200.0)
    (outcome,) = operation.vms
    assert outcome.target.memory_mib == 1024, "what it cannot give is not asked of it"


async def test_the_manager_hears_of_a_hello_at_once_and_the_boot_is_learned(
    command: Command, host: Host, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    host.changed.clear()
    await until(lambda: host.vms["low-1"].link.connected)
    await until(lambda: "low-1" in host.journal.boots.seen)
    assert host.changed.is_set()
    assert status(host).not_yet is None
    assert host.report().deflatable.memory_mib == 1024 - 320
    (seconds,) = host.journal.boots.seen["low-1"]
    assert 0 <= seconds < 20
    # An agent that is started again knows of it, once it is written.
    await until(lambda: Journal(tmp_path).boots.seen == host.journal.boots.seen)


async def test_a_guest_that_reboots_is_not_yet_deflatable_from_that_moment_on(
    two_vms: list[Domain], host: Host, world: World
) -> None:
    assert isinstance(host.hypervisor, FakeHypervisor)
    (tell,) = host.hypervisor.listeners
    world.guests_answer = False
    tell("ebb-host-a.low-1", True)
    assert soon(host).why == "rebooting"
    assert status(host, "low-2").not_yet is None
    world.guests_answer = True
    await until(lambda: status(host).not_yet is None)


async def test_a_guest_that_boots_anew_breaks_no_word_by_running_all_its_cpus(
    two_vms: list[Domain], command: Command, host: Host, world: World
) -> None:
    assert isinstance(host.hypervisor, FakeHypervisor)
    (tell,) = host.hypervisor.listeners
    await reclaim(command, cpu_cores=3.0)
    domain = two_vms[0]
    assert domain.online == {0, 1}
    world.guests_answer, domain.online = False, {0, 1, 2}
    tell("ebb-host-a.low-1", True)
    ran_s = domain.vcpu_seconds[2]
    await until(lambda: domain.vcpu_seconds[2] > ran_s + 2.0)
    assert status(host).broken_offline_total == 0
    world.guests_answer = True
    await until(lambda: host.vms["low-1"].link.online == frozenset({0, 1, 2}))
    domain.online, domain.liars = {0, 1}, {2}
    host.vms["low-1"].request_check()
    await until(lambda: status(host).broken_offline_total == 1)


async def test_a_guest_that_booted_anew_unseen_breaks_no_word_either(
    two_vms: list[Domain], command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reclaim(command, cpu_cores=3.0)
    domain, link = two_vms[0], host.vms["low-1"].link
    world.guests_answer, domain.online = False, {0, 1, 2}
    ran_s = domain.vcpu_seconds[2]
    await until(lambda: domain.vcpu_seconds[2] > ran_s + 2.0)
    # As after kexec: libvirt does not tell of it. Its CPUs are off line again by its first word.
    monkeypatch.setattr(World, "BOOT_ID", "c")
    world.guests_answer, domain.online, said = True, {0, 1}, link.online
    host.vms["low-1"].request_check()
    await until(lambda: link.boot_id == "c" and link.online is not said)
    ran_s = domain.vcpu_seconds[0]
    await until(lambda: domain.vcpu_seconds[0] > ran_s + 1.0)
    assert status(host).broken_offline_total == 0


async def test_an_agent_that_was_lost_is_expected_back(command: Command, two_vms: list[Domain], host: Host) -> None:
    for vm in host.vms.values():
        vm.link.hang_up()
    assert soon(host).why == "without its agent at the moment"
    await until(lambda: status(host).not_yet is None)


async def test_without_a_channel_no_agent_is_expected(two_vms: list[Domain], host: Host) -> None:
    link = host.vms["low-1"].link
    link.hang_up()
    link.has_channel = False
    assert status(host).not_yet is None


async def test_a_vm_that_is_off_keeps_its_channel_and_boots_when_somebody_else_starts_it(
    two_vms: list[Domain], host: Host, world: World
) -> None:
    vm = host.vms["low-1"]
    vm.link.hang_up()
    two_vms[0].state = "stopped"
    await until(lambda: not vm.running and vm.link.why == "its domain is off")
    assert (vm.link.has_channel, status(host).guest_kind) == (True, GuestKind.AGENT)
    world.guests_answer = False
    two_vms[0].state = "running"
    await until(lambda: vm.running)
    assert soon(host).why == "booting"
    assert vm._readiness._seen, "from its beginning, so that it is learned"


async def test_one_that_somebody_else_started_boots_from_when_there_is_room_for_it(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm, charged, asked = host.vms["low-1"], start_admission.charge_memory, 0

    async def no_room_at_first(host: Host, vm: ManagedVM) -> tuple[bool, dict[str, float]]:
        nonlocal asked
        asked += 1
        return (False, {}) if asked == 1 else await charged(host, vm)

    monkeypatch.setattr(start_admission, "charge_memory", no_room_at_first)
    vm.link.hang_up()
    two_vms[0].state = "stopped"
    await until(lambda: not vm.running and vm.link.why == "its domain is off")
    world.guests_answer = False
    two_vms[0].state = "running"
    await until(lambda: vm.running)
    assert asked > 1
    assert soon(host).why == "booting"


async def test_one_that_is_off_is_no_guest_that_boots(two_vms: list[Domain], command: Command, host: Host) -> None:
    body = {"request_id": "s", "limit_s": 5.0}
    assert (await command("POST", "/v1/vms/low-1/stop", body)).state == "done"
    assert status(host).not_yet is None


def test_a_harvest_vm_above_its_nominal_size_can_be_kept_there() -> None:
    grown = Allocation(
        "spare",
        Priority.HARVEST,
        ResourceVector(1.0, 500.0),
        ResourceVector(0.5, 400.0),
        ResourceVector(2.0, 700.0),
        ResourceVector(8.0, 800.0),
    )
    assert grown.keeping(grown.current).deflatable.is_zero()


def test_a_boot_that_cannot_be_written_is_not_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Journal(tmp_path)
    made.add_boot("low-1", 7.0)

    def full(path: Path, text: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(journal, "_replace", full)
    with pytest.raises(JournalError):
        made.add_boot("low-1", 9.0)
    assert made.boots.seen == {"low-1": [7.0]}
    assert Journal(tmp_path).boots.expected_s("low-1") == 7.0


def test_the_journal_of_an_earlier_version_knows_of_no_boots(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"epoch": 3, "sequence": 0}')
    assert Journal(tmp_path).boots.seen == BootTimes().seen
