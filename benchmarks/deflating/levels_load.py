"""The load of the benchmark `levels`, run inside its guest: gets of a memcached without a pause.

Writes to FILE, again and again, the time (s, monotonic) and how many gets and hits there have been by then. Standard
library of the guest's Python only.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from itertools import accumulate, cycle

COUNT, VALUE_BYTES, SKEW, FILE = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
CONNECTIONS, KEYS, BATCHES = 4, 8, 50_000
EVERY_S = 0.25


def batches() -> list[bytes]:
    """Requests for KEYS keys each; popularity by Zipf, spread over the keys. So many that one round takes long."""
    numbers = list(range(COUNT))
    random.seed(1)
    random.shuffle(numbers)
    weights = list(accumulate((rank + 1) ** -SKEW for rank in range(COUNT)))
    made = []
    # Some at a time: the guest is small.
    for _ in range(0, BATCHES, 1000):
        found = random.choices(numbers, cum_weights=weights, k=1000 * KEYS)
        keys = [b"bench-%d" % number for number in found]
        made += [b"get %b\r\n" % b" ".join(keys[first : first + KEYS]) for first in range(0, len(keys), KEYS)]
    return made


def main() -> None:
    connections = [socket.create_connection(("127.0.0.1", 11211)) for _ in range(CONNECTIONS)]
    requests = cycle(batches())
    answer = memoryview(bytearray(2 * KEYS * VALUE_BYTES + 4096))
    gets = hits = 0
    told = 0.0
    for connection in connections:
        connection.sendall(next(requests))
    for connection in cycle(connections):
        length = 0
        while bytes(answer[max(length - 5, 0) : length]) != b"END\r\n":
            if not (came := connection.recv_into(answer[length:])):
                sys.exit("memcached has gone")
            length += came
        connection.sendall(next(requests))
        gets += KEYS
        # The lines around the values of one answer are shorter than a value.
        hits += length // VALUE_BYTES
        if (now := time.monotonic()) - told >= EVERY_S:
            told = now
            with open(FILE + ".new", "w") as file:
                file.write(f"{now} {gets} {hits}\n")
            os.replace(FILE + ".new", FILE)


main()
