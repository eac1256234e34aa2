"""The example of an embedded hook: short, and it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.adapters.rest import Rest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embed_hook.py"


def test_embedding_takes_ten_lines_at_most() -> None:
    text = EXAMPLE.read_text().partition("# embedding: begin\n")[2].partition("# embedding: end")[0]
    assert 0 < len([line for line in text.splitlines() if line.strip()]) <= 10


def test_the_example_deflates_and_reinflates(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    service = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "0", str(tmp_path / "token")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])},
    )
    try:
        assert service.stdout is not None
        host, _, port = service.stdout.readline().decode().split()[-1].rpartition(":")
        rest = Rest((host, int(port)), "t")
        assert rest.target("down", "deflate", 8)[1]["promised"] == {"memory_mib": 24.0}
        assert rest.finished("down")["released"] == {"memory_mib": 24.0}
        assert rest.target("up", "reinflate", 64)[0] == 202
        rest.finished("up")
        assert rest.capabilities()["resources"]["memory_mib"]["current"] == 64
        _, errors = service.communicate(b"", timeout=20)
        assert service.returncode == 0, errors
    finally:
        service.kill()
        service.wait()
