"""States of a host that are no VM's fault: capacity below what is in use, a hypervisor that does not answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from ebbtide.deflation.cascade.contention import WINDOW_S
from ebbtide.deflation.cascade.pressure import UNSEEN_S
from ebbtide.deflation.cascade.reconcile import FIRST_PAUSE_S, RepairPace, Resize, SetShares
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from hostagent.clock import now
from hostagent.control import overcommitment, reconciler
from hostagent.control.overcommitment import Overcommitment
from hostagent.errors import HypervisorError
from hostagent.libvirt.hypervisor import DomainSummary
from hostagent.state.intents import Phase
from hostagent.vm import drift_repair, executor, guest_pressure
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.control.test_pressure import press
from tests.hostagent.doing import report
from tests.hostagent.world import Domain, World
from tests.waiting import until


@pytest.fixture(autouse=True)
def brisk_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "RETRY_S", 0.05)
    monkeypatch.setattr(overcommitment, "EVERY_S", 3600.0)


def told(host: Host, kind: DecisionKind) -> list[str]:
    return [decision.sentence for decision in host.history.decisions() if decision.kind == kind]


async def test_a_host_whose_capacity_shrank_is_overcommitted_and_deflated_towards_it(
    two_vms: list[Domain], host: Host, client: Client
) -> None:
    host.slice = replace(host.slice, capacity=ResourceVector(cpu_cores=5.0, memory_mib=2388.0))
    said = await report(client)
    assert said.overcommitted.vector() == ResourceVector(cpu_cores=1.0, memory_mib=300.0)
    await Overcommitment(host).look()
    assert told(host, DecisionKind.OVERCOMMITTED) == ["overcommitted by 1 cores, 300 MiB"]
    assert [vm.intent.committed.cpu_cores for vm in host.vms.values()] == [2.5, 2.5]
    assert [domain.bound_mib for domain in two_vms] == [874.0, 874.0]
    assert (await report(client)).overcommitted.vector().is_zero()


async def test_an_overcommitted_host_does_not_wait_for_a_busy_vm_that_is_fixed(
    command: Command, two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overcommitment, "WAIT_S", 600.0)
    host.slice = replace(host.slice, capacity=host.slice.capacity + ResourceVector(memory_mib=1000.0, cpu_cores=1.0))
    spec = low_vm("high", priority="fixed", nominal={"cpu_cores": 0.5, "memory_mib": 300.0}, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "c-high", "vm": spec})).state == "done"
    host.slice = replace(host.slice, capacity=ResourceVector(cpu_cores=5.5, memory_mib=4000.0))
    async with host.vms["high"].lock, asyncio.timeout(60.0):
        await Overcommitment(host).look()
    assert [vm.intent.committed.cpu_cores for vm in host.vms.values()] == [2.5, 2.5, 0.5]


async def test_minimums_stand_and_what_they_leave_too_little_is_told_and_kept_to_no_vm_is_stopped(
    two_vms: list[Domain], host: Host
) -> None:
    host.slice = replace(host.slice, capacity=ResourceVector(cpu_cores=0.8, memory_mib=3600.0))
    looks = Overcommitment(host)
    for _ in range(2):
        await looks.look()
    assert [vm.intent.committed.cpu_cores for vm in host.vms.values()] == [0.5, 0.5]
    assert told(host, DecisionKind.OVERCOMMITTED)[-1] == "overcommitted by 0.2 cores"
    assert {domain.state for domain in two_vms} == {"running"}


@pytest.mark.parametrize("harvest", [False, True], ids=["a deflatable VM", "a harvest VM"])
async def test_one_that_has_nothing_to_spare_is_asked_last_and_the_others_bring_the_host_to_its_capacity(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch, harvest: bool
) -> None:
    monkeypatch.setattr(RepairPace, "due", lambda self, now: True)
    ceiling = low_vm("low-1")["nominal"] if harvest else None
    priority = "harvest" if harvest else "deflatable"
    for vm in (low_vm("low-1", priority=priority, ceiling=ceiling), low_vm("low-2")):
        assert (await command("POST", "/v1/vms", {"request_id": vm["name"], "vm": vm})).state == "done"
    await until(lambda: all(vm.link.connected for vm in host.vms.values()))
    stuck, able = world.domains.values()
    stuck.used_mib = stuck.bound_mib - 60.0  # no pressure, and next to nothing above its reserve
    charged = host.slice.capacity.less(host.free())
    host.slice = replace(host.slice, capacity=charged.less(ResourceVector(memory_mib=600)))
    looks = Overcommitment(host)
    for _ in range(3):
        await looks.look()
    assert host.overcommitted().is_zero()
    assert (stuck.bound_mib > 1000, able.bound_mib < 450) == (True, True)
    # Within its capacity, it counts like the others again.
    await looks.look()
    stuck.used_mib, able_before = 80.0, able.bound_mib
    host.slice = replace(host.slice, capacity=host.slice.capacity.less(ResourceVector(memory_mib=100)))
    await looks.look()
    assert host.overcommitted().is_zero()
    assert able.bound_mib > able_before - 100


async def test_an_overcommitted_host_is_deflated_at_once_where_more_is_to_be_taken_or_more_can_be(
    two_vms: list[Domain], host: Host
) -> None:
    looks, all_of_it = Overcommitment(host), host.slice.capacity.less(host.free())
    for vm in host.vms.values():
        vm.resizer.mark_terminating("it is being removed")
    host.slice = replace(host.slice, capacity=all_of_it.less(ResourceVector(memory_mib=100)))
    for _ in range(3):
        await looks.look()
    assert [domain.bound_mib for domain in two_vms] == [1024, 1024]
    assert looks._pace.pause_s == 2 * FIRST_PAUSE_S, "by the pace it was tried once"
    host.vms["low-1"].resizer.terminating = ""
    await looks.look()
    assert [domain.bound_mib for domain in two_vms] == [924, 1024]
    host.slice = replace(host.slice, capacity=all_of_it.less(ResourceVector(memory_mib=800)))
    await looks.look()
    assert [domain.bound_mib for domain in two_vms] == [320, 1024]
    host.slice = replace(host.slice, capacity=all_of_it.less(ResourceVector(memory_mib=850)))
    host.vms["low-2"].resizer.terminating = ""
    await looks.look()
    assert host.overcommitted().is_zero()


@pytest.mark.parametrize("grows", [False, True], ids=["a guest that the try pressed calms", "cores can be given, too"])
async def test_what_cannot_bring_an_overcommitted_host_nearer_to_its_capacity_is_no_reason_to_try_sooner(
    two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    tries: list[object] = []
    vms = list(host.vms.values())

    async def resize(host: Host, members: object, *_: object, **__: object) -> list[object]:
        tries.append(members)
        for vm in vms:
            vm.resizer.mark_terminating("as good as under pressure")
        return []

    monkeypatch.setattr(Host, "resize", resize)
    looks = Overcommitment(host)
    host.slice = replace(host.slice, capacity=host.slice.capacity.less(host.free() + ResourceVector(memory_mib=100)))
    if grows:
        cores = iter(range(1, 9))
        monkeypatch.setattr(looks, "_deflatable", lambda: ResourceVector(float(next(cores)), 704.0))
    for _ in range(3):
        await looks.look()
        for vm in vms:
            vm.resizer.terminating = ""
    assert (len(tries), looks._pace.pause_s) == (1, 2 * FIRST_PAUSE_S)


async def test_a_hypervisor_that_does_not_answer_is_a_state_of_the_host_within_one_survey(
    command: Command, two_vms: list[Domain], host: Host, world: World, client: Client
) -> None:
    before = len([1 for method, _ in world.calls if method == "survey"])
    world.failures["survey"] = "Failed to connect socket: Connection refused"
    await until(lambda: bool(host.unavailable))
    assert len([1 for method, _ in world.calls if method == "survey"]) - before <= 4
    said = await report(client)
    assert said.unavailable == "Failed to connect socket: Connection refused"
    assert [vm.guest_connected for vm in said.vms] == [False, False]
    world.failures.clear()
    await until(lambda: not host.unavailable)
    assert all(vm.guest_connected for vm in (await report(client)).vms)
    assert told(host, DecisionKind.HYPERVISOR) == [
        "the hypervisor does not answer: Failed to connect socket: Connection refused",
        "the hypervisor answers again",
    ]


async def test_what_was_last_heard_of_the_vms_is_not_told_on_as_of_now_while_the_hypervisor_does_not_answer(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = host.vms["low-1"]
    press(two_vms[0])
    await until(lambda: bool(vm.pressure.sentence))
    # Its guest falls silent with the hypervisor.
    await vm.stop()
    world.failures["survey"] = "Failed to connect socket: Connection refused"
    await until(lambda: bool(host.unavailable))
    assert vm.status().pressure is not None
    monkeypatch.setattr(guest_pressure, "_now", lambda: now() + UNSEEN_S + 1.0)
    await until(lambda: vm.status().pressure is None)
    assert told(host, DecisionKind.PRESSURE)[-1].startswith("the pressure is over: no fresh reading")


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_memory_limits_are_watched_while_the_hypervisor_does_not_answer(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    if hangs:

        async def hanging() -> dict[str, DomainSummary]:
            await asyncio.Event().wait()
            return {}

        monkeypatch.setattr(host.hypervisor, "survey", hanging)
        await asyncio.sleep(2 * reconciler.SURVEY_S)
    else:
        world.failures["survey"] = "Failed to connect socket: Connection refused"
        await until(lambda: bool(host.unavailable))
    looks = iter(range(100))

    async def check_limits() -> dict[str, str]:
        return {"ebb-host-a.low-1": "the host has no swap"} if next(looks) else {}

    monkeypatch.setattr(host.hypervisor, "check_limits", check_limits)
    await until(lambda: bool(told(host, DecisionKind.LIMIT)))
    assert told(host, DecisionKind.LIMIT) == ["the memory limit is lifted: the host has no swap"]
    assert hangs or host.unavailable


async def test_one_survey_that_fails_is_tried_again_and_is_no_state(
    two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = iter(["the connection was closed"])

    async def attempt() -> str:
        for why in tries:
            raise HypervisorError(why)
        return "the domains"

    assert await executor.twice(attempt) == "the domains"
    assert host.unavailable == ""


async def test_a_quota_that_another_program_lifts_again_and_again_is_told_of_with_its_rate(
    two_vms: list[Domain], host: Host, command: Command
) -> None:
    await command("POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 3.0}, "deadline_s": 20.0})
    vm = host.vms["low-1"]
    for _ in range(3):
        async with vm.lock:
            two_vms[0].quota = 0.2
            vm.drift_repair.pace.held()
            await vm.drift_repair.check()
    status = vm.status()
    assert status.drift_total >= 3
    assert status.contention is not None
    assert status.contention.startswith("another program undoes what is put right: 3 times in")
    assert any(status.contention[:40] in decision.sentence for decision in host.history.decisions("low-1"))


async def test_a_hypervisor_that_is_away_is_logged_once_until_it_answers_again(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.02)
    with capture_logs() as logs:
        for _ in range(2):
            world.calls.clear()
            world.failures["survey"] = "Failed to connect socket: Connection refused"
            await until(lambda: sum(name == "survey" for name, _ in world.calls) >= 8)
            world.failures.clear()
            await until(lambda: not host.unavailable)
    said = [log["event"] for log in logs if "refused" in log.get("why", "") and log["log_level"] != "debug"]
    assert said == ["hypervisor", "the VMs could not be surveyed"] * 2, "the decision, and the line"


async def test_contention_is_over_for_a_vm_that_goes_off_and_where_a_paused_host_puts_nothing_right(
    two_vms: list[Domain], host: Host, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    await command("POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 3.0}, "deadline_s": 20.0})
    vm = host.vms["low-1"]
    async with vm.lock:
        for _ in range(3):
            two_vms[0].quota = 0.2
            vm.drift_repair.pace.held()
            await vm.drift_repair.check()
        assert vm.status().contention is not None
        assert vm.status().throttled_share is not None
        vm.running = False
        assert (vm.status().contention, vm.status().throttled_share) == (None, None)
        vm.running = True
        assert vm.status().contention is not None
        later = now() + WINDOW_S
        monkeypatch.setattr(drift_repair, "_now", lambda: later)
        two_vms[0].quota = 0.2
        await vm.drift_repair.check("the host is paused")
        assert vm.status().contention is None


async def test_what_is_changed_after_a_resize_that_reached_its_size_is_put_right_at_once(
    two_vms: list[Domain], host: Host, command: Command
) -> None:
    vm = host.vms["low-1"]
    need = {"need": {"cpu_cores": 3.0}}
    # The pause after a repair would double each time.
    for number, (kind, body) in enumerate((("reclaims", need), ("reinflations", {}), ("reclaims", need))):
        await command("POST", f"/v1/{kind}", {"request_id": f"r{number}", "deadline_s": 20.0, **body})
        async with vm.lock:
            two_vms[0].quota = 0.2
            assert await vm.drift_repair.check()


async def test_a_repair_that_falls_short_is_nobody_elses_doing(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(domain: str, mib: float) -> str:
        return ""

    vm = host.vms["low-1"]
    async with vm.lock:
        two_vms[0].balloon_mib -= 100.0
        for method in ("_do_set_balloon", "_do_set_plugged"):
            monkeypatch.setattr(world, method, stuck)
        for _ in range(4):
            vm.drift_repair.pace.held()
            assert await vm.drift_repair.check()
        assert (vm.drift_repair.drift_total, vm.status().contention) == (4, None)
        # What another program does meanwhile is that program's doing.
        for _ in range(3):
            two_vms[0].shares = 7
            vm.drift_repair.pace.held()
            await vm.drift_repair.check()
    assert vm.status().contention is not None


async def test_limits_do_not_wait_behind_cpus_that_a_guest_keeps_off_line_and_these_are_counted_once(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm, domain = host.vms["low-1"], two_vms[0]
    repair = vm.drift_repair
    await until(lambda: vm.link.connected)

    def keeps(d: Domain, params: dict[str, Any]) -> dict[str, Any]:
        return {"online": [0], "failed": [{"cpu": 1, "reason": "Operation not permitted"}]}

    async with vm.lock:
        counted = repair.drift_total
        monkeypatch.setattr(world, "_cpus_set", keeps)
        domain.online = {0}
        repair.pace.held()
        assert [type(one) for one in await repair.check()] == [Resize]
        for _ in range(2):
            domain.shares = 7
            assert [type(one) for one in await repair.check()] == [SetShares]
            assert await repair.check() == ()
            assert domain.shares != 7
        repair.pace.held()
        assert [type(one) for one in await repair.check()] == [Resize]
        assert repair.drift_total == counted + 3


async def test_what_has_not_changed_is_not_reckoned_again_and_what_has_is(
    two_vms: list[Domain], host: Host, client: Client
) -> None:
    await report(client)
    told_before = host.report()
    first, second = host.vms.values()
    rows, statuses = [vm.allocation() for vm in (first, second)], [vm.status() for vm in (first, second)]
    assert host.report() is told_before
    assert [vm.allocation() for vm in (first, second)] == rows
    assert second.allocation() is rows[1]
    assert second.status() is statuses[1]
    committed = first.intent.committed.model_copy(update={"memory_mib": first.intent.committed.memory_mib - 100})
    await first.record.store(committed=committed)
    assert first.allocation().current == committed.vector()
    assert first.status().current == committed
    assert second.status() is statuses[1]
    told_now = host.report()
    assert told_now.sequence == told_before.sequence + 1
    assert told_now.vms[0].current == committed
    host.slice = replace(host.slice, capacity=ResourceVector(cpu_cores=0.5, memory_mib=100.0))
    assert host.overcommitted().memory_mib == sum(vm.allocation().charge.memory_mib for vm in (first, second)) - 100


@pytest.mark.parametrize("phase", [Phase.DELETING, Phase.CREATING, Phase.ADMITTING, Phase.STARTING, Phase.STOPPING])
async def test_a_vm_whose_size_cannot_be_changed_is_not_deflatable(command: Command, host: Host, phase: Phase) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert host.report().deflatable.cpu_cores == 2.5
    vm = host.vm("low-1")
    # Nobody else has a turn before it is as it was.
    vm.record.intent, settled = vm.intent.changed(phase=phase), vm.intent
    said = host.report()
    vm.record.intent = settled
    assert said.deflatable == Vector()
    assert said.vms[0].not_yet is None


async def test_a_vm_that_is_told_that_it_goes_is_not_deflatable(command: Command, host: Host) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    host.vm("low-1").resizer.mark_terminating("it is being removed")
    assert host.report().deflatable == Vector()
