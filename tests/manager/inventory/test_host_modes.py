"""Modes of hosts as the manager sees them: where it places, what it waits with, what it writes down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ebbtide.deflation.modes import HostMode
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    agents = [FakeAgent(host, cpu_cores=6.0, memory_mib=2400.0) for host in ("host-a", "host-b")]
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0) as made:
        yield made


async def set_mode(cluster: Cluster, host: int, mode: HostMode, reason: str = "") -> None:
    agent = cluster.agents[host]
    agent.mode, agent.mode_reason = mode, reason
    await agent.send_report()


@pytest.mark.parametrize("mode", [HostMode.PAUSED, HostMode.DRAINING, HostMode.OFF])
async def test_no_vm_is_placed_on_a_host_that_is_not_active(cluster: Cluster, mode: HostMode) -> None:
    await set_mode(cluster, 0, mode)
    for name in ("low-1", "low-2"):
        operation = await cluster.create(vm(name, cpu_cores=2.0, memory_mib=600.0))
        assert operation.state is OperationState.DONE, operation.sentence
    assert cluster.agents[0].arrived == []
    assert set(cluster.agents[1].vms) == {"low-1", "low-2"}


async def test_where_no_host_is_active_the_refusal_names_each_and_its_mode(cluster: Cluster) -> None:
    await set_mode(cluster, 0, HostMode.PAUSED)
    await set_mode(cluster, 1, HostMode.DRAINING)
    operation = await cluster.create(vm("high-1", "fixed"))
    assert operation.state is OperationState.FAILED
    assert "no host takes new VMs (host-a is paused, host-b is draining)" in operation.sentence
    assert [agent.arrived for agent in cluster.agents] == [[], []]


async def test_nobody_is_preempted_on_a_host_that_is_not_active(cluster: Cluster) -> None:
    for name in ("low-1", "low-2"):
        assert (await cluster.create(vm(name))).state is OperationState.DONE
    for host in (0, 1):
        await set_mode(cluster, host, HostMode.PAUSED)
    before = [dict(agent.vms) for agent in cluster.agents]
    operation = await cluster.create(vm("high-1", "fixed", cpu_cores=6.0, memory_mib=2000.0))
    assert operation.state is OperationState.FAILED
    assert [dict(agent.vms) for agent in cluster.agents] == before


async def test_a_host_that_is_paused_between_the_choice_and_the_start_is_left_for_the_next(cluster: Cluster) -> None:
    # Nobody reports: the manager chooses by what it heard last, the host says it is paused when it is read.
    chosen = cluster.agents[0]
    chosen.manager = None
    chosen.mode, chosen.mode_reason = HostMode.PAUSED, "new disks"
    operation = await cluster.create(vm("low-1"))
    assert operation.state is OperationState.DONE
    assert list(cluster.agents[1].vms) == ["low-1"]
    assert any("host-a is paused" in said for said in operation.progress)


async def test_hosts_show_their_mode_and_each_change_is_an_event(cluster: Cluster) -> None:
    await set_mode(cluster, 0, HostMode.PAUSED, "new disks")
    await set_mode(cluster, 0, HostMode.PAUSED, "new disks")
    hosts = {row["id"]: row for row in (await cluster.get("/v1/hosts"))["hosts"]}
    assert (hosts["host-a"]["mode"], hosts["host-a"]["mode_reason"]) == ("paused", "new disks")
    assert hosts["host-b"]["mode"] == "active"
    await set_mode(cluster, 0, HostMode.ACTIVE)
    sentences = [row["sentence"] for row in reversed(await cluster.events("mode"))]
    assert sentences == ["host-a is paused (new disks), was active", "host-a is active, was paused"]


async def test_an_owed_reinflation_waits_until_the_host_lets_its_vms_grow(cluster: Cluster) -> None:
    agent = cluster.agents[0]
    await set_mode(cluster, 1, HostMode.DRAINING)
    for name in ("low-1", "low-2"):
        await cluster.create(vm(name, cpu_cores=3.0, memory_mib=1000.0))
    await set_mode(cluster, 0, HostMode.PAUSED)
    agent.trouble.fails = {"reinflate": "host-a is paused"}
    operation = await cluster.delete("low-2")
    assert operation.state is OperationState.DONE
    assert "its VMs were not reinflated" in operation.sentence
    agent.trouble.fails = {}
    asked = agent.arrived.count("reinflate")
    for _ in range(5):
        await agent.send_report()
    assert agent.arrived.count("reinflate") == asked
    await set_mode(cluster, 0, HostMode.ACTIVE)

    async def reinflated() -> bool:
        await agent.send_report()
        return agent.arrived.count("reinflate") > asked

    await until(reinflated)
