"""Migrations through the manager's API: whatever fails, the VM runs in one place in the end, or the record says why not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deflation.messages import HostTemplate, OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import runs
from tests.manager.lifecycle import ask, consistent, seen, send, watch_for_two

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("each_store")]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """host-a with two low-priority VMs of 3 cores on its 6, and host-b, which has room for one."""
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=4.0, memory_mib=1500.0)
    async with cluster_of(tmp_path, first, second) as made:
        for name in ("low-1", "low-2"):
            assert (await made.create(vm(name), policy="first-fit")).host == "host-a"
        yield made


async def fill(cluster: Cluster, agent: FakeAgent) -> None:
    """A VM on the agent's host, so that there is no room without a deflation."""
    for other in cluster.agents:
        names = ("lab", "here") if other is agent else ("lab",)
        other.templates = tuple(HostTemplate(name=name) for name in names)
    await cluster.ready()
    made = await cluster.create(vm("low-3", cpu_cores=3.0, memory_mib=900.0, template="here"))
    assert made.host == agent.id


async def test_a_migration_finds_room_first_and_never_runs_two(cluster: Cluster) -> None:
    first, second = cluster.agents
    await fill(cluster, second)
    status, problem = await send(cluster, "low-1", "migrate", host="host-b", request_id="r1")
    assert (status, problem["field"]) == (409, "lose_disk")
    both = watch_for_two(cluster.agents, "low-1")
    moved = await ask(cluster, "low-1", "migrate", host="host-b", lose_disk=True)
    assert moved.state is OperationState.DONE, moved.sentence
    assert moved.sentence == "moved low-1 from host-a to host-b"
    assert both == []
    assert [kind for kind, _ in second.done][-2:] == ["reclaim", "create"]
    assert [kind for kind, name in first.done if name == "low-1"] == ["create", "stop", "delete"]
    await consistent(cluster)
    row = await seen(cluster, "low-1")
    assert (row["state"], row["host"]) == ("running", "host-b")


async def test_a_shared_disk_needs_no_leave_to_be_lost(cluster: Cluster) -> None:
    first, second = cluster.agents
    first.templates = second.templates = (HostTemplate(name="lab", shared_disk=True),)
    await cluster.ready()
    moved = await ask(cluster, "low-1", "migrate")
    assert (moved.state, moved.host) == (OperationState.DONE, "host-b")


@pytest.mark.parametrize(
    ("kind", "sentence"), [("create", "it does not boot"), ("stop", "the guest is stuck")], ids=["start", "stop"]
)
async def test_a_vm_that_cannot_move_runs_where_it_was(cluster: Cluster, kind: str, sentence: str) -> None:
    first, second = cluster.agents
    (second if kind == "create" else first).trouble.fails[kind] = sentence
    failed = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert failed.state is OperationState.FAILED
    assert sentence in failed.sentence
    assert runs(first.vms["low-1"])
    assert "low-1" not in second.vms
    await consistent(cluster)


async def test_a_migration_without_a_place_stops_nothing(cluster: Cluster) -> None:
    first, second = cluster.agents
    await cluster.create(vm("high-1", "fixed", 3.5, 1300.0), policy="best-fit")
    assert "high-1" in second.vms
    failed = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert failed.state is OperationState.FAILED
    assert "stop" not in first.arrived
    assert (await seen(cluster, "low-1"))["state"] == "running"


async def test_a_start_whose_answer_is_lost_is_waited_for_and_not_tried_twice(cluster: Cluster) -> None:
    _, second = cluster.agents
    both = watch_for_two(cluster.agents, "low-1")
    second.trouble.hangs_at = len(second.arrived) + 1
    assert (await send(cluster, "low-1", "migrate", lose_disk=True))[0] == 202
    await second.hanging.wait()
    second.trouble.mute = True

    async def waiting() -> bool:
        progress = (await cluster.get("/v1/operations/migrate-low-1"))["progress"]
        return any("waiting for host-b" in sentence for sentence in progress)

    await cluster.until(waiting)
    assert (await cluster.get("/v1/vms/low-1"))["state"] == "migrating"
    second.trouble.mute, second.trouble.hangs_at = False, None
    moved = await cluster.ended("migrate-low-1")
    assert moved.state is OperationState.DONE, moved.sentence
    assert both == []
    await consistent(cluster)


async def test_a_vm_that_is_off_moves_and_starts_there(cluster: Cluster) -> None:
    _, second = cluster.agents
    await ask(cluster, "low-1", "stop")
    moved = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert moved.state is OperationState.DONE
    assert runs(second.vms["low-1"])
    await consistent(cluster)


async def test_a_migration_to_nowhere_is_refused(cluster: Cluster) -> None:
    for host, status in (("host-a", 409), ("host-z", 404)):
        answer = await send(cluster, "low-1", "migrate", host=host, lose_disk=True, request_id=f"to-{host}")
        assert (answer[0], answer[1]["field"]) == (status, "host")
    assert (await send(cluster, "nobody", "migrate", lose_disk=True))[0] == 404
