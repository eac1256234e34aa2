"""Adopt and release as an agent carries them out, over a make-believe host."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.bounds import Bound
from ebbtide.messages.adoptions import Adoptable
from ebbtide.messages.commands import AdoptCommand
from ebbtide.messages.common import PartialVector, Vector
from hostagent.control import reconciler
from hostagent.errors import HypervisorError, HypervisorTimeout, JournalError
from hostagent.operations.agent import Agent
from hostagent.state.intents import Before, Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm, make_agent, succeeding
from tests.hostagent.doing import reclaim, report
from tests.hostagent.world import Domain, World
from tests.waiting import until


async def adopted(command: Command, world: World, plugged_mib: float = 0.0, **fields: Any) -> Any:
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.state, domain.shares, domain.plugged_mib = "running", 777, plugged_mib
    body = {"request_id": "adopt", "domain": "old-web", "name": "web", "minimum": {"cpu_cores": 0.3}, **fields}
    return await command("POST", "/v1/adoptions", body)


async def test_an_adopted_domain_is_deflated_and_given_back_as_it_was(
    client: Client, command: Command, host: Host, world: World
) -> None:
    done = await adopted(command, world)
    assert done.state == "done", done.sentence
    domain = world.domains["old-web"]
    assert Intent.model_validate_json(domain.intent).adopted is not None
    status = (await report(client)).vms[0]
    assert (status.adopted, status.name, status.domain, status.nominal.memory_mib) == (True, "web", "old-web", 512.0)
    taken = await reclaim(command, cpu_cores=0.5)
    assert taken.state == "done", taken.sentence
    assert world.domains["old-web"].quota is not None
    back = await command("POST", "/v1/vms/web/release", {"request_id": "release"})
    assert back.state == "done", back.sentence
    assert (domain.state, domain.shares, domain.intent) == ("running", 777, "")
    assert domain.quota is None
    assert not host.vms


@pytest.mark.parametrize(
    ("quota", "cap", "cores"),
    [(0.25, None, 1.0), (0.25, 1.03, 1.0), (2.0, None, 4.0), (0.01, None, 0.1)],
)
async def test_a_domain_is_adopted_at_what_its_owner_lets_it_use_and_its_quota_stays(
    command: Command, client: Client, host: Host, world: World, quota: float | None, cap: float | None, cores: float
) -> None:
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.state, domain.vcpus, domain.online = "running", 4, {0, 1, 2, 3}
    domain.vcpu_seconds, domain.quota, domain.cap = [0.0] * 4, quota, cap
    body = {"request_id": "adopt", "domain": "old-web", "name": "web"}
    done = await command("POST", "/v1/adoptions", body)
    assert done.state == "done", done.sentence
    assert (await report(client)).vms[0].nominal.cpu_cores == cores
    for _ in range(2):
        vm = host.vms["web"]
        vm.drift_repair.pace.held()
        await vm.drift_repair.check()
    bound = Bound(4, domain.quota, 0.0, 0.0, cap_cores=domain.cap)
    assert bound.cpu_cores == pytest.approx(cores), "what is put right on the way lifts nothing"
    if 0.2 < cores < 4:
        target = {"cpu_cores": cores / 2, "memory_mib": (await report(client)).vms[0].current.memory_mib}
        shrunk = {"request_id": "target", "target": target, "generation": host.vms["web"].intent.generation + 1}
        assert (await command("PUT", "/v1/vms/web/target", shrunk)).state == "done"
        assert (domain.online, domain.quota) == ({0, 1, 2, 3}, cores / 8), "none goes off line under its owner's quota"
    assert (await command("POST", "/v1/vms/web/release", {"request_id": "release"})).state == "done"
    assert (domain.quota, domain.cap) == (quota, cap)


async def test_an_adopted_domain_is_stopped_and_given_back_instead_of_removed(
    command: Command, host: Host, world: World
) -> None:
    await adopted(command, world)
    assert (await command("DELETE", "/v1/vms/web?request_id=d")).state == "done"
    assert (world.domains["old-web"].state, world.domains["old-web"].intent) == ("stopped", "")
    assert not host.vms


async def test_a_domain_that_its_owner_makes_anew_while_its_deletion_hangs_runs_on(
    command: Command, host: Host, world: World
) -> None:
    await adopted(command, world)
    vm = host.vms["web"]
    await until(lambda: vm.uuid is not None)
    world.failures["give_back"] = "it cannot be given back now"
    assert (await command("DELETE", "/v1/vms/web?request_id=d")).state == "failed"
    await world.create("old-web", "")
    world.domains["old-web"].state = "running"
    del world.failures["give_back"]
    vm.drift_repair.pace.held()
    await until(lambda: not host.vms)
    assert world.domains["old-web"].state == "running"
    assert [name for method, name in world.calls if method == "shut_down"] == ["old-web"], "the one that was ours"


async def test_a_domain_is_adopted_under_one_name_only(
    client: Client, command: Command, host: Host, world: World
) -> None:
    await adopted(command, world)
    body = {"request_id": "second", "domain": "old-web", "name": "web-2"}
    response = await client.post("/v1/adoptions", json=body)
    problem = await response.json()
    assert (response.status, problem["field"]) == (409, "domain")
    assert "adopted already" in problem["detail"]
    assert list(host.vms) == ["web"]


async def test_what_cannot_be_adopted_is_left_alone(client: Client, command: Command, world: World) -> None:
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.why_not = "its memory is locked"
    body = {"request_id": "a1", "domain": "old-web", "name": "web"}
    refusals = [
        ({**body, "request_id": "a0", "domain": "none"}, 404, "domain"),
        (body, 409, "domain"),
    ]
    for sent, status, field in refusals:
        response = await client.post("/v1/adoptions", json=sent)
        assert (response.status, (await response.json())["field"]) == (status, field)
    domain.why_not, domain.boot_mib, domain.balloon_mib = "", 9000.0, 9000.0
    response = await client.post("/v1/adoptions", json=body)
    assert (response.status, "slice" in (await response.json())["detail"]) == (409, True)
    assert domain.intent == ""
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    response = await client.post("/v1/vms/low-1/release", json={"request_id": "r"})
    assert (response.status, (await response.json())["field"]) == (409, "name")


@pytest.mark.parametrize("killed", [False, True], ids=["by the same agent", "by its successor"])
async def test_an_adoption_that_is_written_after_it_has_failed_is_given_back(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    hypervisor = agent.host.hypervisor
    take_over, late = hypervisor.adoption.take_over, asyncio.Event()

    async def too_late(domain: str, intent: Intent) -> None:
        async def write() -> None:
            await late.wait()
            await take_over(domain, intent)

        writing.append(asyncio.create_task(write()))
        raise HypervisorTimeout("libvirt did not answer within 15 s")

    writing: list[asyncio.Task[None]] = []
    with monkeypatch.context() as slow:
        slow.setattr(hypervisor.adoption, "take_over", too_late)
        assert (await adopted(command, world)).state == "failed"
    domain = world.domains["old-web"]
    if killed:
        await agent.close()
    late.set()
    await asyncio.gather(*writing)
    assert domain.intent
    keeper = make_agent(world, tmp_path) if killed else agent
    if killed:
        await keeper.start()
    try:
        await until(lambda: not domain.intent and not keeper.host.vms)
        assert (domain.state, domain.shares) == ("running", 777)
        again = AdoptCommand(request_id="again", domain="old-web", name="web")
        await keeper.adoptions.adopt(again)
        done = await keeper.requests.operations.get("again", 10)
        assert done is not None
        assert done.state == "done", done.sentence
        await asyncio.sleep(5 * reconciler.SURVEY_S)
        assert (list(keeper.host.vms), bool(domain.intent)) == (["web"], True)
    finally:
        if killed:
            await keeper.close()


async def test_an_adopted_domain_outlives_a_killed_agent(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await adopted(command, world)
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        assert successor.host.vm("web").intent.adopted is not None
        ended = await successor.requests.operations.get("adopt", 10)
        assert ended is not None
        assert ended.state == "done"


async def release(command: Command, request_id: str = "release") -> Any:
    return await command("POST", "/v1/vms/web/release", {"request_id": request_id, "deadline_s": 20.0})


async def sold(command: Command, cpu_cores: float, memory_mib: float) -> Any:
    nominal = {"cpu_cores": cpu_cores, "memory_mib": memory_mib}
    spec = {"name": "web", "priority": "deflatable", "nominal": nominal, "minimum": {"cpu_cores": 0.3}}
    return await command("PUT", "/v1/vms/web/spec", {"request_id": "sold", "spec": spec, "deadline_s": 20.0})


async def test_the_definition_of_an_adopted_domain_is_not_written_by_an_agent_that_takes_back_a_resize_of_it(
    command: Command, agent: Agent, host: Host, world: World, tmp_path: Path
) -> None:
    await adopted(command, world)
    cause = host.vms["web"].intent.cause
    assert cause is not None
    await agent.close()
    domain = world.domains["old-web"]
    intent = Intent.model_validate_json(domain.intent)
    meanwhile = intent.spec.model_copy(update={"nominal": Vector(cpu_cores=4.0, memory_mib=600.0)})
    resized = cause.model_copy(update={"kind": "resize", "request_id": "r"})
    domain.intent = intent.changed(spec=meanwhile, was=intent.spec, cause=resized).model_dump_json()
    host.journal.add_failed("r")
    domain.state = "stopped"
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vms["web"].intent.phase is Phase.STOPPED)
        vm = successor.host.vms["web"]
        assert (vm.intent.spec.nominal, vm.intent.redefine) == (intent.spec.nominal, False)
        assert "redefine" not in [method for method, _ in world.calls]


async def test_what_a_resize_took_is_given_back_to_the_owner(command: Command, host: Host, world: World) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    resized = await sold(command, 0.5, 400.0)
    assert resized.state == "done", resized.sentence
    assert (domain.bound_mib, domain.quota) == (400.0, 0.5)
    back = await release(command)
    assert back.state == "done", back.sentence
    assert (domain.bound_mib, domain.quota, domain.intent, domain.starts_with) == (512.0, None, "", (1.0, 512.0))
    assert not host.vms


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_deletion_leaves_its_owner_the_size_that_it_was_adopted_at(
    command: Command, host: Host, world: World, stopped: bool
) -> None:
    await adopted(command, world, plugged_mib=256.0)
    domain = world.domains["old-web"]
    target = {"cpu_cores": 0.5, "memory_mib": 600.0}
    body = {"request_id": "t", "generation": 2, "target": target, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/web/target", body)).state == "done"
    if stopped:
        assert (await command("POST", "/v1/vms/web/stop", {"request_id": "s"})).state == "done"
        assert domain.starts_with == (0.5, 600.0)
    assert (await command("DELETE", "/v1/vms/web?request_id=d")).state == "done"
    assert (domain.state, domain.intent, domain.starts_with) == ("stopped", "", (1.0, 768.0))
    assert not host.vms


async def test_what_a_resize_added_is_taken_before_the_owner_gets_it_back(
    command: Command, host: Host, world: World
) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    domain.most_mib = 700.0
    # As a balloon that was inflated when the domain was adopted leaves room.
    domain.boot_mib = 700.0
    assert (await sold(command, 1.0, 700.0)).state == "done"
    vm = host.vms["web"]
    vm.record.intent = vm.intent.changed(boot_mib=700.0)
    await until(lambda: domain.bound_mib == 700.0)
    back = await release(command)
    assert back.state == "done", back.sentence
    assert (domain.bound_mib, domain.intent) == (512.0, "")


async def test_on_a_paused_host_nothing_is_released(client: Client, command: Command, world: World) -> None:
    await adopted(command, world)
    await command("PUT", "/v1/mode", {"request_id": "m", "mode": "paused"})
    response = await client.post("/v1/vms/web/release", json={"request_id": "r"})
    assert (response.status, "is paused: no VM is created" in await response.text()) == (409, True)


async def test_a_release_that_falls_short_leaves_the_vm_looked_after_and_can_be_repeated(
    command: Command, host: Host, world: World
) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    await reclaim(command, cpu_cores=0.5)
    world.failures["give_back"] = "the domain is busy"
    failed = await release(command)
    assert (failed.state, failed.sentence) == ("failed", "the domain is busy")
    assert host.vms["web"].intent.was is None
    world.failures.clear()
    assert (await release(command, "again")).state == "done"
    assert (domain.quota, domain.intent) == (None, "")


async def test_cpus_that_a_guest_cannot_have_on_line_are_neither_taken_nor_keep_its_owner_from_it(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.state, domain.vcpus, domain.online, domain.vcpu_seconds = "running", 4, {0, 1}, [0.0] * 4

    def without_smt(d: Domain, params: dict[str, Any]) -> dict[str, Any]:
        d.online = set(params["online"]) & {0, 1}
        failed = [{"cpu": cpu, "reason": "Operation not permitted"} for cpu in set(params["online"]) - {0, 1}]
        return {"online": sorted(d.online), "failed": failed}

    monkeypatch.setattr(world, "_cpus_set", without_smt)
    body: dict[str, Any] = {"request_id": "adopt", "domain": "old-web", "name": "web"}
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    await until(lambda: host.vms["web"].link.connected)
    for generation, cores in ((2, 4.0), (3, 1.0)):
        target = {"cpu_cores": cores, "memory_mib": 400.0}
        body = {"request_id": f"t{generation}", "generation": generation, "target": target, "deadline_s": 20.0}
        await command("PUT", "/v1/vms/web/target", body)
        # A target for memory takes no CPU.
        assert host.vms["web"].intent.committed == Vector(cpu_cores=cores, memory_mib=400.0)
    back = await release(command)
    assert back.state == "done", back.sentence
    assert "but for CPUs that its guest cannot have on line (gave back" in back.sentence
    assert "Operation not permitted" in back.sentence
    assert (domain.bound_mib, domain.quota, domain.cap, domain.intent) == (512.0, None, None, "")
    last = host.journal.changes[-1]
    assert (last.cores_before, last.cores_after) == (2.0, 0.0), "nobody is told of CPUs that it did not have"


@pytest.mark.parametrize("why", ["8 requests are under way; ask again", "the domain has 1 vCPUs instead of 4"])
async def test_a_release_keeps_a_vm_whose_cpus_have_not_come_back_though_its_guest_could_have_them(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.state, domain.vcpus, domain.online, domain.vcpu_seconds = "running", 4, {0, 1, 2, 3}, [0.0] * 4
    body: dict[str, Any] = {"request_id": "adopt", "domain": "old-web", "name": "web"}
    assert (await command("POST", "/v1/adoptions", body)).state == "done"
    await until(lambda: host.vms["web"].link.connected)
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 512.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/web/target", body)).state == "done"
    assert domain.online == {0}

    async def not_plugged(domain: str, count: int) -> str:
        return why

    guest_call = world._guest_call

    async def busy(d: Domain, method: str, params: dict[str, Any]) -> dict[str, Any]:
        return (
            {"error": {"code": -32000, "message": why}} if method == "cpus.set" else await guest_call(d, method, params)
        )

    with monkeypatch.context() as patch:
        if "vCPUs" in why:
            domain.vcpus = 1  # as ACPI unplug leaves it
            patch.setattr(world, "_do_set_vcpus", not_plugged)
        else:
            patch.setattr(world, "_guest_call", busy)
        back = await release(command)
    assert (back.state, domain.intent != "") == ("partial", True), back.sentence
    assert why in back.sentence
    assert (await release(command, "again")).state == "done"
    assert (domain.online, domain.intent) == ({0, 1, 2, 3}, "")


async def test_a_release_that_failed_and_could_not_be_written_is_not_carried_out_later(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await adopted(command, world)
    domain, vm = world.domains["old-web"], agent.host.vms["web"]
    await reclaim(command, cpu_cores=0.5)

    async def busy(domain: str, before: Before) -> None:
        world.failures["write_intent"] = "busy"
        raise HypervisorError("the domain is busy")

    monkeypatch.setattr(agent.host.hypervisor.adoption, "give_back", busy)
    failed = await release(command)
    assert (failed.state, failed.sentence) == ("failed", "the domain is busy")
    assert vm.intent.was is None
    await agent.close()
    world.failures.clear()
    assert Intent.model_validate_json(domain.intent).was is not None
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("release", 10)
        assert ended is not None
        assert ended.state == "failed", ended.sentence
        await until(lambda: successor.host.vms["web"].intent.was is None)
        assert Intent.model_validate_json(domain.intent).adopted is not None


@pytest.mark.parametrize("while_stopped", [False, True], ids=["admitting", "stopped on command"])
async def test_a_domain_that_we_have_paused_runs_when_its_owner_has_it_back(
    command: Command, host: Host, world: World, while_stopped: bool
) -> None:
    await adopted(command, world)
    domain, vm = world.domains["old-web"], host.vms["web"]
    if while_stopped:
        await command("POST", "/v1/vms/web/stop", {"request_id": "stop", "limit_s": 2.0})
        high = low_vm("high", priority="fixed", minimum={}, nominal={"cpu_cores": 2.0, "memory_mib": 3000.0})
        assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": high})).state == "done"
    else:
        domain.state = "stopped"
        await until(lambda: not vm.running)
        domain.boot_mib = domain.balloon_mib = 9000.0
    domain.state = "running"
    await until(lambda: domain.state == "paused" and not vm.lock.locked())
    back = await release(command)
    assert back.state == "done", back.sentence
    assert (domain.state, domain.quota, domain.intent) == ("running", None, "")
    assert "web" not in host.vms


async def test_a_release_that_was_cut_off_by_a_kill_gives_all_back_first(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    assert (await sold(command, 1.0, 400.0)).state == "done"
    await agent.close()
    # As a kill right after the first write of a release would leave it: what is to be given is committed already.
    intent = Intent.model_validate_json(domain.intent)
    assert intent.cause is not None
    size = Vector(cpu_cores=1.0, memory_mib=512.0)
    body = {"request_id": "release", "deadline_s": 20.0, "name": "web"}
    cause = intent.cause.model_copy(update={"kind": "release", "request_id": "release", "body": body})
    spec = intent.spec.model_copy(update={"nominal": size})
    half = intent.changed(was=intent.spec, spec=spec, target=size, committed=size, cause=cause, phase=Phase.REINFLATING)
    domain.intent = half.model_dump_json()
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: not successor.host.vms, limit_s=40)
        assert (domain.bound_mib, domain.intent) == (512.0, "")
        ended = await successor.requests.operations.get("release", 10)
        assert ended is not None
        assert ended.state == "done", ended.sentence


async def test_a_release_that_had_ended_short_is_not_carried_out_by_the_next_agent(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    await agent.close()
    intent = Intent.model_validate_json(domain.intent)
    assert intent.cause is not None
    body = {"request_id": "release", "deadline_s": 20.0, "name": "web"}
    cause = intent.cause.model_copy(update={"kind": "release", "request_id": "release", "body": body})
    domain.intent = intent.changed(cause=cause).model_dump_json()
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("release", 10)
        assert ended is not None
        assert (ended.state, "was not given back" in ended.sentence) == ("partial", True)
        assert list(successor.host.vms) == ["web"]


async def test_what_a_domain_uses_says_what_it_should_keep_and_leaves_it_as_it_was(
    client: Client, agent: Agent, world: World
) -> None:
    agent.adoptions.window_s = 0.2
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.state, domain.stats_period_s, domain.used_mib, domain.cache_mib = "running", 0, 150.0, 0.0
    domain.idle = True
    found = Adoptable.model_validate_json(await (await client.get("/v1/adoptions?domain=old-web")).text())
    assert (found.why_not, found.size.memory_mib, found.used.memory_mib) == ("", 512.0, 150.0)
    assert found.minimum == PartialVector(cpu_cores=0.1, memory_mib=246.0)
    periods = [call for call in world.calls if call[0] == "ask_statistics"]
    assert (len(periods), domain.stats_period_s, domain.intent) == (2, 0, "")

    # Without a balloon nobody says what memory it uses: that is not none.
    domain.stats_period_s = None
    found = Adoptable.model_validate_json(await (await client.get("/v1/adoptions?domain=old-web")).text())
    assert (found.used.memory_mib, found.minimum.memory_mib, found.minimum.cpu_cores) == (None, None, 0.1)
    assert "it has no balloon" in found.sentence
    domain.why_not = "its memory is locked"
    found = Adoptable.model_validate_json(await (await client.get("/v1/adoptions?domain=old-web")).text())
    assert found.sentence == "old-web cannot be adopted: its memory is locked"
    response = await client.get("/v1/adoptions?domain=nobody")
    assert (response.status, (await response.json())["field"]) == (404, "domain")


@pytest.mark.parametrize("by_s", [60.0, -60.0])
async def test_a_clock_that_is_set_while_a_domain_is_measured_changes_no_figure(
    agent: Agent, world: World, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    agent.adoptions.window_s = 1.0
    await world.create("old-web", "")
    domain, wall = world.domains["old-web"], time.time
    domain.state, domain.stats_period_s, domain.used_mib, domain.cache_mib = "running", 1, 150.0, 0.0
    domain.idle = True
    measuring = asyncio.create_task(agent.adoptions.adoptable("old-web"))
    await until(lambda: world.calls.count(("read", "old-web")) >= 2)
    monkeypatch.setattr(time, "time", lambda: wall() + by_s)
    domain.vcpu_seconds[0] += 1.0
    used = (await measuring).used
    assert used.memory_mib == 150.0
    assert used.cpu_cores is not None
    assert 0.1 < used.cpu_cores <= 1.0


async def test_a_domain_that_is_adopted_while_it_is_measured_keeps_its_statistics(
    client: Client, command: Command, agent: Agent, world: World
) -> None:
    agent.adoptions.window_s = 0.5
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.state, domain.stats_period_s = "running", 0
    measuring = asyncio.create_task(client.get("/v1/adoptions?domain=old-web"))
    await until(lambda: domain.stats_period_s == 1)
    await command("POST", "/v1/adoptions", {"request_id": "adopt", "domain": "old-web", "name": "web"})
    assert (await measuring).status == 200
    assert domain.stats_period_s == 1
    again = Adoptable.model_validate_json(await (await client.get("/v1/adoptions?domain=old-web")).text())
    assert again.why_not == "old-web is adopted already"


async def test_a_domain_that_is_adopted_while_it_is_measured_gets_its_owners_statistics_back(
    client: Client, command: Command, agent: Agent, host: Host, world: World
) -> None:
    agent.adoptions.window_s = 60.0
    await world.create("old-web", "")
    domain = world.domains["old-web"]
    domain.state, domain.stats_period_s = "running", 5
    long = asyncio.create_task(agent.adoptions.adoptable("old-web"))
    # When it has looked once more it knows how long it measures.
    await until(lambda: world.calls.count(("read", "old-web")) >= 3)
    agent.adoptions.window_s = 0.1
    assert (await client.get("/v1/adoptions?domain=old-web")).status == 200
    assert domain.stats_period_s == 1, "another measurement goes on"
    await command("POST", "/v1/adoptions", {"request_id": "adopt", "domain": "old-web", "name": "web"})
    adopted = host.vms["web"].intent.adopted
    assert adopted is not None
    assert adopted.stats_period_s == 5
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    assert domain.stats_period_s == 1
    assert (await release(command)).state == "done"
    assert (await client.get("/v1/adoptions?domain=old-web")).status == 200
    assert domain.stats_period_s == 5, "nothing of the earlier measurements is left"


async def test_the_next_agent_tells_of_no_start_that_there_was_not(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    domain.state = "stopped"
    await until(lambda: not agent.host.vms["web"].running)
    domain.state = "running"
    await until(lambda: agent.host.vms["web"].running)
    before = [(change.cause, change.cores_after) for change in agent.host.journal.changes]
    assert [cores for _, cores in before] == [1.0, 0.0, 1.0]
    await agent.close()
    async with succeeding(world, tmp_path) as successor:
        assert await successor.requests.operations.get("adopt", 10) is not None
        assert [(change.cause, change.cores_after) for change in successor.host.journal.changes] == before


async def test_what_was_taken_from_a_domain_that_its_owner_has_paused_is_not_forgotten(
    client: Client, command: Command, host: Host, world: World
) -> None:
    await adopted(command, world)
    domain = world.domains["old-web"]
    await reclaim(command, cpu_cores=0.5)
    domain.state = "paused"
    await until(lambda: host.vms["web"].paused)
    failed = await release(command)
    assert failed.state == "failed"
    assert "another program has paused web" in failed.sentence
    assert domain.intent, "it is still looked after"
    domain.state = "running"
    await until(lambda: host.vms["web"].running)
    assert (await release(command, "again")).state == "done"
    assert (domain.quota, domain.intent) == (None, "")


@pytest.mark.parametrize("what", ["adoption", "release"])
async def test_what_came_about_is_not_answered_as_failed_since_it_cannot_be_told(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: object) -> None:
        raise JournalError("no space left on device")

    if what == "release":
        assert (await adopted(command, world)).state == "done"
    with monkeypatch.context() as disk:
        disk.setattr(host.journal, "add", full)
        if what == "release":
            done = await command("POST", "/v1/vms/web/release", {"request_id": "release"})
        else:
            done = await adopted(command, world)
    domain = world.domains["old-web"]
    assert done.state == "done", done.sentence
    assert (domain.state, domain.intent == "") == ("running", what == "release")
    assert ("web" in host.vms) is (what == "adoption")
    if what == "adoption":
        await until(lambda: host.vms["web"].link.connected)
