"""What the manager passes on to a host: explanations, dry runs and modes, with a real host agent behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from cluster_manager.api.forms import MANAGER
from cluster_manager.execution.agent_proxy import AgentProxy
from ebbtide.messages.commands import TargetCommand
from ebbtide.messages.dry_runs import Forecast
from ebbtide.messages.explanations import VMExplanation
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import ClusterVM
from hostagent.control import reconciler
from hostagent.vm import guest_link
from tests.manager.cluster import TOKEN
from tests.manager.with_agent import Lab, lab_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.2)
    monkeypatch.setattr(guest_link, "RETRY_S", 0.2)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with lab_of(tmp_path) as made:
        yield made


TARGET = {"generation": 2, "target": {"cpu_cores": 1.5, "memory_mib": 800.0}}


async def explain(lab: Lab, name: str) -> VMExplanation:
    return VMExplanation.model_validate(await lab.cluster.get(f"/v1/vms/{name}/explain"))


async def test_an_explanation_joins_the_hosts_word_with_what_the_manager_did(lab: Lab) -> None:
    await lab.create("low-1")
    await lab.cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "t", **TARGET})
    ended = await lab.cluster.ended("t")
    assert ended.state == "done"
    found = await explain(lab, "low-1")
    assert found.explanation is not None
    assert found.explanation.vm.current.cpu_cores == 1.5
    assert "1.5 cores, 200 MiB less than its nominal size (3 cores, 1000 MiB), since target " in (
        found.explanation.sentence
    )
    assert found.explanation.sentence.endswith(ended.sentence.removeprefix("low-1 "))
    assert [row.kind for row in found.events] == ["placed", "resized"]
    assert [row.kind for row in found.explanation.decisions][:2] == ["admit", "deflate"]
    assert found.explanation.resizes[-1].outcome.ledger == ended.vms[0].ledger


async def test_a_silent_host_leaves_what_the_manager_knows(lab: Lab) -> None:
    await lab.create("low-1")
    await lab.agent_server.close()
    found = await explain(lab, "low-1")
    assert found.explanation is None
    assert found.unreachable is not None
    assert found.unreachable.startswith("host-a cannot be reached")
    assert [row.kind for row in found.events] == ["placed"]


async def test_who_waits_for_a_silent_hosts_operation_hears_soon_that_it_is_the_host(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that waits longer takes it for a silence of the manager."""
    assert lab.cluster.server is not None
    agents = lab.cluster.server.app[MANAGER].agent_proxy._agents
    monkeypatch.setattr(agents, "_limits", replace(agents._limits, absence_s=60.0))
    await lab.agent_server.close()
    async with asyncio.timeout(10):
        status, found = await lab.cluster.call("GET", "/v1/hosts/host-a/operations/pause-1?wait_s=0.1")
    assert (status, found["code"]) == (503, "host-unavailable")


async def test_a_dry_target_is_passed_through_and_no_plan_is_made(lab: Lab) -> None:
    await lab.create("low-1")
    plans = await lab.cluster.get("/v1/operations")
    body = {"request_id": "dry", "dry_run": True, **TARGET}
    status, answer = await lab.cluster.call("PUT", "/v1/vms/low-1/target", json=body)
    assert status == 200
    told = Forecast.model_validate(answer)
    assert [vm.expected.cpu_cores for vm in told.vms] == [1.5]
    assert await lab.cluster.get("/v1/operations") == plans
    assert lab.agent.host.vms["low-1"].intent.committed.cpu_cores == 3.0
    status, answer = await lab.cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "dry", **TARGET})
    assert status == 202
    assert (await lab.cluster.ended("dry")).vms[0].after.cpu_cores == 1.5


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("GET", "/v1/vms/nobody/explain", None, 404, "name"),
        ("GET", "/v1/vms/low-1/explain?deep=1", None, 400, "deep"),
        ("PUT", "/v1/vms/nobody/target", {"request_id": "x", "dry_run": True, **TARGET}, 404, "name"),
        ("PUT", "/v1/vms/low-1/target", {"request_id": "x", "dry_run": 1, **TARGET}, 400, "dry_run"),
        ("PUT", "/v1/vms/low-1/target", {"request_id": "x", "dry_run": True, **TARGET, "generation": 1}, 409,
         "generation"),
        ("PUT", "/v1/hosts/nowhere/mode", {"request_id": "m", "mode": "paused"}, 404, "id"),
        ("PUT", "/v1/hosts/host-a/mode", {"request_id": "m", "mode": "asleep"}, 400, "mode"),
        ("PUT", "/v1/hosts/host-a/mode", {"mode": "paused"}, 400, "request_id"),
        ("GET", "/v1/hosts/host-a/operations/nothing", None, 404, "request_id"),
        ("GET", "/v1/hosts/host-a/operations/a%2Fb", None, 400, "request_id"),
        ("GET", "/v1/hosts/nowhere/operations/x", None, 404, "id"),
        ("GET", "/v1/hosts/host-a/operations/x?wait_s=99", None, 400, "wait_s"),
    ],
)  # fmt: skip
async def test_what_cannot_be_asked_is_refused_by_its_field(
    lab: Lab, method: str, path: str, body: Any, status: int, field: str
) -> None:
    await lab.create("low-1")
    got, problem = await lab.cluster.call(method, path, json=body)
    assert (got, problem["field"]) == (status, field), problem
    assert problem["detail"]


async def test_a_mode_is_set_through_the_manager_and_followed_to_its_end(lab: Lab) -> None:
    await lab.create("low-1")
    await lab.cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "t", **TARGET})
    await lab.cluster.ended("t")
    body = {"request_id": "m", "mode": "off", "reason": "goodbye"}
    status, answer = await lab.cluster.call("PUT", "/v1/hosts/host-a/mode", json=body)
    assert status == 202
    assert answer["kind"] == "mode"
    ended = Operation.model_validate(await lab.cluster.get("/v1/hosts/host-a/operations/m?wait_s=20"))
    assert ended.state == "done"
    assert ended.sentence.endswith("all 1 VMs have their nominal sizes")
    assert lab.agent.host.journal.epoch == 1

    async def shown() -> bool:
        (host,) = (await lab.cluster.get("/v1/hosts"))["hosts"]
        return (host["mode"], host["mode_reason"]) == ("off", "goodbye")

    await until(shown)
    status, _ = await lab.cluster.call(
        "PUT", "/v1/vms/low-1/target", json={"request_id": "t2", **TARGET, "generation": 9}
    )
    assert status == 202
    refused = await lab.cluster.ended("t2")
    assert refused.state == "failed"
    assert "host-a is off" in refused.sentence
    assert refused.reason is not None
    assert refused.reason.code == "failed"


async def test_a_target_that_its_host_has_no_room_for_ends_with_that_code(lab: Lab) -> None:
    await lab.create("low-1")
    await lab.cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "t", **TARGET})
    assert (await lab.cluster.ended("t")).state == "done"
    await lab.create("high-1", priority="fixed", cpu_cores=4.0)
    body = {"request_id": "t2", "target": {"cpu_cores": 3.0}}
    assert (await lab.cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
    refused = await lab.cluster.ended("t2")
    assert refused.reason is not None, refused
    assert (refused.state, refused.reason.code) == ("failed", "no-room"), refused.sentence


async def test_what_a_target_leaves_out_keeps_its_size_and_its_number_is_the_next(lab: Lab) -> None:
    await lab.create("low-1")
    before = ClusterVM.model_validate(await lab.cluster.get("/v1/vms/low-1"))
    body = {"request_id": "t", "target": {"cpu_cores": 1.5}}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with ClientSession(lab.url, headers=headers) as session, session.put("/v1/vms/low-1/target", json=body) as a:
        assert (a.status, a.headers["Location"]) == (202, "/v1/operations/t")
    assert (await lab.cluster.ended("t")).state == "done"
    intent = lab.agent.host.vms["low-1"].intent
    assert (intent.committed.cpu_cores, intent.committed.memory_mib) == (1.5, before.current.memory_mib)
    assert intent.generation == before.generation + 1
    # The same request again is the same, whatever number would come next.
    status, answer = await lab.cluster.call("PUT", "/v1/vms/low-1/target", json=body)
    assert (status, answer["state"]) == (202, "done")
    assert lab.agent.host.vms["low-1"].intent.generation == before.generation + 1
    body = {"request_id": "t2", "target": {"cpu_cores": 0.0}}
    status, answer = await lab.cluster.call("PUT", "/v1/vms/low-1/target", json=body)
    assert (status, answer["field"]) == (400, "target.cpu_cores")


async def test_two_targets_without_numbers_are_carried_out_one_after_the_other(lab: Lab) -> None:
    await lab.create("low-1")
    for number, cores in enumerate((1.5, 2.0)):
        body = {"request_id": f"t{number}", "target": {"cpu_cores": cores}}
        assert (await lab.cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
    assert [(await lab.cluster.ended(f"t{number}")).state for number in range(2)] == ["done", "done"]
    assert lab.agent.host.vms["low-1"].intent.committed.cpu_cores == 2.0


async def test_a_target_without_a_number_counts_though_its_vm_was_resized_while_it_waited_for_its_host(
    lab: Lab,
) -> None:
    await lab.create("low-1")
    assert lab.cluster.manager is not None
    record, locks = lab.agent.host.vms["low-1"].record, lab.cluster.manager.hosts.locks
    assert await locks.hold("another plan", "host-a")
    for number, cores in enumerate((1.5, 2.0)):
        body = {"request_id": f"t{number}", "target": {"cpu_cores": cores, "memory_mib": 800.0}}
        assert (await lab.cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
    # As two reclaims leave it; the manager hears of it by the next report.
    await record.store(generation=(raised := record.intent.generation + 2))
    locks.release("another plan")
    ended = [await lab.cluster.ended(f"t{number}") for number in range(2)]
    assert [one.state for one in ended] == ["done", "done"], ended
    assert (record.intent.generation, record.intent.committed.cpu_cores) == (raised + 2, 2.0)


async def test_a_clients_order_does_not_fence_the_manager(lab: Lab) -> None:
    await lab.create("low-1")
    body = {"request_id": "m", "mode": "active", "order": 1_000_000}
    status, answer = await lab.cluster.call("PUT", "/v1/hosts/host-a/mode", json=body)
    assert (status, answer["field"]) == (400, "order")
    del body["order"]
    assert (await lab.cluster.call("PUT", "/v1/hosts/host-a/mode", json=body))[0] == 202
    await lab.cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "t", **TARGET})
    assert (await lab.cluster.ended("t")).state == "done"


async def test_a_dry_target_goes_to_the_host_under_the_managers_epoch_and_without_an_order(lab: Lab) -> None:
    sent: list[TargetCommand] = []

    class Asked:
        async def forecast(self, host: str, vm: str, command: TargetCommand) -> Forecast:
            sent.append(command)
            return Forecast(request_id="r", kind="target", host="host-a", vms=(), sentence="")

    await lab.create("low-1")
    assert lab.cluster.manager is not None
    manager = lab.cluster.manager
    proxy = AgentProxy(Asked(), manager.hosts, manager.store, 7)  # type: ignore[arg-type]
    command = TargetCommand.model_validate({"request_id": "r", "epoch": 99, "order": 10**6, "dry_run": True, **TARGET})
    await proxy.forecast(ClusterVM.model_validate(await lab.cluster.get("/v1/vms/low-1")), command)
    assert [(one.epoch, one.order, one.request_id) for one in sent] == [(7, 0, "r")]
