"""Plain simulation that `simulator` is measured against: as one would write it first, in Python over heapq.

The same policy (best fit on cores, what fits is not held up by what does not), the same order of events, the same
answers; jobs of one task on machines that keep their size. Waiting jobs stand in one deque for each number of cores
and free machines in a sorted list, since scanning all of either at each event would be a much slower loop than anyone
would keep.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from ebbtide.simulator.inputs.batches import JobBatch


@dataclass
class Totals:
    """What the loop finds."""

    jobs: int = 0
    events: int = 0
    wait_s: float = 0.0
    completion_s: float = 0.0
    core_s: float = 0.0
    ended_s: float = 0.0
    most_waiting: int = 0


def run(batches: Iterable[JobBatch], machines: int, cores: int) -> Totals:
    """All jobs to their ends on ``machines`` machines of ``cores`` cores."""
    totals = Totals()
    arrivals = _rows(batches)
    arrival = next(arrivals, None)
    room = [cores] * machines
    #: (free cores, machine), ascending.
    free = [(cores, machine) for machine in range(machines)]
    #: (end, number of the start, machine, cores, submitted).
    ends: list[tuple[float, int, int, int, float]] = []
    #: By cores: (number of the arrival, submitted, runtime).
    waiting: defaultdict[int, deque[tuple[int, float, float]]] = defaultdict(deque)
    arrived = started = 0
    while ends or arrival is not None:
        now = min(ends[0][0] if ends else math.inf, arrival[0] if arrival is not None else math.inf)
        while ends and ends[0][0] == now:
            _, _, machine, need, submitted = heappop(ends)
            del free[bisect_left(free, (room[machine], machine))]
            room[machine] += need
            insort(free, (room[machine], machine))
            totals.completion_s += now - submitted
            totals.jobs += 1
            totals.events += 1
        while arrival is not None and arrival[0] == now:
            waiting[arrival[1]].append((arrived, now, arrival[2]))
            arrived += 1
            totals.events += 1
            totals.most_waiting = max(totals.most_waiting, arrived - started)
            arrival = next(arrivals, None)
        while arrived > started:
            most = free[-1][0]
            fitting = [(queue[0][0], need) for need, queue in waiting.items() if queue and need <= most]
            if not fitting:
                break
            _, need = min(fitting)
            _, submitted, runtime_s = waiting[need].popleft()
            _, machine = free.pop(bisect_left(free, (need, -1)))
            room[machine] -= need
            insort(free, (room[machine], machine))
            heappush(ends, (now + runtime_s, started, machine, need, submitted))
            started += 1
            totals.wait_s += now - submitted
            totals.core_s += need * runtime_s
        totals.ended_s = now
    return totals


def _rows(batches: Iterable[JobBatch]) -> Iterator[tuple[float, int, float]]:
    for batch in batches:
        yield from zip(
            batch.submit_s.tolist(), map(int, batch.cpu_cores.tolist()), batch.runtime_s.tolist(), strict=True
        )
