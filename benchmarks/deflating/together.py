"""`together`: what applications do with less CPU, memory and reads from disk at once (004 Fig. 1).

Each application runs in control groups of its own, which have what a VM would: CORES, READS a second, and memory:
memcached fills MEMORY_MIB, the JVM has what it has resident when it has warmed up, and the compile, which leaves most
of it unused, MEMORY_MIB. A share of all three is taken together, first from the application where it has an adapter
(memcached, the JVM), then by the limits; the compile is asked nothing. Performance is hits a second, requests a second
(the inverse of the mean response time beside it) and compiles a second, each to the same application undeflated just
before: a memcached and a JVM are started anew for each share, and the order of the shares turns round from run to run.
The JVM is offered more requests than it can answer, as the compile is given more than it can do at once: how much a
load that leaves part of a core idle keeps is decided by that part. Spark, the paper's fourth, is left out:
its executors end, they do not shrink.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.caches.memcached import MARGIN_MIB, shrink
from benchmarks.caches.memcached_client import Client
from benchmarks.caches.zipf import Workload
from benchmarks.engines import jvm
from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.confined import Group, group, server
from benchmarks.host.memory_group import UNLIMITED
from benchmarks.host.swapfile import place, swap
from benchmarks.passes import Pass, again_figure, begun_again_when_killed

SHARES: Final = (0.25, 0.5, 0.75)
#: Nominal: of a host with two cores, so that who asks has one; and what a small volume of a cloud gives.
CORES: Final = 1.0
MEMORY_MIB: Final = 1024.0
READS: Final = 5_000
SWAP_MIB: Final = 2048
#: A cache that fills a VM of that size: 4.5 MiB resident for 1,000 values.
KEYS, VALUE_BYTES, SKEW = 225_000, 4096, 0.99
#: Requests a second that are offered to the JVM (java/Mix.java), and CPU time of each: more than its core gives.
OFFERED_S: Final = 800
WORK_US: Final = 1500
#: Of this Python's standard library.
PACKAGES: Final = ("asyncio", "concurrent", "email", "http", "json", "logging", "unittest", "xml")
#: Seconds of hits that are measured.
WINDOW_S: Final = 3.0


@dataclass(frozen=True)
class Pair:
    """Rates of one application undeflated and right after that deflated."""

    full: float
    deflated: float


@dataclass(frozen=True)
class Service:
    """The JVM undeflated and deflated, and the cores that it used undeflated."""

    full: jvm.Window
    deflated: jvm.Window
    cores: float


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, ApplicationError or AdapterError."""
    if os.geteuid() != 0:
        raise BenchmarkFailed("together: needs root, for swap and control groups")
    found: dict[tuple[str, float], list[float]] = {}
    again: dict[str, list[float]] = {"memcached": [], "jvm": []}
    cores: list[float] = []
    file = place()
    file.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="ebbtide-together-") as directory,
        swap(file, SWAP_MIB, how.report, ours=True) as swap_mib,
        group(file.parent, "ebbtide-bench-together") as inside,
    ):
        if swap_mib < SWAP_MIB:
            raise BenchmarkFailed(f"together: {SWAP_MIB} MiB of swap are needed behind the limit")
        jvm.compile_mix(Path(directory))
        for number in range(how.runs):
            killed = dict.fromkeys(again, 0)
            used: list[float] = []
            for share in in_turn(number):
                hits, times = begun_again_when_killed(partial(_memcached, inside, number, share, how), "memcached", how)
                killed["memcached"] += times
                service, times = begun_again_when_killed(
                    partial(_jvm, inside, Path(directory), share, how), "the JVM", how
                )
                killed["jvm"] += times
                used.append(service.cores)
                rates: dict[str, Pair] = {
                    "memcached": hits,
                    "jvm": Pair(service.full.requests_s, service.deflated.requests_s),
                    "jvm_response": Pair(1.0 / service.full.mean_us, 1.0 / service.deflated.mean_us),
                    "compile": _compile(inside, share),
                }
                for name, pair in rates.items():
                    found.setdefault((name, share), []).append(pair.deflated / pair.full)
                words = ", ".join(f"{name} {pair.deflated / pair.full:.2f}" for name, pair in rates.items())
                how.report(f"run {number + 1} of {how.runs}: with {share:.0%} taken keeps {words}")
            cores.append(statistics.fmean(used))
            for name, times in killed.items():
                again[name].append(times)
    figures = {f"{name}_begun_again": again_figure(counts, name) for name, counts in again.items()}
    figures["jvm_cores"] = Figure.over(
        cores, "cores", f"CPU time of the JVM undeflated, of {CORES:g} core; offered is more than that"
    )
    for share in SHARES:
        for name in rates:
            memory = "what it has resident undeflated" if name.startswith("jvm") else f"{MEMORY_MIB:g} MiB"
            words = f"{CORES:g} core, {memory}, {READS} reads/s, less {share:.0%} of each"
            of = f"the same application undeflated just before; {words}"
            figures[f"{name}_{share:.0%}".replace("%", "")] = Figure.over(found[name, share], "ratio", of)
    return figures


def in_turn(number: int) -> tuple[float, ...]:
    """The shares of a run, in its order."""
    return SHARES[:: 1 if number % 2 == 0 else -1]


def _take(inside: Group, share: float, memory: bool = True) -> None:
    """So much of all three; of memory only if the application has made room, or is asked nothing."""
    inside.limit_cpu(CORES * (1.0 - share))
    inside.cap_reads(int(READS * (1.0 - share)))
    if memory:
        inside.limit(MEMORY_MIB * (1.0 - share))


def _memcached(inside: Group, number: int, share: float, how: Pass) -> Pair:
    """Hits a second of a cache whose adapter is asked first."""
    window_s = WINDOW_S / 6 if how.quick else WINDOW_S
    workload = Workload(KEYS, SKEW, np.random.default_rng([number, 7]))
    _take(inside, 0.0, memory=False)
    inside.limit(None)
    with server(inside, KEYS * VALUE_BYTES * 2 // 2**20) as memcached:
        client = Client(memcached.port, VALUE_BYTES)

        def hits_s(taken: float) -> float:
            beside_mib = inside.usage_mib - memcached.status_mib("VmRSS")
            shrink(memcached, MEMORY_MIB * (1.0 - taken) - beside_mib - MARGIN_MIB)
            _take(inside, taken)
            client.run(workload.draw(200_000), window_s)
            return client.run(workload.draw(int(1e6 * window_s)), window_s).hits_s

        try:
            client.store(np.arange(KEYS))
            return Pair(hits_s(0.0), hits_s(share))
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


def _jvm(inside: Group, directory: Path, share: float, how: Pass) -> Service:
    """A service whose heap and cache follow what is left."""
    size = replace(jvm.QUICK if how.quick else jvm.FULL, work_us=WORK_US)
    _take(inside, 0.0, memory=False)
    inside.limit(None)
    with jvm.service(_Limits(inside), directory, size) as service:
        full_mib = max(service.warm(size) for _ in range(3))
        before_s, began_s = service.cpu_s(), time.perf_counter()
        full = service.at(UNLIMITED, True, size)
        cores = (service.cpu_s() - before_s) / (time.perf_counter() - began_s)
        _take(inside, share, memory=False)
        return Service(full, service.at(full_mib * (1.0 - share), True, size), cores)


def _compile(inside: Group, share: float) -> Pair:
    """Compiles a second of fixed packages by two processes, which nobody asks for anything."""
    _take(inside, 0.0, memory=False)
    inside.limit(None)
    _compiled(inside)
    _take(inside, 0.0)
    full = _compiled(inside)
    _take(inside, share)
    return Pair(full, _compiled(inside))


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
