"""Swap for the duration of a benchmark, on a host that has none: a file of our own, switched off and removed again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.figures import BenchmarkFailed
from ebbtide.lab.paths import state_dir

PROC_SWAPS = Path("/proc/swaps")
MIB = 2**20
#: Disk space that is left free, MiB.
RESERVE_MIB = 2048


def place() -> Path:
    """Of the file, one for all benchmarks: one runs at a time, and finds what a killed one left."""
    return state_dir().with_name("bench.swap")


@contextlib.contextmanager
def swap(path: Path, size_mib: int, report: Callable[[str], None], *, ours: bool = False) -> Iterator[int]:
    """Have at least ``size_mib`` of swap; gives how much there is, 0 where the host cannot have it.

    Swap that the host has is used as it is. What a killed benchmark left at ``path`` is taken away first.

    :param ours: what is measured needs it in ``path``. Raises BenchmarkFailed where the host has swap of its own.
    """
    clear(path)
    present_mib = _present_mib()
    if ours and present_mib:
        raise BenchmarkFailed(
            f"this host has {present_mib} MiB of swap of its own, which the benchmark can neither read back nor cap as "
            "its own file: switch it off for that time (swapoff -a, then swapon -a)"
        )
    if present_mib >= size_mib:
        yield present_mib
        return
    try:
        try:
            _make(path, size_mib + 1)  # a page of it is the header
        except (OSError, subprocess.CalledProcessError, BenchmarkFailed) as error:
            report(f"no swap could be made, so the limit that swap backs is left out: {error}")
            yield present_mib
        else:
            report(f"{size_mib} MiB of swap in {path} for the time of the benchmark")
            yield _present_mib()
    finally:
        clear(path)


def clear(path: Path) -> None:
    """Switch our file off where it is on, and remove it. Raises BenchmarkFailed where it stays in use."""
    if _is_on(path):
        done = subprocess.run(["swapoff", str(path)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkFailed(f"{path} is still used as swap: {done.stderr.strip()}")
    path.unlink(missing_ok=True)


def bring_back(path: Path) -> None:
    """Have all that is in our file in memory again, as far as the file is used as swap.

    Raises BenchmarkFailed where memory is too short for that.
    """
    if not _is_on(path):
        return
    for command in ("swapoff", "swapon"):
        done = subprocess.run([command, str(path)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkFailed(f"{command} {path}: {done.stderr.strip()}")


def _is_on(path: Path) -> bool:
    # The kernel tells it without symbolic links.
    return any(line.split()[0] == str(path.resolve()) for line in PROC_SWAPS.read_text().splitlines()[1:])


def _make(path: Path, size_mib: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free / MIB < size_mib + RESERVE_MIB:
        raise BenchmarkFailed(f"{path.parent} has no room for {size_mib} MiB")
    # Written, not allocated: swapon refuses files with holes.
    block = bytes(4 * MIB)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for _ in range(0, size_mib, 4):
            file.write(block)
    subprocess.run(["mkswap", str(path)], capture_output=True, check=True)
    subprocess.run(["swapon", str(path)], capture_output=True, check=True)


def _present_mib() -> int:
    return sum(int(line.split()[2]) // 1024 for line in PROC_SWAPS.read_text().splitlines()[1:])
