"""Hosts that do not come back: nobody's VM waits for them for ever, and what comes back after all is put right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import QUICK, Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import runs
from tests.manager.lifecycle import ask, consistent, lose_it_on_the_way, seen
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """low-1 on host-a, and host-b with room for it; nobody waits long."""
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(
        tmp_path, first, second, gone_s=1.0, silent_after_s=5.0, agents=replace(QUICK, answer_s=2.5)
    ) as made:
        assert (await made.create(vm("low-1"), policy="first-fit")).host == "host-a"
        yield made


async def is_shown_as(cluster: Cluster, state: str) -> None:
    async def shown() -> bool:
        return bool((await cluster.get("/v1/vms/low-1"))["state"] == state)

    await until(shown)


@pytest.mark.parametrize("restart", [False, True])
async def test_a_vm_whose_new_host_is_gone_is_its_owners_again(cluster: Cluster, restart: bool) -> None:
    first, second = cluster.agents
    await lose_it_on_the_way(cluster)
    assert (await cluster.get("/v1/vms/low-1"))["state"] == "migrating"
    if restart:
        await cluster.kill_manager()
        await cluster.start_manager()
        await first.send_report()
    await is_shown_as(cluster, "stopped")
    row = await cluster.get("/v1/vms/low-1")
    assert row["host"] == "host-a"
    assert "before it is started, make sure that host-b is off" in row["sentence"]
    started = await ask(cluster, "low-1", "start")
    assert started.state is OperationState.DONE, started.sentence
    assert runs(first.vms["low-1"])
    # It comes back after all, and has what it had started.
    assert runs(second.vms["low-1"])
    await second.revive()
    second.manager = first.manager

    async def removed() -> bool:
        return "low-1" not in second.vms

    await until(removed)
    row = await seen(cluster, "low-1")
    assert (row["state"], row["host"]) == ("running", "host-a")
    await consistent(cluster)


async def test_what_a_later_request_has_put_on_a_host_that_is_back_stays_there(cluster: Cluster) -> None:
    _, second = cluster.agents
    await lose_it_on_the_way(cluster)
    await is_shown_as(cluster, "stopped")
    deleted = await cluster.delete("low-1")
    assert deleted.state is OperationState.DONE, deleted.sentence
    # The same name again, for a VM of its own: what comes back is none of it.
    made = await cluster.create(vm("low-1"), request_id="create-again")
    assert made.host == "host-a"
    await second.revive()

    async def removed() -> bool:
        return "low-1" not in second.vms

    await until(removed)
    await consistent(cluster)


async def test_an_adoption_whose_host_is_gone_ends_and_can_be_asked_for_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster_manager.plans.lifecycle.ADOPTION_S", 0.5)
    _, second = cluster.agents
    second.domains["Old_Web"] = ResourceVector(cpu_cores=1.0, memory_mib=500.0)
    second.trouble.hangs_at = len(second.arrived) + 1
    body = {"host": "host-b", "domain": "Old_Web", "name": "old"}
    assert (await cluster.call("POST", "/v1/adoptions", json={"request_id": "adopt-1", **body}))[0] == 202
    async with asyncio.timeout(10):
        await second.hanging.wait()
    await second.die()
    failed = await cluster.ended("adopt-1")
    assert (failed.state, "ask again when host-b answers" in failed.sentence) == (OperationState.FAILED, True)
    await second.revive()
    await cluster.ready()
    assert (await cluster.call("POST", "/v1/adoptions", json={"request_id": "adopt-2", **body}))[0] == 202
    assert (await cluster.ended("adopt-2")).state is OperationState.DONE
    row = await seen(cluster, "old")
    assert (row["state"], row["host"]) == ("running", "host-b")
