"""What the kernel says of processes, independently of the adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

MIB = 1024 * 1024


def state(pid: int) -> str:
    """As `psutil.STATUS_...`; empty: it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status())
    return ""


def ended(pid: int) -> bool:
    """Gone, or dead and only not yet taken from the table by its parent."""
    return state(pid) in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def children(pid: int, recursive: bool = False) -> list[int]:
    """Those that have not ended, by number."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sorted(c.pid for c in psutil.Process(pid).children(recursive) if not ended(c.pid))
    return []


def tree(pid: int) -> list[int]:
    """The process and all that it started."""
    return [pid, *children(pid, recursive=True)]


def rss_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / MIB


def pss_mib(pids: Iterable[int]) -> float:
    """Of all together that are there."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_full_info().pss
    return total / MIB
