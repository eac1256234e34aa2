"""Batches out in the own format: csv or Parquet by the file's ending, whole or not at all."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from ebbtide.files import replacing
from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.extras import Later
from ebbtide.simulator.inputs.batches import HINTS, KINDS, TEXTS, Batch, Floats, Ragged

pyarrow: Any = Later("pyarrow", "pyarrow.parquet")

#: Characters that would end a line of csv, which has a row a line.
_BREAKS: Final = re.compile("[\n\r]")
_WHOLE: Final = 1e15


def write(path: Path, kind: str, batches: Iterable[Batch]) -> int:
    """Write rows of one kind; a float comes back as the same float.

    :param path: ends in ``.csv`` or ``.parquet``; it is replaced when all has been written, and left alone on an error.
    :returns: how many rows.
    :raises TraceError: another ending, a text that csv cannot hold, or the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise TraceError(str(path), "must end in .csv or .parquet")
    try:
        with replacing(path, 0o666, durable=False) as file, _writer(suffix, Path(file.name), kind) as put:
            rows = 0
            for batch in batches:
                put(batch)
                rows += len(batch)
    except OSError as error:
        raise TraceError(str(path), f"cannot be written: {error}") from error
    return rows


def _writer(suffix: str, path: Path, kind: str) -> Any:
    return _csv(path, kind) if suffix == ".csv" else _parquet(path, kind)


@contextmanager
def _csv(path: Path, kind: str) -> Iterator[Callable[[Batch], None]]:
    names = [field.name for field in fields(KINDS[kind])]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)

        def put(batch: Batch) -> None:
            writer.writerows(zip(*(_cells(path, name, getattr(batch, name)) for name in names), strict=True))

        yield put


def _cells(path: Path, name: str, values: Any) -> Iterator[str]:
    if isinstance(values, Ragged):
        numbers = [_number(v) for v in values.values.tolist()]
        offsets = values.offsets.tolist()
        return (";".join(numbers[a:b]) for a, b in pairwise(offsets))
    if name == "priority":
        return (HINTS[hint] for hint in values.tolist())
    if name in TEXTS:
        return (_text(path, name, text) for text in values)
    return (_number(v) for v in values.tolist())


def _text(path: Path, name: str, text: str) -> str:
    if _BREAKS.search(text):
        raise TraceError(str(path), f"has a line break in {text[:40]!a}: write Parquet instead", field=name)
    return text


def _number(value: float) -> str:
    """The shortest decimal that is this float; empty for what is not said."""
    if math.isnan(value):
        return ""
    if value.is_integer() and abs(value) < _WHOLE:
        return "0" if value == 0 else str(int(value))
    return repr(value)


@contextmanager
def _parquet(path: Path, kind: str) -> Iterator[Callable[[Batch], None]]:
    if not pyarrow:
        raise TraceError(str(path), "is Parquet, which needs pyarrow: install ebbtide[sim]")
    names = [field.name for field in fields(KINDS[kind])]
    schema = pyarrow.schema([(name, _type(name)) for name in names], metadata={"ebbtide": kind})
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:

        def put(batch: Batch) -> None:
            columns = [_array(name, getattr(batch, name)) for name in names]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))

        yield put


def _type(name: str) -> Any:
    if name in TEXTS:
        return pyarrow.string()
    if name == "priority":
        return pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
    return pyarrow.list_(pyarrow.float64()) if name == "task_runtime_s" else pyarrow.float64()


def _array(name: str, values: Any) -> Any:
    if name == "task_runtime_s":
        return _lists(values)
    if name == "priority":
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array(values, pyarrow.int8()), pyarrow.array(HINTS))
    if name in TEXTS:
        return pyarrow.array(values, pyarrow.string())
    return pyarrow.array(values, pyarrow.float64(), from_pandas=True)


def _lists(values: Ragged) -> Any:
    start = int(values.offsets[0])
    flat: Floats = values.values[start : int(values.offsets[-1])]
    offsets = pyarrow.array((values.offsets - start).astype(np.int32), pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(flat, pyarrow.float64()))
