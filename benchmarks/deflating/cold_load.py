"""Loads of the benchmark `cold`, run inside its guest: memcached, a JVM and a compile, beside pages that nobody uses.

Holds ANON MiB that nobody uses, and a JVM. For each connection to its socket, with a number of seconds in it, it works
so long on all three at once and answers with how long each took; with `anew` in it, it touches what nobody uses and
reads FILE, each once. Standard library of the guest's Python only.
"""

from __future__ import annotations

import glob
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import IO, Any

ANON_MIB, COUNT, SOCKET, FILE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
SOURCES = sorted(glob.glob("/usr/lib/python3*/*.py"))


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)] if times else 0.0


def gets(until: float) -> float:
    """Milliseconds of single gets of memcached, one every few milliseconds."""
    connection = socket.create_connection(("127.0.0.1", 11211))
    answers = connection.makefile("rb")
    times: list[float] = []
    while time.monotonic() < until:
        began = time.perf_counter()
        connection.sendall(b"get bench-%d\r\n" % random.randrange(COUNT))
        while not answers.readline().startswith(b"END"):
            pass
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.005)
    return p99(times)


def compiles(until: float) -> dict[str, float]:
    """Milliseconds to compile one file of the standard library, and how many there were: always the same, in order."""
    times: list[float] = []
    sources = cycle(SOURCES)
    while time.monotonic() < until:
        began = time.perf_counter()
        with open(next(sources), "rb") as file:
            compile(file.read(), "file", "exec")
        times.append((time.perf_counter() - began) * 1000)
    return {"compile_median_ms": sorted(times)[len(times) // 2] if times else 0.0, "compile_files": len(times)}


def beside(work: Callable[[float], Any], until: float) -> IO[str]:
    """The result of work in a process of its own, as a pipe."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(work(until)).encode())
        os._exit(0)
    os.close(write)
    return os.fdopen(read)


def measure(jvm: Any, seconds: float) -> dict[str, float]:
    until = time.monotonic() + seconds
    jvm.stdin.write(f"run {seconds:g}\n")
    jvm.stdin.flush()
    compiling = beside(compiles, until)
    found = {"memcached_p99_ms": gets(until), **json.loads(compiling.read())}
    os.wait()
    requests, _hits, _median, p99_us, _mean = map(float, jvm.stdout.readline().split())
    return {**found, "jvm_p99_ms": p99_us / 1000, "jvm_requests": requests}


def anew(idle: bytearray) -> dict[str, float]:
    """Have all of it in memory, used once: out of swap again, and not in the page cache from before."""
    idle[::4096] = bytes(len(idle) // 4096)
    with open(FILE, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(1 << 20):
            pass
    return {}


def main() -> None:
    idle = bytearray(os.urandom(4096)) * (ANON_MIB * 256)
    command = ["java", "-Xmx64m", "-Xms16m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
    with subprocess.Popen(
        [*command, "-cp", "/tmp", "Mix", "4", "12"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as jvm:
        assert jvm.stdout is not None
        assert jvm.stdout.readline().strip() == "ready"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET)
        listener.listen(1)
        while idle:
            connection, _ = listener.accept()
            with connection:
                asked = connection.recv(64)
                answer = anew(idle) if asked == b"anew" else measure(jvm, float(asked))
                connection.sendall(json.dumps(answer).encode())


main()
