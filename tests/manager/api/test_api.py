"""Every error of the REST interface: 4xx, a sentence, the field, and nothing changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ebbtide.messages.operations import OperationState
from ebbtide.rest.credentials import report_token
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent

#: Once on each kind of store.
pytestmark = pytest.mark.usefixtures("each_store")

REPORT_TOKEN = report_token(HOSTS_KEY, "host-a")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(tmp_path, FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)) as made:
        yield made


def request(**changes: Any) -> dict[str, Any]:
    return {"request_id": "r", "vm": vm("low-1"), **changes}


def sized(**nominal: Any) -> dict[str, Any]:
    return request(vm={**vm("low-1"), "nominal": {"cpu_cores": 3.0, "memory_mib": 1000.0, **nominal}})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (sized(cpu_cores=-1), "vm.nominal.cpu_cores"),
        (sized(memory_mib="much"), "vm.nominal.memory_mib"),
        (sized(gpu=1), "vm.nominal.gpu"),
        (sized(cpu_cores=0.01), "vm.nominal.cpu_cores"),
        (request(vm={**vm("low-1"), "minimum": {"cpu_cores": 9.0}}), "vm.minimum.cpu_cores"),
        (request(vm={**vm("low-1"), "ceiling": {"cpu_cores": 9.0}}), "vm.ceiling"),
        (request(vm={**vm("low-1"), "name": "Low_1"}), "vm.name"),
        (request(vm={**vm("low-1"), "priority": "high"}), "vm.priority"),
        (request(request_id="with space"), "request_id"),
        (request(deadline_s=-1), "deadline_s"),
        (request(policy="worst-fit"), "policy"),
        (request(color="red"), "color"),
        ({"request_id": "r"}, "vm"),
        ([], None),
    ],
)
async def test_a_bad_request_for_a_vm_names_its_field(cluster: Cluster, body: Any, field: str | None) -> None:
    status, problem = await cluster.call("POST", "/v1/vms", json=body)
    assert status == 400
    assert problem["field"] == field
    assert problem["detail"]
    await nothing_happened(cluster)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_are_none_are_refused(cluster: Cluster, number: str) -> None:
    text = json.dumps(sized()).replace("3.0", number)
    status, problem = await cluster.call("POST", "/v1/vms", data=text.encode())
    assert (status, problem["field"]) == (400, "vm.nominal.cpu_cores")
    await nothing_happened(cluster)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"request_id": "r"'])
async def test_what_is_no_json_is_refused(cluster: Cluster, data: bytes) -> None:
    status, problem = await cluster.call("POST", "/v1/vms", data=data)
    assert status == 400
    assert problem["detail"]
    await nothing_happened(cluster)


async def nothing_happened(cluster: Cluster) -> None:
    page = await cluster.get("/v1/vms")
    assert page.pop("changes") > 0
    assert page == {"vms": [], "next": None, "position": 0, "changed_since": None, "gone": []}
    assert await cluster.get("/v1/operations") == {"operations": [], "next": None, "position": 0}
    assert await cluster.get("/v1/events") == {"events": [], "next": None, "position": 0}
    assert cluster.agents[0].arrived == []


async def test_a_body_beyond_the_limit_is_refused(cluster: Cluster) -> None:
    status, problem = await cluster.call("POST", "/v1/vms", data=b" " * (256 * 1024 + 1))
    assert status == 413
    assert "262144 bytes" in problem["detail"]
    await nothing_happened(cluster)


ROUTES = [
    ("GET", "/v1/hosts"),
    ("GET", "/v1/hosts/host-a"),
    ("POST", "/v1/vms"),
    ("GET", "/v1/vms"),
    ("GET", "/v1/vms/low-1"),
    ("DELETE", "/v1/vms/low-1?request_id=r"),
    ("PUT", "/v1/vms/low-1/target"),
    ("GET", "/v1/operations"),
    ("GET", "/v1/operations/r"),
    ("GET", "/v1/core-changes"),
    ("GET", "/v1/calibration"),
    ("GET", "/v1/machines"),
    ("GET", "/v1/machines/low-1"),
    ("GET", "/v1/events"),
    ("GET", "/v1/nothing"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer ", f"Basic {TOKEN}", f"Bearer {REPORT_TOKEN}", TOKEN])
async def test_without_the_right_token_nothing_is_told(cluster: Cluster, method: str, path: str, header: str) -> None:
    status, problem = await cluster.call(method, path, headers={"Authorization": header})
    assert (status, problem["field"]) == (401, "Authorization")


async def test_reports_take_the_agents_token_only(cluster: Cluster) -> None:
    report = cluster.agents[0].report().model_dump(mode="json")
    assert (await cluster.call("POST", "/v1/hosts/host-a/report", json=report))[0] == 401
    status, reply = await cluster.call("POST", "/v1/hosts/host-a/report", token=REPORT_TOKEN, json=report)
    assert (status, reply) == (200, {"epoch": 1, "acknowledged": 0})


async def test_health_needs_no_token(cluster: Cluster) -> None:
    assert await cluster.call("GET", "/healthz", token="") == (
        200,
        {"status": "ok", "version": version("ebbtide"), "role": "leader"},
    )


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/hosts/host-z", "id"),
        ("/v1/vms/nobody", "name"),
        ("/v1/operations/nothing", "id"),
        ("/v1/machines/nobody", "name"),
        ("/v1/nothing", None),
        ("/v1", None),
    ],
)
async def test_what_is_not_there_is_404(cluster: Cluster, path: str, field: str | None) -> None:
    status, problem = await cluster.call("GET", path)
    assert (status, problem["field"]) == (404, field)


async def test_commands_for_unknown_vms_are_404(cluster: Cluster) -> None:
    body = {"request_id": "t", "generation": 1, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}}
    assert (await cluster.call("PUT", "/v1/vms/nobody/target", json=body))[0] == 404
    assert (await cluster.call("DELETE", "/v1/vms/nobody?request_id=d"))[0] == 404


@pytest.mark.parametrize(("method", "path"), [("PATCH", "/v1/vms"), ("POST", "/v1/hosts"), ("PUT", "/v1/vms/low-1")])
async def test_another_method_is_405(cluster: Cluster, method: str, path: str) -> None:
    status, problem = await cluster.call(method, path)
    assert status == 405
    assert method in problem["detail"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/operations?limit=0", "limit"),
        ("/v1/operations?limit=1.5", "limit"),
        ("/v1/operations?limit=many", "limit"),
        ("/v1/operations?limit=1001", "limit"),
        ("/v1/operations?page=2", "page"),
        ("/v1/operations?limit=1&limit=2", "limit"),
        ("/v1/operations/r?wait_s=-1", "wait_s"),
        ("/v1/operations/r?wait_s=nan", "wait_s"),
        ("/v1/operations/r?wait_s=1e9", "wait_s"),
        ("/v1/machines?duration_s=-1", "duration_s"),
        ("/v1/machines?duration_s=inf", "duration_s"),
        ("/v1/machines?duration=1", "duration"),
        ("/v1/events?limit=-1", "limit"),
        ("/v1/core-changes?vm=low-1", "vm"),
        ("/v1/hosts?all=1", "all"),
        ("/healthz?deep=1", "deep"),
    ],
)
async def test_a_bad_query_parameter_is_named(cluster: Cluster, path: str, field: str) -> None:
    status, problem = await cluster.call("GET", path)
    assert (status, problem["field"]) == (400, field)


@pytest.mark.parametrize("query", ["", "?request_id=", "?request_id=a%20b", "?request_id=r&force=1"])
async def test_a_deletion_needs_a_good_request_id(cluster: Cluster, query: str) -> None:
    await cluster.create(vm("low-1"))
    status, problem = await cluster.call("DELETE", f"/v1/vms/low-1{query}")
    assert status == 400
    assert problem["field"] in ("request_id", "force")
    assert "low-1" in cluster.agents[0].vms


async def test_a_name_that_is_taken_is_409_and_the_first_stays(cluster: Cluster) -> None:
    await cluster.create(vm("low-1"))
    status, problem = await cluster.call("POST", "/v1/vms", json=request(request_id="other"))
    assert (status, problem["field"]) == (409, "vm.name")
    assert cluster.agents[0].done == [("create", "low-1")]


async def test_two_requests_for_one_name_at_once_start_one_vm(cluster: Cluster) -> None:
    answers = await asyncio.gather(
        *(cluster.call("POST", "/v1/vms", json=request(request_id=f"r-{n}")) for n in range(5))
    )
    assert sorted(status for status, _ in answers) == [202, 409, 409, 409, 409]


async def test_the_same_request_again_is_the_same_operation(cluster: Cluster) -> None:
    answers = await asyncio.gather(*(cluster.call("POST", "/v1/vms", json=request()) for _ in range(5)))
    assert [status for status, _ in answers] == [202] * 5
    ended = await cluster.ended("r")
    status, again = await cluster.call("POST", "/v1/vms", json=request())
    assert (status, again["state"], again["sentence"]) == (202, "done", ended.sentence)
    assert cluster.agents[0].arrived == ["create"]


async def test_the_same_request_id_for_something_else_is_409(cluster: Cluster) -> None:
    await cluster.create(vm("low-1"), "r")
    for method, path, body in (
        ("POST", "/v1/vms", request(vm=vm("low-2"))),
        ("DELETE", "/v1/vms/low-1?request_id=r", None),
    ):
        status, problem = await cluster.call(method, path, json=body)
        assert (status, problem["field"]) == (409, "request_id")
    assert set(cluster.agents[0].vms) == {"low-1"}


async def test_a_deletion_repeated_is_the_same_operation(cluster: Cluster) -> None:
    await cluster.create(vm("low-1"))
    first = await cluster.delete("low-1", "d")
    assert await cluster.delete("low-1", "d") == first
    assert (await cluster.call("DELETE", "/v1/vms/low-1?request_id=e"))[0] == 404


async def test_a_vm_that_is_being_placed_is_called_off_once(cluster: Cluster) -> None:
    cluster.agents[0].trouble.hangs_at = 1
    await cluster.call("POST", "/v1/vms", json=request())
    await cluster.agents[0].hanging.wait()
    assert (await cluster.get("/v1/vms/low-1"))["state"] == "placing"
    assert (await cluster.call("DELETE", "/v1/vms/low-1?request_id=d"))[0] == 202
    assert (await cluster.get("/v1/vms/low-1"))["state"] == "deleting"
    status, problem = await cluster.call("DELETE", "/v1/vms/low-1?request_id=e")
    assert status == 409
    assert "wait for operation d" in problem["detail"]


async def test_a_vm_that_was_refused_can_be_deleted(cluster: Cluster) -> None:
    await cluster.create(vm("big", cpu_cores=60.0))
    assert (await cluster.get("/v1/vms/big"))["state"] == "failed"
    assert (await cluster.delete("big")).state is OperationState.DONE
    assert (await cluster.get("/v1/vms"))["vms"] == []


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"generation": 0}, 400, "generation"),
        ({"generation": 2.5}, 400, "generation"),
        ({"target": {"cpu_cores": 4.0, "memory_mib": 500.0}}, 400, "target.cpu_cores"),
        ({"target": {"cpu_cores": 1.0, "memory_mib": 100.0}}, 400, "target.memory_mib"),
        ({"target": {"cpu_cores": -1.0, "memory_mib": 500.0}}, 400, "target.cpu_cores"),
        ({"target": {}}, 400, "target"),
        ({"target": {"cpu_cores": None}}, 400, "target"),
        ({"generation": 2}, 409, "generation"),
        ({"mode": "please"}, 400, "mode"),
    ],
)
async def test_a_bad_target_is_refused(cluster: Cluster, changes: Any, status: int, field: str) -> None:
    await cluster.create(vm("low-1"))
    size = {"cpu_cores": 2.0, "memory_mib": 500.0}
    await cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "t3", "generation": 3, "target": size})
    await cluster.ended("t3")
    body = {"request_id": "t", "generation": 4, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}, **changes}
    found, problem = await cluster.call("PUT", "/v1/vms/low-1/target", json=body)
    assert (found, problem["field"]) == (status, field)
    assert cluster.agents[0].cores("low-1") == 2.0


@pytest.mark.parametrize("path", ["/v1/operations/%00", "/v1/tasks/a%00", "/v1/vms/low%00/explain", "/v1/hosts/a%00"])
async def test_a_null_character_in_a_path_is_no_fault_of_the_store(cluster: Cluster, path: str) -> None:
    status, problem = await cluster.call("GET", path)
    assert (status, problem["code"]) == (400, "invalid"), problem


async def test_after_the_last_generation_there_is_none(cluster: Cluster) -> None:
    await cluster.create(vm("low-1"))
    body = {"target": {"cpu_cores": 2.0, "memory_mib": 500.0}}
    await cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "t", "generation": 2**53, **body})
    await cluster.ended("t")
    status, problem = await cluster.call("PUT", "/v1/vms/low-1/target", json={"request_id": "t2", **body})
    assert (status, problem["field"]) == (409, "generation")


async def test_a_fixed_vm_has_no_other_size(cluster: Cluster) -> None:
    await cluster.create(vm("high-1", "fixed"))
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 1000.0}}
    status, problem = await cluster.call("PUT", "/v1/vms/high-1/target", json=body)
    assert (status, problem["field"]) == (400, "target.cpu_cores")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id": "host-b"}, "id"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"url": "http://192.0.2.1:7101"}, "url"),
        # No certificate would be looked at.
        ({"url": "https://192.0.2.1:7101"}, "url"),
        ({"url": "http://127.0.0.1:7101@example.org"}, "url"),
        ({"free": {"cpu_cores": -1}}, "free.cpu_cores"),
    ],
)
async def test_a_bad_report_is_refused(cluster: Cluster, changes: Any, field: str) -> None:
    report = {**cluster.agents[0].report().model_dump(mode="json"), **changes}
    status, problem = await cluster.call("POST", "/v1/hosts/host-a/report", token=REPORT_TOKEN, json=report)
    assert (status, problem["field"]) == (400, field)
    assert [row["id"] for row in (await cluster.get("/v1/hosts"))["hosts"]] == ["host-a"]


async def test_operations_and_events_come_newest_first_and_as_many_as_asked(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.create(vm(f"vm-{number}", cpu_cores=1.0, memory_mib=400.0))
    rows = (await cluster.get("/v1/operations?limit=2"))["operations"]
    assert [row["vm"] for row in rows] == ["vm-2", "vm-1"]
    assert [row["vm"] for row in (await cluster.get("/v1/events?limit=1"))["events"]] == ["vm-2"]


async def test_a_long_poll_returns_when_the_operation_ends(cluster: Cluster) -> None:
    await cluster.call("POST", "/v1/vms", json=request())
    async with asyncio.timeout(5):
        assert (await cluster.get("/v1/operations/r?wait_s=60"))["state"] == "done"
