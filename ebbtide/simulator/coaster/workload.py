"""Made jobs of the shape of the Yahoo trace: many short ones, and few long ones that hold nearly all the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import JobBatch, Ragged, hints, same, texts, unknown

#: Tasks of a job: log-normal with median 15 and mean 42, at most 2000, as in the window of the trace that is public.
_MEDIAN_TASKS: Final = 15.0
_SPREAD: Final = 1.43
_MOST_TASKS: Final = 2000
#: All of them are held.
_MOST_JOBS: Final = 1e7


@dataclass(frozen=True, slots=True)
class Mixed:
    """Jobs that come by a Poisson process.

    :param load: work / capacity of the servers; ``hours``: for how long jobs come.
    :param long_share: of the jobs; the mean of a long one's tasks is ``cutoff_s`` and an exponential draw of
        ``long_mean_s`` more, that of a short one's is even between 5 s and the cutoff.
    """

    load: float
    hours: float
    long_share: float
    long_mean_s: float
    cutoff_s: float

    def batches(self, rng: np.random.Generator, servers: int) -> Iterator[JobBatch]:
        """The jobs, in one batch. Tasks of a job are even between half and one and a half of its mean.

        :raises InvalidParameter: there would be too many.
        """
        until_s = self.hours * 3600
        tasks_mean = _MEDIAN_TASKS * np.exp(_SPREAD**2 / 2)
        task_s = self.long_share * (self.cutoff_s + self.long_mean_s)
        task_s += (1 - self.long_share) * (5.0 + self.cutoff_s) / 2
        mean = self.load * servers * until_s / (tasks_mean * task_s)
        if mean > _MOST_JOBS:
            raise InvalidParameter("load", f"makes {mean:.3g} jobs; at most {_MOST_JOBS:g} are allowed")
        count = max(int(rng.poisson(mean)), 1)
        tasks = np.clip(rng.lognormal(np.log(_MEDIAN_TASKS), _SPREAD, count), 1, _MOST_TASKS).astype(np.int64)
        long = rng.random(count) < self.long_share
        mean_s = np.where(
            long,
            self.cutoff_s + rng.exponential(self.long_mean_s, count),
            rng.uniform(min(5.0, self.cutoff_s / 2), np.nextafter(self.cutoff_s, 0), count),
        )
        yield JobBatch(
            id=texts(f"job-{i}" for i in range(count)),
            group=same("", count),
            submit_s=np.sort(rng.uniform(0, until_s, count)),
            # What the schedulers believe of a job's tasks.
            runtime_s=mean_s,
            cpu_cores=np.ones(count),
            memory_mib=unknown(count),
            priority=hints(count),
            requested_s=unknown(count),
            task_runtime_s=Ragged.of(np.repeat(mean_s, tasks) * rng.uniform(0.5, 1.5, int(tasks.sum())), tasks),
        )
