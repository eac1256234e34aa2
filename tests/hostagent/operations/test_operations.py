"""What the host agent does with its VMs, against a make-believe hypervisor and guests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.bounds import EMULATOR_SHARE
from ebbtide.deflation.cascade.reconcile import RepairPace
from ebbtide.deflation.resources import COMPONENTS, ZERO
from ebbtide.messages.guest import Hello
from ebbtide.messages.operations import VMOutcome
from hostagent.libvirt.hypervisor import DomainSummary
from hostagent.operations import resuming
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, succeeding
from tests.hostagent.doing import host_idle, reclaim
from tests.hostagent.world import Domain, DomainOff, World
from tests.waiting import until


def verified(outcome: VMOutcome, layer: str, resource: str) -> float:
    (row,) = [row for row in outcome.ledger if (row.layer.value, row.resource) == (layer, resource)]
    return row.verified


async def test_a_new_vm_is_admitted_at_its_size_before_its_cpus_run(command: Command, world: World) -> None:
    vm = low_vm("low-1", nominal={"cpu_cores": 2.5, "memory_mib": 1024.0})
    await command("POST", "/v1/vms", {"request_id": "c", "vm": vm})
    (domain,) = world.domains.values()
    assert domain.resumed_with_quota == pytest.approx(2.5 / 3)


async def test_a_vm_that_is_made_deflated_comes_up_so_by_any_start(command: Command, world: World) -> None:
    size = {"cpu_cores": 1.0, "memory_mib": 700.0}
    body = {"request_id": "c", "vm": low_vm("low-1"), "start_size": size}
    assert (await command("POST", "/v1/vms", body)).state == "done"
    (domain,) = world.domains.values()
    assert domain.starts_with == (1.0, 700.0)
    first = [method for method, _ in world.calls if method in ("prepare_start", "resume")]
    assert first[0] == "prepare_start", "before its CPUs run"


async def test_a_need_is_split_in_proportion_and_all_layers_give(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    operation = await reclaim(command, cpu_cores=3.0, memory_mib=1100.0)
    assert operation.state == "done", operation.sentence
    for outcome in operation.vms:
        assert outcome.after.memory_mib == outcome.target.memory_mib == 1024 - 550
        assert outcome.after.cpu_cores == outcome.target.cpu_cores == 1.5
        assert verified(outcome, "application", "memory_mib") > 55
        assert verified(outcome, "guest", "memory_mib") == 512
        assert verified(outcome, "hypervisor", "memory_mib") == 38
        assert verified(outcome, "guest", "cpu_cores") == 1.0
        assert verified(outcome, "hypervisor", "cpu_cores") == 0.5
    for domain in two_vms:
        assert (domain.plugged_mib, domain.balloon_mib, len(domain.online)) == (0, 474, 2)
        assert domain.quota == pytest.approx(0.75)
        assert domain.available_mib >= 0
    assert host.free().cpu_cores == pytest.approx(3.0)


async def test_what_the_layers_gave_adds_up_to_the_fall_of_the_bound(command: Command, two_vms: list[Domain]) -> None:
    operation = await reclaim(command, cpu_cores=2.3, memory_mib=777.0)
    for outcome in operation.vms:
        for resource in COMPONENTS[:2]:
            fall = getattr(outcome.before, resource) - getattr(outcome.after, resource)
            given = verified(outcome, "guest", resource) + verified(outcome, "hypervisor", resource)
            assert given == pytest.approx(fall)


async def test_a_refusal_of_the_application_falls_through_and_its_reason_is_kept(
    command: Command, two_vms: list[Domain]
) -> None:
    for domain in two_vms:
        domain.application = "refuse"
    operation = await reclaim(command, memory_mib=300.0)
    assert operation.state == "done", operation.sentence
    row = operation.vms[0].ledger[0]
    assert (row.promised, row.verified) == (0, 0)
    assert row.reason == "refused: in the middle of a checkpoint"


async def test_memory_that_the_guest_needs_is_not_taken_and_the_rest_is_reported_missing(
    command: Command, two_vms: list[Domain], world: World
) -> None:
    for domain in two_vms:
        domain.application = "refuse"
    operation = await reclaim(command, memory_mib=1200.0)
    assert operation.state == "partial"
    assert operation.shortfall.memory_mib > 200
    assert "the guest has no more memory to spare above its floor" in operation.sentence
    assert world.least_available_mib >= 48


@pytest.mark.slow
async def test_without_a_word_of_the_guest_only_cpu_is_taken(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await until(lambda: all(vm.link.online is not None for vm in host.vms.values()))
    world.guests_answer = False
    operation = await reclaim(command, cpu_cores=2.0, memory_mib=200.0)
    assert operation.state == "partial"
    assert operation.shortfall.memory_mib == 200
    assert operation.shortfall.cpu_cores == 0
    for domain in two_vms:
        assert (domain.plugged_mib, domain.balloon_mib) == (512, 512)
        # By its last word all three are on line, and whatever it does, the domain gets no more.
        assert domain.quota == pytest.approx(2.0 / 3)
        assert domain.cap == pytest.approx(2.0 * (1 + EMULATOR_SHARE))


async def test_a_deletion_gives_the_room_back_and_everything_returns_to_nominal(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=1100.0)
    operation = await command("POST", "/v1/reinflations", {"request_id": "back", "deadline_s": 30.0})
    assert operation.state == "done", operation.sentence
    for domain in two_vms:
        assert (domain.plugged_mib, domain.balloon_mib, domain.online, domain.quota) == (512, 512, {0, 1, 2}, None)
    assert all(vm.status().current.cpu_cores == 3 for vm in host.vms.values())


async def test_layers_come_back_in_reverse_order(command: Command, two_vms: list[Domain], world: World) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=1100.0)
    world.calls.clear()
    operation = await command("POST", "/v1/reinflations", {"request_id": "back"})
    calls = [method for method, domain in world.calls if domain == "ebb-host-a.low-1" and method.startswith("set_")]
    assert calls.index("set_quota") < calls.index("set_balloon") < calls.index("set_plugged")
    assert [row.layer.value for row in operation.vms[0].ledger if row.resource == "memory_mib"] == [
        "hypervisor",
        "guest",
        "application",
    ]


async def test_each_committed_change_of_cores_is_told_once(command: Command, two_vms: list[Domain], host: Host) -> None:
    await reclaim(command, cpu_cores=3.0)
    changes = [(c.machine, c.cores_before, c.cores_after, c.cause) for c in host.journal.changes]
    assert sorted(changes) == [
        ("low-1", 0.0, 3.0, "c-low-1"),
        ("low-1", 3.0, 1.5, "reclaim"),
        ("low-2", 0.0, 3.0, "c-low-2"),
        ("low-2", 3.0, 1.5, "reclaim"),
    ]


async def test_a_vm_is_brought_down_in_one_resource_and_up_in_another(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    body: dict[str, Any] = {"request_id": "t1", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 1024.0}}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    body = {"request_id": "t2", "generation": 3, "target": {"cpu_cores": 2.0, "memory_mib": 700.0}}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    assert operation.state == "done", operation.sentence
    status = host.vm("low-1").status()
    assert (status.current.cpu_cores, status.current.memory_mib, status.generation) == (2.0, 700.0, 3)


async def test_an_equal_generation_with_the_same_body_is_the_same_answer(
    command: Command, client: Client, two_vms: list[Domain]
) -> None:
    body: dict[str, Any] = {"generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 1024.0}}
    await command("PUT", "/v1/vms/low-1/target", {"request_id": "t1"} | body)
    again = await command("PUT", "/v1/vms/low-1/target", {"request_id": "t2"} | body)
    assert (again.state, again.vms[0].after.cpu_cores) == ("done", 1.0)
    other = {"request_id": "t3", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 1024.0}}
    assert (await client.put("/v1/vms/low-1/target", json=other)).status == 409


async def test_a_failing_hypervisor_is_an_error_and_the_resize_is_given_up(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    world.failures["read"] = "the monitor does not answer"
    operation = await reclaim(command, cpu_cores=3.0)
    assert operation.state == "partial"
    assert "the monitor does not answer" in operation.sentence
    world.failures.clear()
    await until(lambda: all(vm.intent.phase is Phase.SETTLED for vm in host.vms.values()))
    assert all(len(domain.online) == 3 for domain in two_vms)
    assert all(vm.intent.committed.cpu_cores == 3.0 for vm in host.vms.values())


async def test_a_vm_that_cannot_be_started_leaves_nothing_behind(command: Command, host: Host, world: World) -> None:
    world.failures["resume"] = "no more processes"
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert operation.state == "failed"
    assert operation.sentence == "no more processes"
    assert not world.domains
    assert not host.vms
    assert host.free() == host.slice.capacity


async def test_a_new_agent_finds_the_vms_of_the_old_one(
    command: Command, two_vms: list[Domain], agent: Agent, world: World, tmp_path: Path
) -> None:
    await reclaim(command, cpu_cores=3.0)
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: all(vm.link.connected for vm in successor.host.vms.values()))
        assert {vm.name: vm.status().current.cpu_cores for vm in successor.host.vms.values()} == {
            "low-1": 1.5,
            "low-2": 1.5,
        }
        again = await successor.requests.operations.get("reclaim", 10)
        assert again is not None
        assert (again.state, again.kind) == ("done", "reclaim")


async def test_a_domain_that_somebody_else_took_over_is_left_alone(host: Host, world: World, command: Command) -> None:
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert operation.state == "done"
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(owner="host-b").model_dump_json()
    await until(lambda: not host.vms)
    calls = len(world.calls)
    await until(lambda: "survey" in [method for method, _ in world.calls[calls:]])
    assert list(world.domains.values()) == [domain]
    assert not [method for method, _ in world.calls[calls:] if method not in ("survey", "domains")]


def given_up(host: Host, domain: Domain, name: str) -> str:
    """The intent of a VM like another one, whose creation was answered as failed."""
    intent = Intent.model_validate_json(domain.intent)
    assert intent.cause is not None
    host.journal.add_failed(name)
    cause = intent.cause.model_copy(update={"request_id": name})
    spec = intent.spec.model_copy(update={"name": name})
    return intent.changed(phase=Phase.CREATING, cause=cause, spec=spec).model_dump_json()


async def test_a_domain_that_came_into_being_after_its_creation_was_given_up_is_removed(
    command: Command, host: Host, world: World
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    (domain,) = world.domains.values()
    await world.create("ebb-host-a.late", given_up(host, domain, "late"))
    await until(lambda: list(world.domains) == ["ebb-host-a.low-1"])
    assert list(host.vms) == ["low-1"]


async def test_a_vm_that_cannot_even_be_removed_stays_charged_until_it_is(
    command: Command, host: Host, world: World
) -> None:
    world.failures.update(resume="no more processes", destroy="the monitor does not answer")
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert operation.state == "failed"
    assert host.free() != host.slice.capacity
    world.failures.clear()
    await until(lambda: not host.vms)
    assert not world.domains
    assert host.free() == host.slice.capacity


async def looks(world: World, count: int = 4) -> None:
    """Wait until the reconciler has looked so often."""
    before = world.calls.count(("survey", ""))
    await until(lambda: world.calls.count(("survey", "")) >= before + count)


@pytest.fixture
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried without success is not due again, however long a test takes."""
    monkeypatch.setattr(RepairPace, "due", lambda pace, now: pace.not_before == 0.0)


@pytest.mark.usefixtures("endless_pauses")
async def test_a_removal_that_libvirt_refuses_again_and_again_is_tried_ever_more_rarely_and_a_command_is_not(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    removal = ("destroy", "ebb-host-a.low-1")
    world.failures["destroy"] = "the monitor does not answer"
    assert (await command("DELETE", "/v1/vms/low-1?request_id=d")).state == "failed"
    await looks(world)
    assert world.calls.count(removal) == 2, "by the command, and then once"
    said = [event.sentence for event in host.history.decisions("low-1") if event.kind == "remove"]
    assert said == ["it could not be removed yet, and that is tried again in 4 s: the monitor does not answer"]
    assert host.vms["low-1"].allocation().current != ZERO
    world.failures.clear()
    assert (await command("DELETE", "/v1/vms/low-1?request_id=again")).state == "done"
    assert world.calls.count(removal) == 3
    assert set(host.vms) == {"low-2"}


async def test_a_removal_that_failed_once_does_not_wait_for_what_a_repair_was_to_wait_for(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    for _ in range(8):
        host.vms["low-1"].drift_repair.pace.tried(asyncio.get_running_loop().time())
    world.failures["destroy"] = "the monitor does not answer"
    assert (await command("DELETE", "/v1/vms/low-1?request_id=d")).state == "failed"
    world.failures.clear()
    await until(lambda: set(host.vms) == {"low-2"})


@pytest.mark.slow
async def test_what_is_left_of_a_creation_and_cannot_be_removed_is_tried_ever_more_rarely_and_holds_up_no_other(
    command: Command, host: Host, world: World
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    (domain,) = world.domains.values()

    async def refuse(method: str, name: str) -> None:
        if (method, name) == ("destroy", "ebb-host-a.late"):
            raise DomainOff

    world.before = refuse
    for name in ("late", "later"):
        await world.create(f"ebb-host-a.{name}", given_up(host, domain, name))
    await until(lambda: set(world.domains) == {"ebb-host-a.low-1", "ebb-host-a.late"})
    await looks(world)
    assert world.calls.count(("destroy", "ebb-host-a.late")) == 1
    world.before = None
    await until(lambda: list(world.domains) == ["ebb-host-a.low-1"])


@pytest.mark.usefixtures("endless_pauses")
async def test_a_start_that_failed_and_cannot_be_turned_off_again_is_tried_ever_more_rarely(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    world.failures.update(resume="no more processes", shut_down="the monitor does not answer")
    world.calls.clear()
    assert (await command("POST", "/v1/vms/low-1/start", {"request_id": "b"})).state == "failed"
    await looks(world)
    assert world.calls.count(("shut_down", "ebb-host-a.low-1")) == 2, "by the command, and then once"
    vm = host.vms["low-1"]
    assert vm.allocation().current != ZERO
    world.failures.clear()
    assert not vm.drift_repair.pace.due(asyncio.get_running_loop().time())
    two_vms[0].state = "stopped"
    await until(lambda: vm.intent.phase is Phase.STOPPED)  # one that has ended by itself is off at once


async def test_a_cpu_that_runs_although_the_guest_calls_it_off_line_is_counted_and_gains_nothing(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0)
    honest, liar = two_vms
    assert (honest.quota, liar.quota) == (0.75, 0.75)
    liar.liars = {2}
    await until(lambda: host.vms["low-2"].status().broken_offline_total == 1)
    assert honest.cap == liar.cap == pytest.approx(1.5 * (1 + EMULATOR_SHARE))
    assert host.vms["low-1"].status().broken_offline_total == 0
    assert [event.sentence for event in host.history.decisions("low-2") if event.kind == "drift"] == [
        "vCPU 2 runs though the guest calls it off line (1 times so far); what the VM has is held by its domain's cap"
    ]


async def test_a_guest_that_says_one_thing_and_then_another_of_its_cpus_gets_no_more_than_its_size(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0)
    liar, vm = two_vms[0], host.vms["low-1"]
    most = 0.0
    for said in ({0}, {0, 1, 2}) * 4:
        looks = vm.drift_repair.looks
        liar.online = said
        vm.request_check()
        await until(lambda: vm.drift_repair.looks > looks)  # noqa: B023
        # All three run, whatever it says of them.
        most = max(most, min(3 * (liar.quota or 1.0), liar.cap or 3.0))
    assert most <= 1.5 * 1.05


@pytest.mark.slow
async def test_a_guest_that_falls_silent_keeps_its_minimum_on_the_cpu_that_is_left_on_line(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, cpu_cores=3.0)
    assert [(sorted(domain.online), domain.quota) for domain in two_vms] == [([0, 1], 0.75)] * 2
    world.guests_answer = False
    for vm in host.vms.values():
        looks = vm.drift_repair.looks
        vm.request_check()
        await until(lambda: vm.drift_repair.looks > looks and not vm.link.connected)  # noqa: B023
        looks = vm.drift_repair.looks
        vm.request_check()
        await until(lambda: vm.drift_repair.looks > looks)  # noqa: B023
    assert [domain.quota for domain in two_vms] == [0.75, 0.75]
    assert not [event for event in host.history.decisions("low-1") if event.kind == "alarm"]


async def test_limits_that_leave_less_than_the_minimum_are_an_alarm_until_they_are_put_right(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, cpu_cores=3.0)
    vm = host.vms["low-1"]

    def alarms() -> list[str]:
        return [event.sentence for event in host.history.decisions("low-1") if event.kind == "alarm"]

    world.failures["set_quota"] = "the monitor does not answer"
    two_vms[0].quota = 0.05
    while not alarms():
        vm.request_check()
        await asyncio.sleep(0)
    assert alarms() == ["its limits leave it 0.1 cores; its minimum is 0.5"]
    del world.failures["set_quota"]
    vm.request_check()
    await until(lambda: len(alarms()) == 2)
    assert alarms()[1] == "it has its CPU again; its minimum is 0.5"


async def test_what_a_cpu_used_before_it_was_parked_is_no_lie(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    async def looked_at(times: int) -> None:
        """Each reading of the host's side lets every CPU on line move on."""
        before = [domain.vcpu_seconds[0] for domain in two_vms]
        await until(lambda: all(d.vcpu_seconds[0] >= b + 0.5 * times for d, b in zip(two_vms, before, strict=True)))

    await looked_at(times=2)
    await reclaim(command, cpu_cores=3.0)
    await looked_at(times=3)
    assert [domain.quota for domain in two_vms] == [0.75, 0.75]
    assert [vm.drift_repair.drift_total for vm in host.vms.values()] == [0, 0]


async def test_room_that_is_being_given_back_cannot_be_sold_meanwhile(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=1000.0)
    world.delay = lambda: 0.02
    await client.post("/v1/reinflations", json={"request_id": "back"})
    vm = low_vm("late", priority="fixed", nominal={"cpu_cores": 3.0, "memory_mib": 512.0}, minimum={})
    response = await client.post("/v1/vms", json={"request_id": "c-late", "vm": vm})
    taken = [vm.allocation().charge.cpu_cores for vm in host.vms.values()]
    assert response.status == 409 or sum(taken) <= host.slice.capacity.cpu_cores
    await host_idle(host)
    assert sum(vm.allocation().charge.cpu_cores for vm in host.vms.values()) <= host.slice.capacity.cpu_cores


async def test_a_component_that_a_target_leaves_out_is_not_concerned(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    before = host.vms["low-1"].intent.committed
    body: dict[str, Any] = {"request_id": "t1", "generation": 2, "target": {"cpu_cores": 1.0}}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    assert host.vms["low-1"].intent.committed == before.model_copy(update={"cpu_cores": 1.0})


async def test_of_two_targets_that_fit_only_alone_one_is_refused(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    for number, name in enumerate(("low-1", "low-2")):
        body = {"request_id": f"d{number}", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 1024.0}}
        assert (await command("PUT", f"/v1/vms/{name}/target", body)).state == "done"
    vm = low_vm("fixed", priority="fixed", nominal={"cpu_cores": 2.0, "memory_mib": 512.0}, minimum={})
    assert (await command("POST", "/v1/vms", {"request_id": "f", "vm": vm})).state == "done"
    for number, name in enumerate(("low-1", "low-2")):
        body = {"request_id": f"u{number}", "generation": 3, "target": {"cpu_cores": 3.0, "memory_mib": 1024.0}}
        await client.put(f"/v1/vms/{name}/target", json=body)
    await host_idle(host)
    assert sorted(vm.status().current.cpu_cores for vm in host.vms.values()) == [1.0, 2.0, 3.0]


async def test_an_undo_gives_up_what_would_be_tried_again(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    world.failures["read"] = "the monitor does not answer"
    assert (await reclaim(command, cpu_cores=3.0)).state == "partial"
    world.failures.clear()
    await command("POST", "/v1/reinflations", {"request_id": "undo"})
    await host_idle(host)
    assert [len(domain.online) for domain in two_vms] == [3, 3]
    assert all(vm.intent.target == vm.intent.committed == vm.intent.spec.nominal for vm in host.vms.values())


async def test_intents_that_cannot_all_be_stored_change_nothing(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    world.failures["write_intent"] = "no space"
    operation = await reclaim(command, cpu_cores=3.0)
    assert (operation.state, operation.sentence) == ("failed", "no space")
    world.failures.clear()
    await host_idle(host)
    assert [len(domain.online) for domain in two_vms] == [3, 3]
    assert [vm.intent.generation for vm in host.vms.values()] == [1, 1]


async def test_a_cpu_that_comes_back_on_line_by_itself_is_held_to_the_committed_size(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0)
    two_vms[0].online = {0, 1, 2}
    await until(lambda: two_vms[0].quota == 0.5)
    assert host.vms["low-1"].status().current.cpu_cores == 1.5


async def test_after_a_reset_a_vm_gets_no_more_than_is_committed(
    command: Command, two_vms: list[Domain], host: Host
) -> None:
    await reclaim(command, cpu_cores=3.0, memory_mib=1000.0)
    domain, vm = two_vms[0], host.vms["low-1"]
    # What a partial reinflation leaves: wanted is more than committed, and the rest was sold.
    await vm.record.store(target=vm.intent.spec.nominal)
    domain.online, domain.plugged_mib, domain.balloon_mib, domain.quota = {0, 1, 2}, 512.0, 512.0, None
    vm._on_hello(Hello(protocol=1, nonce="n", agent="t", boot_id="another", capabilities=[]))
    await until(lambda: domain.bound_mib == 524)
    assert vm.allocation().current.cpu_cores == 1.5
    assert domain.quota == pytest.approx(1.5 / len(domain.online), abs=0.01)


async def test_a_second_deletion_does_not_touch_a_new_vm_of_the_name(
    client: Client, command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    async with host.vms["low-1"].lock:
        for number in (1, 2):
            assert (await client.delete(f"/v1/vms/low-1?request_id=d{number}")).status == 202
    await until(lambda: "low-1" not in host.vms)
    await command("POST", "/v1/vms", {"request_id": "again", "vm": low_vm("low-1")})
    assert (await client.get("/v1/operations/d2?wait_s=10")).status == 200
    assert "ebb-host-a.low-1" in world.domains
    assert "low-1" in host.vms


async def test_a_vm_whose_disk_cannot_be_made_is_no_longer_charged(
    command: Command, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(domain: str, intent: Intent, xml: str | None = None) -> None:
        raise FileNotFoundError("qemu-img")

    monkeypatch.setattr(host.hypervisor, "create", fail)
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert operation.state == "failed"
    assert not host.vms


async def test_a_vm_that_is_made_while_the_watch_looks_is_kept(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey, entered, go_on = host.hypervisor.survey, asyncio.Event(), asyncio.Event()

    async def slow() -> dict[str, DomainSummary]:
        found = await survey()
        entered.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(host.hypervisor, "survey", slow)
    await entered.wait()
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert operation.state == "done"
    monkeypatch.undo()
    go_on.set()
    await host_idle(host)
    calls = len(world.calls)
    await until(lambda: "survey" in [method for method, _ in world.calls[calls:]])
    assert list(host.vms) == ["low-1"]
    assert list(world.domains) == ["ebb-host-a.low-1"]


async def test_an_agent_ends_although_a_guest_does_not_say_hello(command: Command, agent: Agent, world: World) -> None:
    world.guests_answer = False
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    async with asyncio.timeout(5):
        await agent.close()


async def test_a_creation_is_gone_on_with_once_the_hypervisor_says_how_far_it_got(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await agent.close()
    # As a kill before the last write would leave it.
    (domain,) = world.domains.values()
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.CREATING).model_dump_json()
    monkeypatch.setattr(resuming, "ASK_AGAIN_S", 0.05)
    async with succeeding(world, tmp_path) as successor:
        world.failures["domains"] = "the monitor does not answer"
        running = await successor.requests.operations.get("c", 0.3)
        assert running is not None
        assert running.state == "running"
        world.failures.clear()
        operation = await successor.requests.operations.get("c", 10)
        assert operation is not None
        assert operation.state == "done"
        assert successor.host.vm("low-1").intent.phase is Phase.SETTLED
        assert list(world.domains.values()) == [domain]
