"""Guests that cannot be deflated yet: other hosts come first, then they are waited for, and only then preempted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    AwaitGuests,
    Create,
    Finish,
    HostBack,
    HostRead,
    Note,
    Preempt,
    ReadHost,
    Reclaim,
    Step,
)
from cluster_manager.plans.reclaim_steps import make_room
from cluster_manager.plans.report_queries import still_silent
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import NotYetDeflatable, VMStatus
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.outcomes import outcome_of
from tests.manager.plan_events import chosen, ended, placement, report_of, spec_of, status_of
from tests.waiting import until

LOW_1, LOW_2 = spec_of("low-1", "deflatable", 3.0, 1000.0), spec_of("low-2", "deflatable", 3.0, 1000.0)
HIGH = spec_of("high-1")
BOOTING = NotYetDeflatable(memory_mib=700.0, in_s=6.0, why="booting")


def booting(found: VMStatus, soon: NotYetDeflatable | None = BOOTING) -> VMStatus:
    return found.model_copy(update={"not_yet": soon, "guest_connected": soon is None})


#: Two VMs of 3 cores fill a host of 6 cores and 2400 MiB.
SILENT = (booting(status_of(LOW_1, "a")), booting(status_of(LOW_2, "a")))
ANSWERING = (status_of(LOW_1, "a"), status_of(LOW_2, "a"))
SHRUNK = tuple(one.model_copy(update={"current": Vector(cpu_cores=1.5, memory_mib=650.0)}) for one in ANSWERING)
SENTENCE = "high-1 waits up to 30 s on a for low-1, low-2, which are booting"


def read(*vms: VMStatus, at: float = 0.0) -> HostRead:
    sold = {spec.name: spec for spec in (LOW_1, LOW_2)}
    return HostRead(at, report_of("a", *vms), frozenset(one.name for one in vms), sold)


def state_of(step: Step) -> PlacementPlan:
    assert isinstance(step.state, PlacementPlan)
    return step.state


def at_host(*hosts: str) -> PlacementPlan:
    return state_of(placement(HIGH).next_step(chosen(*hosts or ("a",))))


def test_guests_that_boot_are_waited_for_and_then_deflated() -> None:
    step = at_host().next_step(read(*SILENT))
    assert step.state.instruction == AwaitGuests(host="a", vms=("low-1", "low-2"), until_s=30.0)
    (note,) = step.effects
    assert note == Note("waiting", "high-1", "a", SENTENCE)
    state = state_of(step).next_step(HostBack(7.0)).state
    assert isinstance(state.instruction, ReadHost)
    state = state.next_step(read(*ANSWERING, at=7.0)).state
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.deadline_s == 53.0
    state = state.next_step(ended("reclaim", at=9.0)).state.next_step(read(*SHRUNK, at=9.0)).state
    assert isinstance(state.instruction, Create)
    state = state.next_step(ended("create", at=9.0)).state
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.DONE
    assert state.instruction.sentence.endswith("having waited 7 s for low-1, low-2")


def test_the_wait_is_told_once_however_often_the_host_is_read() -> None:
    state, told = at_host(), []
    for at in (0.0, 3.0, 6.0):
        step = state.next_step(read(*SILENT, at=at))
        told += [effect for effect in step.effects if isinstance(effect, Note)]
        assert isinstance(step.state.instruction, AwaitGuests)
        state = state_of(state_of(step).next_step(HostBack(at + 3.0)))
    assert len(told) == 1
    assert [line for line in state.progress if "waits" in line] == [SENTENCE]


def test_what_the_others_can_give_now_is_not_waited_for() -> None:
    small = report_of("a", SILENT[0], ANSWERING[1], memory_mib=2800.0)
    state = at_host().next_step(HostRead(0.0, small)).state
    assert isinstance(state.instruction, Reclaim)


def test_a_host_where_it_probably_takes_too_long_is_left_for_the_next_one() -> None:
    slow = [booting(one, BOOTING.model_copy(update={"in_s": 100.0})) for one in SILENT]
    state = at_host("a", "b").next_step(read(*slow)).state
    assert state.instruction == ReadHost(host="b")
    assert isinstance(at_host("a").next_step(read(*slow)).state.instruction, AwaitGuests)


def preempting(at: float) -> PlacementPlan:
    """A plan that has waited in vain until then, and looks where preemption would do."""
    state = state_of(at_host().next_step(read(*SILENT)))
    state = state_of(state_of(state.next_step(HostBack(at))).next_step(read(*SILENT, at=at)))
    assert state.purpose == "preempt"
    return state_of(state.next_step(chosen("a", at=at)))


def test_an_agent_that_never_comes_is_preempted_when_its_notice_begins_and_not_before() -> None:
    state = preempting(30.0)
    # Its CPU can be had without its agent.
    step = state.next_step(read(*SILENT, at=30.0))
    assert isinstance(step.state.instruction, Reclaim)
    assert step.state.instruction.need.memory_mib == 0
    slower = [one.model_copy(update={"current": Vector(cpu_cores=1.5, memory_mib=1000.0)}) for one in SILENT]
    state = state_of(state_of(step).next_step(ended("reclaim", at=31.0)))
    step = state.next_step(read(*slower, at=31.0))
    assert isinstance(step.state.instruction, Preempt)
    assert (step.state.instruction.reason, step.state.instruction.notice_s) == ("shortfall", 30.0)
    (note,) = [effect for effect in step.effects if isinstance(effect, Note)]
    assert "in layer guest (no answer of low-1, low-2, which are booting)" in note.sentence


def test_one_that_answers_after_all_is_deflated_and_nobody_is_preempted() -> None:
    state = preempting(30.0).next_step(read(*ANSWERING, at=30.0)).state
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.need.memory_mib == 700.0


def test_before_a_preemption_for_a_minimum_guests_are_waited_for_too() -> None:
    huge = spec_of("high-1", memory_mib=1800.0)
    state = state_of(placement(huge).next_step(chosen()))
    state = state_of(state.next_step(chosen("a")))
    assert isinstance(state.next_step(read(*SILENT)).state.instruction, AwaitGuests), "fewer may have to go"
    assert isinstance(state.next_step(read(*SILENT, at=31.0)).state.instruction, Reclaim)


def rebooting_in_a_deflation() -> PlacementPlan:
    """A plan whose deflation fell short of low-1, which has begun to reboot."""
    state = state_of(at_host().next_step(read(*ANSWERING)))
    assert isinstance(state.instruction, Reclaim)
    before, target = ResourceVector(3.0, 1000.0), ResourceVector(1.5, 650.0)
    outcomes = (outcome_of("low-1", 2, before, before, target), outcome_of("low-2", 2, before, target, target))
    return state_of(state.next_step(ended("reclaim", OperationState.PARTIAL, at=5.0, vms=outcomes)))


REBOOTING = booting(ANSWERING[0], NotYetDeflatable(memory_mib=700.0, in_s=8.0, why="rebooting"))


def test_a_guest_that_reboots_in_the_middle_of_a_deflation_is_no_shortfall_while_others_have_something() -> None:
    state = rebooting_in_a_deflation().next_step(read(REBOOTING, SHRUNK[1], at=5.0)).state
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.need == Vector(cpu_cores=1.5, memory_mib=350.0)


def test_a_guest_that_reboots_in_the_middle_of_a_deflation_is_waited_for_and_asked_again() -> None:
    least = SHRUNK[1].model_copy(update={"current": Vector(cpu_cores=1.5, memory_mib=300.0)})

    def seen(low_1: VMStatus, at: float) -> HostRead:
        return HostRead(at, report_of("a", low_1, least, memory_mib=2050.0))

    step = rebooting_in_a_deflation().next_step(seen(REBOOTING, 5.0))
    assert isinstance(step.state.instruction, AwaitGuests)
    assert step.state.progress[-1] == "high-1 waits up to 55 s on a for low-1, which is rebooting"
    state = state_of(state_of(state_of(step).next_step(HostBack(12.0))).next_step(seen(ANSWERING[0], 12.0)))
    assert isinstance(state.instruction, Reclaim)


def test_a_low_priority_vm_waits_until_its_deadline_and_preempts_nobody() -> None:
    state = state_of(placement(spec_of("low-3", "deflatable", 3.0, 800.0)).next_step(chosen("a")))
    state = state_of(state.next_step(read(*SILENT)))
    assert state.instruction == AwaitGuests(host="a", vms=("low-1", "low-2"), until_s=60.0)
    state = state_of(state_of(state.next_step(HostBack(60.0))).next_step(read(*SILENT, at=60.0)))
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.FAILED


def test_plans_that_preempt_nobody_say_whose_guest_cannot_be_deflated_yet() -> None:
    why = make_room(at_host(), report_of("a", *SILENT), ResourceVector(3.0, 900.0), 60.0)
    assert why == (
        "a: short of 3 cores, 700 MiB, with 5 cores deflatable; low-1, low-2, which are booting, cannot be deflated yet"
    )


# --- the manager -----------------------------------------------------------------------------------------------------


each_store = pytest.mark.usefixtures("each_store")


def host(name: str, cpu_cores: float = 6.0, memory_mib: float = 2400.0) -> FakeAgent:
    return FakeAgent(name, cpu_cores=cpu_cores, memory_mib=memory_mib)


async def boots(cluster: Cluster, agent: FakeAgent, soon: NotYetDeflatable | None) -> None:
    agent.vms = {name: booting(found, soon) for name, found in agent.vms.items()}
    await agent.send_report()


async def waits(cluster: Cluster, agent: FakeAgent) -> None:
    """Until a fixed VM, asked for as ``high``, waits for two that boot."""
    for name in ("low-1", "low-2"):
        await cluster.create(vm(name))
    await boots(cluster, agent, BOOTING)
    body = {"request_id": "high", "vm": vm("high-1", "fixed", 3.0, 800.0), "deadline_s": 60.0}
    assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202

    async def is_told() -> bool:
        return bool(await cluster.events("waiting"))

    await until(is_told)


def test_guests_are_waited_for_until_one_answers_or_other_room_appears() -> None:
    low_1, low_2 = SILENT
    before, names = report_of("a", low_1, low_2), ("low-1", "low-2")
    assert still_silent(before, before, names)
    assert still_silent(before, report_of("a", low_1, low_2, memory_mib=2300.0), names), "there is less than before"
    assert not still_silent(before, report_of("a", low_1, ANSWERING[1]), names)
    assert not still_silent(before, report_of("a", low_1), names), "one has gone"
    assert not still_silent(before, report_of("a", low_1, low_2, memory_mib=2500.0), names)


@each_store
async def test_two_vms_that_boot_live_and_a_fixed_one_is_placed_as_soon_as_they_answer(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        await waits(cluster, agent)
        under_way = await cluster.get("/v1/operations/high")
        assert "which are booting" in under_way["sentence"]
        assert agent.arrived == ["create", "create"]
        # No plan holds the host meanwhile: others use it.
        size = {"cpu_cores": 2.0, "memory_mib": 1000.0}
        target = {"request_id": "target", "target": size, "generation": 2, "deadline_s": 5.0}
        assert (await cluster.call("PUT", "/v1/vms/low-2/target", json=target))[0] == 202
        assert (await cluster.ended("target")).state is OperationState.DONE
        await boots(cluster, agent, None)
        placed = await cluster.ended("high")
        assert (placed.state, placed.host) == (OperationState.DONE, "host-a"), placed.sentence
        assert "having waited" in placed.sentence
        assert len(await cluster.events("waiting")) == 1
        assert not await cluster.events("preempted")
        assert {"low-1", "low-2", "high-1"} == set(agent.vms)


@each_store
async def test_a_host_where_nobody_has_to_be_waited_for_comes_first(tmp_path: Path) -> None:
    first, second = host("host-a"), host("host-b")
    async with cluster_of(tmp_path, first, second) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name), policy="first-fit")
        first.mode = HostMode.DRAINING
        await first.send_report()
        for name in ("low-3", "low-4"):
            await cluster.create(vm(name), policy="first-fit")
        first.mode = HostMode.ACTIVE
        assert len(first.vms) == len(second.vms) == 2
        await boots(cluster, first, BOOTING)
        placed = await cluster.create(vm("high-1", "fixed", 3.0, 800.0), policy="first-fit")
        assert (placed.state, placed.host) == (OperationState.DONE, "host-b")
        assert not await cluster.events("waiting")


@each_store
async def test_one_whose_agent_never_comes_is_preempted_at_the_deadline_and_not_before(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name, preemption_notice_s=1.0))
        await boots(cluster, agent, BOOTING)
        asked_at = time.time()
        placed = await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        assert placed.state is OperationState.DONE, placed.sentence
        (waiting,) = await cluster.events("waiting")
        (preempting,) = await cluster.events("preempting")
        # 3 s is the deadline, and 1 s of it for the notice; nobody waits for the 6 s until they may have booted.
        assert preempting["at"] - asked_at >= 1.9
        assert waiting["at"] < preempting["at"] < asked_at + 6.0
        assert "reason shortfall" in preempting["sentence"]
        assert "which are booting" in preempting["sentence"]
        assert "high-1" in agent.vms


@each_store
async def test_a_manager_that_is_killed_while_it_waits_goes_on_with_that(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        await waits(cluster, agent)
        await cluster.kill_manager()
        await cluster.start_manager()
        await boots(cluster, agent, None)
        placed = await cluster.ended("high")
        assert placed.state is OperationState.DONE, placed.sentence
        assert not await cluster.events("preempted")
