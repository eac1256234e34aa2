"""A real memcached on loopback, filled with keys whose values can be told."""

from __future__ import annotations

import os
import socket
import subprocess
import time

from tests.adapters.proc import rss_mib

MIB = 1024 * 1024


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


class Cache:
    """A memcached of its own; `options` are added to its command line."""

    def __init__(self, limit_mib: int = 400, options: tuple[str, ...] = (), malloc_setting: bool = True) -> None:
        self.port = free_port()
        environment = dict(os.environ)
        environment.pop("MALLOC_MMAP_THRESHOLD_", None)
        if malloc_setting:
            environment["MALLOC_MMAP_THRESHOLD_"] = "131072"
        command = ["memcached", "-u", "nobody", "-l", "127.0.0.1", "-p", str(self.port), "-U", "0"]
        self.process = subprocess.Popen([*command, "-m", str(limit_mib), *options], env=environment)
        self._socket = self._connect()

    def _connect(self) -> socket.socket:
        end = time.monotonic() + 20
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 20)
            except ConnectionRefusedError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise

    def stop(self) -> None:
        self._socket.close()
        self.process.terminate()
        self.process.wait(20)

    def value(self, key: int, size: int) -> bytes:
        return (b"%d." % key * size)[:size]

    def fill(self, mib: float, size: int = 4096, start: int = 0) -> int:
        """Set keys from `start` on, about so many MiB of values; returns how many."""
        count = int(mib * MIB / size)
        for low in range(start, start + count, 500):
            keys = range(low, min(low + 500, start + count))
            self._socket.sendall(
                b"".join(b"set k%d 0 0 %d noreply\r\n%b\r\n" % (key, size, self.value(key, size)) for key in keys)
            )
        self._socket.sendall(b"mn\r\n")
        assert self._read_to(b"MN\r\n") == b"MN\r\n"
        return count

    def right(self, keys: range, size: int = 4096) -> int:
        """How many of the keys are there with their right value; counts as reading them."""
        right = 0
        for low in range(keys.start, keys.stop, 50):
            part = range(low, min(low + 50, keys.stop))
            self._socket.sendall(b"get " + b" ".join(b"k%d" % key for key in part) + b"\r\n")
            answer = self._read_to(b"END\r\n")
            right += sum(b"VALUE k%d 0 %d\r\n%b\r\n" % (key, size, self.value(key, size)) in answer for key in part)
        return right

    def stats(self, what: str = "") -> dict[str, str]:
        self._socket.sendall(b"stats %b\r\n" % what.encode() if what else b"stats\r\n")
        lines = self._read_to(b"END\r\n").decode().splitlines()[:-1]
        return {name: value for _, name, value in (line.split(" ", 2) for line in lines)}

    def limit_mib(self) -> float:
        return int(self.stats()["limit_maxbytes"]) / MIB

    def rss_mib(self) -> float:
        return rss_mib(self.process.pid)

    def _read_to(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            data += self._socket.recv(1 << 20)
        return data
