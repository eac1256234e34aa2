"""What is asked of thousands of hosts: the same answers as one by one, and nothing that holds the loop up for long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.inventory.availability import Availability
from cluster_manager.inventory.hosts import LOOKS, Hosts
from cluster_manager.plans.report_queries import allocations_of, demand_of, low_priority, missing_on
from cluster_manager.store.database import Database
from cluster_manager.store.rows import StoredHost
from cluster_manager.store.store import Store
from cluster_manager.tasks.core_changes import CoreChanges
from ebbtide.deflation.allocations import deflatable_capacity
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMSpec, VMState, VMStatus
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.plan_events import report_of, spec_of, status_of
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


@st.composite
def statuses(draw: Any) -> VMStatus:
    name = draw(st.sampled_from([f"vm-{n}" for n in range(9)]))
    spec = spec_of(name, draw(st.sampled_from(["fixed", "deflatable"])), 4.0, 2000.0)
    share = draw(st.integers(0, 4)) / 4
    lowest = spec.allocation(ZERO).minimum
    size = lowest + spec.nominal.vector().less(lowest) * share
    status = status_of(spec, "host-a", Vector.of(size))
    if draw(st.booleans()) and draw(st.booleans()):
        off = {"state": VMState.STOPPED, "start_size": status.current, "current": Vector(), "overhead_mib": 0.0}
        return status.model_copy(update=off)
    return status


@given(
    found=st.lists(statuses(), max_size=6, unique_by=lambda vm: vm.name),
    cores=st.integers(1, 40),
    memory_mib=st.integers(200, 20_000),
    disk=st.sampled_from([0.0, 50.0]),
)
def test_whether_minimums_allow_is_the_same_without_rows_as_with_them(
    found: list[VMStatus], cores: int, memory_mib: int, disk: float
) -> None:
    report = report_of("host-a", *found, cpu_cores=24.0, memory_mib=16_000.0)
    size = ResourceVector(cpu_cores=float(cores), memory_mib=float(memory_mib), disk_mib_s=disk)
    spec = VMSpec(name="new", nominal=Vector.of(size))
    rows = allocations_of(report)
    by_rows = missing_on(report, demand_of(spec, report)).fits_in(deflatable_capacity(rows))
    availability = Availability()
    availability.open(report)
    assert availability.minimums_allow(size)("host-a") == by_rows
    charged, above = low_priority(report)
    assert above == pytest.approx(tuple(deflatable_capacity(rows)))
    assert charged == pytest.approx(tuple(sum((row.charge for row in rows if row.priority != "fixed"), ZERO)))


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    made = Store(database, lambda: 0.0)
    await made.open()
    yield made
    await made.close()


def named(number: int, mode: HostMode = HostMode.ACTIVE) -> HostReport:
    return report_of(f"host-{number:04}", status_of(spec_of("low", "deflatable"), "x")).model_copy(
        update={"mode": mode}
    )


async def test_a_page_of_hosts_reads_no_more_reports_than_it_shows(store: Store) -> None:
    await store.save_hosts([named(number) for number in range(300)])
    hosts = Hosts(store, 10.0, lambda: 0.0)
    await hosts.load()
    found = await hosts.page(10, "host-0099")
    assert [status.id for status in found] == [f"host-{number:04}" for number in range(100, 111)]
    unread = [host for host in hosts._hosts.values() if isinstance(host._report, StoredHost)]
    assert len(unread) == 300 - 11
    # By what need not be read, too.
    assert await hosts.page(10, None, state="ready") == []
    assert len([host for host in hosts._hosts.values() if isinstance(host._report, StoredHost)]) == 300 - 11


async def test_the_loop_does_other_work_while_all_reports_are_read(store: Store) -> None:
    modes = {7: HostMode.DRAINING, 290: HostMode.DRAINING}
    await store.save_hosts([named(number, modes.get(number, HostMode.ACTIVE)) for number in range(300)])
    hosts = Hosts(store, 10.0, lambda: 0.0)
    await hosts.load()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other(), name="other work")
    try:
        found = await hosts.page(10, None, mode=HostMode.DRAINING)
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    assert [status.id for status in found] == ["host-0007", "host-0290"]
    assert turns >= 300 // LOOKS - 1


async def test_the_loop_does_other_work_while_a_manager_begins_that_asks_for_the_vms_of_all(store: Store) -> None:
    await store.save_hosts([named(number) for number in range(300)])
    hosts = Hosts(store, 10.0, lambda: 1e6)
    await hosts.load()
    changes = CoreChanges(store, hosts, lambda: 1e6)
    left = []

    async def other() -> None:
        while True:
            left.append(sum(isinstance(host._report, StoredHost) for host in hosts._hosts.values()))
            await asyncio.sleep(0)

    beside = asyncio.create_task(other(), name="other work")
    try:
        await changes.load()
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    left.append(sum(isinstance(host._report, StoredHost) for host in hosts._hosts.values()))
    assert (left[0], left[-1]) == (300, 0)
    assert max(before - after for before, after in itertools.pairwise(left)) <= LOOKS


@pytest.mark.parametrize("given", [{}, {"mode": HostMode.ACTIVE}, {"state": "silent"}])
async def test_a_host_that_is_forgotten_while_a_page_is_made_is_left_out(store: Store, given: dict[str, Any]) -> None:
    await store.save_hosts([named(number) for number in range(300)])
    hosts = Hosts(store, 10.0, lambda: 0.0)
    await hosts.load()
    page, gone = asyncio.create_task(hosts.page(300, None, **given)), "host-0299"
    await asyncio.sleep(0)
    hosts.forget(gone)
    assert [status.id for status in await page] == [f"host-{number:04}" for number in range(299)]


@each_store
async def test_one_machine_is_ranked_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))

        async def alike() -> bool:
            """As among all, once the last core change of both is known."""
            moving = ("since_change_s", "completion_probability")
            rows = (await cluster.get("/v1/machines"))["machines"]
            one = await cluster.get("/v1/machines/low-2")
            return any(all(row[key] == one[key] for key in row if key not in moving) for row in rows)

        await until(alike)
        assert cluster.manager is not None
        read, asked = cluster.manager.store.running_vms, []

        async def vms(name: str | None = None) -> Any:
            asked.append(name)
            return await read(name)

        monkeypatch.setattr(cluster.manager.store, "running_vms", vms)
        assert (await cluster.get("/v1/machines/low-2"))["machine"] == "low-2"
        assert asked == ["low-2"]
        assert (await cluster.call("GET", "/v1/machines/low-9"))[0] == 404


@each_store
async def test_a_state_that_few_vms_are_in_is_found_without_showing_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2", "low-3"):
            await cluster.create(vm(name, cpu_cores=1.0, memory_mib=500.0))
        del agent.vms["low-2"]
        agent.vms["low-3"] = agent.vms["low-3"].model_copy(update={"state": VMState.STOPPED})
        await cluster.ready()
        assert cluster.manager is not None
        lists, shown = cluster.manager.lists, []
        show = lists._show_vm

        def watched(row: Any) -> Any:
            shown.append(row.name)
            return show(row)

        monkeypatch.setattr(lists, "_show_vm", watched)
        for state, names in (("failed", ["low-2"]), ("stopped", ["low-3"]), ("running", ["low-1"])):
            shown.clear()
            rows = (await cluster.get(f"/v1/vms?state={state}&limit=1"))["vms"]
            assert [row["name"] for row in rows] == shown == names
            assert [row["state"] for row in rows] == [state]
