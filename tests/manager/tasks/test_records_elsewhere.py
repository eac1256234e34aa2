"""A manager that does not see the records of tasks under way: their directory is not mounted there, or another one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm import Slurm
from tests.manager.cluster import Cluster, cluster_of
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, submit, task
from tests.waiting import until


class Programs:
    """What Slurm's programs say of one node and one job, and what they were told to do."""

    def __init__(self, attempt: str) -> None:
        self.job = {"job_id": 7, "name": attempt, "job_state": "RUNNING", "user_id": os.getuid(), "nodes": "far"}
        self.told: list[str] = []

    async def json(self, *argv: str) -> dict[str, Any]:
        nodes = [{"name": "far", "cpus": 4, "gres": "vcore:4", "state": "idle"}]
        return {"jobs": [self.job]} if argv[0] == "squeue" else {"nodes": nodes}

    async def run(self, *argv: str, text: str = "") -> str:
        self.told.append(argv[0])
        if argv[0] == "scancel":
            self.job["job_state"] = "CANCELLED"
        return ""


@dataclass
class Restarted:
    """What a task began with under an earlier manager, and a later one that looks for its records here."""

    records: Path
    attempt: str
    programs: Programs

    def settings(self, **changes: Any) -> dict[str, Any]:
        def slurm(given: EngineSettings) -> Slurm:
            made = Slurm(given)
            made._programs = self.programs  # type: ignore[assignment]
            return made

        return {**settings(directory=self.records, **changes), "make_engine": slurm}

    async def is_said(self, cluster: Cluster) -> None:
        """Until it is said that the records are missing, or something was done without them."""

        async def so() -> bool:
            status = await cluster.get("/v1/engine")
            return bool(self.programs.told) or "has its record in" in status["sentence"]

        await until(so)


@pytest.fixture
async def restarted(each_store: None, tmp_path: Path) -> Restarted:
    engine, records = FakeEngine(far=4), tmp_path / "records"
    async with cluster_of(tmp_path, **settings(engine)) as cluster:
        await submit(cluster, "train", restartable=True)
        await becomes(cluster, "train", "running")
    records.mkdir(mode=0o711)
    (attempt,) = engine.begun
    return Restarted(records, attempt, Programs(attempt))


async def test_tasks_go_on_where_the_directory_of_their_records_is_not_mounted(
    tmp_path: Path, restarted: Restarted
) -> None:
    async with cluster_of(tmp_path, **restarted.settings()) as cluster:
        await restarted.is_said(cluster)
        assert restarted.programs.told == [], "something was begun or ended"
        assert (await task(cluster, "train"))["state"] == "running"
        own = restarted.records / restarted.attempt
        own.mkdir(mode=0o700)
        (own / "claim").write_text("begun 1700000000.5 far\n")

        async def reached() -> bool:
            return bool((await cluster.get("/v1/engine"))["reachable"])

        await until(reached)
        assert restarted.programs.told == []
        assert (await task(cluster, "train"))["state"] == "running"


async def test_no_task_is_begun_once_more_under_another_label(tmp_path: Path, restarted: Restarted) -> None:
    (restarted.records / restarted.attempt).mkdir(mode=0o700)
    async with cluster_of(tmp_path, **restarted.settings(label="other")) as cluster:
        await restarted.is_said(cluster)
        assert restarted.programs.told == [], "something was begun or ended"


async def test_who_cancels_tasks_whose_records_are_lost_has_the_others_go_on(
    tmp_path: Path, restarted: Restarted
) -> None:
    async with cluster_of(tmp_path, **restarted.settings()) as cluster:
        await restarted.is_said(cluster)
        assert (await cluster.call("DELETE", "/v1/tasks/train"))[0] == 202
        await becomes(cluster, "train", "cancelled")
        assert set(restarted.programs.told) == {"scancel"}
