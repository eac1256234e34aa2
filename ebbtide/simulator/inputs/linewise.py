"""Text to columns line by line: slow, and exact about what is wrong where."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from ebbtide.simulator.inputs.batches import Indices, Ragged
from ebbtide.simulator.inputs.report import Fault
from ebbtide.simulator.inputs.tables import Column, Form, Format, Malformed, Table

_NUMBER: Final = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_SHOWN: Final = 40


def parse(
    form: Format, layout: Sequence[Column], lines: Sequence[bytes], numbers: Indices
) -> tuple[Table, list[Fault]]:
    """Turn lines into columns.

    :param numbers: the line number of each.
    :returns: the rows whose cells could be read, not yet judged, and a fault for each other line.
    """
    cells: dict[str, list[Any]] = {c.name: [] for c in layout if c.form is not Form.IGNORED}
    faults: list[Fault] = []
    good: list[int] = []
    longer = 0
    for number, line in zip(numbers.tolist(), lines, strict=True):
        try:
            found = split(form, layout, line)
            longer += len(found) > len(layout)
            values = [
                (column, _value(column, cell))
                for column, cell in zip(layout, found, strict=False)
                if column.form is not Form.IGNORED
            ]
        except Malformed as error:
            faults.append(Fault(number, error.field, error.problem))
            continue
        for column, value in values:
            cells[column.name].append(value)
        good.append(number)
    columns = {c.name: _column(c, cells[c.name]) for c in layout if c.form is not Form.IGNORED}
    return Table(columns, np.array(good, np.int64), longer), faults


def split(form: Format, layout: Sequence[Column], line: bytes) -> list[bytes]:
    """The cells of a line: as many as the format has, or more where it lets lines go on.

    :raises Malformed: not so many.
    """
    if form.split is not None:
        cells = form.split(line)
    elif form.delimiter is None:
        cells = line.split()
    elif b'"' in line:
        cells = quoted(layout[0].name, line, form.delimiter)
    else:
        cells = line.split(form.delimiter)
    if len(cells) < len(layout):
        raise Malformed(layout[len(cells)].name, f"is missing: the line has {len(cells)} of {len(layout)} fields")
    if len(cells) > len(layout) and not form.longer:
        raise Malformed(layout[-1].name, f"is followed by {len(cells) - len(layout)} fields too many")
    return cells


def number(column: str, cell: bytes) -> float:
    """A decimal number; NaN for an empty cell.

    :raises Malformed: anything else.
    """
    cell = cell.strip(b" \t")
    if not cell:
        return math.nan
    if _NUMBER.fullmatch(cell) is None:
        raise Malformed(column, f"is {shown(cell)}, not a number")
    value = float(cell)
    if not math.isfinite(value):
        raise Malformed(column, f"is {shown(cell)}, too large for a number")
    return value


def instant(column: str, cell: bytes) -> float:
    """Seconds since the epoch of a calendar time; NaN for an empty cell.

    :raises Malformed: anything else.
    """
    word = text(column, cell).strip()
    if not word:
        return math.nan
    try:
        moment = datetime.fromisoformat(word)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        # In UTC it must still be a year that there is: the report names the first row's instant.
        return moment.astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        raise Malformed(column, f"is {shown(cell)}, not a time such as 2021-01-31 23:30:00") from None


def text(column: str, cell: bytes) -> str:
    """A text.

    :raises Malformed: not UTF-8.
    """
    try:
        return cell.decode()
    except UnicodeDecodeError:
        raise Malformed(column, f"is {shown(cell)}, not UTF-8") from None


def shown(cell: bytes) -> str:
    """A cell as an error shows it: cut off where it is long, and harmless on a terminal."""
    word = cell[:_SHOWN].decode("utf-8", "replace")
    return f"{word!a}{'...' if len(cell) > _SHOWN else ''}"


def quoted(field: str, line: bytes, delimiter: bytes) -> list[bytes]:
    """The cells of a line that has quotes.

    :param field: what an error names.
    :raises Malformed: a quote is not closed, or not UTF-8.
    """
    try:
        (cells,) = csv.reader([line.decode()], delimiter=delimiter.decode(), strict=True)
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        raise Malformed(field, f"or a later field has broken quotes: {error}") from None
    return [cell.encode() for cell in cells]


def _value(column: Column, cell: bytes) -> Any:
    if column.form is Form.TEXT:
        return text(column.name, cell)
    if column.form is Form.CHOICE:
        word = text(column.name, cell)
        if word == "":
            return math.nan
        if word not in column.choices:
            raise Malformed(column.name, f"is {shown(cell)}, none of {', '.join(column.choices)}")
        return float(column.choices.index(word))
    if column.form is Form.TIME:
        return instant(column.name, cell)
    if column.form is Form.LIST:
        if not cell:
            return []
        values = [number(column.name, part) for part in cell.split(b";")]
        if any(math.isnan(v) for v in values):
            raise Malformed(column.name, "has an empty place between its numbers")
        return values
    if column.spelled and (word := text(column.name, cell)) in column.spelled:
        return column.spelled[word]
    return number(column.name, cell)


def _column(column: Column, values: list[Any]) -> Any:
    if column.form is Form.LIST:
        flat = np.array([v for row in values for v in row], np.float64)
        return Ragged.of(flat, np.array([len(row) for row in values], np.int64))
    if column.form is Form.TEXT:
        texts = np.empty(len(values), object)
        texts[:] = values
        return texts
    return np.array(values, np.float64)
