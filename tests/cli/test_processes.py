"""Processes of the lab are stopped by pid and start time, and by nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from ebbtide.lab import processes
from ebbtide.lab.errors import LabError
from ebbtide.lab.state import Process

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def started(argv: list[str], log: Path) -> Process:
    process = processes.start("sleeper", argv, log)
    while "up" not in processes.tail(log):
        assert processes.running(process), processes.tail(log)
    return process


def test_a_process_runs_in_a_session_of_its_own_and_ends_by_sigterm(tmp_path: Path) -> None:
    process = started(SLEEP, tmp_path / "log")
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert processes.stop([process]) == []
    assert processes.running(process) is None
    assert not psutil.pid_exists(process.pid)


def test_one_that_ignores_sigterm_is_killed_and_named(tmp_path: Path) -> None:
    process = started(STUBBORN, tmp_path / "log")
    assert processes.stop([process], term_s=0.3) == ["sleeper"]
    assert processes.running(process) is None


def test_a_reused_pid_is_never_hit(tmp_path: Path) -> None:
    process = started(SLEEP, tmp_path / "log")
    assert process.ticks is not None
    created = psutil.Process(process.pid).create_time()
    for other in ({"ticks": process.ticks - 1}, {"boot": "another"}, {"created": created - 100}):
        stale = process.model_copy(update=other)
        assert processes.running(stale) is None
        assert processes.stop([stale]) == []
    assert processes.running(process) is not None
    processes.stop([process])


def test_a_process_is_known_and_stopped_after_a_step_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(SLEEP, tmp_path / "log")
    # The kernel's btime moves with the clock, and with it what is made of btime.
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)
    assert processes.running(process) is not None
    assert processes.stop([process]) == []
    assert not psutil.pid_exists(process.pid)


def test_a_process_in_a_file_of_before_is_known_by_its_time(tmp_path: Path) -> None:
    process = started(SLEEP, tmp_path / "log")
    created = psutil.Process(process.pid).create_time()
    old = Process.model_validate_json(f'{{"name": "sleeper", "pid": {process.pid}, "created": {created}}}')
    assert processes.running(old) is not None
    assert processes.stop([old]) == []
    assert processes.running(process) is None


def test_stopping_what_has_ended_is_no_error(tmp_path: Path) -> None:
    process = started(SLEEP, tmp_path / "log")
    processes.stop([process])
    assert processes.stop([process]) == []


def test_a_program_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="sleeper could not be started"):
        processes.start("sleeper", ["/nonexistent/program"], tmp_path / "log")
