"""What a group of processes holds, and where it is found (proc(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass

from app_adapters.errors import ApplicationError


@dataclass(frozen=True)
class Memory:
    """MiB of processes: shared pages by their share, and what each holds alone, which comes free when it ends."""

    proportional_mib: float
    private_mib: float


def measured(pid: int, procfs: str = "/proc") -> Memory:
    """Memory of a process.

    Raises: ApplicationError where it cannot be seen (it needs the process's own user, or root).
    """
    fields: dict[str, float] = {}
    try:
        with open(f"{procfs}/{pid}/smaps_rollup", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("Pss", "Private_Clean", "Private_Dirty"):
                    fields[name] = int(value.split()[0]) / 1024
    except OSError as error:
        raise ApplicationError(f"the memory of process {pid} cannot be seen here: {error.strerror}") from None
    private_mib = fields.get("Private_Clean", 0.0) + fields.get("Private_Dirty", 0.0)
    return Memory(fields.get("Pss", 0.0), private_mib)


def measured_together(pids: list[int], procfs: str = "/proc") -> dict[int, Memory]:
    """Memory by process, without those that have ended.

    Raises: ApplicationError where that of a living one cannot be seen.
    """
    found = {}
    for pid in pids:
        try:
            found[pid] = measured(pid, procfs)
        except ApplicationError:
            if os.path.exists(f"{procfs}/{pid}") and _lives(pid, procfs):
                raise
    return found


def _lives(pid: int, procfs: str) -> bool:
    """Whether the process runs; one that is ending has no memory any more."""
    try:
        with open(f"{procfs}/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def read_pid(path: str) -> int:
    """The process of a pid file. Raises: ApplicationError."""
    try:
        with open(path, errors="replace") as file:
            text = file.read(64).strip()
    except OSError as error:
        raise ApplicationError(f"pid file {path}: {error.strerror}") from None
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise ApplicationError(f"pid file {path}: holds no process id")
    return int(text)


def cpus_possible(path: str = "/sys/devices/system/cpu/possible") -> int:
    """CPUs that this machine can have, on line or not."""
    try:
        with open(path) as file:
            parts = [part.split("-") for part in file.read().strip().split(",")]
        return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)
    except (OSError, ValueError):
        return os.cpu_count() or 1
