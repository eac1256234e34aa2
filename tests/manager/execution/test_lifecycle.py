"""Stop, start, resize, migrate, adopt and release through the manager's API, with agents over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.api.vms import check_admin
from cluster_manager.errors import LostLeadership
from cluster_manager.inventory.agents import Agents
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.requests import VMRequest
from ebbtide.messages.vms import VMState
from ebbtide.rest.access import PRINCIPAL
from ebbtide.rest.errors import Refused
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import principal
from tests.manager.cluster import QUICK, Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import runs
from tests.manager.lifecycle import ask, consistent, seen, send
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """host-a with two low-priority VMs of 3 cores on its 6, and host-b, which has room for one."""
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=4.0, memory_mib=1500.0)
    async with cluster_of(tmp_path, first, second) as made:
        for name in ("low-1", "low-2"):
            assert (await made.create(vm(name), policy="first-fit")).host == "host-a"
        yield made


def agents(cluster: Cluster) -> tuple[FakeAgent, FakeAgent]:
    first, second = cluster.agents
    return first, second


# --- stop and start --------------------------------------------------------------------------------------------------


@each_store
async def test_a_start_has_as_much_longer_as_its_host_takes_to_read_what_was_saved(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = agents(cluster)
    await ask(cluster, "low-1", "stop", limit_s=1.0)
    first.vms["low-1"] = first.vms["low-1"].model_copy(update={"saved_mib": 4800.0})
    await first.send_report()
    follow, limits = Agents.follow, {}

    async def watched(self: Agents, host: str, operation: Operation, limit_s: float, *more: Any) -> Any:
        limits[operation.kind] = limit_s
        return await follow(self, host, operation, limit_s, *more)

    monkeypatch.setattr(Agents, "follow", watched)
    assert (await ask(cluster, "low-1", "start")).state is OperationState.DONE
    assert limits["start"] == QUICK.start_stop_s + 4800.0 / 16.0


@each_store
async def test_a_stopped_vm_keeps_its_name_and_host_and_its_room_is_shared(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    await cluster.create(vm("high-1", "fixed", 3.0, 800.0), policy="first-fit")
    assert first.cores("low-1") < 3.0
    stopped = await ask(cluster, "low-2", "stop", limit_s=1.0)
    assert (stopped.state, stopped.kind) == (OperationState.DONE, "stop")
    assert first.cores("low-1") == 3.0, "what came free goes to the others"
    row = await seen(cluster, "low-2")
    assert (row["state"], row["host"], row["current"]["cpu_cores"]) == ("stopped", "host-a", 0.0)
    status, problem = await send(cluster, "low-2", "stop", request_id="again")
    assert (status, problem["detail"]) == (409, "low-2 is stopped already")
    await consistent(cluster)


@each_store
async def test_a_start_deflates_others_and_comes_up_at_its_committed_size(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    await ask(cluster, "low-2", "stop")
    await cluster.create(vm("high-1", "fixed", 2.0, 600.0), policy="first-fit")
    started = await ask(cluster, "low-2", "start")
    assert started.state is OperationState.DONE, started.sentence
    assert first.cores("low-1") + first.cores("low-2") + first.cores("high-1") <= 6.0
    assert runs(first.vms["low-2"])
    assert [kind for kind, _ in first.done][-2:] == ["reclaim", "start"]
    status, problem = await send(cluster, "low-2", "start", request_id="again")
    assert (status, problem["detail"]) == (409, "low-2 is running, not stopped")
    await consistent(cluster)


@each_store
async def test_a_start_without_room_is_refused_and_what_was_taken_is_given_back(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    await ask(cluster, "low-2", "stop")
    await cluster.create(vm("high-1", "fixed", 5.4, 800.0), policy="first-fit")
    refused = await ask(cluster, "low-2", "start")
    assert refused.state is OperationState.FAILED
    assert "low-2 stays off: host-a: short of" in refused.sentence
    assert (await seen(cluster, "low-2"))["state"] == "stopped"
    first.trouble.fails["start"] = "no such disk"
    await cluster.delete("high-1")
    failed = await ask(cluster, "low-2", "start", request_id="second")
    assert (failed.state, failed.sentence) == (OperationState.FAILED, "low-2 stays off: no such disk")
    first.trouble.fails.clear()
    assert (await ask(cluster, "low-2", "start", request_id="third")).state is OperationState.DONE
    await consistent(cluster)


@each_store
async def test_a_start_may_go_elsewhere_only_where_it_may_lose_its_disk(cluster: Cluster) -> None:
    first, second = agents(cluster)
    await ask(cluster, "low-2", "stop")
    await cluster.create(vm("high-1", "fixed", 5.4, 800.0), policy="first-fit")
    status, problem = await send(cluster, "low-2", "start", request_id="r1", anywhere=True)
    assert (status, problem["field"]) == (409, "lose_disk")
    moved = await ask(cluster, "low-2", "start", request_id="r2", anywhere=True, lose_disk=True)
    assert moved.state is OperationState.DONE, moved.sentence
    assert "low-2" not in first.vms
    assert runs(second.vms["low-2"])
    row = await seen(cluster, "low-2")
    assert (row["state"], row["host"]) == ("running", "host-b")
    await consistent(cluster)


@each_store
async def test_what_the_host_says_counts_where_an_answer_was_lost(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    first.trouble.hangs_at = len(first.arrived) + 1
    assert (await send(cluster, "low-2", "stop"))[0] == 202
    await first.hanging.wait()
    first.trouble.mute = True
    lost = await cluster.ended("stop-low-2")
    assert lost.state is OperationState.FAILED
    assert "may have been stopped" in lost.sentence
    first.trouble.mute, first.trouble.hangs_at = False, None
    await cluster.ready()
    assert (await seen(cluster, "low-2"))["state"] == "stopped"
    listed = {
        s: [vm["name"] for vm in (await cluster.get(f"/v1/vms?state={s}"))["vms"]] for s in ("running", "stopped")
    }
    assert listed == {"running": ["low-1"], "stopped": ["low-2"]}
    assert (await ask(cluster, "low-2", "start")).state is OperationState.DONE
    await consistent(cluster)


async def is_resized(cluster: Cluster, name: str) -> bool:
    """Whether a target is taken, as of what runs by the record."""
    body = {"request_id": f"target-{name}", "target": {"cpu_cores": 2.0}}
    if (await cluster.call("PUT", f"/v1/vms/{name}/target", json=body))[0] != 202:
        return False
    return (await cluster.ended(f"target-{name}")).state is OperationState.DONE


@each_store
async def test_a_vm_whose_start_was_not_answered_is_what_its_host_says(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    await ask(cluster, "low-2", "stop")
    first.trouble.hangs_at = len(first.arrived) + 1
    assert (await send(cluster, "low-2", "start"))[0] == 202
    await first.hanging.wait()
    first.trouble.mute = True
    lost = await cluster.ended("start-low-2")
    assert (lost.state, "may have been started" in lost.sentence) == (OperationState.FAILED, True)
    first.trouble.mute, first.trouble.hangs_at = False, None
    assert (await seen(cluster, "low-2"))["state"] == "running"
    assert {row["machine"] for row in (await cluster.get("/v1/machines"))["machines"]} == {"low-1", "low-2"}
    assert await is_resized(cluster, "low-2")
    await consistent(cluster)


@each_store
async def test_a_vm_that_was_started_past_the_manager_is_put_on_record_by_a_start(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    await ask(cluster, "low-2", "stop")
    off = first.vms["low-2"]
    runs_now = {"state": VMState.RUNNING, "current": off.start_size, "start_size": None, "overhead_mib": 100.0}
    first.vms["low-2"] = off.model_copy(update=runs_now)
    assert (await seen(cluster, "low-2"))["state"] == "running"
    assert not await is_resized(cluster, "low-2")
    started = await ask(cluster, "low-2", "start")
    assert (started.state, started.sentence) == (OperationState.DONE, "low-2 runs on host-a")
    assert ("start", "low-2") not in first.done
    assert await is_resized(cluster, "low-2")
    await consistent(cluster)


@each_store
async def test_a_stop_by_its_owner_is_no_shrink_of_the_machine(cluster: Cluster) -> None:
    await ask(cluster, "low-2", "stop")
    await cluster.ready()
    assert cluster.manager is not None
    stored = await cluster.manager.store.core_changes_since(0.0)
    newest = [row for row in stored if row.machine == "low-2"][-1]
    assert (newest.cores_after, newest.by_owner) == (0.0, True)


# --- resize ----------------------------------------------------------------------------------------------------------


@each_store
async def test_a_resize_that_is_sent_again_to_a_later_version_is_the_same_request(cluster: Cluster) -> None:
    await ask(cluster, "low-1", "resize", request_id="grow", nominal={"cpu_cores": 4.0})
    assert cluster.manager is not None
    stored = await cluster.manager.store.plan("grow")
    assert stored is not None
    # As earlier versions had it.
    assert not [name for name in ("on_preemption", "preemption_notice_s", "steady") if name in stored.fingerprint]


@each_store
async def test_a_request_that_has_waited_until_its_manager_ends_is_one_for_the_next(cluster: Cluster) -> None:
    assert cluster.manager is not None
    operations = cluster.manager.operations
    async with operations.admission:
        waiting = asyncio.create_task(operations.begin("late", "stop", pytest.fail), name="a request that waits")
        await asyncio.sleep(0)
        await operations.stop()
    with pytest.raises(LostLeadership):
        await waiting


@each_store
async def test_growing_asks_for_room_first_and_the_vm_itself_gives_nothing(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    grown = await ask(cluster, "low-1", "resize", nominal={"cpu_cores": 4.0})
    assert grown.state is OperationState.DONE, grown.sentence
    assert (first.cores("low-1"), first.cores("low-2")) == (4.0, 2.0)
    assert [kind for kind, _ in first.done][-3:] == ["reclaim", "resize", "reinflate"]
    assert first.bodies[-3]["exclude"] == ["low-1"]
    row = await seen(cluster, "low-1")
    assert (row["nominal"]["cpu_cores"], row["nominal"]["memory_mib"]) == (4.0, 1000.0)
    await consistent(cluster)


@each_store
async def test_shrinking_is_done_first_and_the_others_are_told_afterwards(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    await ask(cluster, "low-1", "resize", nominal={"cpu_cores": 4.0})
    shrunk = await ask(cluster, "low-1", "resize", request_id="r2", nominal={"cpu_cores": 2.0})
    assert shrunk.state is OperationState.DONE
    assert (first.cores("low-1"), first.cores("low-2")) == (2.0, 3.0)
    await consistent(cluster)


@each_store
async def test_a_resize_without_room_changes_nothing(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    before = {name: status.current for name, status in first.vms.items()}
    refused = await ask(cluster, "low-1", "resize", nominal={"cpu_cores": 5.9})
    assert refused.state is OperationState.FAILED
    assert "low-1 stays what it is: host-a: short of" in refused.sentence
    assert {name: status.current for name, status in first.vms.items()} == before
    assert (await seen(cluster, "low-1"))["nominal"]["cpu_cores"] == 3.0
    first.trouble.gives = {"low-2": 0.1}
    short = await ask(cluster, "low-1", "resize", request_id="r2", nominal={"cpu_cores": 4.0})
    assert short.state is OperationState.FAILED
    assert "in layer hypervisor" in short.sentence
    first.trouble.gives = {}
    await until(lambda: _same(first, before))


async def _same(agent: FakeAgent, before: dict[str, Any]) -> bool:
    return {name: status.current for name, status in agent.vms.items()} == before


@each_store
async def test_minimum_and_priority_have_their_consequences(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    await cluster.create(vm("high-1", "fixed", 3.0, 800.0), policy="first-fit")
    assert first.cores("low-1") == 1.5
    raised = await ask(cluster, "low-1", "resize", minimum={"cpu_cores": 2.0})
    assert raised.state is OperationState.DONE
    assert (first.cores("low-1"), first.cores("low-2")) == (2.0, 1.0)
    fixed = await ask(cluster, "low-1", "resize", request_id="r2", priority="fixed", nominal={"cpu_cores": 2.4})
    assert fixed.state is OperationState.DONE, fixed.sentence
    assert (first.vms["low-1"].priority, first.cores("low-1")) == ("fixed", 2.4)
    impossible = await ask(cluster, "low-2", "resize", request_id="r3", priority="fixed")
    assert impossible.state is OperationState.FAILED
    assert first.vms["low-2"].priority == "deflatable"
    back = await ask(
        cluster,
        "low-1",
        "resize",
        request_id="r4",
        priority="harvest",
        ceiling={"cpu_cores": 5.0, "memory_mib": 1200.0},
    )
    assert back.state is OperationState.DONE
    row = await seen(cluster, "low-1")
    assert (row["priority"], row["ceiling"]["cpu_cores"]) == ("harvest", 5.0)
    await consistent(cluster)


@each_store
async def test_what_the_running_domain_cannot_take_waits_for_its_next_start(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    first.most = ResourceVector(cpu_cores=3.0, memory_mib=1000.0)
    said = await ask(cluster, "low-1", "resize", nominal={"cpu_cores": 4.0})
    assert said.state is OperationState.DONE
    row = await seen(cluster, "low-1")
    assert row["nominal"]["cpu_cores"] == 3.0
    assert row["at_next_start"]["nominal"]["cpu_cores"] == 4.0
    assert (first.cores("low-1"), first.cores("low-2")) == (3.0, 3.0), "what was taken for it is given back"


@each_store
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "nominal"),
        ({"nominal": {"cpu_cores": -1.0}}, "nominal.cpu_cores"),
        ({"minimum": {"cpu_cores": 9.0}}, "minimum.cpu_cores"),
        ({"ceiling": {"cpu_cores": 9.0}}, "ceiling"),
        ({"nominal": {"memory_mib": 100.0}}, "nominal.memory_mib"),
        ({"size": 3}, "size"),
    ],
)
async def test_a_resize_that_makes_no_sense_is_refused_by_its_field(
    cluster: Cluster, body: dict[str, Any], field: str
) -> None:
    first, _ = agents(cluster)
    arrived = list(first.arrived)
    status, problem = await send(cluster, "low-1", "resize", **body)
    assert (status, problem["field"]) == (400, field)
    assert first.arrived == arrived


# --- adopt, release, templates, roles --------------------------------------------------------------------------------


@each_store
async def test_a_foreign_domain_is_adopted_deflated_and_given_back_whole(cluster: Cluster) -> None:
    _, second = agents(cluster)
    second.domains["Old_Web"] = ResourceVector(cpu_cores=3.0, memory_mib=900.0)
    minimum = {"cpu_cores": 0.5, "memory_mib": 300.0}
    body = {"request_id": "a1", "host": "host-b", "domain": "Old_Web", "minimum": minimum}
    status, problem = await cluster.call("POST", "/v1/adoptions", json=body)
    assert (status, problem["field"]) == (400, "name"), "the domain's name can be none of ours"
    status, _ = await cluster.call("POST", "/v1/adoptions", json={**body, "name": "old-web"})
    assert status == 202
    assert (await cluster.ended("a1")).state is OperationState.DONE
    row = await seen(cluster, "old-web")
    assert (row["state"], row["host"], row["nominal"]["cpu_cores"]) == ("running", "host-b", 3.0)
    high = await cluster.create(vm("high-1", "fixed", 3.0, 500.0), policy="best-fit")
    assert high.state is OperationState.DONE
    if high.host == "host-b":
        assert second.cores("old-web") < 3.0
    status, problem = await send(cluster, "old-web", "migrate", lose_disk=True)
    assert (status, "adopted" in problem["detail"]) == (409, True)
    await cluster.delete("high-1")
    released = await ask(cluster, "old-web", "release")
    assert released.state is OperationState.DONE
    await cluster.ready()
    assert cluster.manager is not None
    stored = await cluster.manager.store.core_changes_since(0.0)
    newest = [row for row in stored if row.machine == "old-web"][-1]
    assert (newest.cores_after, newest.by_owner) == (0.0, True), "nobody took its cores away"
    assert (await cluster.call("GET", "/v1/vms/old-web"))[0] == 404
    status, problem = await send(cluster, "low-1", "release")
    assert (status, "not adopted" in problem["detail"]) == (409, True)
    await consistent(cluster)


@each_store
async def test_a_domain_that_is_being_adopted_is_not_deleted_meanwhile(cluster: Cluster) -> None:
    _, second = agents(cluster)
    second.domains["web"] = ResourceVector(cpu_cores=1.0, memory_mib=400.0)
    second.trouble.never_ends = True
    second.polled.clear()
    body = {"request_id": "a1", "host": "host-b", "domain": "web"}
    assert (await cluster.call("POST", "/v1/adoptions", json=body))[0] == 202
    async with asyncio.timeout(10):
        await second.polled.wait()
    status, problem = await cluster.call("DELETE", "/v1/vms/web?request_id=d")
    assert (status, problem["detail"]) == (409, "web is placing: wait for operation a1")
    second.end_pending()
    assert (await cluster.ended("a1")).state is OperationState.DONE
    assert (await seen(cluster, "web"))["host"] == "host-b"


@each_store
async def test_a_domain_that_cannot_be_adopted_leaves_its_name_free(cluster: Cluster) -> None:
    body = {"request_id": "a1", "host": "host-b", "domain": "web"}
    assert (await cluster.call("POST", "/v1/adoptions", json=body))[0] == 202
    assert (await cluster.ended("a1")).state is OperationState.FAILED
    assert (await cluster.call("GET", "/v1/vms/web"))[0] == 404


@each_store
async def test_a_vm_is_placed_only_where_its_template_is(cluster: Cluster) -> None:
    first, second = agents(cluster)
    first.templates = (HostTemplate(name="lab"),)
    second.templates = (HostTemplate(name="lab"), HostTemplate(name="web"))
    await cluster.ready()
    made = await cluster.create(vm("web-1", cpu_cores=1.0, memory_mib=400.0, template="web"), policy="first-fit")
    assert (made.state, made.host) == (OperationState.DONE, "host-b")
    refused = await cluster.create(vm("web-2", cpu_cores=1.0, memory_mib=400.0, template="none"))
    assert refused.state is OperationState.FAILED
    assert "host-a has no template none, host-b has no template none" in refused.sentence
    found = await cluster.get("/v1/hosts/host-a/templates")
    assert found["templates"][0]["name"] == "lab"


@each_store
async def test_a_vm_is_neither_placed_on_nor_moved_to_a_host_without_a_base_image(cluster: Cluster) -> None:
    first, second = agents(cluster)
    first.can_create = False
    await first.send_report()
    small: Any = {"cpu_cores": 1.0, "memory_mib": 400.0}
    made = await cluster.create(vm("web-1", **small), policy="first-fit")
    assert (made.state, made.host) == (OperationState.DONE, "host-b")
    for host in (None, "host-a"):
        moved = await ask(cluster, "web-1", "migrate", lose_disk=True, host=host, request_id=f"to-{host}")
        assert moved.state is OperationState.FAILED
        assert host is None or "host-a has no base image" in moved.sentence
        assert (await seen(cluster, "web-1"))["state"] == "running"
    assert "stop" not in second.arrived
    second.can_create = False
    await second.send_report()
    refused = await cluster.create(vm("web-2", **small))
    assert "host-a has no base image, host-b has no base image" in refused.sentence


def test_xml_in_a_request_is_for_admins_only() -> None:
    plain = VMRequest.model_validate({"request_id": "r", "vm": vm("a")})
    xml = VMRequest.model_validate({"request_id": "r", "vm": vm("a", xml="<domain/>")})
    sent: Any = {PRINCIPAL: principal("ci", Role.OPERATOR, "word")}
    check_admin(sent, plain)
    with pytest.raises(Refused) as refused:
        check_admin(sent, xml)
    assert (refused.value.status, "vm.xml needs the role admin" in str(refused.value)) == (403, True)
    sent = {PRINCIPAL: principal("ops", Role.ADMIN, "word")}
    check_admin(sent, xml)


@each_store
async def test_nothing_begins_beside_a_plan_that_is_at_work_on_the_vm(cluster: Cluster) -> None:
    first, _ = agents(cluster)
    first.trouble.never_ends = True
    assert (await send(cluster, "low-1", "stop"))[0] == 202
    await first.polled.wait()
    for verb in ("start", "resize", "migrate"):
        status, problem = await send(cluster, "low-1", verb, **({"priority": "fixed"} if verb == "resize" else {}))
        assert (status, problem["detail"]) == (409, "low-1 is stopping: wait for operation stop-low-1")
    assert (await cluster.call("DELETE", "/v1/vms/low-1?request_id=d"))[0] == 409
    status, answer = await send(cluster, "low-1", "stop")
    assert (status, answer["request_id"]) == (202, "stop-low-1"), "the same request is the same operation"
    assert (await send(cluster, "low-1", "stop", limit_s=1.0))[0] == 409
    first.end_pending()
    assert (await cluster.ended("stop-low-1")).state is OperationState.DONE


@each_store
@pytest.mark.parametrize("verb", ["resize", "release"])
async def test_nothing_begins_beside_a_resize_or_a_release(cluster: Cluster, verb: str) -> None:
    first, second = agents(cluster)
    name, agent = "low-1", first
    if verb == "release":
        name, agent = "old-web", second
        second.domains["old-web"] = ResourceVector(cpu_cores=2.0, memory_mib=600.0)
        body = {"request_id": "a1", "host": "host-b", "domain": "old-web"}
        assert (await cluster.call("POST", "/v1/adoptions", json=body))[0] == 202
        assert (await cluster.ended("a1")).state is OperationState.DONE
    agent.trouble.never_ends = True
    agent.polled.clear()
    change = {"nominal": {"cpu_cores": 2.5}} if verb == "resize" else {}
    assert (await send(cluster, name, verb, **change))[0] == 202
    await agent.polled.wait()
    for other in ("stop", "migrate", "resize"):
        body = {"priority": "fixed"} if other == "resize" else {}
        status, problem = await send(cluster, name, other, request_id=f"second-{other}", **body)
        assert (status, problem["detail"]) == (409, f"{name} is being changed: wait for operation {verb}-{name}")
    for more in ("request_id=second-delete", "request_id=dry&dry_run=true"):
        status, problem = await cluster.call("DELETE", f"/v1/vms/{name}?{more}")
        assert (status, problem["detail"]) == (409, f"{name} is being changed: wait for operation {verb}-{name}")
    agent.trouble.never_ends = False
    agent.end_pending()
    assert (await cluster.ended(f"{verb}-{name}")).state is OperationState.DONE
    await consistent(cluster)
