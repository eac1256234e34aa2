"""The end of control groups of our own."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.figures import BenchmarkFailed

LIMIT_S = 20.0


def gone(*groups: Path) -> None:
    """Remove those that are there, with what runs in them. Raises BenchmarkFailed where one stays."""
    end_s = time.monotonic() + LIMIT_S
    for group in groups:
        while group.exists():
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                group.rmdir()
            except OSError as error:  # killed processes take a moment to leave
                if time.monotonic() > end_s:
                    raise BenchmarkFailed(f"the control group {group} cannot be removed: {error}") from error
                time.sleep(0.05)
