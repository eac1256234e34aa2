"""Agent, hook and memcached, all real, as processes; only the guest's size and the host's end of the port are made."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.cache import Cache, free_port

pytestmark = pytest.mark.service

TOKEN = "token-of-this-vm"


class Channel:
    """The host's end of the port, the way a host agent uses it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(30)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._id = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        request = {"jsonrpc": "2.0", "id": self._id, "method": method, "params": params}
        self._connection.sendall(b"\n" + json.dumps(request).encode() + b"\n")
        answer = json.loads(self._lines.readline())
        assert answer["id"] == self._id, answer
        result = answer["result"]
        assert isinstance(result, dict)
        return result

    def finished(self, request_id: str) -> dict[str, Any]:
        while (status := self.call("application.status", request_id=request_id))["state"] == "running":
            pass
        return status


def test_a_deflation_goes_from_the_port_to_memcached_and_back(tmp_path: Path) -> None:
    procfs, adapters = tmp_path / "proc", tmp_path / "adapters.d"
    for name in ("sys/kernel/random/boot_id", "uptime", "stat", "vmstat"):
        (procfs / name).parent.mkdir(parents=True, exist_ok=True)
        (procfs / name).write_text(Path("/proc", name).read_text())
    hook_port = free_port()
    adapters.mkdir(mode=0o755)
    (adapters / "memcached.json").write_text(json.dumps({"name": "memcached", "url": f"http://127.0.0.1:{hook_port}"}))
    (adapters / "memcached.json").chmod(0o644)
    cache = Cache(300)
    processes: list[subprocess.Popen[bytes]] = []
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(tmp_path / "port"))
        listener.listen()
        listener.settimeout(30)
        agent = [sys.executable, "-m", "guestagent", "--port", str(tmp_path / "port"), "--procfs", str(procfs)]
        agent += ["--adapters-dir", str(adapters), "--run-dir", str(tmp_path / "run"), "--reserve-mib", "50"]
        hook = [sys.executable, "-m", "app_adapters", "memcached", "--memcached", f"127.0.0.1:{cache.port}"]
        hook += ["--listen", f"127.0.0.1:{hook_port}", "--token-file", str(tmp_path / "run/token")]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        processes = [subprocess.Popen(command, env=environment) for command in (agent, hook)]
        channel = Channel(listener.accept()[0])
        count = cache.fill(220)
        hot = range(0, count // 5)
        assert cache.right(hot) == len(hot)
        before_mib = cache.rss_mib()

        # A guest of 600 MiB in which 100 MiB are neither free nor memcached's.
        def meminfo() -> None:
            available_mib = 600 - 100 - cache.rss_mib()
            (procfs / "meminfo").write_text(
                f"MemTotal: {600 * 1024} kB\nMemFree: {int(available_mib * 1024)} kB\n"
                f"MemAvailable: {int(available_mib * 1024)} kB\n"
            )

        meminfo()
        channel.call("hello", protocol=1, nonce="n", vm="vm1", token=TOKEN)
        while not (applications := channel.call("status")["applications"]):
            pass
        assert applications[0]["name"] == "memcached"
        assert applications[0]["resident_mib"] == pytest.approx(before_mib, abs=2)

        # 300 of 620 MiB go: 600 - 320 = 280 of guest memory, less 100 of others, less 50 of reserve = 130.
        answer = channel.call(
            "application.deflate",
            request_id="down",
            deadline_s=60,
            mode="ask",
            target={"memory_mib": 300.0},
            bound_mib=620.0,
        )
        assert answer["state"] == "promised", answer
        assert answer["promised"]["memory_mib"] == pytest.approx(before_mib - 130, abs=4)
        status = channel.finished("down")
        assert status["state"] == "released"
        assert cache.rss_mib() <= 140
        assert status["released"]["memory_mib"] == pytest.approx(before_mib - cache.rss_mib(), abs=3)
        assert cache.right(hot) >= 0.97 * len(hot)
        meminfo()
        assert channel.call("status")["memory"]["floor_mib"] == pytest.approx(280, abs=10)

        answer = channel.call(
            "application.reinflate", request_id="up", deadline_s=60, target={"memory_mib": 620.0}, bound_mib=620.0
        )
        assert answer["state"] == "promised"
        assert channel.finished("up")["state"] == "released"
        assert cache.limit_mib() == 300
        cache.fill(220, start=count)
        assert cache.rss_mib() > 220
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(20) for process in processes]
        listener.close()
        cache.stop()
    assert codes == [0, 0]
