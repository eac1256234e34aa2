"""Resident size: what of the libraries only the start used no longer counts.

Code and constants of libraries are pages of the page cache. Each that is touched counts as resident, with fifteen
beside it, until the kernel is short of memory: symbols, relocations and what runs once are two thirds of them. Here all
of them leave this process's page tables. What is used again comes back by a minor fault, from the page cache. So this
frees no memory of the host by itself: the resident size tells what the agent uses, and the kernel may drop the rest
without looking for who maps it. Anonymous memory is left alone: nothing goes to swap, nothing that was written is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from pathlib import Path
from typing import Any, Final

#: elf(5)
_LOADED: Final = 1
_WRITABLE: Final = 2


class _Segment(ctypes.Structure):
    """Elf64_Phdr."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("type", "flags")),
        *((name, ctypes.c_uint64) for name in ("offset", "address", "physical", "in_file", "in_memory", "align")),
    )


class _Library(ctypes.Structure):
    """The beginning of dl_phdr_info (dl_iterate_phdr(3))."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    )


_FOR_EACH: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)


def unwritten(smaps: str) -> dict[int, int]:
    """Begin and end of mappings that cannot be written to, and never were: neither relocated nor with a breakpoint."""
    found = re.findall(r"^(\w+)-(\w+) r-.p .*\n(?:(?!Anonymous:).*\n)*Anonymous: +0 kB", smaps, re.MULTILINE)
    return {int(begin, 16): int(end, 16) for begin, end in found}


def forget_start() -> None:
    """Does nothing where it is refused. Where another library is loaded meanwhile, that one is left as it is."""
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return

    def forget(found: Any, _size: int, _data: Any) -> int:
        library = found.contents
        for segment in library.segments[: library.count]:
            begin = (library.base + segment.address) & -mmap.PAGESIZE
            end = min(library.base + segment.address + segment.in_file, clean.get(begin, begin))
            if segment.type == _LOADED and not segment.flags & _WRITABLE and begin < end:
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
        return 0

    with contextlib.suppress(OSError, AttributeError):
        clean = unwritten(Path("/proc/self/smaps").read_text())
        # The loader's list cannot change meanwhile. PyDLL keeps the GIL: a thread that loads a library waits with it.
        libc = ctypes.PyDLL(None)
        libc.dl_iterate_phdr(_FOR_EACH(forget), None)
