"""Tasks whose records look old, at the manager: one late look ends none, looks over minutes do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.matcher.match.attempts import AttemptState
from tests.manager.cluster import Cluster, cluster_of
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, condition, looked_since, submit, task
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


def shown(engine: FakeEngine, silent_s: float, **changes: Any) -> None:
    (attempt,) = engine.attempts.values()
    attempt.seen = replace(attempt.seen, silent_s=silent_s, touched_at=1000.0 - silent_s, **changes)


async def goes_on(cluster: Cluster, engine: FakeEngine) -> None:
    await looked_since(cluster, engine)
    found = await task(cluster, "train")
    assert (found["state"], found["preemptions"], found["attempts"]) == ("running", 0, 1), found["sentence"]
    assert not any(call[0] == "cancel" for call in engine.calls)


@pytest.mark.parametrize("state", [AttemptState.RUNNING, AttemptState.GONE])
async def test_one_look_at_an_old_record_ends_nothing(tmp_path: Path, state: AttemptState) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train", restartable=True)
        await becomes(cluster, "train", "running")
        for silent_s in (1.0, 602.0, 1.0):
            shown(engine, silent_s, state=state)
            await goes_on(cluster, engine)
        # Nor does the first look of a manager that has just begun.
        shown(engine, 602.0)
        await cluster.kill_manager()
        await cluster.start_manager()
        await goes_on(cluster, engine)


async def test_looks_at_a_record_that_nobody_touches_end_its_task(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train", restartable=True)
        await becomes(cluster, "train", "running")
        assert cluster.manager is not None
        cluster.manager.tasks._monotonic = itertools.count(0.0, 5.0).__next__
        shown(engine, 602.0)
        await until(condition(lambda: any(call[0] == "cancel" for call in engine.calls)))

        async def broken_off() -> bool:
            return bool((await task(cluster, "train"))["preemptions"] == 1)

        await until(broken_off)
