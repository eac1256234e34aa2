"""Load of the benchmark `steady`, run inside its guests: memory in use that changes, and two files.

Every ROUND_S the memory in use and a mapped file are touched; every READ_S a second file is read, which nobody maps.
Every CHANGE_S the memory in use goes to another size, by chance; it grows slowly, and waits where hardly anything is
available. Writes what it saw as JSON at its end. Standard library of the guest's Python only.
"""

from __future__ import annotations

import json
import mmap
import random
import sys
import time

SEED, SECONDS, LEAST_MIB, MOST_MIB, RESULT = int(sys.argv[1]), *map(float, sys.argv[2:5]), sys.argv[5]
ROUND_S, READ_S, CHANGE_S = 2.0, 10.0, 30.0
#: Memory in use grows by so much in a round, and only while so much is available afterwards, MiB.
STEP_MIB, LEFT_MIB = 24, 16
MIB = 1 << 20


def available_mib() -> int:
    with open("/proc/meminfo") as file:
        return int(file.read().split("MemAvailable:")[1].split()[0]) // 1024


def read_all(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(MIB):
            pass


def main() -> None:
    chance = random.Random(SEED)
    held: list[bytearray] = []
    with open("/mapped", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    touches: list[float] = []
    reads: list[float] = []
    waits = 0
    began = time.monotonic()
    due, changes, read_at, wanted = began, began, began, 0
    while (now := time.monotonic()) < began + SECONDS:
        if now >= changes:
            wanted, changes = int(chance.uniform(LEAST_MIB, MOST_MIB)), changes + CHANGE_S
        del held[wanted:]
        for _ in range(min(STEP_MIB, wanted - len(held))):
            if available_mib() <= LEFT_MIB:
                waits += 1
                break
            held.append(bytearray(b"x") * MIB)
        now = time.monotonic()
        sum(mapped[::4096])
        for one in held:
            sum(one[::4096])
        touches.append(time.monotonic() - now)
        if now >= read_at:
            now, read_at = time.monotonic(), read_at + READ_S
            read_all("/read")
            reads.append(time.monotonic() - now)
        due += ROUND_S
        time.sleep(max(due - time.monotonic(), 0.0))
    found = {
        "touch_ms": 1000 * sum(touches) / len(touches),
        "read_ms": 1000 * sum(reads) / len(reads),
        "waited": 100 * waits / len(touches),
    }
    with open(RESULT, "w") as file:
        file.write(json.dumps(found))


main()
