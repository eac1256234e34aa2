"""What memory this machine has available."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import psutil

#: Where ZFS on Linux tells of its cache; each row is a name, a type and a number of bytes.
ARCSTATS: Final = Path("/proc/spl/kstat/zfs/arcstats")


def host_memory_available_mib(arcstats: Path = ARCSTATS) -> float:
    """MemAvailable, and what ZFS gives back of its cache on demand, which the kernel does not count.

    libvirt's node information misses memory that was plugged into the host later.
    """
    cache: dict[str, int] = {}
    with contextlib.suppress(OSError):
        rows = (line.split() for line in arcstats.read_text().splitlines())
        cache = {row[0]: int(row[2]) for row in rows if len(row) == 3 and row[0] in ("size", "c_min")}
    reclaimable = max(cache["size"] - cache["c_min"], 0) if len(cache) == 2 else 0
    return (float(psutil.virtual_memory().available) + reclaimable) / 2**20
