"""Submissions to Slurm: its jobs are asked for once in a look, and again only where a submission was not answered."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm import Slurm
from ebbtide.matcher.errors import EngineFull, EngineRefused, EngineUnreachable
from ebbtide.matcher.match.tasks import TaskOrder

ORDER = TaskOrder("train", ("true",))
MANY = ",".join(f"gpu:kind{number:02}:{number}(S:0-1)" for number in range(60))


class Programs:
    """Slurm's programs, which number jobs and fail as they are told."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.called: list[str] = []
        self.argv: tuple[str, ...] = ()
        self.nodes: list[dict[str, Any]] = []
        self.fails: Exception | None = None

    async def json(self, *argv: str) -> dict[str, Any]:
        self.called.append(argv[0])
        return {"jobs": self.jobs} if argv[0] == "squeue" else {"nodes": self.nodes}

    async def run(self, *argv: str, text: str = "") -> str:
        self.called.append(argv[0])
        self.argv = argv
        if isinstance(self.fails, EngineRefused):
            raise self.fails
        if argv[0] == "scontrol":
            return ""
        name = next(word.partition("=")[2] for word in argv if word.startswith("--job-name="))
        number = len(self.jobs) + 1
        self.jobs.append(
            {"job_id": number, "name": name, "job_state": "PENDING", "user_id": os.getuid(), "priority": 0}
        )
        if self.fails is not None:
            raise self.fails
        return f"{number}\n"


@pytest.fixture
def slurm(tmp_path: Path) -> tuple[Slurm, Programs]:
    engine, programs = Slurm(EngineSettings(engine="slurm", directory=tmp_path)), Programs()
    engine._programs = programs  # type: ignore[assignment]
    return engine, programs


async def test_many_submissions_after_a_look_ask_for_no_jobs(slurm: tuple[Slurm, Programs]) -> None:
    engine, programs = slurm
    attempts = [f"ebb.t-{number}.0a.1" for number in range(20)]
    await engine.look(attempts)
    for attempt in attempts * 2:
        await engine.submit(attempt, ORDER)
    assert (programs.called.count("squeue"), programs.called.count("sbatch")) == (1, 20)


async def test_before_any_look_and_after_a_submission_that_was_not_answered_jobs_are_asked_for(
    slurm: tuple[Slurm, Programs],
) -> None:
    engine, programs = slurm
    programs.fails = EngineUnreachable("sbatch did not end in time")
    with pytest.raises(EngineUnreachable):
        await engine.submit("ebb.train.0a.1", ORDER)
    programs.fails = None
    await engine.submit("ebb.other.0a.1", ORDER)
    assert (programs.called.count("squeue"), programs.called.count("sbatch")) == (1, 2)
    await engine.submit("ebb.train.0a.1", ORDER)
    assert (programs.called.count("squeue"), programs.called.count("sbatch")) == (2, 2), "it has its job already"


async def test_a_submission_that_was_refused_is_no_job(slurm: tuple[Slurm, Programs]) -> None:
    engine, programs = slurm
    await engine.look(["ebb.train.0a.1"])
    programs.fails = EngineRefused("sbatch: invalid account")
    for _ in range(2):
        with pytest.raises(EngineRefused):
            await engine.submit("ebb.train.0a.1", ORDER)
    assert (programs.called.count("squeue"), programs.called.count("sbatch")) == (1, 2)


async def test_options_of_the_engine_file_come_before_those_of_the_manager(tmp_path: Path) -> None:
    options = ("--partition=long", "--mem-per-cpu=2G", "--time=60")
    engine, programs = Slurm(EngineSettings(engine="slurm", directory=tmp_path, slurm_options=options)), Programs()
    engine._programs = programs  # type: ignore[assignment]
    await engine.submit("ebb.train.0a.1", ORDER)
    assert programs.argv[:5] == ("sbatch", *options, "--parsable")


@pytest.mark.parametrize(
    ("has", "gets"),
    [
        ("vcore:4", "vcore:2"),
        ("vcore:4,gpu:tesla:2(S:0,2),other:1", "vcore:2,gpu:tesla:2(S:0,2),other:1"),
        ("gpu:2,vcore:4(S:0-1),other:1", "vcore:2,gpu:2,other:1"),
        ("gpu:2,gres/vcore:a:1,vcore:b:3", "vcore:2,gpu:2"),
        ("nvcore:4,vcore:4,vcores,vcore-a:1", "vcore:2,nvcore:4,vcores,vcore-a:1"),
        # Without a number, as nobody should have it, and more than a word usually has.
        ("vcore,gpu:1,vcore:2K,vcore(S:0)", "vcore:2,gpu:1"),
        ("gpu:a(S:0,2,vcore:1),x[0,vcore],vcore:4", "vcore:2,gpu:a(S:0,2,vcore:1),x[0,vcore]"),
        ("(null)", "vcore:2"),
        ("", "vcore:2"),
        (f"{MANY},vcore:4", f"vcore:2,{MANY}"),
    ],
)
async def test_other_resources_of_a_node_stay_when_its_cores_change(
    slurm: tuple[Slurm, Programs], has: str, gets: str
) -> None:
    engine, programs = slurm
    programs.nodes = [{"name": "n1", "cpus": 4, "gres": has}]
    await engine.set_usable_cores("n1", 2)
    assert programs.argv == ("scontrol", "update", "NodeName=n1", f"Gres={gets}")


async def test_a_manager_that_may_not_change_nodes_is_told_who_may(slurm: tuple[Slurm, Programs]) -> None:
    engine, programs = slurm
    programs.fails = EngineFull("scontrol: slurm_update error: Invalid user id")
    for change in engine.set_usable_cores("n1", 2), engine.drain("n1", "why"), engine.undrain("n1"):
        with pytest.raises(EngineRefused, match="Invalid user id: only SlurmUser, root and users with AdminLevel"):
            await change


@pytest.mark.looptime
async def test_a_job_that_was_submitted_a_moment_ago_is_released_as_soon_as_slurm_takes_it(
    slurm: tuple[Slurm, Programs], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, programs = slurm
    await engine.submit("ebb.train.0a.1", ORDER)
    said = "scontrol: Job update not available right now, the DB index is being set, try again in a bit for job 1"
    answers = [EngineRefused(said), EngineRefused(said), None, None]
    called: list[str] = []

    async def run(*argv: str, text: str = "") -> str:
        called.append(argv[1])
        if (answer := answers.pop(0)) is not None:
            raise answer
        return ""

    monkeypatch.setattr(programs, "run", run)
    await engine.release("ebb.train.0a.1", "n1")
    assert called == ["update", "update", "update", "release"]
    answers += [EngineRefused(said)] * 5
    with pytest.raises(EngineRefused, match="try again"):
        await engine.release("ebb.train.0a.1", "n1")
    answers += [EngineRefused("scontrol: Invalid node name specified")]
    with pytest.raises(EngineRefused, match="Invalid node"):
        await engine.release("ebb.train.0a.1", "n1")
    assert not answers


async def test_users_are_looked_up_while_the_manager_goes_on(
    slurm: tuple[Slurm, Programs], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, programs = slurm
    asked: list[threading.Thread] = []

    def found(_user: str | None) -> list[str]:
        asked.append(threading.current_thread())
        return []

    monkeypatch.setattr("ebbtide.matcher.engines.slurm._identity", found)
    await engine.submit("ebb.train.0a.1", ORDER)
    assert programs.called.count("sbatch") == 1
    assert len(asked) == 1
    assert asked[0] is not threading.main_thread()


async def test_attempts_for_which_the_queue_had_no_room_are_given_again_without_asking_for_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying."
    scripts = {
        "squeue": f"echo >> {tmp_path}/asked\necho '{{\"jobs\": []}}'",
        "sinfo": "echo '{\"nodes\": []}'",
        "sbatch": f"echo '{said}' >&2\nexec sleep 60",
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "tasks").mkdir()
    engine = Slurm(EngineSettings(engine="slurm", directory=tmp_path / "tasks"))
    attempts = [f"ebb.t-{number}.0a.1" for number in range(3)]
    for _ in range(2):
        await engine.look(attempts)
        for attempt in attempts:
            with pytest.raises(EngineFull, match="temporarily unable"):
                await engine.submit(attempt, ORDER)
    assert len((tmp_path / "asked").read_text().splitlines()) == 2
