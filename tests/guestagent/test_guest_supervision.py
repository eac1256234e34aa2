"""The guest agent under systemd, with a socket in its place: ready, signs of life, reload, the end; its log's form."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from guestagent.telling import PERIOD_S, Supervision
from tests.guestagent.harness import GuestTree


class Running:
    """The real program over a guest made of files, its port missing."""

    def __init__(self, folder: Path, *words: str, **environ: str) -> None:
        tree = GuestTree(folder)
        (folder / "run").mkdir()
        self.path = str(folder / "notify")
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.systemd.bind(self.path)
        self.systemd.settimeout(30)
        self.config = folder / "guestagent.toml"
        self.config.write_text("")
        directories = ["--sysfs", str(tree.sysfs), "--procfs", str(tree.procfs), "--run-dir", str(folder / "run")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "guestagent", "--config", str(self.config), *directories, *words],
            env={**os.environ, "NOTIFY_SOCKET": self.path, **environ},
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.systemd.recv(4096).decode().split("\n"))

    def forget(self) -> None:
        """What was sent so far."""
        self.systemd.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while self.told():
                pass

    def line(self, word: str) -> str:
        """The next line of the log with this word."""
        assert self.process.stderr is not None
        return next(line for line in self.process.stderr if word in line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.systemd.close()


@pytest.mark.slow
def test_the_agent_is_ready_gives_signs_of_life_while_its_loop_turns_and_says_that_it_ends(tmp_path: Path) -> None:
    agent = Running(tmp_path, WATCHDOG_USEC="600000")
    try:
        assert agent.told() == {"READY": "1", "STATUS": "its host has not said hello"}
        for _ in range(3):
            assert agent.told()["WATCHDOG"] == "1"
        agent.process.send_signal(signal.SIGSTOP)
        agent.forget()
        agent.systemd.settimeout(1.5)
        with pytest.raises(TimeoutError):
            agent.told()
        agent.systemd.settimeout(30)
        agent.process.send_signal(signal.SIGCONT)
        assert agent.told()["WATCHDOG"] == "1"
        agent.process.send_signal(signal.SIGTERM)
        while "STOPPING" not in agent.told():
            pass
        assert agent.process.wait(30) == 0
    finally:
        agent.end()


def test_an_agent_whose_request_group_is_gone_says_so_and_serves_its_host(tmp_path: Path) -> None:
    agent = Running(tmp_path, "--request-group", "no-such-group")
    try:
        assert "level=warning" in agent.line("there is no group 'no-such-group'")
        assert agent.told()["READY"] == "1"
    finally:
        agent.end()


def test_without_systemd_nothing_is_sent_and_the_loop_waits_for_as_long_as_it_likes() -> None:
    assert Supervision({}).period_s is None
    assert Supervision({"NOTIFY_SOCKET": "/nowhere"}).period_s == PERIOD_S
    assert Supervision({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "3000000"}).period_s == 1.0
    other = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    assert Supervision(other).period_s == PERIOD_S
    Supervision(other).ready("nobody listens")


def test_sighup_takes_over_what_it_can_and_names_what_needs_a_start(tmp_path: Path) -> None:
    agent = Running(tmp_path)
    try:
        assert agent.told()["READY"] == "1"
        agent.config.write_text('reserve_mib = 96\nport = "other"\nlog_json = true\n')
        agent.process.send_signal(signal.SIGHUP)
        said = json.loads(agent.line("reloaded"))
        assert said["event"] == "reloaded: log_level, log_json, reserve_mib"
        later = json.loads(agent.line("only after"))
        assert (later["level"], later["event"]) == ("warning", "some options count only after a start: port")
        agent.config.write_text("reserve_mib = 1\nreserve_mb = 96\n")
        agent.process.send_signal(signal.SIGHUP)
        wrong = json.loads(agent.line("stays as it is"))
        assert wrong["level"] == "error"
        assert f"{agent.config}:2: reserve_mb: there is no such option" in wrong["event"]
        assert agent.process.poll() is None
    finally:
        agent.end()


@pytest.mark.parametrize("as_json", [False, True])
def test_the_log_has_the_form_of_the_other_daemons_logs(as_json: bool) -> None:
    code = (
        "import os, guestagent.telling as logs; found = os.fstat(2)\n"
        f"logs.configure('warning', {as_json}); logs.log('not this'); logs.log('port \"a\"\\nlost', 'warning')\n"
        "os.environ['JOURNAL_STREAM'] = f'{found.st_dev}:{found.st_ino}'; logs.log('a defect', 'error')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow, defect = done.stderr.splitlines()
    if as_json:
        said = json.loads(slow)
        assert time.strptime(said.pop("timestamp"), "%Y-%m-%dT%H:%M:%SZ")
        assert said == {"level": "warning", "event": 'port "a"\nlost'}
        assert defect == '<3>{"level": "error", "event": "a defect"}'
    else:
        assert slow.split(" ", 1)[1] == r'level=warning event="port \"a\"\nlost"'
        assert defect == '<3>level=error event="a defect"'
