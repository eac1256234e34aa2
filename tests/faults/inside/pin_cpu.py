"""Runs inside a guest: a task that may run on one CPU only, asleep or busy. Usage: pin_cpu.py CPU [busy]"""

from __future__ import annotations

import os
import sys
import time

os.sched_setaffinity(0, {int(sys.argv[1])})
print("ready", flush=True)
while sys.argv[2:] == ["busy"]:
    pass
time.sleep(86_400)
