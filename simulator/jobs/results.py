"""What a run has shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.jobs import columns as c
from simulator.jobs.columns import State
from simulator.jobs.measures import figures


@dataclass(frozen=True, slots=True)
class Results:
    """What a run has shown; of waits, completion times and work only what is measured (`Settings.from_s`).

    Means are exact; percentiles are at most 1 % off (`measures`).
    """

    #: How many jobs and tasks came, were done, were refused as too large for every machine, and were left in the end.
    jobs: int
    jobs_done: int
    jobs_refused: int
    jobs_left: int
    tasks: int
    tasks_done: int
    #: Replicas whose task was done by another one.
    tasks_withdrawn: int
    kills: int
    #: Changes of machines, and all events.
    changes: int
    events: int
    #: The time of the last event; s.
    ended_s: float
    #: The most tasks that waited, and that were alive, at one time.
    most_waiting: int
    most_alive: int
    #: Core-seconds: useful work, work lost to kills and checkpoints, cores that were there.
    useful_core_s: float
    lost_core_s: float
    used_core_s: float
    there_core_s: float
    #: Useful work / cores that were there; lost work / all work; used / there. NaN where there was none.
    goodput: float
    waste: float
    utilisation: float
    #: wait, completion, slowdown (per job) and task_wait: _count, _mean, _p50, _p90, _p95, _p99, _max, with units.
    measures: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """All of it by name, as floats."""
        flat = {name: float(getattr(self, name)) for name in self.__slots__ if name != "measures"}
        return flat | self.measures


def results(s: State) -> Results:
    """What the state says of a run so far."""
    counts = [int(value) for value in s.counts]

    def total(place: int) -> float:
        return float(s.sums[place] + s.sums[place + 1])

    useful, lost = total(c.S_DONE_MEASURED), total(c.S_LOST_MEASURED)
    used, there = total(c.S_USED_MEASURED), total(c.S_ALL_MEASURED)
    return Results(
        jobs=counts[c.C_JOBS_IN],
        jobs_done=counts[c.C_JOBS_DONE],
        jobs_refused=counts[c.C_REFUSED],
        jobs_left=counts[c.C_JOBS_IN] - counts[c.C_JOBS_DONE],
        tasks=counts[c.C_TASKS_IN],
        tasks_done=counts[c.C_TASKS_DONE],
        tasks_withdrawn=counts[c.C_WITHDRAWN],
        kills=counts[c.C_KILLS],
        changes=counts[c.C_CHANGES],
        events=counts[c.C_EVENTS],
        ended_s=float(s.sums[c.S_NOW]),
        most_waiting=counts[c.C_MOST_WAITING],
        most_alive=counts[c.C_MOST_ALIVE],
        useful_core_s=useful,
        lost_core_s=lost,
        used_core_s=used,
        there_core_s=there,
        goodput=_share(useful, there),
        waste=_share(lost, useful + lost),
        utilisation=_share(used, there),
        measures=figures(s.bins, s.bin_sums, s.moments),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
