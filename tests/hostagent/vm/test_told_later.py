"""Guests hear of what their VMs were given, also where they do not answer just then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ebbtide.deflation.cascade.reconcile import FIRST_PAUSE_S
from ebbtide.messages.hosts import TemplateInfo
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.vm import resizer
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command, low_vm, succeeding
from tests.hostagent.doing import reclaim
from tests.hostagent.world import Domain, Reply, World
from tests.waiting import until


def times_told(world: World) -> int:
    return sum(method == "application.reinflate" for method, _ in world.guest_calls)


async def test_a_guest_agent_that_was_started_again_just_then_is_told_after_its_hello(
    command: Command, two_vms: list[Domain], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, refused = world._guest_call, 0

    async def started_again(d: Domain, method: str, params: Reply) -> Reply:
        nonlocal refused
        if method == "application.reinflate" and refused < len(two_vms):
            refused += 1
            return {"error": {"code": -32002, "message": "hello first"}}
        return await answer(d, method, params)

    monkeypatch.setattr(world, "_guest_call", started_again)
    await reclaim(command, cpu_cores=3.0, memory_mib=1100.0)
    operation = await command("POST", "/v1/reinflations", {"request_id": "back", "deadline_s": 30.0})
    assert operation.state == "done", operation.sentence
    await until(lambda: times_told(world) == len(two_vms))


@pytest.mark.parametrize("application", ["hang", "refuse"])
async def test_an_application_that_shrank_for_a_deflation_that_took_nothing_hears_that_it_is_undone(
    command: Command, two_vms: list[Domain], world: World, application: str
) -> None:
    domain = two_vms[0]
    # It promises and releases nothing, or is said to refuse because it promises too late, and the guest has nothing
    # else to spare.
    domain.application, domain.used_mib = application, domain.bound_mib - domain.cache_mib - 48.0
    nominal = {"cpu_cores": 3.0, "memory_mib": 1024.0}
    for number, memory_mib, state in ((1, 900.0, "partial"), (2, 1024.0, "done")):
        body = {"request_id": f"t-{number}", "target": {**nominal, "memory_mib": memory_mib}, "deadline_s": 3.0}
        operation = await command("PUT", "/v1/vms/low-1/target", {**body, "generation": number + 1})
        assert (operation.state, operation.vms[0].after.memory_mib) == (state, 1024.0), operation.sentence
    assert times_told(world) == 1


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_application_hears_the_size_that_is_left_after_a_reclaim_that_took_nothing(
    command: Command, two_vms: list[Domain], host: Host, world: World, is_stopped: bool
) -> None:
    for domain in two_vms:
        domain.application, domain.used_mib = "hang", domain.bound_mib - domain.cache_mib - 48.0
    body = {"request_id": "r", "need": {"memory_mib": 1100.0}, "deadline_s": 3.0, "exclude": ["low-2"]}
    asking = asyncio.ensure_future(command("POST", "/v1/reclaims", body))
    await until(lambda: ("application.status", "r") in [(name, id_[:1]) for name, id_ in world.guest_calls])
    if is_stopped:
        host.vms["low-1"].resizer.interrupt("the guest is short of memory")
    operation = await asking
    assert (operation.state, operation.vms[0].after.memory_mib) == ("partial", 1024.0), operation.sentence
    await command("POST", "/v1/reinflations", {"request_id": "back", "deadline_s": 3.0})
    await until(lambda: times_told(world) == 1)
    await host.vms["low-1"].drift_repair.check("")
    assert times_told(world) == 1


async def test_an_application_hears_what_a_deflation_that_fell_short_has_come_to_and_no_more(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Reply] = []
    answer = world._guest_call

    async def noted(d: Domain, method: str, params: Reply) -> Reply:
        said.extend([params] if method == "application.reinflate" else [])
        return await answer(d, method, params)

    monkeypatch.setattr(world, "_guest_call", noted)
    two_vms[0].application = "slow"
    target = {"cpu_cores": 3.0, "memory_mib": 500.0}
    body = {"request_id": "t", "generation": 2, "target": target, "deadline_s": 3.0}
    operation = await command("PUT", "/v1/vms/low-1/target", body)
    reached = operation.vms[0].after
    assert (operation.state, 500.0 < reached.memory_mib < 1024.0) == ("partial", True), operation.sentence
    await until(lambda: bool(said))
    assert said[0]["target"]["memory_mib"] == host.vms["low-1"].intent.committed.memory_mib == reached.memory_mib
    assert said[0]["bound_mib"] == reached.memory_mib


async def test_an_application_that_brought_a_deflation_to_its_end_is_told_nothing(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    assert (await reclaim(command, memory_mib=1100.0)).state == "done"
    for vm in host.vms.values():
        await vm.drift_repair.check("")
    assert times_told(world) == 0


async def test_an_application_hears_from_the_next_agent_of_a_growth_that_a_kill_kept_from_it(
    agent: Agent, command: Command, two_vms: list[Domain], world: World, tmp_path: Path
) -> None:
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 1024.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    await agent.close()
    # All was given; the application is told last.
    domain = two_vms[0]
    domain.intent = Intent.model_validate_json(domain.intent).changed(phase=Phase.REINFLATING).model_dump_json()
    assert times_told(world) == 0
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: successor.host.vms["low-1"].intent.phase is Phase.SETTLED)
        assert [id_[:2] for method, id_ in world.guest_calls if method == "application.reinflate"].count("t#") == 1


async def test_an_application_hears_from_the_next_agent_of_a_growth_that_its_guest_could_not_be_told(
    agent: Agent, command: Command, host: Host, two_vms: list[Domain], world: World, tmp_path: Path
) -> None:
    await reclaim(command, memory_mib=1100.0)
    answer = world._guest_call

    async def failing(d: Domain, method: str, params: Reply) -> Reply:
        if method == "application.reinflate":
            return {"error": {"code": -32000, "message": "no thread can be started"}}
        return await answer(d, method, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "_guest_call", failing)
        await command("POST", "/v1/reinflations", {"request_id": "back", "deadline_s": 30.0})
        assert all(vm.intent.phase is Phase.SETTLED and vm.resizer.untold for vm in host.vms.values())
        await agent.close()
    assert times_told(world) == 0
    async with succeeding(world, tmp_path) as successor:
        await until(lambda: times_told(world) == len(two_vms))
        await until(lambda: not any(vm.resizer.untold for vm in successor.host.vms.values()))
        for vm in successor.host.vms.values():
            await vm.drift_repair.check("")
    assert times_told(world) == len(two_vms)


async def test_an_application_of_a_vm_that_was_made_just_now_is_told_nothing(
    two_vms: list[Domain], host: Host, world: World
) -> None:
    for vm in host.vms.values():
        await vm.drift_repair.check("")
    assert times_told(world) == 0


async def test_an_application_of_a_vm_that_was_made_on_a_shared_disk_hears_its_size(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = (TemplateInfo(name="lab", shared_disk=True), TemplateInfo(name="other"))
    monkeypatch.setattr(host.hypervisor, "templates", lambda: shared)
    operation = await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert operation.state == "done", operation.sentence
    await until(lambda: times_told(world) == 1)
    await host.vms["low-1"].drift_repair.check("")
    assert (times_told(world), host.vms["low-1"].resizer.untold) == (1, False)


async def test_an_application_that_is_still_giving_is_not_told_of_an_earlier_growth(
    command: Command, two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = host.vms["low-1"].resizer
    now = asyncio.get_running_loop().time()
    of.untold, of._gives_until = True, now + 3600.0
    await host.vms["low-1"].drift_repair.check("")
    assert times_told(world) == 0
    of._gives_until = now
    await of.tell()
    assert times_told(world) == 1


@pytest.mark.parametrize("answers", [False, True])
async def test_a_guest_that_cannot_be_told_leaves_its_vm_to_an_operation_at_once_and_is_told_ever_more_rarely(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(resizer, "TELL_LIMIT_S", 600.0)
    answer, told = world._guest_call, 0

    async def fails(d: Domain, method: str, params: Reply) -> Reply:
        nonlocal told
        if method != "application.reinflate":
            return await answer(d, method, params)
        told += 1
        return {"error": {"code": -32000, "message": "no"}} if answers else await asyncio.Future()

    monkeypatch.setattr(world, "_guest_call", fails)
    vm = host.vms["low-1"]
    await vm.lock.acquire()
    vm.resizer.untold = True
    telling = asyncio.ensure_future(vm.resizer.tell())
    await until(lambda: told == 1)
    operation = asyncio.ensure_future(vm.lock.acquire())
    await until(lambda: vm.lock.is_wanted)
    async with asyncio.timeout(10.0):
        await telling
    # Nor is it told while one waits.
    vm.resizer.tell_pace.not_before = 0.0
    await vm.resizer.tell()
    vm.lock.release()
    await operation
    monkeypatch.setattr(vm.resizer, "_is_wanted", lambda: False)  # the reconciler waits, too
    assert (told, vm.resizer.untold, vm.resizer.tell_pace.pause_s) == (1, True, 2 * FIRST_PAUSE_S)
    if answers:
        for _ in range(3):
            await vm.resizer.tell()
        assert (told, vm.resizer.tell_pace.pause_s) == (2, 4 * FIRST_PAUSE_S)
    vm.lock.release()


async def test_an_operation_that_comes_as_the_time_to_tell_a_guest_runs_out_is_no_error(
    two_vms: list[Domain], host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizer, "TELL_LIMIT_S", 0.05)
    answer, loop, vm = world._guest_call, asyncio.get_running_loop(), host.vms["low-1"]
    came: list[RuntimeError | None] = []

    def comes() -> None:
        try:
            vm.resizer.give_way()
        except RuntimeError as error:
            came.append(error)
        else:
            came.append(None)

    async def silent(d: Domain, method: str, params: Reply) -> Reply:
        if method != "application.reinflate":
            return await answer(d, method, params)
        limit = vm.resizer._telling
        assert limit is not None
        # Right behind the limit, before what it ends has unwound.
        loop.call_at((limit.when() or 0.0) + 1e-9, comes)
        return await asyncio.Future()

    monkeypatch.setattr(world, "_guest_call", silent)
    async with vm.lock:
        vm.resizer.untold = True
        await vm.resizer.tell()
        await until(lambda: bool(came))
    assert came == [None]


async def test_who_waits_for_nothing_does_not_break_off_what_a_guest_is_told(
    two_vms: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm, gave_way = host.vms["low-1"], 0

    def gives_way() -> None:
        nonlocal gave_way
        gave_way += 1

    async with vm.lock:
        monkeypatch.setattr(vm.lock, "_tell", gives_way)
        async with host.claimed(0.0) as claim:
            assert vm not in claim.vms
        assert gave_way == 0


async def test_a_guest_agent_that_may_have_forgotten_a_growth_is_told_once_more_at_its_next_hello(
    command: Command, two_vms: list[Domain], host: Host, world: World
) -> None:
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 900.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    back = {"request_id": "back", "vms": ["low-1"], "deadline_s": 30.0}
    operation = await command("POST", "/v1/reinflations", back)
    assert operation.state == "done", operation.sentence
    vm, told = host.vms["low-1"], times_told(world)
    assert not vm.resizer.untold, "the first hello was no later one"
    vm.link.hang_up()
    await until(lambda: times_told(world) == told + 1)
    await until(lambda: not vm.resizer.untold)
    await vm.drift_repair.check("")
    assert times_told(world) == told + 1


@pytest.mark.parametrize(
    ("code", "said", "is_final"),
    [
        (-32002, "hello first", False),
        (-32000, "8 requests are under way; ask again", False),
        (-32601, "no method preemption.withdrawn", True),
    ],
)
async def test_a_guest_that_refuses_the_end_of_its_notice_is_told_again_unless_it_knows_of_no_end(
    two_vms: list[Domain],
    host: Host,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    said: str,
    is_final: bool,
) -> None:
    vm, answer = host.vms["low-1"], world._guest_call

    async def refuses(d: Domain, method: str, params: Reply) -> Reply:
        if method == "preemption.withdrawn":
            return {"error": {"code": code, "message": said}}
        return await answer(d, method, params)

    await until(lambda: vm.link.connected)
    async with vm.lock:
        await vm.record.store(told="p")
        with monkeypatch.context() as refusing:
            refusing.setattr(world, "_guest_call", refuses)
            await vm.tell_that_it_stays()
        assert vm.intent.told == ("" if is_final else "p")
    vm.request_check()
    await until(lambda: world.withdrawn == ([] if is_final else ["p"]) and vm.intent.told == "")
