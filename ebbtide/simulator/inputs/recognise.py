"""Recognition of a file's format by its content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter, TraceError
from ebbtide.simulator.inputs import documents, linewise, parquet, reading, sources
from ebbtide.simulator.inputs.formats.registry import ALL, AnyFormat
from ebbtide.simulator.inputs.tables import Format, judge

#: Lines that are tried.
_TRIED: Final = 200
#: Share of them that a format must read.
_LEAST: Final = 0.5


def named(name: str) -> AnyFormat:
    """The format of a name.

    :raises InvalidParameter: there is none.
    """
    if name not in ALL:
        raise InvalidParameter("format", f"{name!r} is unknown; there are {', '.join(ALL)}")
    return ALL[name]


def recognise(path: Path) -> AnyFormat:
    """The format that reads most of the first lines; of several the one that stands first in `registry.ALL`.

    Where none reads half of them: the only one whose header is there.

    :raises TraceError: the file cannot be read, or is of no format.
    """
    if sources.magic(path) == parquet.MAGIC:
        present = set(parquet.names(path))
        for form in ALL.values():
            if isinstance(form, parquet.ParquetFormat) and all(
                c.name in present for c in form.columns if not c.optional
            ):
                return form
        raise TraceError(
            str(path),
            f"is Parquet with columns that no format has: {', '.join(sorted(present))}",
            line=1,
            field="format",
            place="row",
        )
    lines = sources.head(path, _TRIED)
    best: tuple[float, Format] | None = None
    for form in ALL.values():
        if isinstance(form, Format) and (share := _share(form, lines)) >= _LEAST and (best is None or share > best[0]):
            best = share, form
    if best is not None:
        return best[1]
    if any(line.lstrip()[:1] in (b"{", b"[") for line in lines[:1]):
        document = documents.load(path)
        for form in ALL.values():
            if isinstance(form, documents.DocumentFormat) and form.recognises(document):
                return form
    headed = [form for form in ALL.values() if isinstance(form, Format) and _has_header(form, lines)]
    if len(headed) == 1:
        # Its reader says what is wrong with the lines.
        return headed[0]
    problem = "is none that is known" if lines else "is none: the file has no lines"
    raise TraceError(str(path), f"{problem}; there are {', '.join(ALL)}", line=1, field="format")


def another(path: Path, name: str) -> str | None:
    """The format of a file that is in another than this one, which reads less than half of its first lines; else None.

    :raises InvalidParameter: there is no such format.
    """
    form = named(name)
    try:
        text = form if isinstance(form, Format) and sources.magic(path) != parquet.MAGIC else None
        if text is not None and _share(text, sources.head(path, _TRIED)) >= _LEAST:
            return None
        found = recognise(path)
    except TraceError:
        # Whoever reads it says what is wrong.
        return None
    return None if found is form else found.name


def _has_header(form: Format, lines: Sequence[bytes]) -> bool:
    """Whether the first line is a header of the format."""
    data = [line for line in lines if not reading.is_comment(line, form.comment)]
    if form.header == "none" or not data:
        return False
    try:
        return reading.layout_of(form, data[0], "", 1)[1]
    except TraceError:
        return False


def _share(form: Format, lines: Sequence[bytes]) -> float:
    """Which share of the lines the format reads; 1 for a header that it knows and nothing else."""
    data = [line for line in lines if not reading.is_comment(line, form.comment)]
    if not data:
        return 0.0
    columns = form.columns
    if form.header != "none":
        try:
            found, has_header = reading.layout_of(form, data[0], "", 1)
        except TraceError:
            return 0.0
        columns = tuple(found)
        data = data[1:] if has_header else data
        if has_header and not data:
            return 1.0
    table, _ = linewise.parse(form, columns, data, np.arange(1, len(data) + 1, dtype=np.int64))
    good, _ = judge(columns, form.checks, table)
    # Who knows all columns goes before who reads over some.
    return len(good) / len(data) * (1.0 if not table.longer else 0.99)
