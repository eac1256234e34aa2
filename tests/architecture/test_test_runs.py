"""What every run of the tests gives each test, however it was started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BOTH_STORES, FIRST, SLOW_FILES, SWAP_FILES

ROOT = Path(__file__).parents[2]
#: One test that is tried as a test with real parts, and says each time that it was.
TRIED = """
from pathlib import Path
from tests.chaos.checks import hold
from tests.conftest import SECOND_TRY

@SECOND_TRY
def test_it():
    Path("tries").open("a").write("x")
    {ends}
"""


def test_a_process_that_a_test_starts_can_be_interrupted() -> None:
    """Also where the run itself ignores SIGINT, as in the background of a shell."""
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert not ignored & 1 << (signal.SIGINT - 1)


@pytest.mark.parametrize(
    ("ends", "tries"),
    [
        ("hold('in the end', 'a VM is lost')", 1),
        ("raise TimeoutError('the guest has not booted')", 2),
        ("assert not 'settled'", 2),
    ],
)
def test_what_chaos_found_to_be_broken_is_not_tried_again(tmp_path: Path, ends: str, tries: int) -> None:
    """A second try with other moments of the same choices may well be green."""
    (tmp_path / "test_one.py").write_text(TRIED.format(ends=ends))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_one.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout
    assert len((tmp_path / "tries").read_text()) == tries, ended.stdout


def test_every_test_that_has_its_own_rule_in_a_run_exists() -> None:
    """One that was renamed would lose its rule, a run on PostgreSQL say, without a word."""
    named = [name for name in (*FIRST, *SLOW_FILES, *SWAP_FILES, *BOTH_STORES) if "/" in name]
    assert len(named) > 40
    assert [name for name in named if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Of a function its beginning counts, as in a run."""
    file, _, function = name.partition("::")
    return (ROOT / file).exists() and (
        not function or re.search(rf"^(async )?def {function}", (ROOT / file).read_text(), re.MULTILINE) is not None
    )
