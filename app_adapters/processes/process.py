"""Readings of a process from the kernel (proc(5))."""

from __future__ import annotations

import os

from app_adapters.errors import ApplicationError


def resident_mib(pid: int, name: str, procfs: str = "/proc") -> float:
    """Resident size in MiB of the process, whose name must be the given one.

    Raises: ApplicationError where it cannot be seen, or is another program.
    """
    try:
        with open(f"{procfs}/{pid}/status", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError as error:
        raise ApplicationError(f"process {pid} cannot be seen here: {error.strerror}") from None
    found = fields.get("Name", "").strip()
    if found != name[:15]:
        raise ApplicationError(f"process {pid} is {found}, not {name}")
    return int(fields.get("VmRSS", "0 kB").split()[0]) / 1024


def proportional_mib(pid: int | str, procfs: str = "/proc") -> float:
    """Resident size in MiB, shared pages by their share: what several maps of one page (ZGC) or forks do not inflate.

    Raises: ApplicationError where it cannot be seen (proc(5): smaps_rollup needs the process's own user, or root).
    """
    try:
        with open(f"{procfs}/{pid}/smaps_rollup", errors="replace") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) / 1024
    except OSError as error:
        raise ApplicationError(f"the memory of process {pid} cannot be seen here: {error.strerror}") from None
    return 0.0


def started(pid: int, procfs: str = "/proc") -> int | None:
    """When the process began, in ticks since boot: a pid that is used again has another. None where there is none."""
    fields = _stat(pid, procfs)
    return int(fields[19]) if len(fields) > 19 else None


def boot_id(procfs: str = "/proc") -> str:
    """Which start of this machine it is: pids of another one say nothing. Raises: ApplicationError."""
    try:
        with open(f"{procfs}/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise ApplicationError(f"this machine's boot_id cannot be read: {error.strerror}") from None


def lives(pid: int, began: int, procfs: str = "/proc") -> bool:
    """Whether the process that began then is there, and no zombie."""
    fields = _stat(pid, procfs)
    return len(fields) > 19 and int(fields[19]) == began and fields[0] not in ("Z", "X")


def leads_session(pid: int, procfs: str = "/proc") -> bool:
    """Whether the process began a session of its own, as its parent had it do."""
    fields = _stat(pid, procfs)
    return len(fields) > 3 and int(fields[3]) == pid


def signals(pid: int, *fields: str, procfs: str = "/proc") -> int:
    """Signals that stand in these fields of the process (proc(5): SigCgt, SigIgn), as a mask; 0 where there is none."""
    found = 0
    try:
        with open(f"{procfs}/{pid}/status", errors="replace") as file:
            for line in file:
                name, _, mask = line.partition(":")
                if name in fields:
                    found |= int(mask, 16)
    except OSError:
        return 0
    return found


def children(pid: int, procfs: str = "/proc") -> list[int]:
    """Child processes that live, without zombies, by pid."""
    return families(procfs).get(pid, [])


def families(procfs: str = "/proc") -> dict[int, list[int]]:
    """The children of every process that has some and is seen here, without zombies, by pid."""
    found: dict[int, list[int]] = {}
    for pid in sorted(int(name) for name in os.listdir(procfs) if name.isdigit()):
        fields = _stat(pid, procfs)
        if len(fields) > 1 and fields[0] not in ("Z", "X"):
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def _stat(pid: int, procfs: str) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second may hold anything. Empty where there is none."""
    try:
        with open(f"{procfs}/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def environment(pid: int, procfs: str = "/proc") -> dict[bytes, bytes] | None:
    """Environment that the process was started with, None where it may not be read."""
    try:
        with open(f"{procfs}/{pid}/environ", "rb") as file:
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    except OSError:
        return None
    return {name: value for name, _, value in pairs}


def arguments(pid: int, procfs: str = "/proc") -> list[str]:
    """Command line of the process, empty where it cannot be read."""
    try:
        with open(f"{procfs}/{pid}/cmdline", "rb") as file:
            return [item.decode("utf-8", "replace") for item in file.read().split(b"\0") if item]
    except OSError:
        return []


def own_resident_mib(procfs: str = "/proc") -> float:
    """Resident size in MiB of this very process.

    Raises: ApplicationError where there is no procfs.
    """
    try:
        with open(f"{procfs}/self/status", errors="replace") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) / 1024
    except OSError as error:
        raise ApplicationError(f"this process cannot be seen: {error.strerror}") from None
    raise ApplicationError("this process has no VmRSS")


def own_proportional_mib(procfs: str = "/proc") -> float:
    """The same with shared pages by their share, so that sizes of processes that were forked from one can be added up.
    The resident size where the kernel does not tell the other.

    Raises: ApplicationError where there is no procfs.
    """
    try:
        return proportional_mib("self", procfs) or own_resident_mib(procfs)
    except ApplicationError:
        return own_resident_mib(procfs)
