"""What Slurm's programs mean by what they say when they fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ebbtide.matcher.engines.slurm_programs import SlurmPrograms
from ebbtide.matcher.errors import EngineError, EngineFull, EngineRefused, EngineUnreachable


def sbatch(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have this be it."""
    program = directory / "sbatch"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("sbatch: error: Batch script contains DOS line breaks (\\\\r\\\\n)", EngineRefused),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", EngineRefused),
        ("sbatch: error: AssocMaxSubmitJobLimit", EngineFull),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)",
            EngineFull,
        ),
        (
            "sbatch: error: Batch job submission failed: Required partition not available (inactive or drain)",
            EngineFull,
        ),
        ("sbatch: error: Batch job submission failed: Invalid user id", EngineFull),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", EngineUnreachable),
        # Between it and slurmctld, or behind that, something is away: Munge, or the database.
        ("sbatch: error: Munge encode failed: Failed to access /run/munge/munge.socket.2", EngineUnreachable),
        ("sbatch: error: Batch job submission failed: Protocol authentication error", EngineUnreachable),
        ("sbatch: error: Batch job submission failed: Invalid authentication credential", EngineUnreachable),
        ("sbatch: error: Batch job submission failed: Message receive failure", EngineUnreachable),
        ("sbatch: error: Batch job submission failed: Communication shutdown failure", EngineUnreachable),
        ("sbatch: error: Batch job submission failed: Unable to connect to database", EngineUnreachable),
    ],
)
async def test_what_a_program_says_tells_a_refusal_from_a_limit_and_from_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[EngineError]
) -> None:
    sbatch(tmp_path, monkeypatch, f"echo '{said}' >&2\nexit 1")
    with pytest.raises(EngineError) as caught:
        await SlurmPrograms(None, 10.0).run("sbatch")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "why",
    [
        "Slurm temporarily unable to accept job",
        "Slurm job queue full",
        "Message receive failure\nsbatch: error: Slurm job queue full",
    ],
)
async def test_a_submission_that_waits_for_room_in_the_queue_is_not_waited_for_and_makes_no_engine_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    sbatch(tmp_path, monkeypatch, f"echo 'sbatch: error: {why}, sleeping and retrying' >&2\nexec sleep 60")
    began = time.monotonic()
    with pytest.raises(EngineFull, match=why.partition("\n")[0]):
        await SlurmPrograms(None, 30.0).run("sbatch", text="#!/bin/sh\n")
    assert time.monotonic() - began < 20.0


async def test_what_a_program_reads_and_prints_may_be_more_than_a_pipe_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch(tmp_path, monkeypatch, "cat\nhead -c 300000 /dev/zero >&2")
    assert await SlurmPrograms(None, 30.0).run("sbatch", text="x" * 300_000) == "x" * 300_000


async def test_a_program_and_so_a_job_gets_nothing_of_the_managers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch(tmp_path, monkeypatch, "unset PWD _ OLDPWD SHLVL\nenv")
    monkeypatch.setenv("PATH", f"/srv/manager/venv/bin:{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SECRET", "secret")
    printed = await SlurmPrograms(Path("/etc/other.conf"), 10.0).run("sbatch")
    usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # And the place of Slurm's programs, which tasks may call.
    assert sorted(printed.split()) == [f"PATH={usual}:{tmp_path}", "SLURM_CONF=/etc/other.conf"]


async def test_a_program_that_only_its_own_path_finds_adds_no_current_directory_to_the_path_of_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    printed = await SlurmPrograms(None, 10.0).run("env")
    (path,) = (line.removeprefix("PATH=") for line in printed.splitlines() if line.startswith("PATH="))
    assert "" not in path.split(":")
