"""A VM boots with its boot memory; the rest is plugged when its agent has said hello, or after a while without."""

from __future__ import annotations

import pytest

from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.reconcile import RepairPace
from hostagent.control import reconciler
from hostagent.state.intents import Phase
from hostagent.vm import late_memory
from hostagent.vm.host import Host
from hostagent.vm.late_memory import AFTER_HELLO_S, WITHOUT_AGENT_S, LateMemory
from tests.hostagent.conftest import Command, low_vm
from tests.hostagent.doing import reclaim
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.operations.test_modes import set_mode
from tests.hostagent.world import Domain, World
from tests.waiting import until


def test_it_is_due_a_little_after_the_hello() -> None:
    late = LateMemory()
    assert not late.due(1e9, pressed=True), "nothing was held back"
    late.started(100.0, 512.0)
    assert late.missing_mib(1024.0) == 512.0
    late.heard(110.0)
    assert not late.due(110.0 + AFTER_HELLO_S - 0.1, pressed=False)
    assert late.due(110.0 + AFTER_HELLO_S, pressed=False)
    late.plugged()
    assert (late.due(1e9, pressed=True), late.missing_mib(1024.0)) == (False, 0.0)


def test_without_an_agent_it_is_due_after_a_stated_time_and_under_pressure_at_once() -> None:
    late = LateMemory()
    late.started(100.0, 512.0)
    assert not late.due(100.0 + WITHOUT_AGENT_S - 0.1, pressed=False)
    assert late.due(100.0 + WITHOUT_AGENT_S, pressed=False)
    assert late.due(101.0, pressed=True)


def test_a_second_hello_puts_nothing_off() -> None:
    late = LateMemory()
    late.started(0.0, 512.0)
    late.heard(5.0)
    late.heard(6.9)
    assert late.due(5.0 + AFTER_HELLO_S, pressed=False)


@pytest.fixture
def as_real_domains_do(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest has what it is asked to take only once it has booted."""
    world.plugs_at_once = False


async def made(command: Command, world: World, **fields: object) -> Domain:
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1", **fields)})
    assert operation.state == "done", operation.sentence
    (domain,) = world.domains.values()
    return domain


@pytest.mark.usefixtures("as_real_domains_do")
async def test_while_its_host_is_paused_a_vm_stays_without_the_rest(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_memory, "AFTER_HELLO_S", 0.1)
    world.guests_answer = False
    domain = await made(command, world)
    assert (await set_mode(command, "paused")).state == "done"
    world.guests_answer = True
    vm = host.vms["low-1"]
    await until(vm.plug_is_due)
    looks = vm.drift_repair.looks
    await until(lambda: vm.drift_repair.looks > looks + 1)
    assert domain.bound_mib + domain.requested_mib == 512
    await set_mode(command, "active")
    await until(lambda: domain.bound_mib == 1024)


@pytest.mark.usefixtures("as_real_domains_do")
async def test_a_vm_boots_small_is_charged_in_full_and_has_all_once_its_agent_has_said_hello(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_memory, "AFTER_HELLO_S", 0.3)
    world.guests_answer = False
    domain = await made(command, world)
    assert domain.bound_mib == domain.requested_mib + 512 == 512
    assert host.vms["low-1"].allocation().current.memory_mib == 1024
    (sentence,) = [d.sentence for d in host.history.decisions("low-1") if "boots with" in d.sentence]
    assert sentence == "it boots with 512 MiB; 512 more are plugged once its agent has said hello"
    world.guests_answer = True
    await until(lambda: domain.bound_mib == 1024)
    assert host.vms["low-1"].drift_repair.drift_total == 0, "that is no drift"


@pytest.mark.usefixtures("as_real_domains_do")
async def test_a_vm_that_boots_gives_what_is_not_plugged_yet_at_once(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_memory, "AFTER_HELLO_S", 0.3)
    world.guests_answer = False
    domain = await made(command, world)
    soon = host.report().vms[0].not_yet
    assert soon is not None
    assert soon.memory_mib == 512 - 320, "only of what it boots with"
    assert host.report().deflatable.memory_mib == 512
    operation = await reclaim(command, memory_mib=300.0)
    assert operation.state == "done", operation.sentence
    (outcome,) = operation.vms
    assert (outcome.before.memory_mib, outcome.after.memory_mib) == (1024, 724)
    guest = [
        row.verified for row in outcome.ledger if row.layer.value != "application" and row.resource == "memory_mib"
    ]
    assert sum(guest) == 300
    assert "300 MiB of its memory had not been plugged yet" in outcome.sentence
    assert host.vms["low-1"].allocation().current.memory_mib == 724
    assert domain.bound_mib == 512
    world.guests_answer = True
    await until(lambda: domain.bound_mib == 724)


@pytest.mark.usefixtures("as_real_domains_do")
async def test_one_whose_agent_never_comes_has_its_memory_after_a_while(
    command: Command, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_memory, "WITHOUT_AGENT_S", 0.5)
    world.guests_answer = False
    domain = await made(command, world)
    await until(lambda: domain.bound_mib == 1024)


@pytest.mark.usefixtures("as_real_domains_do")
async def test_one_whose_agent_never_opens_its_channel_has_its_memory_by_virtio_mem(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_memory, "WITHOUT_AGENT_S", 1.0)
    world.guests_answer = False
    domain = await made(command, world)
    domain.findings = [[Mechanism.VIRTIO_MEM, False, "no guest agent has opened the channel", "", 2.0, True]]
    await until(lambda: domain.bound_mib == 1024)
    await until(lambda: not host.vms["low-1"].boots_small)


@pytest.mark.usefixtures("as_real_domains_do")
async def test_what_a_guest_does_not_take_is_given_again_and_the_history_says_so(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_memory, "WITHOUT_AGENT_S", 0.5)
    monkeypatch.setattr(late_memory, "RepairPace", lambda: RepairPace(pause_s=0.3))
    monkeypatch.setattr(RepairPace, "held", lambda pace: None)
    set_plugged, refusals = FakeHypervisor.set_plugged, ["its kernel is still booting"] * 2

    async def refusing(sizes: FakeHypervisor, domain: str, plugged_mib: float, limit_s: float) -> str:
        return refusals.pop() if refusals else await set_plugged(sizes, domain, plugged_mib, limit_s)

    monkeypatch.setattr(FakeHypervisor, "set_plugged", refusing)
    world.guests_answer = False
    domain = await made(command, world)
    await until(lambda: domain.bound_mib == 1024 and not host.vms["low-1"].boots_small)
    first, *_, last = [d.sentence for d in host.history.decisions("low-1") if d.kind == "reinflate"]
    assert first.startswith("it lacks memory that it was started without, and is given that again: gave back nothing")
    assert "its kernel is still booting" in first
    assert last.startswith("it has the memory that it was started without: gave back 512 MiB of 512 MiB")


@pytest.mark.usefixtures("as_real_domains_do")
async def test_one_that_moves_here_before_it_has_all_its_memory_is_given_the_rest(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.guests_answer = False
    domain = await made(command, world)
    monkeypatch.setattr(late_memory, "WITHOUT_AGENT_S", 0.5)
    vm = host.vms["low-1"]
    # As the host that it moves to knows it.
    vm.resizer.late.plugged()
    async with vm.lock:
        await vm.record.store(phase=Phase.ARRIVING)
    vm.request_check()
    await until(lambda: domain.bound_mib == 1024)


@pytest.mark.usefixtures("as_real_domains_do")
async def test_a_fixed_vm_has_all_its_memory_from_the_start(command: Command, world: World) -> None:
    domain = await made(command, world, priority="fixed", minimum={})
    assert domain.requested_mib == 512


@pytest.mark.usefixtures("as_real_domains_do")
async def test_a_new_agent_plugs_what_its_predecessor_held_back(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_memory, "AFTER_HELLO_S", 0.1)
    monkeypatch.setattr(reconciler, "CHECK_S", 60.0)
    world.guests_answer = False
    domain = await made(command, world)
    vm = host.vms["low-1"]
    # As found by a new agent, which does not know what the VM was started with.
    vm.resizer.late.started(0.0)
    assert vm.resizer.late.held_mib is None
    world.guests_answer = True
    await until(lambda: domain.bound_mib == 1024)
