"""A manager on a store that is behind what hosts follow: their word ends its term, and no single host's does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.errors import AgentUnreachable, StoreError
from cluster_manager.inventory.followed import ASKED, CHECKED_S, Followed
from cluster_manager.inventory.hosts import Hosts
from ebbtide.deflation.fencing import MOST_RAISE, Fence, outvoted
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.databases import rows_of
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until


def test_more_than_half_of_the_hosts_outvote_a_manager_and_the_epoch_is_one_that_all_of_these_stand_behind() -> None:
    assert outvoted(5, []) is None
    assert outvoted(5, [5, 5]) is None
    assert outvoted(5, [9, 5]) is None
    assert outvoted(5, [9, 2**53]) == 9
    assert outvoted(5, [9, 8, 0]) == 8
    assert outvoted(5, [9, 8, 0, 0]) is None
    assert outvoted(5, [5 + MOST_RAISE]) == 5 + MOST_RAISE
    assert outvoted(5, [6 + MOST_RAISE]) is None


@given(st.lists(st.integers(0, 2**53), max_size=9), st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_fewer_than_half_that_lie_bring_no_epoch_that_is_above_those_of_the_others(
    lies: list[int], truths: list[int]
) -> None:
    lies = lies[: max(len(truths) - 1, 0)]
    agreed = outvoted(5, lies + truths)
    assert agreed is None or agreed <= max(truths)


@dataclass
class Reported:
    epoch: int


@dataclass
class Known:
    report: Reported


@dataclass
class Said:
    """Hosts by id: those that report, and what those say that are asked; None: nothing."""

    reports: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int | None] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    now: float = 0.0

    def reporting(self) -> dict[str, Known]:
        return {host: Known(Reported(epoch)) for host, epoch in self.reports.items()}

    def ids(self) -> frozenset[str]:
        return frozenset(self.reports) | frozenset(self.asked)

    def __len__(self) -> int:
        return len(self.ids())

    async def ask(self, host: str) -> Any:
        self.calls.append(host)
        if (epoch := self.asked[host]) is None:
            raise AgentUnreachable(f"{host} is off")
        return Reported(epoch)

    def followed(self) -> Followed:
        made = Followed(self.ended.append, 10.0, lambda: self.now)
        made.begin()
        return made

    async def look(self, followed: Followed, times: int = 10) -> None:
        for _ in range(times):
            self.now += 5.0
            await followed.look(cast(Hosts, self), self.ask, 5)


async def test_hosts_that_go_on_to_report_here_have_the_next_epoch_be_above_theirs() -> None:
    said = Said(reports={"a": 9, "b": 12, "c": 5})
    followed = said.followed()
    await said.look(followed, 5)
    assert not said.ended
    await said.look(followed, 1)
    assert said.ended == ["its hosts follow epoch 9, and its store has 5: the store was put back"]
    assert (followed.above, followed.elsewhere) == (9, False)


async def test_a_host_that_reports_here_once_on_its_way_to_another_manager_is_asked_and_this_one_waits() -> None:
    said = Said(reports={"a": 9, "b": 9})
    followed = said.followed()
    await said.look(followed, 2)
    said.asked, said.reports = {"a": 9, "b": 9, "c": None}, {}
    await said.look(followed, 1)
    assert len(said.ended) == 1
    assert "follow another manager, of epoch 9, on another store" in said.ended[0]
    assert (followed.above, followed.elsewhere) == (0, True)
    # As long as they do, the store's epoch does not rise.
    with pytest.raises(StoreError, match="follow another manager"):
        await followed.check(cast(Hosts, said), said.ask, 7)
    await followed.check(cast(Hosts, said), said.ask, 8)
    said.asked = dict.fromkeys(said.asked)
    await followed.check(cast(Hosts, said), said.ask, 5)


async def test_one_host_among_others_ends_no_term_whatever_it_says() -> None:
    for lie in (9, 5 + MOST_RAISE, 2**53):
        for others in (1, 2, 7):
            reports = {"liar": lie} | {f"host-{number}": 5 for number in range(others)}
            said = Said(reports=reports)
            await said.look(said.followed())
            assert not said.ended
            said = Said(asked={**reports})
            await said.look(said.followed())
            assert not said.ended


@pytest.mark.parametrize("reports", [True, False])
async def test_a_host_that_answers_alone_ends_one_term_and_no_second_one(reports: bool) -> None:
    said = Said(asked={"b": None, "c": None})
    (said.reports if reports else cast(dict[str, int], said.asked))["a"] = 9
    followed = said.followed()
    await said.look(followed)
    assert len(said.ended) >= 1
    said.ended.clear()
    followed.begin()
    await said.look(followed)
    assert not said.ended
    await followed.check(cast(Hosts, said), said.ask, 5)


async def test_of_many_silent_hosts_a_few_are_asked_at_a_time_and_others_the_next_time() -> None:
    said = Said(asked={f"host-{number:02}": None for number in range(20)})
    followed = said.followed()
    await said.look(followed, 2)
    assert not said.calls  # they have had no time to report yet
    await said.look(followed, 2)
    assert len(set(said.calls)) == len(said.calls) == 2 * ASKED
    await said.look(followed, 1)
    assert set(said.calls) == set(said.asked)


async def test_hosts_that_want_to_report_to_a_manager_that_stands_by_for_them_follow_no_other_one_any_more() -> None:
    said = Said(asked={"a": 9, "b": 9, "c": None})
    followed = said.followed()
    await said.look(followed, 3)
    assert followed.elsewhere
    for host in ("a", "b"):
        followed.refused(host)  # on its way to another manager
    said.now += 15.0
    for turn in range(5):
        for host in ("a", "b"):
            followed.refused(host)
        if turn < 4:
            with pytest.raises(StoreError, match="follow another manager"):
                await followed.check(cast(Hosts, said), said.ask, 5)
        said.now += 5.5
    await followed.check(cast(Hosts, said), said.ask, 5)
    # They have found one.
    said.now += 15.0
    with pytest.raises(StoreError, match="follow another manager"):
        await followed.check(cast(Hosts, said), said.ask, 5)


@pytest.mark.usefixtures("each_store")
async def test_hosts_whose_reports_did_not_get_through_come_back_to_a_manager_that_stands_by_for_them(
    tmp_path: Path,
) -> None:
    agents = two(9)
    async with cluster_of(tmp_path, *agents, silent_after_s=SILENT_AFTER_S) as cluster:
        manager = cluster.manager
        assert manager is not None
        for agent in agents:
            agent.manager = None
        await until(lambda: "follow another manager, of epoch 9" in manager.leadership.why)
        for agent in agents:
            agent.manager = cluster.url
        await until(lambda: leads(cluster) and manager.epoch == 10)
        await until(lambda: len(manager.hosts.ready()) == 2)


async def test_before_a_term_others_of_many_silent_hosts_are_asked_until_enough_have_answered() -> None:
    off: dict[str, int | None] = {f"host-{number:02}": None for number in range(3 * ASKED)}
    said = Said(asked=off | {f"up-{number:02}": 9 for number in range(2 * ASKED)})
    followed = said.followed()
    with pytest.raises(StoreError, match="follow another manager"):
        await followed.check(cast(Hosts, said), said.ask, 5)
    assert len(set(said.calls)) == len(said.calls) == 4 * ASKED
    # Each has one voice, however often it is asked.
    said = Said(asked=off | {"liar": 9, "up-0": 5, "up-1": 5})
    await said.followed().check(cast(Hosts, said), said.ask, 5)
    assert set(said.calls) == set(said.asked)


async def test_before_a_term_hosts_that_do_not_answer_are_not_asked_for_ever() -> None:
    said = Said(asked={f"host-{number:03}": None for number in range(1000)})
    ask = said.ask

    async def slow(host: str) -> Any:
        said.now += 1.0
        return await ask(host)

    await said.followed().check(cast(Hosts, said), slow, 5)
    assert len(said.calls) <= CHECKED_S + ASKED


async def test_what_one_term_learned_of_the_hosts_is_not_for_the_ones_behind_the_next() -> None:
    said = Said(reports={"a": 9, "b": 9})
    followed = said.followed()
    await said.look(followed, 6)
    assert followed.above == 9
    followed.begin()
    assert followed.above == 0


SILENT_AFTER_S = 0.5


def two(epoch: int) -> tuple[FakeAgent, FakeAgent]:
    agents = (
        FakeAgent("host-a", cpu_cores=4.0, memory_mib=4000.0),
        FakeAgent("host-b", cpu_cores=4.0, memory_mib=4000.0),
    )
    for agent in agents:
        agent.fence = Fence(epoch)
    return agents


def leads(cluster: Cluster) -> bool:
    assert cluster.manager is not None
    return cluster.manager.leadership.leads()


@pytest.mark.usefixtures("each_store")
async def test_a_manager_on_a_store_that_was_put_back_says_so_and_leads_above_what_its_hosts_follow(
    tmp_path: Path,
) -> None:
    agents = two(9)
    async with cluster_of(tmp_path, *agents, silent_after_s=SILENT_AFTER_S) as cluster:
        manager = cluster.manager
        assert manager is not None
        found = (await cluster.get("/v1/hosts"))["hosts"]
        assert {(host["state"], host["state_reason"]) for host in found} == {
            ("unavailable", "follows a manager of epoch 9, and this one has 1")
        }
        await until(lambda: leads(cluster) and len(manager.hosts.ready()) == 2)
        assert manager.epoch == 10
        await until(lambda: [agent.epoch for agent in agents] == [10, 10])
        (event,) = await cluster.events("restored")
        assert "its hosts follow a later manager than this store knows of" in event["sentence"]
        assert (await cluster.create(vm("web"))).state == "done"


@pytest.mark.usefixtures("each_store")
async def test_a_manager_whose_store_falls_behind_its_own_terms_lets_its_hosts_say_whether_it_goes_on_above_them(
    tmp_path: Path,
) -> None:
    agents = two(0)
    async with cluster_of(tmp_path, *agents, silent_after_s=SILENT_AFTER_S) as cluster:
        manager = cluster.manager
        assert manager is not None
        begun: list[int] = []
        begin = manager.begin_term

        async def noted() -> int:
            begun.append(await begin())
            return begun[-1]

        manager.leadership._term.begin_term = noted  # type: ignore[method-assign]
        for epoch in (2, 3, 4):
            manager.leadership.fail("by the test")
            await until(lambda epoch=epoch: leads(cluster) and manager.epoch == epoch)  # type: ignore[misc]
        await until(lambda: [agent.epoch for agent in agents] == [4, 4])
        for change in ("DELETE FROM terms WHERE epoch > 1", "UPDATE counters SET value = 1 WHERE name = 'epoch'"):
            # In a thread: a transaction of the manager that is open ends on this loop.
            await asyncio.to_thread(rows_of, cluster.settings.database, change)
        manager.leadership.fail("by the test")
        await until(lambda: leads(cluster) and manager.epoch == 5)
        # On a slow machine hosts may fall silent meanwhile, and be asked.
        assert (begun[:4], begun[-1]) == ([2, 3, 4, 2], 5)


@pytest.mark.usefixtures("each_store")
async def test_a_manager_whose_hosts_follow_another_one_on_another_store_steps_down_and_its_epoch_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, tries = two(0), 0
    check = Followed.check

    async def counted(self: Followed, *words: Any) -> None:
        nonlocal tries
        tries += 1
        await check(self, *words)

    monkeypatch.setattr(Followed, "check", counted)
    for directory in ("here", "there"):
        (tmp_path / directory).mkdir()
    async with cluster_of(tmp_path / "here", *agents, silent_after_s=SILENT_AFTER_S) as cluster:
        assert cluster.manager is not None
        manager, here = cluster.manager, cluster.settings.database
        async with cluster_of(tmp_path / "there", silent_after_s=SILENT_AFTER_S) as other:
            assert other.manager is not None
            for _ in range(5):
                # It has led more often.
                other.manager.leadership.fail("by the test")
                await until(lambda: leads(other))
            for agent in agents:
                agent.manager = other.url
            await until(lambda: tries > 3)
            assert not leads(cluster)
            await until(lambda: "follow another manager, of epoch" in manager.leadership.why)
            assert rows_of(here, "SELECT value FROM counters") == [(1,)]
            assert leads(other)
            await until(lambda: other.manager is not None and len(other.manager.hosts.ready()) == 2)


@pytest.mark.usefixtures("each_store")
async def test_a_host_that_lies_about_the_epoch_is_left_alone_with_it(tmp_path: Path) -> None:
    agents = two(0)
    async with cluster_of(tmp_path, *agents, silent_after_s=SILENT_AFTER_S) as cluster:
        assert cluster.manager is not None
        manager = cluster.manager
        agents[0].fence = Fence(9)
        await until(lambda: not manager.hosts.is_ready("host-a"))
        begun = time.monotonic()
        await until(lambda: time.monotonic() - begun > 5 * SILENT_AFTER_S)
        assert leads(cluster)
        assert manager.hosts.is_ready("host-b")
        assert manager.epoch == 1
