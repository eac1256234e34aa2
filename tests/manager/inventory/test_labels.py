"""Labels over real HTTP: set, chosen by, kept over restarts, gone with their VM, unknown to hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def cluster(each_store: None, tmp_path: Path) -> AsyncIterator[Cluster]:
    agents = [FakeAgent(f"host-{letter}", cpu_cores=8.0, memory_mib=6000.0) for letter in "ab"]
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0) as made:
        yield made


async def label(cluster: Cluster, path: str, labels: Any, status: int = 200, **options: Any) -> Any:
    found, body = await cluster.call("PATCH", f"{path}/labels", json={"labels": labels}, **options)
    assert found == status, body
    return body


async def chosen(cluster: Cluster, path: str, selector: str) -> list[str]:
    page = await cluster.get(f"{path}?selector={selector}&limit=1000")
    return [row.get("name") or row["id"] for rows in page.values() if isinstance(rows, list) for row in rows]


SMALL: dict[str, Any] = {"cpu_cores": 1.0, "memory_mib": 400.0}


async def test_vms_are_created_with_labels_and_chosen_by_them(cluster: Cluster) -> None:
    await cluster.create(vm("web", labels={"env": "prod", "tier": "web"}, **SMALL))
    await cluster.create(vm("db", labels={"env": "prod", "tier": "db"}, **SMALL))
    await cluster.create(vm("try", labels={"env": "test"}, **SMALL))
    await cluster.create(vm("bare", **SMALL))
    assert await chosen(cluster, "/v1/vms", "env%3Dprod") == ["db", "web"]
    assert await chosen(cluster, "/v1/vms", "env%20notin%20(prod)") == ["bare", "try"]
    assert await chosen(cluster, "/v1/vms", "tier") == ["db", "web"]
    assert await chosen(cluster, "/v1/vms", "!env") == ["bare"]
    page = await cluster.get("/v1/vms?selector=env&limit=2")
    rest = await cluster.get(f"/v1/vms?selector=env&limit=2&after={page['next']}")
    assert [row["name"] for row in page["vms"] + rest["vms"]] == ["db", "try", "web"]
    status, problem = await cluster.call("GET", "/v1/vms?selector=a%20b")
    assert (status, problem["field"]) == (400, "selector")


async def test_a_creation_that_is_sent_again_with_its_labels_in_another_order_is_the_same(cluster: Cluster) -> None:
    labels = {"env": "prod", "tier": "web"}
    bodies = [
        {"request_id": "again", "vm": vm("web", labels=one, **SMALL)}
        for one in (labels, dict(reversed(labels.items())), {"env": "web", "tier": "prod"})
    ]
    answers = [await cluster.call("POST", "/v1/vms", json=body) for body in bodies]
    assert [status for status, _ in answers] == [202, 202, 409], answers
    assert answers[2][1]["field"] == "request_id"
    status, problem = await cluster.call("DELETE", "/v1/vms/web?request_id=again")
    assert (status, problem["field"]) == (409, "request_id"), problem


async def test_labels_are_changed_kept_over_a_restart_and_gone_with_the_vm(cluster: Cluster) -> None:
    await cluster.create(vm("web", labels={"env": "prod"}, **SMALL))
    before = await cluster.get("/v1/vms/web")
    after = await label(cluster, "/v1/vms/web", {"tier": "web", "env": None})
    assert after["labels"] == {"tier": "web"}
    assert after["version"] != before["version"]
    await label(cluster, "/v1/vms/web", {"x": "y"}, 412, headers={"If-Match": f'"{before["version"]}"'})
    assert (await label(cluster, "/v1/vms/web", {"tier": "web"}))["version"] == after["version"]
    await cluster.stop_manager()
    await cluster.start_manager()
    await cluster.ready()
    assert (await cluster.get("/v1/vms/web"))["labels"] == {"tier": "web"}
    await cluster.delete("web")
    await cluster.create(vm("web", **SMALL), "again")
    assert (await cluster.get("/v1/vms/web"))["labels"] == {}


async def test_hosts_have_labels_which_reports_and_restarts_leave_alone(cluster: Cluster) -> None:
    assert (await label(cluster, "/v1/hosts/host-a", {"rack": "r7"}))["labels"] == {"rack": "r7"}
    await cluster.agents[0].send_report()
    assert await chosen(cluster, "/v1/hosts", "rack%3Dr7") == ["host-a"]
    assert await chosen(cluster, "/v1/hosts", "rack!%3Dr7") == ["host-b"]
    await cluster.stop_manager()
    await cluster.start_manager()
    await cluster.ready()
    assert (await cluster.get("/v1/hosts/host-a"))["labels"] == {"rack": "r7"}
    assert (await label(cluster, "/v1/hosts/host-a", {"rack": None}))["labels"] == {}


@pytest.mark.parametrize(("labels", "field"), [({"a b": "x"}, "labels.a b"), ({"env": "a/b"}, "labels.env")])
async def test_bad_labels_are_refused_with_their_field_and_nothing_changes(
    cluster: Cluster, labels: dict[str, str], field: str
) -> None:
    await cluster.create(vm("web", labels={"env": "prod"}, **SMALL))
    for path in ("/v1/vms/web", "/v1/hosts/host-a"):
        assert (await label(cluster, path, labels, 400))["field"] == field
    status, problem = await cluster.call(
        "POST", "/v1/vms", json={"request_id": "bad", "vm": vm("bad", labels=labels, **SMALL)}
    )
    assert (status, problem["field"]) == (400, f"vm.{field}")
    assert (await cluster.get("/v1/vms/web"))["labels"] == {"env": "prod"}
    await label(cluster, "/v1/vms/none", {"a": "b"}, 404)
    await label(cluster, "/v1/hosts/none", {"a": "b"}, 404)


async def test_hosts_are_told_nothing_of_labels(cluster: Cluster) -> None:
    operation = await cluster.create(vm("web", labels={"env": "prod"}, **SMALL))
    assert operation.state == "done"
    assert cluster.manager is not None
    (row,) = await cluster.manager.store.vms("web")
    assert row.labels == {"env": "prod"}
    assert row.spec.labels == {}
