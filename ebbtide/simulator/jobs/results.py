"""Results of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ebbtide.simulator.jobs import columns as c
from ebbtide.simulator.jobs.columns import State
from ebbtide.simulator.jobs.machines import there_core_s
from ebbtide.simulator.jobs.measures import figures, fresh


@dataclass(frozen=True, slots=True)
class Results:
    """What a run has shown; of waits, completion times and work only what is measured (`Settings.from_s`).

    Means are exact, and of jobs that are done. Percentiles are at most 1 % off (`measures`), and of all jobs that came:
    one that is not done counts as if it never started.
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
    #: Of all work that was asked for, measured or not, that of jobs that were refused.
    refused_work_share: float
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

    def not_done(self, most_cores: int, most_mib: int | None = None) -> tuple[str, ...]:
        """What is to be said of jobs that were refused, and of those that wait when nothing happens any more.

        :param most_mib: memory of the machine that has most; None: as much as anybody wants.
        """
        said = []
        if self.jobs_refused:
            more = f"more cores than the {most_cores} of the largest machine"
            if most_mib is not None:
                more += f", or more memory than the {most_mib} MiB of any,"
            said.append(
                f"{self.jobs_refused} of {self.jobs + self.jobs_refused} jobs want {more} and are left out, with "
                f"{self.refused_work_share:.1%} of the work"
            )
        if self.jobs_left:
            said.append(
                f"{self.jobs_left} of {self.jobs} jobs are not done: they, or one ahead of them, wait in the end for "
                "room that no machine has, or that the policy never gives them"
            )
        return tuple(said)


#: Names of all of `Results.metrics`.
METRICS: Final = (*(name for name in Results.__slots__ if name != "measures"), *figures(*fresh()))


def results(s: State) -> Results:
    """What the state says of a run so far."""
    counts = [int(value) for value in s.counts]

    def total(place: int) -> float:
        return float(s.sums[place] + s.sums[place + 1])

    useful = total(c.SUM.done) - total(c.SUM.done_outside)
    lost = total(c.SUM.lost) - total(c.SUM.lost_outside)
    came, refused = total(c.SUM.came_in), total(c.SUM.refused)
    used = total(c.SUM.used) - total(c.SUM.used_outside)
    there = total(c.SUM.all_measured) + there_core_s(s)
    return Results(
        jobs=counts[c.COUNT.jobs_in],
        jobs_done=counts[c.COUNT.jobs_done],
        jobs_refused=counts[c.COUNT.refused],
        jobs_left=counts[c.COUNT.jobs_in] - counts[c.COUNT.jobs_done],
        tasks=counts[c.COUNT.tasks_in],
        tasks_done=counts[c.COUNT.tasks_done],
        tasks_withdrawn=counts[c.COUNT.withdrawn],
        kills=counts[c.COUNT.kills],
        changes=counts[c.COUNT.changes],
        events=counts[c.COUNT.events],
        ended_s=float(s.sums[c.SUM.now]),
        most_waiting=counts[c.COUNT.most_waiting],
        most_alive=counts[c.COUNT.most_alive],
        useful_core_s=useful,
        lost_core_s=lost,
        used_core_s=used,
        there_core_s=there,
        refused_work_share=refused / (came + refused) if refused > 0 else 0.0,
        goodput=_share(useful, there),
        waste=_share(lost, useful + lost),
        utilisation=_share(used, there),
        measures=figures(s.bins, s.bin_sums, s.moments, _left(s)),
    )


def _left(s: State) -> list[int]:
    """Of each measure, how many jobs or tasks that are measured are not done."""
    submitted_s = s.job_times[:, c.JOB_TIME.submitted]
    ours = (s.jobs[:, c.JOB.number] >= 0) & (submitted_s >= s.sums[c.SUM.from_s]) & (submitted_s < s.sums[c.SUM.to_s])
    tasks = int(s.jobs[ours, c.JOB.left].sum()) // max(int(s.options[c.OPTION.replicas]), 1)
    return [tasks if row == c.TASK_WAIT else int(ours.sum()) for row in range(len(c.MEASURES))]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
