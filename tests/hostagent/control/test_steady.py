"""Steady mode of a host: idle memory is trimmed to a reserve, and given back as soon as it is missed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation import trimming
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.sharing.reserve import REFILL_S
from ebbtide.messages.commands import SteadyCommand
from hostagent.control import reconciler, steady
from hostagent.control.steady import Steady
from hostagent.state.intents import Phase, Request
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, plan_all
from hostagent.vm.managed_vm import ManagedVM
from tests.hostagent.agent_process import OVERHEAD_MIB
from tests.hostagent.conftest import Client, Command, low_vm, make_agent
from tests.hostagent.control.test_pressure import press
from tests.hostagent.doing import host_idle, reclaim
from tests.hostagent.world import Domain, World
from tests.waiting import until


@pytest.fixture(autouse=True)
def trimmers(monkeypatch: pytest.MonkeyPatch) -> list[trimming.Trimmer]:
    """Looks and steps come a hundred times as often: sockets cannot run in faked time."""
    monkeypatch.setattr(steady, "LOOK_S", 0.1)
    terms = replace(trimming.USUAL, step_s=0.1, rest_s=1.0, again_s=0.0, least_mib=4.0)
    made: list[trimming.Trimmer] = []

    def trimmer() -> trimming.Trimmer:
        made.append(trimming.Trimmer(terms))
        return made[-1]

    monkeypatch.setattr(steady, "Trimmer", trimmer)
    return made


@pytest.fixture
def idle_vms(two_vms: list[Domain]) -> list[Domain]:
    """low-1 and low-2 of 1024 MiB, nearly all of it available, whose guests count their faults."""
    for domain in two_vms:
        domain.cache_mib = 0.0
        domain.major_faults = domain.stalled_us = 0
    return two_vms


async def setting(client: Client, status: int = 200, **body: Any) -> Any:
    response = await client.put("/v1/steady", json=body)
    answer = await response.json()
    assert response.status == status, answer
    return answer


def free_and(host: Host, more: float) -> float:
    return host.free().memory_mib + more


async def test_it_is_off_until_an_operator_turns_it_on_and_then_memory_that_lies_idle_makes_the_reserve(
    client: Client, host: Host, idle_vms: list[Domain]
) -> None:
    wanted = free_and(host, 160.0)
    assert (await (await client.get("/v1/steady")).json())["enabled"] is False
    await asyncio.sleep(0.5)
    assert {domain.bound_mib for domain in idle_vms} == {1024.0}
    said = await setting(client, enabled=True, reserve_mib=wanted)
    assert (said["enabled"], said["reserve_mib"], said["kept_mib"]) == (True, wanted, wanted)
    await until(lambda: host.free().memory_mib >= wanted)
    await host_idle(host)
    assert wanted <= host.free().memory_mib <= wanted + 32
    assert all(1024 - 120 < domain.bound_mib < 1024 for domain in idle_vms), "both have given"
    assert host.report().reserve_mib == wanted


async def test_what_it_did_is_explained_in_one_sentence_and_fills_no_history(
    client: Client, host: Host, idle_vms: list[Domain]
) -> None:
    wanted = free_and(host, 200.0)
    await setting(client, enabled=True, reserve_mib=wanted)
    await until(lambda: any("is full" in d.sentence for d in host.history.decisions()))
    explained = await (await client.get("/v1/vms/low-1/explain")).json()
    assert "steady mode has trimmed what lay idle in it" in explained["sentence"]
    assert [row["request_id"][:7] for row in explained["resizes"]] == ["steady-"]
    assert explained["resizes"][0]["outcome"]["ledger"]
    told = [d.sentence for d in host.history.decisions() if d.kind == "steady"]
    assert len(told) == 3, told
    assert told[0].startswith("steady mode is on")
    assert told[1].startswith("idle memory is trimmed")
    assert host.history.made["deflate"] == 0
    assert not host.tallies.whole.resizes, "a step that takes less than its target is no deflation that fell short"
    assert host.steady_taken_mib == pytest.approx(sum(1024 - domain.bound_mib for domain in idle_vms))


async def test_that_it_is_on_is_told_before_what_follows_from_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_agent(world, tmp_path).host
    watching = Steady(host)
    store = watching._store

    async def stored_while_a_round_begins(**fields: Any) -> None:
        await store(**fields)
        await watching._round()

    monkeypatch.setattr(watching, "_store", stored_while_a_round_begins)
    monkeypatch.setattr(trimming.Trimmer, "is_filling", lambda self, free_mib, reserve_mib: True)
    await watching.set(SteadyCommand(enabled=True, reserve_mib=200.0))
    told = [d.sentence for d in host.history.decisions()]
    assert len(told) == 2, told
    assert told[0].startswith("steady mode is on")
    assert told[1].startswith("idle memory is trimmed")


@pytest.mark.parametrize("by", ["off", "host not active"])
async def test_the_time_for_which_it_is_off_says_nothing_of_how_long_a_refill_takes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    host, clock = make_agent(world, tmp_path).host, 0.0
    monkeypatch.setattr(steady, "_now", lambda: clock)
    watching = Steady(host)

    async def round_with(free_mib: float, works: bool) -> None:
        host.memory_available_mib = lambda: host.slice.reserve_mib + free_mib
        if by == "off":
            await watching.set(SteadyCommand(enabled=works, reserve_mib=200.0))
        else:
            await host.modes.set(HostMode.ACTIVE if works else HostMode.PAUSED, "")
        await watching._round()

    await watching.set(SteadyCommand(enabled=True, reserve_mib=200.0))
    await round_with(100.0, works=True)
    await round_with(100.0, works=False)
    clock += 2 * 86_400.0
    await round_with(1000.0, works=True)
    assert watching.status().refill_s == REFILL_S
    # A refill that it does see counts.
    await round_with(100.0, works=True)
    clock += 100.0
    await round_with(1000.0, works=True)
    assert watching.status().refill_s == REFILL_S - 50.0


async def test_a_reserve_that_lacks_too_little_to_be_filled_is_not_taken_for_one_that_is_filled_slowly(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, clock = make_agent(world, tmp_path).host, 0.0
    monkeypatch.setattr(steady, "_now", lambda: clock)
    watching = Steady(host)
    await watching.set(SteadyCommand(enabled=True, reserve_mib=200.0))

    async def round_with(free_mib: float) -> None:
        host.memory_available_mib = lambda: host.slice.reserve_mib + free_mib
        await watching._round()

    for free_mib in (160.0, 160.0, 1000.0):
        await round_with(free_mib)
        clock += 3 * 3600.0
    assert watching.status().refill_s == REFILL_S


async def test_memory_that_is_missed_comes_back_and_the_vm_is_left_alone(
    client: Client, host: Host, idle_vms: list[Domain], trimmers: list[trimming.Trimmer]
) -> None:
    await setting(client, enabled=True, reserve_mib=free_and(host, 200.0))
    await until(lambda: all(domain.bound_mib < 1024 - 60 for domain in idle_vms))
    first, (trimmer,) = idle_vms[0], trimmers
    trimmer.terms = replace(trimmer.terms, rest_s=3600.0)  # it is left alone to the end
    # No pressure yet: the guest's reserve is 48, and a quarter more than that is available.
    first.used_mib = first.bound_mib - 60.0
    trimmed = first.bound_mib
    await until(lambda: first.bound_mib > trimmed)
    assert host.vms["low-1"].pressure.sentence == ""
    assert any(d.vm == "low-1" and "given back" in d.sentence for d in host.history.decisions())
    first.used_mib = 80.0
    given = first.bound_mib
    await until(lambda: host.vms["low-2"].allocation().current.memory_mib < 1024 - 100)
    assert first.bound_mib >= given, "the other one gives meanwhile"


@pytest.mark.slow
async def test_nothing_is_taken_below_a_minimum_nor_of_a_vm_that_may_not_be_trimmed(
    client: Client, command: Command, host: Host, idle_vms: list[Domain]
) -> None:
    given, kept = idle_vms
    body = {"request_id": "s", "spec": low_vm("low-2", steady=False), "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-2/spec", body)).state == "done"
    await setting(client, enabled=True, reserve_mib=1e6)
    await until(lambda: given.bound_mib < 400)
    await asyncio.sleep(1.0)
    assert kept.bound_mib == 1024
    assert given.bound_mib >= 320
    assert given.available_mib >= 3 * 48 - 1


async def test_a_size_that_an_operator_holds_is_neither_trimmed_nor_given_to(
    client: Client, command: Command, host: Host, idle_vms: list[Domain]
) -> None:
    target = {"cpu_cores": 3.0, "memory_mib": 900.0}
    body = {"request_id": "t", "generation": 2, "target": target, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    await setting(client, enabled=True, reserve_mib=free_and(host, 400.0))
    await until(lambda: idle_vms[1].bound_mib < 800)
    assert idle_vms[0].bound_mib == 900
    assert host.vms["low-1"].status().held


async def test_a_reclaim_does_not_wait_for_a_step_and_its_room_is_not_counted_twice(
    client: Client, command: Command, host: Host, idle_vms: list[Domain]
) -> None:
    await setting(client, enabled=True, reserve_mib=1e6)
    await until(lambda: host.free().memory_mib > 100)
    before = host.free().memory_mib
    operation = await reclaim(command, memory_mib=500.0)
    assert operation.state == "done", operation.sentence
    assert host.free().memory_mib >= before + 500 - 1
    assert all(domain.bound_mib >= 320 for domain in idle_vms)


async def test_a_vm_that_is_paused_until_there_is_room_keeps_no_other_from_being_trimmed(
    client: Client, host: Host, idle_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_room(host: Host, vm: ManagedVM) -> bool:
        return False

    monkeypatch.setattr(reconciler, "admit", without_room)
    waits, domain = host.vms["low-1"], idle_vms[0]
    async with waits.lock:
        domain.state = "paused"
        await waits.record.store(phase=Phase.ADMITTING)
    await until(lambda: not waits.running)
    await setting(client, enabled=True, reserve_mib=free_and(host, 160.0))
    await until(lambda: idle_vms[1].bound_mib < 1024)
    assert (waits.intent.phase, domain.bound_mib) == (Phase.ADMITTING, 1024)


@pytest.mark.parametrize("mode", ["paused", "draining", "off"])
async def test_it_waits_in_every_mode_but_active(
    client: Client, command: Command, host: Host, idle_vms: list[Domain], mode: str
) -> None:
    assert (await command("PUT", "/v1/mode", {"request_id": "m", "mode": mode})).state == "done"
    said = await setting(client, enabled=True, reserve_mib=free_and(host, 300.0))
    assert said["kept_mib"] == 0
    assert said["sentence"].startswith("steady mode waits")
    await asyncio.sleep(0.5)
    assert {domain.bound_mib for domain in idle_vms} == {1024.0}
    assert (await command("PUT", "/v1/mode", {"request_id": "a", "mode": "active"})).state == "done"
    await until(lambda: all(domain.bound_mib < 1024 for domain in idle_vms))


async def test_the_reserve_is_learned_from_arrivals_and_outlives_the_agent(
    client: Client, command: Command, host: Host, world: World, tmp_path: Path
) -> None:
    await asyncio.sleep(0.3)
    for number in range(2):
        vm = low_vm(f"vm-{number}", nominal={"cpu_cores": 1.0, "memory_mib": 512.0}, minimum={})
        assert (await command("POST", "/v1/vms", {"request_id": f"c-{number}", "vm": vm})).state == "done"
    await until(lambda: len(host.journal.steady.arrivals) == 2)
    assert {mib for _, mib in host.journal.steady.arrivals} == {512.0 + OVERHEAD_MIB}
    said = await setting(client, enabled=True)
    assert said["learned_mib"] == 2 * (512.0 + OVERHEAD_MIB)
    await until(lambda: host.reserve_mib > 0)
    again = Journal(host.journal._state_path.parent)
    assert again.steady == host.journal.steady
    # An agent that starts takes the VMs that it finds for none that have arrived.
    successor = make_agent(world, tmp_path)
    assert Steady(successor.host).status().learned_mib == said["learned_mib"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"enabled": "yes"}, "enabled"),
        ({"reserve_mib": -1.0}, "reserve_mib"),
        ({"reserve_mib": "much"}, "reserve_mib"),
        ({"more": 1}, "more"),
    ],
)
async def test_a_malformed_setting_changes_nothing(
    client: Client, host: Host, body: dict[str, Any], field: str
) -> None:
    await setting(client, enabled=True, reserve_mib=100.0)
    assert (await setting(client, status=400, **body))["field"].startswith(field)
    assert (host.journal.steady.enabled, host.journal.steady.reserve_mib) == (True, 100.0)
    assert (await setting(client, reserve_mib="auto"))["enabled"] is True
    assert host.journal.steady.reserve_mib is None


async def test_a_step_takes_only_what_the_guest_can_spare_and_asks_no_application(
    client: Client, host: Host, idle_vms: list[Domain], world: World
) -> None:
    world.has_swap = True
    for domain in idle_vms:
        domain.applications = {"cache": 300.0}
        domain.cache_mib = 300.0
    await setting(client, enabled=True, reserve_mib=1e6)
    await until(lambda: all(domain.bound_mib < 900 for domain in idle_vms))
    assert [call for call, _ in world.guest_calls if call == "application.deflate"] == []
    assert all(domain.limit_mib is None for domain in idle_vms)
    assert all(domain.cache_mib == 300.0 for domain in idle_vms)
    assert all(vm.intent.phase in (Phase.SETTLED, Phase.DEFLATING) for vm in host.vms.values())


async def test_a_step_that_has_not_begun_to_take_gives_way_to_an_operation_that_waits_already(
    client: Client, host: Host, idle_vms: list[Domain]
) -> None:
    vm = host.vms["low-1"]
    async with vm.lock:
        waits = asyncio.create_task(vm.lock.acquire())
        await until(lambda: vm.lock.is_wanted)
        target = vm.allocation().current.with_component("memory_mib", 900.0)
        plan_all(host, {"low-1": target}, Request("steady-1", "reinflate", {"gently": True}, 0.0))
        outcome = await host.resize_one(vm, 20.0)
    assert "an operation waits for the VM" in outcome.sentence
    assert idle_vms[0].bound_mib == 1024
    await waits
    assert not vm.lock.is_wanted
    vm.lock.release()


async def test_two_settings_at_once_are_both_kept(client: Client, host: Host) -> None:
    await asyncio.gather(setting(client, enabled=True), setting(client, reserve_mib=64.0))
    assert (host.journal.steady.enabled, host.journal.steady.reserve_mib) == (True, 64.0)


async def test_what_a_reclaim_frees_is_given_to_nobody_until_whoever_it_is_for_can_be_charged(
    client: Client, host: Host, idle_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, slow = idle_vms
    slow.application = "hang"
    await setting(client, enabled=True, reserve_mib=0.0)
    body = {"request_id": "r", "need": {"memory_mib": 800.0}, "deadline_s": 3.0}
    assert (await client.post("/v1/reclaims", json=body)).status == 202
    await until(lambda: first.bound_mib < 1024 and host.vms["low-1"].intent.phase is Phase.SETTLED)
    freed, first.used_mib = first.bound_mib, first.bound_mib - 60.0  # missed, and no pressure yet
    await until(lambda: not host.reclaims)
    assert first.bound_mib == freed
    await asyncio.sleep(0.5)
    assert first.bound_mib == freed
    monkeypatch.setattr(steady, "SPOKEN_FOR_S", 0.0)
    await until(lambda: first.bound_mib > freed)


async def test_a_harvest_vm_whose_budget_was_revoked_is_given_nothing_back(
    client: Client, command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "SPOKEN_FOR_S", 0.0)
    sizes = {"minimum": {"memory_mib": 512.0}, "ceiling": {"cpu_cores": 3.0, "memory_mib": 1024.0}}
    vm = low_vm("spare", priority="harvest", **sizes)
    assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": vm})).state == "done"
    await until(lambda: host.vms["spare"].link.connected)
    domain = world.domains["ebb-host-a.spare"]
    domain.cache_mib, domain.major_faults, domain.stalled_us = 0.0, 0, 0
    assert (await reclaim(command, memory_mib=400.0)).state == "done"
    await setting(client, enabled=True, reserve_mib=0.0)
    freed, domain.used_mib = domain.bound_mib, domain.bound_mib - 60.0
    await asyncio.sleep(0.8)
    assert domain.bound_mib == freed
    assert host.vms["spare"].pressure.sentence == ""


async def test_what_a_vm_under_pressure_wants_is_not_given_to_another_one_that_misses_memory(
    client: Client, command: Command, host: Host, idle_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later(*of_whom: Any) -> None:
        """The response waits for those that are to give first."""

    monkeypatch.setattr(steady, "SPOKEN_FOR_S", 0.0)
    monkeypatch.setattr(reconciler, "respond_to_pressure_of", later)
    assert (await reclaim(command, memory_mib=800.0)).state == "done"
    host.memory_available_mib = lambda: host.slice.reserve_mib + 300.0
    misses, pressed = idle_vms
    press(pressed)
    await until(lambda: host.vms["low-2"].pressure.wants.memory_mib == 400.0)
    await setting(client, enabled=True, reserve_mib=0.0)
    freed, misses.used_mib = misses.bound_mib, misses.bound_mib - 60.0
    await asyncio.sleep(0.8)
    assert misses.bound_mib == freed


async def test_while_an_operation_keeps_trimming_waiting_it_is_named_and_its_time_says_nothing_of_a_refill(
    client: Client, host: Host, idle_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, moves, watching = 0.0, host.vms["low-1"], Steady(host)
    monkeypatch.setattr(steady, "_now", lambda: clock)
    monkeypatch.setattr(trimming.Trimmer, "steps", lambda *of_what: {})
    await setting(client, enabled=True, reserve_mib=200.0)

    async def round_with(free_mib: float, phase: Phase) -> None:
        host.memory_available_mib = lambda: host.slice.reserve_mib + free_mib
        moves.record.intent = moves.intent.changed(phase=phase)
        await watching._round()

    await round_with(100.0, Phase.SETTLED)
    assert "low-1" not in watching.status().sentence
    await round_with(100.0, Phase.LEAVING)
    assert watching.status().sentence.endswith("trimming waits until the operation on low-1 has ended")
    clock += 86_400.0
    await round_with(100.0, Phase.LEAVING)
    clock += 100.0
    await round_with(1000.0, Phase.SETTLED)
    assert watching.status().refill_s == REFILL_S - 50.0


async def test_a_step_of_steady_mode_is_no_operation_that_trimming_waits_for(
    client: Client, host: Host, idle_vms: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    resize = Host.resize

    async def watched(host: Host, members: Any, *rest: Any, **named: Any) -> Any:
        assert any(vm.intent.phase is not Phase.SETTLED for vm in members)
        told.append(watching.status().sentence)
        return await resize(host, members, *rest, **named)

    watching = Steady(host)
    monkeypatch.setattr(Host, "resize", watched)
    await setting(client, enabled=True, reserve_mib=free_and(host, 160.0))
    await until(lambda: bool(told))
    assert "are kept for arrivals" in told[0]
    assert "trimming waits" not in told[0]
