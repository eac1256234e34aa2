"""Sessions of tests with real guests wait for each other."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from tests.conftest import OneSession

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process of another session")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_session_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    argv = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "held\n"
        said: list[str] = []
        told = threading.Event()

        def report(sentence: str) -> None:
            said.append(sentence)
            told.set()

        second = OneSession(path)
        waiting = threading.Thread(target=second.take, args=(report,))
        waiting.start()
        assert told.wait(30)
        assert "process of another session" in said[0]
        assert waiting.is_alive(), "it does not go on before the first one has ended"
        first.stdin.close()
        waiting.join(30)
        assert not waiting.is_alive()
        second.take(said.append)
        assert len(said) == 1
