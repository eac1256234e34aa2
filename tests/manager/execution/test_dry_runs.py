"""Dry runs of creations and deletions: what they say is what then happens, and they themselves change nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.plans.reading import UnreadPlan
from cluster_manager.store.rows import StoredPlan
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import DryRunReport
from ebbtide.messages.vms import VMSpec
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """host-a with two VMs of 3 cores and 1000 MiB, full; host-b is smaller and empty."""
    agents = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0), FakeAgent("host-b", cpu_cores=2.0, memory_mib=700.0)
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0) as made:
        for name in ("low-1", "low-2"):
            await made.create(vm(name))
        yield made


async def dry_run_plan(cluster: Cluster, body: Any, **more: Any) -> DryRunReport:
    request = {"request_id": "dry", "vm": body, "dry_run": True, **more}
    status, answer = await cluster.call("POST", "/v1/vms", json=request)
    assert status == 200, answer
    return DryRunReport.model_validate(answer)


async def everything(cluster: Cluster) -> Any:
    """All that a dry run must leave as it is."""
    lists = [await cluster.get(f"/v1/{name}?limit=1000") for name in ("vms", "operations", "events")]
    # Counts reports as well.
    del lists[0]["changes"]
    return lists, [(list(agent.vms.values()), list(agent.arrived)) for agent in cluster.agents]


def sizes(cluster: Cluster, host: int = 0) -> dict[str, Vector]:
    return {name: status.current for name, status in cluster.agents[host].vms.items()}


NEW = [
    vm("high-1", "fixed", cpu_cores=4.0, memory_mib=1200.0),
    vm("high-1", "fixed", cpu_cores=2.5, memory_mib=500.0),
    vm("low-3", cpu_cores=4.0, memory_mib=1000.0),
    vm("tiny", cpu_cores=1.0, memory_mib=400.0),
    vm("high-1", "fixed", cpu_cores=5.5, memory_mib=2000.0),
    vm("high-1", "fixed", cpu_cores=6.0, memory_mib=2250.0),
    vm("low-3", cpu_cores=5.9, memory_mib=2000.0),
    vm("huge", "fixed", cpu_cores=60.0),
]


@pytest.mark.parametrize("body", NEW, ids=lambda b: f"{b['name']}-{b['nominal']['cpu_cores']:g}")
async def test_what_a_creation_would_do_is_what_it_then_does(cluster: Cluster, body: Any) -> None:
    before = await everything(cluster)
    told = await dry_run_plan(cluster, body)
    assert await everything(cluster) == before
    had = {agent.id: {name: status.current for name, status in agent.vms.items()} for agent in cluster.agents}
    real = await cluster.create(body)
    assert told.would == real.state, real.sentence
    assert told.sentence.endswith(real.sentence)
    if told.would == "failed":
        assert (told.host, told.deflated, told.preempted) == (None, (), ())
        return
    assert told.host == real.host
    assert told.hosts[0].id in {agent.id for agent in cluster.agents}
    agent = next(agent for agent in cluster.agents if agent.id == real.host)
    has = {name: status.current for name, status in agent.vms.items() if name in agent.running}
    assert {c.name: c.after for c in (*told.deflated, *told.grown)} == {
        name: has[name] for name, size in had[agent.id].items() if name in has and has[name] != size
    }
    assert {c.name: c.before for c in (*told.deflated, *told.grown)}.items() <= had[agent.id].items()
    assert set(told.preempted) == set(had[agent.id]) - set(has)
    assert bool(told.preempted) == (told.reason is not None)


async def test_hosts_are_told_in_their_order_with_fitness_and_the_need_of_the_first(cluster: Cluster) -> None:
    told = await dry_run_plan(cluster, vm("high-1", "fixed", cpu_cores=1.5, memory_mib=400.0))
    assert {host.id for host in told.hosts} == {"host-a", "host-b"}
    assert [host.fitness for host in told.hosts] == sorted((host.fitness for host in told.hosts), reverse=True)
    assert all(0 < host.fitness <= 1 for host in told.hosts)
    first = await dry_run_plan(cluster, vm("high-1", "fixed", cpu_cores=4.0, memory_mib=1200.0))
    assert [host.id for host in first.hosts] == ["host-a"]
    assert first.need.cpu_cores == 4.0
    assert sum(c.before.cpu_cores - c.after.cpu_cores for c in first.deflated) == pytest.approx(4.0)


async def test_a_silent_or_closed_host_is_not_offered(cluster: Cluster) -> None:
    cluster.agents[0].mode = cluster.agents[1].mode = HostMode.PAUSED
    await cluster.ready()
    told = await dry_run_plan(cluster, vm("tiny", cpu_cores=1.0, memory_mib=400.0))
    assert (told.would, told.hosts) == ("failed", ())
    assert "no host takes new VMs" in told.sentence


async def test_a_name_that_is_taken_is_refused_as_the_creation_would_be(cluster: Cluster) -> None:
    request = {"request_id": "dry", "vm": vm("low-1"), "dry_run": True}
    status, problem = await cluster.call("POST", "/v1/vms", json=request)
    assert (status, problem["field"]) == (409, "vm.name")


async def test_the_request_id_of_a_dry_run_is_not_used_up(cluster: Cluster) -> None:
    await dry_run_plan(cluster, vm("tiny", cpu_cores=1.0, memory_mib=400.0))
    await cluster.create(vm("tiny", cpu_cores=1.0, memory_mib=400.0), "dry")
    assert (await cluster.delete("tiny", "dry-2")).state == "done"


async def test_two_choices_draw_no_lot_that_a_placement_would_have_drawn(tmp_path: Path) -> None:
    async def placed(dry_runs: int) -> list[str | None]:
        agents = [FakeAgent(f"host-{n}", cpu_cores=6.0, memory_mib=2400.0) for n in range(5)]
        path = tmp_path / str(dry_runs)
        path.mkdir()
        async with cluster_of(path, *agents, silent_after_s=60.0, seed=5) as made:
            small: dict[str, Any] = {"cpu_cores": 1.0, "memory_mib": 400.0}
            for _ in range(dry_runs):
                await dry_run_plan(made, vm("new", **small), policy="two-choices")
            return [(await made.create(vm(f"vm-{n}", **small), policy="two-choices")).host for n in range(4)]

    assert await placed(0) == await placed(3)


async def test_who_would_grow_when_a_vm_is_deleted_grows(cluster: Cluster) -> None:
    await cluster.create(vm("high-1", "fixed", cpu_cores=4.0, memory_mib=1200.0))
    before = await everything(cluster)
    status, answer = await cluster.call("DELETE", "/v1/vms/high-1?request_id=d&dry_run=true")
    told = DryRunReport.model_validate(answer)
    assert (status, told.would, told.host) == (200, "done", "host-a")
    assert await everything(cluster) == before
    had = sizes(cluster)
    assert (await cluster.delete("high-1", "d")).state == "done"
    now = sizes(cluster)
    assert {c.name: (c.before, c.after) for c in told.grown} == {n: (had[n], now[n]) for n in now if now[n] != had[n]}
    assert len(told.grown) == 2


async def test_deletions_that_would_be_refused_are_refused(cluster: Cluster) -> None:
    assert (await cluster.call("DELETE", "/v1/vms/nobody?request_id=d&dry_run=true"))[0] == 404
    assert (await cluster.call("DELETE", "/v1/vms/low-1?dry_run=true"))[0] == 400
    assert (await cluster.call("DELETE", "/v1/vms/low-1?request_id=d&dry_run=maybe"))[0] == 400


async def test_a_host_that_does_not_answer_is_said(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0), silent_after_s=0.3) as made:
        await made.create(vm("low-1"))
        made.agents[0].trouble.mute = True

        async def silent() -> bool:
            return bool((await made.get("/v1/hosts/host-a"))["state"] == "silent")

        await until(silent)
        status, told = await made.call("DELETE", "/v1/vms/low-1?request_id=d&dry_run=true")
        assert (status, told["would"]) == (200, "failed")
        assert "host-a does not answer" in told["sentence"]


async def test_the_client_rehearses(cluster: Cluster) -> None:
    async with cluster.client() as client:
        size = Vector(cpu_cores=1.0, memory_mib=400.0)
        assert (await client.dry_run_creation(VMSpec(name="tiny", nominal=size))).would == "done"
        assert (await client.dry_run_deletion("low-1")).kind == "delete"


AGES = [
    ({"low-1": ("stop", 100.0), "low-2": ("stop", 90_000.0)}, "low-1"),
    ({"low-1": ("stop", 90_000.0), "low-2": ("stop", 100.0)}, "low-2"),
    ({"low-1": ("delete", 90_000.0), "low-2": ("stop", 5000.0)}, "low-1"),
    ({"low-1": ("suspend", 90_000.0), "low-2": ("stop", 5000.0)}, "low-1"),
]


@pytest.mark.parametrize(("vms", "goes"), AGES, ids=["young", "old", "deleted", "suspended"])
async def test_those_go_whose_end_costs_least_as_the_plan_has_them_go(
    tmp_path: Path, vms: dict[str, tuple[str, float]], goes: str
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        rigid: Any = {"minimum": {"cpu_cores": 3.0, "memory_mib": 1000.0}}
        for name, (choice, age_s) in vms.items():
            await cluster.create(vm(name, **rigid, on_preemption=choice))
            started_at = time.time() - age_s
            agent.vms[name] = agent.vms[name].model_copy(update={"started_at": started_at})
        await cluster.ready()
        body = vm("high-1", "fixed", cpu_cores=2.0, memory_mib=500.0)
        told = await dry_run_plan(cluster, body)
        real = await cluster.create(body)
        assert real.state == "done", real
        assert set(vms) - set(agent.running) == {goes}
        assert told.preempted == (goes,), told.sentence


async def test_a_deletion_right_after_a_start_waits_for_the_hosts_to_report(cluster: Cluster) -> None:
    await cluster.kill_manager()
    for agent in cluster.agents:
        await agent.die()
    await cluster.start_manager()
    asked = asyncio.create_task(cluster.call("DELETE", "/v1/vms/low-1?request_id=d&dry_run=true"))
    await asyncio.wait({asked}, timeout=0.2)
    for agent in cluster.agents:
        await agent.revive()
    status, told = await asked
    assert (status, told["would"], told["host"]) == (200, "done", "host-a"), told


async def pending(cluster: Cluster, kind: str, body: Any) -> FakeAgent:
    """Ask for a VM, and wait for the command of its placement that does not end; the host of that."""
    for agent in cluster.agents:
        agent.trouble.pend = (kind,)
    assert (await cluster.call("POST", "/v1/vms", json={"request_id": "r", "vm": body}))[0] == 202

    async def has_one() -> bool:
        return any(agent._pending for agent in cluster.agents)

    await until(has_one)
    return next(agent for agent in cluster.agents if agent._pending)


async def test_the_deletion_of_a_vm_that_is_being_placed_would_call_the_placement_off(cluster: Cluster) -> None:
    agent = await pending(cluster, "reclaim", vm("high-1", "fixed", cpu_cores=4.0, memory_mib=1200.0))
    status, told = await cluster.call("DELETE", "/v1/vms/high-1?request_id=d&dry_run=true")
    assert (status, told["would"], told["host"]) == (200, "done", None), told
    assert (await cluster.call("DELETE", "/v1/vms/high-1?request_id=d"))[0] == 202
    agent.end_pending()
    real = await cluster.ended("d")
    assert real.state == "done"
    assert told["sentence"] == f"dry run, nothing is changed: {real.sentence}"
    assert "called off the placement of high-1" in real.sentence


async def test_the_deletion_of_a_vm_that_is_being_started_would_delete_it_there(cluster: Cluster) -> None:
    agent = await pending(cluster, "create", vm("tiny", cpu_cores=1.0, memory_mib=400.0))
    status, told = await cluster.call("DELETE", "/v1/vms/tiny?request_id=d&dry_run=true")
    assert (status, told["would"], told["host"]) == (200, "done", agent.id), told
    assert f"deleted tiny on {agent.id}" in told["sentence"]
    agent.end_pending()
    assert (await cluster.ended("r")).state == "done"


async def test_a_deletion_says_that_a_placement_cannot_be_read_as_the_deletion_itself_does(cluster: Cluster) -> None:
    agent = await pending(cluster, "create", vm("tiny", cpu_cores=1.0, memory_mib=400.0))
    assert cluster.manager is not None
    store = cluster.manager.store
    plan = await store.plan("r")
    assert plan is not None
    known = plan.state
    unread = UnreadPlan(
        id=known.id,
        request_id="r",
        kind="create",
        vm="tiny",
        instruction=known.instruction,
        progress=("it is damaged",),
    )

    async def cannot_read(request_id: str) -> StoredPlan:
        assert plan is not None
        return replace(plan, state=unread)

    store.plan = cannot_read  # type: ignore[method-assign]
    status, problem = await cluster.call("DELETE", "/v1/vms/tiny?request_id=d&dry_run=true")
    assert status == 409, problem
    del store.plan
    agent.end_pending()
    assert (await cluster.ended("r")).state == "done"
