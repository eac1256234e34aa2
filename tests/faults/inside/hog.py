"""Runs inside a guest: holds so many MiB, touched, until it is killed. Usage: hog.py MIB"""

from __future__ import annotations

import mmap
import sys
import time

held = mmap.mmap(-1, int(sys.argv[1]) << 20)
for offset in range(0, len(held), mmap.PAGESIZE):
    held[offset] = 1
print("ready", flush=True)
time.sleep(86_400)
