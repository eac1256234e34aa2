"""What tasks print, and waiting for their end, at the manager over HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.errors import RequestError
from cluster_manager.tasks.output import check_reader
from ebbtide.matcher.match.tasks import Task, TaskOrder
from tests.manager.cluster import Cluster, cluster_of
from tests.manager.fake_engine import SETTINGS, FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, submit, task
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


async def begun(cluster: Cluster, name: str, **fields: Any) -> Path:
    """The file with what a task prints that runs by now."""
    await submit(cluster, name, **fields)
    return Path((await becomes(cluster, name, "running"))["output"])


async def test_whoever_waits_for_a_task_is_answered_when_it_ends(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train")
        await becomes(cluster, "train", "running")
        assert (await cluster.get("/v1/tasks/train?wait_s=0.01"))["state"] == "running"
        waiting = [asyncio.create_task(cluster.get("/v1/tasks/train?wait_s=60"), name=f"wait-{n}") for n in range(2)]
        assert cluster.manager is not None
        await until(lambda: _waits(cluster, "train"))
        engine.end("train")
        async with asyncio.timeout(20):
            assert [answer["state"] for answer in await asyncio.gather(*waiting)] == ["done", "done"]
            assert (await cluster.get("/v1/tasks/train?wait_s=60"))["state"] == "done"
        assert (await cluster.call("GET", "/v1/tasks/none?wait_s=60"))[0] == 404
        status, problem = await cluster.call("GET", "/v1/tasks/train?wait_s=61")
        assert (status, problem["field"]) == (400, "wait_s")


async def _waits(cluster: Cluster, name: str) -> bool:
    assert cluster.manager is not None
    return name in cluster.manager.tasks._ends


async def test_whoever_waits_for_a_task_is_answered_when_the_term_ends(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, **settings(FakeEngine(far=4))) as cluster:
        await submit(cluster, "train")
        await becomes(cluster, "train", "running")
        manager = cluster.manager
        assert manager is not None
        waiting = asyncio.create_task(manager.tasks.wait("train", 60.0), name="wait")
        await until(lambda: _waits(cluster, "train"))
        await manager.tasks.stop()
        async with asyncio.timeout(20):
            assert not (await waiting).final
            # Nobody waits at one that has stopped.
            assert not (await manager.tasks.wait("train", 60.0)).final


async def test_what_a_task_prints_is_read_in_parts(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine, directory=tmp_path / "engine")) as cluster:
        path = await begun(cluster, "train")
        path.write_bytes("é = 1\n".encode() + b"\xff\n")
        first = await cluster.get("/v1/tasks/train/output?limit=4")
        assert first == {
            "name": "train", "state": "running", "attempt": 1, "running": True,
            "text": "é =", "offset": 0, "next_offset": 4, "size": 9,
        }  # fmt: skip
        assert (await cluster.get("/v1/tasks/train/output?offset=4"))["text"] == " 1\n\ufffd\n"
        assert (await cluster.get("/v1/tasks/train/output?offset=-2"))["text"] == "\ufffd\n"
        assert (await cluster.get("/v1/tasks/train/output?offset=-99"))["offset"] == 0
        beyond = await cluster.get("/v1/tasks/train/output?offset=99")
        assert (beyond["text"], beyond["next_offset"], beyond["size"]) == ("", 99, 9)
        path.write_bytes(b"cut: \xc3")
        cut = await cluster.get("/v1/tasks/train/output")
        assert (cut["text"], cut["next_offset"]) == ("cut: ", 5)
        engine.end("train")
        await becomes(cluster, "train", "done")
        ended = await cluster.get("/v1/tasks/train/output")
        assert (ended["running"], ended["state"], ended["text"]) == (False, "done", "cut: \ufffd")
        for query, field in (("limit=0", "limit"), ("limit=1048577", "limit"), ("offset=x", "offset")):
            status, problem = await cluster.call("GET", f"/v1/tasks/train/output?{query}")
            assert (status, problem["field"]) == (400, field)


async def test_where_there_is_no_output_the_code_says_so(tmp_path: Path) -> None:
    async def code(name: str) -> tuple[int, str]:
        status, problem = await cluster.call("GET", f"/v1/tasks/{name}/output")
        return status, problem["code"]

    async with cluster_of(tmp_path, **settings(FakeEngine(far=2), directory=tmp_path / "engine")) as cluster:
        path = await begun(cluster, "train")
        await submit(cluster, "later")
        assert await code("later") == (404, "no-output")
        path.unlink()
        assert await code("train") == (404, "no-output")
        path.parent.rmdir()
        assert await code("train") == (404, "no-output")
        assert await code("none") == (404, "not-found")


def _link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _hard_link(path: Path, secret: Path) -> None:
    path.hardlink_to(secret)


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path, _: Path) -> None:
    path.mkdir()


def _whole_directory(path: Path, secret: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(secret.parent)


def _of_another(path: Path, _: Path) -> None:
    path.write_text("secret")
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path.parent, 65534, 65534)


@pytest.mark.parametrize("put", [_link, _hard_link, _fifo, _directory, _whole_directory, _of_another])
async def test_what_is_no_file_of_the_task_is_not_shown(tmp_path: Path, put: Callable[[Path, Path], None]) -> None:
    secret = tmp_path / "others" / "out"
    secret.parent.mkdir()
    secret.write_text("secret")
    async with cluster_of(tmp_path, **settings(FakeEngine(far=4), directory=tmp_path / "engine")) as cluster:
        path = await begun(cluster, "train")
        path.unlink()
        put(path, secret)
        async with asyncio.timeout(20):
            status, problem = await cluster.call("GET", "/v1/tasks/train/output")
        assert (status, problem["code"]) == (409, "conflict")
        assert "secret" not in str(problem)
        assert (await task(cluster, "train"))["state"] == "running"


def test_where_tenants_have_users_what_tasks_print_is_for_those_of_the_same_user() -> None:
    tenants = SETTINGS.model_copy(update={"user": None, "users": {"ann": "a", "ci": "a", "bob": "b"}})
    made = Task(TaskOrder("train", ("true",), user="a"), "key", 0.0)
    for reader in ("ann", "ci"):
        check_reader(tenants, made, reader)
    for reader in ("bob", "eve"):
        with pytest.raises(RequestError) as refused:
            check_reader(tenants, made, reader)
        assert refused.value.problem.status == 403
    check_reader(SETTINGS, made, "anyone")
