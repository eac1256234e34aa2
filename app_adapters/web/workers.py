"""A pool of worker processes under a master: how many workers a size stands for. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Of a worker: what one holds more or less from look to look must not cost a worker at full size.
MARGIN = 0.25


@dataclass(frozen=True)
class Pool:
    """What there is: workers that live, and of them those that take new requests; workers at full size and at least;
    cores at full size; MiB of all processes.

    `worker_mib` is what one worker holds alone, in the mean: what is shared with the others (a preloaded application)
    does not come free with it.
    """

    workers: int
    serving: int
    nominal: int
    minimum: int
    full_cores: float
    total_mib: float
    worker_mib: float

    def cores(self, workers: int) -> float:
        """Cores that so many workers stand for."""
        return self.full_cores * workers / self.nominal

    def memory_mib(self, workers: float) -> float:
        """MiB that so many workers hold, with their master."""
        return max(self.total_mib + (workers - self.workers) * self.worker_mib, 0.0)

    def largest_mib(self) -> float:
        """MiB at full size, with a margin so that this size stands for all workers also at the next look."""
        return max(self.memory_mib(self.nominal + MARGIN), self.total_mib)


def workers_for(target: dict[str, float], pool: Pool) -> int:
    """Workers for a size of `cpu_cores`, `memory_mib` or both, then the lesser; within minimum and nominal."""
    counts = [pool.nominal]
    if "cpu_cores" in target:
        counts.append(_whole(pool.nominal * target["cpu_cores"] / pool.full_cores + 0.5))
    if "memory_mib" in target:
        room_mib = target["memory_mib"] - pool.memory_mib(0)
        if pool.worker_mib > 0:
            counts.append(_whole(room_mib / pool.worker_mib))
        elif room_mib < 0:
            counts.append(pool.minimum)
    return max(min(counts), pool.minimum)


def _whole(value: float) -> int:
    """Rounded down, but not by an error of the arithmetic."""
    return math.floor(value + 1e-9) if abs(value) < 1e9 else int(math.copysign(1e9, value))
