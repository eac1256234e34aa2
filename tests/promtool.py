"""promtool, as Debian's package prometheus brings it; one that is missing is an error, never a skip."""

from __future__ import annotations

import subprocess
from pathlib import Path


def promtool(*words: str, given: bytes | None = None, directory: Path | None = None) -> str:
    """What it prints; it must have nothing against what it is given."""
    done = subprocess.run(["promtool", *words], input=given, cwd=directory, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def check_metrics(text: bytes) -> None:
    """Names, units and help by Prometheus' conventions."""
    assert promtool("check", "metrics", given=text) == ""
