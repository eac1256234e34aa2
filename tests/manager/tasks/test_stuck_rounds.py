"""Rounds over the tasks that come to nothing, though the engine answers: who asks is told why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster_manager.errors import StoreError
from ebbtide.matcher.match.attempts import AttemptState, Claim, Seen
from ebbtide.matcher.match.tasks import TaskOrder
from tests.manager.cluster import cluster_of
from tests.manager.fake_engine import FakeEngine, Running, settings
from tests.manager.tasks.test_tasks import becomes, condition, looked_since, submit, task
from tests.waiting import until


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize(
    ("error", "why"),
    [(StoreError("the disk is full"), "the disk is full"), (KeyError("n1"), "a defect of the manager: KeyError('n1')")],
)
async def test_what_keeps_the_tasks_from_being_looked_after_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    async def fails(*_: Any) -> None:
        raise error

    async with cluster_of(tmp_path, **settings()) as cluster:
        assert cluster.manager is not None
        service, store = cluster.manager.tasks, cluster.manager.store
        await submit(cluster, "train")
        await becomes(cluster, "train", "running")
        assert service.works
        with monkeypatch.context() as failing:
            failing.setattr(store, "save_tasks", fails)
            await until(condition(lambda: not service.works))
            said = f"the tasks could not be looked after: {why}"
            assert (await cluster.get("/v1/engine"))["sentence"] == said
            assert (await task(cluster, "train"))["sentence"] == f"it runs on far; {said}"
        await until(condition(lambda: service.works))
        assert (await cluster.get("/v1/engine"))["sentence"] == "it answers"


@pytest.mark.usefixtures("each_store")
async def test_what_has_ended_is_forgotten_also_by_an_engine_that_was_away_meanwhile(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train")
        await becomes(cluster, "train", "running")
        engine.unreachable = {"forget"}
        engine.end("train")

        def tried(times: int) -> bool:
            return sum(call[0] == "forget" for call in engine.calls) >= times

        # With the task's end, and once more for what no task has any more.
        await until(condition(lambda: tried(2)))
        engine.unreachable = set()
        await until(condition(lambda: not engine.attempts))


@pytest.mark.usefixtures("each_store")
async def test_what_the_engine_has_lost_of_an_ended_task_is_forgotten_and_that_of_one_that_goes_on_is_not(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(far=4)
    lost = Running(TaskOrder("lost", ("true",)), Seen(AttemptState.GONE, claim=Claim.SEALED))
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        for name in ("over", "goes-on"):
            await submit(cluster, name)
            await becomes(cluster, name, "running")
        engine.end("over")
        await becomes(cluster, "over", "done")
        # The key may begin with a 1, too.
        over, goes_on = (f"{name.removesuffix('.1')}.9" for name in engine.begun)
        engine.attempts |= dict.fromkeys((over, goes_on), lost)
        await until(condition(lambda: over not in engine.attempts))
        await looked_since(cluster, engine)
        assert ("forget", goes_on) not in engine.calls
