"""From a file's lines to rows, by the rules of its format: counted, judged, built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs import columnwise, linewise, sources
from ebbtide.simulator.inputs.batches import Indices, slices
from ebbtide.simulator.inputs.report import Fault, Report
from ebbtide.simulator.inputs.tables import Builder, Column, Form, Format, Malformed, Rows, Table, judge

#: Lines below which it does not pay to look for those that a faulty one spoils.
_FEW: Final = 64
#: Values that lines become at a time.
_VALUES: Final = 1 << 20


def rows(
    path: Path, form: Format, builder: Builder, report: Report, progress: sources.Progress | None, fast: bool
) -> Iterator[Rows]:
    """All rows of a file, in its order.

    :param fast: let pyarrow read what is plain; the rows and the report are the same without.
    :raises TraceError: the file cannot be read, its header lacks a field, or too much is malformed.
    """
    fast = fast and columnwise.suits(form)
    layout: Sequence[Column] | None = form.columns if form.header == "none" else None
    for block in sources.blocks(path, progress):
        lines, numbers = _data_lines(form, block, report)
        if layout is None and len(numbers):
            first = (lines if lines is not None else block.lines())[0]
            layout, named = layout_of(form, first, str(path), int(numbers[0]))
            if named:
                report.comments += 1
                lines, numbers = (lines if lines is not None else block.lines())[1:], numbers[1:]
        if layout is None or not len(numbers):
            continue
        for table, faults in _tables(form, layout, block.data if lines is None else lines, numbers, fast):
            good, broken = judge(layout, form.checks, table)
            for fault in sorted((*faults, *broken)):
                report.fault(fault)
            report.read += len(good)
            report.longer += table.longer
            report.check()
            for part in _portions(form, good):
                if (found := builder.add(part)) is not None:
                    yield found
    if (found := builder.end()) is not None:
        yield found


def _portions(form: Format, table: Table) -> Iterator[Table]:
    if form.expands is None or not len(table):
        yield from (table,) * bool(len(table))
        return
    for start, end in slices(np.cumsum(table[form.expands].astype(np.int64)), _VALUES):
        yield table.take(slice(start, end))


def _data_lines(form: Format, block: sources.Block, report: Report) -> tuple[list[bytes] | None, Indices]:
    """The lines that are neither blank nor comments; None in place of them where that is all of the block."""
    data = block.data
    count = data.count(b"\n")
    report.lines += count
    numbers = np.arange(block.first_line, block.first_line + count, dtype=np.int64)
    comment = form.comment
    if (
        not data.startswith(b"\n")
        and b"\n\n" not in data
        and b" \n" not in data
        and (comment is None or (comment not in data))
    ):
        return None, numbers
    lines = block.lines()
    kept = [i for i, line in enumerate(lines) if not is_comment(line, comment)]
    if len(kept) == len(lines):
        return None, numbers
    report.comments += len(lines) - len(kept)
    return [lines[i] for i in kept], numbers[kept]


def is_comment(line: bytes, comment: bytes | None) -> bool:
    start = line.lstrip()
    return not start or (comment is not None and start.startswith(comment))


def _tables(
    form: Format, layout: Sequence[Column], lines: bytes | Sequence[bytes], numbers: Indices, fast: bool
) -> Iterator[tuple[Table, list[Fault]]]:
    """Lines as columns; where pyarrow refuses, halves are tried until only the lines around the fault are left."""
    if not fast:
        yield linewise.parse(form, layout, _split(lines), numbers)
        return
    data = lines if isinstance(lines, bytes) else b"".join(line + b"\n" for line in lines)
    table = columnwise.parse(form, layout, data, numbers)
    if table is not None:
        yield table, []
        return
    separate = _split(lines)
    if len(separate) <= _FEW:
        yield linewise.parse(form, layout, separate, numbers)
        return
    half = len(separate) // 2
    yield from _tables(form, layout, separate[:half], numbers[:half], fast)
    yield from _tables(form, layout, separate[half:], numbers[half:], fast)


def _split(lines: bytes | Sequence[bytes]) -> Sequence[bytes]:
    return lines[:-1].split(b"\n") if isinstance(lines, bytes) else lines


def layout_of(form: Format, line: bytes, file: str, number: int) -> tuple[Sequence[Column], bool]:
    """What the first line says of the columns, and whether it is a header."""
    try:
        names = [cell.decode("utf-8", "replace").strip() for cell in header_cells(form, line)]
    except Malformed as error:
        raise TraceError(file, error.problem, line=number, field=error.field) from None
    if form.header == "optional" and not (
        len(names) == len(form.columns)
        and all(name in (c.name, *c.aliases) for c, name in zip(form.columns, names, strict=True))
    ):
        return form.columns, False
    present = set(names)
    for column in form.columns:
        required = not column.optional and column.form is not Form.IGNORED
        if required and not present & {column.name, *column.aliases}:
            raise TraceError(file, "is missing from the header", line=number, field=column.name)
    by_name = {name: column for column in form.columns for name in (column.name, *column.aliases)}
    layout: list[Column] = []
    seen: set[str] = set()
    for i, name in enumerate(names):
        known = by_name.get(name)
        if known is None:
            layout.append(Column(f"{i + 1}: {name}", Form.IGNORED))
            continue
        if known.name in seen:
            raise TraceError(file, "stands twice in the header", line=number, field=known.name)
        seen.add(known.name)
        layout.append(known)
    return layout, True


def header_cells(form: Format, line: bytes) -> list[bytes]:
    """The cells of a header, however many."""
    if b'"' in line:
        return linewise.quoted("header", line, form.delimiter or b" ")
    return line.split(form.delimiter)
