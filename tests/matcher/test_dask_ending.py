"""How the Dask engine ends an attempt that has begun: one SIGTERM, time to end, SIGKILL; and what ended says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

import psutil
import pytest

from ebbtide.matcher.engines import dask_inside
from ebbtide.matcher.engines.dask import KILL_AFTER_S, Dask, _seen
from ebbtide.matcher.engines.records import Record, shell_of
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineRefused
from tests.hostagent.faked_loop import FakedLoop

ATTEMPT = "ebb.train.0a.1"
#: Says how often it was told to end, takes a moment to save, and ends well.
SAVES = """
import pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path(sys.argv[1]).touch()
until = time.monotonic() + 30
while time.monotonic() < until:
    time.sleep(0.05)
    if told:
        until = min(until, time.monotonic() + 0.5)
print(len(told))
"""


#: Starts a daemon, whose child it is, and names both.
LEAVES = """
import os, pathlib, subprocess, sys, time
daemon = subprocess.Popen(["sleep", "60"], start_new_session=True)
written = pathlib.Path(sys.argv[1] + ".new")
written.write_text(f"{os.getpid()} {daemon.pid}")
written.rename(sys.argv[1])
time.sleep(60)
"""


class Ending(Dask):
    """An engine with an attempt that has begun, whose signals arrive from some moment on."""

    def __init__(self, directory: Path, arrive_s: float = 0.0) -> None:
        super().__init__(EngineSettings(engine="dask", directory=directory, dask_scheduler="tcp://127.0.0.1:1"))
        self.sent: list[Signals] = []
        self._arrive_s = arrive_s
        (directory / ATTEMPT).mkdir(mode=0o700)
        (directory / ATTEMPT / "claim").write_text("begun 1700000000.5 n1\n")

    async def _signal(self, attempt: str, number: Signals, all_of_it: bool) -> bool:
        assert (attempt, all_of_it) == (ATTEMPT, True)
        if asyncio.get_running_loop().time() < self._arrive_s:
            raise EngineRefused("a worker does not answer")
        self.sent.append(number)
        return True


def end(engine: Ending, every_s: float, seconds: float) -> list[Signals]:
    """What the attempt has got after looks for so long, each of which asks for its end."""

    async def looks() -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < seconds:
            with contextlib.suppress(EngineRefused):
                await engine.cancel(ATTEMPT)
            await asyncio.sleep(every_s)

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        runner.run(looks())
    return engine.sent


def test_looks_that_follow_one_another_at_once_neither_kill_nor_signal_again(tmp_path: Path) -> None:
    assert end(Ending(tmp_path), 0.05, KILL_AFTER_S - 0.5) == [SIGTERM]


def test_what_has_not_ended_in_time_is_killed(tmp_path: Path) -> None:
    assert end(Ending(tmp_path), 1.0, KILL_AFTER_S + 1.0) == [SIGTERM, SIGKILL]


def test_a_signal_that_did_not_arrive_is_sent_again_and_puts_off_no_kill(tmp_path: Path) -> None:
    assert end(Ending(tmp_path, arrive_s=1.5), 1.0, KILL_AFTER_S + 1.0) == [SIGTERM, SIGKILL]


def test_a_worker_where_no_record_can_be_written_says_so() -> None:
    for code, unrecorded in ((98, True), (99, False), (7, False)):
        task = {"state": "erred", "worker": None, "reason": f"RuntimeError('exit code {code}')"}
        assert _seen(task, Record()).unrecorded is unrecorded


@contextlib.contextmanager
def running(directory: Path, *command: str) -> Iterator[tuple[list[str], subprocess.Popen[bytes]]]:
    """An attempt as a worker runs it, whose command has made the file that its last argument names."""
    shell, up = shell_of(directory, ATTEMPT), directory / "up"
    (directory / ATTEMPT).mkdir()
    with subprocess.Popen([*shell, "n1", *command, str(up)], start_new_session=True) as attempt:
        while not up.exists():
            assert attempt.poll() is None
            time.sleep(0.01)
        yield shell, attempt


def test_a_command_that_is_told_to_end_hears_it_once_and_what_it_ends_with_counts(tmp_path: Path) -> None:
    with running(tmp_path, sys.executable, "-c", SAVES) as (shell, attempt):
        dask_inside.signal(shell, SIGTERM, all_of_it=True)
        assert attempt.wait(20) == 0
    assert (tmp_path / ATTEMPT / "out").read_text() == "1\n"


def test_a_command_in_a_process_group_of_its_own_is_told_to_end(tmp_path: Path) -> None:
    with running(tmp_path, "timeout", "20", sys.executable, "-c", SAVES) as (shell, attempt):
        dask_inside.signal(shell, SIGTERM, all_of_it=True)
        assert attempt.wait(30) == 0
    # timeout passes on what it gets.
    assert int((tmp_path / ATTEMPT / "out").read_text()) >= 1


def test_what_is_killed_leaves_nothing_behind_in_other_process_groups_and_sessions(tmp_path: Path) -> None:
    with running(tmp_path, "timeout", "60", sys.executable, "-c", LEAVES) as (shell, attempt):
        left = [psutil.Process(int(pid)) for pid in (tmp_path / "up").read_text().split()]
        assert len({os.getsid(one.pid) for one in left} - {attempt.pid}) == 1
        try:
            dask_inside.signal(shell, SIGKILL, all_of_it=True)
            assert attempt.wait(20) == -SIGKILL
            gone_by(left)
        finally:
            for one in alive(left):
                one.kill()
    assert not (tmp_path / ATTEMPT / "end").exists()


def test_an_attempt_that_an_earlier_version_has_begun_is_found_by_its_name(tmp_path: Path) -> None:
    shell = shell_of(tmp_path, ATTEMPT)
    earlier = [*shell[:2], "sleep 60; exit 0", *shell[3:], "n1", "true"]
    with subprocess.Popen(earlier, start_new_session=True) as attempt:
        try:
            for name, there in ((f"{ATTEMPT}2", False), (ATTEMPT, True)):
                assert dask_inside.signal(shell_of(tmp_path, name), SIGKILL, all_of_it=True) is there
            assert attempt.wait(20) == -SIGKILL
        finally:
            attempt.kill()


async def test_what_a_killed_shell_leaves_is_killed_before_its_attempt_counts_as_ended(tmp_path: Path) -> None:
    up = tmp_path / "up"
    (tmp_path / ATTEMPT).mkdir()
    argv = [*shell_of(tmp_path, ATTEMPT), "n1", "timeout", "60", sys.executable, "-c", LEAVES, str(up)]
    attempt = asyncio.create_task(asyncio.to_thread(dask_inside.run, argv), name="attempt")
    while not up.exists():
        assert not attempt.done()
        await asyncio.sleep(0.01)
    left = [psutil.Process(int(pid)) for pid in up.read_text().split()]
    try:
        os.kill(os.getsid(left[0].pid), SIGKILL)
        with pytest.raises(RuntimeError, match=r"^exit code -9$"):
            await attempt
        gone_by(left)
    finally:
        for one in alive(left):
            one.kill()


def gone_by(processes: list[psutil.Process]) -> None:
    """They are dying, which may take a moment."""
    until = time.monotonic() + 5
    while alive(processes) and time.monotonic() < until:
        time.sleep(0.01)
    assert alive(processes) == []


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Without those that were killed and for which nobody has waited."""
    found = []
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found
