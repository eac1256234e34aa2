"""What systemd is told: ready, a status, signs of life while the event loop turns, and the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.lab.state import write_private
from ebbtide.rest.supervision import supervised


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """Its end of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.settimeout(60.0)
        yield found


def environ_of(systemd: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": systemd.getsockname(), **more}


def said(systemd: socket.socket) -> list[str]:
    return systemd.recv(4096).decode().split("\n")


async def test_ready_comes_first_and_stopping_last(systemd: socket.socket) -> None:
    async with supervised(lambda: "three VMs", environ_of(systemd)):
        assert said(systemd) == ["READY=1", "STATUS=three VMs"]
    assert said(systemd) == ["STOPPING=1", "STATUS=stopping"]


@pytest.mark.looptime
async def test_signs_of_life_come_three_times_within_what_is_waited_for(systemd: socket.socket) -> None:
    environ = environ_of(systemd, WATCHDOG_USEC="6000000", WATCHDOG_PID=str(os.getpid()))
    count = iter(range(100))
    async with supervised(lambda: f"look {next(count)}", environ):
        said(systemd)
        await asyncio.sleep(6.5)
        assert [said(systemd) for _ in range(3)] == [["WATCHDOG=1", f"STATUS=look {n}"] for n in (1, 2, 3)]


@pytest.mark.looptime
async def test_a_watchdog_that_is_meant_for_another_process_sets_no_pace(systemd: socket.socket) -> None:
    systemd.setblocking(False)
    async with supervised(lambda: "", environ_of(systemd, WATCHDOG_USEC="3000000", WATCHDOG_PID="1")):
        said(systemd)
        await asyncio.sleep(9.0)
        with pytest.raises(BlockingIOError):
            said(systemd)


@pytest.mark.looptime
async def test_a_systemd_that_is_gone_or_was_never_there_holds_nothing_up(tmp_path: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nothing")}):
        async with supervised(lambda: "", environ):
            await asyncio.sleep(30.0)


@pytest.mark.service
def test_a_manager_whose_loop_is_stopped_gives_no_sign_of_life(systemd: socket.socket, tmp_path: Path) -> None:
    for name in ("token", "hosts.key"):
        write_private(tmp_path / name, f"secret-of-{name}")
    options = ["--listen", "127.0.0.1:0", "--token-file", "token", "--hosts-key-file", "hosts.key", "--database", "db"]
    environ = {**os.environ, **environ_of(systemd, WATCHDOG_USEC="1500000")}
    command = [sys.executable, "-m", "cluster_manager.main", *options]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as manager:
        try:
            assert said(systemd)[0] == "READY=1"
            status = said(systemd)
            assert status[0] == "WATCHDOG=1"
            assert status[1].startswith("STATUS=leads with epoch 1: 0 of 0 hosts ready")
            manager.send_signal(signal.SIGSTOP)
            systemd.settimeout(0.1)
            until = time.monotonic() + 0.6
            while time.monotonic() < until:  # what was under way
                try:
                    said(systemd)
                except TimeoutError:
                    break
            systemd.settimeout(1.5)
            with pytest.raises(TimeoutError):
                said(systemd)
            systemd.settimeout(60.0)
            manager.send_signal(signal.SIGCONT)
            assert said(systemd)[0] == "WATCHDOG=1"
            manager.terminate()
            while (word := said(systemd)[0]) == "WATCHDOG=1":
                pass
            assert word == "STOPPING=1"
        finally:
            manager.kill()
