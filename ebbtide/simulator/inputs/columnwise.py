"""Text to columns a block at a time, by pyarrow; refuses what is not plain, which `linewise` then reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ebbtide.simulator.extras import Later
from ebbtide.simulator.inputs.batches import Indices, Ragged
from ebbtide.simulator.inputs.tables import Column, Form, Format, Table

#: An extra: everything but Parquet and zstd goes without it, slower.
pyarrow: Any = Later("pyarrow", "pyarrow.compute", "pyarrow.csv")

AVAILABLE: Final = bool(pyarrow)
_SPACE, _LINE_FEED, _TAB = 32, 10, 9


def suits(form: Format) -> bool:
    """Whether lines of the format can be read this way at all."""
    return AVAILABLE and form.split is None and all(c.form is not Form.TIME for c in form.columns)


def parse(form: Format, layout: Sequence[Column], data: bytes, numbers: Indices) -> Table | None:
    """Turn whole lines into columns, not yet judged.

    :param data: the lines, each with its line feed; no comments.
    :param numbers: the line number of each.
    :returns: None if anything about the lines is out of the ordinary.
    """
    if b'"' in data or b"\r" in data:
        return None
    if form.delimiter is None:
        narrowed = _single_spaces(data)
        if narrowed is None:
            return None
        data = narrowed
    names = [c.name for c in layout]
    if form.longer:
        cells = len(data[: data.find(b"\n")].split(form.delimiter))
        names += [f"behind the last: {place}" for place in range(len(names), cells)]
    wanted = [c for c in layout if c.form is not Form.IGNORED]
    try:
        table = pyarrow.csv.read_csv(
            pyarrow.py_buffer(data),
            read_options=pyarrow.csv.ReadOptions(column_names=names, block_size=len(data) + 1, use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=(form.delimiter or b" ").decode(), quote_char=False, ignore_empty_lines=True
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={c.name: _type(c) for c in layout},
                include_columns=[c.name for c in wanted],
                null_values=[""],
                strings_can_be_null=False,
            ),
        )
        if table.num_rows != len(numbers):
            return None
        columns = {}
        for column in wanted:
            values = _values(column, table[column.name].combine_chunks())
            if values is None:
                return None
            columns[column.name] = values
    except (pyarrow.ArrowException, ValueError):
        return None
    return Table(columns, numbers, len(numbers) if len(names) > len(layout) else 0)


def _type(column: Column) -> Any:
    plain = column.form is Form.NUMBER and not column.spelled
    return pyarrow.float64() if plain else pyarrow.string()


def _values(column: Column, array: Any) -> Any:
    """One column as NumPy; None for a value that is none."""
    compute = pyarrow.compute
    if column.form is Form.TEXT:
        return array.to_numpy(zero_copy_only=False)
    if column.form is Form.CHOICE:
        places = compute.index_in(array, value_set=pyarrow.array(column.choices, pyarrow.string()))
        if places.null_count and places.null_count != compute.sum(compute.equal(array, "")).as_py():
            return None
        return _floats(places.cast(pyarrow.float64()))
    if column.form is Form.LIST:
        return _lists(array)
    if column.spelled:
        for word, value in column.spelled.items():
            array = compute.if_else(compute.equal(array, word), repr(float(value)), array)
        array = compute.if_else(compute.equal(array, ""), None, array).cast(pyarrow.float64())
    if not compute.all(compute.is_finite(array), skip_nulls=True).as_py() and array.null_count < len(array):
        return None
    return _floats(array)


def _lists(array: Any) -> Ragged | None:
    compute = pyarrow.compute
    if compute.any(compute.equal(array, "")).as_py():
        return None
    lists = compute.split_pattern(array, ";")
    flat = lists.flatten().cast(pyarrow.float64())
    if flat.null_count or not compute.all(compute.is_finite(flat)).as_py():
        return None
    lengths = compute.list_value_length(lists).to_numpy(zero_copy_only=False)
    return Ragged.of(_floats(flat), lengths.astype(np.int64))


def _floats(array: Any) -> Any:
    """Floats of our own: what pyarrow lends is read-only and holds its whole block."""
    return np.array(array.to_numpy(zero_copy_only=False), np.float64)


def _single_spaces(data: bytes) -> bytes | None:
    """Lines with one space between fields and none around them; None where there are other control characters."""
    raw = np.frombuffer(data, np.uint8)
    space = (raw == _SPACE) | (raw == _TAB)
    end = raw == _LINE_FEED
    if ((raw < _SPACE) & ~space & ~end).any():
        return None
    before = np.ones(len(raw), bool)
    before[1:] = space[:-1] | end[:-1]
    # A space stays if neither another, nor the beginning or the end of its line, is next to it.
    drop = space & before
    kept = raw[~drop]
    ends = kept == _LINE_FEED
    trailing = np.zeros(len(kept), bool)
    trailing[:-1] = (kept[:-1] == _SPACE) | (kept[:-1] == _TAB)
    trailing[:-1] &= ends[1:]
    narrow = kept[~trailing]
    if (narrow == _TAB).any():
        narrow = np.where(narrow == _TAB, _SPACE, narrow).astype(np.uint8)
    return bytes(narrow.tobytes())
