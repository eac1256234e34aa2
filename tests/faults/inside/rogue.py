"""Runs inside a guest: its root, who fights back. All CPUs are put on line over and over and kept busy.

Usage: rogue.py [kill]; with `kill` every guest agent is killed as soon as it is seen.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import time

CPUS = "/sys/devices/system/cpu"
children = []


def burn(cpu: int) -> int:
    """A child that keeps one CPU busy, whenever it is on line."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while os.getppid() == parent:
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError:
            time.sleep(0.01)
            continue
        for _ in range(100_000):
            pass
    os._exit(0)


def agents() -> list[int]:
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                if b"\0-m\0guestagent" in file.read():
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return found


def stop(*_: object) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


present = sorted(int(path[len(CPUS) + 4 :]) for path in glob.glob(CPUS + "/cpu[0-9]*"))
children += [burn(cpu) for cpu in present]
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    for cpu in present[1:]:
        try:
            with open(f"{CPUS}/cpu{cpu}/online", "w") as file:
                file.write("1")
        except OSError:
            continue
    if "kill" in sys.argv:
        for pid in agents():
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
