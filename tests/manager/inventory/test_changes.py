"""Lists by what has changed: numbers as values, and the same over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.inventory import changes
from cluster_manager.inventory.changes import Changes
from ebbtide.client import ManagerClient
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=40))
def test_a_reader_that_asks_now_and_then_misses_no_change(steps: list[tuple[str, bool]]) -> None:
    numbers = Changes(100.0)
    since, unread = numbers.latest, set()
    for name, reads in steps:
        numbers.note("VM", [name])
        unread.add(name)
        if reads:
            assert numbers.knows(since)
            assert numbers.since("VM", since) == unread
            since, unread = numbers.latest, set()
    assert numbers.since("host", 0) == set()


def test_a_number_of_another_term_or_of_too_long_ago_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST", 3)
    earlier, later = Changes(100.0), Changes(200.0)
    assert not later.knows(earlier.latest)
    assert not earlier.knows(later.latest)
    assert not later.knows(0)
    since = later.latest
    later.note("VM", ["a", "b", "c"])
    assert later.knows(since)
    later.note("VM", ["d"])
    assert not later.knows(since)
    assert later.knows(since + 1)


@pytest_asyncio.fixture
async def cluster(each_store: None, tmp_path: Path) -> AsyncIterator[Cluster]:
    agents = [FakeAgent(f"host-{letter}", cpu_cores=8.0, memory_mib=6000.0) for letter in "ab"]
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0) as made:
        yield made


@pytest.mark.asyncio
async def test_only_vms_that_have_changed_come_and_names_of_those_that_are_gone(cluster: Cluster) -> None:
    for name in ("one", "two", "three"):
        await cluster.create(vm(name, "fixed", cpu_cores=1.0, memory_mib=400.0))
    await cluster.ready()
    async with cluster.client() as client:
        all_ = await client.changed_vms(0)
        assert all_.is_whole
        assert [row.name for row in all_.rows] == ["one", "three", "two"]
        nothing = await client.changed_vms(all_.changes)
        assert not nothing.is_whole
        assert not nothing.rows
        assert not nothing.gone
        await cluster.delete("two")
        await cluster.create(vm("four", cpu_cores=1.0, memory_mib=400.0))
        news = await client.changed_vms(nothing.changes)
        assert news.gone == ("two",)
        assert "four" in {row.name for row in news.rows}
        assert (await cluster.get(f"/v1/vms?prefix=f&changed_since={nothing.changes}"))["changed_since"] is None
        assert (await cluster.get(f"/v1/hosts?state=ready&changed_since={nothing.changes}"))["changed_since"] is None
        assert not news.is_whole
        for agent in cluster.agents:
            agent.trouble.mute = True
        hosts = await client.changed_hosts(0)
        assert hosts.is_whole
        assert len(hosts.rows) == 2
        at = hosts.changes

        async def is_quiet() -> bool:
            nonlocal at
            found = await client.changed_hosts(at)
            at = found.changes
            return not found.rows

        await until(is_quiet)
        cluster.agents[1].add_change("one", 2.0, 1.0, at=1000.0)
        await cluster.agents[1].send_report()
        assert {row.id for row in (await client.changed_hosts(at)).rows} == {"host-b"}


@pytest.mark.asyncio
async def test_after_a_restart_of_the_manager_the_whole_list_comes_again(cluster: Cluster) -> None:
    await cluster.create(vm("one", cpu_cores=1.0, memory_mib=400.0))
    before = (await cluster.get("/v1/vms"))["changes"]
    await cluster.stop_manager()
    await cluster.start_manager()
    await cluster.ready()
    page = await cluster.get(f"/v1/vms?changed_since={before}")
    assert page["changed_since"] is None
    assert [row["name"] for row in page["vms"]] == ["one"]


@pytest.mark.asyncio
async def test_vms_of_a_host_that_falls_silent_change_and_so_does_one_that_its_host_has_no_more(
    each_store: None, tmp_path: Path
) -> None:
    agent = FakeAgent("host-a", cpu_cores=8.0, memory_mib=6000.0)
    async with cluster_of(tmp_path, agent, silent_after_s=0.4) as cluster:
        await cluster.create(vm("one", cpu_cores=1.0, memory_mib=400.0))
        await cluster.ready()
        async with cluster.client() as client:
            since = (await client.changed_vms(0)).changes
            agent.trouble.mute = True
            said = ""

            async def tells(word: str, but: str = "failed") -> bool:
                nonlocal since, said
                for row in (found := await client.changed_vms(since)).rows:
                    said = f"{row.state}: {row.sentence}"
                since = found.changes
                return word in said and but not in said

            await until(lambda: tells("is silent"))
            agent.trouble.mute = False
            await agent.send_report()
            await until(lambda: tells("running", but="silent"))
            agent.vms.clear()
            await agent.send_report()
            await until(lambda: tells("failed", but="silent"))
            # Its host cannot say so any more.
            agent.trouble.mute = True
            await until(lambda: tells("is silent"))


@pytest.mark.asyncio
async def test_a_vm_that_its_host_has_no_more_has_changed_when_that_host_is_heard_again(
    each_store: None, tmp_path: Path
) -> None:
    agent = FakeAgent("host-a", cpu_cores=8.0, memory_mib=6000.0)
    async with cluster_of(tmp_path, agent, silent_after_s=0.4) as cluster:
        await cluster.create(vm("one", cpu_cores=1.0, memory_mib=400.0))
        agent.vms.clear()
        await cluster.ready()
        async with cluster.client() as client:
            agent.trouble.mute = True
            since = 0

            async def says(state: str) -> bool:
                nonlocal since
                found = await client.changed_vms(since)
                since = found.changes
                return [row.state for row in found.rows] == [state]

            await until(lambda: says("running"))
            agent.trouble.mute = False
            await agent.send_report()
            assert await says("failed")


@pytest.mark.asyncio
async def test_what_is_gone_is_known_where_only_a_later_page_is_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [
        {"hosts": [], "next": "more", "changes": 7, "changed_since": None, "gone": []},
        {"hosts": [], "next": None, "changes": 9, "changed_since": 5, "gone": ["host-b"]},
    ]

    async def request(*_: object, **__: object) -> object:
        return pages.pop(0)

    client = ManagerClient("http://127.0.0.1:1", TOKEN)
    monkeypatch.setattr(client, "_request", request)
    found = await client.changed_hosts(5)
    assert (found.gone, found.is_whole, found.changes) == (("host-b",), False, 7)
