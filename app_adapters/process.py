"""What the kernel says about a process (proc(5))."""

from __future__ import annotations

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
