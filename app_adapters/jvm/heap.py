"""Size of a heap: by the JVM (`GC.heap_info`), and what of it the kernel has resident (smaps)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable

from app_adapters.errors import ApplicationError

_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_SIZE = r"(\d+)([KMG])"
# Shenandoah: "512M max, 512M soft max, 161M committed, 151M used". ZGC: "used 162M, capacity 378M, max capacity 512M".
_SHENANDOAH = re.compile(rf"{_SIZE} committed, {_SIZE} used")
_ZGC = re.compile(rf"ZHeap\s+used {_SIZE}, capacity {_SIZE}")
# A line for each generation: "total 9792K, used 12K [0x..", newer G1 "total reserved 9K, committed 9K, used 9K [0x..".
_GENERATION = re.compile(
    rf"(?m)^ ?\S.*? total (?:reserved \S+ committed )?{_SIZE}, used {_SIZE} \[0x([0-9a-f]+),.*?(0x[0-9a-f]+)\)"
)
_RESERVED = re.compile(r"Reserved region:\s*- \[0x([0-9a-f]+), 0x([0-9a-f]+)\)")
_ZGC_FILE = "java_heap"


@dataclass(frozen=True)
class Heap:
    """MiB that the JVM has committed and uses, garbage included, and where the heap lies (both 0: in ZGC's file)."""

    committed_mib: float
    used_mib: float
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Resident:
    """Resident MiB, shared pages by their share: all of the process, and of that the heap."""

    all_mib: float
    heap_mib: float

    @property
    def other_mib(self) -> float:
        """Code, metaspace, threads, the collector's own tables: what a heap size says nothing about."""
        return max(self.all_mib - self.heap_mib, 0.0)


def parse_heap(text: str) -> Heap:
    """What `GC.heap_info` printed. Raises: ApplicationError where it is none that is known here."""
    match = _SHENANDOAH.search(text)
    if match:
        region = _RESERVED.search(text)
        start, end = (int(side, 16) for side in region.groups()) if region else (0, 0)
        return Heap(_mib(match, 1), _mib(match, 3), start, end)
    match = _ZGC.search(text)
    if match:
        return Heap(_mib(match, 3), _mib(match, 1))
    generations = list(_GENERATION.finditer(text))
    if not generations:
        raise ApplicationError(f"the JVM describes its heap in words that are not known here: {text.strip()[:120]}")
    return Heap(
        sum(_mib(one, 1) for one in generations),
        sum(_mib(one, 3) for one in generations),
        min(int(one.group(5), 16) for one in generations),
        max(int(one.group(6), 16) for one in generations),
    )


def _mib(match: re.Match[str], group: int) -> float:
    return int(match.group(group)) * _UNITS[match.group(group + 1)]


def read_resident(pid: int, heap: Heap, procfs: str = "/proc") -> Resident:
    """Resident sizes now. Raises: ApplicationError where they cannot be seen."""
    try:
        with open(f"{procfs}/{pid}/smaps", errors="replace") as file:
            return resident(file, heap)
    except OSError as error:
        raise ApplicationError(f"the memory of process {pid} cannot be seen here: {error.strerror}") from None


def resident(smaps: Iterable[str], heap: Heap) -> Resident:
    """Resident sizes by the lines of an smaps file (proc(5)). ZGC maps its file several times: its pages count once."""
    all_kib = heap_kib = 0
    in_heap = False
    for line in smaps:
        if line.startswith("Pss:"):
            kib = int(line.split()[1])
            all_kib += kib
            heap_kib += kib if in_heap else 0
        elif "-" in line[:17] and not line[0].isupper():
            start = int(line.partition("-")[0], 16)
            in_heap = heap.start <= start < heap.end if heap.end else _ZGC_FILE in line
    return Resident(all_kib / 1024, heap_kib / 1024)
