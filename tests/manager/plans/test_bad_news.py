"""What a host agent may say or refuse without spoiling anything for the others, or for the manager's next start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster_manager.plans.lifecycle import sold_as
from ebbtide.deflation.allocations import Priority
from ebbtide.matcher.errors import EngineError
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from ebbtide.rest.credentials import report_token
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.plan_events import spec_of, status_of

REPORT_TOKEN = report_token(HOSTS_KEY, "host-a")

each_store = pytest.mark.usefixtures("each_store")


def host(name: str = "host-a") -> FakeAgent:
    return FakeAgent(name, cpu_cores=6.0, memory_mib=2400.0)


async def tell(cluster: Cluster, body: str) -> tuple[int, Any]:
    """A report as it stands."""
    headers = {"Content-Type": "application/json"}
    return await cluster.call("POST", "/v1/hosts/host-a/report", REPORT_TOKEN, data=body.encode(), headers=headers)


@each_store
@pytest.mark.parametrize(
    ("field", "number"),
    [("cores_after", "NaN"), ("cores_after", "1e999"), ("at", "Infinity"), ("vm_overhead_mib", "-Infinity")],
)
async def test_a_number_that_is_none_is_refused_and_keeps_no_manager_from_leading(
    tmp_path: Path, field: str, number: str
) -> None:
    agent = host()
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        await agent.die(forget=False)
        agent.add_change("low-1", 3.0, 2.0, at=77.5)
        change = agent.changes[-1].model_copy(update={"cores_after": 55.5})
        said = agent.report().model_copy(update={"core_changes": (change,), "vm_overhead_mib": 66.5}).model_dump_json()
        given = {"cores_after": "55.5", "at": "77.5", "vm_overhead_mib": "66.5"}[field]
        assert said.count(given) == 1
        status, problem = await tell(cluster, said.replace(given, number))
        assert (status, field in str(problem["field"])) == (400, True), problem
        await cluster.stop_manager()
        await cluster.start_manager()
        assert [row["name"] for row in (await cluster.get("/v1/vms"))["vms"]] == ["low-1"]


@each_store
async def test_a_vm_of_which_its_host_says_what_cannot_be_does_not_hide_the_others(tmp_path: Path) -> None:
    agent = host()
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        huge = agent.vms["low-1"].model_copy(update={"current": Vector(cpu_cores=9.0, memory_mib=9000.0)})
        agent.vms["low-1"] = huge
        agent.trouble.mute = True
        said = _with(agent, huge.model_dump_json())
        assert (await tell(cluster, said))[0] == 200
        rows = (await cluster.get("/v1/vms"))["vms"]
        assert [row["name"] for row in rows] == ["low-1", "low-2"]
        assert "what cannot be" in rows[0]["sentence"]


def _with(agent: FakeAgent, vm_json: str) -> str:
    """The agent's report with a VM as it is given; the agent's own sums could not be made of it."""
    kept = agent.vms.pop("low-1")
    said = agent.report().model_dump_json()
    agent.vms["low-1"] = kept
    return said.replace('"vms":[', f'"vms":[{vm_json},', 1)


def test_a_status_that_contradicts_itself_leaves_what_was_asked_for() -> None:
    spec = spec_of("low", "deflatable")
    wrong = status_of(spec, "host-a").model_copy(update={"priority": Priority.HARVEST})
    assert sold_as(spec, wrong) == spec


@each_store
@pytest.mark.parametrize("status", [401, 403])
async def test_a_host_that_does_not_let_the_manager_in_is_not_the_clients_fault(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = host()
    async with cluster_of(tmp_path, agent) as cluster:
        monkeypatch.setattr("tests.manager.fake_lifecycle.web.json_response", _refusing(status))
        answer, problem = await cluster.call("GET", "/v1/hosts/host-a/templates")
        assert answer == 503, problem
        assert "the certificate must name host-a" in problem["detail"]


def _refusing(status: int) -> Any:
    def refused(_: Any) -> web.Response:
        body = '{"error": "the certificate must name host-a", "field": null}'
        return web.Response(text=body, status=status, content_type="application/json")

    return refused


@each_store
async def test_the_same_target_again_gets_the_same_operation_whatever_the_vm_is_sold_as_by_then(
    tmp_path: Path,
) -> None:
    agent = host()
    agent.templates = (HostTemplate(name="lab"),)
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        body = {"request_id": "t", "generation": 100, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
        ended = await cluster.ended("t")
        assert ended.state is OperationState.DONE
        higher = {"request_id": "r", "minimum": {"cpu_cores": 2.0, "memory_mib": 800.0}}
        assert (await cluster.call("PATCH", "/v1/vms/low-1", json=higher))[0] == 202
        assert (await cluster.ended("r")).state is OperationState.DONE
        await cluster.ready()
        status, again = await cluster.call("PUT", "/v1/vms/low-1/target", json=body)
        assert (status, again.get("sentence")) == (202, ended.sentence)
        status, problem = await cluster.call(
            "PUT", "/v1/vms/low-1/target", json={**body, "request_id": "t2", "generation": 1000}
        )
        assert (status, problem["field"]) == (400, "target.cpu_cores"), "another request is held against what it is now"


class Stubborn(FakeEngine):
    async def stop(self) -> None:
        raise EngineError("it does not let go")


@each_store
async def test_a_part_that_cannot_be_stopped_keeps_no_other_from_being_stopped(tmp_path: Path) -> None:
    agent = host()
    async with cluster_of(tmp_path, agent, **settings(Stubborn(far=4))) as cluster:
        agent.trouble.never_ends = True
        request = {"request_id": "create-low-1", "vm": vm("low-1"), "deadline_s": 3.0}
        assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202
        manager = cluster.manager
        assert manager is not None
        async with asyncio.timeout(10):
            await agent.polled.wait()
        await cluster.stop_manager()
        assert not manager.operations._tasks, "its plans act no more"
        assert manager.store._closed
        agent.end_pending()
        await cluster.start_manager()
        await cluster.ready()
        assert (await cluster.ended("create-low-1")).state is OperationState.DONE


@each_store
async def test_a_host_that_answers_500_is_not_taken_for_one_that_is_away(tmp_path: Path) -> None:
    agent = host()
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        agent.trouble.refuses = 500
        before = len(agent.arrived)
        body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
        ended = await cluster.ended("t")
        assert ended.state is OperationState.FAILED
        assert "host-a failed at PUT /v1/vms/low-1/target with 500: refused by the test" in ended.sentence
        # The same question gets the same answer: it is not waited for as if the host were to come back.
        assert len(agent.arrived) == before + 1
        assert (await cluster.get("/v1/hosts/host-a"))["state"] == "ready"
