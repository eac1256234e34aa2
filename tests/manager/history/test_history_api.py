"""History of hosts and VMs over the REST interface: figures, marks, and what cannot be asked for."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.messages.history import SAMPLED_EVERY_S, Columns, HostColumns, HostUsage, VMUsage
from ebbtide.rest.credentials import report_token
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent

#: Once on each kind of store.
pytestmark = pytest.mark.usefixtures("each_store")

AGENT = report_token(HOSTS_KEY, "host-a")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(tmp_path, FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)) as made:
        yield made


async def looked_at(cluster: Cluster) -> None:
    """The manager has a sample of what its hosts are now."""
    await cluster.ready()
    assert cluster.manager is not None
    await cluster.manager.recorder.look()


def last(series: list[float | None]) -> float | None:
    return series[-1]


async def test_a_vms_history_has_the_figures_of_its_deflation_and_says_when_it_was(cluster: Cluster) -> None:
    await cluster.create(vm("low"))
    await cluster.create(vm("high", "fixed", cpu_cores=4.0, memory_mib=1200.0))
    usage = HostUsage(
        vms=(
            VMUsage(
                name="low",
                resident_memory_mib=512.0,
                cpu_pressure_percent=12.5,
                memory_pressure_percent=3.0,
                guest_cpu_cores=0.5,
                guest_memory_mib=0.0,
                application_cpu_cores=9.0,
                application_memory_mib=0.0,
            ),
        )
    )
    status, reply = await cluster.call("POST", "/v1/hosts/host-a/usage", AGENT, json=usage.model_dump())
    assert (status, reply) == (200, {"every_s": SAMPLED_EVERY_S})
    await looked_at(cluster)
    found, now = await cluster.get("/v1/vms/low/history"), await cluster.get("/v1/vms/low")
    figures = {name: last(series) for name, series in found["columns"].items()}
    assert figures["nominal_cpu_cores"] == now["nominal"]["cpu_cores"] == 3.0
    assert figures["bound_cpu_cores"] == pytest.approx(now["current"]["cpu_cores"], abs=1e-3)
    missing = 3.0 - now["current"]["cpu_cores"]
    assert missing > 0.5
    assert figures["guest_cpu_cores"] == figures["application_cpu_cores"] == 0.5
    assert figures["hypervisor_cpu_cores"] == pytest.approx(missing - 0.5, abs=1e-3)
    assert figures["resident_memory_mib"] == 512.0
    assert figures["cpu_pressure_max_percent"] == 12.5
    assert found["times"][-1] <= time.time() < found["times"][-1] + 2 * found["step_s"]
    events = {row["id"]: row for row in (await cluster.get("/v1/events?vm=low"))["events"]}
    assert [mark["event_id"] for mark in found["marks"]] == sorted(events)
    assert all(mark["sentence"] == events[mark["event_id"]]["sentence"] for mark in found["marks"])
    assert "placed" in {mark["kind"] for mark in found["marks"]}


async def test_a_hosts_history_has_the_sums_of_its_vms(cluster: Cluster) -> None:
    await cluster.create(vm("low"))
    await cluster.create(vm("high", "fixed", cpu_cores=4.0, memory_mib=1200.0))
    await looked_at(cluster)
    columns = (await cluster.get("/v1/hosts/host-a/history"))["columns"]
    host = await cluster.get("/v1/hosts/host-a")
    vms = (await cluster.get("/v1/vms"))["vms"]
    assert last(columns["vms"]) == 2.0
    assert last(columns["capacity_cpu_cores"]) == host["capacity"]["cpu_cores"]
    assert last(columns["free_memory_mib"]) == pytest.approx(host["free"]["memory_mib"], abs=1e-2)
    for figure, of in (("nominal", "nominal"), ("bound", "current"), ("minimum", "minimum")):
        total = sum(vm[of]["memory_mib"] for vm in vms)
        assert last(columns[f"{figure}_memory_mib"]) == pytest.approx(total, abs=1e-2)
    assert last(columns["resident_memory_mib"]) is None, "nobody has said what is resident"


async def test_where_nothing_was_heard_values_are_null_and_all_lists_are_of_one_length(cluster: Cluster) -> None:
    await looked_at(cluster)
    found = await cluster.get("/v1/hosts/host-a/history?points=10")
    assert found["step_s"] % 60 == 0
    assert 1 < len(found["times"]) <= 10
    assert {later - earlier for earlier, later in itertools.pairwise(found["times"])} == {found["step_s"]}
    assert set(found["columns"]) == set(HostColumns.model_fields) > set(Columns.model_fields)
    assert {len(series) for series in found["columns"].values()} == {len(found["times"])}
    assert {value for series in found["columns"].values() for value in series[:-2]} == {None}


@pytest.mark.parametrize("path", ["/v1/hosts/host-a/history", "/v1/vms/low/history"])
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("from=yesterday", "from"),
        ("from=-1", "from"),
        ("from=2000&to=1000", "from"),
        ("from=1e11", "from"),
        ("to=Infinity", "to"),
        ("points=1", "points"),
        ("points=1000000", "points"),
        ("points=3&points=4", "points"),
        ("step=60", "step"),
    ],
)
async def test_a_history_that_cannot_be_names_the_parameter(
    cluster: Cluster, path: str, query: str, field: str
) -> None:
    await cluster.create(vm("low"))
    status, problem = await cluster.call("GET", f"{path}?{query}")
    assert (status, problem["field"]) == (400, field), problem


@pytest.mark.parametrize(("path", "field"), [("hosts/host-b", "id"), ("vms/none", "name")])
async def test_there_is_no_history_of_what_never_was(cluster: Cluster, path: str, field: str) -> None:
    status, problem = await cluster.call("GET", f"/v1/{path}/history")
    assert (status, problem["field"]) == (404, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"vms": [{"name": "low", "resident_memory_mib": -1.0}]}, "vms.0.resident_memory_mib"),
        ({"vms": [{"name": "low", "cpu_pressure_percent": 101.0}]}, "vms.0.cpu_pressure_percent"),
        ({"vms": [{"resident_memory_mib": 1.0}]}, "vms.0.name"),
        ({}, "vms"),
    ],
)
async def test_what_an_agent_says_wrongly_of_its_vms_use_names_the_field(
    cluster: Cluster, body: Any, field: str
) -> None:
    status, problem = await cluster.call("POST", "/v1/hosts/host-a/usage", AGENT, json=body)
    assert (status, problem["field"]) == (400, field), problem


async def test_an_agent_tells_of_its_own_host_only_and_no_client_does(cluster: Cluster) -> None:
    path, body = "/v1/hosts/host-a/usage", HostUsage(vms=()).model_dump()
    assert (await cluster.call("POST", path, report_token(HOSTS_KEY, "host-b"), json=body))[0] == 403
    assert (await cluster.call("POST", path, json=body))[0] in (401, 403)
    assert (await cluster.call("POST", "/v1/hosts/host-b/usage", report_token(HOSTS_KEY, "host-b"), json=body))[
        0
    ] == 404
