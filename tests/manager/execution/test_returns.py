"""Preempted VMs stand in a queue, and come back to the host of their disk when there is room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster_manager.errors import StoreError
from cluster_manager.execution import instruction_executor, operations
from cluster_manager.plans.returns import Returns
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.return_queue import ReturnPace
from ebbtide.messages.common import EarlierProblem
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import ask, consistent, seen, send
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store", "quick_returns")
MORE = ResourceVector(cpu_cores=0.5)
#: No host is to count as silent because the machine stands still for a moment.
SILENT_S = 10.0


@pytest.fixture
def quick_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = ReturnPace(hold_s=0.2, rest_s=0.2, pause_s=0.2, longest_s=0.4)
    monkeypatch.setattr(operations, "Returns", lambda: Returns(pace))
    monkeypatch.setattr(operations, "SHARE_S", 0.05)


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """One of two low VMs was preempted by a fixed one; the other has its minimum of cores."""
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        assert (await cluster.create(vm("high-1", "fixed", 5.3, 800.0))).state is OperationState.DONE
        yield cluster


def waiting(cluster: Cluster, host: int = 0) -> str:
    (name,) = set(cluster.agents[host].vms) - cluster.agents[host].running
    return name


async def is_back(cluster: Cluster, name: str) -> Any:
    async def runs() -> bool:
        return bool((await cluster.get(f"/v1/vms/{name}"))["state"] == "running")

    await until(runs)
    await cluster.ready()
    return await cluster.get(f"/v1/vms/{name}")


async def test_a_preempted_vm_shows_its_place_and_what_it_waits_for(cluster: Cluster) -> None:
    name = waiting(cluster)
    found = await seen(cluster, name)
    assert (found["state"], found["preempted"]["position"]) == ("preempted", 1)
    # 0.2 cores are free, and the other has nothing above its minimum; of memory there is enough.
    assert found["preempted"]["waits_for"]["cpu_cores"] == pytest.approx(0.3)
    assert found["preempted"]["sentence"] == "1st in line on host-a, waits for 0.3 cores"
    rows = (await cluster.get("/v1/vms?state=preempted"))["vms"]
    assert [row["name"] for row in rows] == [name]


async def test_it_comes_back_where_its_disk_is_when_the_room_is_there_again(cluster: Cluster) -> None:
    name, agent = waiting(cluster), cluster.agents[0]
    await cluster.delete("high-1")
    found = await is_back(cluster, name)
    assert (found["host"], found["preempted"], found["current"]["cpu_cores"]) == ("host-a", None, 3.0)
    assert ("start", name) in agent.done
    assert agent.done.count(("create", name)) == 1, "it is the very same VM"
    (event,) = await cluster.events("returned")
    assert event["vm"] == name
    await consistent(cluster)


async def test_it_comes_back_deflated_where_that_is_all_there_is(cluster: Cluster) -> None:
    name, agent = waiting(cluster), cluster.agents[0]
    agent.capacity = agent.capacity + MORE
    found = await is_back(cluster, name)
    assert 0.5 <= found["current"]["cpu_cores"] <= 0.7
    assert agent.running == {"low-1", "low-2", "high-1"}, "none had to go for it"
    await consistent(cluster)


async def test_a_vm_that_its_owner_has_stopped_or_deleted_does_not_come_back(cluster: Cluster) -> None:
    name = waiting(cluster)
    refused = await ask(cluster, name, "start", request_id="too-early")
    assert refused.state is OperationState.FAILED
    found = await seen(cluster, name)
    assert (found["state"], found["preempted"]["position"]) == ("preempted", 1), "it keeps its place"
    assert (await ask(cluster, name, "stop")).state is OperationState.DONE
    assert (await seen(cluster, name))["state"] == "stopped"
    await cluster.delete("high-1")
    assert cluster.manager is not None
    for _ in range(20):
        await cluster.ready()
        await asyncio.wait([asyncio.create_task(cluster.agents[0].polled.wait())], timeout=0.05)
    assert (await seen(cluster, name))["state"] == "stopped"
    assert (await ask(cluster, name, "start")).state is OperationState.DONE
    assert (await cluster.delete(name)).state is OperationState.DONE


async def test_a_vm_that_waits_to_come_back_and_cannot_be_stopped_keeps_its_place_and_comes_back(
    cluster: Cluster,
) -> None:
    name, agent = waiting(cluster), cluster.agents[0]
    agent.trouble.fails = {"stop": "its disk is busy"}
    assert (await ask(cluster, name, "stop")).state is OperationState.FAILED
    found = await seen(cluster, name)
    assert (found["state"], found["preempted"]["position"]) == ("preempted", 1)
    agent.trouble.fails = {}
    await cluster.delete("high-1")
    assert (await is_back(cluster, name))["current"]["cpu_cores"] == 3.0


async def test_a_vm_that_waits_to_come_back_and_whose_deletion_is_refused_keeps_its_place(cluster: Cluster) -> None:
    name, agent = waiting(cluster), cluster.agents[0]
    agent.trouble.refuses = 403
    assert (await cluster.delete(name)).state is OperationState.FAILED
    agent.trouble.refuses = None
    found = await seen(cluster, name)
    assert (found["state"], found["preempted"]["position"]) == ("preempted", 1)


async def test_a_request_whose_answer_the_store_spoils_is_carried_out_all_the_same(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.manager is not None
    name, store = waiting(cluster), cluster.manager.store
    read, failed = store.preempted, asyncio.Event()

    async def fail_once() -> Any:
        if not failed.is_set():
            failed.set()
            raise StoreError("the store cannot be read")
        return await read()

    monkeypatch.setattr(store, "preempted", fail_once)
    status, _ = await cluster.call("DELETE", f"/v1/vms/{name}?request_id=delete")
    assert (status, failed.is_set()) == (503, True)
    assert (await cluster.ended("delete")).state is OperationState.DONE
    assert name not in cluster.agents[0].vms


@pytest_asyncio.fixture
async def pair(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """As ``cluster`` on host-b, with disks that host-a sees, too, which a fixed VM fills."""
    shared, on_preemption = getattr(request, "param", (True, "stop"))
    hosts = [FakeAgent(name, cpu_cores=6.0, memory_mib=2400.0) for name in ("host-a", "host-b")]
    for host in hosts:
        host.templates = (HostTemplate(name="lab", shared_disk=shared),)
    async with cluster_of(tmp_path, *hosts, silent_after_s=SILENT_S) as cluster:
        await cluster.create(vm("full", "fixed", 6.0, 800.0), policy="first-fit")
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name) | {"on_preemption": on_preemption, "preemption_notice_s": 30.0})
        high = await cluster.create(vm("high-1", "fixed", 5.3, 800.0), deadline_s=60.0)
        assert (high.state, high.host) == (OperationState.DONE, "host-b"), high.sentence
        yield cluster


async def gone_from(agent: FakeAgent, name: str) -> bool:
    return name not in agent.vms


async def test_where_its_host_has_no_room_it_comes_back_on_another_one_that_sees_its_disk(pair: Cluster) -> None:
    name, (first, second) = waiting(pair, 1), pair.agents
    place = (await seen(pair, name))["preempted"]["sentence"]
    assert place == "1st in line on host-b, waits for 0.3 cores there, or for all its room on another host"
    await pair.delete("full")
    found = await is_back(pair, name)
    assert (found["host"], found["current"]["cpu_cores"], found["preempted"]) == ("host-a", 3.0, None)
    assert found["sentence"] == f"{name} is back on host-a after its preemption on host-b"
    assert first.running == {name}
    (event,) = await pair.events("returned")
    assert (event["vm"], event["host"]) == (name, "host-a")
    await until(lambda: gone_from(second, name))
    await consistent(pair)


@pytest.mark.parametrize("pair", [(False, "stop"), (True, "suspend")], indirect=True, ids=["own-disk", "suspended"])
async def test_what_only_its_host_has_it_waits_for_there(pair: Cluster) -> None:
    name = waiting(pair, 1)
    await pair.delete("full")
    for _ in range(20):
        await pair.ready()
        await asyncio.wait([asyncio.create_task(pair.agents[1].polled.wait())], timeout=0.05)
    found = await seen(pair, name)
    assert (found["state"], found["preempted"]["sentence"]) == (
        "preempted",
        "1st in line on host-b, waits for 0.3 cores",
    )


async def test_one_that_does_not_start_elsewhere_keeps_its_place_and_is_tried_again(pair: Cluster) -> None:
    name, (first, second) = waiting(pair, 1), pair.agents
    first.trouble.fails["create"] = "no such disk"
    await pair.delete("full")

    async def tried() -> bool:
        return len([event for event in await pair.events("failed") if event["vm"] == name]) >= 2

    await until(tried)
    assert name not in first.vms
    first.trouble.fails.clear()
    assert (await is_back(pair, name))["host"] == "host-a"
    await until(lambda: gone_from(second, name))
    await consistent(pair)


async def test_a_start_anywhere_that_comes_to_nothing_leaves_it_its_place(pair: Cluster) -> None:
    name = waiting(pair, 1)
    refused = await ask(pair, name, "start", anywhere=True)
    assert refused.state is OperationState.FAILED
    found = await seen(pair, name)
    assert (found["state"], found["preempted"]["position"]) == ("preempted", 1)


async def test_the_oldest_of_those_that_fit_comes_back_first(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=4000.0)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        rigid: Any = {"minimum": {"cpu_cores": 2.0, "memory_mib": 400.0}}
        for name in ("low-1", "low-2", "low-3"):
            await cluster.create(vm(name, cpu_cores=2.0, memory_mib=400.0, **rigid))
        await cluster.create(vm("high-1", "fixed", 2.0, 400.0))
        (first,) = set(agent.vms) - agent.running
        await cluster.create(vm("high-2", "fixed", 2.0, 400.0))
        (second,) = set(agent.vms) - agent.running - {first}
        assert (await seen(cluster, second))["preempted"]["sentence"].startswith("2nd in line on host-a, waits for ")
        await cluster.delete("high-1")
        await is_back(cluster, first)
        assert (await seen(cluster, second))["preempted"]["position"] == 1
        await cluster.delete("high-2")
        await is_back(cluster, second)
        await consistent(cluster)


async def test_two_that_have_to_go_have_their_notice_at_the_same_time(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(vm("low-2") | {"on_preemption": "delete"})
        agent.trouble.pend = ("stop", "delete")
        request = {"request_id": "high", "vm": vm("high-1", "fixed", 6.0, 1200.0), "deadline_s": 60.0}
        assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202

        async def both() -> bool:
            return {"stop", "delete"} <= set(agent.arrived)

        await until(both)
        assert agent.running == {"low-1", "low-2"}, "neither has gone, and both are told"
        agent.end_pending()
        assert (await cluster.ended("high")).state is OperationState.DONE
        assert set(agent.vms) == {"low-1", "high-1"}
        assert {event["vm"] for event in await cluster.events("preempted")} == {"low-1", "low-2"}
        assert (await seen(cluster, "low-1"))["state"] == "preempted"


async def test_a_preemption_is_called_off_when_room_appears_and_the_arrival_takes_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_executor, "WATCH_S", 0.05)
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        agent.trouble.pend = ("stop",)
        request = {"request_id": "high", "vm": vm("high-1", "fixed", 6.0, 1200.0), "deadline_s": 60.0}
        assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202

        async def both() -> bool:
            return agent.arrived.count("stop") == 2

        await until(both)
        # There is room for all.
        agent.capacity = ResourceVector(cpu_cores=16.0, memory_mib=8000.0)
        ended = await cluster.ended("high")
        assert ended.state is OperationState.DONE, ended.sentence
        assert agent.running == {"low-1", "low-2", "high-1"}
        assert {event["vm"] for event in await cluster.events("preemption-withdrawn")} == {"low-1", "low-2"}
        assert await cluster.events("preempted") == []
        await consistent(cluster)


async def test_where_one_cannot_go_the_notice_of_the_other_is_called_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_executor, "WATCH_S", 0.05)
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(vm("low-2") | {"on_preemption": "delete"})
        agent.trouble.pend, agent.trouble.fails = ("stop",), {"delete": "its disk is busy"}
        refused = await cluster.create(vm("high-1", "fixed", 6.0, 1200.0))
        assert refused.state is OperationState.FAILED
        assert "low-2 could not be stopped: its disk is busy" in refused.sentence
        assert agent.running == {"low-1", "low-2"}
        (event,) = await cluster.events("preemption-withdrawn")
        assert (event["vm"], "low-2 cannot go" in event["sentence"]) == ("low-1", True)
        await consistent(cluster)


async def test_a_suspended_vm_is_shown_so_and_comes_back_with_the_memory_that_was_saved(tmp_path: Path) -> None:
    async with cluster_of(
        tmp_path, FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0), silent_after_s=SILENT_S
    ) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name) | {"on_preemption": "suspend"})
        assert (await cluster.create(vm("high-1", "fixed", 5.3, 800.0))).state is OperationState.DONE
        name, agent = waiting(cluster), cluster.agents[0]
        found = await seen(cluster, name)
        assert (found["state"], found["saved_mib"], found["preempted"]["position"]) == ("preempted", 100.0, 1)
        saved = agent.vms[name].start_size
        assert saved is not None
        for verb, more in (("migrate", {}), ("start", {"anywhere": True})):
            status, answer = await send(cluster, name, verb, **more)
            assert (status, answer["field"]) == (409, "lose_disk")
            assert "on host-a alone and stays behind" in answer["detail"]
        await cluster.delete("high-1")
        back = await is_back(cluster, name)
        assert (back["saved_mib"], back["preempted"]) == (None, None)
        assert agent.done.count(("create", name)) == 1
        assert agent.vms[name].current.memory_mib >= saved.memory_mib


async def test_a_vm_that_does_not_come_up_keeps_its_place_and_is_tried_again(cluster: Cluster) -> None:
    name, agent = waiting(cluster), cluster.agents[0]
    agent.trouble.fails = {"start": "its disk is locked"}
    await cluster.delete("high-1")

    async def tried_twice() -> bool:
        said = [row for row in await cluster.events("failed") if "its disk is locked" in row["sentence"]]
        return len(said) > 1

    await until(tried_twice)
    agent.trouble.fails = {}
    assert (await is_back(cluster, name))["host"] == "host-a"


async def test_a_removal_that_is_refused_again_and_again_keeps_no_other_and_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a VM whose process the kernel cannot end."""
    monkeypatch.setattr(operations, "RETRY_S", 0.2)
    agent = FakeAgent("host-a", cpu_cores=7.0, memory_mib=3400.0)
    carry_out = agent._carry_out

    async def stuck(command: Any, kind: Any, name: str, work: Any, problem: Any = None) -> Any:
        refusal = EarlierProblem(error="it does not end", field=None)
        return await carry_out(command, kind, name, work, refusal if (kind, name) == ("delete", "gone-1") else problem)

    monkeypatch.setattr(agent, "_carry_out", stuck)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        for name in ("gone-1", "gone-2"):
            await cluster.create(vm(name, "fixed", 0.5, 300.0))
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        assert (await cluster.create(vm("high-1", "fixed", 5.3, 800.0))).state is OperationState.DONE
        name = waiting(cluster)
        await agent.die()
        for gone in ("gone-1", "gone-2"):
            assert (await cluster.delete(gone)).state is OperationState.FAILED
        await agent.revive()
        await until(lambda: gone_from(agent, "gone-2"))
        assert "gone-1" in agent.vms
        await cluster.delete("high-1")
        assert (await is_back(cluster, name))["host"] == "host-a"


@pytest.mark.parametrize("forgets", [False, True], ids=["agent-remembers", "agent-forgets"])
@pytest.mark.parametrize("carried_out", [False, True], ids=["command-lost", "answer-lost"])
@pytest.mark.parametrize("command", [1, 2], ids=["reclaim", "start"])
async def test_a_manager_killed_while_a_vm_comes_back_loses_nothing(
    cluster: Cluster, command: int, carried_out: bool, forgets: bool
) -> None:
    name, agent = waiting(cluster), cluster.agents[0]
    agent.trouble.hangs_at, agent.trouble.carries_out = len(agent.arrived) + command, carried_out
    agent.capacity = agent.capacity + MORE
    async with asyncio.timeout(10):
        await agent.hanging.wait()
    await cluster.kill_manager()
    agent.trouble.hangs_at = None
    if forgets:
        agent.forget()
    await cluster.start_manager()
    await is_back(cluster, name)
    assert agent.running == {"low-1", "low-2", "high-1"}
    assert [kind for kind, vm in agent.done if vm == name and kind in ("create", "delete")] == ["create"]
    await consistent(cluster)


async def test_a_host_that_was_lost_during_a_preemption_says_that_the_vm_runs(tmp_path: Path) -> None:
    """Its place in the queue is no reason to start it twice, nor to show it as off."""
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        # The reclaim goes through; the victim's stop is not carried out.
        agent.trouble.hangs_at, agent.trouble.carries_out = len(agent.arrived) + 2, False
        body = {"request_id": "high", "vm": vm("high-1", "fixed", 5.3, 800.0), "deadline_s": 3.0}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(10):
            await agent.hanging.wait()
        await agent.die()
        assert (await cluster.ended("high")).state is OperationState.FAILED
        agent.trouble.hangs_at = None
        await agent.revive()
        for name in ("low-1", "low-2"):
            await is_back(cluster, name)

        async def settled() -> bool:
            assert cluster.manager is not None
            rows = await cluster.manager.store.vms()
            return {row.name for row in rows if row.phase == "running"} == {"low-1", "low-2"}

        await until(settled)
        assert agent.running == {"low-1", "low-2"}
        status, _ = await send(cluster, "low-1", "stop")
        assert status == 202


async def test_a_preemption_whose_answer_was_lost_is_told_and_counted_once_its_host_says_that_the_vm_is_off(
    tmp_path: Path,
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, silent_after_s=SILENT_S) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        # The reclaim goes through; the victim's stop is carried out, and its answer lost.
        agent.trouble.hangs_at = len(agent.arrived) + 2
        body = {"request_id": "high", "vm": vm("high-1", "fixed", 5.3, 800.0), "deadline_s": 3.0}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(10):
            await agent.hanging.wait()
        agent.trouble.mute = True
        assert (await cluster.ended("high")).state is OperationState.FAILED
        assert not await cluster.events("preempted")
        name = waiting(cluster)
        # It would not fit, and is written down all the same.
        agent.capacity = ResourceVector(cpu_cores=0.6, memory_mib=2400.0)
        agent.trouble.mute, agent.trouble.hangs_at = False, None

        async def told() -> bool:
            return bool(await cluster.events("preempted"))

        await until(told)
        first = await seen(cluster, name)
        assert (first["state"], first["preempted"]["position"]) == ("preempted", 1)
        agent.capacity = ResourceVector(cpu_cores=6.0, memory_mib=2400.0)
        await is_back(cluster, name)
        assert [event["vm"] for event in await cluster.events("preempted")] == [name]
        assert cluster.manager is not None
        assert sum(cluster.manager.operations.totals.preempted.values()) == 1
