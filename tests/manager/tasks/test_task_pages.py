"""Pages of tasks with long commands, on both kinds of stores: none is too large, and together they have all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_manager.tasks import pages
from ebbtide.matcher.match.attempts import EngineMachine
from ebbtide.matcher.match.tasks import Task, TaskOrder, TaskPhase
from tests.manager.cluster import cluster_of
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import submit


async def test_the_machines_of_an_engine_may_be_many_and_are_left_out_where_nobody_needs_them() -> None:
    machines = {f"m-{number:03}": EngineMachine(f"m-{number:03}", 8, 4) for number in range(200)}
    task = Task(TaskOrder("t", ("true",)), "key", 0.0, TaskPhase.RUNNING, machine="m-007")
    service: Any = SimpleNamespace(
        **{"kind": "slurm", "refused": "", "trouble": "", "stuck": "", "looked_at": 1.0, "known": frozenset({"m-001"})},
        unfinished={"t": task},
        machines=machines,
    )
    shown = pages.TaskPages(service, cast(Any, None))
    asked = asyncio.create_task(shown.engine(), name="engine")
    await asyncio.sleep(0)
    assert not asked.done(), "other work gets its turn"
    service.machines, service.known = {}, frozenset()
    found = await asked
    assert [machine.name for machine in found.machines] == sorted(machines)
    assert [machine.name for machine in found.machines if machine.known or machine.tasks] == ["m-001", "m-007"]
    assert (await shown.engine(machines=False)).machines == ()


@pytest.mark.usefixtures("each_store")
async def test_of_an_engine_its_words_can_be_asked_for_alone(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, **settings(FakeEngine(far=2))) as cluster:
        assert (await cluster.get("/v1/engine?machines=false"))["machines"] == []
        status, problem = await cluster.call("GET", "/v1/engine?machines=no")
        assert (status, problem["field"]) == (400, "machines")


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize(("limit", "sizes"), [(2, [2, 2, 2, 1]), (1000, [4, 3])])
async def test_a_page_ends_where_its_commands_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, sizes: list[int]
) -> None:
    # More than three commands are enough for a page, and five rows are read at once.
    monkeypatch.setattr(pages, "MOST_CHARACTERS", 3 * 2052 + 1)
    monkeypatch.setattr(pages, "READ_AT_ONCE", 5)
    async with cluster_of(tmp_path, **settings(FakeEngine(far=2))) as cluster:
        for number in range(7):
            await submit(cluster, f"t-{number}", command=["true", "x" * 2048])
        found: list[int] = []
        names: list[str] = []
        after = ""
        while not found or after:
            page = await cluster.get(f"/v1/tasks?limit={limit}{after}")
            found.append(len(page["tasks"]))
            names += [row["name"] for row in page["tasks"]]
            after = f"&after={page['next']}" if page["next"] is not None else ""
        assert found == sizes
        assert names == [f"t-{number}" for number in reversed(range(7))]
