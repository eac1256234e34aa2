"""What every run of the tests gives each test, however it was started."""

from __future__ import annotations

import signal
import subprocess


def test_a_process_that_a_test_starts_can_be_interrupted() -> None:
    """Also where the run itself ignores SIGINT, as in the background of a shell."""
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert not ignored & 1 << (signal.SIGINT - 1)
