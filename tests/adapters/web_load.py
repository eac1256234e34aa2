"""A client of a web server that runs throughout a test, and what it met."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from types import TracebackType


class WebLoad:
    """Sends requests one after another, over connections that are kept and over new ones, until it is stopped.

    Answers are the server's word for who served (the body up to the first blank). A connection that was kept may be
    closed at any moment, so a request on it that got no byte back is sent once more over a new one, as every client
    does (RFC 9112, 9.3.1); anything else that is no answer is an error.
    """

    def __init__(self, port: int, path: str = "/", threads: int = 2) -> None:
        self._port = port
        self._path = path
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(i % 2 == 0,), name=f"load-{i}", daemon=True)
            for i in range(threads)
        ]
        self.latencies_s: list[float] = []
        self.errors: list[str] = []
        self.closed_while_kept = 0
        self.served_by: Counter[str] = Counter()

    def __enter__(self) -> WebLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(60)

    def stop(self) -> None:
        """Let the requests under way be the last ones."""
        self._ended.set()

    def count(self) -> int:
        return len(self.latencies_s)

    def p99_ms(self) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)] * 1000

    def more(self, count: int = 20) -> None:
        """Wait for so many more answers."""
        wanted, end = self.count() + count, time.monotonic() + 60
        while self.count() < wanted:
            assert time.monotonic() < end, f"no answers come: {self.errors[-3:]}"
            time.sleep(0.01)

    def shares(self, count: int) -> Counter[str]:
        """Who served the next so many requests."""
        with self._lock:
            self.served_by.clear()
        self.more(count)
        with self._lock:
            return Counter(self.served_by)

    def _run(self, keep: bool) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                connection, body = self._request(connection, keep)
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                connection = None
                continue
            with self._lock:
                self.latencies_s.append(time.monotonic() - began)
                self.served_by[body.split(" ")[0]] += 1
            self._ended.wait(0.002)
        if connection is not None:
            connection.close()

    def _request(
        self, kept: http.client.HTTPConnection | None, keep: bool
    ) -> tuple[http.client.HTTPConnection | None, str]:
        if kept is not None:
            try:
                return self._send(kept, keep)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.closed_while_kept += 1
        return self._send(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60), keep)

    def _send(
        self, connection: http.client.HTTPConnection, keep: bool
    ) -> tuple[http.client.HTTPConnection | None, str]:
        try:
            connection.request("GET", self._path, headers={} if keep else {"Connection": "close"})
            response = connection.getresponse()
            body = response.read().decode()
        except BaseException:
            connection.close()
            raise
        if response.status != 200:
            self.errors.append(f"status {response.status}: {body[:100]}")
        if not keep or response.will_close:
            connection.close()
            return None, body
        return connection, body
