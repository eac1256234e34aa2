"""Batches of columns, as every reader and generator gives them: times in seconds from the trace's start.

A batch is a frozen set of NumPy arrays of one length, one row a VM, job, change or sample. What a trace does not say is
NaN, an empty text, or `UNKNOWN`. Rows are ordered by their time (`KEY` of each class).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Hints: TypeAlias = NDArray[np.int8]
Texts: TypeAlias = NDArray[np.object_]
Indices: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Index: TypeAlias = Indices | Mask | slice

#: Priority hints: what a trace says or suggests of a row's priority.
UNKNOWN: Final = 0
LOW: Final = 1
HIGH: Final = 2
HINTS: Final = ("unknown", "low", "high")


@dataclass(frozen=True, slots=True)
class Ragged:
    """A column of lists of floats: row i is ``values[offsets[i] : offsets[i + 1]]``."""

    values: Floats
    #: One more than rows, from 0 on.
    offsets: Indices

    @classmethod
    def of(cls, values: Floats, lengths: Indices) -> Ragged:
        """Rows of ``lengths`` values each, one after another in ``values``."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def single(cls, values: Floats) -> Ragged:
        """One value a row."""
        return cls(values, np.arange(len(values) + 1, dtype=np.int64))

    @classmethod
    def equal(cls, values: Floats, counts: Floats) -> Ragged:
        """``counts[i]`` times ``values[i]`` in row i."""
        lengths = counts.astype(np.int64)
        return cls.of(np.repeat(values, lengths), lengths)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """All rows of ``parts``, in order."""
        values = np.concatenate([p.values for p in parts])
        return cls.of(values, np.concatenate([p.lengths for p in parts]))

    @property
    def lengths(self) -> Indices:
        """How many values each row has."""
        return np.diff(self.offsets)

    def row(self, i: int) -> Floats:
        """The values of one row."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def means(self) -> Floats:
        """The mean of each row; no row may be empty."""
        return np.add.reduceat(self.values, self.offsets[:-1]) / self.lengths if len(self) else np.empty(0)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Index) -> Ragged:
        if isinstance(index, slice) and index.step in (None, 1):
            begin, end, _ = index.indices(len(self))
            offsets = self.offsets[begin : max(begin, end) + 1]
            return Ragged(self.values[offsets[0] : offsets[-1]], from_zero(offsets))
        starts, lengths = self.offsets[:-1][index], self.lengths[index]
        taken = Ragged.of(self.values, lengths)
        places = np.arange(int(taken.offsets[-1])) + np.repeat(starts - taken.offsets[:-1], lengths)
        return Ragged(self.values[places], taken.offsets)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one kind, column by column."""

    KIND: ClassVar[str] = ""
    #: The column by which rows are ordered.
    KEY: ClassVar[str] = ""
    #: Columns of times, which all move when a trace is shifted to its own start.
    TIMES: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def keys(self) -> Floats:
        """The times that order the rows; s."""
        keys: Floats = getattr(self, self.KEY)
        return keys

    @property
    def weight(self) -> int:
        """What bounds of memory count: rows, or what they hold where that is more."""
        return len(self)

    def portions(self, most: int) -> Iterator[Self]:
        """The same rows in pieces of a weight of at most ``most``, or of one row."""
        for start in range(0, len(self), most):
            yield self.take(slice(start, start + most)) if len(self) > most else self

    def take(self, index: Index) -> Self:
        """The rows that ``index`` chooses, in its order."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def shifted(self, by_s: float | Floats) -> Self:
        """The same rows ``by_s`` seconds later, all alike or each by its own."""
        return replace(self, **{name: getattr(self, name) + by_s for name in self.TIMES})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All rows of ``parts``, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(**{f.name: _joined([getattr(p, f.name) for p in parts]) for f in fields(cls)})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each row as a mapping of column to a Python value, for reading and small scripts."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        for i in range(len(self)):
            yield {
                name: values.row(i).tolist() if isinstance(values, Ragged) else _plain(values[i])
                for name, values in columns.items()
            }


@dataclass(frozen=True, slots=True)
class VmBatch(Batch):
    """Arrivals of VMs."""

    KIND: ClassVar[str] = "vms"
    KEY: ClassVar[str] = "arrives_s"
    TIMES: ClassVar[tuple[str, ...]] = ("arrives_s", "departs_s")

    id: Texts
    #: Who came together: a tenant's batch or deployment; empty where nothing is said.
    group: Texts
    arrives_s: Floats
    #: NaN: not seen to depart, as good as still there when the trace ends.
    departs_s: Floats
    cpu_cores: Floats
    #: NaN: not said.
    memory_mib: Floats
    priority: Hints
    #: Mean share of its cores that the VM used, 0 to 1; NaN: not said.
    utilisation: Floats


@dataclass(frozen=True, slots=True)
class JobBatch(Batch):
    """Submissions of jobs: one or more tasks, each of which holds ``cpu_cores`` while it runs."""

    KIND: ClassVar[str] = "jobs"
    KEY: ClassVar[str] = "submit_s"
    TIMES: ClassVar[tuple[str, ...]] = ("submit_s",)

    id: Texts
    group: Texts
    submit_s: Floats
    #: Mean runtime of the job's tasks.
    runtime_s: Floats
    #: Of one task.
    cpu_cores: Floats
    #: Of one task; NaN: not said.
    memory_mib: Floats
    priority: Hints
    #: The runtime that the user stated; NaN: none.
    requested_s: Floats
    #: Runtimes of the job's tasks; no row is empty.
    task_runtime_s: Ragged

    @property
    def weight(self) -> int:
        return len(self.task_runtime_s.values)

    def portions(self, most: int) -> Iterator[Self]:
        offsets = from_zero(self.task_runtime_s.offsets)
        for start, end in slices(offsets[1:], most):
            yield self.take(slice(start, end)) if end - start < len(self) else self


@dataclass(frozen=True, slots=True)
class EstimatedJobBatch(JobBatch):
    """Jobs with an estimate of each task's runtime, right or wrong."""

    #: As many in each row as it has tasks.
    task_estimate_s: Ragged


@dataclass(frozen=True, slots=True)
class CapacityBatch(Batch):
    """Changes of machines: from ``at_s`` on the machine has ``cpu_cores``; 0 is off or gone."""

    KIND: ClassVar[str] = "capacity"
    KEY: ClassVar[str] = "at_s"
    TIMES: ClassVar[tuple[str, ...]] = ("at_s",)

    machine: Texts
    at_s: Floats
    cpu_cores: Floats
    #: NaN: not said.
    memory_mib: Floats


@dataclass(frozen=True, slots=True)
class SeriesBatch(Batch):
    """A value over time, which holds until the next: price, availability, intensity, power."""

    KIND: ClassVar[str] = "series"
    KEY: ClassVar[str] = "at_s"
    TIMES: ClassVar[tuple[str, ...]] = ("at_s",)

    at_s: Floats
    value: Floats


KINDS: Final[dict[str, type[Batch]]] = {k.KIND: k for k in (VmBatch, JobBatch, CapacityBatch, SeriesBatch)}
#: Columns of text; `task_runtime_s` holds lists, `priority` hints, all others are floats.
TEXTS: Final = ("id", "group", "machine")


def texts(values: Iterable[str]) -> Texts:
    """A column of texts."""
    return np.array(list(values), dtype=object)


def same(value: object, count: int) -> Texts:
    """A column of ``count`` times the same text."""
    column: Texts = np.empty(count, dtype=object)
    column[:] = value
    return column


def unknown(count: int) -> Floats:
    """A column of numbers that the trace does not say."""
    return np.full(count, np.nan)


def hints(count: int, hint: int = UNKNOWN) -> Hints:
    """A column of one priority hint."""
    return np.full(count, hint, dtype=np.int8)


def from_zero(offsets: Indices) -> Indices:
    """Where rows begin and end, counted from the beginning of the first: most are already, and stay as they are."""
    return offsets - offsets[0] if offsets[0] else offsets


def slices(upto: Indices, most: int) -> Iterator[tuple[int, int]]:
    """Cut rows into pieces of a total weight of at most ``most``, or of one row: begin and end of each.

    :param upto: the weight of all rows to each, itself included.
    """
    start = before = 0
    while start < len(upto):
        end = max(int(np.searchsorted(upto, before + most, side="right")), start + 1)
        yield start, end
        start, before = end, int(upto[end - 1])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _joined(parts: list[Any]) -> Any:
    return Ragged.joined(parts) if isinstance(parts[0], Ragged) else np.concatenate(parts)
