"""Parquet: read batch by batch, judged by the same rules as text; an error names the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.extras import Later
from ebbtide.simulator.inputs import sources
from ebbtide.simulator.inputs.batches import Ragged
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import (
    BUFFER,
    Builder,
    Check,
    Column,
    Form,
    Rows,
    Table,
    judge,
)

pyarrow: Any = Later("pyarrow", "pyarrow.compute", "pyarrow.parquet")

MAGIC: Final = b"PAR1"
_BATCH_ROWS: Final = 65_536


@dataclass(frozen=True, slots=True)
class ParquetFormat:
    """A format in Parquet; columns by name, others are ignored."""

    name: str
    title: str
    kind: str
    columns: tuple[Column, ...]
    builder: type[Builder]
    checks: tuple[Check, ...] = ()
    defaults: Mapping[str, float | str] = field(default_factory=dict)
    order: str = BUFFER
    calendar: bool = False
    unit: str | None = None


def names(path: Path) -> list[str]:
    """The columns of a Parquet file.

    :raises TraceError: it is none, or pyarrow is missing.
    """
    return [str(name) for name in _open(path).schema_arrow.names]


def rows(
    path: Path, form: ParquetFormat, builder: Builder, report: Report, progress: sources.Progress | None
) -> Iterator[Rows]:
    """All rows of a file, in its order.

    :raises TraceError: it cannot be read, lacks a column or has one of another type, or too much is malformed.
    """
    report.place = "row"
    file = _open(path)
    present = set(file.schema_arrow.names)
    for column in form.columns:
        if column.name not in present and not column.optional:
            raise TraceError(str(path), "is no column of the file", line=1, field=column.name, place="row")
    wanted = [c for c in form.columns if c.name in present]
    total = file.metadata.num_rows
    done = 0
    try:
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=[c.name for c in wanted])
        for batch in batches:
            columns = {c.name: _column(path, c, batch.column(c.name), done) for c in wanted}
            table = Table(columns, np.arange(done + 1, done + 1 + batch.num_rows, dtype=np.int64))
            done += batch.num_rows
            report.lines += batch.num_rows
            good, faults = judge(wanted, form.checks, table)
            for fault in faults:
                report.fault(fault)
            report.read += len(good)
            report.check()
            if progress is not None:
                progress(done, total)
            if len(good) and (found := builder.add(good)) is not None:
                yield found
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TraceError(str(path), f"is broken: {_first(error)}", line=done + 1, place="row") from error
    if (found := builder.end()) is not None:
        yield found


def _open(path: Path) -> Any:
    if not pyarrow:
        raise TraceError(str(path), "is Parquet, which needs pyarrow: install ebbtide[sim]")
    sources.open_raw(path).close()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TraceError(str(path), f"is no Parquet file: {_first(error)}", line=1, place="row") from error


def _column(path: Path, column: Column, array: Any, done: int) -> Any:
    types = pyarrow.types
    kind = array.type
    if types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if column.form is Form.TEXT:
        if types.is_integer(kind):
            array = array.cast(pyarrow.string())
        elif not (types.is_string(kind) or types.is_large_string(kind)):
            raise _wrong(path, column, kind, "text", done)
        return array.fill_null("").to_numpy(zero_copy_only=False)
    if column.form is Form.CHOICE:
        return _choice(path, column, array, done)
    if column.form is Form.LIST:
        if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_floating(kind.value_type):
            raise _wrong(path, column, kind, "lists of floats", done)
        lengths = pyarrow.compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        flat = np.array(array.flatten().to_numpy(zero_copy_only=False), np.float64)
        # What is no number in a list makes its row one that holds nothing, which the rules refuse.
        ragged = Ragged.of(flat, lengths.astype(np.int64))
        return _without_holes(ragged)
    if types.is_timestamp(kind):
        return (
            array.cast(pyarrow.timestamp("us"))
            .cast(pyarrow.int64())
            .cast(pyarrow.float64())
            .to_numpy(zero_copy_only=False)
            / 1e6
        )
    if not (types.is_integer(kind) or types.is_floating(kind)):
        raise _wrong(path, column, kind, "numbers", done)
    numbers = np.array(array.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
    return numbers / 1000 if column.form is Form.TIME else numbers


def _choice(path: Path, column: Column, array: Any, done: int) -> Any:
    if not (pyarrow.types.is_string(array.type) or pyarrow.types.is_large_string(array.type)):
        raise _wrong(path, column, array.type, "text", done)
    compute = pyarrow.compute
    places = compute.index_in(array, value_set=pyarrow.array(column.choices, array.type))
    empty = compute.fill_null(compute.equal(array, ""), True)
    # A word that is no choice is a place beyond the last, which the rules refuse.
    known = compute.if_else(compute.invert(empty), compute.fill_null(places, len(column.choices)), None)
    return np.array(known.cast(pyarrow.float64()).to_numpy(zero_copy_only=False), np.float64)


def _without_holes(ragged: Ragged) -> Ragged:
    bad = ~np.isfinite(ragged.values)
    if not bad.any():
        return ragged
    rows_of = np.repeat(np.arange(len(ragged)), ragged.lengths)
    spoiled = np.zeros(len(ragged), bool)
    spoiled[rows_of[bad]] = True
    return Ragged.of(ragged.values[~spoiled[rows_of]], np.where(spoiled, 0, ragged.lengths))


def _wrong(path: Path, column: Column, kind: Any, wanted: str, done: int) -> TraceError:
    return TraceError(str(path), f"holds {kind}, not {wanted}", line=done + 1, field=column.name, place="row")


def _first(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
