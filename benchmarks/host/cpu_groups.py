"""Control groups of our own in the CPU hierarchy, as libvirt makes them for VMs, with processes that want the CPU.

Files: Documentation/scheduler/sched-bwc.rst, cgroup-v1/cgroups.rst and cgroup-v2.rst (`cpu.idle`: Linux 5.15).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import BenchmarkFailed
from benchmarks.host.groups import gone
from hostagent.limits.cgroups import CpuGroup, mounts

NAME = "ebbtide-bench-cpu"
PERIOD_US = 100_000
#: Of all groups together: other work on the machine, whose groups have 1024, is to take little of their time.
SHARES, WEIGHT = 16_384, 10_000
#: For a process to begin and to end.
LIMIT_S = 30.0


@dataclass(frozen=True)
class Group:
    """One group. Methods raise OSError where the kernel refuses."""

    version: int
    path: Path

    @property
    def stat(self) -> Path:
        """What the kernel counts of it."""
        return self.path / "cpu.stat"

    def enter(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float | None, burst: float) -> None:
        """A quota or none, and a burst by a share of it: as the agent does it."""
        group = CpuGroup(self.version, str(self.path))
        group.set_burst(0.0)
        if self.version == 2:
            (self.path / "cpu.max").write_text(f"{'max' if cores is None else int(cores * PERIOD_US)} {PERIOD_US}")
        else:
            (self.path / "cpu.cfs_quota_us").write_text(str(-1 if cores is None else int(cores * PERIOD_US)))
        group.set_burst(burst)

    def times(self) -> tuple[int, int]:
        """Periods in which the quota stopped it, and all periods, so far."""
        times = CpuGroup(self.version, str(self.path)).times()
        return times.throttled, times.periods

    def weigh(self, shares: int, idle: bool = False) -> None:
        """Shares, or `cpu.idle`, beside which the kernel takes no shares."""
        (self.path / "cpu.idle").write_text(str(int(idle)))
        if not idle:
            (self.path / ("cpu.weight" if self.version == 2 else "cpu.shares")).write_text(str(shares))


@contextlib.contextmanager
def groups(*names: str) -> Iterator[list[Group]]:
    """Groups side by side under one of ours; gone at the end, with all that is in them ended by then.

    Raises BenchmarkFailed where there is no CPU hierarchy, or where its kernel has no bursts.
    """
    for mount in mounts(Path("/proc/self/mountinfo").read_text()):
        if mount.version == 2 and "cpu" in (Path(mount.point) / "cgroup.controllers").read_text().split():
            version = 2
        elif mount.version == 1 and "cpu" in mount.controllers:
            version = 1
        else:
            continue
        parent = Path(mount.point) / NAME
        made = [Group(version, parent / name) for name in names]
        try:
            parent.mkdir(exist_ok=True)
            if version == 2:
                (parent / "cgroup.subtree_control").write_text("+cpu")
            Group(version, parent).weigh(WEIGHT if version == 2 else SHARES)
            for group in made:
                group.path.mkdir(exist_ok=True)
            if CpuGroup(version, str(made[0].path)).burst_us() is None:
                raise BenchmarkFailed("this kernel's control groups have no bursts")
            yield made
        finally:
            gone(*(group.path for group in made), parent)
        return
    raise BenchmarkFailed("no hierarchy of control groups has the CPU controller")


@contextlib.contextmanager
def working(group: Group, work: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `cpu_work` in a group on the last CPU, while it works; ended at the end."""
    argv = [sys.executable, "-I", "-S", str(Path(__file__).with_name("cpu_work.py")), work, *words]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise BenchmarkFailed(f"the process for {work} did not begin")
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        group.enter(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def answered(process: subprocess.Popen[str]) -> list[list[float]]:
    """The rows that a process says at its end (`cpu_work`). Raises BenchmarkFailed where it says none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchmarkFailed("a process that was measured has ended without a word")
    rows: list[list[float]] = json.loads(line)
    return rows
