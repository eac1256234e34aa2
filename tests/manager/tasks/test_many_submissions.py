"""Many tasks at once, at the manager: what concerns machines and what runs does not wait for them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.matcher.match.notices import Notice
from ebbtide.messages.tasks import TaskRequest
from tests.manager.cluster import cluster_of
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, body, condition, looked_since, submit, task
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")

MANY = 300
SUBMIT_S = 0.1


@pytest.mark.parametrize(("period_s", "woken"), [(60.0, True), (0.5, False)], ids=["woken", "in-time"])
async def test_a_task_on_a_vm_that_goes_gets_its_signal_amid_many_submissions(
    tmp_path: Path, period_s: float, woken: bool
) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine, period_s=period_s)) as cluster:
        assert cluster.manager is not None
        service, now = cluster.manager.tasks, time.time()
        service._clock = service._monotonic = lambda: now
        await submit(cluster, "old", restartable=True, checkpoint_signal="USR1")

        async def runs() -> bool:
            service.wake()
            return bool((await task(cluster, "old"))["state"] == "running")

        await until(runs)
        notices: dict[str, Notice] = {}
        service.notices = lambda: {name: replace(one, passed_s=now - one.at) for name, one in notices.items()}
        ends: list[tuple[str, float]] = []
        given = 0

        def before(name: str) -> None:
            nonlocal now, given
            if name in ("signal", "cancel"):
                ends.append((name, now))
            if name != "submit":
                return
            now, given = now + SUBMIT_S, given + 1
            if given == MANY // 2:
                notices["far"] = Notice(now, 2.0)
                if woken:
                    service.wake()

        engine.before = before
        engine.unreachable.add("look")
        for number in range(MANY):
            await service.submit(TaskRequest.model_validate(body(f"t-{number}", cores=4)), "somebody")
        engine.unreachable.clear()
        service.wake()
        await until(condition(lambda: bool(ends)))
        assert ends[0][0] == "signal"
        assert ends[0][1] < notices["far"].at + 1.5
        await until(condition(lambda: given >= MANY))


async def test_what_the_engine_does_not_take_is_not_released(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    engine.refusing_tasks.add("bad")
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "bad")
        await looked_since(cluster, engine)
        assert "did not take it" in (await task(cluster, "bad"))["sentence"]
        assert not any(call[0] == "release" for call in engine.calls)


async def test_an_engine_that_takes_no_new_attempt_lets_others_begin(tmp_path: Path) -> None:
    engine = FakeEngine(far=2)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        for name in ("first", "second"):
            await submit(cluster, name)
        await becomes(cluster, "first", "running")
        await until(condition(lambda: len(engine.attempts) == 2))
        engine.unreachable.add("submit")
        await submit(cluster, "third")
        engine.end("first")
        await becomes(cluster, "second", "running")
