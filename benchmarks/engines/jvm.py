"""`jvm`: response times of a JVM whose heap and cache follow its memory, beside one that stays (004 Fig. 5d).

Two JVMs with the same fixed mix of requests (java/Mix.java), one after the other, each in a memory control group with
swap behind it. Both are measured at full size, then at 75 and at 50 % of the resident memory that the first one had.
One is deflated before the limit falls: the service makes its cache smaller, as by a hook of its own, and the JVM
adapter brings the heap down. For the other only the limit falls, so that its memory goes to swap.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from app_adapters.adapter import Deadline, Refusal
from app_adapters.jvm.adapter import JVMAdapter
from app_adapters.jvm.processes import Choice, Finder
from app_adapters.jvm.transports import Attach
from app_adapters.processes.originals import Originals
from app_adapters.processes.process import proportional_mib
from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.memory_group import UNLIMITED, MemoryGroup, memory_group
from benchmarks.host.swapfile import place, swap
from benchmarks.passes import Killed, Pass, again_figure, begun_again_when_killed

SOURCE = Path(__file__).parent / "java" / "Mix.java"
GROUP = "ebbtide-bench-jvm"
SHARES = (0.75, 0.5)
#: Below the limit: the heap passes its soft limit for moments, and the group also counts what the kernel does for it.
UNDER_LIMIT = 0.9
#: MiB of a JVM beside its heap, and how much heap what lives needs: the service's own rule for its cache.
BESIDE_MIB = 70
ROOM = 1.6
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Size:
    """-Xmx, live set and full cache in MiB; seconds of warming up and of measuring at each size; microseconds of CPU
    time that each request works for beside its garbage and its value."""

    heap_mib: int
    live_mib: int
    cache_mib: int
    warm_s: float
    window_s: float
    work_us: int = 0


FULL = Size(640, 30, 130, 2.0, 6.0)
QUICK = Size(320, 15, 50, 0.5, 1.5)


@dataclass(frozen=True)
class Window:
    """What the service measured: requests a second, hits over requests, and response times in microseconds."""

    requests_s: float
    hit_ratio: float
    median_us: float
    p99_us: float
    mean_us: float


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed or ApplicationError."""
    size = QUICK if how.quick else FULL
    if os.geteuid() != 0:
        raise BenchmarkFailed("jvm: needs root, for swap and control groups")
    with (
        tempfile.TemporaryDirectory(prefix="ebbtide-jvm-") as directory,
        swap(place(), 2 * size.heap_mib, how.report) as swap_mib,
        memory_group(GROUP) as group,
    ):
        if swap_mib < 2 * size.heap_mib:
            raise BenchmarkFailed(f"needs {2 * size.heap_mib} MiB of swap behind the limit")
        compile_mix(Path(directory))
        found: dict[tuple[bool, float], list[Window]] = {}
        again = []
        for number in range(how.runs):
            windows, killed = begun_again_when_killed(
                partial(_run, number, group, Path(directory), size, how), f"run {number + 1} of {how.runs}", how
            )
            again.append(killed)
            for which, window in windows.items():
                found.setdefault(which, []).append(window)
    made = _figures(found, f"-Xmx{size.heap_mib}m, Shenandoah, {size.cache_mib} MiB of cache at full size")
    return {**made, "begun_again": again_figure(again, "the pair")}


def _run(number: int, group: MemoryGroup, directory: Path, size: Size, how: Pass) -> dict[tuple[bool, float], Window]:
    """Both JVMs, one after the other: the window of each (whether the heap follows, share of memory)."""
    found: dict[tuple[bool, float], Window] = {}
    full_mib = 0.0
    # Which one comes first changes, so that what the machine does besides meets both.
    for follows in (True, False) if number % 2 == 0 else (False, True):
        with service(group, directory, size) as jvm:
            warmed_mib = jvm.warm(size)
            full_mib = full_mib or warmed_mib
            for share in (1.0, *SHARES):
                window = jvm.at(share * full_mib if share < 1 else UNLIMITED, follows, size)
                found[follows, share] = window
                how.report(
                    f"run {number + 1} of {how.runs}, {'heap follows' if follows else 'heap stays'}, "
                    f"{share:.0%} of {full_mib:.0f} MiB: median {window.median_us:.0f} us, p99 "
                    f"{window.p99_us:.0f} us, mean {window.mean_us:.0f} us, hits {window.hit_ratio:.2f}"
                )
    return found


def _figures(found: dict[tuple[bool, float], list[Window]], conditions: str) -> Figures:
    figures: Figures = {}
    for share in (1.0, *SHARES):
        percent = f"{share:.0%}".replace("%", "")
        for follows, name in ((True, "follows"), (False, "stays")):
            windows = found[follows, share]
            of = f"requests while the JVM has {share:.0%} of its memory and its heap {name}; {conditions}"
            for part in ("median_us", "p99_us", "mean_us"):
                figures[f"{name}_{percent}_{part}"] = Figure.over([getattr(one, part) for one in windows], "us", of)
            figures[f"{name}_{percent}_hit_ratio"] = Figure.over([one.hit_ratio for one in windows], "ratio", of)
        if share == 1.0:
            continue
        for part in ("median", "p99", "mean"):
            ours, theirs = ([getattr(one, f"{part}_us") for one in found[side, share]] for side in (True, False))
            of = f"{part} response time with a heap that stays, under the same limit of {share:.0%}, in the same run"
            figures[f"follows_to_stays_{percent}_{part}"] = Figure.over(ratios(ours, theirs), "ratio", of)
    return figures


class Limits(Protocol):
    """Of a control group for a JVM."""

    def inside(self, command: list[str]) -> list[str]:
        """A command that starts the other one in the group."""
        ...

    def limit(self, mib: float) -> None:
        """Of memory; UNLIMITED: none."""
        ...


class Service:
    """One JVM in the group."""

    def __init__(self, process: subprocess.Popen[str], group: Limits, adapter: JVMAdapter) -> None:
        self._process = process
        self._group = group
        self._adapter = adapter

    def cpu_s(self) -> float:
        """Of all its threads, since it began."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def say(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Killed("the JVM had ended; was it killed for want of swap?") from None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise Killed("the JVM ended; was it killed for want of swap?")
        return answer

    def warm(self, size: Size) -> float:
        """Let the heap come to its full size; returns its resident MiB."""
        self.say(f"run {3 * size.warm_s}")
        return proportional_mib(self._process.pid)

    def at(self, limit_mib: float, follows: bool, size: Size) -> Window:
        """The window under a limit. Raises BenchmarkFailed where the heap does not follow."""
        if limit_mib != UNLIMITED:
            if follows:
                self._follow(UNDER_LIMIT * limit_mib, size)
            self._group.limit(limit_mib)
        self.say(f"run {size.warm_s}")
        count, hits, *times = map(float, self.say(f"run {size.window_s}").split())
        return Window(count / size.window_s, hits / count, *times)

    def _follow(self, target_mib: float, size: Size) -> None:
        cache_mib = max(int((target_mib - BESIDE_MIB) / ROOM) - size.live_mib, 1)
        self.say(f"cache {min(cache_mib, size.cache_mib)}")
        answer = self._adapter.deflate({"memory_mib": target_mib}, "ask", Deadline(DEADLINE_S))
        if isinstance(answer, Refusal):
            raise BenchmarkFailed(f"the adapter refuses: {answer.reason}")
        release = answer.work()
        if not release.complete:
            raise BenchmarkFailed(f"the heap does not follow: {release.reason}")


@contextlib.contextmanager
def service(group: Limits, directory: Path, size: Size) -> Iterator[Service]:
    """A JVM that is ready, for a while."""
    group.limit(UNLIMITED)
    command = ["java", f"-Xmx{size.heap_mib}m", "-Xms32m", "-XX:+UnlockExperimentalVMOptions", "-XX:+UseShenandoahGC"]
    command += ["-XX:-UsePerfData", "-cp", str(directory), "Mix"]
    command += [str(size.live_mib), str(size.cache_mib), str(size.work_us)]
    process = subprocess.Popen(
        group.inside(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise BenchmarkFailed("the JVM does not start")
        adapter = JVMAdapter(Finder(Choice(pid=process.pid)), Attach(), Originals(str(directory / "state")))
        yield Service(process, group, adapter)
    finally:
        # Out of swap again first: a process that is swapped out ends slowly.
        with contextlib.suppress(BenchmarkFailed):
            group.limit(UNLIMITED)
        process.kill()
        process.communicate()
        Path(f"/tmp/.java_pid{process.pid}").unlink(missing_ok=True)
        time.sleep(0.1)


def compile_mix(directory: Path) -> None:
    """The service's class into a directory. Raises BenchmarkFailed without root or a JDK."""
    if os.geteuid() != 0:
        raise BenchmarkFailed("needs root for a memory control group and swap")
    if shutil.which("javac") is None:
        raise BenchmarkFailed("needs a JDK with Shenandoah (Debian: openjdk-17-jdk-headless)")
    subprocess.run(["javac", "-d", str(directory), str(SOURCE)], check=True)
