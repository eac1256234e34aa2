"""A client of the application hook, for tests."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any

#: A host and port, or the path of a Unix socket.
Address = tuple[str, int] | str


def address_of(word: str) -> Address:
    """What a service says: HOST:PORT, or a URL as in a drop-in file."""
    if word.startswith("unix:"):
        return word.removeprefix("unix:")
    host, _, port = word.removeprefix("http://").rpartition(":")
    return host, int(port)


class Rest:
    def __init__(self, address: Address, token: str | None) -> None:
        self._address = address
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        connection = self._connection()
        try:
            connection.request(method, path, body, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def text(self, path: str) -> str:
        """What a service answers that is no hook."""
        connection = self._connection()
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if isinstance(self._address, tuple):
            return http.client.HTTPConnection(*self._address, timeout=20)
        made = http.client.HTTPConnection("localhost", timeout=20)
        made.sock = socket.socket(socket.AF_UNIX)
        made.sock.settimeout(20)
        made.sock.connect(self._address)
        return made

    def capabilities(self) -> dict[str, Any]:
        status, body = self.send("GET", "/deflation/v1/capabilities")
        assert status == 200, body
        return body

    def target(self, request_id: str, direction: str, memory_mib: float, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {
            "request_id": request_id,
            "deadline_s": 60,
            "mode": "ask",
            "direction": direction,
            "target": {"memory_mib": memory_mib},
            "reason": "a test",
            **more,
        }
        return self.send("POST", "/deflation/v1/targets", json.dumps(body).encode())

    def finished(self, request_id: str, limit_s: float = 60.0) -> dict[str, Any]:
        """The status once it has ended; `request_id` as it stands in a URL."""
        end = time.monotonic() + limit_s
        while True:
            status, body = self.send("GET", f"/deflation/v1/targets/{request_id}")
            assert status == 200, body
            if body["state"] != "running":
                return body
            assert time.monotonic() < end, f"{request_id} has not ended after {limit_s:g} s: {body}"
            time.sleep(0.01)  # a tight loop would take the CPU from the service that works
