"""A host agent of a later version, whose words a manager over real HTTP does not know yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cluster_manager.inventory import later_words
from cluster_manager.inventory.later_words import read_of_agent
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.rest.credentials import report_token
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.plan_events import hibernating

READER = {"Authorization": f"Bearer {TOKEN}"}

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, silent_after_s=60.0) as made:
        for name in ("low-1", "low-2"):
            assert (await made.create(vm(name, cpu_cores=2.0, memory_mib=600.0))).state is OperationState.DONE
        agent.manager = None
        yield made


async def report(cluster: Cluster, *vms: dict[str, Any], **changes: Any) -> None:
    """What the agent says, with these fields of its VMs and of itself."""
    body = {**cluster.agents[0].report().model_dump(mode="json"), **changes}
    for status, words in zip(body["vms"], vms, strict=False):
        status.update(words)
    headers = {"Authorization": f"Bearer {report_token(HOSTS_KEY, 'host-a')}"}
    status_code, answer = await cluster.call("POST", "/v1/hosts/host-a/report", headers=headers, json=body)
    assert status_code == 200, answer


async def test_a_report_is_taken_whose_vm_is_in_a_state_that_is_not_known(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later_words, "_told", set())
    odd = {"state": "hibernating", "guest_kind": "firmware", "generation": 7}
    with capture_logs() as logs:
        for _ in range(2):
            await report(cluster, odd, {"guest_connected": False}, deflatable={"cpu_cores": 1.5, "memory_mib": 300.0})
    said = [(line["host"], line["word"]) for line in logs if "later version" in line["event"]]
    assert said == [("host-a", "hibernating"), ("host-a", "firmware")], "once each"
    low_1, low_2 = (await cluster.get("/v1/vms"))["vms"]
    assert (low_1["state"], low_1["guest_kind"], low_1["generation"]) == ("running", "firmware", 7)
    assert low_1["current"] == low_1["nominal"], "it is counted in full"
    assert low_2["guest_connected"] is False, "what the report says of others is used"
    (host,) = (await cluster.get("/v1/hosts"))["hosts"]
    assert (host["state"], host["deflatable"]["cpu_cores"]) == ("ready", 1.5)
    assert cluster.server is not None
    async with cluster.session.get(cluster.server.make_url("/metrics"), headers=READER) as response:
        told = await response.text()
    assert 'ebbtide_cluster_vms{priority="deflatable",state="unknown"} 1.0' in told
    assert await cluster.events("stopped") == []


async def test_a_vm_of_a_priority_that_is_not_known_is_counted_as_a_fixed_one(cluster: Cluster) -> None:
    larger = {"cpu_cores": 3.0, "memory_mib": 800.0}
    await report(cluster, {"priority": "spot", "ceiling": larger, "current": larger})
    assert cluster.manager is not None
    status = cluster.manager.hosts.vm("host-a", "low-1")
    assert status is not None
    row = status.allocation()
    assert (row.priority.value, row.charge.cpu_cores, row.charge.memory_mib) == ("fixed", 3.0, 900.0)
    assert row.deflatable.is_zero()


async def test_a_host_in_a_mode_that_is_not_known_gets_no_vm_and_nobody_is_preempted_there(cluster: Cluster) -> None:
    for _ in range(2):
        await report(cluster, mode="evacuating", mode_reason="new disks")
    operation = await cluster.create(vm("high-1", "fixed", cpu_cores=6.0, memory_mib=2000.0))
    assert operation.state is OperationState.FAILED
    assert "no host takes new VMs (host-a is evacuating)" in operation.sentence
    assert set(cluster.agents[0].vms) == {"low-1", "low-2"}
    (host,) = (await cluster.get("/v1/hosts"))["hosts"]
    assert (host["mode"], host["mode_reason"]) == ("evacuating", "new disks")
    assert [event["sentence"] for event in await cluster.events("mode")] == [
        "host-a is evacuating (new disks), was active"
    ], "once"


async def test_a_stored_report_with_words_that_are_not_known_is_recalled(cluster: Cluster) -> None:
    await report(cluster, {"state": "hibernating"})
    await cluster.stop_manager()
    await cluster.start_manager()
    cluster.agents[0].manager = None
    assert cluster.manager is not None
    known = cluster.manager.hosts.get("host-a")
    assert known is not None
    assert [status.state.value for status in known.report.vms] == ["hibernating", "running"]


async def test_an_agent_that_is_asked_may_answer_with_them_too(cluster: Cluster) -> None:
    agent = cluster.agents[0]
    agent.vms["low-1"] = hibernating(agent.vms["low-1"])
    low_3, reads = vm("low-3", cpu_cores=1.0, memory_mib=400.0), agent.reads
    assert (await cluster.create(low_3)).state is OperationState.DONE, "there is room beside it"
    assert agent.reads > reads


@pytest.mark.parametrize(
    ("path", "method", "body", "field"),
    [
        ("/v1/vms", "POST", {"request_id": "r", "vm": vm("low-3", "spot")}, "vm.priority"),
        ("/v1/vms", "POST", {"request_id": "r", "vm": vm("low-3", on_preemption="freeze")}, "vm.on_preemption"),
        ("/v1/hosts/host-a/mode", "PUT", {"request_id": "r", "mode": "evacuating"}, "mode"),
        ("/v1/hosts?state=asleep", "GET", None, "state"),
        ("/v1/operations?state=asleep", "GET", None, "state"),
    ],
)
async def test_a_word_that_is_not_known_in_a_request_is_an_error_that_names_its_field(
    cluster: Cluster, path: str, method: str, body: Any, field: str
) -> None:
    status, problem = await cluster.call(method, path, json=body)
    assert (status, problem["field"]) == (400, field)


def test_an_operation_of_which_it_is_not_known_how_it_stands_is_waited_for() -> None:
    said = '{"request_id": "r", "kind": "polish", "state": "suspended", "sentence": "", "started_at": 1}'
    found = read_of_agent(Operation, said, "host-b")
    assert (found.state, found.kind) == (OperationState.RUNNING, "polish")
