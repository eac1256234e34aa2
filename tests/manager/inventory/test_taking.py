"""Reports that are taken at the same time, or whose plan is cancelled meanwhile: what is told and stored is true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cluster_manager.inventory import hosts as inventory
from cluster_manager.store.store import Line, Store
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.labels import LabelsRequest
from ebbtide.messages.vms import VMState
from ebbtide.rest.rates import Rate
from tests.manager import cluster as clusters
from tests.manager.inventory.test_hosts import Clock, hosts_of, report, status
from tests.manager.plan_events import record

each_store = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(clusters.database_in(tmp_path), lambda: 1.0)
    await store.open()
    yield store
    await store.close()


@each_store
async def test_news_that_were_written_though_their_plan_was_cancelled_are_not_told_again(store: Store) -> None:
    """Also where an earlier plan was cancelled before it wrote them."""
    hosts = hosts_of(store, Clock())
    await hosts.take(report())
    for lock in (hosts._saving, store._lock):
        async with lock:
            asked = asyncio.create_task(hosts.take(report(mode="paused")), name="a plan's question")
            async with asyncio.timeout(20):
                while not lock._waiters:
                    await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    await asyncio.gather(*store._writes)
    await hosts.take(report(mode="paused"))
    assert [event.kind for event in await store.events(10)].count("mode") == 1


@each_store
async def test_a_report_whose_plan_is_cancelled_before_it_is_stored_replaces_no_other_one_in_the_store(
    store: Store,
) -> None:
    hosts = hosts_of(store, Clock())
    await hosts.take(report())

    async def stored() -> HostReport:
        return HostReport.model_validate_json((await store.hosts())[0].report_json)

    async with hosts._saving:
        asked = asyncio.create_task(hosts.take(report("host-a", 3.0, status("low-1"))), name="a plan's question")
        async with asyncio.timeout(20):
            while not hosts._unsaved:
                await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await hosts.take(later := report(mode="paused"))
    await hosts.take(report("host-b"))
    assert await stored() == later

    another = report("host-a", 4.0, status("low-2"), mode="paused")
    async with hosts._saving:
        waits = asyncio.create_task(hosts.take(another), name="a report")
        other = report("host-a", 3.0, status("low-1"), mode="paused")
        asked = asyncio.create_task(hosts.take(other), name="a plan's question")
        async with asyncio.timeout(20):
            while len(hosts._saving._waiters or ()) < 2:
                await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await waits
    assert await stored() == another


@each_store
async def test_a_new_host_keeps_the_labels_that_it_gets_before_its_first_report_is_stored(store: Store) -> None:
    hosts = hosts_of(store, Clock())
    async with hosts._saving:
        taking = asyncio.create_task(hosts.take(report(mode="paused")), name="a report")
        async with asyncio.timeout(20):
            while hosts.get("host-a") is None:
                await asyncio.sleep(0)
        labelling = asyncio.create_task(hosts.label("host-a", LabelsRequest(labels={"rack": "r1"})), name="a request")
        async with asyncio.timeout(20):
            while not labelling.done() and len(hosts._saving._waiters or ()) < 2:
                await asyncio.sleep(0)
    await asyncio.gather(taking, labelling)
    (stored,) = await store.hosts()
    assert stored.labels == {"rack": "r1"}


@each_store
async def test_the_latest_report_is_stored_where_the_news_of_one_before_were_written_late(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = hosts_of(store, Clock())
    await record(store, "low-1", "host-a")
    await hosts.take(report())
    recorded, asked, go_on = store.recorded, asyncio.Event(), asyncio.Event()

    async def held_up(host: str) -> frozenset[str]:
        asked.set()
        await go_on.wait()
        return await recorded(host)

    monkeypatch.setattr(store, "recorded", held_up)
    off = status("low-1").model_copy(update={"state": VMState.STOPPED, "off_reason": "its domain has ended"})
    early = asyncio.create_task(hosts.take(report("host-a", 4.0, off)), name="the first")
    async with asyncio.timeout(20):
        await asked.wait()
    await hosts.take(report("host-a", 4.0, off, status("low-2")))
    async with hosts._saving:
        go_on.set()
        async with asyncio.timeout(20):
            while not hosts._saving._waiters:
                await asyncio.sleep(0)
        last = asyncio.create_task(hosts.take(latest := report("host-a", 4.0, off, status("low-3"))), name="the last")
        async with asyncio.timeout(20):
            while len(hosts._saving._waiters) < 2:
                await asyncio.sleep(0)
    await asyncio.gather(early, last)
    assert [event.kind for event in await store.events(10)].count("stopped") == 1
    (stored,) = await store.hosts()
    assert HostReport.model_validate_json(stored.report_json) == latest


@each_store
async def test_reports_whose_news_are_too_many_to_be_written_are_stored_together(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "_EVENTS", Rate(per_s=0.001, burst=1.0))
    hosts, names = hosts_of(store, Clock()), ("host-a", "host-b", "host-c")
    for name in names:
        await hosts.take(report(name, mode="paused"))
    batches, save = [], store.save_hosts

    async def counted(reports: Sequence[HostReport], lines: Sequence[Line] = ()) -> None:
        batches.append(([one.id for one in reports], len(lines)))
        await save(reports, lines)

    monkeypatch.setattr(store, "save_hosts", counted)
    await asyncio.gather(*(hosts.take(report(name)) for name in names))
    assert batches == [(list(names), 0)]
    assert [event.kind for event in await store.events(10)].count("mode") == 3
