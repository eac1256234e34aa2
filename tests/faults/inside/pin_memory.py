"""Runs inside a guest: pins a page in each of so many blocks of 2 MiB, as a device that does DMA would.

A page in a pipe (vmsplice(2)) can neither be moved nor freed, so its block cannot be unplugged.
Usage: pin_memory.py BLOCKS
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import time

BLOCK = 2 << 20
F_SETPIPE_SZ = 1031


class IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


blocks = int(sys.argv[1])
held = mmap.mmap(-1, blocks * BLOCK)
start = ctypes.addressof(ctypes.c_char.from_buffer(held))
reading, writing = os.pipe()
fcntl.fcntl(writing, F_SETPIPE_SZ, 1 << 20)
libc = ctypes.CDLL(None, use_errno=True)
for number in range(blocks):
    # All of the block is touched, so that the pages lie far apart in the guest's memory, too.
    for offset in range(number * BLOCK, (number + 1) * BLOCK, mmap.PAGESIZE):
        held[offset] = 1
    page = IOVec(start + number * BLOCK, mmap.PAGESIZE)
    done = libc.vmsplice(writing, ctypes.byref(page), ctypes.c_ulong(1), ctypes.c_uint(0))
    if done != mmap.PAGESIZE:
        sys.exit(f"vmsplice: {os.strerror(ctypes.get_errno())}")
print("ready", flush=True)
time.sleep(86_400)
