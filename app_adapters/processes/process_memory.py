"""Memory of a group of processes, and where it is found (proc(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass

from app_adapters.errors import ApplicationError


@dataclass(frozen=True)
class Memory:
    """MiB of processes: shared pages by their share, and what each holds alone, which comes free when it ends."""

    proportional_mib: float
    private_mib: float


def measured_together(pids: list[int], procfs: str = "/proc") -> dict[int, Memory]:
    """Memory by process, without those that have ended, or are ending and hold none any more.

    Raises: ApplicationError where that of a living one cannot be seen (it needs the process's own user, or root).
    """
    found = {}
    for pid in pids:
        try:
            found[pid] = _measured(pid, procfs)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError as error:
            raise ApplicationError(f"the memory of process {pid} cannot be seen here: {error.strerror}") from None
    return found


def _measured(pid: int, procfs: str) -> Memory:
    fields: dict[str, float] = {}
    with open(f"{procfs}/{pid}/smaps_rollup", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("Pss", "Private_Clean", "Private_Dirty"):
                fields[name] = int(value.split()[0]) / 1024
    private_mib = fields.get("Private_Clean", 0.0) + fields.get("Private_Dirty", 0.0)
    return Memory(fields.get("Pss", 0.0), private_mib)


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
