"""A client of memcached in a thread of its own, that reads all the time and remembers how long each answer took."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.adapters.cache import Cache

ANSWER_LIMIT_S = 20.0


class Reader:
    """Gets of single keys one after another. A miss is no error; a wrong, missing or late answer is."""

    def __init__(self, cache: Cache, keys: Sequence[int], size: int = 4096, pause_s: float = 0.0005) -> None:
        self._cache = cache
        self._keys = keys
        self._size = size
        self._pause_s = pause_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self.hits = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(ANSWER_LIMIT_S * 2)

    def percentile_ms(self, percent: float) -> float:
        return sorted(self.seconds)[min(int(len(self.seconds) * percent / 100), len(self.seconds) - 1)] * 1000

    def _read(self) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self._cache.port), ANSWER_LIMIT_S) as connection:
                while not self._ended.wait(self._pause_s):
                    self._one(connection, self._keys[len(self.seconds) % len(self._keys)])
        except OSError as error:
            self.errors.append(str(error))

    def _one(self, connection: socket.socket, key: int) -> None:
        began_s = time.perf_counter()
        connection.sendall(b"get k%d\r\n" % key)
        answer = b""
        while not answer.endswith(b"END\r\n"):
            part = connection.recv(1 << 20)
            if not part:
                raise ConnectionError("memcached closed the connection")
            answer += part
        self.seconds.append(time.perf_counter() - began_s)
        value = self._cache.value(key, self._size)
        if answer == b"VALUE k%d 0 %d\r\n%b\r\nEND\r\n" % (key, self._size, value):
            self.hits += 1
        elif answer != b"END\r\n":
            self.errors.append(f"a wrong answer for {key}")
