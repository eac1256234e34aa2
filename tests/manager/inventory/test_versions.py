"""Versions of VMs and hosts over real HTTP: 304 for what is known, 412 for what has changed meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.client import ManagerRefused
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent

pytestmark = pytest.mark.usefixtures("each_store")

SIZE = {"cpu_cores": 2.0, "memory_mib": 500.0}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(tmp_path, FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0), silent_after_s=60.0) as made:
        await made.create(vm("low-1"))
        yield made


async def look(cluster: Cluster, path: str, known: str | None = None) -> tuple[int, str]:
    """Status and ETag of an answer."""
    assert cluster.server is not None
    headers = {"Authorization": f"Bearer {TOKEN}"} | ({"If-None-Match": known} if known else {})
    async with cluster.session.get(cluster.server.make_url(path), headers=headers) as response:
        body = await response.read()
        assert (response.status == 304) == (body == b"")
        return response.status, response.headers["ETag"]


def resize(number: int, **size: float) -> dict[str, Any]:
    return {"request_id": f"t{number}", "generation": number, "target": SIZE | size}


async def test_a_vm_that_is_known_is_not_sent_again_until_anything_of_it_moves(cluster: Cluster) -> None:
    status, tag = await look(cluster, "/v1/vms/low-1")
    assert (status, await look(cluster, "/v1/vms/low-1", tag)) == (200, (304, tag))
    low = cluster.agents[0].vms["low-1"]
    cluster.agents[0].vms["low-1"] = low.model_copy(update={"current": Vector(cpu_cores=1.5, memory_mib=700.0)})
    await cluster.ready()
    found, other = await look(cluster, "/v1/vms/low-1", tag)
    assert (found, other != tag) == (200, True)
    # A size that moved by itself is no change that a client could have made.
    assert other.partition(".")[0] == tag.partition(".")[0]


async def test_a_host_that_only_reported_again_is_not_sent_again(cluster: Cluster) -> None:
    _, tag = await look(cluster, "/v1/hosts/host-a")
    await cluster.ready()
    assert await look(cluster, "/v1/hosts/host-a", tag) == (304, tag)
    before = (await cluster.get("/v1/hosts/host-a"))["version"]
    cluster.agents[0].mode_reason = "disks"
    await cluster.ready()
    assert (await look(cluster, "/v1/hosts/host-a", tag))[0] == 200
    assert (await cluster.get("/v1/hosts/host-a"))["version"] != before


async def version(cluster: Cluster) -> str:
    return str((await cluster.get("/v1/vms/low-1"))["version"])


async def test_a_change_that_was_meant_for_an_older_version_is_refused_and_nothing_happens(cluster: Cluster) -> None:
    old = await version(cluster)
    await cluster.call("PUT", "/v1/vms/low-1/target", json=resize(3))
    await cluster.ended("t3")
    assert await version(cluster) != old
    stale = {"If-Match": f'"{old}"'}
    for method, path, body in (
        ("PUT", "/v1/vms/low-1/target", resize(4, cpu_cores=1.0)),
        ("PUT", "/v1/vms/low-1/target", {**resize(4), "dry_run": True}),
        ("DELETE", "/v1/vms/low-1?request_id=d", None),
        ("DELETE", "/v1/vms/low-1?request_id=d&dry_run=true", None),
    ):
        status, problem = await cluster.call(method, path, json=body, headers=stale)
        assert (status, problem["field"]) == (412, "If-Match"), (method, path)
    assert cluster.agents[0].cores("low-1") == 2.0
    assert (await cluster.get("/v1/operations"))["operations"][0]["request_id"] == "t3"


async def test_a_change_that_is_meant_for_the_present_version_is_carried_out(cluster: Cluster) -> None:
    present = {"If-Match": (await look(cluster, "/v1/vms/low-1"))[1]}
    status, _ = await cluster.call("PUT", "/v1/vms/low-1/target", json=resize(3), headers=present)
    assert status == 202
    assert (await cluster.ended("t3")).state is OperationState.DONE
    now = {"If-Match": f'"something-else", "{await version(cluster)}"'}
    assert (await cluster.call("DELETE", "/v1/vms/low-1?request_id=d", headers=now))[0] == 202


async def test_a_repeated_request_gets_its_answer_though_it_changed_the_version_itself(cluster: Cluster) -> None:
    present = {"If-Match": f'"{await version(cluster)}"'}
    for _ in range(2):
        status, _ = await cluster.call("PUT", "/v1/vms/low-1/target", json=resize(3), headers=present)
        assert status == 202
        await cluster.ended("t3")


async def test_a_header_that_holds_no_version_changes_nothing(cluster: Cluster) -> None:
    for header in ("low-1", '"', ""):
        status, problem = await cluster.call("DELETE", "/v1/vms/low-1?request_id=d", headers={"If-Match": header})
        assert (status, problem["field"]) == (400, "If-Match")
    assert "low-1" in cluster.agents[0].vms


async def test_versions_survive_a_restart_of_the_manager(cluster: Cluster) -> None:
    before = await version(cluster), (await cluster.get("/v1/hosts/host-a"))["version"]
    await cluster.kill_manager()
    await cluster.start_manager()
    await cluster.ready()
    assert (await version(cluster), (await cluster.get("/v1/hosts/host-a"))["version"]) == before


async def test_a_vm_that_was_made_anew_has_another_version(cluster: Cluster) -> None:
    before = await version(cluster)
    await cluster.delete("low-1")
    await cluster.create(vm("low-1"), "again")
    assert await version(cluster) != before


async def test_the_client_names_the_version_it_means(cluster: Cluster) -> None:
    async with cluster.client() as client:
        old = (await client.vm("low-1")).version
        size = Vector(**SIZE)
        await client.wait(await client.set_target("low-1", size, generation=3, version=old))
        for refused in (
            client.delete("low-1", version=old),
            client.set_target("low-1", size, generation=4, version=old),
            client.stop("low-1", version=old),
            client.start("low-1", version=old),
            client.resize("low-1", steady=False, version=old),
            client.migrate("low-1", version=old),
            client.release("low-1", version=old),
        ):
            with pytest.raises(ManagerRefused, match="has version") as caught:
                await refused
            assert caught.value.status == 412
        await client.delete("low-1", version=(await client.vm("low-1")).version)
