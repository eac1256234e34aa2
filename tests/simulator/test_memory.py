"""A trace ten times as long takes no more memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import resource, sys
from pathlib import Path
from ebbtide.simulator.inputs.traces import Trace

rows = sum(len(b) for b in Trace(Path(sys.argv[1]), "series", order=sys.argv[2], buffer_rows=20_000, run_rows=50_000))
print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_kib(path: Path, order: str, lines: int) -> int:
    with path.open("w") as file:
        file.write("at_s,value\n")
        # Each pair the wrong way round.
        file.writelines(f"{i ^ 1},{i % 977}.5\n" for i in range(lines))
    command = [sys.executable, "-c", CODE, str(path), order]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rows, peak = map(int, done.stdout.split())
    assert rows == lines
    return peak


@pytest.mark.parametrize("order", ["buffer", "sort"])
def test_memory_does_not_grow_with_the_trace(tmp_path: Path, order: str) -> None:
    short = peak_kib(tmp_path / "short.csv", order, 400_000)
    long = peak_kib(tmp_path / "long.csv", order, 4_000_000)
    # The rows alone are 61 MiB, the text is 55 MiB.
    assert long - short < 20 * 1024
