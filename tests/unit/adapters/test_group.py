"""The hooks of a service's processes, as the one that leads asks them."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from app_adapters import shared
from app_adapters.adapter import Deadline, Promise
from app_adapters.client import HookClient, NoAnswer, NotListening
from app_adapters.hook import CAPABILITIES, HEALTH
from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.server import HookServer
from app_adapters.shared import Group, SharedHookServer


def test_the_socket_of_a_process_that_does_not_listen_yet_stays_and_that_of_one_that_has_ended_goes() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        token = Path(short, "token")
        token.write_text("t")
        group = Group(InelasticAdapter().components, f"{short}/d", str(token))
        server = HookServer(InelasticAdapter(), f"{short}/d/{os.getpid()}.sock", str(token)).start()
        with socket.socket(socket.AF_UNIX) as starting, socket.socket(socket.AF_UNIX) as killed:
            starting.bind(f"{short}/d/{os.getppid()}.sock")
            killed.bind(f"{short}/d/{ended.pid}.sock")
            group.capabilities()
            assert sorted(os.listdir(f"{short}/d")) == sorted(f"{pid}.sock" for pid in (os.getpid(), os.getppid()))
        server.stop()


RUNNING = (200, {"state": "running"})
RELEASED = (200, {"state": "released", "released": {"memory_mib": 10.0}, "measured_by": "x", "reason": "done"})


def gathered(
    monkeypatch: pytest.MonkeyPatch, folder: Path, progress: dict[str, list[Any]], deadline: Deadline
) -> tuple[dict[str, float], str, bool]:
    """What came free in processes that promise, and then tell of their progress so, the last for ever."""
    sizes = {"current": 100.0, "minimum": 0.0, "maximum": 100.0, "step": 1.0}
    (folder / "token").write_text("t")
    (folder / "d").mkdir()
    for pid in progress:
        (folder / "d" / f"{pid}.sock").touch()

    def ask(client: HookClient, method: str, path: str, body: Any = None, limit_s: float | None = None) -> Any:
        if path == CAPABILITIES:
            return 200, {"resources": {"memory_mib": sizes}}
        if method == "POST":
            return 202, {"promised": {"memory_mib": 10.0}, "expected_s": 0.1}
        told = progress[Path(client._path).stem]
        reply = told.pop(0) if len(told) > 1 else told[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(HookClient, "ask", ask)
    answer = Group(("memory_mib",), f"{folder}/d", f"{folder}/token").deflate({"memory_mib": 180.0}, "ask", deadline)
    assert isinstance(answer, Promise)
    release = answer.work()
    return release.released, release.reason, release.complete


def test_a_process_that_goes_in_the_middle_of_its_part_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    progress: dict[str, list[Any]] = {"a": [RUNNING, NotListening("it has ended")], "b": [RUNNING, RUNNING, RELEASED]}
    deadline = Deadline(10.0)
    found = gathered(monkeypatch, tmp_path, progress, deadline)
    assert found == ({"memory_mib": 10.0}, "a: has gone; b: done", False)
    assert not deadline.passed


def test_a_process_that_does_not_answer_for_a_moment_is_asked_again_for_what_came_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    progress: dict[str, list[Any]] = {"a": [NoAnswer("busy"), RUNNING, NoAnswer("busy"), RELEASED], "b": [RELEASED]}
    found = gathered(monkeypatch, tmp_path, progress, Deadline(10.0))
    assert found == ({"memory_mib": 20.0}, "a: done; b: done", True)


def test_a_process_that_never_answers_is_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = gathered(monkeypatch, tmp_path, {"a": [NoAnswer("hangs")], "b": [RELEASED]}, Deadline(0.5))
    assert found == ({"memory_mib": 10.0}, "a: has not ended; b: done", False)


def test_the_process_that_leads_next_serves_once_the_socket_of_the_one_before_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "AGAIN_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        token, never = Path(short, "token"), threading.Event()
        token.write_text("t")
        before = socket.socket(socket.AF_UNIX)
        before.settimeout(30)
        before.bind(f"{short}/hook.sock")
        before.listen()
        server = SharedHookServer(InelasticAdapter(), f"{short}/hook.sock", str(token)).start()
        try:
            # It has the lock, looks whether somebody listens, and finds the one before.
            before.accept()[0].close()
            before.close()
            hook, end = HookClient(server.url), time.monotonic() + 10
            while True:
                try:
                    assert hook.ask("GET", HEALTH)[1]["status"] == "ok"
                    break
                except NoAnswer:
                    assert time.monotonic() < end, "nobody leads"
                    never.wait(0.01)
        finally:
            before.close()
            server.stop()
