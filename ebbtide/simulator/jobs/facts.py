"""Facts of a trace of jobs, found in one reading before the first run: its end, its work, how wide its jobs are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import Input
from ebbtide.simulator.experiments.shared import SharedArrays, fingerprint, shared_arrays
from ebbtide.simulator.inputs.batches import CapacityBatch, JobBatch
from ebbtide.simulator.jobs.intake import rounded_down, rounded_up

#: Of the arrays in the cache.
_VERSION: Final = 3
#: What becomes of machines when nothing says how they change any more.
STAY: Final = "machines stay as they are"


@dataclass(frozen=True, slots=True)
class Facts:
    """Jobs that are submitted up to ``last_s``, counted from the first of them.

    :param core_s: work of all jobs that fit on a machine, and (``early_core_s``) of those that come before
        ``before_s``; in whole cores.
    """

    jobs: int
    tasks: int
    last_s: float
    core_s: float
    early_core_s: float
    before_s: float

    @property
    def mean_cores(self) -> float:
        """Cores that the jobs want on average while they come, up to ``before_s``; infinite if all come at once."""
        span_s = min(self.last_s, self.before_s)
        return self.early_core_s / span_s if span_s > 0 else math.inf

    def within(self, from_s: float, to_s: float = math.inf) -> None:
        """:raises InvalidParameter: no job of the trace is submitted in [from_s, to_s)."""
        if from_s > self.last_s:
            raise InvalidParameter("from_s", f"is {from_s:g}, but the last job of the trace comes at {self.last_s:g} s")
        if to_s <= 0:
            raise InvalidParameter("to_s", f"must be after the first job of the trace, at 0 s, but is {to_s:g}")

    def beyond(self, to_s: float) -> tuple[str, ...]:
        """What is to be said of a window that goes on where the trace has ended."""
        if not self.last_s < to_s < math.inf:
            return ()
        return (f"what is measured ends at {to_s:g} s, and the last job of the trace comes at {self.last_s:g} s",)


def known(trace: Input, before_s: float = math.inf, most_cores: float = math.inf) -> Facts:
    """What a trace of jobs is; read once, and then kept in the cache.

    :param most_cores: of a machine: what wants more is refused, and is no work.
    :raises InvalidParameter: it has no jobs, or is of another kind.
    """

    def make() -> dict[str, Any]:
        jobs, all_tasks, last_s, sums = 0, 0, 0.0, [0.0, 0.0]
        for batch in trace.batches(JobBatch, "jobs", from_first=True):
            if not len(batch):
                continue
            jobs, last_s = jobs + len(batch), float(batch.submit_s[-1])
            tasks = batch.task_runtime_s
            all_tasks += int(tasks.lengths.sum())
            cores = rounded_up(batch.cpu_cores)
            cores = np.repeat(np.where(cores <= most_cores, cores, 0.0), tasks.lengths)
            core_s = cores * tasks.values[tasks.offsets[0] : tasks.offsets[-1]]
            early = np.repeat(batch.submit_s < before_s, tasks.lengths)
            sums = [sums[0] + float(core_s.sum()), sums[1] + float(core_s[early].sum())]
        return {"facts": np.array([jobs, all_tasks, last_s, *sums])}

    jobs, all_tasks, last_s, core_s, early = _kept("jobs", trace, (before_s, most_cores), make)["facts"].tolist()
    if not jobs:
        raise InvalidParameter("jobs", "are none")
    return Facts(int(jobs), int(all_tasks), last_s, core_s, early, before_s)


@dataclass(frozen=True, slots=True)
class Supply:
    """A trace of capacity: cores of its largest machine, and the most memory that one has (None: as much as anybody
    wants); cores of all machines on average, whole ones; when it changes last."""

    most_cores: int
    most_mib: int | None
    mean_cores: float
    last_s: float

    def beyond(self, to_s: float) -> tuple[str, ...]:
        """What is to be said of a window that goes on where the trace has ended."""
        if not self.last_s < to_s < math.inf:
            return ()
        last = f"the last change of the trace of capacity comes at {self.last_s:g} s"
        return (f"{last}; from then to {to_s:g} s {STAY}",)


def supplied(trace: Input, from_s: float, until_s: float) -> Supply:
    """What a trace of capacity gives in a window of so many seconds; read once, and then kept in the cache.

    :param from_s: of the trace, what is time 0 of the run.
    :raises InvalidParameter: it has no machines, or ends before the window begins.
    """

    def make() -> dict[str, Any]:
        most = most_mib = total = area = now_s = last_s = 0.0
        cores: dict[str, float] = {}
        for batch in since(trace.batches(CapacityBatch, "capacity", from_first=True), from_s):
            whole = rounded_down(batch.cpu_cores)
            most_mib = max(most_mib, float(np.nan_to_num(batch.memory_mib, nan=math.inf).max(initial=0.0)))
            # Jobs run on whole cores, and of those is their load a share.
            for name, at_s, size in zip(batch.machine, batch.at_s.tolist(), whole.tolist(), strict=True):
                last_s = at_s
                most = max(most, size)
                if at_s < until_s:
                    area += total * (at_s - now_s)
                    now_s, total = at_s, total + size - cores.get(name, 0.0)
                    cores[name] = size
        mean = (area + total * (until_s - now_s)) / until_s if 0 < until_s < math.inf else total
        return {"facts": np.array([most, most_mib, mean, last_s])}

    most, most_mib, mean, last_s = _kept("capacity", trace, (from_s, until_s), make)["facts"].tolist()
    mib = math.floor(most_mib + 1e-9) if math.isfinite(most_mib) else None
    return Supply(int(most), mib, mean, last_s)


def since(batches: Iterable[CapacityBatch], from_s: float) -> Iterator[CapacityBatch]:
    """Changes from ``from_s`` on, which becomes time 0; what machines were before is what they begin with.

    :raises InvalidParameter: there are none so late.
    """
    held: CapacityBatch | None = None
    begun = False
    for batch in batches:
        first = 0 if begun else int(np.searchsorted(batch.at_s, from_s, side="right"))
        if first:
            early = batch.take(slice(0, first))
            held = _last_of_each(early if held is None else CapacityBatch.joined([held, early]))
        if first < len(batch):
            if held is not None and not begun:
                yield replace(held, at_s=np.zeros(len(held)))
            begun = True
            yield batch.take(slice(first, None)).shifted(-from_s)
    if begun:
        return
    if held is None or held.at_s.max() < from_s:
        last = "has none" if held is None else f"comes at {held.at_s.max():g} s"
        raise InvalidParameter("capacity_from_s", f"is {from_s:g}, but the last change of the trace {last}")
    yield replace(held, at_s=np.zeros(len(held)))


def _last_of_each(batch: CapacityBatch) -> CapacityBatch:
    """The last row of each machine, in the order of their first ones."""
    last = {name: row for row, name in enumerate(batch.machine)}
    return batch.take(np.array(list(last.values()), np.int64))


def _kept(kind: str, trace: Input, terms: Any, make: Callable[[], dict[str, Any]]) -> SharedArrays:
    what = [kind, _VERSION, fingerprint(trace.path), trace.format, dict(trace.options), trace.order, str(terms)]
    return shared_arrays(what, make)
