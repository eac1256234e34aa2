"""Jobs of other users that bear the name of an attempt: every user of a Slurm cluster can read it and give it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm import Slurm
from ebbtide.matcher.match.attempts import AttemptState, Claim

ATTEMPT = "ebb.train.0a.1"
STRANGER = os.getuid() + 1


class Programs:
    """What Slurm's programs say, and how they were called."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.called: list[tuple[str, ...]] = []

    async def json(self, *argv: str) -> dict[str, Any]:
        nodes = [{"name": "n1", "cpus": 4, "gres": "vcore:4", "state": "idle"}]
        return {"jobs": self.jobs} if argv[0] == "squeue" else {"nodes": nodes}

    async def run(self, *argv: str, text: str = "") -> str:
        self.called.append(argv)
        return ""


def job(number: int, state: str, user: int = os.getuid(), **more: Any) -> dict[str, Any]:
    return {"job_id": number, "name": ATTEMPT, "job_state": state, "user_id": user, **more}


@pytest.fixture
async def slurm(tmp_path: Path) -> tuple[Slurm, Programs]:
    engine, programs = Slurm(EngineSettings(engine="slurm", directory=tmp_path)), Programs()
    engine._programs = programs  # type: ignore[assignment]
    await engine._records.prepare(ATTEMPT)
    return engine, programs


async def test_a_strangers_job_of_an_attempts_name_does_not_end_it(slurm: tuple[Slurm, Programs]) -> None:
    engine, programs = slurm
    programs.jobs = [job(7, "FAILED", exit_code=256), job(8, "COMPLETED", STRANGER, exit_code=0)]
    seen = (await engine.look([ATTEMPT])).attempts[ATTEMPT]
    assert (seen.state, seen.exit_code) == (AttemptState.ENDED, 1)


@pytest.mark.parametrize("name", [f"ebb.{'a' * 300}.0a.1", f"ebb.train.{'0' * 300}.1", f"ebb.train.0a.{'1' * 300}"])
async def test_a_name_that_is_too_long_for_a_directory_is_foreign_work(
    slurm: tuple[Slurm, Programs], name: str
) -> None:
    engine, programs = slurm
    programs.jobs = [job(7, "RUNNING"), job(8, "RUNNING", nodes="n1", cpus=3) | {"name": name}]
    look = await engine.look([ATTEMPT])
    assert set(look.attempts) == {ATTEMPT}
    assert look.machines["n1"].foreign_cores == 3


async def test_a_strangers_running_job_is_foreign_work(slurm: tuple[Slurm, Programs]) -> None:
    engine, programs = slurm
    programs.jobs = [job(7, "COMPLETED", exit_code=0), job(8, "RUNNING", STRANGER, nodes="n1", cpus=3)]
    look = await engine.look([ATTEMPT])
    assert look.attempts[ATTEMPT].state is AttemptState.ENDED
    assert look.machines["n1"].foreign_cores == 3


async def test_a_strangers_held_job_is_not_released_for_ours(slurm: tuple[Slurm, Programs]) -> None:
    engine, programs = slurm
    programs.jobs = [job(7, "PENDING", priority=0), job(8, "PENDING", STRANGER, priority=0)]
    await engine.release(ATTEMPT, "n1")
    assert [argv[-1] for argv in programs.called if argv[1] == "release"] == ["7"]


async def test_what_runs_of_an_attempt_whose_directory_was_lost_lives_when_root_has_sealed_it(
    slurm: tuple[Slurm, Programs], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, programs = slurm
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    user = STRANGER + 1
    programs.jobs = [job(7, "RUNNING", user, nodes="n1", cpus=3)]
    assert (await engine.look([ATTEMPT])).attempts == {}, "not sealed: a namesake"
    await engine._records.remove(ATTEMPT)
    await engine.cancel(ATTEMPT)
    for state in ("RUNNING", "COMPLETING"):
        programs.jobs = [job(7, state, user, nodes="n1", cpus=3)]
        seen = (await engine.look([ATTEMPT])).attempts[ATTEMPT]
        assert (seen.lives, seen.claim) == (True, Claim.SEALED)
    programs.jobs = [job(7, "COMPLETED", user, exit_code=0)]
    seen = (await engine.look([ATTEMPT])).attempts[ATTEMPT]
    assert (seen.state, seen.claim, seen.exit_code) == (AttemptState.GONE, Claim.SEALED, None)


async def test_a_strangers_job_does_not_hold_back_an_attempt_that_was_sealed_in_its_own_directory(
    slurm: tuple[Slurm, Programs], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, programs = slurm
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    await engine.cancel(ATTEMPT)
    programs.jobs = [job(7, "RUNNING", STRANGER, nodes="n1", cpus=3)]
    look = await engine.look([ATTEMPT])
    assert (look.attempts[ATTEMPT].state, look.machines["n1"].foreign_cores) == (AttemptState.GONE, 3)
