"""Duration of a shrink of memcached, and what its clients feel meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from app_adapters.adapter import Deadline, Promise
from app_adapters.memcached.adapter import MemcachedAdapter
from benchmarks.caches.memcached_client import HOST, Client
from benchmarks.caches.zipf import Workload
from benchmarks.figures import BenchmarkFailed
from benchmarks.host.confined import server

VALUE_BYTES = 4096
#: Stored before, and taken away.
FILLED_MIB = 2048
TAKEN_MIB = 1024
QUICK_PART = 16
READER_LIMIT_S = 30.0
#: Single gets one after another, in a process of its own so that nothing here delays it; a millisecond between them.
#: Prints their times in microseconds and the errors once its input ends.
_READER = """
import json, select, socket, sys, time
s = socket.create_connection(("127.0.0.1", {port})); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []; errors = i = 0; print("on", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    i = (i * 1103515245 + 12345) % 2147483648; key = b"k%07d" % (i % {count})
    began = time.perf_counter(); s.sendall(b"get " + key + b"\\r\\n"); data = b""
    while not data.endswith(b"END\\r\\n"):
        part = s.recv(65536)
        if not part:
            sys.exit("closed")
        data += part
    times.append(round((time.perf_counter() - began) * 1e6))
    errors += not (data.startswith(b"VALUE " + key + b" ") or data == b"END\\r\\n")
print(json.dumps([times, errors]))
"""


def shrink_latency(quick: bool) -> dict[str, float]:
    """One shrink of TAKEN_MIB: its seconds, and percentiles of single gets during it and before, in ms.

    Raises BenchmarkFailed.
    """
    part = QUICK_PART if quick else 1
    count = FILLED_MIB // part * 2**20 // VALUE_BYTES
    with server(None, 2 * FILLED_MIB // part) as memcached:
        client = Client(memcached.port, VALUE_BYTES)
        client.store(np.arange(count))
        client.run(Workload(count, 0.99, np.random.default_rng(5)).draw(count))
        client.close()
        before_mib = memcached.status_mib("VmRSS")
        idle, _ = _during(memcached.port, count, lambda: time.sleep(1.0))
        adapter = MemcachedAdapter(HOST, memcached.port, minimum_mib=16.0)
        answer = adapter.deflate({"memory_mib": before_mib - TAKEN_MIB / part}, "ask", Deadline(120.0))
        if not isinstance(answer, Promise):
            raise BenchmarkFailed(f"memcached refused: {answer.reason}")
        began_s = time.perf_counter()
        ended_s: list[float] = []

        def work() -> None:
            release = answer.work()
            if not release.complete:
                raise BenchmarkFailed(f"memcached was not shrunk: {release.reason}")
            ended_s.append(time.perf_counter() - began_s)

        times, errors = _during(memcached.port, count, work)
        after_mib = memcached.status_mib("VmRSS")
    found = {"seconds": ended_s[0], "released_mib": before_mib - after_mib, "errors": float(errors)}
    for name, values in (("idle", idle), ("during", times)):
        for percent in (50, 99, 100):
            key = f"{name}_get_{'max' if percent == 100 else f'p{percent}'}_ms"
            found[key] = float(np.percentile(values, percent)) / 1000
    return found


def _during(port: int, count: int, work: Callable[[], None]) -> tuple[list[int], int]:
    """Times of gets in microseconds while `work` is done, and how many answers were wrong."""
    command = [sys.executable, "-S", "-c", _READER.format(port=port, count=count)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        if reader.stdout.readline() != b"on\n":
            raise BenchmarkFailed("the reader of single keys did not begin")
        work()
        output, _ = reader.communicate(timeout=READER_LIMIT_S)
        if reader.returncode != 0:
            raise BenchmarkFailed("the reader of single keys lost memcached")
    finally:
        reader.kill()
        reader.wait()
    times, errors = json.loads(output)
    return times, errors
