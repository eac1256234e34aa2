"""Arrivals of one host for the benchmark `steady`: made, in the shape of a trace. Pure.

What comes together is drawn from what tenants of the Azure Public Dataset V1 (vmtable; Cortez et al., SOSP 2017;
CC-BY 4.0) brought within three days: one in 3000 tenants' batches of its days 22 to 25, which is about what came to one
host of docs/research/steady.md. Left out: VMs of 56 GiB and a batch of 30 of 14 GiB, none of which one host would get.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

#: VMs that came together, GiB of each, and how long they stayed, in seconds.
BATCHES: Final = (
    (1, 3.5, 2400), (2, 1.75, 59550), (1, 1.75, 16350), (4, 1.75, 45150), (1, 1.75, 55950), (1, 14, 12750),
    (1, 1.75, 23550), (1, 3.5, 59550), (1, 3.5, 300), (1, 1.75, 19950), (1, 3.5, 19950), (9, 1.75, 1200),
    (1, 7, 5550), (1, 14, 2700), (2, 3.5, 9150), (1, 1.75, 129750), (2, 1.75, 9150), (1, 7, 302550), (2, 3.5, 73950),
    (2, 0.75, 216150), (1, 1.75, 30750), (2, 3.5, 900), (1, 3.5, 45150), (2, 3.5, 1800), (1, 1.75, 19950),
    (1, 3.5, 2400), (2, 1.75, 600),
)  # fmt: skip
#: Batches a day, and the memory of a host of docs/research/steady.md, GiB.
A_DAY: Final = 10
HOST_GIB: Final = 128.0
_DAY_S: Final = 86_400.0


@dataclass(frozen=True)
class Arrival:
    """A VM that comes. Seconds of the compressed day; infinite: it stays."""

    at_s: float
    memory_mib: float
    stays_s: float


def arrivals(seed: int, day_s: float, host_mib: float, least_stay_s: float) -> list[Arrival]:
    """A day of so many seconds on a host of so much memory: all times and sizes in proportion.

    :param least_stay_s: who would stay for less stays so long.
    """
    chance, found = random.Random(seed), []
    for at_s in sorted(chance.uniform(0, day_s) for _ in range(A_DAY)):
        count, gib, stayed_s = chance.choice(BATCHES)
        stays_s = max(stayed_s * day_s / _DAY_S, least_stay_s)
        found += [Arrival(at_s, gib * host_mib / HOST_GIB, stays_s)] * count
    return found
