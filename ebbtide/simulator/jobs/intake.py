"""Batches of traces and generators as the rows that the loop reads; checked before anything of them happens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import HIGH, LOW, CapacityBatch, EstimatedJobBatch, JobBatch, from_zero
from ebbtide.simulator.jobs import columns as c
from ebbtide.simulator.jobs.columns import Floats, Ints
from ebbtide.simulator.jobs.settings import Settings

#: By priority hint: unknown, low, high.
_RANKS: Final = np.array([1, 2, 0], np.int64)
assert (LOW, HIGH) == (1, 2)
#: Jobs whose core-time is within a quarter of each other share a class; class 0 goes up to a core-second.
CLASSES: Final = 128
CLASS_GROWTH: Final = 1.25
#: What rounding leaves above a whole number of cores is no core more.
_TOLERANCE: Final = 1e-9
_MOST: Final = 1 << 40
#: Cores up to which demands stand in a table.
_TABLE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class JobRows:
    """Fields as the State's."""

    in_at: Floats
    in_queue: Ints
    in_offsets: Ints
    in_runtime: Floats
    in_estimate: Floats
    #: Demands that no job had before: rank, cores, MiB.
    demands: Ints


class Demands:
    """Which queue a demand has: tasks of one rank that want as many cores and as much memory wait in one."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}
        #: The same as a table of [rank, cores], for jobs that say nothing of memory; -1: none yet.
        self._table = np.full((CLASSES, 64), -1, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def restore(self, demands: Ints) -> None:
        """The queues that there were."""
        self._add(demands)

    def queues(self, rank: Ints | None, cores: Ints, memory_mib: Ints | None) -> tuple[Ints, Ints]:
        """The queue of each job, and the demands that are new; None: 0 for all."""
        most = int(cores.max(initial=0))
        if memory_mib is not None or most > _TABLE:
            zeros = np.zeros(len(cores), np.int64)
            columns = (zeros if rank is None else rank, cores, zeros if memory_mib is None else memory_mib)
            found, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
            fresh = self._add(found)
            numbers = np.array([self._numbers[_key(row)] for row in found.tolist()], np.int64)
            return np.ascontiguousarray(numbers[inverse.ravel()]), fresh
        self._widen(most)
        fresh = np.empty((0, 3), np.int64)
        numbers = self._table[0][cores] if rank is None else self._table[rank, cores]
        if numbers.min() < 0:
            missing = numbers < 0
            ranks = np.zeros(int(missing.sum()), np.int64) if rank is None else rank[missing]
            # As one number each: rows take a hundred times as long to sort.
            ranks, wanted = np.divmod(np.unique(ranks * (most + 1) + cores[missing]), most + 1)
            fresh = self._add(np.stack([ranks, wanted, np.zeros_like(ranks)], axis=1))
            numbers = self._table[0][cores] if rank is None else self._table[rank, cores]
        return numbers, fresh

    def _widen(self, cores: int) -> None:
        if cores >= self._table.shape[1]:
            wider = np.full((CLASSES, 2 * cores), -1, np.int64)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider

    def _add(self, demands: Ints) -> Ints:
        fresh = [row for row in demands.tolist() if _key(row) not in self._numbers]
        for row in fresh:
            number = self._numbers[_key(row)] = len(self._numbers)
            if row[2] == 0 and row[1] <= _TABLE:
                self._widen(row[1])
                self._table[row[0], row[1]] = number
        return np.array(fresh, np.int64).reshape(len(fresh), 3)


def _key(row: list[int]) -> tuple[int, int, int]:
    return row[0], row[1], row[2]


def job_rows(batch: JobBatch, settings: Settings, demands: Demands, before_s: float) -> JobRows:
    """Jobs as rows.

    :param before_s: none may be submitted before.
    :raises InvalidParameter: jobs out of order, runtimes that are negative or no numbers, cores that are not positive.
    """
    submit_s = _own(batch.submit_s)
    _in_order("submit_s", submit_s, before_s)
    tasks = batch.task_runtime_s
    offsets = np.require(from_zero(tasks.offsets), np.int64, ["C", "W"])
    if not (offsets[1:] > offsets[:-1]).all():
        raise InvalidParameter("task_runtime_s", "must not be empty")
    runtime_s = _own(tasks.values[tasks.offsets[0] : tasks.offsets[-1]])
    sound("task_runtime_s", runtime_s, 0.0)
    cores = whole("cpu_cores", batch.cpu_cores, least=1)
    memory_mib = None
    if settings.memory and not (unsaid := np.isnan(batch.memory_mib)).all():
        memory_mib = whole("memory_mib", np.where(unsaid, 0.0, batch.memory_mib), least=0)
    rank = _RANKS[batch.priority] if settings.priorities else None
    estimate_s = runtime_s
    if settings.estimates == "requested":
        requested_s = np.repeat(batch.requested_s, np.diff(offsets))
        estimate_s = np.where(np.isfinite(requested_s) & (requested_s > 0), requested_s, runtime_s)
    if isinstance(batch, EstimatedJobBatch):
        said = batch.task_estimate_s
        if (said.lengths != tasks.lengths).any():
            raise InvalidParameter("task_estimate_s", "must have one for each task")
        estimate_s = _own(said.values[said.offsets[0] : said.offsets[-1]])
        sound("task_estimate_s", estimate_s, 0.0)
    if settings.by_length:
        if len(runtime_s) != len(cores):
            raise InvalidParameter("by_length", "goes with jobs of one task each")
        rank = length_class(runtime_s * cores)
    queue, fresh = demands.queues(rank, cores, memory_mib)
    return JobRows(submit_s, queue, offsets, runtime_s, estimate_s, fresh)


def length_class(core_s: Floats) -> Ints:
    """The class of jobs of so much core-time a task: class k holds [CLASS_GROWTH^k, CLASS_GROWTH^(k+1))."""
    logs = np.log(np.maximum(core_s, 1.0)) / math.log(CLASS_GROWTH)
    return np.asarray(np.minimum(np.floor(logs), CLASSES - 1), np.int64)


def change_rows(
    batch: CapacityBatch, settings: Settings, numbers: dict[str, int], before_s: float
) -> tuple[Floats, Ints]:
    """Changes of machines as times and rows: machine, cores, MiB. Whole cores only: a part of one serves no task.

    :param numbers: machines by name; new ones are added.
    :raises InvalidParameter: changes out of order, or sizes that are negative or no numbers.
    """
    at_s = _own(batch.at_s)
    _in_order("at_s", at_s, before_s)
    rows = np.empty((len(batch), c.CHANGE_INTS), np.int64)
    rows[:, 0] = [numbers.setdefault(name, len(numbers)) for name in batch.machine]
    sound("cpu_cores", batch.cpu_cores, 0.0)
    rows[:, 1] = rounded_down(batch.cpu_cores)
    rows[:, 2] = c.UNLIMITED_MIB
    if settings.memory:
        said = ~np.isnan(batch.memory_mib)
        sound("memory_mib", batch.memory_mib[said], 0.0)
        rows[said, 2] = np.floor(batch.memory_mib[said] + _TOLERANCE)
    return at_s, rows


def whole(field: str, values: Any, least: int) -> Ints:
    """Numbers rounded up: a task that wants a part of a core gets a whole one."""
    numbers = np.asarray(values, np.float64)
    lowest = sound(field, numbers, 0.0)
    if least and lowest <= 0:
        raise InvalidParameter(field, "must be above 0")
    return rounded_up(numbers, least).astype(np.int64)


def rounded_up(numbers: Floats, least: int = 1) -> Floats:
    """The same of numbers that are taken as they are."""
    found = numbers - _TOLERANCE
    np.ceil(found, out=found)
    return np.maximum(found, least, out=found)


def rounded_down(numbers: Floats) -> Floats:
    """Whole cores of a machine: a part of one serves no task."""
    return np.floor(numbers + _TOLERANCE)


def skipped(batches: Iterator[Any], rows: int) -> Iterator[Any]:
    """The same without the first so many rows."""
    for batch in batches:
        if rows >= len(batch):
            rows -= len(batch)
            continue
        yield batch.take(slice(rows, None)) if rows else batch
        rows = 0


def _own(values: Any) -> Floats:
    """An array as the loop was compiled for: in one piece, and not read-only."""
    return np.require(values, np.float64, ["C", "W"])


def sound(field: str, values: NDArray[np.float64], least: float) -> float:
    """The lowest of values that are numbers from ``least`` on; infinite: there are none."""
    if not len(values):
        return math.inf
    # What is no number is the least and the most at once; only then is it looked for.
    low = float(values.min())
    if not (low >= least and values.max() < _MOST):
        wrong = values[~((values >= least) & (values < _MOST))]
        problem = f"must be a number from {least:g} to below {_MOST:.2g}, but is {wrong[0]:g}"
        raise InvalidParameter(field, problem)
    return low


def _in_order(field: str, times: Floats, before_s: float) -> None:
    if not len(times):
        return
    # In order, and so finite if the first and the last are; NaN is in no order.
    if not (math.isfinite(times[0]) and math.isfinite(times[-1]) and (times[1:] >= times[:-1]).all()):
        raise InvalidParameter(field, "must be finite and in order")
    if times[0] < before_s:
        raise InvalidParameter(field, f"must be in order, but {times[0]:.12g} comes after {before_s:.12g}")
