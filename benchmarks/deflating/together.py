"""`together`: what applications do with less CPU, memory and reads from disk at once (004 Fig. 1).

Each application runs in control groups of its own, which have what a VM would: CORES, MEMORY_MIB, READS a second. A
share of all three is taken together, first from the application where it has an adapter (memcached, the JVM), then by
the limits; the compile is asked nothing, and leaves most of its memory unused. Performance is hits a second, requests a
second (the inverse of the mean response time beside it) and compiles a second, each to the same application undeflated
just before. Spark, the paper's fourth, is left out: its executors end, they do not shrink.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.caches.memcached import MARGIN_MIB, shrink
from benchmarks.caches.memcached_client import Client
from benchmarks.caches.zipf import Workload
from benchmarks.engines import jvm
from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.bench_host import only
from benchmarks.host.confined import Group, group, server
from benchmarks.host.memory_group import UNLIMITED
from benchmarks.host.swapfile import swap
from benchmarks.passes import Pass, again_figure, begun_again_when_killed

SHARES: Final = (0.25, 0.5, 0.75)
#: Nominal: of a host with two cores, so that who asks has one; and what a small volume of a cloud gives.
CORES: Final = 1.0
MEMORY_MIB: Final = 1024.0
READS: Final = 5_000
SWAP, SWAP_MIB = Path("/var/lib/ebbtide/bench-together.swap"), 2048
#: A cache that fills a VM of that size.
KEYS, VALUE_BYTES, SKEW = 180_000, 4096, 0.99
#: Of this Python's standard library.
PACKAGES: Final = ("asyncio", "concurrent", "email", "http", "json", "logging", "unittest", "xml")
#: Seconds of hits that are measured.
WINDOW_S: Final = 3.0


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, ApplicationError or AdapterError."""
    if os.geteuid() != 0:
        raise BenchmarkFailed("together: needs root, for swap and control groups")
    found: dict[tuple[str, float], list[float]] = {}
    again: dict[str, list[float]] = {"memcached": [], "jvm": []}
    with (
        only("together"),
        tempfile.TemporaryDirectory(prefix="ebbtide-together-") as directory,
        swap(SWAP, SWAP_MIB, how.report, ours=True) as swap_mib,
        group(SWAP.parent, "ebbtide-bench-together") as inside,
    ):
        if swap_mib < SWAP_MIB:
            raise BenchmarkFailed(f"together: {SWAP_MIB} MiB of swap are needed behind the limit")
        jvm.compile_mix(Path(directory))
        for number in range(how.runs):
            hits, killed = begun_again_when_killed(lambda: list(_memcached(inside, number, how)), "memcached", how)  # noqa: B023
            again["memcached"].append(killed)
            windows, killed = begun_again_when_killed(lambda: list(_jvm(inside, Path(directory), how)), "the JVM", how)
            again["jvm"].append(killed)
            rates: dict[str, list[float]] = {
                "memcached": hits,
                "jvm": [one.requests_s for one in windows],
                "jvm_response": [1.0 / one.mean_us for one in windows],
                "compile": list(_compile(inside)),
            }
            for name, (full, *deflated) in rates.items():
                kept = [rate / full for rate in deflated]
                for share, value in zip(SHARES, kept, strict=True):
                    found.setdefault((name, share), []).append(value)
                words = ", ".join(f"{share:.0%} {value:.2f}" for share, value in zip(SHARES, kept, strict=True))
                how.report(f"run {number + 1} of {how.runs}: what {name} keeps, by what is taken: {words}")
    figures = {f"{name}_begun_again": again_figure(counts, name) for name, counts in again.items()}
    for (name, share), values in found.items():
        words = f"{CORES:g} core, {MEMORY_MIB:g} MiB, {READS} reads/s, less {share:.0%} of each"
        of = f"the same application undeflated just before; {words}"
        figures[f"{name}_{share:.0%}".replace("%", "")] = Figure.over(values, "ratio", of)
    return figures


def _take(inside: Group, share: float, memory: bool = True) -> None:
    """So much of all three; of memory only if the application has made room, or is asked nothing."""
    inside.limit_cpu(CORES * (1.0 - share))
    inside.cap_reads(int(READS * (1.0 - share)))
    if memory:
        inside.limit(MEMORY_MIB * (1.0 - share))


def _memcached(inside: Group, number: int, how: Pass) -> Iterator[float]:
    """Hits a second of a cache whose adapter is asked first."""
    window_s = WINDOW_S / 6 if how.quick else WINDOW_S
    workload = Workload(KEYS, SKEW, np.random.default_rng([number, 7]))
    _take(inside, 0.0, memory=False)
    inside.limit(None)
    with server(inside, KEYS * VALUE_BYTES * 2 // 2**20) as memcached:
        client = Client(memcached.port, VALUE_BYTES)
        try:
            client.store(np.arange(KEYS))
            for share in (0.0, *SHARES):
                beside_mib = inside.usage_mib - memcached.status_mib("VmRSS")
                shrink(memcached, MEMORY_MIB * (1.0 - share) - beside_mib - MARGIN_MIB)
                _take(inside, share)
                client.run(workload.draw(200_000), window_s)
                yield client.run(workload.draw(int(1e6 * window_s)), window_s).hits_s
        except Exception as error:
            memcached.check_lives(error)
            raise
        finally:
            client.close()


class _Limits:
    """A group, as the JVM's benchmark limits memory."""

    def __init__(self, inside: Group) -> None:
        self._inside = inside

    def inside(self, command: list[str]) -> list[str]:
        return _entering(self._inside, command)

    def limit(self, mib: float) -> None:
        self._inside.limit(None if mib == UNLIMITED else mib)


def _jvm(inside: Group, directory: Path, how: Pass) -> Iterator[jvm.Window]:
    """A service whose heap and cache follow what is left."""
    size = jvm.QUICK if how.quick else jvm.FULL
    _take(inside, 0.0, memory=False)
    inside.limit(None)
    with jvm.service(_Limits(inside), directory, size) as service:
        for _ in range(3):
            service.warm(size)
        for share in (0.0, *SHARES):
            _take(inside, share, memory=False)
            yield service.at(MEMORY_MIB * (1.0 - share), True, size)


def _compile(inside: Group) -> Iterator[float]:
    """Compiles a second of fixed packages by two processes, which nobody asks for anything."""
    _take(inside, 0.0, memory=False)
    inside.limit(None)
    _compiled(inside)
    for share in (0.0, *SHARES):
        _take(inside, share)
        yield _compiled(inside)


def _compiled(inside: Group) -> float:
    library = Path(os.__file__).parent
    with tempfile.TemporaryDirectory(prefix="ebbtide-compiled-") as out:
        command = [*f"{sys.executable} -m compileall -q -f -j 2".split(), *(str(library / name) for name in PACKAGES)]
        began_s = time.perf_counter()
        done = subprocess.run(
            _entering(inside, command), env={**os.environ, "PYTHONPYCACHEPREFIX": out}, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise BenchmarkFailed(f"the compile ended with {done.returncode}: {done.stderr.decode()[-300:]}")
        return 1.0 / (time.perf_counter() - began_s)


def _entering(inside: Group, command: list[str]) -> list[str]:
    """A command that starts another one in the group."""
    enter = " && ".join(f"echo $$ > {shlex.quote(path)}" for path in inside.entrances)
    return ["sh", "-c", f'{enter} && exec "$@"', "sh", *command]
