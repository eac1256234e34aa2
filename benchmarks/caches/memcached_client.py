"""A load of `get` for memcached that costs little: many connections in one thread, each with one request under way.

Requests are `get` commands of several keys, made beforehand as one string of bytes; all values have one size and all
keys one length, so that hits are counted by the length of an answer instead of looking into it. What client and server
can do together is the rate at full size, which a benchmark tells beside its figures.
"""

from __future__ import annotations

import heapq
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.caches.zipf import KEY_BYTES, Keys, get_bytes, gets, names
from benchmarks.figures import BenchmarkFailed

HOST = "127.0.0.1"
CONNECTIONS = 64
BATCH = 8
BUFFER_BYTES = 1 << 20
END = b"END\r\n"
#: An answer takes longer only where memcached is stuck; reads capped at 500 a second need seconds for a batch.
ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True)
class Load:
    """What a window of requests found. `hits`, `gets`: keys found and asked for; `sets`: values stored after a miss."""

    seconds: float
    gets: int
    hits: int
    sets: int = 0

    @property
    def hits_s(self) -> float:
        return self.hits / self.seconds

    @property
    def served_s(self) -> float:
        """Keys a second that the client got a value for, the cache or the store: of use where misses are stored."""
        return (self.hits + self.sets) / self.seconds

    @property
    def hit_ratio(self) -> float:
        return self.hits / max(self.gets, 1)


class _Connection:
    __slots__ = ("asked", "got", "parts", "socket", "tail")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), ANSWER_LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.got = 0
        self.tail = b""
        self.parts: list[bytes] = []
        self.asked = b""


class Client:
    """Connections to one memcached whose values all have one size. Raises BenchmarkFailed where it does not answer."""

    def __init__(self, port: int, value_bytes: int, connections: int = CONNECTIONS, batch: int = BATCH) -> None:
        self._batch = batch
        self._value = (b"%d." % value_bytes * value_bytes)[:value_bytes]
        self._hit_bytes = len(b"VALUE  0 \r\n\r\n") + KEY_BYTES + len(str(value_bytes)) + value_bytes
        self._connections = {one.socket.fileno(): one for one in (_Connection(port) for _ in range(connections))}
        self._poll = select.epoll()
        for number in self._connections:
            self._poll.register(number, select.EPOLLIN)
        self._buffer = bytearray(BUFFER_BYTES)

    def close(self) -> None:
        self._poll.close()
        for connection in self._connections.values():
            connection.socket.close()

    def store(self, keys: Keys) -> None:
        """Store these keys, over the first connection."""
        connection = next(iter(self._connections.values())).socket
        for first in range(0, len(keys), 256):
            connection.sendall(b"".join(self._set(row.tobytes()) for row in names(keys[first : first + 256])))
        connection.sendall(b"mn\r\n")
        answer = b""
        while not answer.endswith(b"MN\r\n"):
            answer += self._some(connection)

    def run(
        self,
        keys: Keys,
        seconds: float | None = None,
        backend_s: float | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> Load:
        """Ask for these keys, in turn over all connections, until they are used up or the time is over.

        :param backend_s: where given, what is missing is stored so long after it was missed; the connection waits.
        :param over: called when that is so, before what is still under way has been answered.
        """
        requests, length = memoryview(gets(keys, self._batch)), get_bytes(self._batch)
        following = iter(range(0, len(requests), length))
        began_s = time.perf_counter()
        end_s = began_s + seconds if seconds is not None else float("inf")
        asked = hits = stored = under_way = 0
        waiting: list[tuple[float, int]] = []
        for connection in self._connections.values():
            if (at := next(following, None)) is not None:
                self._ask(connection, requests[at : at + length])
                under_way += 1
        answered_s, said = began_s, False
        while under_way or waiting:
            now_s = time.perf_counter()
            if now_s >= end_s and not said:
                said = True
                over()
            while waiting and waiting[0][0] <= now_s:
                connection = self._connections[heapq.heappop(waiting)[1]]
                missing = self._missing(connection)
                connection.socket.sendall(b"".join(self._set(key) for key in missing))
                if now_s < end_s:
                    stored += len(missing)
                    if (at := next(following, None)) is not None:
                        self._ask(connection, requests[at : at + length])
                        under_way += 1
            limit_s = 1.0 if not waiting else max(waiting[0][0] - now_s, 0.0)
            for number, _ in self._poll.poll(limit_s if said else min(limit_s, end_s - now_s)):
                connection = self._connections[number]
                if not self._receive(connection, backend_s is not None):
                    continue
                answered_s = now_s = time.perf_counter()
                under_way -= 1
                if now_s < end_s:
                    found = (connection.got - len(END)) // self._hit_bytes
                    asked, hits = asked + self._batch, hits + found
                    if backend_s is not None and found < self._batch:
                        heapq.heappush(waiting, (now_s + backend_s, number))
                    elif (at := next(following, None)) is not None:
                        self._ask(connection, requests[at : at + length])
                        under_way += 1
            if under_way and time.perf_counter() - answered_s > ANSWER_LIMIT_S:
                raise BenchmarkFailed(f"memcached has not answered for {ANSWER_LIMIT_S:g} s")
        took_s = min(time.perf_counter(), end_s) - began_s
        if not said:
            over()
        return Load(took_s, asked, hits, stored)

    def _ask(self, connection: _Connection, request: memoryview) -> None:
        connection.got, connection.tail, connection.parts = 0, b"", []
        connection.asked = request  # type: ignore[assignment]
        connection.socket.send(request)

    def _receive(self, connection: _Connection, keep: bool) -> bool:
        """Take what there is; returns whether the answer is whole."""
        number = connection.socket.recv_into(self._buffer)
        if not number:
            raise BenchmarkFailed("memcached closed a connection")
        connection.got += number
        if keep:
            connection.parts.append(bytes(self._buffer[:number]))
        last = bytes(self._buffer[max(number - len(END), 0) : number])
        connection.tail = (connection.tail + last)[-len(END) :]
        return connection.tail == END and (connection.got - len(END)) % self._hit_bytes == 0

    def _missing(self, connection: _Connection) -> list[bytes]:
        answer, request = b"".join(connection.parts), bytes(connection.asked)
        start = len(b"VALUE ")
        there = {answer[at + start : at + start + KEY_BYTES] for at in range(0, len(answer), self._hit_bytes)}
        return [key for key in request.split()[1:] if key not in there]

    def _set(self, key: bytes) -> bytes:
        return b"set %b 0 0 %d noreply\r\n%b\r\n" % (key, len(self._value), self._value)

    def _some(self, connection: socket.socket) -> bytes:
        data = connection.recv(4096)
        if not data:
            raise BenchmarkFailed("memcached closed a connection")
        return data
