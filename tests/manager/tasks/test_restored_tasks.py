"""Tasks of a store that was restored from an older backup, at the manager: what has begun since goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ebbtide.matcher.match.attempts import AttemptState, Claim, Seen
from ebbtide.matcher.match.tasks import TaskOrder
from tests.manager.cluster import cluster_of
from tests.manager.fake_engine import FakeEngine, Running, settings
from tests.manager.tasks.test_tasks import becomes, condition, looked_since, submit, task
from tests.waiting import until


@pytest.mark.usefixtures("each_store")
async def test_a_later_attempt_than_the_restored_one_is_no_stray_and_its_end_is_the_tasks(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train", restartable=True)
        await becomes(cluster, "train", "running")
        assert cluster.manager is not None
        backed_up = cluster.manager.tasks.unfinished["train"]
        engine.end("train", None)
        await until(condition(lambda: len(engine.begun) == 2))
        await becomes(cluster, "train", "running")
        await cluster.manager.store.save_tasks([backed_up])
        await cluster.kill_manager()
        first, second = engine.begun
        # Of the first one the engine knows nothing any more, and its record says that it was broken off.
        broken_off = Seen(AttemptState.GONE, claim=Claim.BEGUN, begun_at=time.time())
        engine.attempts[first] = Running(TaskOrder("train", ("true",)), broken_off)
        # One before what is stored now is a stray, as ever.
        before = first.removesuffix(".1") + ".0"
        await engine.submit(before, TaskOrder("train", ("true",)))
        await cluster.start_manager()
        await looked_since(cluster, engine)
        await until(condition(lambda: ("cancel", before) in engine.calls))
        assert ("cancel", second) not in engine.calls
        assert (await task(cluster, "train"))["attempts"] == 2
        engine.end("train", 3)
        assert (await becomes(cluster, "train", "failed"))["exit_code"] == 3
        assert engine.begun == [first, second]
