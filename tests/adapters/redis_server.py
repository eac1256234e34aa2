"""A real redis-server on loopback, and a client that runs all the time."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from pathlib import Path

from tests.adapters import load
from tests.adapters.cache import free_port
from tests.adapters.proc import rss_mib

MIB = 1024 * 1024


def encoded(*words: object) -> bytes:
    texts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)


class Connection:
    """As little of the protocol as the tests need, independent of the adapter's own client."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._file = self._socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def call(self, *words: object) -> object:
        self._socket.sendall(encoded(*words))
        return self.reply()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reply(self) -> object:
        line = self._file.readline()
        if not line:
            raise ConnectionError("closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise AssertionError(rest.decode())
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        return rest.decode() if kind == b"+" else int(rest)


class RedisServer:
    """A server of its own; it neither saves nor has a limit unless `options` say so."""

    def __init__(
        self, directory: Path, *options: str, program: str = "redis-server", password: str = "", config: str = ""
    ) -> None:
        self.port = free_port()
        command = [
            program,
            *([config] if config else []),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(directory),
            "--save",
            "",
        ]
        more = ["--requirepass", password] if password else []
        self.process = subprocess.Popen([*command, *more, *options], stdout=subprocess.DEVNULL)
        try:
            self.connection = self._connect(password)
        except BaseException:
            self.process.kill()
            self.process.wait(60)
            raise

    def _connect(self, password: str) -> Connection:
        end = time.monotonic() + 60
        while True:
            try:
                connection = Connection(self.port)
            except ConnectionRefusedError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise
                continue
            if password:
                connection.call("AUTH", password)
            return connection

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()  # at a SIGTERM it might save first
        self.process.wait(60)

    def call(self, *words: object) -> object:
        return self.connection.call(*words)

    def fill(self, mib: float, size: int | None = 4096, start: int = 0, expire_s: int = 0) -> int:
        """Set keys from `start` on, so many MiB of values; sizes are mixed without `size`. Returns how many."""
        dice, key, left = random.Random(start), start, int(mib * MIB)
        while left > 0:
            batch = []
            for _ in range(200):
                length = size or dice.choice((200, 1000, 4000, 9000, 20000))
                batch.append(encoded("SET", f"k{key}", b"v" * length, *(["EX", expire_s] if expire_s else [])))
                key, left = key + 1, left - length
                if left <= 0:
                    break
            self.connection.send(b"".join(batch))
            for _ in batch:
                assert self.connection.reply() == "OK"
        return key - start

    def fill_in_time(
        self, mib: float, size: int | None = 4096, start: int = 0, expire_s: int = 0, parts: int = 3
    ) -> int:
        """As `fill`, in parts of different age: the server's clock for that has a resolution of one second.

        Keys of one age are evicted at random, which leaves a few of them in every slab of the allocator.
        """
        count, parts = 0, 3
        for part in range(parts):
            clock = int(self.info()["lru_clock"])
            count += self.fill(mib / parts, size, start + count, expire_s)
            end = time.monotonic() + 60
            while part + 1 < parts and int(self.info()["lru_clock"]) == clock:
                assert time.monotonic() < end
        return count

    def info(self) -> dict[str, str]:
        text = self.call("INFO")
        assert isinstance(text, bytes)
        pairs = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
        return {name: value for name, _, value in pairs}

    def config(self, name: str) -> str:
        reply = self.call("CONFIG", "GET", name)
        assert isinstance(reply, list)
        return bytes(reply[1]).decode()

    def limit_mib(self) -> float:
        return int(self.config("maxmemory")) / MIB

    def rss_mib(self) -> float:
        return rss_mib(self.process.pid)


class Load(load.Load):
    """SET, GET and PING, one after another, all the time."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._connection = Connection(port)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._connection.close()

    def ask(self, number: int) -> None:
        self._call("OK", "SET", f"load{number % 500}", b"x" * 1000)
        self._call(None, "GET", f"load{number % 500}")
        self._call("PONG", "PING")

    def _call(self, right: object, *words: object) -> None:
        try:
            with self.timed():
                answer = self._connection.call(*words)
        except AssertionError as error:  # the server's error
            self.errors.append(str(error))
            return
        if right is not None and answer != right:
            self.errors.append(f"{words[0]!s}: {answer!r}")
