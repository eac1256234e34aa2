"""Runs inside a guest: takes so many MiB, 10 every PAUSE_S seconds, and keeps them until it is killed.

It is ready once it has all, or, where there is a pause, once it begins. Usage: hog.py MIB [PAUSE_S]
"""

from __future__ import annotations

import mmap
import sys
import time

STEP = 10 << 20
held = mmap.mmap(-1, int(sys.argv[1]) << 20)
pause_s = float(sys.argv[2]) if sys.argv[2:] else 0.0
if pause_s:
    print("ready", flush=True)
for offset in range(0, len(held), mmap.PAGESIZE):
    held[offset] = 1
    if pause_s and offset % STEP == 0:
        time.sleep(pause_s)
print("ready", flush=True)
time.sleep(86_400)
