"""A service of Python as a process, and clients of it: one that fills it, one that asks it all the time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.adapters.proc import pss_mib
from tests.adapters.rest import address_of

ROOT = Path(__file__).resolve().parents[2]
VALUE_BYTES = 4096
MIB = 1024 * 1024


def value(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest() * (VALUE_BYTES // 32)


class Service:
    """A process that answers `GET KEY`; it says where on its first line.

    :param hooked: and on the next one where its hook is.
    """

    def __init__(self, command: list[str], hooked: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        words = [self.process.stdout.readline().decode().split()[-1] for _ in range(1 + hooked)]
        host, _, port = words[0].rpartition(":")
        self.address, self.hook = (host, int(port)), address_of(words[-1])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def pss_mib(self) -> float:
        return pss_mib([self.process.pid])

    def fill(self, mib: float, start: int = 0) -> None:
        """Ask for so many MiB of values, each of them right."""
        count = int(mib * MIB / VALUE_BYTES)
        with socket.create_connection(self.address, 60) as connection, connection.makefile("rb") as answers:
            for low in range(start, start + count, 200):
                keys = [f"k{key}" for key in range(low, min(low + 200, start + count))]
                connection.sendall("".join(f"GET {key}\n" for key in keys).encode())
                found = answers.read(VALUE_BYTES * len(keys))
                assert found[-VALUE_BYTES:] == value(keys[-1])


class Load:
    """What a client that asks throughout has seen."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.seconds: list[float] = []

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@contextlib.contextmanager
def client(address: tuple[str, int]) -> Iterator[Load]:
    """Asks one key after another until the block ends."""
    load, over = Load(), threading.Event()

    def ask() -> None:
        try:
            with socket.create_connection(address, 60) as connection, connection.makefile("rb") as answers:
                number = 0
                while not over.wait(0.002):
                    key = f"c{number % 200}"
                    number += 1
                    began = time.monotonic()
                    connection.sendall(f"GET {key}\n".encode())
                    if answers.read(VALUE_BYTES) != value(key):
                        load.errors.append(f"{key}: wrong value")
                    load.seconds.append(time.monotonic() - began)
        except OSError as error:
            load.errors.append(str(error))

    thread = threading.Thread(target=ask, name="client")
    thread.start()
    try:
        yield load
    finally:
        over.set()
        thread.join(60)
