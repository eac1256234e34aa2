"""Changes of what a VM is sold as an agent carries them out, over a make-believe host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbtide.deflation.allocations import Priority
from ebbtide.messages.commands import ReclaimCommand
from ebbtide.messages.common import Vector
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, succeeding
from tests.hostagent.doing import reclaim, report
from tests.hostagent.operations.test_lifecycle import start, stop
from tests.hostagent.operations.test_modes import set_mode
from tests.hostagent.world import Domain, World
from tests.waiting import until


def spec(**fields: Any) -> dict[str, Any]:
    return {"request_id": "resize", "spec": low_vm("low-1", **fields), "deadline_s": 20.0}


async def test_a_smaller_nominal_size_deflates_and_a_larger_one_grows_within_the_domain(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    domain = world.domains["ebb-host-a.low-1"]
    domain.most_mib = 1024.0
    domain.cache_mib = 50.0
    smaller = await command("PUT", "/v1/vms/low-1/spec", spec(nominal={"cpu_cores": 2.0, "memory_mib": 768.0}))
    assert smaller.state == "done", smaller.sentence
    assert domain.bound_mib == 768.0
    status = (await report(client)).vms[0]
    assert (status.nominal.memory_mib, status.current.memory_mib, status.current.cpu_cores) == (768.0, 768.0, 2.0)
    larger = {**spec(), "request_id": "back"}
    back = await command("PUT", "/v1/vms/low-1/spec", larger)
    assert back.state == "done", back.sentence
    status = (await report(client)).vms[0]
    assert (status.nominal.memory_mib, status.current.memory_mib, status.current.cpu_cores) == (1024.0, 1024.0, 3.0)
    assert status.at_next_start is None
    assert host.vms["low-1"].intent.was is None


async def test_a_resize_that_cannot_be_stored_is_charged_until_it_is_known_what_was_and_stops_no_other_work(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    vm, before = host.vms["low-1"], host.vms["low-1"].allocation()
    world.domains["ebb-host-a.low-1"].most_mib = 2048.0
    world.failures["write_intent"] = "busy"
    larger = await command("PUT", "/v1/vms/low-1/spec", spec(nominal={"cpu_cores": 3.0, "memory_mib": 1280.0}))
    assert (larger.state, larger.sentence) == ("failed", "busy")
    assert vm.record.uncertain
    assert vm.allocation().current.memory_mib == 1280.0, "the write may still be carried out"
    assert host.report().sequence
    world.failures.clear()
    await until(lambda: not vm.record.uncertain)
    assert vm.allocation() == before
    assert (await reclaim(command, memory_mib=100.0)).state == "done"


async def test_what_the_domain_has_no_room_for_is_there_after_the_next_start(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command, "low-2", "stop-2")
    said = await command("PUT", "/v1/vms/low-1/spec", spec(nominal={"cpu_cores": 4.0, "memory_mib": 1400.0}))
    assert said.state == "done"
    assert "takes effect at its next start" in said.sentence
    status = (await report(client)).vms[0]
    assert (status.nominal.cpu_cores, status.nominal.memory_mib) == (3.0, 1024.0)
    assert status.at_next_start is not None
    assert status.at_next_start.nominal.cpu_cores == 4.0
    await stop(command)
    status = (await report(client)).vms[0]
    assert (status.nominal.cpu_cores, status.at_next_start) == (4.0, None)
    assert status.start_size is not None
    assert (status.start_size.cpu_cores, status.start_size.memory_mib) == (4.0, 1400.0)
    assert (await start(command)).state == "done"
    domain = world.domains["ebb-host-a.low-1"]
    assert (domain.vcpus, domain.bound_mib) == (4, 1400.0)
    assert host.vms["low-1"].intent.redefine is False


async def test_what_waits_for_the_next_start_outlives_a_save_by_another_program(
    client: Client, command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await stop(command, "low-2", "stop-2")
    await command("PUT", "/v1/vms/low-1/spec", spec(nominal={"cpu_cores": 4.0, "memory_mib": 1400.0}))
    domain, vm = world.domains["ebb-host-a.low-1"], host.vms["low-1"]
    world.failures["saved_mib"] = "the monitor does not answer"
    domain.state, domain.saved_mib = "stopped", 300.0
    await until(lambda: ("saved_mib", vm.domain) in world.calls)
    assert (vm.intent.phase, vm.allocation().charge.is_zero()) == (Phase.SETTLED, False), "an error is no answer"
    world.failures.clear()
    await until(lambda: vm.intent.phase is Phase.STOPPED)
    assert (await report(client)).vms[0].saved_mib == 300.0
    larger = {**spec(nominal={"cpu_cores": 2.0, "memory_mib": 768.0}), "request_id": "other"}
    assert "resize it when it runs" in (await command("PUT", "/v1/vms/low-1/spec", larger)).sentence
    assert (await start(command)).state == "done"
    assert (domain.vcpus, vm.intent.spec.nominal.memory_mib, vm.intent.saved_mib) == (3, 1024.0, None)
    assert (vm.intent.at_next_start is not None, vm.allocation().current.memory_mib) == (True, 1024.0)
    await stop(command, request_id="stop-3")
    assert (await start(command, request_id="start-2")).state == "done"
    assert (domain.vcpus, domain.bound_mib, vm.intent.redefine) == (4, 1400.0, False)


async def test_fixed_counts_only_once_it_has_its_nominal_size(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    await reclaim(command, cpu_cores=2.0)
    assert host.vms["low-1"].deflated
    fixed = await command("PUT", "/v1/vms/low-1/spec", spec(priority="fixed", minimum={}))
    assert fixed.state == "done", fixed.sentence
    assert (host.vms["low-1"].intent.spec.priority, host.vms["low-1"].deflated) == ("fixed", False)
    back = {**spec(priority="harvest", ceiling={"cpu_cores": 3.0, "memory_mib": 1024.0}), "request_id": "h"}
    assert (await command("PUT", "/v1/vms/low-1/spec", back)).state == "done"
    assert host.vms["low-1"].intent.spec.priority == "harvest"


async def test_a_higher_minimum_is_grown_to_first_and_refused_without_room(
    client: Client, command: Command, host: Host, two_vms: list[Domain]
) -> None:
    await reclaim(command, cpu_cores=2.0)
    high = low_vm("high", priority="fixed", minimum={}, nominal={"cpu_cores": 2.0, "memory_mib": 500.0})
    await command("POST", "/v1/vms", {"request_id": "c3", "vm": high})
    before = host.vms["low-1"].intent
    refused = await command("PUT", "/v1/vms/low-1/spec", spec(minimum={"cpu_cores": 3.0, "memory_mib": 320.0}))
    assert refused.state == "failed"
    assert "needs more than what is free" in refused.sentence
    assert host.vms["low-1"].intent == before
    await command("DELETE", "/v1/vms/high?request_id=d")
    raised = {**spec(minimum={"cpu_cores": 3.0, "memory_mib": 320.0}), "request_id": "again"}
    assert (await command("PUT", "/v1/vms/low-1/spec", raised)).state == "done"
    assert host.vms["low-1"].allocation().current.cpu_cores == 3.0
    other = {**spec(), "request_id": "third", "spec": low_vm("other")}
    assert (await client.put("/v1/vms/low-1/spec", json=other)).status == 400


async def test_a_vm_that_does_not_give_what_it_should_stays_what_it_was(
    command: Command, host: Host, world: World, two_vms: list[Domain]
) -> None:
    # The guest needs what it has: a smaller size cannot be reached.
    world.domains["ebb-host-a.low-1"].cache_mib = 850.0
    world.domains["ebb-host-a.low-1"].application = "refuse"
    short = await command("PUT", "/v1/vms/low-1/spec", spec(nominal={"cpu_cores": 3.0, "memory_mib": 500.0}))
    assert short.state == "partial"
    assert "stays what it was" in short.sentence
    assert host.vms["low-1"].intent.spec.nominal.memory_mib == 1024.0
    assert host.vms["low-1"].intent.phase is Phase.SETTLED


async def test_a_resize_that_was_cut_off_by_a_kill_comes_to_its_end(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    (domain,) = world.domains.values()
    old = Intent.model_validate_json(domain.intent)
    await command("PUT", "/v1/vms/low-1/spec", spec(nominal={"cpu_cores": 2.0, "memory_mib": 768.0}))
    await agent.close()
    # As a kill right after the first write would leave it.
    now = Intent.model_validate_json(domain.intent)
    half = old.changed(was=old.spec, phase=Phase.DEFLATING, target=now.target, cause=now.cause, generation=2)
    domain.intent, domain.plugged_mib, domain.online = half.model_dump_json(), 512.0, {0, 1, 2}
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vm("low-1").intent.was is None, limit_s=40)
        intent = successor.host.vm("low-1").intent
        assert (intent.spec.nominal.memory_mib, intent.committed.memory_mib) == (768.0, 768.0)
        ended = await successor.requests.operations.get("resize", 10)
        assert ended is not None
        assert ended.state == "done", ended.sentence


async def half_resized(command: Command, agent: Agent, world: World, mode: str = "active") -> Domain:
    """A fixed VM, as a kill after the first write of its resize to 768 MiB would leave it; its guest is silent."""
    fixed = low_vm("low-1", priority="fixed", minimum={})
    await command("POST", "/v1/vms", {"request_id": "c", "vm": fixed})
    (domain,) = world.domains.values()
    old = Intent.model_validate_json(domain.intent)
    smaller = fixed | {"nominal": {"cpu_cores": 2.0, "memory_mib": 768.0}}
    body = {"request_id": "resize", "spec": smaller, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/spec", body)).state == "done"
    await set_mode(command, mode)
    await agent.close()
    now = Intent.model_validate_json(domain.intent)
    meanwhile = old.spec.model_copy(update={"priority": Priority.DEFLATABLE})
    change = {"was": old.spec, "spec": meanwhile, "target": now.target, "cause": now.cause, "generation": 2}
    domain.intent = old.changed(phase=Phase.DEFLATING, **change).model_dump_json()
    domain.plugged_mib, domain.online, domain.quota, domain.cap = 512.0, {0, 1, 2}, None, None
    world.guests_answer = False
    return domain


async def test_while_a_resize_that_was_cut_off_waits_for_its_guest_a_fixed_vm_gives_nothing(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    domain = await half_resized(command, agent, world)
    async with succeeding(world, tmp_path) as successor:
        need = ReclaimCommand(request_id="r", need=Vector(cpu_cores=1.0), deadline_s=1.0)
        asked = await successor.sizes.reclaim(need)
        ended = await successor.requests.operations.get(asked.request_id, 10)
        assert ended is not None
        assert ended.state != "done"
        assert (domain.quota, domain.cap) == (None, None)
        world.guests_answer = True
        resized = await successor.requests.operations.get("resize", 20)
        assert resized is not None
        assert resized.state == "done", resized.sentence
        intent = successor.host.vm("low-1").intent
        assert (intent.was, intent.spec.priority, intent.committed.memory_mib) == (None, Priority.FIXED, 768.0)


async def test_a_resize_that_was_cut_off_is_given_up_on_a_host_that_is_paused_by_now(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    domain = await half_resized(command, agent, world, "paused")
    world.guests_answer = True
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("resize", 20)
        assert ended is not None
        assert ended.state == "partial"
        assert "low-1 stays what it was and has 3 cores, 1024 MiB: host-a is paused" in ended.sentence
        assert (domain.bound_mib, domain.cap) == (1024.0, None)
        intent = successor.host.vm("low-1").intent
        assert (intent.was, intent.spec.priority, intent.phase) == (None, Priority.FIXED, Phase.SETTLED)


async def test_a_vm_that_is_off_is_resized_at_once(client: Client, command: Command, two_vms: list[Domain]) -> None:
    await stop(command)
    done = await command("PUT", "/v1/vms/low-1/spec", spec(nominal={"cpu_cores": 1.0, "memory_mib": 512.0}))
    assert done.state == "done", done.sentence
    size = (await report(client)).vms[0].start_size
    assert size is not None
    assert (size.cpu_cores, size.memory_mib) == (1.0, 512.0)
