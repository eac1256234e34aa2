"""The commands of the tutorial, run in their order as they are printed, against a real lab."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.lab import paths
from ebbtide.lab.cluster import Lab

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
#: `make test` has just run this target.
DONE = "make install"


def commands() -> list[str]:
    """The lines of all shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def directory() -> Iterator[Path]:
    """The state of a lab of its own, which is down in the end. QEMU's user must be able to pass through it."""
    made = Path(tempfile.mkdtemp(prefix="ebbtide-tutorial-", dir="/var/tmp"))
    made.chmod(0o711)
    try:
        yield made
    finally:
        Lab(made / "lab", report=print).down()
        shutil.rmtree(made)


def run(line: str, directory: Path, host: str) -> str:
    """Run a command under another host name, since a lab that the user has up may have a host-a."""
    environment = dict(os.environ) | {
        paths.STATE_VARIABLE: str(directory / "lab"),
        "EBB_CONTEXT": "lab",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-c", line.replace("host-a", host)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    print(f"$ {line}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout


def test_every_command_of_the_tutorial_works(directory: Path) -> None:
    lines = commands()
    assert lines[0] == DONE
    host = f"tutorial-{directory.name[-6:].replace('_', 'x').lower()}"
    shown = {line: run(line, directory, host) for line in lines[1:]}
    vms = [text for line, text in shown.items() if line == "ebb vm list"]
    assert "1 cores" in shown["ebb vm explain web"]
    assert "512 MiB" in shown["ebb vm explain web"]
    assert "2 cores, 768 MiB" in vms[-1]
    assert list(shown)[-1] == "ebb lab down"
