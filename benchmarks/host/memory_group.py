"""A memory cgroup of our own, in either version: a limit for the processes that a benchmark starts in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.figures import BenchmarkFailed
from benchmarks.host.groups import gone
from hostagent.limits.cgroups import write

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
MIB = 2**20
UNLIMITED = -1
#: How long the kernel may take to swap out what is over a new limit.
LIMIT_S = 60.0


class MemoryGroup:
    """One control group; what is over its limit goes to swap."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = "memory.limit_in_bytes" if (path / "memory.limit_in_bytes").exists() else "memory.max"

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command that starts the other one in this group."""
        return ["sh", "-c", f'echo $$ > {self.path / "cgroup.procs"} && exec "$@"', "sh", *command]

    def limit(self, mib: float) -> None:
        """Set the limit, UNLIMITED for none. Raises BenchmarkFailed where the kernel does not get below it."""
        text = str(int(mib * MIB)) if mib != UNLIMITED else ("-1" if "limit" in self._file else "max")
        end = time.monotonic() + LIMIT_S
        while True:
            try:
                write(str(self.path / self._file), text)
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise BenchmarkFailed(f"{self.path} does not get down to {mib:g} MiB: {error.strerror}") from None
                time.sleep(0.2)


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """A group that is there for the time of the benchmark. Raises BenchmarkFailed where there can be none."""
    path = (V1 if V1.is_dir() else V2) / name
    try:
        path.mkdir(exist_ok=True)
        group = MemoryGroup(path)
        if not (path / group._file).exists():
            path.rmdir()
            raise BenchmarkFailed(f"{path} has no memory controller")
    except OSError as error:
        raise BenchmarkFailed(f"no memory control group can be made at {path}: {error.strerror}") from None
    try:
        yield group
    finally:
        gone(path)
