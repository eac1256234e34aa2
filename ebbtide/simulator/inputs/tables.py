"""Formats with a row a line, as data: columns, the rules on their values, and what a well-formed row becomes.

The rules are applied to whole columns, whichever way the text became columns (`columnwise`, `linewise`); those two only
agree on what a number, a text and a choice look like.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np

from ebbtide.simulator.errors import InvalidParameter, TraceError
from ebbtide.simulator.inputs.batches import Batch, Floats, Index, Indices, Mask, Ragged
from ebbtide.simulator.inputs.report import Fault, Report

#: No trace holds a larger number; sums and products of smaller ones stay finite.
LARGEST: Final = 1e20


class Form(Enum):
    """What a cell holds, and as what its column comes out."""

    #: A decimal number, NaN where the cell is empty.
    NUMBER = "number"
    TEXT = "text"
    #: One of a few texts: its place among them as a float, NaN where the cell is empty.
    CHOICE = "choice"
    #: Numbers with ``;`` between them: `Ragged`.
    LIST = "list"
    #: A calendar time, UTC where it names no zone: seconds since the epoch. In Parquet a number is milliseconds.
    TIME = "time"
    #: Not read at all.
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a format and the rules on it.

    :param optional: it may be empty, or missing from a header.
    :param spelled: words that stand for numbers.
    :param aliases: other names that headers give it.
    """

    name: str
    form: Form = Form.NUMBER
    minimum: float | None = None
    maximum: float | None = None
    whole: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    spelled: Mapping[str, float] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows as columns by name, and the line that each row stands in."""

    columns: Mapping[str, Any]
    lines: Indices
    #: Lines, well formed or not, that go on behind the format's last column.
    longer: int = 0

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def take(self, index: Index) -> Table:
        """The rows that are chosen."""
        return Table({name: values[index] for name, values in self.columns.items()}, self.lines[index])

    def number(self, name: str) -> Floats:
        """A column of numbers; NaN throughout where the file has none of that name."""
        values: Floats = self.columns[name] if name in self.columns else np.full(len(self), np.nan)
        return values


@dataclass(frozen=True, slots=True)
class Check:
    """A rule between fields.

    :param field: the field that an error names.
    :param bad: which rows break it.
    """

    field: str
    problem: str
    bad: Callable[[Table], Mask]


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch and the line that each of its rows comes from."""

    batch: Batch
    lines: Indices


#: Options of formats: numbers and words by name, as a caller or the command line states them.
Options: TypeAlias = Mapping[str, float | str]


class Builder(ABC):
    """Makes rows of well-formed lines. Of formats of events it remembers what is under way.

    :param options: the format's own, checked, with all defaults.
    """

    def __init__(self, options: Options, report: Report) -> None:
        self.options = options
        self.report = report

    @abstractmethod
    def add(self, table: Table) -> Rows | None:
        """The rows that are complete with these lines."""

    def end(self) -> Rows | None:
        """The rows that are complete with the end of the file."""
        return None

    def column(self, table: Table, name: str) -> Floats:
        """A column that an option asks for.

        :raises TraceError: the file has none of that name.
        """
        if name not in table:
            raise TraceError(self.report.file, "is missing from the header", line=1, field=name)
        return table.number(name)

    def skip(self, table: Table, reasons: Mapping[str, Mask]) -> Table:
        """Leave out well-formed lines that are no row, counted by the first reason that holds."""
        kept = np.ones(len(table), bool)
        for reason, mask in reasons.items():
            count = int((kept & mask).sum())
            if count:
                self.report.skipped[reason] += count
                kept &= ~mask
        return table if kept.all() else table.take(kept)


#: How unordered files are treated: a bounded buffer, or a sort over temporary files.
BUFFER: Final = "buffer"
SORT: Final = "sort"


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    :param title: what it is, for help and docs.
    :param kind: of the rows (`batches.KINDS`).
    :param columns: in the order of a line; with a header, in any order.
    :param header: whether its first line names the columns: ``none``, ``required`` or ``optional``.
    :param delimiter: between fields; None: any white space.
    :param comment: what a comment begins with.
    :param split: turns a line into the cells of ``columns``, where a delimiter is not enough; raises `Malformed`.
    :param defaults: its options.
    :param order: what is known of the order of public files.
    :param expands: the column that says how many values a line becomes: lines are built in portions by it.
    :param longer: lines may go on behind the last column; what stands there is not read, and that is counted.
    :param calendar: times are instants, and become seconds from the first row.
    :param pairs: of formats of events: makes rows of what the builder gives, which is put in order before.
    """

    name: str
    title: str
    kind: str
    columns: tuple[Column, ...]
    builder: type[Builder]
    header: str = "none"
    delimiter: bytes | None = b","
    comment: bytes | None = None
    split: Callable[[bytes], list[bytes]] | None = None
    checks: tuple[Check, ...] = ()
    defaults: Mapping[str, float | str] = field(default_factory=dict)
    order: str = BUFFER
    calendar: bool = False
    expands: str | None = None
    unit: str | None = None
    longer: bool = False
    pairs: Callable[[Iterable[Batch], Options, Report], Iterator[Rows]] | None = None


class Malformed(Exception):
    """What a `split` raises about its line."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


def checked_options(format_name: str, defaults: Options, given: Options) -> Options:
    """Options with their defaults; words stay words, numbers must be finite.

    :raises InvalidParameter: an unknown one, or no number where one is asked for.
    """
    merged = dict(defaults)
    for name, value in given.items():
        if name not in defaults:
            known = ", ".join(defaults) if defaults else "none"
            raise InvalidParameter(name, f"is no option of the format {format_name} (it has: {known})")
        if not isinstance(defaults[name], str):
            try:
                value = float(value)
            except ValueError:
                raise InvalidParameter(name, f"must be a number, not {value!r}") from None
            if not np.isfinite(value) or value < 0:
                raise InvalidParameter(name, f"must be finite and not negative, not {value:g}")
        merged[name] = value
    return merged


def judge(columns: Sequence[Column], checks: Sequence[Check], table: Table) -> tuple[Table, list[Fault]]:
    """Apply the rules; of a row that breaks several the first column's counts.

    :returns: the well-formed rows, and a fault for every other.
    """
    faults: list[Fault] = []
    good = np.ones(len(table), bool)

    def blame(bad: Mask, name: str, problem: Callable[[int], str]) -> None:
        bad = bad & good
        if bad.any():
            good[bad] = False
            faults.extend(Fault(int(table.lines[i]), name, problem(int(i))) for i in np.flatnonzero(bad))

    for column in columns:
        if column.name in table and column.form is not Form.IGNORED:
            _judge_column(column, table[column.name], blame)
    for check in checks:
        blame(check.bad(table), check.field, lambda i, check=check: check.problem)  # type: ignore[misc]
    return (table, faults) if good.all() else (table.take(good), sorted(faults))


def _judge_column(column: Column, values: Any, blame: Callable[[Mask, str, Callable[[int], str]], None]) -> None:
    if column.form is Form.LIST:
        _judge_list(column, values, blame)
        return
    empty = values == "" if column.form is Form.TEXT else np.isnan(values)
    if not column.optional:
        blame(np.asarray(empty, bool), column.name, lambda i: "is empty")
    if column.form is Form.TEXT:
        return
    blame(np.abs(values) > LARGEST, column.name, lambda i: f"is {values[i]:.12g}, beyond {LARGEST:g}")
    if column.form is Form.CHOICE:
        beyond = values >= len(column.choices)
        blame(beyond, column.name, lambda i: f"is none of {', '.join(column.choices)}")
    if column.minimum is not None:
        least = column.minimum
        blame(values < least, column.name, lambda i: f"is {values[i]:.12g}, below {least:.12g}")
    if column.maximum is not None:
        most = column.maximum
        blame(values > most, column.name, lambda i: f"is {values[i]:.12g}, above {most:.12g}")
    if column.whole:
        blame(~empty & (values != np.floor(values)), column.name, lambda i: f"is {values[i]:.12g}, no whole number")


def _judge_list(column: Column, values: Ragged, blame: Callable[[Mask, str, Callable[[int], str]], None]) -> None:
    least = -LARGEST if column.minimum is None else column.minimum
    blame(values.lengths == 0, column.name, lambda i: "is empty or has something that is no number")
    rows = np.repeat(np.arange(len(values)), values.lengths)
    for wrong, problem in (
        (values.values > LARGEST, f"has a number beyond {LARGEST:g}"),
        (values.values < least, f"has a number below {least:.12g}"),
    ):
        bad = np.zeros(len(values), bool)
        bad[rows[wrong]] = True
        blame(bad, column.name, lambda i, problem=problem: problem)  # type: ignore[misc]
