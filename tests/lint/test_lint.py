"""Linters and the type checker as tests: they run beside the others, and what they find is a failure like any other.

The contracts of imports are in tests/architecture/test_rooms.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.timeout(900)  # types, without a cache
@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy"])
def test_the_whole_repository_passes(command: str) -> None:
    program, *arguments = command.split()
    user, group = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    done = subprocess.run(
        [BIN / program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        # Caches belong to the user who called sudo, who runs `make lint` without it.
        user=int(user) if user and os.geteuid() == 0 else None,
        group=int(group) if group and os.geteuid() == 0 else None,
    )
    assert done.returncode == 0, done.stdout + done.stderr
