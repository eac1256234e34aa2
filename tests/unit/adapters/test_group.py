"""The hooks of a service's processes, as the one that leads asks them."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path

from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.server import HookServer
from app_adapters.shared import Group


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
