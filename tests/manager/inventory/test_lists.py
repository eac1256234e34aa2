"""Lists over real HTTP: pages that together are the whole, filters that leave out what they should."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from cluster_manager.plans.plans import VMPhase
from ebbtide.client import connection
from ebbtide.deflation.allocations import Priority
from tests.manager import cluster as clusters
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.conftest import KINDS, stores_of
from tests.manager.fake_agent import FakeAgent
from tests.manager.plan_events import record

SMALL: dict[str, Any] = {"cpu_cores": 1.0, "memory_mib": 400.0}
NAMES = ["db-1", "db-2", "high-1", "low-1", "low-2"]


# One cluster for all tests here: none but the last changes anything.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=KINDS)
def module_stores(request: pytest.FixtureRequest) -> Iterator[None]:
    """As ``each_store``, for all tests of this module together."""
    with stores_of(request) as stores, pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "database_in", stores)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(module_stores: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two hosts; five VMs that run, one that was refused, one that was deleted."""
    tmp_path = tmp_path_factory.mktemp("lists")
    agents = [FakeAgent(f"host-{letter}", cpu_cores=6.0, memory_mib=2600.0) for letter in "ab"]
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0) as made:
        assert made.manager is not None
        for number, agent in enumerate(agents[:2], 1):
            await record(made.manager.store, f"gone-{number}", agent.id, VMPhase.ENDED)
        agents[0].add_change("gone-1", 3.0, 2.0, at=1000.0)
        agents[0].add_change("gone-1", 2.0, 1.0, at=2000.0)
        agents[1].add_change("gone-2", 3.0, 1.0, at=2000.0)
        agents[1].add_change("gone-2", 1.0, 2.0, at=3000.0)
        for name in NAMES:
            await made.create(vm(name, "fixed" if name == "high-1" else "deflatable", **SMALL))
        await made.create(vm("too-big", cpu_cores=60.0))
        await made.create(vm("short", **SMALL))
        await made.delete("short")
        await made.ready()
        yield made


async def all_pages(cluster: Cluster, path: str, key: str, limit: int) -> list[Any]:
    """The rows of all pages, none of which may be longer than asked."""
    rows: list[Any] = []
    after = ""
    while True:
        joint = "&" if "?" in path else "?"
        page = await cluster.get(f"{path}{joint}limit={limit}{after}")
        assert len(page[key]) <= limit
        rows += page[key]
        if page["next"] is None:
            return rows
        assert len(page[key]) == limit
        after = f"&after={page['next']}"


LISTS = [
    ("/v1/vms", "vms"),
    ("/v1/hosts", "hosts"),
    ("/v1/operations", "operations"),
    ("/v1/events", "events"),
    ("/v1/core-changes", "core_changes"),
    ("/v1/machines", "machines"),
]


def bare(rows: list[Any]) -> list[Any]:
    """Rows without what time alone moves."""
    moving = ("seen_at", "since_change_s", "completion_probability", "free", "seconds")
    return [{key: value for key, value in row.items() if key not in moving} for row in rows]


@pytest.mark.parametrize(("path", "key"), LISTS)
async def test_pages_of_any_length_are_together_the_whole_list(cluster: Cluster, path: str, key: str) -> None:
    whole = (await cluster.get(f"{path}?limit=1000"))[key]
    assert len(whole) >= 2
    for limit in (1, 2, 3, len(whole)):
        assert bare(await all_pages(cluster, path, key, limit)) == bare(whole)


@pytest.mark.parametrize(("path", "key"), LISTS)
async def test_the_cursor_of_another_list_is_refused(cluster: Cluster, path: str, key: str) -> None:
    other = "/v1/hosts" if path != "/v1/hosts" else "/v1/vms"
    cursor = (await cluster.get(f"{other}?limit=1"))["next"]
    for wrong in (cursor, "nonsense"):
        status, problem = await cluster.call("GET", f"{path}?after={wrong}")
        assert (status, problem["field"]) == (400, "after")


def names_of(rows: list[Any]) -> list[str]:
    return [row["name"] for row in rows]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", [*NAMES, "too-big"]),
        ("prefix=low-", ["low-1", "low-2"]),
        ("prefix=low&priority=deflatable", ["low-1", "low-2"]),
        ("priority=fixed", ["high-1"]),
        ("priority=harvest", []),
        ("state=failed", ["too-big"]),
        ("state=running", NAMES),
        ("state=placing", []),
        ("state=running&priority=fixed", ["high-1"]),
        ("host=host-z", []),
    ],
)
@pytest.mark.parametrize("limit", [1, 100])
async def test_vms_are_filtered(cluster: Cluster, query: str, names: list[str], limit: int) -> None:
    assert names_of(await all_pages(cluster, f"/v1/vms?{query}", "vms", limit)) == names


async def test_vms_of_a_host_are_those_it_has(cluster: Cluster) -> None:
    for agent in cluster.agents:
        assert names_of((await cluster.get(f"/v1/vms?host={agent.id}"))["vms"]) == sorted(agent.vms)


async def test_hosts_are_filtered_by_state_and_mode(cluster: Cluster) -> None:
    async def ids(query: str) -> list[str]:
        return [row["id"] for row in (await cluster.get(f"/v1/hosts?{query}"))["hosts"]]

    assert await ids("state=ready") == ["host-a", "host-b"]
    assert await ids("mode=paused") == await ids("state=silent") == []
    assert await ids("state=ready&mode=active") == ["host-a", "host-b"]


@pytest.mark.parametrize("limit", [1, 100])
async def test_operations_are_filtered(cluster: Cluster, limit: int) -> None:
    async def ids(query: str) -> list[str]:
        rows = await all_pages(cluster, f"/v1/operations?{query}", "operations", limit)
        return [row["request_id"] for row in rows]

    everything = await ids("")
    assert everything[0] == "delete-short"
    assert await ids("kind=delete") == ["delete-short"]
    assert await ids("kind=target") == await ids("state=running") == []
    assert await ids("state=failed") == ["create-too-big"]
    assert await ids("vm=short") == ["delete-short", "create-short"]
    assert await ids("vm=short&kind=create&state=done") == ["create-short"]
    placed = {name: agent.id for agent in cluster.agents for name in agent.vms}
    assert f"create-{NAMES[0]}" in await ids(f"host={placed[NAMES[0]]}")
    assert f"create-{NAMES[0]}" not in await ids(f"host={'host-b' if placed[NAMES[0]] == 'host-a' else 'host-a'}")
    began = {row["request_id"]: row["started_at"] for row in (await cluster.get("/v1/operations"))["operations"]}
    assert await ids(f"since={began['delete-short']:.6f}") in (["delete-short"], [])
    assert await ids("since=99999999999") == []


async def test_events_are_filtered_and_numbered(cluster: Cluster) -> None:
    async def rows(query: str) -> list[Any]:
        return await all_pages(cluster, f"/v1/events?{query}", "events", 3)

    everything = await rows("")
    numbers = [row["id"] for row in everything]
    assert numbers == sorted(numbers, reverse=True)
    assert {row["kind"] for row in await rows("kind=placed")} == {"placed"}
    assert [row["kind"] for row in await rows("vm=too-big")] == ["refused"]
    assert {row["host"] for row in await rows("host=host-a")} == {"host-a"}
    assert await rows(f"since_id={numbers[2]}") == everything[:2]
    assert await rows("since=99999999999") == []
    assert len(await rows("since=1")) == len(everything)


async def test_core_changes_are_filtered(cluster: Cluster) -> None:
    async def rows(query: str) -> list[Any]:
        found = await all_pages(cluster, f"/v1/core-changes?{query}", "core_changes", 1)
        return [(row["machine"], row["at"]) for row in found]

    assert await rows("machine=gone-1") == [("gone-1", 2000.0), ("gone-1", 1000.0)]
    assert await rows("since=2000&machine=gone-1") == [("gone-1", 2000.0)]
    assert await rows("machine=gone-2") == [("gone-2", 3000.0), ("gone-2", 2000.0)]
    assert len(await rows("since=1000")) >= 4


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/vms?state=asleep", "state"),
        ("/v1/vms?priority=high", "priority"),
        ("/v1/vms?prefix=%25", "prefix"),
        ("/v1/vms?host=Host", "host"),
        ("/v1/hosts?mode=asleep", "mode"),
        ("/v1/operations?kind=steal", "kind"),
        ("/v1/operations?since=yesterday", "since"),
        ("/v1/operations?vm=%22", "vm"),
        ("/v1/events?kind=A", "kind"),
        ("/v1/events?since_id=-1", "since_id"),
        ("/v1/core-changes?limit=0", "limit"),
    ],
)
async def test_a_filter_that_can_be_none_is_named(cluster: Cluster, path: str, field: str) -> None:
    status, problem = await cluster.call("GET", path)
    assert (status, problem["field"]) == (400, field)


async def test_the_client_reads_all_pages(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAGE", 2)
    async with cluster.client() as client:
        assert [found.name for found in await client.vms()] == [*NAMES, "too-big"]
        assert [found.name for found in await client.vms(prefix="db")] == ["db-1", "db-2"]
        assert len(await client.operations(7)) == 7
        assert len(await client.operations(1)) == 1
        assert len(await client.machines(60)) == 5
        assert len(await client.core_changes(limit=3)) == 3


async def test_a_vm_that_its_host_reports_no_more_is_found_as_failed_and_not_as_running(cluster: Cluster) -> None:
    owner = next(agent for agent in cluster.agents if "low-1" in agent.vms)
    del owner.vms["low-1"]
    await cluster.ready()
    assert names_of((await cluster.get("/v1/vms?state=failed"))["vms"]) == ["low-1", "too-big"]
    assert "low-1" not in names_of(await all_pages(cluster, "/v1/vms?state=running", "vms", 2))


async def test_a_vm_whose_host_says_another_priority_than_its_row_is_listed_by_the_one_that_is_shown(
    cluster: Cluster,
) -> None:
    owner = next(agent for agent in cluster.agents if "db-1" in agent.vms)
    before = owner.vms["db-1"]
    # As after a resize whose answer was lost.
    owner.vms["db-1"] = before.model_copy(update={"priority": Priority.FIXED, "minimum": before.nominal})
    await owner.send_report()
    for limit in (1, 100):
        fixed = await all_pages(cluster, "/v1/vms?priority=fixed", "vms", limit)
        assert [(row["name"], row["priority"]) for row in fixed] == [("db-1", "fixed"), ("high-1", "fixed")]
        assert "db-1" not in names_of(await all_pages(cluster, "/v1/vms?priority=deflatable", "vms", limit))
