"""Hooks of applications that behave badly: a raw server, so that also HTTP itself can be wrong."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

HONEST_MIB = 300.0
OFFER = {
    "name": "bad",
    "version": "1",
    "resources": {"memory_mib": {"current": HONEST_MIB, "minimum": 10, "maximum": 1000, "step": 1}},
    "expected_s": 0.1,
    "reversible": True,
    "modes": ["ask", "force"],
}


def http(status: int, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def drip(text: bytes, every_s: float = 0.2) -> Iterator[bytes]:
    """One byte at a time: no read ever waits long, all of them together take for ever."""
    for i in range(len(text)):
        yield text[i : i + 1]
        time.sleep(every_s)


def endless() -> Iterator[bytes]:
    """A body without end."""
    yield b"HTTP/1.1 200 OK\r\n\r\n{"
    while True:
        yield b" " * 65536


def continued() -> Iterator[bytes]:
    """An answer that is about to come, again and again."""
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n" * 100
        time.sleep(0.01)


class BadHook:
    """Answers each of the three questions by a function of the request's id; `None` says nothing and holds on."""

    def __init__(
        self,
        capabilities: Callable[[], Any] = lambda: (200, OFFER),
        target: Callable[[str], Any] | None = None,
        progress: Callable[[str], Any] | None = None,
    ) -> None:
        self.capabilities = capabilities
        self.target = target or (lambda id_: (202, promise(id_)))
        self.progress = progress or (lambda id_: (200, report(id_)))
        self.asked: list[str] = []
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="bad-hook", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        # close() alone does not wake a thread that waits in accept().
        with socket.socket() as last:
            last.connect_ex(("127.0.0.1", self.port))
        self._thread.join(20)
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                answer = self._answer(connection)
                if answer is None:
                    self._over.wait(60)
                elif isinstance(answer, tuple):
                    status, body = answer
                    connection.sendall(http(status, json.dumps(body).encode()))
                elif isinstance(answer, bytes):
                    connection.sendall(answer)
                else:
                    for part in answer:
                        if self._over.is_set():
                            return
                        connection.sendall(part)
            except OSError:  # the agent does not listen any more, as it should
                pass

    def _answer(self, connection: socket.socket) -> Any:
        file = connection.makefile("rb")
        words = file.readline().split()
        if len(words) < 2:
            return b""
        length = 0
        while (line := file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = file.read(length)
        path = words[1].decode()
        self.asked.append(f"{words[0].decode()} {path}")
        if path.endswith("/capabilities"):
            return self.capabilities()
        if words[0] == b"POST":
            return self.target(json.loads(body)["request_id"])
        return self.progress(path.rpartition("/")[2])


def offer(**sizes: Any) -> dict[str, Any]:
    """Capabilities with other sizes."""
    resources: Any = OFFER["resources"]
    return {**OFFER, "resources": {"memory_mib": {**resources["memory_mib"], **sizes}}}


def promise(request_id: str, memory_mib: Any = 100, **more: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "state": "promised",
        "promised": {"memory_mib": memory_mib},
        "expected_s": 0.1,
        "reason": "",
        **more,
    }


def report(request_id: str, memory_mib: Any = 100, **more: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "state": "released",
        "released": {"memory_mib": memory_mib},
        "measured_by": "say-so",
        "reason": "",
        **more,
    }


def open_sockets() -> int:
    """Sockets of this process."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            continue
    return count
