"""Placing and deleting VMs over real HTTP: best fit, deflation, next host, preemption, reinflation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ebbtide.deflation.modes import HostMode
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


def host(name: str, cpu_cores: float = 6.0, memory_mib: float = 2400.0) -> FakeAgent:
    return FakeAgent(name, cpu_cores=cpu_cores, memory_mib=memory_mib)


async def test_a_vm_that_fits_is_started_without_touching_anybody(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        operation = await cluster.create(vm("low-1"))
        assert operation.state is OperationState.DONE, operation
        assert operation.host == "host-a"
        assert agent.done == [("create", "low-1")]
        found = await cluster.get("/v1/vms/low-1")
        assert (found["state"], found["host"], found["current"]["cpu_cores"]) == ("running", "host-a", 3.0)


async def test_the_host_whose_shape_fits_best_is_chosen(tmp_path: Path) -> None:
    much_cpu, much_memory = host("host-a", 12.0, 1200.0), host("host-b", 2.0, 8000.0)
    async with cluster_of(tmp_path, much_cpu, much_memory) as cluster:
        assert (await cluster.create(vm("cpu", cpu_cores=2.0, memory_mib=300.0))).host == "host-a"
        assert (await cluster.create(vm("memory", cpu_cores=0.5, memory_mib=1000.0))).host == "host-b"


async def test_first_fit_takes_the_first_host_that_fits(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, host("host-a", 2.0, 8000.0), host("host-b", 12.0, 1200.0)) as cluster:
        body = vm("cpu", cpu_cores=2.0, memory_mib=300.0)
        assert (await cluster.create(body, policy="first-fit")).host == "host-a"


async def test_low_priority_vms_shrink_in_proportion_for_a_fixed_one(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        assert operation.state is OperationState.DONE, operation
        assert (agent.cores("low-1"), agent.cores("low-2"), agent.cores("high-1")) == (1.5, 1.5, 3.0)
        # 2400 less three overheads of 100 and 800 for the new one leaves 1300 for two.
        assert (agent.memory("low-1"), agent.memory("low-2")) == (650.0, 650.0)
        assert [outcome.name for outcome in operation.vms] == ["low-1", "low-2"]
        assert all(outcome.ledger for outcome in operation.vms)
        assert agent.free().is_zero()
        assert not await cluster.events("preempted")
        assert {row["vm"] for row in await cluster.events("deflated")} == {"low-1", "low-2"}
        assert all("for high-1" in row["sentence"] for row in await cluster.events("deflated"))


async def test_the_need_is_what_nominal_and_overhead_exceed_what_is_free(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a", 6.0, 2500.0)) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(vm("low-2"))
        await cluster.create(vm("high-1", "fixed", 2.0, 500.0))
        (need,) = [body["need"] for body in agent.bodies if body["kind"] == "reclaim"]
        assert need == {"cpu_cores": 2.0, "memory_mib": 300.0, "disk_mib_s": 0.0, "network_mib_s": 0.0}


async def test_a_host_is_read_once_between_two_commands(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a", 6.0, 2500.0)) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(vm("low-2"))
        before = agent.reads
        placed = await cluster.create(vm("high-1", "fixed", 2.0, 500.0))
        assert placed.state is OperationState.DONE
        assert agent.arrived[-2:] == ["reclaim", "create"]
        # Before the reclaim, before the start, and after it.
        assert agent.reads - before == 3


async def test_deleting_a_vm_reinflates_the_others(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        operation = await cluster.delete("high-1")
        assert operation.state is OperationState.DONE
        assert {outcome.name for outcome in operation.vms} == {"low-1", "low-2"}
        assert (agent.cores("low-1"), agent.memory("low-1")) == (3.0, 1000.0)
        assert (await cluster.call("GET", "/v1/vms/high-1"))[0] == 404
        assert await cluster.events("deleted")
        assert (await cluster.create(vm("high-1", "fixed", 3.0, 800.0), "again")).state is OperationState.DONE


async def test_a_shortfall_is_undone_and_the_next_host_is_tried(tmp_path: Path) -> None:
    first, second = host("host-a"), host("host-b", 12.0, 4800.0)
    async with cluster_of(tmp_path, first, second) as cluster:
        for name in ("low-1", "low-2"):
            assert (await cluster.create(vm(name), policy="first-fit")).host == "host-a"
        first.trouble.gives = {"low-2": 0.3}
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 800.0), policy="first-fit")
        assert (operation.state, operation.host) == (OperationState.DONE, "host-b"), operation
        assert [kind for kind, _ in first.done] == ["create", "create", "reclaim", "reinflate"]
        assert (first.cores("low-1"), first.memory("low-1"), first.memory("low-2")) == (3.0, 1000.0, 1000.0)
        assert "hypervisor (the balloon is stuck)" in " ".join(operation.progress)
        assert await cluster.events("undone")


async def test_a_start_that_fails_is_cleaned_up_and_the_next_host_is_tried(tmp_path: Path) -> None:
    first, second = host("host-a"), host("host-b")
    async with cluster_of(tmp_path, first, second) as cluster:
        first.trouble.fails = {"create": "the guest does not boot"}
        operation = await cluster.create(vm("low-1"), policy="first-fit")
        assert (operation.state, operation.host) == (OperationState.DONE, "host-b")
        assert first.vms == {}


async def test_at_most_three_hosts_are_acted_on(tmp_path: Path) -> None:
    agents = [host(f"host-{letter}") for letter in "abcde"]
    async with cluster_of(tmp_path, *agents) as cluster:
        for agent in agents:
            agent.trouble.fails = {"create": "the guest does not boot"}
        operation = await cluster.create(vm("low-1"))
        assert operation.state is OperationState.FAILED
        assert [len(agent.arrived) > 0 for agent in agents] == [True, True, True, False, False]


async def test_a_low_priority_vm_is_refused_rather_than_preempting(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        operation = await cluster.create(vm("low-3", cpu_cores=5.5, memory_mib=500.0))
        assert operation.state is OperationState.FAILED
        assert "low-3" in operation.sentence
        assert "preempts no other" in operation.sentence
        assert set(agent.vms) == {"low-1", "low-2"}
        assert agent.cores("low-1") == 3.0
        found = await cluster.get("/v1/vms/low-3")
        assert (found["state"], found["host"]) == ("failed", None)
        # The name is free again: nothing of it is anywhere.
        assert (await cluster.create(vm("low-3", cpu_cores=1.0, memory_mib=400.0), "again")).host == "host-a"


async def test_only_below_the_minimum_is_a_vm_preempted_and_the_reason_is_kept(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        operation = await cluster.create(vm("high-1", "fixed", 5.3, 800.0))
        assert operation.state is OperationState.DONE, operation
        (gone,) = {"low-1", "low-2"} - agent.running
        assert "high-1" in agent.running
        assert agent.reasons == {gone: "minimum"}
        (event,) = await cluster.events("preempted")
        assert (event["vm"], event["host"]) == (gone, "host-a")
        assert "reason minimum" in event["sentence"]
        found = await cluster.get(f"/v1/vms/{gone}")
        assert (found["state"], found["host"], found["preempted"]["reason"]) == ("preempted", "host-a", "minimum")
        assert agent.done[-3:] == [("stop", gone), ("create", "high-1"), ("reinflate", "")], "and its disk is there"
        # What its memory freed beyond the need went back to the one that stayed.
        (stayed,) = agent.running - {"high-1"}
        assert agent.memory(stayed) == 1000.0


async def test_a_layer_that_fails_on_the_only_host_is_a_shortfall_with_its_name(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        agent.trouble.gives = {"low-2": 0.2}
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        assert operation.state is OperationState.DONE, operation
        assert agent.reasons == {"low-2": "shortfall"}
        (event,) = await cluster.events("preempting")
        assert "layer hypervisor (the balloon is stuck)" in event["sentence"]
        assert agent.running == {"low-1", "high-1"}


async def test_fixed_vms_are_never_preempted(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        await cluster.create(vm("high-1", "fixed", 5.0, 1000.0))
        operation = await cluster.create(vm("high-2", "fixed", 5.0, 1000.0))
        assert operation.state is OperationState.FAILED
        assert set(agent.vms) == {"high-1"}


async def test_a_preemption_that_would_not_help_is_not_begun(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        await cluster.create(vm("low-1"))
        operation = await cluster.create(vm("high-1", "fixed", 7.0, 500.0))
        assert operation.state is OperationState.FAILED
        assert agent.done == [("create", "low-1")]
        assert "no ready host" in operation.sentence


async def test_two_placements_at_once_do_not_count_the_same_room(tmp_path: Path) -> None:
    first, second = host("host-a", 4.0, 1500.0), host("host-b", 4.0, 1500.0)
    async with cluster_of(tmp_path, first, second) as cluster:
        names = [f"high-{number}" for number in range(4)]
        ended = await asyncio.gather(*(cluster.create(vm(name, "fixed", 3.0, 1000.0)) for name in names))
        assert sorted(operation.state for operation in ended) == ["done", "done", "failed", "failed"]
        assert len(first.vms) == len(second.vms) == 1


async def test_a_silent_host_gets_no_vm_and_keeps_its_own(tmp_path: Path) -> None:
    first, second = host("host-a"), host("host-b")
    async with cluster_of(tmp_path, first, second) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        await first.die()

        async def silent() -> bool:
            return bool((await cluster.get("/v1/hosts/host-a"))["state"] == "silent")

        await until(silent)
        assert (await cluster.create(vm("low-2"), policy="first-fit")).host == "host-b"
        found = await cluster.get("/v1/vms/low-1")
        assert (found["state"], found["host"]) == ("running", "host-a")
        assert (await cluster.get("/v1/hosts/host-a"))["vms"] == ["low-1"]
        status, problem = await cluster.call(
            "PUT",
            "/v1/vms/low-1/target",
            json={"request_id": "t", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}},
        )
        assert status == 503
        assert "silent" in problem["detail"]


async def test_where_the_first_host_stays_busy_the_next_one_is_deflated_before_one_is_preempted(tmp_path: Path) -> None:
    first, second = host("host-a", memory_mib=4000.0), host("host-b", memory_mib=4000.0)
    async with cluster_of(tmp_path, first, second) as cluster:
        for name in ("low-1", "low-2", "low-3", "low-4"):
            first.mode = HostMode.ACTIVE if name < "low-3" else HostMode.DRAINING
            await first.send_report()
            await cluster.create(vm(name, memory_mib=600.0), policy="first-fit")
        first.mode = HostMode.ACTIVE
        await first.send_report()
        assert cluster.manager is not None
        locks = cluster.manager.hosts.locks
        assert await locks.hold("another plan", "host-a")
        # The minimums of two leave too little of 6 cores, that of one leaves enough.
        operation = await cluster.create(vm("high-1", "fixed", 5.3, 600.0), policy="first-fit", deadline_s=1.0)
        locks.release("another plan")
        assert (operation.state, operation.host) == (OperationState.DONE, "host-b"), operation
        assert [kind for kind, _ in second.done if kind != "create"] == ["reclaim", "stop", "reinflate"]
        (stop,) = [body for body in second.bodies if body["kind"] == "stop"]
        assert stop["limit_s"] > 0
        assert len(await cluster.events("preempted")) == 1


async def test_a_target_is_passed_on_to_the_agent(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a")) as cluster:
        await cluster.create(vm("low-1"))
        body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 1.5, "memory_mib": 500.0}}
        status, _ = await cluster.call("PUT", "/v1/vms/low-1/target", json=body)
        assert status == 202
        assert (await cluster.ended("t")).state is OperationState.DONE
        assert (agent.cores("low-1"), agent.memory("low-1")) == (1.5, 500.0)
        assert (await cluster.get("/v1/vms/low-1"))["generation"] == 2


@pytest.mark.parametrize("trouble", ["mute", "never_ends"])
async def test_a_reclaim_that_gets_no_answer_is_given_up_and_owed(tmp_path: Path, trouble: str) -> None:
    first, second = host("host-a"), host("host-b", 12.0, 4800.0)
    async with cluster_of(tmp_path, first, second) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name), policy="first-fit")
        if trouble == "mute":
            # The reclaim is carried out, and then nothing is heard any more.
            first.trouble.hangs_at = len(first.arrived) + 1
        else:
            first.trouble.never_ends = True
        request = {"request_id": "c", "vm": vm("high-1", "fixed", 3.0, 800.0), "deadline_s": 1.0}
        status, _ = await cluster.call("POST", "/v1/vms", json={**request, "policy": "first-fit"})
        assert status == 202
        if trouble == "mute":
            await first.hanging.wait()
            first.trouble.mute = True
        operation = await cluster.ended("c")
        assert (operation.state, operation.host) == (OperationState.DONE, "host-b"), operation
        await first.die()
        await first.revive()

        async def reinflated() -> bool:
            return first.done[-1][0] == "reinflate" and first.memory("low-1") == 1000.0

        await until(reinflated)


async def test_a_start_without_an_answer_is_not_repeated_elsewhere_and_removed_later(tmp_path: Path) -> None:
    first, second = host("host-a"), host("host-b")
    async with cluster_of(tmp_path, first, second) as cluster:
        first.trouble.hangs_at = 1
        status, _ = await cluster.call(
            "POST", "/v1/vms", json={"request_id": "c", "vm": vm("low-1"), "policy": "first-fit"}
        )
        assert status == 202
        await first.hanging.wait()
        first.trouble.mute = True
        operation = await cluster.ended("c")
        assert operation.state is OperationState.FAILED
        assert "as soon as the host answers" in operation.sentence
        assert second.arrived == []
        status, _ = await cluster.call("POST", "/v1/vms", json={"request_id": "d", "vm": vm("low-1")})
        assert status == 409
        await first.die()
        await first.revive()

        async def gone() -> bool:
            return (await cluster.call("GET", "/v1/vms/low-1"))[0] == 404

        await until(gone)
        assert first.vms == {}


async def test_room_that_a_running_plan_has_chosen_counts_as_taken(tmp_path: Path) -> None:
    first, second = host("host-a", 4.0, 1500.0), host("host-b", 4.0, 1500.0)
    async with cluster_of(tmp_path, first, second) as cluster:
        first.trouble.hangs_at, first.trouble.carries_out = 1, False
        body = {"request_id": "r", "vm": vm("one"), "policy": "first-fit"}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        await first.hanging.wait()
        # host-a still shows all its room, and its plan is under way: nobody waits for it.
        assert (await cluster.create(vm("two"), policy="first-fit")).host == "host-b"
        assert first.arrived == ["create"]


async def test_room_that_is_being_read_for_one_placement_is_not_chosen_for_another(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, host("host-a"), host("host-b")) as cluster:
        assert cluster.manager is not None
        executor = cluster.manager.operations._executor
        assert executor is not None
        read, reading, answer = executor._agents.host, asyncio.Event(), asyncio.Event()

        async def slow(name: str, retry: bool = True) -> object:
            if name == "host-a":
                reading.set()
                await answer.wait()
            return await read(name, retry)

        executor._agents.host = slow  # type: ignore[method-assign, assignment]
        request = {"request_id": "first", "vm": vm("low-1", cpu_cores=4.0), "policy": "first-fit"}
        assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202
        await reading.wait()
        second = await cluster.create(vm("low-2", cpu_cores=4.0), policy="first-fit")
        assert (second.state, second.host) == (OperationState.DONE, "host-b"), second
        answer.set()
        assert (await cluster.ended("first")).host == "host-a"
