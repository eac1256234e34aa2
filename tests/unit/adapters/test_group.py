"""The hooks of a service's processes, as the one that leads asks them."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from app_adapters import shared
from app_adapters.client import HookClient, NoAnswer
from app_adapters.hook import HEALTH
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
