"""What Slurm's programs mean by what they say when they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.matcher.engines.slurm_programs import SlurmPrograms
from ebbtide.matcher.errors import EngineError, EngineFull, EngineRefused, EngineUnreachable


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
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EngineError) as caught:
        await SlurmPrograms(None, 10.0).run("sbatch")
    assert type(caught.value) is kind
