"""Hosts that an operator says are gone for good: nothing waits for them, and their VMs' names are free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.errors import RequestError
from cluster_manager.plans import live_migrations
from cluster_manager.store.store import Line
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import MOST_SEQUENCE, HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState
from tests.manager.cluster import QUICK, Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import consistent, lose_it_on_the_way
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture
def gone_s() -> float:
    return 1.0


@pytest.fixture
async def cluster(tmp_path: Path, gone_s: float) -> AsyncIterator[Cluster]:
    """low-1 on host-a, and host-b with room for it."""
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, first, second, gone_s=gone_s, agents=replace(QUICK, answer_s=2.5)) as made:
        assert (await made.create(vm("low-1"), policy="first-fit")).host == "host-a"
        yield made


async def forget(cluster: Cluster, host: str, query: str = "") -> tuple[int, Any]:
    return await cluster.call("DELETE", f"/v1/hosts/{host}{query}")


async def lose(cluster: Cluster, agent: FakeAgent) -> None:
    """The host is not heard of any more."""
    await agent.die()
    await is_silent(cluster, agent)


async def is_silent(cluster: Cluster, agent: FakeAgent) -> None:
    async def silent() -> bool:
        return bool((await cluster.get(f"/v1/hosts/{agent.id}"))["state"] == "silent")

    await until(silent)


async def test_a_host_that_counts_as_far_as_it_may_and_is_forgotten_leaves_core_changes_readable(
    cluster: Cluster,
) -> None:
    first, _ = cluster.agents
    await first.die()

    async def told(sequence: int) -> tuple[int, Any]:
        change = {"sequence": sequence, "machine": "low-1", "host": "host-a", "at": time.time(), "cause": "test"}
        change |= {"cores_before": 0.0, "cores_after": 2.0}
        body = first.report().model_dump(mode="json") | {"core_changes": [change]}
        url = f"{first.manager}/v1/hosts/host-a/report"
        async with cluster.session.post(url, json=body, headers=first.headers) as response:
            return response.status, await response.json()

    status, problem = await told(MOST_SEQUENCE + 1)
    assert (status, problem["field"]) == (400, "core_changes"), problem
    assert "sequence must be at most" in str(problem)
    assert (await told(MOST_SEQUENCE))[0] == 200
    await is_silent(cluster, first)
    assert (await forget(cluster, "host-a", "?lost_vms=true"))[0] == 200
    status, page = await cluster.call("GET", "/v1/core-changes?machine=low-1")
    assert (status, page["core_changes"][0]["sequence"]) == (200, MOST_SEQUENCE + 1), page


async def known(cluster: Cluster) -> list[str]:
    return [row["id"] for row in (await cluster.get("/v1/hosts"))["hosts"]]


async def test_a_host_that_reports_is_not_forgotten_nor_one_that_nobody_knows(cluster: Cluster) -> None:
    for host, status in (("host-b", 409), ("host-c", 404)):
        got, problem = await forget(cluster, host)
        assert (got, problem["field"]) == (status, "id"), problem
    assert await known(cluster) == ["host-a", "host-b"]


async def test_a_host_that_has_not_reported_yet_to_a_manager_just_started_is_waited_for(cluster: Cluster) -> None:
    first, second = cluster.agents
    await cluster.kill_manager()
    first.trouble.mute = True
    await cluster.start_manager()
    assert cluster.manager is not None
    assert cluster.manager.hosts.is_silent("host-a")
    forgetting = asyncio.create_task(cluster.manager.host_removal.forget("host-a", lost_vms=True), name="forget host-a")
    await asyncio.sleep(0)
    first.trouble.mute = False
    await first.send_report()
    await second.send_report()
    with pytest.raises(RequestError, match="host-a reports"):
        await forgetting
    assert (await cluster.get("/v1/vms/low-1"))["state"] == "running"


async def test_a_silent_host_without_vms_is_forgotten_and_new_when_it_is_back(cluster: Cluster) -> None:
    first, second = cluster.agents
    await lose(cluster, second)
    status, answer = await forget(cluster, "host-b")
    assert (status, answer["id"], answer["vms"]) == (200, "host-b", []), answer
    assert await known(cluster) == ["host-a"]
    assert (await forget(cluster, "host-b"))[0] == 404
    await cluster.kill_manager()
    await cluster.start_manager()
    await first.send_report()
    assert await known(cluster) == ["host-a"]
    await second.revive()
    second.manager = first.manager
    await cluster.ready()
    assert await known(cluster) == ["host-a", "host-b"]
    assert (await cluster.create(vm("low-2", cpu_cores=6.0))).host == "host-b"
    await consistent(cluster)


async def test_a_host_whose_report_is_being_taken_is_not_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the report still waits for the store."""
    first, _ = cluster.agents
    await lose(cluster, first)
    assert cluster.manager is not None
    hosts, store = cluster.manager.hosts, cluster.manager.store
    save, saving, go_on = store.save_hosts, asyncio.Event(), asyncio.Event()

    async def held_up(reports: Sequence[HostReport], lines: Sequence[Line] = ()) -> None:
        saving.set()
        await go_on.wait()
        await save(reports, lines)

    monkeypatch.setattr(store, "save_hosts", held_up)
    changed = first.report().model_copy(update={"mode_reason": "it was restarted"})
    taking = asyncio.create_task(cluster.manager.take_report(changed, b""), name="take a report")
    await asyncio.wait_for(saving.wait(), 20)
    forgetting = asyncio.create_task(forget(cluster, "host-a", "?lost_vms=true"), name="forget host-a")

    async def waits() -> bool:
        return bool(hosts._saving._waiters)

    await until(waits)
    go_on.set()
    status, problem = await forgetting
    assert (status, problem["field"]) == (409, "id"), problem
    await taking
    assert (await cluster.get("/v1/vms/low-1"))["host"] == "host-a"
    assert [stored.id for stored in await store.hosts()] == ["host-a", "host-b"]


async def test_a_host_that_reports_while_it_is_forgotten_is_a_new_one_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = cluster.agents
    await lose(cluster, first)
    assert cluster.manager is not None
    manager, store, reports = cluster.manager, cluster.manager.store, []
    write = store.forget_host

    async def while_it_reports(*given: Any, **more: Any) -> Any:
        reports.append(asyncio.create_task(manager.take_report(first.report(), b""), name="take a report"))
        return await write(*given, **more)

    monkeypatch.setattr(store, "forget_host", while_it_reports)
    status, answer = await forget(cluster, "host-a", "?lost_vms=true")
    assert (status, answer["vms"]) == (200, ["low-1"]), answer
    await asyncio.gather(*reports)
    assert [(row["id"], row["state"], row["vms"]) for row in (await cluster.get("/v1/hosts"))["hosts"]] == [
        ("host-a", "ready", ["low-1"]),
        ("host-b", "ready", []),
    ]
    assert [stored.id for stored in await store.hosts()] == ["host-a", "host-b"]
    assert (await cluster.call("GET", "/v1/vms/low-1"))[0] == 404


async def test_vms_are_given_up_only_where_that_is_said(cluster: Cluster) -> None:
    first, _ = cluster.agents
    await lose(cluster, first)
    status, problem = await forget(cluster, "host-a")
    assert (status, problem["field"]) == (409, "lost_vms")
    assert "low-1" in problem["detail"]
    assert (await cluster.get("/v1/vms/low-1"))["host"] == "host-a"
    status, answer = await forget(cluster, "host-a", "?lost_vms=true")
    assert (status, answer["vms"]) == (200, ["low-1"]), answer
    assert (await cluster.get("/v1/vms"))["vms"] == []
    events = (await cluster.get("/v1/events"))["events"]
    assert {(row["kind"], row["vm"]) for row in events} >= {("lost", "low-1"), ("host-forgotten", None)}
    # Its name is free at once.
    made = await cluster.create(vm("low-1"), request_id="create-again")
    assert (made.state, made.host) == (OperationState.DONE, "host-b"), made.sentence


async def test_who_waited_for_room_on_a_host_that_is_forgotten_waits_there_no_longer(cluster: Cluster) -> None:
    first, second = cluster.agents
    await lose(cluster, second)
    placed = await cluster.create(vm("high-1", "fixed", 6.0, 2000.0))
    assert placed.state is OperationState.DONE, placed.sentence
    assert cluster.manager is not None
    returns = cluster.manager.operations._returns
    await first.send_report()

    async def queued() -> bool:
        return "host-a" in returns._queues

    await until(queued)
    await lose(cluster, first)
    assert (await forget(cluster, "host-a", "?lost_vms=true"))[0] == 200
    assert returns._queues == {}


async def test_what_was_to_be_removed_there_is_waited_for_no_longer(cluster: Cluster) -> None:
    """A migration whose new host went away, when its VM is its owner's again."""
    first, _ = cluster.agents
    await lose_it_on_the_way(cluster)
    await is_silent(cluster, cluster.agents[1])

    async def stopped() -> bool:
        return bool((await cluster.get("/v1/vms/low-1"))["state"] == "stopped")

    await until(stopped)
    assert cluster.manager is not None
    assert len(await cluster.manager.store.unfinished_plans()) == 1
    status, answer = await forget(cluster, "host-b")
    assert (status, answer["vms"]) == (200, []), answer
    assert cluster.manager.operations._tasks == {}
    await cluster.kill_manager()
    await cluster.start_manager()
    await first.send_report()
    assert await cluster.manager.store.unfinished_plans() == []
    assert (await cluster.get("/v1/vms/low-1"))["host"] == "host-a"


@pytest.mark.parametrize("gone_s", [60.0])
async def test_a_host_that_an_operation_waits_for_is_not_forgotten(cluster: Cluster) -> None:
    await lose_it_on_the_way(cluster)
    await is_silent(cluster, cluster.agents[1])
    status, problem = await forget(cluster, "host-b", "?lost_vms=true")
    assert (status, problem["field"]) == (409, "id"), problem
    assert "is waited for" in problem["detail"]
    assert (await cluster.get("/v1/vms/low-1"))["state"] == "migrating"


async def test_a_removal_that_was_owed_there_ends_with_the_host(cluster: Cluster) -> None:
    first, _ = cluster.agents
    await lose(cluster, first)
    deleted = await cluster.delete("low-1")
    assert deleted.state is OperationState.FAILED, deleted.sentence
    status, answer = await forget(cluster, "host-a", "?lost_vms=true")
    assert (status, answer["vms"]) == (200, ["low-1"]), answer
    assert cluster.manager is not None
    assert await cluster.manager.store.owed_removals() == {}
    assert cluster.manager.operations._owed == {}
    await first.revive()
    await cluster.ready()
    # A new host now, and what is on it is nobody's.
    assert (await cluster.call("GET", "/v1/vms/low-1"))[0] == 404
    assert (await cluster.get("/v1/hosts/host-a"))["vms"] == ["low-1"]


async def lose_it_while_it_sends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """host-a is not heard of any more while it sends low-1 to host-b."""
    monkeypatch.setattr(live_migrations, "LOOK_S", 0.1)
    first, second = cluster.agents
    first.peers, second.peers = {"host-b": second}, {"host-a": first}
    await cluster.ready()
    carried = first._carried

    async def never_ends(command: Any, kind: str, name: str, work: Any) -> Any:
        if kind == "depart":
            await asyncio.Event().wait()
        return await carried(command, kind, name, work)

    monkeypatch.setattr(first, "_carried", never_ends)
    request = {"request_id": "m", "live": True, "copy_storage": True, "deadline_s": 1.0}
    assert (await cluster.call("POST", "/v1/vms/low-1/migrate", json=request))[0] == 202

    async def expected() -> bool:
        return "low-1" in second.vms

    await until(expected)
    await lose(cluster, first)

    async def waits() -> bool:
        return "does not run on host-b" in (await cluster.get("/v1/operations/m"))["sentence"]

    await until(waits)


async def test_a_host_that_is_lost_while_it_sends_a_vm_is_forgotten_and_the_room_elsewhere_is_free(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that never says how it ended, and was revoked for that."""
    await lose_it_while_it_sends(cluster, monkeypatch)
    _, second = cluster.agents
    assert (await forget(cluster, "host-a"))[0] == 409
    assert "low-1" in second.vms
    status, answer = await forget(cluster, "host-a", "?lost_vms=true")
    assert (status, answer["vms"]) == (200, ["low-1"]), answer
    assert (await cluster.ended("m")).state is OperationState.FAILED

    async def cleared() -> bool:
        assert cluster.manager is not None
        return "low-1" not in second.vms and not await cluster.manager.store.unfinished_plans()

    await until(cleared)
    made = await cluster.create(vm("low-1"), request_id="create-again")
    assert (made.state, made.host) == (OperationState.DONE, "host-b"), made.sentence


@pytest.mark.parametrize("last", [VMState.MIGRATING, VMState.RUNNING], ids=["was expected there", "had come up there"])
async def test_a_new_host_that_is_lost_when_the_vm_has_left_its_old_one_is_forgotten_and_the_vm_is_off_at_home(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, last: VMState
) -> None:
    monkeypatch.setattr(live_migrations, "LOOK_S", 0.1)
    first, second = cluster.agents
    first.peers, second.peers = {"host-b": second}, {"host-a": first}
    await cluster.ready()
    carried = first._carried

    async def leaves(command: Any, kind: str, name: str, work: Any, *more: Any) -> Any:
        if kind != "depart":
            return await carried(command, kind, name, work, *more)
        second.vms[name] = second.vms[name].model_copy(update={"state": last})
        await second.send_report()
        await second.die()
        off = {"state": VMState.STOPPED, "start_size": first.vms[name].current, "current": Vector()}
        first.vms[name] = first.vms[name].model_copy(update=off)
        said = {"state": OperationState.FAILED, "sentence": f"what became of {name} is not known"}
        return await carried(command, kind, name, lambda: said)

    monkeypatch.setattr(first, "_carried", leaves)
    request = {"request_id": "m", "live": True, "copy_storage": True, "deadline_s": 1.0}
    assert (await cluster.call("POST", "/v1/vms/low-1/migrate", json=request))[0] == 202
    await is_silent(cluster, second)

    async def waits() -> bool:
        return "waiting for host-b" in (await cluster.get("/v1/operations/m"))["sentence"]

    await until(waits)
    status, problem = await cluster.call("POST", "/v1/operations/m/cancel", json={"request_id": "off"})
    assert status == 409
    assert "one of them is forgotten" in problem["detail"]
    assert (await forget(cluster, "host-b"))[0] == 409
    off = first.vms["low-1"]
    first.vms["low-1"] = off.model_copy(update={"state": VMState.RUNNING, "current": off.nominal})
    await first.send_report()
    assert (await forget(cluster, "host-b", "?lost_vms=true"))[0] == 409, "its old host says otherwise"
    first.vms["low-1"] = off
    await first.send_report()
    status, answer = await forget(cluster, "host-b", "?lost_vms=true")
    assert (status, answer["vms"]) == (200, []), answer
    ended = await cluster.ended("m")
    assert ended.state is OperationState.FAILED
    assert "low-1 is off on host-a, where it can be started" in ended.sentence
    there = await cluster.get("/v1/vms/low-1")
    assert (there["state"], there["host"]) == ("stopped", "host-a")
    assert (await cluster.call("POST", "/v1/vms/low-1/start", json={"request_id": "s"}))[0] == 202
    assert (await cluster.ended("s")).state is OperationState.DONE


#: What a VM may be by now that came up on its new host.
CAME_UP: dict[str, dict[str, Any]] = {
    "runs": {"state": VMState.RUNNING},
    "is paused": {"state": VMState.PAUSED},
    "is stopped": {"state": VMState.STOPPED, "off_reason": "its domain has ended"},
}


@pytest.mark.parametrize("does", CAME_UP)
async def test_a_vm_that_has_come_up_on_its_new_host_keeps_its_old_one_from_being_forgotten_until_its_plan_has_seen_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    await lose_it_while_it_sends(cluster, monkeypatch)
    _, second = cluster.agents
    second.trouble.read_after = asyncio.Event()
    second.vms["low-1"] = second.vms["low-1"].model_copy(update=CAME_UP[does])
    await second.send_report()
    status, problem = await forget(cluster, "host-a", "?lost_vms=true")
    assert (status, problem["field"]) == (409, "id"), problem
    assert "is waited for" in problem["detail"]
    second.trouble.read_after.set()

    async def seen_there() -> bool:
        return bool((await cluster.get("/v1/vms/low-1"))["host"] == "host-b")

    await until(seen_there)


@pytest.mark.parametrize("does", CAME_UP)
async def test_a_vm_that_came_up_on_its_new_host_is_left_alone_there_when_its_old_one_is_forgotten_without_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """Its new host could not say so: it was away, too."""
    await lose_it_while_it_sends(cluster, monkeypatch)
    _, second = cluster.agents
    await lose(cluster, second)
    second.vms["low-1"] = second.vms["low-1"].model_copy(update=CAME_UP[does])
    status, answer = await forget(cluster, "host-a", "?lost_vms=true")
    assert (status, answer["vms"]) == (200, ["low-1"]), answer
    await second.revive()
    await cluster.ready()

    async def cleared() -> bool:
        assert cluster.manager is not None
        return not await cluster.manager.store.unfinished_plans()

    await until(cleared)
    assert second.vms["low-1"].state is CAME_UP[does]["state"]
    assert f"low-1 {does} on host-b" in (await cluster.events("failed"))[0]["sentence"]
    adopted = {"request_id": "take-back", "host": "host-b", "domain": "low-1"}
    assert (await cluster.call("POST", "/v1/adoptions", json=adopted))[0] == 202
    assert (await cluster.ended("take-back")).state is OperationState.DONE
    assert (await cluster.get("/v1/vms/low-1"))["host"] == "host-b"
