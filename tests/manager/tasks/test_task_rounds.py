"""What clients ask for while a round over the tasks is thought over, on both kinds of stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.tasks import tasks
from ebbtide.matcher.errors import EngineRefused
from ebbtide.matcher.match.tasks import Release
from ebbtide.matcher.match.turns import Turn, turn
from tests.manager.cluster import cluster_of
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, condition, submit, task
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


class HeldRound:
    """The first round that lets a task begin is not over before the test says so."""

    def __init__(self) -> None:
        self.thinks = threading.Event()
        self.over = threading.Event()

    def __call__(self, *given: Any) -> Turn:
        made = turn(*given)
        if any(isinstance(one, Release) for one in made.instructions):
            self.thinks.set()
            self.over.wait(60.0)
        return made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldRound]:
    made = HeldRound()
    monkeypatch.setattr(tasks, "turn", made)
    yield made
    made.over.set()


@each_store
async def test_clients_do_not_wait_for_a_round_and_what_they_change_meanwhile_is_not_undone(
    tmp_path: Path, held: HeldRound
) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        try:
            await submit(cluster, "unwanted")
            await until(condition(held.thinks.is_set))
            async with asyncio.timeout(20):
                await submit(cluster, "late")
                status, answer = await cluster.call("DELETE", "/v1/tasks/unwanted")
                assert (status, answer["sentence"]) == (202, "it is being cancelled")
                assert (await submit(cluster, "late"))["state"] == "waiting"
        finally:
            held.over.set()
        assert "before it began" in (await becomes(cluster, "unwanted", "cancelled"))["sentence"]
        await becomes(cluster, "late", "running")
        assert [name.split(".")[1] for name in engine.begun] == ["late"]
        assert not any(call[0] == "release" and ".unwanted." in call[1] for call in engine.calls)


@each_store
async def test_a_manager_killed_while_a_round_is_thought_over_loses_nothing(tmp_path: Path, held: HeldRound) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        try:
            await submit(cluster, "early")
            await until(condition(held.thinks.is_set))
            await submit(cluster, "late")
            await cluster.kill_manager()
        finally:
            held.over.set()
        assert engine.begun == []
        await cluster.start_manager()
        for name in ("early", "late"):
            await becomes(cluster, name, "running")
            assert (await task(cluster, name))["attempts"] == 1
        assert len(engine.begun) == 2


class HeldRelease(FakeEngine):
    """Its first release is not over before the test says so."""

    def __init__(self, **cores: int) -> None:
        super().__init__(**cores)
        self.reached, self.over = asyncio.Event(), asyncio.Event()

    async def release(self, attempt: str, machine: str) -> None:
        await super().release(attempt, machine)
        self.reached.set()
        await self.over.wait()


@each_store
async def test_a_task_that_is_cancelled_while_a_round_is_carried_out_does_not_begin(tmp_path: Path) -> None:
    engine = HeldRelease(far=2)
    engine.unreachable = {"look"}
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        # One round for both.
        for name in ("wanted", "unwanted"):
            await submit(cluster, name, cores=1)
        engine.unreachable = set()
        await engine.reached.wait()
        assert (await task(cluster, "unwanted"))["state"] == "released"
        assert (await cluster.call("DELETE", "/v1/tasks/unwanted"))[0] == 202
        engine.over.set()
        assert "before it began" in (await becomes(cluster, "unwanted", "cancelled"))["sentence"]
        await becomes(cluster, "wanted", "running")
        assert [name.split(".")[1] for name in engine.begun] == ["wanted"]
        assert not any(call[0] == "release" and ".unwanted." in call[1] for call in engine.calls)


class OneBadMachine(FakeEngine):
    """The machine that it is first to release something to takes nothing."""

    bad: str | None = None

    async def release(self, attempt: str, machine: str) -> None:
        self.bad = self.bad or machine
        if machine == self.bad:
            self._called("release", attempt, machine)
            raise EngineRefused("the node is of another cluster")
        await super().release(attempt, machine)


@each_store
async def test_a_task_goes_elsewhere_where_its_release_is_refused(tmp_path: Path) -> None:
    engine = OneBadMachine(n1=2, n2=2)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train")
        found = await becomes(cluster, "train", "running")
        assert found["machine"] != engine.bad
        assert [call[2] for call in engine.calls if call[0] == "release"] == [engine.bad, found["machine"]]
