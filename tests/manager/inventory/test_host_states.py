"""Hosts that report and yet get no VM: overcommitted ones, and those whose hypervisor does not answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from cluster_manager import manager
from cluster_manager.store import schema
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState
from tests.manager.api.test_metrics import values_of
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


def host(name: str) -> FakeAgent:
    return FakeAgent(name, cpu_cores=6.0, memory_mib=2400.0)


async def shown(cluster: Cluster, state: str) -> dict[str, str]:
    """The host, once it is in this state."""
    async with asyncio.timeout(10):
        while (found := await cluster.get("/v1/hosts/host-a"))["state"] != state:
            await asyncio.sleep(0.02)
    return dict(found)


async def told(cluster: Cluster, kind: str, count: int) -> list[Any]:
    """The events of a kind, once there are so many: a state is there before they are."""

    async def enough() -> bool:
        return len(await cluster.events(kind)) >= count

    await until(enough)
    return await cluster.events(kind)


async def test_an_overcommitted_host_is_shown_alarmed_and_gets_no_vm_in_a_dry_run_either(tmp_path: Path) -> None:
    first, second = host("host-a"), host("host-b")
    async with cluster_of(tmp_path, first, second) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        await cluster.create(vm("low-2"), policy="first-fit")
        first.capacity = ResourceVector(cpu_cores=5.0, memory_mib=2400.0)
        assert (await shown(cluster, "overcommitted"))["state_reason"] == "by 1 cores"
        (event,) = await told(cluster, "overcommitted", 1)
        assert event["sentence"].startswith("host-a is overcommitted by 1 cores")
        body = {"request_id": "d", "vm": vm("high-1", "fixed", 2.0, 500.0), "policy": "first-fit", "dry_run": True}
        status, found = await cluster.call("POST", "/v1/vms", json=body)
        assert (status, found["host"], [row["id"] for row in found["hosts"]]) == (200, "host-b", ["host-b"]), found
        placed = await cluster.create(vm("high-1", "fixed", 2.0, 500.0), policy="first-fit")
        assert (placed.state, placed.host) == (OperationState.DONE, "host-b")
        first.capacity = ResourceVector(cpu_cores=6.0, memory_mib=2400.0)
        await shown(cluster, "ready")
        await told(cluster, "overcommitted", 2)


async def test_a_host_without_its_hypervisor_is_not_ready_and_no_vm_is_preempted_for_it(tmp_path: Path) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(vm("low-2"))
        agent.unavailable = "Connection refused"
        assert (await shown(cluster, "unavailable"))["state_reason"] == "Connection refused"
        refused = await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        assert refused.state is OperationState.FAILED
        assert "the hypervisor of host-a does not answer (Connection refused)" in refused.sentence
        body = {"request_id": "t", "generation": 9, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}}
        status, problem = await cluster.call("PUT", "/v1/vms/low-1/target", json=body)
        assert (status, "cannot reach its hypervisor" in problem["detail"]) == (503, True)
        assert await cluster.events("preempting") == []
        assert set(agent.vms) == {"low-1", "low-2"}
        agent.unavailable = ""
        await shown(cluster, "ready")
        assert [row["sentence"] for row in reversed(await told(cluster, "hypervisor", 2))] == [
            "the hypervisor of host-a does not answer: Connection refused",
            "the hypervisor of host-a answers again",
        ]


@pytest.mark.parametrize("why", ["is silent", "cannot reach its hypervisor (Connection refused)"])
@pytest.mark.parametrize("state", [VMState.STOPPED, VMState.PAUSED])
async def test_a_vm_that_was_off_or_paused_by_the_last_report_is_not_said_to_run_once_its_host_is_not_ready(
    tmp_path: Path, state: VMState, why: str
) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        assert cluster.manager is not None
        await cluster.create(vm("low-1"))
        agent.vms["low-1"] = agent.vms["low-1"].model_copy(update={"state": state})
        if why == "is silent":
            await agent.send_report()
            agent.trouble.mute = True
            # A report may still be on its way: no two looks are at the same moment.
            cluster.manager.hosts._monotonic = itertools.count(time.monotonic() + 60.0, 60.0).__next__
            await shown(cluster, "silent")
        else:
            agent.unavailable = "Connection refused"
            await agent.send_report()
        found = await cluster.get("/v1/vms/low-1")
        says = {VMState.STOPPED: "off", VMState.PAUSED: "paused"}[state]
        assert found["state"] == state.value
        assert found["sentence"].startswith(f"host-a {why}; as it last reported: host-a says that it is {says}; ")
        for asked, names in ((state.value, ["low-1"]), ("running", [])):
            page = await cluster.get(f"/v1/vms?state={asked}")
            assert [row["name"] for row in page["vms"]] == names


async def starts_with(cluster: Cluster, stored: str) -> None:
    """The next manager finds this as the report of host-a."""
    assert cluster.manager is not None
    table = schema.hosts
    change = update(table).where(table.c.id == "host-a").values(report=stored)
    await cluster.manager.store._write(lambda connection: connection.execute(change))
    await cluster.kill_manager()
    await cluster.start_manager()


async def test_a_stored_report_of_a_later_version_is_read_as_far_as_it_is_understood(tmp_path: Path) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        agent.trouble.mute = True
        later = {**agent.report().model_dump(mode="json"), "of_a_later_version": 1}
        await starts_with(cluster, json.dumps(later))
        found = await cluster.get("/v1/hosts/host-a")
        assert (found["state"], found["vms"], found["capacity"]["cpu_cores"]) == ("silent", ["low-1"], 6.0)


@pytest.mark.parametrize("stored", ["{", '{"id": "host-a", "of_a_later_version": 1}'])
async def test_a_host_whose_stored_report_cannot_be_read_is_silent_until_its_next_one_and_stops_no_other(
    tmp_path: Path, stored: str
) -> None:
    first, second = host("host-a"), host("host-b")
    async with cluster_of(tmp_path, first, second) as cluster:
        assert (await cluster.create(vm("low-1"), policy="first-fit")).host == "host-a"
        assert cluster.manager is not None
        first.trouble.mute = True
        await starts_with(cluster, stored)
        assert cluster.manager is not None
        # What is stored is no report that came, whoever sends it.
        assert not cluster.manager.hosts.repeat("host-a", stored.encode())
        await second.send_report()
        rows = (await cluster.get("/v1/hosts"))["hosts"]
        assert [(row["id"], row["state"], row["vms"]) for row in rows] == [
            ("host-a", "silent", []),
            ("host-b", "ready", []),
        ]
        assert (await cluster.get("/v1/vms/low-1"))["state"] == "running"
        assert (await values_of(cluster))['ebbtide_cluster_host_state{host="host-a",state="silent"}'] == 1.0
        first.trouble.mute = False
        await cluster.ready()
        rows = (await cluster.get("/v1/hosts"))["hosts"]
        assert [(row["id"], row["state"], row["vms"]) for row in rows] == [
            ("host-a", "ready", ["low-1"]),
            ("host-b", "ready", []),
        ]
        assert (await cluster.delete("low-1")).state is OperationState.DONE


@pytest.mark.parametrize("ends_in_order", [True, False])
async def test_a_later_manager_says_when_a_host_was_last_seen_that_reports_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_in_order: bool
) -> None:
    if not ends_in_order:
        monkeypatch.setattr(manager, "SEEN_S", 0.05)
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        begin = time.time()
        await agent.send_report()
        agent.trouble.mute = True
        assert (shown := await cluster.get("/v1/hosts/host-a"))["seen_at"] >= begin
        if not ends_in_order:

            async def stored() -> bool:
                assert cluster.manager is not None
                return (await cluster.manager.store.hosts())[0].seen_at >= begin

            await until(stored)
        await cluster.kill_manager()
        await cluster.start_manager()
        later = await cluster.get("/v1/hosts/host-a")
        assert (later["state"], later["seen_at"]) == ("silent", pytest.approx(shown["seen_at"], abs=1.0))
        assert later["seen_at"] >= begin
