"""A memcached of our own in control groups of our own: memory limited, reads from disk capped, CPU too (cgroup v1).

The group stands for what the hypervisor does to a VM: its memory limit goes down, and swap has what does not fit.
Files: Documentation/admin-guide/cgroup-v1/memory.rst and blkio-controller.rst.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.caches.memcached_client import HOST
from benchmarks.figures import BenchmarkFailed
from benchmarks.host.groups import gone
from benchmarks.passes import Killed
from ebbtide.lab.cluster import free_ports
from hostagent.limits.cgroups import write

MIB = 2**20
CGROUPS = Path("/sys/fs/cgroup")
NAME = "ebbtide-bench"
#: What app_adapters.memcached.adapter asks for: pages of 1 MiB are given back to the system one by one.
MALLOC_SETTING = {"MALLOC_MMAP_THRESHOLD_": "131072"}
STEP_MIB = 16
PERIOD_US = 100_000
START_LIMIT_S = 20.0
CLOSE_LIMIT_S = 120.0


class Group:
    """A group in the memory, the blkio and the CPU hierarchy."""

    def __init__(self, device: str, name: str = NAME) -> None:
        self._memory = CGROUPS / "memory" / name
        self._blkio = CGROUPS / "blkio" / name
        self._cpu = CGROUPS / "cpu" / name
        self.all = (self._memory, self._blkio, self._cpu)
        self._device = device

    def make(self) -> None:
        """Raises BenchmarkFailed where there is no cgroup v1."""
        for directory in self.all:
            if not (directory.parent / "cgroup.procs").exists():
                raise BenchmarkFailed(f"{directory.parent} is no hierarchy of cgroup v1; the limit is made with that")
            directory.mkdir(exist_ok=True)

    @property
    def entrances(self) -> list[str]:
        """Files that take a process in."""
        return [str(directory / "cgroup.procs") for directory in self.all]

    @property
    def usage_mib(self) -> float:
        return int((self._memory / "memory.usage_in_bytes").read_text()) / MIB

    def limit(self, limit_mib: float | None) -> None:
        """Close in from what is used, step by step, as long as the kernel needs; None lifts the limit.

        Raises BenchmarkFailed where it cannot be reached in CLOSE_LIMIT_S.
        """
        path = self._memory / "memory.limit_in_bytes"
        if limit_mib is None:
            write(str(path), "-1")
            return
        end_s = time.monotonic() + CLOSE_LIMIT_S
        at_mib = max(self.usage_mib, limit_mib)
        while at_mib > limit_mib:
            at_mib = max(at_mib - STEP_MIB, limit_mib)
            while True:
                try:
                    write(str(path), str(int(at_mib * MIB)))
                    break
                except OSError as error:  # EBUSY: not enough could be written to swap in one go
                    if time.monotonic() > end_s:
                        raise BenchmarkFailed(f"the memory limit stays above {at_mib:.0f} MiB: {error}") from error
        write(str(path), str(int(limit_mib * MIB)))

    def limit_cpu(self, cores: float | None) -> None:
        """A quota of CPU time; None: none."""
        write(str(self._cpu / "cpu.cfs_quota_us"), str(-1 if cores is None else int(cores * PERIOD_US)))

    def cap_reads(self, per_s: int | None) -> None:
        """Let the group read so often a second from the swap's disk; None lifts the cap."""
        _cap_reads(self._blkio, self._device, per_s)

    def reads(self) -> int:
        """Read requests of the group that reached the disk."""
        text = (self._blkio / "blkio.throttle.io_serviced").read_text()
        return sum(int(line.split()[2]) for line in text.splitlines() if line.split()[1:2] == ["Read"])


class Server:
    """A running memcached."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def check_lives(self, error: Exception) -> None:
        """Raises Killed where the process has ended, of which the error comes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        if self.process.poll() is not None:
            raise Killed("memcached ended; was it killed for want of swap?") from error

    def major_faults(self) -> int:
        """Since it began (proc(5): majflt): pages that had to be read."""
        return int(Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[9])

    def status_mib(self, field: str) -> float:
        """VmRSS or VmSwap."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
        raise BenchmarkFailed(f"/proc/PID/status has no {field}")


@contextlib.contextmanager
def group(path: Path, name: str = NAME) -> Iterator[Group]:
    """A group whose reads of the disk that holds `path` can be capped. What a killed benchmark left goes first."""
    number = _whole_disk(os.stat(path).st_dev)
    made = Group(number, name)
    gone(*made.all)
    try:
        made.make()
        yield made
    finally:
        gone(*made.all)


@contextlib.contextmanager
def server(inside: Group | None, limit_mib: int) -> Iterator[Server]:
    """A memcached on a free port of loopback. Raises BenchmarkFailed where it does not come up."""
    (port,) = free_ports(1)
    enter = "".join(f"echo $$ > {path} && " for path in inside.entrances) if inside else ""
    command = f"{enter}exec memcached -u nobody -l {HOST} -p {port} -U 0 -m {limit_mib}"
    process = subprocess.Popen(["sh", "-c", command], env={**os.environ, **MALLOC_SETTING})
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while True:
            if process.poll() is not None:
                raise BenchmarkFailed(f"memcached ended with {process.returncode} when it was started")
            try:
                socket.create_connection((HOST, port), 1.0).close()
                break
            except OSError as error:
                if time.monotonic() > end_s:
                    raise BenchmarkFailed(f"memcached does not answer: {error}") from error
                time.sleep(0.02)
        yield Server(process, port)
    finally:
        process.kill()  # nothing to save, and it would read its swap to end in order
        process.wait()


@contextlib.contextmanager
def reads_capped(pid: int, place: Path, per_s: int | None) -> Iterator[None]:
    """For a while, let the group of a process of libvirt's read so often a second from the disk that holds `place`.

    Raises BenchmarkFailed where the process has no group of its own in the blkio hierarchy.
    """
    if per_s is None:
        yield
        return
    rows = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    own = next((path for _, hierarchy, path in rows if hierarchy == "blkio"), "/")
    if own == "/":
        raise BenchmarkFailed(f"process {pid} has no blkio group of its own (cgroup v1), so its reads cannot be capped")
    group_dir, device = CGROUPS / "blkio" / own.lstrip("/"), _whole_disk(os.stat(place).st_dev)
    _cap_reads(group_dir, device, per_s)
    try:
        yield
    finally:
        _cap_reads(group_dir, device, None)


def _cap_reads(group_dir: Path, device: str, per_s: int | None) -> None:
    """Let a blkio group read so often a second from a disk; None lifts the cap."""
    write(str(group_dir / "blkio.throttle.read_iops_device"), f"{device} {per_s or 0}")


def _whole_disk(device: int) -> str:
    """Number of the disk a partition belongs to: only whole disks can be capped."""
    number = f"{os.major(device)}:{os.minor(device)}"
    place = Path(f"/sys/dev/block/{number}")
    if (place / "partition").exists():
        return (place.resolve().parent / "dev").read_text().strip()
    return number
