"""Facts of a trace of jobs, found in one reading before the first run: its end, its work, how wide its jobs are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import INPUTS, Input
from ebbtide.simulator.experiments.shared import SharedArrays, fingerprint, shared_arrays
from ebbtide.simulator.inputs.batches import CapacityBatch, Floats, JobBatch
from ebbtide.simulator.jobs.intake import rounded_down, rounded_up, sound

#: Of the arrays in the cache.
_VERSION: Final = 5
#: The share by which whole cores may differ from what a trace says before that is worth a warning.
_ROUNDING: Final = 0.05
#: What becomes of machines when nothing says how they change any more.
STAY: Final = "machines stay as they are"


@dataclass(frozen=True, slots=True)
class Facts:
    """Jobs that are submitted up to ``last_s``, counted from the first of them.

    :param core_s: work of all jobs that fit on a machine, and (``early_core_s``) of those that come before
        ``before_s``; in whole cores.
    :param asked_core_s: ``core_s`` in the cores that the trace says.
    :param measured: jobs that are submitted in the window that was asked about.
    """

    jobs: int
    tasks: int
    last_s: float
    core_s: float
    early_core_s: float
    before_s: float
    asked_core_s: float
    measured: int

    @property
    def mean_cores(self) -> float:
        """Cores that the jobs want on average while they come, up to ``before_s``; infinite if all come at once."""
        span_s = min(self.last_s, self.before_s)
        return self.early_core_s / span_s if span_s > 0 else math.inf

    def of_one_task_each(self) -> None:
        """:raises InvalidParameter: a job of the trace has several tasks."""
        if self.tasks > self.jobs:
            raise InvalidParameter(f"{INPUTS}.jobs", "has jobs of several tasks; here each must have one")

    def within(self, from_s: float, to_s: float = math.inf) -> None:
        """:raises InvalidParameter: no job of the trace is submitted in [from_s, to_s), which was asked about."""
        if from_s > self.last_s:
            raise InvalidParameter("from_s", f"is {from_s:g}, but the last job of the trace comes at {self.last_s:g} s")
        if to_s <= 0:
            raise InvalidParameter("to_s", f"must be after the first job of the trace, at 0 s, but is {to_s:g}")
        if not self.measured:
            raise InvalidParameter("from_s", f"is {from_s:g}, but no job of the trace comes from then to {to_s:g} s")

    def beyond(self, to_s: float) -> tuple[str, ...]:
        """What is to be said of a window that goes on where the trace has ended, and of parts of cores."""
        rounded = _rounded("its tasks want {:+.0%} of work", self.core_s, self.asked_core_s)
        if not self.last_s < to_s < math.inf:
            return rounded
        last = f"the last job of the trace comes at {self.last_s:g} s"
        return (*rounded, f"what is measured ends at {to_s:g} s, and {last}")


def known(
    trace: Input,
    before_s: float = math.inf,
    most_cores: float = math.inf,
    window_s: tuple[float, float] = (-math.inf, math.inf),
    memory: bool = True,
) -> Facts:
    """What a trace of jobs is; read once, and then kept in the cache.

    :param most_cores: of a machine: what wants more is refused, and is no work.
    :param window_s: of which `Facts.within` is to tell.
    :param memory: whether memory counts.
    :raises InvalidParameter: it has no jobs, one without cores or with a number that no run takes, or is of another
        kind.
    """

    def make() -> dict[str, Any]:
        jobs, measured, all_tasks, last_s, sums = 0, 0, 0, 0.0, [0.0, 0.0, 0.0]
        for batch in trace.batches(JobBatch, "jobs", from_first=True):
            if not len(batch):
                continue
            jobs, last_s = jobs + len(batch), float(batch.submit_s[-1])
            measured += int(((batch.submit_s >= window_s[0]) & (batch.submit_s < window_s[1])).sum())
            tasks = batch.task_runtime_s
            all_tasks += int(tasks.lengths.sum())
            if batch.cpu_cores.min() <= 0:
                job = batch.id[int(batch.cpu_cores.argmin())]
                raise InvalidParameter(f"{INPUTS}.jobs", f"has a job without cores: {job} (cpu_cores must be above 0)")
            cores, task_s = rounded_up(batch.cpu_cores), tasks.values[tasks.offsets[0] : tasks.offsets[-1]]
            _judge("jobs", cpu_cores=batch.cpu_cores, task_runtime_s=task_s)
            if memory:
                _judge("jobs", memory_mib=batch.memory_mib[~np.isnan(batch.memory_mib)])
            fits = cores <= most_cores
            core_s = np.repeat(np.where(fits, cores, 0.0), tasks.lengths) * task_s
            asked = np.repeat(np.where(fits, batch.cpu_cores, 0.0), tasks.lengths) * task_s
            early = np.repeat(batch.submit_s < before_s, tasks.lengths)
            found = (float(one.sum()) for one in (core_s, core_s[early], asked))
            sums = [before + more for before, more in zip(sums, found, strict=True)]
        return {"facts": np.array([jobs, all_tasks, last_s, *sums, measured])}

    terms = (before_s, most_cores, window_s, memory)
    jobs, all_tasks, last_s, core_s, early, asked, measured = _kept("jobs", trace, terms, make)["facts"].tolist()
    if not jobs:
        raise InvalidParameter("jobs", "are none")
    return Facts(int(jobs), int(all_tasks), last_s, core_s, early, before_s, asked, int(measured))


@dataclass(frozen=True, slots=True)
class Supply:
    """A trace of capacity: cores of its largest machine, and the most memory that one has (None: as much as anybody
    wants); cores of all machines on average, whole ones and (``said_cores``) as the trace has them; its last change."""

    most_cores: int
    most_mib: int | None
    mean_cores: float
    last_s: float
    said_cores: float

    def beyond(self, to_s: float) -> tuple[str, ...]:
        """What is to be said of a window that goes on where the trace has ended, and of parts of cores."""
        rounded = _rounded("its machines have {:+.0%} of capacity", self.mean_cores, self.said_cores)
        if not self.last_s < to_s < math.inf:
            return rounded
        last = f"the last change of the trace of capacity comes at {self.last_s:g} s"
        return (*rounded, f"{last}; from then to {to_s:g} s {STAY}")


def _rounded(what: str, whole: float, said: float) -> tuple[str, ...]:
    """What is to be said where parts of cores are much of a trace: tasks get whole ones, and parts serve none."""
    if not said or abs(whole / said - 1.0) <= _ROUNDING:
        return ()
    words = what.format(whole / said - 1.0)
    return (f"in whole cores {words} of what the trace says: a larger unit may fit (Google's traces: machine_cores)",)


def supplied(trace: Input, from_s: float, until_s: float, memory: bool = True) -> Supply:
    """What a trace of capacity gives in a window of so many seconds; read once, and then kept in the cache.

    :param from_s: of the trace, what is time 0 of the run.
    :param memory: whether memory counts.
    :raises InvalidParameter: it has no machines or a number that no run takes, or ends before the window begins.
    """

    def make() -> dict[str, Any]:
        most = most_mib = total = area = now_s = last_s = 0.0
        said_total = said_area = 0.0
        cores: dict[str, tuple[float, float]] = {}
        for batch in since(trace.batches(CapacityBatch, "capacity", from_first=True), from_s):
            _judge("capacity", cpu_cores=batch.cpu_cores)
            if memory:
                _judge("capacity", memory_mib=batch.memory_mib[~np.isnan(batch.memory_mib)])
            whole = rounded_down(batch.cpu_cores)
            # What is off serves nobody, whatever it is said to have.
            memory_mib = np.nan_to_num(batch.memory_mib[whole > 0], nan=math.inf)
            most_mib = max(most_mib, float(memory_mib.max(initial=0.0)))
            # Jobs run on whole cores, and of those is their load a share.
            rows = zip(batch.machine, batch.at_s.tolist(), whole.tolist(), batch.cpu_cores.tolist(), strict=True)
            for name, at_s, size, said in rows:
                last_s = at_s
                most = max(most, size)
                if at_s < until_s:
                    area += total * (at_s - now_s)
                    said_area += said_total * (at_s - now_s)
                    had, had_said = cores.get(name, (0.0, 0.0))
                    now_s, total, said_total = at_s, total + size - had, said_total + said - had_said
                    cores[name] = size, said
        means = [total, said_total]
        if 0 < until_s < math.inf:
            rest_s = until_s - now_s
            means = [(area + total * rest_s) / until_s, (said_area + said_total * rest_s) / until_s]
        return {"facts": np.array([most, most_mib, *means, last_s])}

    most, most_mib, mean, said, last_s = _kept("capacity", trace, (from_s, until_s, memory), make)["facts"].tolist()
    mib = math.floor(most_mib + 1e-9) if math.isfinite(most_mib) else None
    return Supply(int(most), mib, mean, last_s, said)


def _judge(name: str, **columns: Floats) -> None:
    """What each run would refuse, before the first one. Raises InvalidParameter."""
    for field, values in columns.items():
        try:
            sound(field, values, 0.0)
        except InvalidParameter as error:
            raise InvalidParameter(f"{INPUTS}.{name}", f"has a {field} that {error.problem}") from error


def since(batches: Iterable[CapacityBatch], from_s: float) -> Iterator[CapacityBatch]:
    """Changes from ``from_s`` on, which becomes time 0; what machines were before is what they begin with.

    A machine's memory is what was last said of it: NaN, as much as anybody wants, only where nothing was.

    :raises InvalidParameter: there are none so late.
    """
    held: CapacityBatch | None = None
    begun = False
    for batch in _remembered(batches):
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


def _remembered(batches: Iterable[CapacityBatch]) -> Iterator[CapacityBatch]:
    """The same with the memory that a machine was last said to have in rows that leave it out."""
    said: dict[str, float] = {}
    for batch in batches:
        memory_mib = batch.memory_mib.copy()
        for row, (name, cores, mib) in enumerate(
            zip(batch.machine, batch.cpu_cores.tolist(), memory_mib.tolist(), strict=True)
        ):
            if math.isnan(mib):
                memory_mib[row] = said.get(name, math.nan)
            elif cores > 0:
                said[name] = mib
        yield replace(batch, memory_mib=memory_mib)


def _last_of_each(batch: CapacityBatch) -> CapacityBatch:
    """The last row of each machine, in the order of their first ones."""
    last = {name: row for row, name in enumerate(batch.machine)}
    return batch.take(np.array(list(last.values()), np.int64))


def _kept(kind: str, trace: Input, terms: Any, make: Callable[[], dict[str, Any]]) -> SharedArrays:
    what = [kind, _VERSION, fingerprint(trace.path), trace.format, dict(trace.options), trace.order, str(terms)]
    return shared_arrays(what, make)
