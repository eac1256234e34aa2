"""Whose tasks they are: each token's user, and a user whom nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.manager.cluster import cluster_of
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, body, condition, submit, task
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


async def test_each_token_has_its_own_user_for_its_tasks(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine, user=None, users={"token-file": "daemon"})) as cluster:
        await submit(cluster, "mine")
        await becomes(cluster, "mine", "running")
        assert [running.order.user for running in engine.attempts.values()] == ["daemon"]
    async with cluster_of(tmp_path, **settings(engine, user=None, users={"ci": "daemon"})) as cluster:
        status, answer = await cluster.call("POST", "/v1/tasks", json=body("another"))
        assert (status, answer["detail"].partition(":")[0]) == (403, "token-file has no user for its tasks")


async def test_tasks_of_a_user_whom_nobody_knows_wait_and_those_of_others_run(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    engine.unknown_users.add("gone")
    async with cluster_of(tmp_path, **settings(engine, users={"token-file": "gone"})) as cluster:
        await submit(cluster, "lost")
        await until(condition(lambda: any(call[0] == "submit" for call in engine.calls)))
    async with cluster_of(tmp_path, **settings(engine, user="daemon")) as cluster:
        await submit(cluster, "mine")
        await becomes(cluster, "mine", "running")
        found = await task(cluster, "lost")
        assert (found["state"], "there is no user gone" in found["sentence"]) == ("waiting", True), found
        assert not any(running.order.user == "gone" for running in engine.attempts.values())
