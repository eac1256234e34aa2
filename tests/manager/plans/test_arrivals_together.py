"""Many arrivals for one host: one deflation for all that it can serve, and what one of them frees is not given away."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_manager.plans.plans import Arrival, Create, HostFailed, Plan, Reclaim
from cluster_manager.plans.report_queries import need_together, room_to_share
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.plan_events import OVERHEAD_MIB, chosen, ended, placement, read, report_of, spec_of, status_of
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")

LOW = spec_of("low-1", "deflatable", 6.0, 2000.0)
#: Nothing free but 300 MiB, 5.5 cores and 1700 MiB deflatable.
FULL = report_of("a", status_of(LOW, "a"))
DEFLATABLE = FULL.deflatable.vector()


def arrival(cores: float, mib: float = 100.0, until_s: float = 60.0) -> Arrival:
    return Arrival("new", size := ResourceVector(cores, mib), size, until_s)


def together(*queue: Arrival, cores: float = 1.0, left_s: float = 30.0) -> tuple[ResourceVector, float, int]:
    demand = ResourceVector(cores, 100.0 + OVERHEAD_MIB)
    return need_together(FULL, demand, DEFLATABLE, left_s, queue, now=40.0)


# --- the decision ----------------------------------------------------------------------------------------------------


def test_one_deflation_is_for_the_sum_of_what_a_host_lacks_within_the_shortest_time() -> None:
    assert together() == (ResourceVector(1.0), 30.0, 0)
    need, left_s, others = together(arrival(1.0), arrival(2.0, until_s=50.0))
    assert (need, left_s, others) == (ResourceVector(4.0, 300.0), 10.0, 2), "600 MiB of which 300 are free"


def test_nobody_waits_for_an_arrival_that_deflation_cannot_serve_or_whose_time_is_up() -> None:
    need, left_s, others = together(arrival(1.0), arrival(4.0, until_s=41.0), arrival(1.0, until_s=40.0), arrival(2.0))
    assert (need.cpu_cores, left_s, others) == (4.0, 20.0, 2), "neither the one of 4 cores nor the late one"
    # One that has to preempt takes what there is for itself.
    assert together(arrival(1.0), cores=6.0) == (ResourceVector(5.5), 30.0, 0)


def test_one_with_little_time_left_takes_none_from_the_others() -> None:
    assert together(arrival(1.0, until_s=40.02)) == (ResourceVector(1.0), 30.0, 0)
    assert together(arrival(1.0, until_s=47.4))[1:] == (30.0, 0), "less than a quarter"
    assert together(arrival(1.0, until_s=47.5))[1:] == (7.5, 1)
    # Of a short time a quarter is too little, and one that has as long takes nothing.
    assert together(arrival(1.0, until_s=44.9), left_s=10.0)[1:] == (10.0, 0)
    assert together(arrival(1.0, until_s=42.0), arrival(1.0, until_s=41.9), left_s=2.0)[1:] == (2.0, 1)


def test_vms_do_not_grow_into_what_waiting_arrivals_would_take_again() -> None:
    free = report_of("a", status_of(LOW, "a", Vector(cpu_cores=2.0, memory_mib=1000.0)))
    assert room_to_share(free, (), None) is None
    assert room_to_share(free, (arrival(1.0, 400.0), arrival(2.0)), None) == Vector(cpu_cores=1.0, memory_mib=600.0)
    assert room_to_share(free, (arrival(1.0),), Vector(cpu_cores=0.5)) == Vector(cpu_cores=0.5)
    assert room_to_share(free, (arrival(6.0, 2000.0),), None) == Vector()


def test_who_is_charged_by_now_waits_no_more() -> None:
    there = report_of("a", status_of(LOW, "a", Vector(cpu_cores=2.0, memory_mib=1000.0)))
    came = replace(arrival(4.0, 1000.0), vm="low-1")
    assert room_to_share(there, (came,), None) is None
    assert need_together(FULL, ResourceVector(1.0), DEFLATABLE, 30.0, (came,), now=40.0)[2] == 0


def test_what_is_shared_at_the_end_is_not_kept_for_a_vm_that_is_there_or_does_not_come() -> None:
    at_its_minimum = status_of(spec_of("low-1", "deflatable"), "a", Vector(cpu_cores=0.5, memory_mib=300.0))
    state: Plan = placement(spec_of("high-1"))
    for event in (chosen(), chosen("a"), read("a", at_its_minimum, cpu_cores=3.2)):
        state = state.next_step(event).state
    assert (state.instruction.do, state.reserved) == ("preempt", ResourceVector(3.0, 800.0))
    state = state.next_step(HostFailed(5.0, "a refused", uncertain=False)).state
    assert (state.instruction.do, state.reserved) == ("reinflate", None)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_what_was_too_much_for_several_is_tried_again_for_one_and_counts_as_no_failure_before() -> None:
    waiting = replace(read("a", status_of(LOW, "a")), queue=(arrival(1.0),))
    state = placement(spec_of("high-1", cpu_cores=1.0, memory_mib=200.0)).next_step(chosen("a")).state
    state = state.next_step(waiting).state
    assert isinstance(state.instruction, Reclaim)
    assert (state.instruction.need.cpu_cores, state.instruction.others) == (2.0, 1)
    assert state.progress[-1].endswith("also for 1 that wait for it")
    state = state.next_step(ended("reclaim", OperationState.PARTIAL, shortfall=Vector(cpu_cores=1.5))).state
    half = status_of(LOW, "a", Vector(cpu_cores=5.5, memory_mib=2000.0))
    state = state.next_step(replace(read("a", half), queue=(arrival(1.0),))).state
    assert isinstance(state.instruction, Reclaim)
    assert (state.instruction.need.cpu_cores, state.instruction.others) == (0.5, 0)
    enough = status_of(LOW, "a", Vector(cpu_cores=5.0, memory_mib=2000.0))
    state = state.next_step(ended("reclaim")).state.next_step(read("a", enough)).state
    assert isinstance(state.instruction, Create)


# --- the manager -----------------------------------------------------------------------------------------------------


async def at_once(cluster: Cluster, agent: FakeAgent, held: str, *bodies: object) -> list[OperationState]:
    """Ask for VMs one after the other; the agent ends commands of a kind only when all have been asked for."""
    agent.trouble.pend = (held,)
    asked = []
    for body in bodies:
        asked.append(asyncio.create_task(cluster.create(body, deadline_s=20.0)))
        async with asyncio.timeout(20):
            await agent.polled.wait()
    assert cluster.manager is not None
    availability = cluster.manager.hosts.availability

    async def chose() -> bool:
        return len(availability.queue("host-a", but="")) == len(bodies)

    await until(chose)
    agent.end_pending()
    return [(await one).state for one in asked]


@each_store
async def test_eight_arrivals_at_once_are_two_deflations_and_none_is_undone(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=16.0, memory_mib=8000.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for number in range(4):
            await cluster.create(vm(f"low-{number}", cpu_cores=4.0))
        states = await at_once(cluster, agent, "reclaim", *(vm(f"high-{n}", "fixed", 1.0, 200.0) for n in range(8)))
        assert set(states) == {OperationState.DONE}
        # The first one's, which was alone, and one for the seven others.
        assert [kind for kind, _ in agent.done if kind != "create"] == ["reclaim", "reclaim"]
        assert sum(one.current.cpu_cores for one in agent.vms.values()) == 16.0


@each_store
async def test_what_is_at_work_on_a_vm_and_who_waits_for_its_host_is_explained(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=4.0, memory_mib=2000.0)
    async with cluster_of(tmp_path, agent) as cluster:

        async def told() -> list[str]:
            return list((await cluster.get("/v1/vms/low-1/explain"))["plans"])

        await cluster.create(vm("low-1", cpu_cores=4.0))
        assert await told() == []
        agent.trouble.pend = ("reclaim", "stop")
        asked = [asyncio.create_task(cluster.create(vm("high-1", "fixed", 1.0, 200.0), deadline_s=20.0))]
        async with asyncio.timeout(20):
            await agent.polled.wait()
        takes = (
            "create create-high-1 (of high-1) takes 1 cores from the low-priority VMs of host-a: this one among them"
        )
        assert await told() == [takes]
        asked.append(asyncio.create_task(cluster.create(vm("high-2", "fixed", 1.0, 200.0), deadline_s=20.0)))
        stop = {"request_id": "stop", "limit_s": 5.0}
        assert (await cluster.call("POST", "/v1/vms/low-1/stop", json=stop))[0] == 202

        async def waiting() -> bool:
            return len(await told()) == 3

        await until(waiting)
        assert sorted(await told()) == [
            takes,
            "create create-high-2 (of high-2) waits for host-a",
            "stop stop waits for host-a",
        ]
        agent.end_pending()
        assert {(await one).state for one in asked} == {OperationState.DONE}
        await cluster.ended("stop")
        assert await told() == []


@each_store
async def test_what_a_preemption_frees_beyond_the_need_is_kept_for_the_next_arrival(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=8.0, memory_mib=4000.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name, cpu_cores=4.0, minimum={"cpu_cores": 3.0, "memory_mib": 300.0}))
        bodies = (vm("high-1", "fixed", 3.0, 400.0), vm("high-2", "fixed", 2.0, 400.0))
        assert set(await at_once(cluster, agent, "reclaim", *bodies)) == {OperationState.DONE}
        assert len(await cluster.events("preempted")) == 1
        kinds = [kind for kind, _ in agent.done if kind != "create"]
        # The one that stays grew by nothing that it would have had to give back.
        assert kinds == ["reclaim", "stop", "reinflate"]
        assert {"high-1", "high-2"} < agent.running


@each_store
async def test_a_fixed_vm_that_arrives_together_with_a_low_priority_one_waits_until_that_can_be_deflated(
    tmp_path: Path,
) -> None:
    agent = FakeAgent("host-a", cpu_cores=4.0, memory_mib=2000.0)
    async with cluster_of(tmp_path, agent) as cluster:
        states = await at_once(cluster, agent, "create", vm("low-1", cpu_cores=4.0), vm("high-1", "fixed", 3.0, 500.0))
        assert states == [OperationState.DONE, OperationState.DONE]
        assert (agent.cores("low-1"), agent.cores("high-1")) == (1.0, 3.0)
